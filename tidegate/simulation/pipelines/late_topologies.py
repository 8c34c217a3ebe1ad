"""Pipelines with late rows for random simulations. Rules: as of `topologies.py`.

Each subtask of the source has one split, at any parallelism of the other steps. Where no split is idle, which rows are
late follows from the data. A split that is idle does not hold event time back: what comes of it then is late or not as
time goes, but it is in a window or among the late rows, once.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from tidegate.actors.operators.aggregates.aggregate import count, sum
from tidegate.actors.operators.windows.window_specs import Session, Tumbling
from tidegate.actors.sources.memory_source import MemorySource
from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.late_rows import in_time
from tidegate.simulation.pipelines.pieces import SPLITS, Data, grouped, table_of
from tidegate.simulation.pipelines.trickling_source import TricklingSource
from tidegate.simulation.runtime.run import Rows, counted

WINDOW_MS = 20
BOUND_MS = 5
IDLE_MS = 30
"""A split that has nothing for so long is idle: it is asked again after a pause that is longer."""
WINDOWS = (Tumbling(WINDOW_MS), Session(7))
"""The number of rows chooses one."""


def late(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Rows in time and late rows, each to a table."""
    stream = env.from_batches(
        _table(inputs[0]),
        splits=SPLITS,
        timestamp="t",
        max_out_of_orderness=BOUND_MS,
        uid="source0",
        parallelism=SPLITS,
    )
    timely = in_time(stream, lambda at: at // WINDOW_MS * WINDOW_MS + WINDOW_MS, 0, uid="windows")
    table_of(timely.rebalance(), "rows", width[1])
    table_of(timely.side_output("late").rebalance(), "late", width[2])


def expect_late(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Row by row: late is what comes when its window is over by the rows before it in its split."""
    times = _times(inputs[0])
    parts: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
    rows = len(times)
    for split in range(SPLITS):
        newest_ms: int | None = None
        for row in range(rows * split // SPLITS, rows * (split + 1) // SPLITS):
            end_ms = times[row] // WINDOW_MS * WINDOW_MS + WINDOW_MS
            is_late = newest_ms is not None and end_ms - 1 <= newest_ms - BOUND_MS - 1
            parts[is_late].append((*inputs[0][row], times[row]))
            newest_ms = times[row] if newest_ms is None else max(newest_ms, times[row])
    return {"sim://rows": counted(parts[0]), "sim://late": counted(parts[1])}


def idle(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Totals by key of what the windows count, and of what was late for them."""
    source = TricklingSource(MemorySource.of(_table(inputs[0]), SPLITS))
    rows = env.from_source(source, uid="source0", name="source0", parallelism=SPLITS)
    timed = rows.assign_timestamps("t", BOUND_MS, idleness=IDLE_MS, uid="source0-timestamps", parallelism=SPLITS)
    windows = timed.key_by("k").window(WINDOWS[len(inputs[0]) % len(WINDOWS)])
    sums = windows.aggregate(n=count(), v=sum("v"), uid="windowed", parallelism=width[1])
    of_windows = sums.select("k", "n", "v", uid="sums", parallelism=width[1])
    of_late = sums.late_rows().select("k", "v", n=pl.lit(1, pl.Int64), uid="late", parallelism=width[1])
    both = of_windows.union(of_late.select("k", "n", "v", uid="columns", parallelism=width[1])).key_by("k")
    table_of(both.aggregate(n=sum("n"), t=sum("v"), emit="final", uid="agg", parallelism=width[2]), "final", width[3])


def expect_idle(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Every row counts once, wherever."""
    return {"sim://final": grouped(inputs[0])}


def _table(data: Data) -> pa.Table:
    times = pa.array(_times(data), pa.int64())
    return pa.table({"k": [k for k, _ in data], "v": [v for _, v in data], "t": times})


def _times(data: Data) -> list[int]:
    """They go on by a window in ten rows, and every third row is behind, as its value says."""
    return [2 * number - (4 * value if number % 3 == 2 else 0) for number, (_, value) in enumerate(data)]
