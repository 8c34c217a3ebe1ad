"""A pipeline with late rows for random simulations. Rules: as of `topologies.py`.

Each subtask of the source has one split, at any parallelism of the other steps. So which rows are late follows from
the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.late_rows import in_time
from tidegate.simulation.pipelines.pieces import SPLITS, Data, table_of
from tidegate.simulation.runtime.run import Rows, counted

WINDOW_MS = 20
BOUND_MS = 5


def late(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Rows in time and late rows, each to a table."""
    times, data = _times(inputs[0]), inputs[0]
    table = pa.table({"k": [k for k, _ in data], "v": [v for _, v in data], "t": pa.array(times, pa.int64())})
    stream = env.from_batches(
        table, splits=SPLITS, timestamp="t", max_out_of_orderness=BOUND_MS, uid="source0", parallelism=SPLITS
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


def _times(data: Data) -> list[int]:
    """They go on by a window in ten rows, and every third row is behind, as its value says."""
    return [2 * number - (4 * value if number % 3 == 2 else 0) for number, (_, value) in enumerate(data)]
