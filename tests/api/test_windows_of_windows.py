"""The results of a window have an event time, the last millisecond of the window, so other steps of time may follow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import finish, local

import tidegate as tg

COUNTED = pa.table({"k": ["a", "a", "a", "b", "b", "c", "a"], "t": [1, 4, 9, 3, 12, 19, 31]})


def counts(env: tg.StreamEnvironment, rows: pa.Table = COUNTED) -> tg.Stream:
    """How many rows a key has in each 10 ms."""
    stream = env.from_batches(rows, splits=1, timestamp="t")
    return stream.key_by("k").window(tg.Tumbling(10)).aggregate(n=tg.count())


def rows_of(collected: tg.CollectedRows) -> list[tuple[Any, ...]]:
    """Rows in order."""
    return sorted(tuple(row.values()) for row in collected.to_arrow().to_pylist())


@pytest.mark.parametrize("rows_max", [1, 100])
def test_the_most_of_each_window(rows_max: int, tmp_path: Path) -> None:
    """A window of the same size has the results of its own window, and nothing is late there, whatever the batches."""
    with local(rows_max=rows_max) as env:
        most = counts(env).window(tg.Tumbling(10)).aggregate(n=tg.max("n"), keys=tg.count(), name="most")
        found, late = most.collect(), most.late_rows().collect()
        finish(env, tmp_path)
    assert rows_of(found) == [(0, 10, 3, 2), (10, 20, 1, 2), (30, 40, 1, 1)]
    assert late.to_arrow().num_rows == 0


@pytest.mark.parametrize("time_type", [pa.timestamp("s"), pa.timestamp("ns", "Asia/Tokyo"), pa.date32()], ids=str)
def test_in_any_unit(time_type: pa.DataType, tmp_path: Path) -> None:
    """A day in days: seconds and dates have no millisecond before midnight, and it counts all the same."""
    days = pa.array([day * 86_400_000 for day in (0, 0, 1)], pa.timestamp("ms")).cast(time_type)
    with local(1) as env:
        stream = env.from_batches(pa.table({"k": [1, 2, 1], "t": days}), splits=1, timestamp="t")
        by_key = stream.key_by("k").window(tg.Tumbling("1d")).aggregate(n=tg.count())
        of_all = by_key.window(tg.Tumbling("1d")).aggregate(keys=tg.count(), name="of all").collect()
        finish(env, tmp_path)
    found = of_all.to_arrow()
    starts = found.column("window_start").cast(pa.timestamp("ms", getattr(time_type, "tz", None))).cast(pa.int64())
    assert sorted(zip(starts.to_pylist(), found.column("keys").to_pylist(), strict=True)) == [(0, 2), (86_400_000, 1)]


class Times(tg.ProcessFunction):
    """Rows with their times, and a timer at each."""

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """The time of a row is the one of the context."""
        assert context.timestamp is not None
        context.timer_service.register_event_time_timer(context.timestamp)
        yield {"n": row["n"], "at": context.timestamp}

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """It fires when the watermark has reached it."""
        yield {"n": -1, "at": timestamp}


def test_functions_and_joins_behind_a_window_have_its_time(tmp_path: Path) -> None:
    """Also under another name, and behind a union of results."""
    schema = pa.schema({"n": pa.int64(), "at": pa.int64()})
    with local() as env:
        renamed = counts(env).select("k", "n", end="window_end")
        times = renamed.union(renamed).key_by("k").process(Times(), schema=schema).collect()
        most = counts(env).window(tg.Tumbling(10)).aggregate(most=tg.max("n"), name="most")
        most = most.select("most", end="window_end")
        pairs = renamed.join(most, on=[("n", "most")], window=tg.Tumbling(10)).collect()
        finish(env, tmp_path)
    ends = [9, 9, 19, 19, 39]
    twice = [(n, at) for n, at in zip([3, 1, 1, 1, 1], ends, strict=True)] * 2
    # Both rows of a key and window set the same timer.
    assert rows_of(times) == sorted([*twice, *((-1, at) for at in ends)])
    assert [row[:3] for row in rows_of(pairs)] == [("a", 1, 40), ("a", 3, 10), ("b", 1, 20), ("c", 1, 20)]


def test_another_column_of_that_name_is_something_else(caplog: pytest.LogCaptureFixture) -> None:
    """Streams whose times are not read alike have none together; nobody is told of a time that was not asked for."""
    with local() as env, caplog.at_level(logging.WARNING):
        results = counts(env)
        plain = results.assign_timestamps("window_end")
        assert results.timestamp == plain.timestamp == "window_end"
        assert results.union(plain).timestamp is None
        assert results.union(results).timestamp == "window_end"
        assert results.select("k", "n").timestamp is None
        assert not caplog.records
        assert plain.select("k", "n").timestamp is None
        assert "drops the column of event time" in caplog.text


def test_late_rows_do_not_have_the_time_of_results() -> None:
    """Even if a column of theirs has the same name."""
    with local() as env:
        rows = COUNTED.append_column("window_end", COUNTED.column("t"))
        results = counts(env, rows)
        assert results.late_rows().timestamp is None
        assert results.with_columns(pl.col("n") + 1).timestamp == "window_end"


def test_a_join_in_windows_is_counted_in_the_windows_that_it_was_joined_in(tmp_path: Path) -> None:
    """Its event time is the last millisecond of the window, and not the first one of the next."""
    with local() as env:
        left = env.from_batches(COUNTED, splits=1, timestamp="t", uid="left")
        right = env.from_batches(COUNTED.slice(0, 5), splits=1, timestamp="t", uid="right")
        pairs = left.join(right, on="k", window=tg.Tumbling(10))
        counted = pairs.key_by("k").window(tg.Tumbling(10)).aggregate(n=tg.count())
        of_all, late = counted.collect(), counted.late_rows().collect()
        finish(env, tmp_path)
    assert rows_of(of_all) == [("a", 0, 10, 9), ("b", 0, 10, 1), ("b", 10, 20, 1)]
    assert late.to_arrow().num_rows == 0
