"""Queries that keep figures of each key for ever, and tell them again when they change: q15, q16, q17."""

from __future__ import annotations

from typing import Any

import polars as pl

import tidegate as tg
from nexmark.query import Events, Query, Rows

RANKS = (10_000, 1_000_000)
"""Prices from which a bid is of the second, and of the third rank."""


def _ranks() -> tuple[pl.Expr, ...]:
    price = pl.col("price")
    return (price < RANKS[0], (price >= RANKS[0]) & (price < RANKS[1]), price >= RANKS[1])


def _day() -> pl.Expr:
    return pl.col("date_time").dt.strftime("%Y-%m-%d").alias("day")


def _q17(events: Events) -> tg.Stream:
    ranks = [rank.alias(f"rank{number}") for number, rank in enumerate(_ranks(), start=1)]
    bids = events.bids.select("auction", _day(), "price", "date_time", *ranks)
    return bids.key_by("auction", "day").aggregate(
        total_bids=tg.count(),
        rank1_bids=tg.count().where("rank1"),
        rank2_bids=tg.count().where("rank2"),
        rank3_bids=tg.count().where("rank3"),
        min_price=tg.min("price"),
        max_price=tg.max("price"),
        avg_price=tg.mean("price"),
        sum_price=tg.sum("price"),
    )


def _q17_reference(rows: Rows) -> pl.DataFrame:
    price = pl.col("price")
    day = pl.col("date_time").cast(pl.String).str.slice(0, 10).alias("day")
    counts = {f"rank{number}_bids": rank.sum().cast(pl.Int64) for number, rank in enumerate(_ranks(), start=1)}
    return (
        rows.bids.group_by("auction", day)
        .agg(
            total_bids=pl.len().cast(pl.Int64),
            **counts,
            min_price=price.min(),
            max_price=price.max(),
            avg_price=price.mean(),
            sum_price=price.sum(),
        )
        .collect()
    )


def _distinct() -> dict[str, Any]:
    """Bids, bidders and auctions, of all bids and by rank."""
    aggregates: dict[str, Any] = {}
    for what in ("bids", "bidders", "auctions"):
        counted = tg.count() if what == "bids" else tg.count_distinct(what[:-1])
        aggregates[f"total_{what}"] = counted
        for number, rank in enumerate(_ranks(), start=1):
            aggregates[f"rank{number}_{what}"] = counted.where(rank)
    return aggregates


def _distinct_reference(rows: Rows, *keys: pl.Expr) -> pl.LazyFrame:
    counts: list[pl.Expr] = []
    for name, mask in (("total", pl.lit(True)), *((f"rank{n}", rank) for n, rank in enumerate(_ranks(), start=1))):
        counts.append(pl.col("price").filter(mask).len().cast(pl.Int64).alias(f"{name}_bids"))
        values = {what: pl.col(what).filter(mask).n_unique().cast(pl.Int64) for what in ("bidder", "auction")}
        counts.extend(value.alias(f"{name}_{what}s") for what, value in values.items())
    return rows.bids.group_by(*keys).agg(*counts)


def _q15(events: Events) -> tg.Stream:
    bids = events.bids.select("auction", "bidder", "price", _day(), "date_time")
    return bids.key_by("day").aggregate(uid="figures", **_distinct())


def _q15_reference(rows: Rows) -> pl.DataFrame:
    return _distinct_reference(rows, pl.col("date_time").cast(pl.String).str.slice(0, 10).alias("day")).collect()


def _q16(events: Events) -> tg.Stream:
    bids = events.bids.select("channel", "auction", "bidder", "price", _day(), "date_time")
    figures = bids.key_by("channel", "day").aggregate(uid="figures", last=tg.max("date_time"), **_distinct())
    return figures.select(pl.all().exclude("last"), minute=pl.col("last").dt.strftime("%H:%M"))


def _q16_reference(rows: Rows) -> pl.DataFrame:
    text = pl.col("date_time").cast(pl.String)
    keys = pl.col("channel"), text.str.slice(0, 10).alias("day")
    minutes = rows.bids.group_by(*keys).agg(minute=text.str.slice(11, 5).max())
    return _distinct_reference(rows, *keys).join(minutes, on=["channel", "day"]).collect()


QUERIES = (
    Query("q15", "figures of each day", ("bid",), _q15, _q15_reference, keys=("day",)),
    Query("q16", "figures of each channel and day", ("bid",), _q16, _q16_reference, keys=("channel", "day")),
    Query("q17", "figures of each auction and day", ("bid",), _q17, _q17_reference, keys=("auction", "day")),
)
