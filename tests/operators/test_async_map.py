"""Rows of `map_async` that are under way, in a snapshot."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from frozen_tables import tables_of
from operator_harness import CUT, opened

from tidegate.operators.functions.async_map import AsyncFunction, AsyncMap
from tidegate.storage.state.snapshot import StateTable


def _same(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _mapped(restored: list[StateTable]) -> AsyncMap:
    operator = AsyncMap(AsyncFunction(_same, 10, 1_000))
    opened(operator, restored)
    return operator


def _under_way(operator: AsyncMap) -> list[StateTable]:
    snapshot = operator.snapshot(CUT)
    assert snapshot is not None
    return [table for state in snapshot.states for table in tables_of(state)]


def test_a_column_may_find_its_type_while_rows_are_under_way() -> None:
    """A function before it gives nothing but nulls at first: all rows are in the snapshot, and in the next one."""
    early = pa.record_batch({"a": pa.array([1, 2]), "b": pa.nulls(2)})
    late = pa.record_batch({"a": [3], "b": ["x"]})
    operator = _mapped([])
    for batch in (early, late):
        operator.process(batch, lambda rows: None)
    restored = _mapped(_under_way(operator))
    restored.process(early, lambda rows: None)
    (table,) = _under_way(restored)
    assert table.rows.to_pydict() == {"a": [1, 2, 3, 1, 2], "b": [None, None, "x", None, None]}
