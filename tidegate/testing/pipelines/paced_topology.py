"""A pipeline whose sources wait for each other in event time, for random simulations. Rules: as of `topologies.py`.

Two sources are in one watermark group. Event time moves on quickly in the one and slowly in the other, so the first one
is held most of the time. What comes out does not depend on event time: every row counts, whenever it was read.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.stream import Stream
from tidegate.operators.aggregates.aggregate import count, sum
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment
from tidegate.testing.pipelines.pieces import SPLITS, Data, grouped, table_of
from tidegate.testing.runtime.run import Rows, counted

_STEPS_MS = (7, 2)
"""How far event time moves on with a row of each source."""
_DRIFT_MS = 20
_INTERVAL_MS = 150


def paced(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Totals of all rows by key, and the rows of the source that is held."""
    quick, slow = (_source(env, inputs[number], number, width[number]) for number in range(2))
    totals = (
        quick.union(slow).key_by("k").aggregate(n=count(), t=sum("v"), emit="final", uid="agg", parallelism=width[2])
    )
    table_of(totals, "final", width[2])
    table_of(quick.rebalance(), "rows", width[3])


def expect_paced(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Every row counts once."""
    rows = [(*pair, at_ms) for pair, at_ms in zip(inputs[0], _times(inputs[0], 0), strict=True)]
    return {"sim://final": grouped([*inputs[0], *inputs[1]]), "sim://rows": counted(rows)}


def _times(data: Data, number: int) -> list[int]:
    return [_STEPS_MS[number] * row for row in range(len(data))]


def _source(env: StreamEnvironment, data: Data, number: int, width: int) -> Stream:
    columns = {"k": [k for k, _ in data], "v": [v for _, v in data], "t": _times(data, number)}
    table = pa.table({name: pa.array(column, pa.int64()) for name, column in columns.items()})
    source = env.from_batches(table, splits=SPLITS, uid=f"source{number}", name=f"source{number}", parallelism=width)
    alignment = WatermarkAlignment("pace", _DRIFT_MS, _INTERVAL_MS)
    return source.assign_timestamps("t", alignment=alignment, uid=f"source{number}-timestamps")
