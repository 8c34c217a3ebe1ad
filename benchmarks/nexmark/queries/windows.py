"""Queries over windows: q5, q7, q8, q11 of event time, and q12 of processing time."""

from __future__ import annotations

import polars as pl

import tidegate as tg
from nexmark.query import Events, Query, Rows

WINDOW_MS = 10_000
SLIDE_MS = 2_000
GAP_MS = 10_000

Q7 = ("auction", "price", "bidder", "date_time", "extra")


def _q7(events: Events) -> tg.Stream:
    windows = events.bids.select(*Q7).window(tg.Tumbling(WINDOW_MS))
    return windows.top_n(1, by="price", ties=True, name="highest bids", uid="highest").select(*Q7)


def _q7_reference(rows: Rows) -> pl.DataFrame:
    window = pl.col("date_time").dt.truncate("10s").alias("window")
    highest = rows.bids.group_by(window).agg(pl.col("price").max())
    return rows.bids.with_columns(window).join(highest, on=["window", "price"]).select(Q7).collect()


Q5 = ("auction", "num")


def _end(size_ms: int) -> pl.Expr:
    """The end of the tumbling window that a row belongs to, in ms."""
    return (pl.col("date_time").dt.timestamp("ms") // size_ms + 1) * size_ms


def _q5(events: Events) -> tg.Stream:
    windows = events.bids.key_by("auction").window(tg.Sliding(WINDOW_MS, SLIDE_MS))
    counts = windows.aggregate(num=tg.count(), name="counts", uid="counts").key_by("window_start", "window_end")
    hottest = counts.top_n(1, by="num", ties=True, emit="final", name="hot items", uid="hot-items")
    return hottest.select(*Q5)


def _q5_reference(rows: Rows) -> pl.DataFrame:
    bids = rows.bids.select("auction", end=_end(SLIDE_MS)).with_columns(
        end=pl.concat_list([pl.col("end") + shift for shift in range(0, WINDOW_MS, SLIDE_MS)])
    )
    counts = bids.explode("end").group_by("auction", "end").agg(num=pl.len().cast(pl.Int64))
    best = pl.col("num") == pl.col("num").max().over("end")
    return counts.filter(best).select(Q5).collect()


Q8 = ("id", "name", "start_time")


def _q8(events: Events) -> tg.Stream:
    people = events.people.select("id", "name", "date_time")
    sellers = events.auctions.select("seller", "date_time")
    window, on = tg.Tumbling(WINDOW_MS), [("id", "seller")]
    both = people.join(sellers, on=on, window=window, how="semi", name="new sellers", uid="new-sellers")
    return both.select("id", "name", start_time="window_start")


def _q8_reference(rows: Rows) -> pl.DataFrame:
    start = pl.col("date_time").dt.truncate("10s").alias("start_time")
    people = rows.people.select("id", "name", start)
    sellers = rows.auctions.select(pl.col("seller").alias("id"), start).unique()
    return people.join(sellers, on=["id", "start_time"]).select(*Q8).collect()


Q11 = ("bidder", "bid_count", "start_time", "end_time")


def _q11(events: Events) -> tg.Stream:
    sessions = events.bids.key_by("bidder").window(tg.Session(GAP_MS))
    counts = sessions.aggregate(bid_count=tg.count(), name="sessions", uid="sessions")
    return counts.select("bidder", "bid_count", start_time="window_start", end_time="window_end")


def _q11_reference(rows: Rows) -> pl.DataFrame:
    time, gap = pl.col("date_time"), pl.duration(milliseconds=GAP_MS)
    begins = (time.diff() > gap).fill_null(True).cum_sum().over("bidder", order_by="date_time")
    sessions = rows.bids.sort("bidder", "date_time").with_columns(session=begins).group_by("bidder", "session")
    result = sessions.agg(bid_count=pl.len().cast(pl.Int64), start_time=time.min(), end_time=time.max() + gap)
    return result.select(Q11).collect()


def _q12(events: Events) -> tg.Stream:
    windows = events.bids.key_by("bidder").window(tg.Tumbling(WINDOW_MS), time="processing", fire_at_end=True)
    counts = windows.aggregate(bid_count=tg.count(), name="counts", uid="counts")
    return counts.select("bidder", "bid_count", start_time="window_start", end_time="window_end")


def _q12_reference(rows: Rows) -> pl.DataFrame:
    return rows.bids.group_by("bidder").agg(bid_count=pl.len().cast(pl.Int64)).collect()


def _of_all_windows(rows: pl.DataFrame) -> pl.DataFrame:
    """How the clock has divided the bids is open, but not how many there are."""
    return rows.group_by("bidder").agg(pl.col("bid_count").sum())


QUERIES = (
    Query("q5", "hot items", ("bid",), _q5, _q5_reference),
    Query("q7", "highest bid", ("bid",), _q7, _q7_reference),
    Query("q8", "monitor new users", ("person", "auction"), _q8, _q8_reference),
    Query("q11", "user sessions", ("bid",), _q11, _q11_reference),
    Query("q12", "windows of the clock", ("bid",), _q12, _q12_reference, comparable=_of_all_windows),
)
