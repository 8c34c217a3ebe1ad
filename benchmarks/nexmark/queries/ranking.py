"""Queries that keep some bids of each key, chosen by order: q18, q19. Their results are rows that replace others."""

from __future__ import annotations

import polars as pl

import tidegate as tg
from nexmark.query import Events, Query, Rows

TOP = 10


def _q18(events: Events) -> tg.Stream:
    return events.bids.key_by("bidder", "auction").deduplicate("date_time", keep="last", name="newest", uid="newest")


def _q18_reference(rows: Rows) -> pl.DataFrame:
    newest = pl.col("date_time").arg_max()
    return rows.bids.group_by("bidder", "auction").agg(pl.all().get(newest)).collect()


def _q19(events: Events) -> tg.Stream:
    top = events.bids.key_by("auction")
    return top.top_n(TOP, by="price", rank="rank_number", emit="update", name="highest", uid="highest")


def _q19_reference(rows: Rows) -> pl.DataFrame:
    rank = pl.col("price").rank("ordinal", descending=True).over("auction").cast(pl.Int64).alias("rank_number")
    return rows.bids.with_columns(rank).filter(pl.col("rank_number") <= TOP).collect()


def _without_ties(rows: pl.DataFrame) -> pl.DataFrame:
    """Which of several bids of one price comes first depends on how they came: ranks and prices do not."""
    return rows.select("auction", "rank_number", "price")


QUERIES = (
    Query("q18", "newest bid", ("bid",), _q18, _q18_reference, keys=("bidder", "auction")),
    Query("q19", "top ten", ("bid",), _q19, _q19_reference, keys=("auction", "rank_number"), comparable=_without_ties),
)
