"""`CountWindows`: aggregates of every so many rows of a key, in the order in which they come.

Rules (Flink's `countWindow`):

- A window comes out as soon as it is full. What a key has then is gone: it begins anew, without state.
- With a time-out a window comes out by the clock, so long after its first row, if it is not full before. A row that
  comes before the operator is called for that moment still belongs to the window.
- Windows that are not full when the input ends come out if that was asked for; else their rows are counted.
- Event time has no part: no row is late, and results have none.
- A batch is dealt out to windows at once. Where none becomes full, its rows are added to the state directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.state.keys import key_columns
from tidegate.operators.watermarks.late_rows import LEFT_RECORDS
from tidegate.operators.windows.due_keys import CountTimeouts
from tidegate.operators.windows.merged_groups import MergedGroups, codes_of
from tidegate.operators.windows.window_operator import WindowOperator
from tidegate.operators.windows.window_specs import Count
from tidegate.state.common.backend import ValueSpec
from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import scatter
from tidegate.state.kernels.partition import gather
from tidegate.storage.schemas.reserved_names import own_name
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

OPEN = own_name("open_window")
"""The column of the namespace in the state: always 0, a key has one open window."""
ROWS = own_name("window_rows")
"""How many rows the open window has: at least one, and fewer than it takes."""

DUE = own_name("window_due_ms")
"""When the time-out of the open window comes, in milliseconds of the clock. Only windows with a time-out have it."""

_Numbers = NDArray[np.int64]


class CountWindows(CountTimeouts, WindowOperator):
    """Aggregates of count windows. Without `keys`: of all rows of the stream."""

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: Count,
        aggregates: Mapping[str, Aggregate],
        input_schema: pa.Schema | None = None,
    ) -> None:
        extra: tuple[ValueSpec, ...] = (ValueSpec(ROWS, pa.int64(), 0),)
        if spec.timeout_ms is not None:
            extra = (*extra, ValueSpec(DUE, pa.int64(), 0))
        CountTimeouts.__init__(self, spec.timeout_ms)
        WindowOperator.__init__(self, keys, spec, aggregates, None, "final", OPEN, extra, input_schema)
        self._size, self._fires_at_end = spec.rows, spec.fire_at_end

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """CorruptionError if a stored table is not of these windows, or has keys of other subtasks."""
        super().open(context, restored)
        self.find_timeouts()

    def load(self, tables: Sequence[StateTable]) -> None:
        """CorruptionError as of all windows."""
        super().load(tables)
        self.find_timeouts()

    def finish(self, emit: Emit) -> Iterator[None]:
        """Fire the windows that are open, if that was asked for. Else count their rows."""
        if not self._state.exists:
            return
        table = self._state.table
        if self._fires_at_end:
            for keys, slots in table.drain_namespace(0, OUTPUT_ROWS_MAX):
                self._changed_rows += len(slots)
                emit(self._rows.output_without_bounds(self._state.user_keys(keys), self._state.results(slots)))
                yield
            return
        rows = self._state.extra(ROWS)
        left = sum(int(rows.raw(slots).sum()) for _, slots in table.scan_namespace(0, OUTPUT_ROWS_MAX))
        if left:
            self.context.metrics.counter(LEFT_RECORDS).inc(left)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the open windows."""
        return self.changes(cut)

    def _take_in(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Add the rows. Returns the windows that are full."""
        codes, distinct, count = codes_of(key_columns(batch, self._keys), batch.num_rows)
        table = self._state.table
        upserted = table.upsert(self._state.stored_keys(np.zeros(count, dtype=np.int64), distinct))
        if len(upserted.new_rows):
            self._state.check_owner(gather(distinct, upserted.new_rows) if self._keys else distinct)
        self._changed_rows += count
        held = self._state.extra(ROWS).raw(upserted.slots)
        left = held + np.bincount(codes, minlength=count)
        due_ms = 0 if self._timeout_ms is None else self.context.time.now_ms + self._timeout_ms
        dues = np.full(count, due_ms, dtype=np.int64)
        if self._timeout_ms is not None:
            dues = np.where(held > 0, self._state.extra(DUE).raw(upserted.slots), dues)
        if int(left.max()) < self._size:
            for accumulator in self._state.accumulators:
                accumulator.update(batch, upserted.slots[codes])
            scatter(self._state.extra(ROWS).pages, upserted.slots, left)
            if self._timeout_ms is not None:
                scatter(self._state.extra(DUE).pages, upserted.slots, dues)
                self._look_at(due_ms, distinct, np.flatnonzero(held == 0))
            table.done()
            self.forget_full()
            return []
        begun = np.flatnonzero(held)
        parts = self._state.parts(upserted.slots[begun])
        table.remove(upserted.slots)
        table.done()
        windows, firsts, lasts, of_keys, full = dealt_out(codes, held, self._size)
        merged = MergedGroups(self._state, len(of_keys))
        merged.merge(firsts[begun], parts)
        merged.update(batch, windows)
        merged.done()
        going_on = np.flatnonzero(left % self._size)
        begins = (held == 0) | (lasts != firsts)
        dues[begins] = due_ms
        self._put(distinct, going_on, left[going_on] % self._size, dues[going_on], merged, lasts)
        if self._timeout_ms is not None:
            self._look_at(due_ms, distinct, going_on[begins[going_on]])
            self.forget_full()
        complete = np.flatnonzero(full)
        keys = gather(distinct, of_keys[complete].astype(np.int32)) if self._keys else distinct
        rows = self._rows.output_without_bounds(keys, merged.results(complete))
        return [rows.slice(start, OUTPUT_ROWS_MAX) for start in range(0, rows.num_rows, OUTPUT_ROWS_MAX)]

    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        """Time has no part in these windows."""
        return iter(())

    def _put(
        self,
        distinct: pa.RecordBatch,
        codes: _Numbers,
        rows: _Numbers,
        dues: _Numbers,
        merged: MergedGroups,
        lasts: _Numbers,
    ) -> None:
        """Put the open windows of some keys into the state, which has nothing of these keys."""
        if not len(codes):
            return
        keys = gather(distinct, codes.astype(np.int32)) if self._keys else distinct
        upserted = self._state.table.upsert(self._state.stored_keys(np.zeros(len(codes), dtype=np.int64), keys))
        assert len(upserted.new_rows) == len(codes), "a window in the place of another one"
        scatter(self._state.extra(ROWS).pages, upserted.slots, rows)
        if self._timeout_ms is not None:
            scatter(self._state.extra(DUE).pages, upserted.slots, dues)
        self._state.merge(upserted.slots, merged.parts(lasts[codes]))
        self._state.table.done()

    def _look_at(self, due_ms: int, distinct: pa.RecordBatch, codes: _Numbers) -> None:
        """Look at some keys when their time-out comes."""
        if len(codes):
            self.wait_for(due_ms, gather(distinct, codes.astype(np.int32)) if self._keys else distinct)

    def fire_due(self, keys: pa.RecordBatch, now_ms: int, emit: Emit) -> None:
        """Fire the windows of some distinct keys, where their time-out has come."""
        table = self._state.table
        count = keys.num_rows if self._keys else 1
        found = table.upsert(self._state.stored_keys(np.zeros(count, dtype=np.int64), keys))
        is_open = np.ones(count, dtype=np.bool_)
        is_open[found.new_rows] = False
        dues = self._state.extra(DUE).raw(found.slots)
        fires = is_open & (dues <= now_ms)
        waits = np.flatnonzero(is_open & ~fires)
        rows = np.flatnonzero(fires)
        results = self._state.results(found.slots[rows])
        # To look a key up is to make a row for it. Those that were not there go again.
        table.remove(found.slots[fires | ~is_open])
        table.done()
        self._changed_rows += count
        if len(waits):
            self._look_at(int(dues[waits].min()), keys, waits)
        if len(rows):
            fired = gather(keys, rows.astype(np.int32)) if self._keys else keys
            emit(self._rows.output_without_bounds(fired, results))

    def open_windows(self) -> Iterator[tuple[pa.RecordBatch, _Numbers]]:
        """The keys that have an open window, and when its time-out comes."""
        if self._state.exists:
            for keys, slots in self._state.table.scan_namespace(0, OUTPUT_ROWS_MAX):
                yield self._state.user_keys(keys), self._state.extra(DUE).raw(slots)


def dealt_out(
    codes: _Numbers, held: _Numbers, size: int
) -> tuple[_Numbers, _Numbers, _Numbers, _Numbers, NDArray[np.bool_]]:
    """Deal rows out to windows, in their order. `held`: how many rows the open window of each key has.

    Returns the window of each row; the first and the last window of each key; for each window its key, and whether it
    is full. Windows are numbered in the order of their first rows here.
    """
    windows, of_keys = np.empty(len(codes), dtype=np.int64), np.empty(len(codes), dtype=np.int64)
    full = np.zeros(len(codes), dtype=np.bool_)
    firsts, lasts = np.full(len(held), -1, dtype=np.int64), np.full(len(held), -1, dtype=np.int64)
    count = _deal_out(codes, held.copy(), size, windows, firsts, lasts, of_keys, full)
    return windows, firsts, lasts, of_keys[:count], full[:count]


@kernel
def _deal_out(
    codes: NDArray[np.int64],
    rows: NDArray[np.int64],
    size: int,
    windows: NDArray[np.int64],
    firsts: NDArray[np.int64],
    lasts: NDArray[np.int64],
    of_keys: NDArray[np.int64],
    full: NDArray[np.bool_],
) -> int:
    count = 0
    for i in range(codes.shape[0]):
        code = codes[i]
        if lasts[code] < 0 or full[lasts[code]]:
            if firsts[code] < 0:
                firsts[code] = count
            else:
                rows[code] = 0
            lasts[code] = count
            of_keys[count] = code
            count += 1
        window = lasts[code]
        windows[i] = window
        rows[code] += 1
        full[window] = rows[code] == size
    return count
