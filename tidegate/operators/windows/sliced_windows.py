"""`SlicedWindows` aggregates the rows of each key and window, for windows that depend only on the time of a row:
tumbling, sliding and cumulating windows.

Rules:

- Each row is added to exactly one slice (`slices.py`). Windows need no timers: when the watermark passes the end of a
  window, the operator reads the slices of that window and emits its keys in batches.
- Several windows that have ended are emitted in one step and in one batch (`BundleReader`). A window with many rows is
  emitted in a separate step.
- Each window fires once. `FiredGroups` stores how far firing has got, and is updated in the same step that emits
  results or deletes rows. A checkpoint between two steps therefore neither repeats nor loses a result.
- A row is late when the watermark is more than `allowed_lateness` after the end of its last window. Late rows are
  dropped and counted. If a window has fired but is within the lateness, a row for this window emits a new result for
  its key at once.
- With `emit="update"`, each batch emits the current results of the keys it changed. The end of a window emits nothing.
- With `emit_every_ms`, these results are emitted at that interval of processing time, or of event time
  (`emit_by_event`), and when a window ends (`EarlyResults`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.state.keys import key_columns
from tidegate.operators.windows.node_reader import BundleReader, NodeReader
from tidegate.operators.windows.slices import Window, due, slices_of
from tidegate.operators.windows.window_operator import TIME_MS_END
from tidegate.operators.windows.window_specs import Clock, Cumulating, Sliding, Times, Tumbling
from tidegate.operators.windows.window_state import AggregateWindows, codes_of
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.state.kernels.columns import fixed_values
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.batches import one_batch
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.state.snapshot import StateTable

SLICE = own_name("slice")
"""Name of the namespace column in the state: the id of a node, which is a slice or several merged slices (`slices.py`).
"""

_STEP_ROWS = 4 * OUTPUT_ROWS_MAX
"""Number of rows of the state that are read in one step, approximately."""
_WINDOWS_A_STEP = 128
"""Greatest number of windows with few rows that are emitted in one step and one batch."""
_NODES_A_STEP = 1_024
"""Greatest number of nodes that are removed in one step."""
_LARGE_WINDOWS = 64
"""After a window with too many rows for a bundle, this number of windows is emitted one by one before a bundle is tried
again.
"""
CHANGED_MAX = 1 << 20
"""Greatest number of changed keys that are stored, where a key counts once per slice.

At this number, results are emitted at once.
"""


class SlicedWindows(AggregateWindows):
    """Aggregates of tumbling, sliding and cumulating windows for each key. Without `keys`, aggregates of all rows.

    Raises ConfigurationError for no aggregates, names that clash, or settings that contradict each other.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: Tumbling | Sliding | Cumulating,
        aggregates: Mapping[str, Aggregate],
        time: str | Clock,
        emit: Literal["final", "update"] = "final",
        allowed_lateness_ms: int = 0,
        emit_every_ms: int | None = None,
        input_schema: pa.Schema | None = None,
        emit_by_event: bool = False,
    ) -> None:
        assert not (emit_by_event and isinstance(time, Clock)), "event time of windows that have none"
        self._by_event, self._reached_ms = emit_by_event, MIN_WATERMARK_MS
        super().__init__(
            keys, spec, aggregates, time, emit, SLICE, input_schema=input_schema, lateness_ms=allowed_lateness_ms
        )
        self._spec = spec
        self._every_ms = emit_every_ms
        self._early: EarlyResults | None = None
        self._final = emit == "final" and emit_every_ms is None
        if isinstance(spec, Cumulating) and allowed_lateness_ms:
            raise ConfigurationError(
                "windows: allowed_lateness is not supported for Cumulating: the rows of shorter windows are not kept; "
                "remove it. A late row counts in the windows that have not ended"
            )
        self._slices = slices_of(spec)
        self._drains = isinstance(spec, Tumbling) and self._final and not allowed_lateness_ms
        """True if a window is one slice that is not needed once the window has fired.

        Its rows are removed as they are read.
        """
        self._is_bundled = not isinstance(spec, Tumbling)
        """True if windows consist of several nodes."""
        self._bundle_max, self._large_left = _WINDOWS_A_STEP, 0

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the state.

        Raises CorruptionError if a table is not the state of these windows, or has keys of other subtasks.
        """
        super().open(context, restored)
        self._combined = NodeReader(self._state)
        self._bundles = BundleReader(self._state)
        if self._every_ms is not None:
            self._early = self._early_results(self._every_ms, self._state.exists)

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError for tables that do not fit."""
        super().load(tables)
        if self._every_ms is not None:
            self._early = self._early_results(self._every_ms, True)

    def next_processing_time_ms(self) -> int | None:
        """Returns the time at which to emit early results, or at which the first window of processing time ends, in ms.

        None if there is no such time.
        """
        now_ms = self.context.time.now_ms
        if self._early is None:
            early_ms = None
        elif self._by_event:
            early_ms = now_ms if self._early.is_full else None
        else:
            early_ms = self._early.due_ms(now_ms)
        if self._clock is None or not self._state.exists:
            return early_ms
        window = self._slices.next_window(self._state.namespaces, self._fired.least_ms)
        moments = [moment for moment in (early_ms, None if window is None else window.end_ms) if moment is not None]
        return min(moments, default=None)

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the windows of processing time that have ended at `now_ms`, and emits early results of other windows if
        they are due.
        """
        yield from super().on_processing_time(now_ms, emit)
        if not self._by_event or (self._early is not None and self._early.is_full):
            yield from self._emit_early(now_ms, emit)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the windows that have ended at the watermark.

        Emits early results of other windows if they are due by event time.
        """
        yield from super().advance_watermark(watermark_ms, emit)
        if self._by_event:
            self._reached_ms = max(self._reached_ms, self.reached_ms(watermark_ms))
            # A watermark may come between two steps of an emission, which then emits everything that remains.
            if self._early is not None and not self._early.is_emitting:
                yield from self._emit_early(self._reached_ms, emit)

    def _early_results(self, every_ms: int, restored: bool) -> EarlyResults:
        at_once_ms = MIN_WATERMARK_MS if self._by_event else 0
        return EarlyResults(every_ms, restored=restored, at_once_ms=at_once_ms)

    def _emit_early(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Emits the results of changed keys in windows that have not ended, if they are due at `now_ms`.

        A step emits one window of some key groups.
        """
        if self._early is None or (due_ms := self._early.due_ms(now_ms)) is None or now_ms < due_ms:
            return
        changed = self._early.begin()
        out = not self._state.exists
        while not out:
            runs, out = [*self._fired.runs()], True
            for _ in self._early_steps(runs, changed, emit):
                yield
                if [*self._fired.runs()] != runs:
                    # An operator before this one has released a watermark. The rest belongs to other windows.
                    out = False
                    break
        self._early.done()

    def _early_steps(self, runs: Sequence[tuple[range, int]], changed: ChangedKeys, emit: Emit) -> Iterator[None]:
        """Emits the results of changed keys in windows that have not fired. Yields after each step.

        `runs` has ranges of key groups, each with the time up to which their windows have fired.
        """
        for groups, fired_ms in runs:
            for part in self._steps_of(groups):
                moment_ms = fired_ms
                nodes = self._state.namespaces if changed.everything else changed.slices
                while (window := self._slices.next_window(nodes, moment_ms)) is not None:
                    parts = self._slices.parts(self._state.namespaces, window, fired_ms)
                    self._emit_changed(window, parts, moment_ms, part, (changed,), emit)
                    moment_ms = window.end_ms - 1
                    yield

    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the windows that have ended at `moment_ms`, in each step some windows of some key groups.

        Then removes slices that are over.
        """
        for groups, fired_ms in [*self._fired.runs()]:
            for part in self._steps_of(groups):
                if fired_ms < moment_ms:
                    yield from self._advance(part, fired_ms, moment_ms, emit)
        yield from self._clean()

    def _add_rows(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Adds the rows of a batch to their slices.

        Returns results to emit at once, of windows that have fired already.
        """
        times = self._times(batch)
        keys = key_columns(batch, self._keys)
        runs = [*self._fired.runs()]
        if len(runs) == 1:
            return self._take_in_at(batch, keys, times, runs[0][1])
        groups = key_groups_of(hash_columns(keys, self._keys), self.context.max_parallelism)
        updates = []
        for of, fired_ms in runs:
            rows = np.flatnonzero((groups >= of.start) & (groups < of.stop)).astype(np.int32)
            if len(rows):
                updates += self._take_in_at(gather(batch, rows), gather(keys, rows), times[rows], fired_ms)
        return updates

    def _take_in_at(
        self, batch: pa.RecordBatch, keys: pa.RecordBatch, times: Times, fired_ms: int
    ) -> list[pa.RecordBatch]:
        """Adds rows to their slices. All rows belong to key groups that have fired their windows up to `fired_ms`.

        Returns results to emit at once, of windows that have fired already.
        """
        over_ms = max(MIN_WATERMARK_MS, fired_ms - self._lateness_ms)
        if self._spec.last_end_ms(times.min(keepdims=True))[0] - 1 <= over_ms:
            late = self._spec.last_end_ms(times) - 1 <= over_ms
            rows = self._drop_late(batch, late).astype(np.int32)
            if not len(rows):
                return []
            batch, keys, times = gather(batch, rows), gather(keys, rows), times[rows]
        for chosen, nodes in self._slices.targets(times, fired_ms):
            if chosen is None:
                self._add(batch, keys, nodes)
            else:
                self._add(gather(batch, chosen), gather(keys, chosen), nodes)
        if self._early is not None:
            slices = self._slices.targets(times, MIN_WATERMARK_MS)[0].nodes
            self._early.note(slices, keys, self._reached_ms if self._by_event else self.context.time.now_ms)
        elif not self._final:
            return self._updates(keys, times, fired_ms, over_ms, TIME_MS_END)
        return self._updates(keys, times, fired_ms, over_ms, fired_ms) if self._lateness_ms else []

    def _add(self, batch: pa.RecordBatch, keys: pa.RecordBatch, nodes: Times) -> None:
        table = self._state.table
        upserted = table.upsert(self._state.stored_keys(nodes, keys))
        if len(upserted.new_rows):
            self._state.check_owner(gather(keys, upserted.new_rows))
            self._state.appeared(distinct_integers(nodes[upserted.new_rows]))
        self._state.add(batch, upserted.slots)
        table.done()
        self._changed_rows += len(upserted.first_rows)

    def _updates(
        self, keys: pa.RecordBatch, times: Times, fired_ms: int, after_ms: int, until_ms: int
    ) -> list[pa.RecordBatch]:
        """Returns the results of the keys of some rows, for the windows of these rows whose last millisecond is after
        `after_ms` and not after `until_ms`.
        """
        if int(times.min()) > until_ms:
            return []
        slices = self._slices.targets(times, MIN_WATERMARK_MS)[0].nodes
        rows_of: dict[Window, list[NDArray[np.bool_]]] = {}
        for node in distinct_integers(slices).tolist():
            moment_ms, alone = after_ms, np.array([node], dtype=np.int64)
            while (window := self._slices.next_window(alone, moment_ms)) and window.end_ms - 1 <= until_ms:
                rows_of.setdefault(window, []).append(slices == node)
                moment_ms = window.end_ms - 1
        updates = []
        for window, masks in sorted(rows_of.items()):
            rows = np.flatnonzero(np.logical_or.reduce(masks)).astype(np.int32)
            parts = self._slices.parts(self._state.namespaces, window, fired_ms)
            found, results = self._combined.of_keys(parts, gather(keys, rows), len(rows))
            updates.append(self._output(found, window, results))
        return updates

    def _emit_changed(
        self,
        window: Window,
        parts: Sequence[int],
        before_ms: int,
        groups: range,
        changes: Sequence[ChangedKeys],
        emit: Emit,
    ) -> None:
        """Emits a window for the keys that have changed in its slices, in some key groups. `parts` are the nodes of the
        window.

        The window must be the first window after the time `before_ms`.
        """
        everything = any(changed.everything for changed in changes)
        found: list[pa.RecordBatch] = []
        for changed in changes if not everything else ():
            of_window = [
                node
                for node in changed.slices.tolist()
                if self._slices.next_window(np.array([node], dtype=np.int64), before_ms) == window
            ]
            found += changed.of(of_window)
        if not everything and not found:
            return
        if everything or not self._keys:
            # Without keys there is one row, in one of the key groups.
            for keys, results in self._combined.of_groups(parts, self._part(groups)):
                emit(self._output(keys, window, results))
            return
        keys = one_batch(pa.Table.from_batches(found), "keys of a window")
        if self._part(groups) is not None:
            of = key_groups_of(hash_columns(keys, self._keys), self.context.max_parallelism)
            keys = keys.filter(pa.array((of >= groups.start) & (of < groups.stop)))
        _, distinct, _ = codes_of(keys, keys.num_rows)
        for start in range(0, distinct.num_rows, OUTPUT_ROWS_MAX):
            piece = distinct.slice(start, OUTPUT_ROWS_MAX)
            found_keys, results = self._combined.of_keys(parts, piece, piece.num_rows)
            emit(self._output(found_keys, window, results))

    def _steps_of(self, groups: range) -> list[range]:
        """Divides a range of key groups into ranges with about as many rows as one step may read."""
        rows = self._state.table.rows if self._state.exists else 0
        per_group = rows // len(self._groups) + 1
        each = max(1, _STEP_ROWS // per_group)
        return [groups[start : start + each] for start in range(0, len(groups), each)]

    def _advance(self, groups: range, fired_ms: int, until_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the windows of some key groups that end after `fired_ms` and not after `until_ms`.

        A step fires several windows with few rows, or one window.
        """
        while windows := due(self._slices, self._state.namespaces, fired_ms, until_ms, self._at_once()):
            windows = self._fire(windows, groups, fired_ms, emit)
            fired_ms = windows[-1].end_ms - 1
            self._fired.advance(groups, fired_ms)
            yield
        self._merge(groups, fired_ms, until_ms)
        self._fired.advance(groups, until_ms)

    def _at_once(self) -> int:
        """Returns how many windows the next step should try to fire together."""
        if not self._final or self._large_left or not self._state.exists:
            return 1
        if not self._is_bundled:
            return max(
                1, min(_WINDOWS_A_STEP, _STEP_ROWS * len(self._state.namespaces) // (self._state.table.rows + 1))
            )
        return self._bundle_max

    def _fire(self, windows: list[Window], groups: range, fired_ms: int, emit: Emit) -> list[Window]:
        """Fires windows, or only the first one if they have too many rows for one step.

        Returns the windows that were fired.
        """
        if not self._final:
            self._merge(groups, fired_ms, windows[0].end_ms - 1)
            if self._early is not None:
                parts = self._slices.parts(self._state.namespaces, windows[0], windows[0].end_ms - 1)
                self._emit_changed(windows[0], parts, fired_ms, groups, self._early.not_out, emit)
            return windows
        if not self._is_bundled:
            self._fire_slices(windows, groups, emit)
            return windows
        if len(windows) == 1 and isinstance(self._spec, Cumulating):
            # Alone it is one node once its last slice is merged, which takes less than a bundle does.
            self._large_left = max(0, self._large_left - 1)
            self._bundle_max = max(2, self._bundle_max)
            self._fire_alone(windows[0], groups, fired_ms, emit)
            return windows
        while self._large_left == 0:
            if self._fire_bundle(windows, groups, fired_ms, emit):
                self._bundle_max = min(2 * self._bundle_max, _WINDOWS_A_STEP)
                return windows
            if len(windows) == 1:
                self._large_left = _LARGE_WINDOWS
            self._bundle_max = max(1, len(windows) // 4)
            windows = windows[: self._bundle_max]
        self._large_left -= 1
        self._fire_alone(windows[0], groups, fired_ms, emit)
        return windows[:1]

    def _fire_slices(self, windows: Sequence[Window], groups: range, emit: Emit) -> None:
        """Fires windows that each consist of one slice."""
        table = self._state.table
        read = table.drain_namespaces if self._drains else table.scan_namespaces
        parts = [self._slices.parts(self._state.namespaces, window, window.end_ms - 1)[0] for window in windows]
        for keys, slots in read(parts, OUTPUT_ROWS_MAX, self._part(groups)):
            numbers = np.searchsorted(parts, fixed_values(keys.column(0)))
            self._emit_rows(windows, numbers, self._state.user_keys(keys), self._state.results(slots), emit)

    def _fire_bundle(self, windows: Sequence[Window], groups: range, fired_ms: int, emit: Emit) -> bool:
        """Fires several windows in one step. If they have too many rows, fires no window and returns False."""
        bundle = self._slices.bundle(self._state.namespaces, windows, fired_ms)
        found = self._bundles.read(bundle, self._part(groups))
        if found is None:
            return False
        self._changed_rows += self._bundles.store(found)
        self._drain(bundle.taken, groups)
        for start in range(0, len(found.windows), OUTPUT_ROWS_MAX):
            rows = slice(start, start + OUTPUT_ROWS_MAX)
            keys = found.keys.slice(start, OUTPUT_ROWS_MAX) if self._keys else found.keys
            results = [each.slice(start, OUTPUT_ROWS_MAX) for each in found.results]
            self._emit_rows(windows, found.windows[rows], keys, results, emit)
        return True

    def _fire_alone(self, window: Window, groups: range, fired_ms: int, emit: Emit) -> None:
        """Fires one window. Reads its nodes one after the other, so that the number of rows is not limited."""
        moment_ms = window.end_ms - 1
        self._merge(groups, fired_ms, moment_ms)
        parts = self._slices.parts(self._state.namespaces, window, moment_ms)
        for keys, results in self._combined.of_groups(parts, self._part(groups)):
            emit(self._output(keys, window, results))

    def _merge(self, groups: range, fired_ms: int, until_ms: int) -> None:
        """Creates the nodes that end after `fired_ms` and not after `until_ms`, by merging smaller nodes.

        A node is always created completely in one step. Otherwise a part would be merged twice after a restore.
        """
        for node, parts, taken in self._slices.merges(self._state.namespaces, fired_ms, until_ms):
            for part in parts:
                self._changed_rows += self._combined.merge_into(node, part, taken, self._part(groups))
            if taken and len(groups) == len(self._groups):
                self._state.emptied(parts)

    def _drain(self, nodes: Sequence[int], groups: range) -> None:
        """Removes the rows of nodes that were merged into other nodes, in some key groups."""
        if nodes:
            for _, slots in self._state.table.drain_namespaces(nodes, OUTPUT_ROWS_MAX, self._part(groups)):
                self._changed_rows += len(slots)
            if len(groups) == len(self._groups):
                self._state.emptied(nodes)

    def _clean(self) -> Iterator[None]:
        """Removes slices that no window needs any more. Yields between two steps."""
        over = self._slices.over(self._state.namespaces, self._fired.least_ms - self._lateness_ms).tolist()
        for start in range(0, len(over), _NODES_A_STEP):
            nodes = over[start : start + _NODES_A_STEP]
            for _, slots in self._state.table.drain_namespaces(nodes, _STEP_ROWS):
                self._changed_rows += len(slots)
                yield
            self._state.emptied(nodes)
            if self._early is not None:
                self._early.forget(nodes)

    def _emit_rows(
        self,
        windows: Sequence[Window],
        numbers: NDArray[np.int64],
        keys: pa.RecordBatch,
        results: Sequence[pa.Array],
        emit: Emit,
    ) -> None:
        """Emits result rows of several windows. `numbers` has the index in `windows` of the window of each row."""
        if not len(numbers):
            return
        assert self._fired.time_type is not None, "results before the first row"
        bounds = np.array(windows, dtype=np.int64)
        starts, ends = bounds[numbers, 0], bounds[numbers, 1]
        emit(self._rows.output_of(keys, starts, ends, results, self._fired.time_type, self._spec))

    def _part(self, groups: range) -> range | None:
        """Returns `groups`, or None if they are all key groups of the subtask."""
        return None if len(groups) == len(self._groups) else groups

    def _output(self, keys: pa.RecordBatch, window: Window, results: Sequence[pa.Array]) -> pa.RecordBatch:
        assert self._fired.time_type is not None, "results before the first row"
        return self._rows.output(keys, window, results, self._fired.time_type, self._spec)


class ChangedKeys:
    """The keys that have changed in each slice since the last early results, each key once. Without key columns, only
    the changed slices.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything
        """True if all keys of all slices count as changed."""
        self._index: dict[int, KeyIndex] = {}
        self._keys: dict[int, list[pa.RecordBatch]] = {}
        self.rows = 0
        """Number of stored keys, each counted once for each slice."""

    def __bool__(self) -> bool:
        return self.everything or bool(self._keys)

    @property
    def slices(self) -> Times:
        """Returns the slices with changed keys, ascending."""
        return np.array(sorted(self._keys), dtype=np.int64)

    def add(self, slices: Times, keys: pa.RecordBatch) -> None:
        """Marks the key of each row as changed in the slice of the row. `slices` has the slice of each row."""
        if self.everything:
            return
        for node in distinct_integers(slices).tolist():
            if not keys.num_columns:
                if node not in self._keys:
                    self._keys[node] = [keys.slice(0, 0)]
                    self.rows += 1
                continue
            rows = keys.filter(pa.array(slices == node))
            index = self._index.setdefault(node, KeyIndex(tuple(keys.schema.names)))
            new = index.upsert(rows).new_rows
            if len(new):
                self._keys.setdefault(node, []).append(rows.take(pa.array(new)))
                self.rows += len(new)

    def of(self, slices: Iterable[int]) -> list[pa.RecordBatch]:
        """Returns the changed keys of these slices, in batches. A key may occur more than once."""
        return [keys for node in slices for keys in self._keys.get(node, ())]

    def forget(self, slices: Iterable[int]) -> None:
        """Removes the changed keys of these slices."""
        for node in slices:
            self._index.pop(node, None)
            # A batch without columns has no rows, and is counted as one row.
            self.rows -= sum(keys.num_rows or 1 for keys in self._keys.pop(node, ()))


class EarlyResults:
    """Tracks which keys of windows have changed since their results were last emitted, and when to emit results next.

    Rules:

    - Only the slices and keys that changed are stored, in memory. Results are computed when they are emitted.
    - After a restore it is not known what has changed, so all keys count as changed once.
    - Results are emitted at multiples of the interval, in processing time or in event time, at the same times in all
      subtasks. Without changes nothing is emitted. When `CHANGED_MAX` changed keys are stored, results are emitted at
      once.
    - Keys count as changed until their results were emitted completely, because the end of the input may interrupt the
      emission.
    """

    def __init__(self, every_ms: int, *, restored: bool, at_once_ms: int = 0) -> None:
        """Creates the tracker.

        `every_ms` is the interval. `restored` is True after a restore, when all keys are treated as changed.
        `at_once_ms` is a time that is certainly in the past.
        """
        self._every_ms, self._at_once_ms = every_ms, at_once_ms
        self._changed = ChangedKeys(everything=restored)
        self._emitting = ChangedKeys()
        self._due_ms: int | None = at_once_ms if restored else None

    def note(self, slices: Times, keys: pa.RecordBatch, now_ms: int) -> None:
        """Marks the key of each row as changed in the slice of the row. `slices` has the slice of each row."""
        self._changed.add(slices, keys)
        if self._changed.rows >= CHANGED_MAX:
            self._due_ms = self._at_once_ms
        elif self._due_ms is None:
            self._due_ms = self._next_ms(now_ms)

    def due_ms(self, now_ms: int) -> int | None:
        """Returns the time of the next emission in ms, or None without changes.

        A clock that was set back does not delay the emission.
        """
        return None if self._due_ms is None else min(self._due_ms, self._next_ms(now_ms))

    @property
    def is_emitting(self) -> bool:
        """Returns True if the emission that `begin` started is not finished."""
        return bool(self._emitting)

    @property
    def is_full(self) -> bool:
        """Returns True if `CHANGED_MAX` changed keys are stored, so that results are emitted at once."""
        return self._changed.rows >= CHANGED_MAX

    def begin(self) -> ChangedKeys:
        """Starts to emit early results, and returns the changed keys. Call `done` when their results are emitted."""
        assert not self._emitting, "results come out already"
        self._emitting, self._changed, self._due_ms = self._changed, ChangedKeys(), None
        return self._emitting

    def done(self) -> None:
        """Records that the emission that `begin` started is finished."""
        self._emitting = ChangedKeys()

    @property
    def not_out(self) -> tuple[ChangedKeys, ChangedKeys]:
        """Returns the changes whose results may not have been emitted yet: changes of the running emission, and later
        changes.
        """
        return self._emitting, self._changed

    def forget(self, slices: Iterable[int]) -> None:
        """Removes the changes in slices that no window needs any more."""
        for node in slices:
            self._emitting.forget([node])
            self._changed.forget([node])

    def _next_ms(self, now_ms: int) -> int:
        return now_ms - now_ms % self._every_ms + self._every_ms
