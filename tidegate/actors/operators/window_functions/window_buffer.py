"""`WindowBuffer`: keeps the rows of windows until a function gets them. What both operators with functions share.

Rules:

- Whole rows are kept in a row table, in the columns of the input, so a call sees what came, in the order of arrival.
- A table has a column of the operator's own before them, `PLACE`: the end of the window, or the time of a row.
- What a function has got, and may get again, is in a second table, `KEPT_STATE`.
- Rows are put together by key and window, and cut, all at once. Only the calls are one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.operators.joins.join_columns import plain_values
from tidegate.actors.operators.operator import Emit, OperatorContext
from tidegate.actors.operators.state.keys import key_columns, key_schema
from tidegate.actors.operators.state.rows_operator import RowsOperator
from tidegate.actors.operators.window_functions.process_windows import FunctionCalls, check_life
from tidegate.actors.operators.window_functions.window_calls import Grouped, WindowCalls
from tidegate.actors.operators.window_functions.window_timers import WindowLife
from tidegate.actors.operators.windows.window_specs import Times
from tidegate.actors.state_backends.common.backend import KeyedBackend
from tidegate.storage.schemas.dictionaries import decoded_type
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

ROWS_STATE = "window rows"
KEPT_STATE = "window rows kept"
PLACE = "window.place_ms"
_ALL = "window.all"
"""The key of windows of all rows."""

Numbers = NDArray[np.int64]


def plain_rows(schema: pa.Schema) -> pa.Schema:
    """The columns of the rows that functions get, for rows with these columns: dictionaries are decoded."""
    return pa.schema([pa.field(field.name, decoded_type(field.type)) for field in schema])


class WindowBuffer(RowsOperator):
    """Rows by key, or of all rows without `keys`. `schema`: the columns of the input.

    `life`: how long windows are there, for those that may be kept. ConfigurationError for timers in others.
    """

    def __init__(
        self, keys: tuple[str, ...], schema: pa.Schema, calls: WindowCalls, life: WindowLife | None = None
    ) -> None:
        if isinstance(calls, FunctionCalls) and calls.has_timers:
            check_life(life, f"{calls.name}: on_timer")
        self._key_names, self._calls, self._life = keys, calls, life
        of_keys = key_schema(schema, keys) if keys else pa.schema([(_ALL, pa.int8())])
        self._columns = pa.schema([of_keys.field(f.name) if f.name in keys else f for f in plain_rows(schema)])
        """Columns of the rows that functions get."""
        values = [pa.field(PLACE, pa.int64()), *(field for field in self._columns if field.name not in keys)]
        tables = (ROWS_STATE,) if life is None else (ROWS_STATE, KEPT_STATE)
        super().__init__(of_keys, dict.fromkeys(tables, pa.schema(values)))

    def rows_of(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """A batch in the columns that are kept, and its stored key columns. TypeError for other types."""
        keys = key_columns(batch, self._key_names)
        columns = []
        for field in self._columns:
            of = keys if field.name in self._key_names else batch
            (column,) = plain_values(of, [field.name])
            if column.type != field.type:
                raise TypeError(f"column {field.name!r} is {column.type}; the stream was declared with {field.type}")
            columns.append(column)
        rows = pa.RecordBatch.from_arrays(columns, schema=self._columns)
        if not self._key_names:
            keys = pa.RecordBatch.from_arrays([pa.array(np.zeros(batch.num_rows, dtype=np.int8))], schema=self.keys)
        return rows, keys

    def keep(self, rows: pa.RecordBatch, keys: pa.RecordBatch, places: Times, table: int = 0) -> None:
        """Append rows to the state."""
        if rows.num_rows:
            values = [rows.column(name) for name in rows.schema.names if name not in self._key_names]
            self.append(table, keys, [pa.array(places), *values])

    def taken(self, refs: NDArray[np.int64], table: int = 0) -> pa.RecordBatch:
        """Stored rows, in the columns that functions get."""
        return self.tables[table].take(refs, self._columns.names)

    def call(
        self, rows: pa.RecordBatch, groups: Numbers, bounds: tuple[Times, Times] | None, emit: Emit, of: OperatorContext
    ) -> None:
        """Call the function for each group of rows, and emit what it returns. Groups are numbered without gaps."""
        order = np.argsort(groups, kind="stable")
        if not bool(np.all(order[1:] > order[:-1])):
            rows = rows.take(pa.array(order))
        sizes = np.bincount(groups)
        cuts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        keys = rows.select(list(self._key_names))
        keys = keys.take(pa.array(cuts[:-1])) if self._key_names else keys
        starts, ends = (None, None) if bounds is None else bounds
        for batch in self._calls.results(of, Grouped(rows, cuts, keys, starts, ends)):
            emit(batch)

    def make_backend(self) -> KeyedBackend:
        """One for the rows, and for what the function remembers."""
        if isinstance(self._calls, FunctionCalls):
            return self._calls.open(self.context, self.keys, [*self.stored], self._life).backend
        return super().make_backend()

    def fix_keys(self, backend: KeyedBackend) -> None:
        """All state is bound."""
        if isinstance(self._calls, FunctionCalls):
            self._calls.fix_keys()
        else:
            super().fix_keys(backend)

    def load_table(self, table: StateTable) -> None:
        """ConfigurationError for a state that the function does not bind, or binds with another type."""
        if isinstance(self._calls, FunctionCalls) and table.state not in self.stored:
            self._calls.states.load(table)
        else:
            super().load_table(table)

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Freeze rows and states."""
        if not isinstance(self._calls, FunctionCalls):
            return super().snapshot(cut)
        if cut.keyed:
            self._changed_rows = 0
        return self._calls.states.freeze(cut)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Freeze rows and states."""
        return self.changes(cut)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """The function may ask for it."""
        if isinstance(self._calls, FunctionCalls):
            self._calls.tell_watermark(watermark_ms)
        return iter(())

    def hand_over(self) -> None:
        """Let go of the backend."""
        if isinstance(self._calls, FunctionCalls):
            self._calls.states.hand_over()
        super().hand_over()

    def close(self) -> None:
        """Close the function, and release what the backend holds."""
        try:
            if isinstance(self._calls, FunctionCalls):
                self._calls.close()
        finally:
            super().close()

    def finish(self, emit: Emit) -> Iterator[None]:
        """What is left when the input ends stays."""
        return iter(())
