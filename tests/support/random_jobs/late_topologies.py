"""Functions, joins, rankings and idle splits with late rows. The rules are in `topologies.py`.

Each subtask of a source has one split, at any parallelism of the other steps.

- A function in the task of the source sees the watermark that earlier rows of the split have made. This also holds
  behind async calls, ordered or not.
- Rows reach joins and rankings by several channels, so the order of reading decides which rows are late. The late rows
  are taken from the output, and everything else must be consistent with them. A row may be late only if it is late by
  the earlier rows of its split, because the slowest channel determines event time. Joins have no late side: a row of an
  outer join that is in no result was late.
- An idle split does not hold back event time. Any later row of it may be late, but it is either in a window or among
  the late rows, once.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from random_jobs.pieces import SPLITS, Data, grouped, table_of
from random_jobs.sources import TricklingSource
from random_jobs.window_models import Judged, Row, is_late, judged, late_in_split, without_late
from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.stream import Stream
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.aggregates.aggregate import count, sum
from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.windows.window_specs import Session, Tumbling
from tidegate.testing.runtime.run import Rows, counted

WINDOW_MS = 20
BOUND_MS = 5
IDLE_MS = 30
"""A split without rows for this long, in ms, is idle. The pause before it is read again is longer."""
WINDOWS = (Tumbling(WINDOW_MS), Session(7))
"""The number of rows selects one."""
_WINDOW = Tumbling(WINDOW_MS)
_NEAR_MS = 25
_TOP = 2
_PROGRAMS = ("windows", "near", "top", "told")
_CALLED = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("t", pa.int64())])
_TOLD = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("t", pa.int64()), ("late", pa.bool_())])

Numbered = tuple[int, Row, int | None]
"""Number of a row in its input, the row, and the watermark that earlier rows of its split have made."""


def late(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds a window join, an interval join, a ranking of windows or a function. The data selects one."""
    chosen = _chosen(inputs)
    if chosen == "told":
        rows = _timed(env, inputs, 0)
        place = len(inputs[0]) // len(_PROGRAMS)
        if place % 2:
            ordered = bool(place // 2 % 2)
            rows = rows.map_async(_called, schema=_CALLED, capacity=3, ordered=ordered, uid="calls", parallelism=SPLITS)
        told = rows.process(LateOnes(), schema=_TOLD, uid="told", parallelism=SPLITS)
        table_of(told.rebalance(), "rows", width[1])
        return
    if chosen == "top":
        windows = _timed(env, inputs, 0).key_by("k").window(_WINDOW)
        top = windows.top_n(_TOP, "v", rank="rank", uid="top", parallelism=width[1])
        columns = ("k", "window_start", "window_end", "v", "rank")
        table_of(top.select(*columns, uid="columns", parallelism=width[1]).rebalance(), "results", width[2])
        late_rows = top.late_rows().select("k", "v", "t", uid="late", parallelism=width[1])
        table_of(late_rows.rebalance(), "late", width[3])
        return
    left, right = (_timed(env, inputs, number) for number in (0, 1))
    if chosen == "windows":
        joined = left.join(right, on="k", window=_WINDOW, how="full", uid="join", parallelism=width[1])
    else:
        between = (-_NEAR_MS, _NEAR_MS)
        joined = left.interval_join(right, on="k", between=between, how="full", uid="join", parallelism=width[1])
    table_of(joined.select("k", "i", "i_right", uid="columns", parallelism=width[1]).rebalance(), "results", width[2])


def expect_late(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Returns the output of the function. Of a ranking returns the rows that may be late."""
    rows = [(row, at) for _, row, at in _numbered(inputs, 0)]
    if _chosen(inputs) == "told":
        return {"sim://rows": counted([(*row, at is not None and row[2] <= at) for row, at in rows])}
    return {"sim://late": counted(late_in_split(_WINDOW, 0, rows))} if _chosen(inputs) == "top" else {}


def given_late(inputs: Sequence[Data], found: Rows | None) -> Rows:
    """Returns the output that must be there, given the rows that were late."""
    if found is None or _chosen(inputs) == "told":
        return expect_late(inputs, ())
    if _chosen(inputs) == "top":
        rows: list[Judged] = [(row, at) for _, row, at in _numbered(inputs, 0)]
        gone, rest = without_late(_WINDOW, 0, rows, found["sim://late"])
        return {"sim://late": counted(gone), "sim://results": counted(list(_first(row for row, _ in rest)))}
    left, right = (
        [
            (place, row)
            for place, row, at in _numbered(inputs, number)
            if any(place == ast.literal_eval(result)[1 + number] for result in found["sim://results"])
            or not _may_be_late(inputs, row, at)
        ]
        for number in (0, 1)
    )
    return {"sim://results": counted(list(_outer(left, right, _fits(inputs))))}


class LateOnes(ProcessFunction):
    """Marks each row as late or not, by the watermark that the function sees."""

    def process(self, row: dict[str, Any], context: ProcessContext) -> Iterator[dict[str, Any]]:
        """Emits the row with the mark."""
        yield {**{name: row[name] for name in "kvt"}, "late": row["t"] <= context.current_watermark}


async def _called(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in "kvt"}


def _may_be_late(inputs: Sequence[Data], row: Row, watermark_ms: int | None) -> bool:
    """Returns whether a join may drop a row as late, by the watermark of its split."""
    if _chosen(inputs) == "windows":
        return is_late(_WINDOW, 0, row, watermark_ms)
    return watermark_ms is not None and row[2] <= watermark_ms


def _fits(inputs: Sequence[Data]) -> Callable[[Row, Row], bool]:
    if _chosen(inputs) == "windows":
        return lambda a, b: a[2] // WINDOW_MS == b[2] // WINDOW_MS
    return lambda a, b: abs(b[2] - a[2]) <= _NEAR_MS


def _outer(
    left: Sequence[tuple[int, Row]], right: Sequence[tuple[int, Row]], fits: Callable[[Row, Row], bool]
) -> Iterable[tuple[int, int | None, int | None]]:
    """Computes a full join: the key, and the number of the row on either side."""
    pairs = [(a, b) for a in left for b in right if a[1][0] == b[1][0] and fits(a[1], b[1])]
    yield from ((a[1][0], a[0], b[0]) for a, b in pairs)
    met = {a[0] for a, _ in pairs}, {b[0] for _, b in pairs}
    yield from ((row[0], place, None) for place, row in left if place not in met[0])
    yield from ((row[0], None, place) for place, row in right if place not in met[1])


def _first(rows: Iterable[Row]) -> Iterable[tuple[int, int, int, int, int]]:
    """Computes the greatest values of each key and window."""
    windows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for key, value, time_ms in rows:
        windows[key, time_ms // WINDOW_MS * WINDOW_MS].append(value)
    for (key, start), values in windows.items():
        for rank, value in enumerate(sorted(values, reverse=True)[:_TOP], start=1):
            yield key, start, start + WINDOW_MS, value, rank


def _chosen(inputs: Sequence[Data]) -> str:
    return _PROGRAMS[len(inputs[0]) % len(_PROGRAMS)]


def _timed(env: StreamEnvironment, inputs: Sequence[Data], number: int) -> Stream:
    rows = [(*row, place) for place, row, _ in _numbered(inputs, number)]
    columns = zip(*rows, strict=True)
    table = pa.table({name: pa.array(column, pa.int64()) for name, column in zip("kvti", columns, strict=True)})
    return env.from_batches(
        table,
        splits=SPLITS,
        timestamp="t",
        max_out_of_orderness=BOUND_MS,
        uid=f"source{number}",
        name=f"source{number}",
        parallelism=SPLITS,
    )


def _numbered(inputs: Sequence[Data], number: int) -> list[Numbered]:
    """Returns the rows of an input with event times and watermarks.

    The times of a split advance by a window in a few rows. Every third row is behind, by a multiple of its value.
    """
    data = inputs[number]
    found = list[Numbered]()
    for split in range(SPLITS):
        places = range(len(data) * split // SPLITS, len(data) * (split + 1) // SPLITS)
        rows = [
            (*data[place], 6 * step - (7 * data[place][1] if place % 3 == 2 else 0))
            for step, place in enumerate(places)
        ]
        of_split = judged(rows, BOUND_MS, [True] * len(rows))
        found += [(place, row, at) for place, (row, at) in zip(places, of_split, strict=True)]
    return found


def idle(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds totals by key of the rows in windows and of the rows that were late."""
    source = TricklingSource(MemorySource.of(_table(inputs[0], _idle_times(inputs[0])), SPLITS))
    rows = env.from_source(source, uid="source0", name="source0", parallelism=SPLITS)
    timed = rows.assign_timestamps("t", BOUND_MS, idleness=IDLE_MS, uid="source0-timestamps", parallelism=SPLITS)
    windows = timed.key_by("k").window(WINDOWS[len(inputs[0]) % len(WINDOWS)])
    sums = windows.aggregate(n=count(), v=sum("v"), uid="windowed", parallelism=width[1])
    of_windows = sums.select("k", "n", "v", uid="sums", parallelism=width[1])
    of_late = sums.late_rows().select("k", "v", n=pl.lit(1, pl.Int64), uid="late", parallelism=width[1])
    both = of_windows.union(of_late.select("k", "n", "v", uid="columns", parallelism=width[1])).key_by("k")
    table_of(both.aggregate(n=sum("n"), t=sum("v"), emit="final", uid="agg", parallelism=width[2]), "final", width[3])


def expect_idle(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Returns totals in which every row counts once."""
    return {"sim://final": grouped(inputs[0])}


def _table(data: Data, times: Sequence[int]) -> pa.Table:
    return pa.table({"k": [k for k, _ in data], "v": [v for _, v in data], "t": pa.array(times, pa.int64())})


def _idle_times(data: Data) -> list[int]:
    """Returns event times that advance by a window in ten rows. Every third row is behind by a multiple of it."""
    return [2 * number - (4 * value if number % 3 == 2 else 0) for number, (_, value) in enumerate(data)]
