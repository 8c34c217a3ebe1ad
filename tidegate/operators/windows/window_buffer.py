"""`WindowBuffer`: keeps the rows of windows until a function gets them. What both operators with functions share.

Rules:

- Whole rows are kept in a row table, in the columns of the input, so a call sees what came, in the order of arrival.
- A table has a column of the operator's own before them, `PLACE`: the end of the window, or the time of a row.
- What a function has got, and may get again, is in a second table, `KEPT_STATE`. What it has returned, where that may
  be taken back, is in a third one, `TOLD_STATE`.
- Rows are put together by key and window, and cut, all at once. Only the calls are one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.joins.join_operator import plain_values
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.state.keys import key_columns, key_schema
from tidegate.operators.state.operator_backend import RowsOperator
from tidegate.operators.windows.process_windows import FunctionCalls, check_life
from tidegate.operators.windows.window_calls import Grouped, WindowCalls
from tidegate.operators.windows.window_specs import Times
from tidegate.operators.windows.window_timers import WindowLife
from tidegate.state.common.backend import KeyedBackend
from tidegate.storage.schemas.dictionaries import decoded_type
from tidegate.storage.schemas.one_batch import one_batch
from tidegate.storage.schemas.reserved_names import own_name
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

ROWS_STATE = own_name("window_rows")
KEPT_STATE = own_name("window_rows_kept")
TOLD_STATE = own_name("window_results")
WAITING, KEPT, TOLD = range(3)
"""The numbers of the tables."""
PLACE = own_name("window_place_ms")
_SCANNED_ROWS = 131_072
_ALL = own_name("all_rows")
"""The key of windows of all rows."""

Numbers = NDArray[np.int64]


def plain_rows(schema: pa.Schema) -> pa.Schema:
    """The columns of the rows that functions get, for rows with these columns: dictionaries are decoded."""
    return pa.schema([pa.field(field.name, decoded_type(field.type)) for field in schema])


class WindowBuffer(RowsOperator):
    """Rows by key, or of all rows without `keys`. `schema`: the columns of the input.

    `life`: how long windows are there, for those that have state and timers. ConfigurationError for timers in others.
    `own`: columns of the operator's own that are kept with each row, behind its place.
    `told`: the columns of results that are kept. With either of them, rows may be kept.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        schema: pa.Schema,
        calls: WindowCalls,
        life: WindowLife | None = None,
        told: Sequence[pa.Field] = (),
        own: Sequence[pa.Field] = (),
    ) -> None:
        if isinstance(calls, FunctionCalls) and calls.has_timers:
            check_life(life, f"{calls.name}: on_timer")
        self._key_names, self._calls, self._life = keys, calls, life
        of_keys = key_schema(schema, keys) if keys else pa.schema([(_ALL, pa.int8())])
        self._columns = pa.schema([of_keys.field(f.name) if f.name in keys else f for f in plain_rows(schema)])
        """Columns of the rows that functions get."""
        values = [pa.field(PLACE, pa.int64()), *own, *(field for field in self._columns if field.name not in keys)]
        stored = dict.fromkeys(
            (ROWS_STATE, KEPT_STATE) if life is not None or told else (ROWS_STATE,), pa.schema(values)
        )
        if told:
            stored[TOLD_STATE] = pa.schema([pa.field(PLACE, pa.int64()), *told])
        super().__init__(of_keys, stored)

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

    def keep(
        self,
        rows: pa.RecordBatch,
        keys: pa.RecordBatch,
        places: Times,
        table: int = WAITING,
        own: Sequence[pa.Array] = (),
    ) -> None:
        """Append rows to the state. `own`: the values of the operator's own columns."""
        if rows.num_rows:
            values = [rows.column(name) for name in rows.schema.names if name not in self._key_names]
            self.append(table, keys, [pa.array(places), *own, *values])

    def taken(self, refs: NDArray[np.int64], table: int = WAITING) -> pa.RecordBatch:
        """Stored rows, in the columns that functions get."""
        return self.tables[table].take(refs, self._columns.names)

    def keys_of(self, refs: NDArray[np.int64], table: int = WAITING) -> pa.RecordBatch:
        """The stored key columns of stored rows."""
        return self.tables[table].take(refs, self.keys.names)

    def places_of(self, refs: NDArray[np.int64], table: int = WAITING) -> Times:
        """Where stored rows are in time."""
        places: Times = self.tables[table].take(refs, [PLACE]).column(0).to_numpy()
        return places

    def scanned(self, table: int, columns: list[str]) -> tuple[Times, NDArray[np.int64], pa.RecordBatch]:
        """Of all rows of a table their places, refs, and some columns."""
        places, refs = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        batches = []
        for rows, found in self.tables[table].scan([*columns, PLACE], _SCANNED_ROWS):
            places.append(rows.column(PLACE).to_numpy())
            refs.append(found)
            batches.append(rows.select(columns))
        none = pa.RecordBatch.from_arrays([], names=[])
        return np.concatenate(places), np.concatenate(refs), together(batches) if batches and columns else none

    def done(self) -> None:
        """End the batch of all tables: refs are invalid from now on."""
        for table in self.tables:
            table.done()

    def call(
        self, rows: pa.RecordBatch, groups: Numbers, bounds: tuple[Times, Times] | None, emit: Emit, of: OperatorContext
    ) -> None:
        """Call the function for each group of rows, and emit what it returns. Groups are numbered without gaps."""
        for batch in self._calls.results(of, self.grouped(rows, groups, bounds)):
            emit(batch)

    def grouped(self, rows: pa.RecordBatch, groups: Numbers, bounds: tuple[Times, Times] | None) -> Grouped:
        """The rows of each group together, in their order."""
        order = np.argsort(groups, kind="stable")
        if not bool(np.all(order[1:] > order[:-1])):
            rows = rows.take(pa.array(order))
        sizes = np.bincount(groups)
        cuts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        keys = rows.select(list(self._key_names))
        keys = keys.take(pa.array(cuts[:-1])) if self._key_names else keys
        starts, ends = (None, None) if bounds is None else bounds
        return Grouped(rows, cuts, keys, starts, ends)

    def make_backend(self) -> KeyedBackend:
        """One for the rows, and for what the function remembers."""
        if isinstance(self._calls, FunctionCalls):
            return self._calls.open(self.context, self.keys, (ROWS_STATE, KEPT_STATE, TOLD_STATE), self._life).backend
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


def together(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches as one. ConfigurationError."""
    return one_batch(pa.Table.from_batches(batches), "rows of windows")
