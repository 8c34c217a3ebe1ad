"""Queries that keep some bids of each key, chosen by order: q18, q19. Their results are rows that replace others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa

import tidegate as tg
from nexmark import bids
from nexmark.query import Events, Query, Rows

Row = dict[str, Any]

TOP = 10


class Newest(tg.ProcessFunction):
    """The newest bid of each bidder for each auction. Of several at one moment the first that came."""

    def open(self, context: tg.ProcessContext) -> None:
        """When the newest so far was."""
        self._newest = context.state(tg.ValueState("newest", pa.int64()))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """A bid is newer, or nothing."""
        assert context.timestamp is not None
        newest = self._newest.value()
        if newest is None or context.timestamp > newest:
            self._newest.update(context.timestamp)
            yield row


def _q18(events: Events) -> tg.Stream:
    return events.bids.key_by("bidder", "auction").process(Newest(), schema=bids.SCHEMA, name="newest", uid="newest")


def _q18_reference(rows: Rows) -> pl.DataFrame:
    newest = pl.col("date_time").arg_max()
    return rows.bids.group_by("bidder", "auction").agg(pl.all().get(newest)).collect()


Q19 = bids.SCHEMA.append(pa.field("rank_number", pa.int64()))


class Highest(tg.ProcessFunction):
    """The highest bids of each auction, with their ranks. Of bids of one price, that which came first is higher."""

    def open(self, context: tg.ProcessContext) -> None:
        """The highest so far, in order."""
        self._top = context.state(tg.ListState("top", pa.struct(list(bids.SCHEMA))))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """A bid takes its place, and those behind it go one further."""
        top = list(self._top.get())
        place = sum(other["price"] >= row["price"] for other in top)
        if place == TOP:
            return
        top.insert(place, row)
        self._top.update(top[:TOP])
        for rank, other in enumerate(top[place:TOP], start=place + 1):
            yield {**other, "rank_number": rank}


def _q19(events: Events) -> tg.Stream:
    return events.bids.key_by("auction").process(Highest(), schema=Q19, name="highest", uid="highest")


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
