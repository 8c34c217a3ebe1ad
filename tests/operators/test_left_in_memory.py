"""State that an attempt has left in memory: the next one binds it again, whatever its types, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from operator_harness import CUT, context, opened, run

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.changing_aggregate import ChangingAggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.operator import Operator
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Session, Tumbling
from tidegate.storage.ids import CheckpointId

AGGREGATES: dict[str, Aggregate] = {
    "least": tg.min("v"),
    "most": tg.max("v"),
    "first": tg.first("v"),
    "last": tg.last("v", by="t"),
    "rows": tg.count(),
}
OPERATORS: dict[str, Callable[[], Operator]] = {
    "keyed": lambda: KeyedAggregate(("k",), AGGREGATES),
    "changing": lambda: ChangingAggregate(("k",), AGGREGATES),
    "windows": lambda: SlicedWindows(("k",), Tumbling(10), AGGREGATES, "t"),
    "sessions": lambda: SessionWindows(("k",), Session(10), AGGREGATES, "t"),
}


def _batch(column: pa.Array) -> pa.RecordBatch:
    rows = range(len(column))
    return pa.record_batch({"k": [row % 2 for row in rows], "t": pa.array(list(rows), pa.int64()), "v": column})


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None, 3, -4], pa.int64()),
        pa.array([1.5, None, float("nan"), -2.5], pa.float64()),
        pa.array([1.5, None, float("nan"), -2.5], pa.float32()),
        pa.array([True, None, False, True]),
        pa.array([b"x", None, b"", b"y"]).cast(pa.string()),
        pa.array([1, None, 3, 4], pa.timestamp("ns", "UTC")),
        pa.array([1, None, 3, 4], pa.int32()).cast(pa.decimal128(14, 2)),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("kind", OPERATORS)
def test_state_is_bound_again(kind: str, column: pa.Array) -> None:
    """The attempt that goes back gives what the first one would have given."""
    first, more = opened(OPERATORS[kind]()), _batch(column)
    run(first, [more], finish=False)
    first.snapshot(CUT)
    backend = first.keyed_backend
    assert backend is not None

    def outcome(operator: Operator) -> list[dict[str, Any]]:
        emitted = run(operator, [more], finish=False)
        list(operator.advance_watermark(1_000, emitted.append))
        return [row for batch in emitted for row in batch.to_pylist()]

    expected = outcome(first)
    backend.completed(CheckpointId(1))
    assert backend.goes_back
    first.hand_over()
    backend.go_back(CheckpointId(1))
    again = OPERATORS[kind]()
    again.open(replace(context(), kept=backend), ())
    assert repr(outcome(again)) == repr(expected)
