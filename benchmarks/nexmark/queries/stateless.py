"""Queries that look at one bid at a time: q0, q1, q2, q10, q13, q14, q21, q22.

References compute in another way than the programs where there is one.
"""

from __future__ import annotations

from decimal import Decimal

import polars as pl
import pyarrow as pa

import tidegate as tg
from nexmark.query import Events, Query, Rows

RESULT = ("auction", "bidder", "price", "date_time", "extra")
EURO = pl.Decimal(23, 3)
SIDE_ROWS = 10_000
KNOWN_CHANNELS = ("apple", "google", "facebook", "baidu")
CHANNEL_ID = r"(&|^)channel_id=([^&]*)"


def _q0(events: Events) -> tg.Stream:
    return events.bids.select(*RESULT)


def _q0_reference(rows: Rows) -> pl.DataFrame:
    return rows.bids.select(RESULT).collect()


def euros() -> pl.Expr:
    """Thousandths of a price in euros are a whole number, so the decimal is exact."""
    return (pl.col("price") * 908).cast(pl.Decimal(23, 0)) * pl.lit(Decimal("0.001"))


def _q1(events: Events) -> tg.Stream:
    return events.bids.select("auction", "bidder", euros().cast(EURO).alias("price"), "date_time", "extra")


def _q1_reference(rows: Rows) -> pl.DataFrame:
    bids = rows.bids.select(RESULT).collect()
    euros = [Decimal(price) * Decimal("0.908") for price in bids["price"]]
    return bids.with_columns(price=pl.Series(euros, dtype=EURO))


def _q2(events: Events) -> tg.Stream:
    return events.bids.filter(pl.col("auction") % 123 == 0).select("auction", "price")


def _q2_reference(rows: Rows) -> pl.DataFrame:
    bids = rows.bids.collect()
    every = pl.DataFrame({"auction": range(0, max(bids["auction"]) + 1, 123)})
    return bids.join(every, on="auction", how="semi").select("auction", "price")


def _q10(events: Events) -> tg.Stream:
    time = pl.col("date_time")
    return events.bids.select(*RESULT, time.dt.strftime("%Y-%m-%d").alias("dt"), time.dt.strftime("%H:%M").alias("hm"))


def _q10_reference(rows: Rows) -> pl.DataFrame:
    time = pl.col("date_time").cast(pl.String)
    return rows.bids.select(*RESULT, dt=time.str.slice(0, 10), hm=time.str.slice(11, 5)).collect()


def _side_input() -> pa.Table:
    """A row for each remainder."""
    return pa.table({"key": range(SIDE_ROWS), "value": [str(key) for key in range(SIDE_ROWS)]})


def _q13(events: Events) -> tg.Stream:
    bids = events.bids.select("auction", "bidder", "price", "date_time", key=pl.col("auction") % SIDE_ROWS)
    found = bids.lookup_join(_side_input, on="key", how="inner", name="side input")
    return found.select(pl.all().exclude("key"))


def _q13_reference(rows: Rows) -> pl.DataFrame:
    value = (pl.col("auction") % SIDE_ROWS).cast(pl.String).alias("value")
    return rows.bids.select("auction", "bidder", "price", "date_time", value).collect()


def _q14(events: Events) -> tg.Stream:
    hour = pl.col("date_time").dt.hour()
    kind = (
        pl.when(hour.is_between(8, 18))
        .then(pl.lit("dayTime"))
        .when((hour <= 6) | (hour >= 20))
        .then(pl.lit("nightTime"))
        .otherwise(pl.lit("otherTime"))
    )
    thousandths = pl.col("price") * 908
    wanted = events.bids.filter((thousandths > 1_000_000_000) & (thousandths < 50_000_000_000))
    return wanted.select(
        "auction",
        "bidder",
        euros().cast(EURO).alias("price"),
        kind.alias("bid_time_type"),
        "date_time",
        "extra",
        pl.col("extra").str.count_matches("c", literal=True).cast(pl.Int64).alias("c_counts"),
    )


def _q14_reference(rows: Rows) -> pl.DataFrame:
    bids = _q1_reference(rows).filter(pl.col("price") > 1_000_000, pl.col("price") < 50_000_000)
    hours = ["nightTime"] * 7 + ["otherTime"] + ["dayTime"] * 11 + ["otherTime"] + ["nightTime"] * 4
    return bids.select(
        "auction",
        "bidder",
        "price",
        pl.Series("bid_time_type", [hours[time.hour] for time in bids["date_time"]], pl.String),
        "date_time",
        "extra",
        pl.Series("c_counts", [extra.count("c") for extra in bids["extra"]], pl.Int64),
    )


def _q21(events: Events) -> tg.Stream:
    channel = pl.col("channel").str.to_lowercase()
    found = pl.col("url").str.extract(CHANNEL_ID, 2)
    numbers = {name: str(number) for number, name in enumerate(KNOWN_CHANNELS)}
    known = channel.replace_strict(numbers, default=None, return_dtype=pl.String)
    with_id = events.bids.select("auction", "bidder", "price", "channel", known.fill_null(found).alias("channel_id"))
    return with_id.filter(pl.col("channel_id").is_not_null())


def _q21_reference(rows: Rows) -> pl.DataFrame:
    bids = rows.bids.collect()
    ids: list[str | None] = []
    for channel, url in zip(bids["channel"], bids["url"], strict=True):
        if channel.lower() in KNOWN_CHANNELS:
            ids.append(str(KNOWN_CHANNELS.index(channel.lower())))
        else:
            _, known, rest = url.partition("&channel_id=")
            ids.append(rest.split("&")[0] if known else None)
    found = bids.select("auction", "bidder", "price", "channel", pl.Series("channel_id", ids, pl.String))
    return found.drop_nulls("channel_id")


def _q22(events: Events) -> tg.Stream:
    folders = pl.col("url").str.splitn("/", 7).struct
    return events.bids.select(
        "auction",
        "bidder",
        "price",
        "channel",
        *(folders.field(f"field_{place}").alias(f"dir{place - 2}") for place in (3, 4, 5)),
    )


def _q22_reference(rows: Rows) -> pl.DataFrame:
    bids = rows.bids.collect()
    parts = [url.split("/") for url in bids["url"]]
    folders = [pl.Series(f"dir{place - 2}", [part[place] for part in parts], pl.String) for place in (3, 4, 5)]
    return bids.select("auction", "bidder", "price", "channel").with_columns(*folders)


QUERIES = (
    Query("q0", "pass through", ("bid",), _q0, _q0_reference),
    Query("q1", "currency conversion", ("bid",), _q1, _q1_reference),
    Query("q2", "selection", ("bid",), _q2, _q2_reference),
    Query("q10", "log to partitions", ("bid",), _q10, _q10_reference),
    Query("q13", "bounded side input", ("bid",), _q13, _q13_reference),
    Query("q14", "calculation", ("bid",), _q14, _q14_reference),
    Query("q21", "add channel id", ("bid",), _q21, _q21_reference),
    Query("q22", "folders of the url", ("bid",), _q22, _q22_reference),
)
