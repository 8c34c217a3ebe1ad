"""`Query`: a program beside what must come out of it, and `Events`: the streams that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import polars as pl

import tidegate as tg
from nexmark.source import NexmarkSource, table
from nexmark.workload import KINDS, Workload

WATERMARK_DELAY_MS = 4_000
"""As published; more only where events are further out of order."""


@dataclass(frozen=True)
class Query:
    """A program over the streams of `Events`, and the same computed by polars over all rows.

    `keys` are those of an updating result, whose newest row of each key counts. `comparable` says what of a result is
    determined by the events, whatever their order; it is all unless it says otherwise.
    """

    name: str
    title: str
    reads: tuple[str, ...]
    program: Callable[[Events], tg.Stream]
    reference: Callable[[Rows], pl.DataFrame]
    keys: tuple[str, ...] = ()
    comparable: Callable[[pl.DataFrame], pl.DataFrame] = lambda rows: rows


class Events:
    """The streams of people, auctions and bids of a workload in an environment, with event time.

    Kinds that the query does not read are made and dropped if `all_kinds`: see `NexmarkSource`.
    """

    def __init__(
        self, env: tg.StreamEnvironment, workload: Workload, query: Query, parts: int = 2, all_kinds: bool = False
    ) -> None:
        self.env = env
        self.workload = workload
        self._parts = parts
        self._first = query.reads[0]
        self._also = tuple(kind for kind in KINDS if kind not in query.reads) if all_kinds else ()

    def _stream(self, kind: str) -> tg.Stream:
        delay_ms = max(WATERMARK_DELAY_MS, self.workload.disorder_ms)
        also = self._also if kind == self._first else ()
        source = NexmarkSource(self.workload, kind, self._parts, also)
        rows = self.env.from_source(source, name=kind, uid=kind)
        return rows.assign_timestamps("date_time", delay_ms, uid=f"{kind}-timestamps")

    @cached_property
    def people(self) -> tg.Stream:
        """id, name, email_address, credit_card, city, state, date_time, extra."""
        return self._stream("person")

    @cached_property
    def auctions(self) -> tg.Stream:
        """id, item_name, description, initial_bid, reserve, date_time, expires, seller, category, extra."""
        return self._stream("auction")

    @cached_property
    def bids(self) -> tg.Stream:
        """auction, bidder, price, channel, url, date_time, extra."""
        return self._stream("bid")


class Rows:
    """All rows of a workload, for references."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def _frame(self, kind: str) -> pl.LazyFrame:
        frame = pl.from_arrow(table(self.workload, kind))
        assert isinstance(frame, pl.DataFrame)
        return frame.lazy()

    @cached_property
    def people(self) -> pl.LazyFrame:
        """As in `Events`."""
        return self._frame("person")

    @cached_property
    def auctions(self) -> pl.LazyFrame:
        """As in `Events`."""
        return self._frame("auction")

    @cached_property
    def bids(self) -> pl.LazyFrame:
        """As in `Events`."""
        return self._frame("bid")
