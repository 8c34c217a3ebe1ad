"""Count windows: every `n` rows of a key, in the order of arrival, are a window. `CountWindows` aggregates the rows of
a window, and `FunctionCounts` calls a function with them.

Rules (Flink's `countWindow`):

- A window fires as soon as it is full. The state of the key is then removed, and the next row of the key opens a new
  window.
- With a timeout, a window that is not full fires when this time has passed since its first row, in processing time. A
  row that arrives before the operator is called for the timeout still belongs to the window.
- At the end of the input, windows that are not full fire if the program requests it. Otherwise their rows are dropped
  and counted.
- Event time is ignored: rows are never late, and results have no window bounds.
- All rows of a batch are assigned to windows in one call. If no window becomes full, its rows are added to the state
  directly.
- `FunctionCounts` stores the rows of windows that are not full, each with the time of the timeout of its window.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit, Operator, OperatorContext
from tidegate.operators.operator_errors import blame
from tidegate.operators.state.keys import key_columns
from tidegate.operators.watermarks.late_rows import LEFT_RECORDS
from tidegate.operators.windows.row_windows import PLACE, WindowBuffer
from tidegate.operators.windows.window_calls import WindowCalls
from tidegate.operators.windows.window_specs import Count, Numbers
from tidegate.operators.windows.window_state import AggregateWindows, MergedGroups, codes_of
from tidegate.state.common.backend import ValueSpec
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import scatter
from tidegate.state.kernels.partition import gather
from tidegate.storage.schemas.batches import one_batch
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

OPEN = own_name("open_window")
"""Name of the namespace column in the state. Its value is always 0, because a key has at most one open window."""
ROWS = own_name("window_rows")
"""Name of the column with the number of rows in the open window: at least one, and fewer than in a full window."""

DUE = own_name("window_due_ms")
"""Name of the column with the time of the open window's timeout, in ms since 1970.

Only windows with a timeout have this column.
"""

_SHARED = 256
_SPARE = 4_096
"""`DueKeys` is rebuilt when it has more keys than twice the number of open windows at the last rebuild, plus this
number.
"""
_KEYS_A_STEP = 1_024
"""Greatest number of windows that are passed to the function in one step at the end of the input."""


class CountTimeouts(Operator):
    """Base class of count windows with timeouts: keeps in memory which keys have an open window, and when to check
    them.

    `timeout_ms` is the time after the first row of a window, or None. Rules:

    - The time of a timeout is stored in the state of the window. An entry in memory is only a hint to check the key:
      its window may have become full in the meantime, and the key may have another window with its own entry.
    - After a restore the entries are rebuilt from the state. Several keys then share an entry at the earliest of their
      timeouts, and keys that are not due yet are added again.
    - Keys whose windows become full before the timeout leave outdated entries. When there are more than twice as many
      entries as there were open windows (`is_crowded`), the entries are rebuilt from the state, as after a restore.
    """

    def __init__(self, timeout_ms: int | None) -> None:
        self._timeout_ms = timeout_ms
        self._due = DueKeys()

    @abstractmethod
    def open_windows(self) -> Iterator[tuple[pa.RecordBatch, Numbers]]:
        """Yields the distinct keys that have an open window, in batches, each with the times of their timeouts in
        ms.
        """

    @abstractmethod
    def fire_due(self, keys: pa.RecordBatch, now_ms: int, emit: Emit) -> None:
        """Fires the windows of these distinct keys whose timeout has passed at `now_ms`."""

    def next_processing_time_ms(self) -> int | None:
        """Returns the time of the next timeout to check, in ms, or None if there is none.

        The window may have become full in the meantime.
        """
        return self._due.next_ms

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the windows whose timeout has passed. Yields between two batches of keys."""
        for keys in self._due.due(now_ms):
            self.fire_due(keys, now_ms, emit)
            yield

    def find_timeouts(self) -> None:
        """Rebuilds the timeouts in memory from the windows in the state."""
        self._due = DueKeys()
        if self._timeout_ms is not None:
            for keys, dues in self.open_windows():
                self._due.restore(keys, dues)

    def wait_for(self, due_ms: int, keys: pa.RecordBatch) -> None:
        """Registers that the windows of these distinct keys are checked at `due_ms`.

        Without key columns the stream has a single key.
        """
        self._due.add(due_ms, keys)

    def forget_full(self) -> None:
        """Rebuilds the timeouts in memory if most timeouts may belong to windows that have become full."""
        if self._due.is_crowded:
            self.find_timeouts()


class DueKeys:
    """Keys by the time, in ms, at which their windows have to be checked."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, pa.RecordBatch]] = []
        self._count = 0
        self._keys = 0
        self._restored = 0

    @property
    def next_ms(self) -> int | None:
        """Returns the time of the next check, in ms, or None if no keys are registered."""
        return self._entries[0][0] if self._entries else None

    @property
    def is_crowded(self) -> bool:
        """Returns True if there are many more entries than after the last rebuild, so that most entries may be
        useless.
        """
        return self._keys > 2 * self._restored + _SPARE

    def add(self, due_ms: int, keys: pa.RecordBatch) -> None:
        """Registers distinct keys to be checked at `due_ms`."""
        self._count += 1
        self._keys += _keys_in(keys)
        heapq.heappush(self._entries, (due_ms, self._count, keys))

    def restore(self, keys: pa.RecordBatch, dues: Numbers) -> None:
        """Registers distinct keys of the state, each to be checked at its timeout in `dues` or earlier."""
        order = np.argsort(dues, kind="stable")
        for start in range(0, len(order), _SHARED):
            rows = order[start : start + _SHARED]
            self.add(int(dues[rows[0]]), keys.take(pa.array(rows)) if keys.num_columns else keys)
        self._restored += len(order)

    def due(self, now_ms: int) -> Iterator[pa.RecordBatch]:
        """Removes and yields the keys that have to be checked at `now_ms` or before, in batches."""
        while self._entries and self._entries[0][0] <= now_ms:
            keys = heapq.heappop(self._entries)[2]
            self._keys -= _keys_in(keys)
            yield keys


def _keys_in(keys: pa.RecordBatch) -> int:
    """Returns the number of keys. Without key columns the stream has a single key."""
    return keys.num_rows if keys.num_columns else 1


class CountWindows(CountTimeouts, AggregateWindows):
    """Aggregates the rows of count windows. Without `keys`, the windows contain rows of the whole stream."""

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
        AggregateWindows.__init__(self, keys, spec, aggregates, None, "final", OPEN, extra, input_schema)
        self._size, self._fires_at_end = spec.rows, spec.fire_at_end

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the open windows.

        Raises CorruptionError for a table that is not the state of these windows, or has keys of other subtasks.
        """
        super().open(context, restored)
        self.find_timeouts()

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError for tables that do not fit."""
        super().load(tables)
        self.find_timeouts()

    def finish(self, emit: Emit) -> Iterator[None]:
        """Fires the open windows at the end of the input, if the program requests it.

        Otherwise only counts their rows.
        """
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
        """Returns a snapshot of the open windows."""
        return self.changes(cut)

    def _add_rows(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Adds the rows of a batch to windows. Returns the results of the windows that become full."""
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
        """Does nothing: these windows do not depend on time."""
        return iter(())

    def _put(
        self,
        distinct: pa.RecordBatch,
        codes: Numbers,
        rows: Numbers,
        dues: Numbers,
        merged: MergedGroups,
        lasts: Numbers,
    ) -> None:
        """Stores the open windows of keys that have no open window in the state.

        `codes` has the index of each window's key in `distinct`, `rows` the number of rows, `dues` the time of the
        timeout in ms, and `merged` and `lasts` the aggregates of each window.
        """
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

    def _look_at(self, due_ms: int, distinct: pa.RecordBatch, codes: Numbers) -> None:
        """Registers some keys to be checked at the timeout of their windows.

        `codes` has their indices in `distinct`.
        """
        if len(codes):
            self.wait_for(due_ms, gather(distinct, codes.astype(np.int32)) if self._keys else distinct)

    def fire_due(self, keys: pa.RecordBatch, now_ms: int, emit: Emit) -> None:
        """Fires the windows of these distinct keys whose timeout has passed at `now_ms`, and registers the other open
        windows again.
        """
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
        # Looking up a key makes a row for it. Rows that were not there before are removed again.
        table.remove(found.slots[fires | ~is_open])
        table.done()
        self._changed_rows += count
        if len(waits):
            self._look_at(int(dues[waits].min()), keys, waits)
        if len(rows):
            fired = gather(keys, rows.astype(np.int32)) if self._keys else keys
            emit(self._rows.output_without_bounds(fired, results))

    def open_windows(self) -> Iterator[tuple[pa.RecordBatch, Numbers]]:
        """Yields the keys that have an open window, and the time of its timeout in ms."""
        if self._state.exists:
            for keys, slots in self._state.table.scan_namespace(0, OUTPUT_ROWS_MAX):
                yield self._state.user_keys(keys), self._state.extra(DUE).raw(slots)


def dealt_out(codes: Numbers, held: Numbers, size: int) -> tuple[Numbers, Numbers, Numbers, Numbers, NDArray[np.bool_]]:
    """Assigns rows to count windows of `size` rows, in their order.

    `codes` has the key number of each row, `held` the number of rows in the open window of each key. Returns the window
    of each row, the first and the last window of each key, and, for each window, its key number and whether it is full.
    Windows are numbered in the order of their first rows.
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


class FunctionCounts(CountTimeouts, WindowBuffer):
    """Calls a function with the rows of each count window."""

    def __init__(self, keys: tuple[str, ...], spec: Count, schema: pa.Schema, calls: WindowCalls) -> None:
        CountTimeouts.__init__(self, spec.timeout_ms)
        WindowBuffer.__init__(self, keys, schema, calls)
        self._size, self._fires_at_end = spec.rows, spec.fire_at_end

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state.

        Raises CorruptionError and ConfigurationError for tables that do not fit.
        """
        super().load(tables)
        self.find_timeouts()

    def finish(self, emit: Emit) -> Iterator[None]:
        """Calls the function with the open windows at the end of the input, if the program requests it.

        Otherwise only counts their rows.
        """
        if self._fires_at_end:
            keys, _ = self._open_keys()
            for start in range(0, keys.num_rows, _KEYS_A_STEP):
                self._give(keys.slice(start, _KEYS_A_STEP), None, emit)
                yield
            return
        left = sum(len(refs) for _, refs in self.tables[0].scan([PLACE], OUTPUT_ROWS_MAX))
        if left:
            self.context.metrics.counter(LEFT_RECORDS).inc(left)

    def open_windows(self) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """Yields the stored keys that have an open window, with the times of their timeouts in ms."""
        yield self._open_keys()

    def fire_due(self, keys: pa.RecordBatch, now_ms: int, emit: Emit) -> None:
        """Calls the function with the windows of these distinct keys whose timeout has passed at `now_ms`."""
        self._give(keys, now_ms, emit)

    def _open_keys(self) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Returns the distinct stored keys that have an open window, and the times of their timeouts in ms."""
        places, _, keys = self.scanned(0, self.keys.names)
        if not keys.num_rows:
            return pa.RecordBatch.from_pylist([], self.keys), places
        codes, distinct, _ = codes_of(keys, keys.num_rows)
        return distinct, places[np.unique(codes, return_index=True)[1]]

    def _give(self, keys: pa.RecordBatch, now_ms: int | None, emit: Emit) -> None:
        """Calls the function with the windows of these keys whose timeout has passed at `now_ms`, or with all of their
        windows if it is None.
        """
        table = self.tables[0]
        found = table.find(keys)
        places = self.places_of(found.refs)
        due = np.ones(len(places), dtype=np.bool_) if now_ms is None else places <= now_ms
        waiting = ~due
        if waiting.any():
            rows = pa.array(distinct_integers(found.keys[waiting]))
            self.wait_for(int(places[waiting].min()), keys.take(rows))
        rows, refs = self.taken(found.refs[due]), found.refs[due]
        groups = np.unique(found.keys[due], return_inverse=True)[1]
        table.remove(refs)
        table.done()
        if len(refs):
            self.call(rows, groups, None, emit, self.context)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Calls the function with the windows that become full, and stores the other rows."""
        with blame(self.context, batch):
            rows, keys = self.rows_of(batch)
        self.check_owner(keys)
        table = self.tables[0]
        codes, distinct, count = codes_of(keys, batch.num_rows)
        found = table.find(distinct)
        held = np.bincount(found.keys, minlength=count)
        windows, firsts, _, of_keys, full = dealt_out(codes, held, self._size)
        of_stored = firsts[found.keys]
        now_ms = self.context.time.now_ms
        dues = np.full(len(of_keys), 0 if self._timeout_ms is None else now_ms + self._timeout_ms, dtype=np.int64)
        if self._timeout_ms is not None:
            begun = ~full
            dues[of_stored] = self.places_of(found.refs)
            begun[of_stored] = False
            if begun.any():
                self.wait_for(now_ms + self._timeout_ms, distinct.take(pa.array(of_keys[begun])))
        stays = ~full[windows]
        came = np.flatnonzero(~stays)
        taken = found.refs[full[of_stored]]
        stored = self.taken(taken)
        table.remove(taken)
        left = pa.array(np.flatnonzero(stays))
        self.keep(rows.take(left), keys.take(left), dues[windows[stays]])
        table.done()
        self.forget_full()
        if not len(came):
            return
        both = one_batch(pa.Table.from_batches([stored, rows.take(pa.array(came))]), "rows of windows")
        numbers = np.full(len(of_keys), -1, dtype=np.int64)
        numbers[full] = np.arange(int(full.sum()))
        groups = np.concatenate([numbers[of_stored[full[of_stored]]], numbers[windows[came]]])
        self.call(both, groups, None, emit, self.context)
