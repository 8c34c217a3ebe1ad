"""Queries over windows of event time: q5, q7, q8, q11.

Where rows are processed one by one, with state and timers, a batch is first reduced to the rows that can matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa

import tidegate as tg
from nexmark.query import Events, Query, Rows

Row = dict[str, Any]

WINDOW_MS = 10_000
SLIDE_MS = 2_000
GAP_MS = 10_000
MOMENT = pa.timestamp("ms")


def _end(size_ms: int) -> pl.Expr:
    """The end of the tumbling window that a row belongs to, in ms."""
    return (pl.col("date_time").dt.timestamp("ms") // size_ms + 1) * size_ms


class BestOfWindow(tg.ProcessFunction):
    """Of each window, the key `end`, the rows whose number in `by` is the greatest, when the window is over."""

    def __init__(self, by: str, row: pa.Schema) -> None:
        self._by = by
        self._row = row

    def open(self, context: tg.ProcessContext) -> None:
        """The best rows so far."""
        self._best = context.state(tg.ListState("best", pa.struct(list(self._row))))

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        """A row is better, as good, or nothing."""
        best = list(self._best.get())
        mine = {name: row[name] for name in self._row.names}
        if not best or mine[self._by] > best[0][self._by]:
            self._best.update([mine])
            context.timer_service.register_event_time_timer(row["end"] - 1)
        elif mine[self._by] == best[0][self._by]:
            self._best.add(mine)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[Row]:
        """The window is over."""
        yield from list(self._best.get())
        self._best.clear()


Q7 = pa.schema(
    [
        ("auction", pa.int64()),
        ("price", pa.int64()),
        ("bidder", pa.int64()),
        ("date_time", MOMENT),
        ("extra", pa.string()),
    ]
)


def _best_of_batch(batch: pa.RecordBatch) -> pl.DataFrame:
    """The highest bids of each window in a batch: no other can be the highest of the window."""
    bids = pl.DataFrame(batch)
    return bids.filter(pl.col("price") == pl.col("price").max().over("end"))


def _q7(events: Events) -> tg.Stream:
    bids = events.bids.select(*Q7.names, _end(WINDOW_MS).alias("end"))
    high = bids.map_batches(_best_of_batch, schema=bids.schema, name="highest of the batch")
    return high.key_by("end").process(BestOfWindow("price", Q7), schema=Q7, name="highest bids", uid="highest")


def _q7_reference(rows: Rows) -> pl.DataFrame:
    window = pl.col("date_time").dt.truncate("10s").alias("window")
    highest = rows.bids.group_by(window).agg(pl.col("price").max())
    return rows.bids.with_columns(window).join(highest, on=["window", "price"]).select(Q7.names).collect()


COUNTS = pa.schema([("auction", pa.int64()), ("num", pa.int64()), ("date_time", MOMENT), ("end", pa.int64())])
Q5 = pa.schema([("auction", pa.int64()), ("num", pa.int64())])


def _hottest_of_batch(batch: pa.RecordBatch) -> pl.DataFrame:
    """The auctions with the most bids of each window in a batch."""
    counts = pl.DataFrame(batch)
    return counts.filter(pl.col("num") == pl.col("num").max().over("end"))


def _q5(events: Events) -> tg.Stream:
    windows = events.bids.key_by("auction").window(tg.Sliding(WINDOW_MS, SLIDE_MS))
    counts = windows.aggregate(num=tg.count(), name="counts", uid="counts")
    last = pl.col("window_end") - pl.duration(milliseconds=1)
    timed = counts.select(
        "auction", "num", last.alias("date_time"), pl.col("window_end").dt.timestamp("ms").alias("end")
    )
    hottest = timed.map_batches(_hottest_of_batch, schema=COUNTS, name="hottest of the batch")
    best = hottest.assign_timestamps("date_time", uid="window-ends").key_by("end")
    return best.process(BestOfWindow("num", Q5), schema=Q5, name="hot items", uid="hot-items")


def _q5_reference(rows: Rows) -> pl.DataFrame:
    bids = rows.bids.select("auction", end=_end(SLIDE_MS)).with_columns(
        end=pl.concat_list([pl.col("end") + shift for shift in range(0, WINDOW_MS, SLIDE_MS)])
    )
    counts = bids.explode("end").group_by("auction", "end").agg(num=pl.len().cast(pl.Int64))
    best = pl.col("num") == pl.col("num").max().over("end")
    return counts.filter(best).select(Q5.names).collect()


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


Q11 = pa.schema([("bidder", pa.int64()), ("bid_count", pa.int64()), ("start_time", MOMENT), ("end_time", MOMENT)])


class Sessions(tg.ProcessFunction):
    """Bids of a bidder, of which none comes more than the gap after the one before."""

    def open(self, context: tg.ProcessContext) -> None:
        """Sessions that are not over, by their begin."""
        session = pa.struct({"last": pa.int64(), "count": pa.int64()})
        self._sessions = context.state(tg.MapState("sessions", pa.int64(), session))

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        """A bid begins a session, or joins those that it is near to."""
        assert context.timestamp is not None
        first = last = context.timestamp
        count = 1
        for begin, session in list(self._sessions.items()):
            if begin - GAP_MS < context.timestamp < session["last"] + GAP_MS:
                first, last, count = min(first, begin), max(last, session["last"]), count + session["count"]
                self._sessions.remove(begin)
        self._sessions.put(first, {"last": last, "count": count})
        context.timer_service.register_event_time_timer(last + GAP_MS - 1)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[Row]:
        """A session is over, unless a later bid has made it longer."""
        for begin, session in list(self._sessions.items()):
            if session["last"] + GAP_MS - 1 <= timestamp:
                self._sessions.remove(begin)
                end = session["last"] + GAP_MS
                yield {**context.current_key, "bid_count": session["count"], "start_time": begin, "end_time": end}


def _q11(events: Events) -> tg.Stream:
    bids = events.bids.select("bidder", "date_time").key_by("bidder")
    return bids.process(Sessions(), schema=Q11, name="sessions", uid="sessions")


def _q11_reference(rows: Rows) -> pl.DataFrame:
    time, gap = pl.col("date_time"), pl.duration(milliseconds=GAP_MS)
    begins = (time.diff() >= gap).fill_null(True).cum_sum().over("bidder", order_by="date_time")
    sessions = rows.bids.sort("bidder", "date_time").with_columns(session=begins).group_by("bidder", "session")
    result = sessions.agg(bid_count=pl.len().cast(pl.Int64), start_time=time.min(), end_time=time.max() + gap)
    return result.select(Q11.names).collect()


QUERIES = (
    Query("q5", "hot items", ("bid",), _q5, _q5_reference),
    Query("q7", "highest bid", ("bid",), _q7, _q7_reference),
    Query("q8", "monitor new users", ("person", "auction"), _q8, _q8_reference),
    Query("q11", "user sessions", ("bid",), _q11, _q11_reference),
)
