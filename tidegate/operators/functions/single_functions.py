"""Process functions around one function of the user with one state: `stateful_map`, `reduce` and `map_groups`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction, Rows
from tidegate.operators.python_rows import python_rows
from tidegate.operators.state.keyed_state import ListState, ValueState
from tidegate.operators.state.ttl import StateTtl
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

Row = Mapping[str, Any]


class StatefulMap(ProcessFunction):
    """Calls `fn(state, row)` with each row; it returns the new state of the key and a row."""

    def __init__(self, fn: Callable[[Any, Row], tuple[Any, Any]], dtype: Any, ttl: StateTtl | None) -> None:
        self.fn = fn
        self._declared = ValueState("state", dtype, ttl=ttl)

    def open(self, context: ProcessContext) -> None:
        """Bind the state."""
        self._state = context.state(self._declared)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Return the row that the function makes."""
        result = self.fn(self._state.value(), row)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"stateful_map: the function returns a pair (state, row), not {type(result).__name__}")
        state, made = result
        self._state.update(state)  # None clears it
        return [made]


class Reduce(ProcessFunction):
    """Calls `fn(before, row)` with each row of a key but the first, and emits what it returns."""

    def __init__(self, fn: Callable[[Row, Row], Row], schema: pa.Schema) -> None:
        self.fn = fn
        self._names = frozenset(schema.names)
        self._declared = ValueState("reduced", pa.struct(list(schema)))

    def open(self, context: ProcessContext) -> None:
        """Bind the state."""
        self._reduced = context.state(self._declared)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Return the row so far."""
        before = self._reduced.value()
        made = row if before is None else self.fn(before, row)
        kept = dict(made)
        # A row that lacks a column is refused where it is emitted. The error there names the function, not this state.
        if self._names <= kept.keys():
            self._reduced.update(kept)
        return [made]


class MapGroups(ProcessFunction):
    """Keeps the rows of each key, and calls `fn` with them once when the input has ended."""

    def __init__(self, fn: Callable[[pa.Table], Any], schema: pa.Schema) -> None:
        self.fn = fn
        self._schema = schema
        self._declared = ListState("rows", pa.struct(list(schema)))

    def open(self, context: ProcessContext) -> None:
        """Bind the state."""
        self._rows = context.state(self._declared)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Keep the row. A timer at the end of event time fires when the input has ended."""
        self._rows.add(row)
        context.timer_service.register_event_time_timer(MAX_WATERMARK_MS)
        return None

    def on_timer(self, timestamp: int, context: ProcessContext) -> Rows:
        """Return what the function makes of all rows of the key."""
        rows = pa.Table.from_pylist(list(self._rows.get()), schema=self._schema)
        self._rows.clear()
        result = self.fn(rows)
        if result is None:
            return None
        if isinstance(result, pa.RecordBatch):
            return python_rows(result)
        if isinstance(result, pa.Table):
            return [row for batch in result.to_batches() for row in python_rows(batch)]
        return [result] if isinstance(result, Mapping) or not isinstance(result, Iterable) else result
