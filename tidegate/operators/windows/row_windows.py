"""Stores the rows of windows until a user's function gets them. `WindowBuffer` stores them, and `TimedWindows` decides
when the function is called.

Rules of `WindowBuffer`:

- Whole rows are stored in a row table, with the columns of the input. A call gets them in the order of arrival.
- The column `PLACE`, which the operator adds, comes before the input columns. It has the end of the window, or the time
  of the row, in ms.
- Rows that were passed to a function and may be passed again are in a second table, `KEPT_STATE`. Results that may be
  retracted are in a third table, `RESULTS_STATE`.
- Rows are grouped by key and window, and cut into windows, for many windows in one pass. Only the function is called
  once per window.

Rules of `TimedWindows`:

- The time up to which windows have fired (`FiredGroups`) is advanced first, and rows are removed in the step that
  passes them to the function. Stored rows of ended windows are therefore rows whose windows still have to fire. A row
  that arrives between two steps is late for such a window, and a checkpoint between two steps neither repeats nor loses
  a window.
- The function is called with windows of together about `STEP_ROWS` rows, but at least with one window of one key. A
  step scans the stored rows once, and repeats such calls for a share of the scanned rows, so that the total scanning is
  linear in the number of rows that are due.
- A row is late when its last window is over. It is dropped, counted, and sent to the side output of late rows.
- If a function has timers, windows and timers fire in the order of their times, whatever the watermarks were. At equal
  times windows fire before timers. Then windows that are over are removed.
- Windows of processing time follow the rules of `window_operator.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.joins.join_operator import plain_values
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.operator_errors import blame
from tidegate.operators.state.keys import key_columns, key_schema
from tidegate.operators.state.operator_backend import RowsOperator
from tidegate.operators.windows.process_windows import FunctionCalls, WindowLife, check_life, last_moments
from tidegate.operators.windows.window_calls import Grouped, WindowCalls
from tidegate.operators.windows.window_operator import SCANNED_ROWS, TIME_MS_END, WindowOperator
from tidegate.operators.windows.window_specs import Clock, EventTimeWindow, Numbers, Times
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.backend import KeyedBackend
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.batches import one_batch
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

ROWS_STATE = own_name("window_rows")
KEPT_STATE = own_name("window_rows_kept")
RESULTS_STATE = own_name("window_results")
WAITING, KEPT, RESULTS = range(3)
"""Numbers of the state tables: waiting rows, kept rows, and results."""
PLACE = own_name("window_place_ms")
_ALL = own_name("all_rows")
"""Name of the key column, with a constant value, of windows over all rows."""
STEP_ROWS = 65_536
DROPPED_ROWS = 131_072
_LOOKS = 8
"""Greatest number of rows that are scanned for each row that is removed, for any number of stored rows."""


def plain_rows(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of the rows that functions get, for an input schema: dictionary columns are decoded."""
    return pa.schema([pa.field(field.name, decoded_type(field.type)) for field in schema])


class WindowBuffer(RowsOperator):
    """Stores rows of windows, by key or together without `keys`, until a function gets them. `schema` is the input
    schema.

    `calls` calls the function. `life` describes how long windows with state and timers exist. None means windows
    without state and timers. `own` are additional columns that the operator stores with each row, after `PLACE`.
    `results` are the columns of stored results. With `life` or `results`, rows may stay in the state after a call.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        schema: pa.Schema,
        calls: WindowCalls,
        life: WindowLife | None = None,
        results: Sequence[pa.Field] = (),
        own: Sequence[pa.Field] = (),
    ) -> None:
        if isinstance(calls, FunctionCalls) and calls.has_timers:
            check_life(life, f"{calls.name}: on_timer")
        self._key_names, self._calls, self._life = keys, calls, life
        of_keys = key_schema(schema, keys) if keys else pa.schema([(_ALL, pa.int8())])
        self._columns = pa.schema([of_keys.field(f.name) if f.name in keys else f for f in plain_rows(schema)])
        """Schema of the rows that functions get."""
        values = [pa.field(PLACE, pa.int64()), *own, *(field for field in self._columns if field.name not in keys)]
        stored = dict.fromkeys(
            (ROWS_STATE, KEPT_STATE) if life is not None or results else (ROWS_STATE,), pa.schema(values)
        )
        if results:
            stored[RESULTS_STATE] = pa.schema([pa.field(PLACE, pa.int64()), *results])
        super().__init__(of_keys, stored)

    def rows_of(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Returns the rows of a batch with the stored columns, and the stored key columns.

        Raises TypeError for columns of other types than declared.
        """
        keys = key_columns(batch, self._key_names)
        columns = []
        for field in self._columns:
            of = keys if field.name in self._key_names else batch
            (column,) = plain_values(of, [field.name])
            if column.type != field.type:
                raise TypeError(
                    f"column {field.name!r} is {column.type}; the stream was declared with {field.type}"
                    "; cast it with with_columns before the window"
                )
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
        """Appends rows to a state table.

        `places` has their window ends or times in ms (`PLACE`), and `own` the values of the operator's additional
        columns.
        """
        if rows.num_rows:
            values = [rows.column(name) for name in rows.schema.names if name not in self._key_names]
            self.append(table, keys, [pa.array(places), *own, *values])

    def taken(self, refs: NDArray[np.int64], table: int = WAITING) -> pa.RecordBatch:
        """Returns the stored rows with these references, with the columns that functions get."""
        return self.tables[table].take(refs, self._columns.names)

    def keys_of(self, refs: NDArray[np.int64], table: int = WAITING) -> pa.RecordBatch:
        """Returns the stored key columns of the rows with these references."""
        return self.tables[table].take(refs, self.keys.names)

    def places_of(self, refs: NDArray[np.int64], table: int = WAITING) -> Times:
        """Returns the column `PLACE` of the rows with these references: window ends or times, in ms."""
        places: Times = self.tables[table].take(refs, [PLACE]).column(0).to_numpy()
        return places

    def scanned(self, table: int, columns: list[str]) -> tuple[Times, NDArray[np.int64], pa.RecordBatch]:
        """Returns the column `PLACE` (in ms), the references, and the named columns of all rows of a state table."""
        places, refs = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        batches = []
        for rows, found in self.tables[table].scan([*columns, PLACE], SCANNED_ROWS):
            places.append(rows.column(PLACE).to_numpy())
            refs.append(found)
            batches.append(rows.select(columns))
        none = pa.RecordBatch.from_arrays([], names=[])
        return np.concatenate(places), np.concatenate(refs), together(batches) if batches and columns else none

    def done(self) -> None:
        """Ends the access to the state tables for the current batch. References to rows are invalid afterwards."""
        for table in self.tables:
            table.done()

    def call(
        self, rows: pa.RecordBatch, groups: Numbers, bounds: tuple[Times, Times] | None, emit: Emit, of: OperatorContext
    ) -> None:
        """Calls the function for each group of rows, and emits its results.

        `groups` has the group of each row. Groups are numbered from 0 without gaps. `bounds` are the starts and ends of
        the windows of the groups, or None for count windows. `of` is the operator's context for the function.
        """
        for batch in self._calls.results(of, self.grouped(rows, groups, bounds)):
            emit(batch)

    def grouped(self, rows: pa.RecordBatch, groups: Numbers, bounds: tuple[Times, Times] | None) -> Grouped:
        """Returns the rows sorted by group, with the bounds and the key of each group.

        The rows of a group keep their order.
        """
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
        """Creates one backend for the stored rows and the state of the function."""
        if isinstance(self._calls, FunctionCalls):
            return self._calls.open(
                self.context, self.keys, (ROWS_STATE, KEPT_STATE, RESULTS_STATE), self._life
            ).backend
        return super().make_backend()

    def fix_keys(self, backend: KeyedBackend) -> None:
        """Sets the key columns of the backend. Called after all states are bound."""
        if isinstance(self._calls, FunctionCalls):
            self._calls.fix_keys()
        else:
            super().fix_keys(backend)

    def load_table(self, table: StateTable) -> None:
        """Loads a stored table of rows or of a state.

        Raises ConfigurationError for a state that the function does not bind, or binds with another type.
        """
        if isinstance(self._calls, FunctionCalls) and table.state not in self.stored:
            self._calls.states.load(table)
        else:
            super().load_table(table)

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Returns the changes of the stored rows and of the function's state since the last snapshot."""
        if not isinstance(self._calls, FunctionCalls):
            return super().snapshot(cut)
        if cut.keyed:
            self._changed_rows = 0
        return self._calls.states.freeze(cut)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the stored rows and of the function's state."""
        return self.changes(cut)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Stores the watermark for the function. Windows of this class do not fire by watermarks."""
        self.note_watermark(watermark_ms)
        return iter(())

    def note_watermark(self, watermark_ms: int) -> None:
        """Stores the watermark, in ms, so that the function can read it from its context."""
        if isinstance(self._calls, FunctionCalls):
            self._calls.note_watermark(watermark_ms)

    def hand_over(self) -> None:
        """Drops the references to the backend without closing it, because the next attempt of the task continues with
        it.
        """
        if isinstance(self._calls, FunctionCalls):
            self._calls.states.hand_over()
        super().hand_over()

    def close(self) -> None:
        """Closes the function. Closes the backend too, unless the next attempt of the task has taken it over."""
        try:
            if isinstance(self._calls, FunctionCalls):
                self._calls.close()
        finally:
            super().close()

    def finish(self, emit: Emit) -> Iterator[None]:
        """Does nothing: windows that are open at the end of the input stay in the state."""
        return iter(())


def together(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Joins batches into one. Raises ConfigurationError if they have more rows than one batch can have."""
    return one_batch(pa.Table.from_batches(batches), "rows of windows")


def budget(rows: int) -> int:
    """Returns about how many rows a step may pass to the function, if the step has scanned `rows` rows."""
    return max(STEP_ROWS, rows // _LOOKS)


def budget_over(rows: int) -> int:
    """Returns how many rows of windows that are over a step may remove, if the step has scanned `rows` rows."""
    return max(DROPPED_ROWS, rows // _LOOKS)


def parts_of(rows: int) -> int:
    """Returns the number of parts into which `rows` rows are divided for the calls of the function."""
    return -(-rows // STEP_ROWS)


def pieces(sizes: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Divides consecutive windows into groups of about `STEP_ROWS` rows. `sizes` has the number of rows of each window.

    Yields the start and end index of each group.
    """
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + STEP_ROWS, side="right")))
        yield start, stop
        start = stop


class TimedWindows(WindowOperator, WindowBuffer):
    """Base class of windows that store rows until the windows end. `time` names the event-time column, or is a `Clock`
    for processing time.

    Raises ConfigurationError for an allowed lateness with processing time.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: EventTimeWindow,
        time: str | Clock,
        schema: pa.Schema,
        calls: WindowCalls,
        lateness_ms: int,
        life: WindowLife | None = None,
        results: Sequence[pa.Field] = (),
        own: Sequence[pa.Field] = (),
    ) -> None:
        WindowOperator.__init__(self, spec, time, lateness_ms)
        if lateness_ms and self._clock is not None:
            raise ConfigurationError(
                f"{calls.name} with {spec!r}: allowed_lateness does not apply to processing time; remove it"
            )
        WindowBuffer.__init__(self, keys, schema, calls, life, results, own)
        self._spec = spec
        self._next_end_ms = MIN_WATERMARK_MS
        """A lower bound of the ends of the windows in the state, in ms."""

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError for tables that do not fit."""
        super().load(tables)
        # The first scan finds the end of the next window. On disk the number of rows is an estimate, which may be 0.
        self._next_end_ms = MIN_WATERMARK_MS

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Stores the rows of a batch.

        Raises OperatorError for a row without a time, or for columns of other types than declared.
        """
        with blame(self.context, batch):
            times = self._times(batch)
            if isinstance(self._time, str):
                self._fired.time_type = batch.schema.field(self._time).type
            ends = self.last_ends(batch, times)
            rows, keys = self.rows_of(batch)
        self.check_owner(keys)
        moments = self._fired.of_keys(keys, self.context.max_parallelism)
        late = self.last_ms(ends) <= moments
        in_time = self._drop_late(batch, late)
        if len(in_time) < batch.num_rows:
            picked = pa.array(in_time)
            rows, keys, times, ends = rows.take(picked), keys.take(picked), times[in_time], ends[in_time]
            moments = moments if isinstance(moments, int) else moments[in_time]
        if len(times):
            self.add_rows(rows, keys, times, ends, moments, emit)
            self.done()

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Calls the function with the windows that have ended at the watermark. Yields between two steps."""
        self.note_watermark(watermark_ms)
        return super().advance_watermark(watermark_ms, emit)

    def next_processing_time_ms(self) -> int | None:
        """Returns a time, in ms, at which the first window of processing time may end.

        None for event time or without stored rows.
        """
        return None if self._clock is None or self._next_end_ms == MAX_WATERMARK_MS else self._next_end_ms

    def last_ms(self, ends: Times) -> Times:
        """Returns the watermark at which each window with these ends is over, in ms."""
        return last_moments(ends, self._lateness_ms)

    def last_ends(self, batch: pa.RecordBatch, times: Times) -> Times:
        """Returns the end of the last window that each row belongs to, in ms.

        Raises ConfigurationError or OperatorError for times that are out of range.
        """
        del batch  # sessions may read the gap of a row
        return self._spec.last_end_ms(times)

    def add_rows(
        self,
        rows: pa.RecordBatch,
        keys: pa.RecordBatch,
        times: Times,
        ends: Times,
        moments: Times | int,
        emit: Emit,
    ) -> None:
        """Stores rows that are not late.

        `times` has their times, `ends` the ends of their last windows, and `moments` the time up to which windows of
        their key groups have fired, all in ms.
        """
        raise NotImplementedError

    def fire(self, until_ms: int, emit: Emit) -> bool:
        """Calls the function with windows that have ended at `until_ms`, up to the limit of a step. Returns False if
        there were none.

        Updates `_next_end_ms`.
        """
        raise NotImplementedError

    def remove_over(self, until_ms: int) -> Iterator[None]:
        """Removes the windows that are over at the watermark `until_ms`. Yields between two steps."""
        raise NotImplementedError

    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        self._fired.reach(moment_ms)
        timed = self._calls if isinstance(self._calls, FunctionCalls) and self._calls.has_timers else None
        chains = None if timed is None else timed.chains(at_end=moment_ms == TIME_MS_END)
        while True:
            first_ms = None if timed is None else timed.first_timer_ms()
            if first_ms is not None and first_ms <= moment_ms and first_ms < self._next_end_ms - 1:
                assert timed is not None and chains is not None, "timers without a function"
                for batch in timed.fire(min(moment_ms, self._next_end_ms - 2), chains, self._columns):
                    emit(batch)
            elif self._next_end_ms - 1 > moment_ms:
                break
            else:
                self._next_end_ms = MAX_WATERMARK_MS
                if not self.fire(moment_ms, emit):
                    continue
            yield
        yield from self.remove_over(moment_ms)
