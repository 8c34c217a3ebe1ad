"""`ColumnarTimers`: timers in memory, as a table without values whose keys are (key, clock, moment).

Snapshots and the undo log treat this table like any other state. `TimerRuns` stores the order in which the timers of
one clock fire, as sorted runs of moments and slots. Rules:
- Timers that are registered together become a run, sorted by moment. Runs are merged until each is at most half as long
  as the previous one. There are then about log2(timers) runs, and a timer is moved about as often. This is the
  logarithmic method (Bentley and Saxe, Decomposable Searching Problems, 1980).
- The timers that are due first move to the front: runs that are sorted by moment and key. All timers up to the horizon,
  the last moment that was moved there, are in front, except timers registered since. They follow at the next `due`.
- A slot is in at most one run. Deleting a timer leaves its slot in place; the slot is skipped when it is due or at a
  merge. If the timer is registered again before that, the slot is still in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.paged_state import FrozenSlots, SortedSlots
from tidegate.state.columnar.undo_log import Notes, UndoLog
from tidegate.state.columnar.vector_table import ColumnarTable
from tidegate.state.common.backend import DueTimers
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.schemas.arrow_types import comparable
from tidegate.storage.state.snapshot import Cut, FrozenChanged, FrozenState, StateChunk, StateTable
from tidegate.storage.state.stored_rows import (
    DOMAINS,
    TIMER_DOMAIN,
    TIMER_MOMENT,
    TIMERS_STATE,
    check_timers,
    domain_column,
    domain_numbers,
    timers_schema,
)

_QUEUED_SLOTS = 1 << 20
"""Number of slots whose timers are sorted at once after a restore."""
FRONT_TIMERS = 4096
"""Approximate number of timers that move to the front at once."""
_LOOK_MIN, _LOOK_MAX = 16, 65_536
Moments = NDArray[np.int64]
Slots = NDArray[np.int32]


class ColumnarTimers:
    """A `KeyedTimers` in memory, with a separate key space. `other_log` is the undo log of the operator's other
    states.
    """

    def __init__(self, max_parallelism: int, key_names: tuple[str, ...], incremental: bool, other_log: UndoLog) -> None:
        names = (*key_names, TIMER_DOMAIN, TIMER_MOMENT)
        self.undo = UndoLog(other_log.bytes_max, other_log)
        """The undo log of the timers."""
        self._space = KeySpace(max_parallelism, names, self.undo, grouped_by=key_names)
        self._table = _TimerTable(self._space, len(key_names), incremental)
        self._keys: pa.Schema | None = None
        self.used = False
        """True if there has ever been a timer."""

    def count(self, limit: int) -> int:
        """Returns the number of timers, but at most `limit`."""
        return min(self._table.rows, limit)

    def fix_keys(self, schema: pa.Schema) -> None:
        """Sets the stored key columns. Called once, before the first key."""
        self._keys = schema
        self._space.fix(pa.schema([*schema, (TIMER_DOMAIN, pa.uint8()), (TIMER_MOMENT, pa.int64())]))

    def change(
        self, keys: pa.RecordBatch, domains: Sequence[int], moments: Sequence[int], registered: Sequence[bool]
    ) -> None:
        """Registers or deletes timers. If a timer is changed several times, the last change is applied."""
        schema = self._space.schema
        assert schema is not None, "timers before their key columns are known"
        self.used = True
        clocks, times = np.array(domains, dtype=np.uint8), np.array(moments, dtype=np.int64)
        rows = pa.RecordBatch.from_arrays([*keys.columns, pa.array(clocks), pa.array(times)], schema=schema)
        slots = self._space.upsert(rows).slots
        distinct, from_end = np.unique(slots[::-1], return_index=True)
        last = len(slots) - 1 - from_end
        self._table.put(distinct, clocks[last], times[last], np.array(registered, dtype=np.bool_)[last])
        self._space.settle()

    def first_ms(self, domain: int) -> int | None:
        """Returns the time, in ms, of the first timer in a time domain, or None if the domain has no timers."""
        return self._table.queues[domain].first_ms()

    def due(self, domain: int, time_ms: int, timers_max: int) -> DueTimers:
        """Returns the first timers of a time domain up to `time_ms`, in the order in which they fire."""
        assert self._keys is not None, "timers before their key columns are known"
        moments, slots, more = self._table.queues[domain].due(time_ms, timers_max)
        keys = self._space.keys_of(slots).select(self._keys.names)
        return DueTimers(moments.tolist(), keys, more)

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Returns two numbers of timers: the timers that have changed since the checkpoint `base`, and all timers."""
        return self._table.changed_rows(base)

    def freeze(self, cut: Cut) -> list[FrozenState]:
        """Returns snapshots of all timers or, with a base, of the changes since the base. Only references to pages are
        copied.
        """
        parts = self._table.freeze(cut) if self.used else ()
        return [FrozenTimers(part.now() if isinstance(part, FrozenSlots) else part) for part in parts]

    def load(self, table: StateTable) -> None:
        """Loads a stored table. Raises CorruptionError for wrong columns.

        A timer that occurs twice in layer 0 (the base of a snapshot) is a CorruptionError too, raised here or in a
        later call.
        """
        assert self._keys is not None and self._space.schema is not None, "timers before their key columns are known"
        check_timers(table.rows, self._keys)
        self.used = True
        position = len(self._keys)
        clocks = pa.array(domain_numbers(table.rows.column(position)))
        columns = table.rows.columns
        rows = pa.RecordBatch.from_arrays(
            [*columns[:position], clocks, columns[position + 1]], schema=self._space.schema
        )
        if table.removed:
            self._table.forget(rows)
        else:
            self._table.load(rows, table.layer)

    def loaded(self) -> None:
        """Finishes a restore, after all stored tables are loaded. Raises CorruptionError if a timer occurred twice in
        layer 0.
        """
        self._space.build_index()
        self._table.loaded()

    def keep(self, checkpoint_id: CheckpointId, after_freeze: bool) -> None:
        """Records that the current timers equal this checkpoint, and starts to record changes in the undo log."""
        if self._space.schema is not None:
            self._space.undo.begin(checkpoint_id, (self._table,), after_freeze)

    def settle(self) -> None:
        """Reduces the undo log to its memory limit."""
        self._space.undo.settle()

    def kept(self) -> list[StateTable]:
        """Returns a table without rows that represents the timers in a list of states. Empty if there was never a
        timer.
        """
        if not self.used or self._keys is None:
            return []
        rows = pa.RecordBatch.from_pylist([], timers_schema(self._keys))
        return [StateTable(TIMERS_STATE, StateKind.KEYED, rows)]


class _TimerTable(ColumnarTable):
    """A table with one row for each timer, without values, and the order in which the timers fire."""

    def __init__(self, space: KeySpace, keys: int, incremental: bool) -> None:
        self._queued = SlotFlags()
        """Slots that are in a queue."""
        self._unqueued = False
        self._keys = keys
        super().__init__(space, TIMERS_STATE, (), incremental)
        self.queues = tuple(TimerRuns(self.live, self._order, self._queued) for _ in DOMAINS)

    def put(
        self,
        slots: NDArray[np.int32],
        domains: NDArray[np.uint8],
        moments: NDArray[np.int64],
        registered: NDArray[np.bool_],
    ) -> None:
        """Registers or deletes the timers of these distinct slots. `registered` is True for slots whose timer is
        registered.
        """
        self.set_live(slots, registered)
        new = registered & ~self._queued.of(slots)
        for domain, queue in enumerate(self.queues):
            mine = domains == domain
            queue.push(moments[mine & new], slots[mine & new])
            for report, chosen in ((queue.registered, mine & registered), (queue.deleted, mine & ~registered)):
                if chosen.any():
                    report(int(moments[chosen].min()))

    def loaded(self) -> None:
        """Sorts the loaded timers into the queues, after a restore."""
        if self._unqueued:
            self._unqueued = False
            self._queue(np.arange(self._space.slots, dtype=np.int32))

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Stores the rows of a checkpoint layer. `layer` is the number of the layer."""
        self._unqueued |= rows.num_rows > 0
        super().load(rows, layer)

    def grow(self, slots: int) -> None:
        """Makes room for `slots` slots of timers."""
        self._queued.grow(slots)
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of timers: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        for queue in self.queues:
            queue.rebuild(kept)
        self._queued.only(np.concatenate([queue.slots() for queue in self.queues]), len(kept))
        super().rebuild(kept, slots)

    def undo(self, notes: Notes) -> None:
        """Restores the timers that existed when `notes` (undo data) began."""
        super().undo(notes)
        for queue in self.queues:
            queue.forget_first()
        self._queue(distinct_integers(notes.slots()))

    def _queue(self, slots: NDArray[np.int32]) -> None:
        """Queues the slots that have a timer and are not in a queue yet. `slots` are in ascending order."""
        for start in range(0, len(slots), _QUEUED_SLOTS):
            some = slots[start : start + _QUEUED_SLOTS]
            some = some[self.live(some) & ~self._queued.of(some)]
            if not len(some):
                continue
            rows = self._space.keys_of(some)
            domains, moments = (rows.column(self._keys + i).to_numpy() for i in (0, 1))
            for domain, queue in enumerate(self.queues):
                queue.push(moments[domains == domain], some[domains == domain])

    def _order(self, moments: NDArray[np.int64], slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the indices that sort timers by time and then by key. `moments` are the times, `slots` the slots of
        the timers.
        """
        keys = self._space.keys_of(slots).columns[: self._keys]
        order: NDArray[np.int64] = _sorted([pa.array(moments), *keys]).to_numpy().view(np.int64)
        return order

    def _sorted(self) -> SortedSlots:
        return replace(super()._sorted(), order=self._canonical_order)

    def _canonical_order(self, rows: pa.RecordBatch, groups: NDArray[np.uint16]) -> pa.Array:
        keys = self._keys
        return _sorted([pa.array(groups), *rows.columns[keys:], *rows.columns[:keys]])


@dataclass(frozen=True, slots=True)
class FrozenTimers(FrozenChanged):
    """A snapshot of timers, in their stored form (a `FrozenState`)."""

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the rows of the snapshot, with the names of time domains in place of their numbers."""
        for chunk in self.frozen.chunks():
            position = chunk.rows.schema.get_field_index(TIMER_DOMAIN)
            names = domain_column(chunk.rows.column(position).to_numpy())
            yield replace(chunk, rows=chunk.rows.set_column(position, TIMER_DOMAIN, names))


def _sorted(columns: list[pa.Array]) -> pa.Array:
    """Returns the row indices that sort the rows by all columns, ascending. NaN is after all values, and null after
    NaN.
    """
    plain = [comparable(column) for column in columns]
    by = pa.RecordBatch.from_arrays(plain, names=[str(number) for number in range(len(plain))])
    return pc.sort_indices(by, sort_keys=[(name, "ascending") for name in by.schema.names])


@dataclass(slots=True, eq=False)
class _Run:
    """A sorted sequence of timers. The timers before index `at` were taken from it."""

    moments: Moments
    slots: Slots
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.slots) - self.at

    def until(self, moment: int) -> int:
        """Returns the index after the last timer of the run whose time is `moment` or earlier."""
        return self.at + int(np.searchsorted(self.moments[self.at :], moment, side="right"))


class TimerRuns:
    """The timers of one time domain, as sorted runs.

    `live` returns which slots have a timer. `order` sorts slots by time and key. `queued` has the flags of the slots
    that are in a run.
    """

    def __init__(
        self,
        live: Callable[[Slots], NDArray[np.bool_]],
        order: Callable[[Moments, Slots], NDArray[np.int64]],
        queued: SlotFlags,
    ) -> None:
        self._live = live
        self._order = order
        self._queued = queued
        self._runs: list[_Run] = []
        self._fronts: list[_Run] = []
        self._horizon: int | None = None
        """The last moment that was moved to the front; None while the front is empty."""
        self._first: int | None = None
        self._first_known = True

    def push(self, moments: Moments, slots: Slots) -> None:
        """Adds timers. `slots` must not be in a run yet."""
        if not len(slots):
            return
        order = np.argsort(moments, kind="stable")
        self._queued.set(slots)
        self._add(self._runs, _Run(moments[order], slots[order]), by_key=False)
        self.registered(int(moments[order[0]]))

    def registered(self, first_ms: int) -> None:
        """Records that timers were registered, the earliest of them at `first_ms`.

        This is enough for timers whose slots are already in a sorted run (`_Run`).
        """
        if self._first_known and (self._first is None or first_ms < self._first):
            self._first = first_ms

    def deleted(self, first_ms: int) -> None:
        """Records that timers were deleted, the earliest of them at `first_ms`."""
        if self._first_known and self._first is not None and first_ms <= self._first:
            self._first_known = False

    def forget_first(self) -> None:
        """Invalidates the cached time of the first timer, so that it is looked up again."""
        self._first_known = False

    def first_ms(self) -> int | None:
        """Returns the time of the first timer in ms, or None if there are no timers."""
        if not self._first_known:
            moments = [moment for run in (*self._runs, *self._fronts) if (moment := self._head(run)) is not None]
            self._first, self._first_known = min(moments, default=None), True
            self._drop_empty()
        return self._first

    def due(self, time_ms: int, timers_max: int) -> tuple[Moments, Slots, bool]:
        """Returns the first timers up to `time_ms`, in order: their times, their slots, and whether there may be
        more.
        """
        if self._horizon is not None:
            self._pull(self._horizon)
        while True:
            moments, slots = self._from_fronts(time_ms, timers_max)
            if len(slots) == timers_max or not self._fill(time_ms, timers_max):
                return moments, slots, len(slots) == timers_max

    def rebuild(self, kept: Slots) -> None:
        """Renumbers slots: slot `kept[i]` becomes slot i. `kept` must contain every slot with a timer."""
        for run in (*self._runs, *self._fronts):
            left = slice(run.at, None)
            live = self._live(run.slots[left])
            run.moments, run.slots = run.moments[left][live], run.slots[left][live]
            run.slots, run.at = np.searchsorted(kept, run.slots).astype(np.int32), 0
        self._drop_empty()

    def slots(self) -> Slots:
        """Returns the slots of the timers in all runs."""
        return np.concatenate([np.zeros(0, np.int32), *(run.slots[run.at :] for run in (*self._runs, *self._fronts))])

    def _head(self, run: _Run) -> int | None:
        """Returns the time of a run's first timer, or None if the run is empty. Removes deleted timers before it."""
        width = _LOOK_MIN
        while run.left:
            block = run.slots[run.at : run.at + width]
            live = self._live(block)
            gone = int(np.argmax(live)) if live.any() else len(block)
            self._queued.clear(block[:gone])
            run.at += gone
            if gone < len(block):
                return int(run.moments[run.at])
            width = min(2 * width, _LOOK_MAX)
        return None

    def _from_fronts(self, time_ms: int, timers_max: int) -> tuple[Moments, Slots]:
        """Returns the times and slots of the first timers among those already moved to the front."""
        found = [self._first_of(front, time_ms, timers_max) for front in self._fronts]
        self._drop_empty()
        moments = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in found)])
        slots = np.concatenate([np.zeros(0, np.int32), *(part[1] for part in found)])
        if sum(len(part[1]) > 0 for part in found) > 1:
            order = self._order(moments, slots)
            moments, slots = moments[order], slots[order]
        return moments[:timers_max], slots[:timers_max]

    def _first_of(self, front: _Run, time_ms: int, timers_max: int) -> tuple[Moments, Slots]:
        self._head(front)
        stop = front.until(time_ms)
        found, count, at, width = [np.zeros(0, np.int64)], 0, front.at, timers_max
        while at < stop and count < timers_max:
            end = min(at + width, stop)
            live = at + np.flatnonzero(self._live(front.slots[at:end]))
            found.append(live)
            count, at, width = count + len(live), end, min(2 * width, _LOOK_MAX)
        positions = np.concatenate(found)[:timers_max]
        return front.moments[positions], front.slots[positions]

    def _fill(self, time_ms: int, timers_max: int) -> bool:
        """Moves more due timers to the front, which is searched first. Returns False if no more are due."""
        wanted = max(timers_max, FRONT_TIMERS)
        runs = [run for run in self._runs if self._head(run) is not None]
        parts = [run.moments[run.at : min(run.until(time_ms), run.at + wanted)] for run in runs]
        moments = np.concatenate([np.zeros(0, np.int64), *parts])
        if not len(moments):
            return False
        nth = min(wanted, len(moments)) - 1
        cut = int(np.partition(moments, nth)[nth])
        self._horizon = cut
        self._pull(cut)
        return True

    def _pull(self, cut: int) -> None:
        """Moves all timers up to the time `cut` from the runs to the front."""
        moments, slots = [], []
        for run in self._runs:
            stop = run.until(cut)
            if stop > run.at:
                moments.append(run.moments[run.at : stop])
                slots.append(run.slots[run.at : stop])
                run.at = stop
        if not slots:
            return
        run = self._without_gone(np.concatenate(moments), np.concatenate(slots))
        if run.left:
            order = self._order(run.moments, run.slots)
            self._add(self._fronts, _Run(run.moments[order], run.slots[order]), by_key=True)
        self._drop_empty()

    def _add(self, runs: list[_Run], run: _Run, by_key: bool) -> None:
        """Appends a run to `runs`, and merges runs that are too short."""
        runs.append(run)
        while len(runs) > 1 and runs[-2].left < 2 * runs[-1].left:
            last, before = runs.pop(), runs.pop()
            merged = self._without_gone(
                np.concatenate((before.moments[before.at :], last.moments[last.at :])),
                np.concatenate((before.slots[before.at :], last.slots[last.at :])),
            )
            moments, slots = merged.moments, merged.slots
            order = self._order(moments, slots) if by_key else np.argsort(moments, kind="stable")
            runs.append(_Run(merged.moments[order], merged.slots[order]))

    def _without_gone(self, moments: Moments, slots: Slots) -> _Run:
        live = self._live(slots)
        if live.all():
            return _Run(moments, slots)
        self._queued.clear(slots[~live])
        return _Run(moments[live], slots[live])

    def _drop_empty(self) -> None:
        self._runs = [run for run in self._runs if run.left]
        self._fronts = [front for front in self._fronts if front.left]
        if not self._fronts:
            self._horizon = None


class SlotFlags:
    """One flag for each slot. All flags are clear at first."""

    __slots__ = ("_flags",)

    def __init__(self) -> None:
        self._flags: NDArray[np.bool_] = np.zeros(1024, dtype=np.bool_)

    def grow(self, slots: int) -> None:
        """Makes room for the flags of `slots` slots."""
        if slots > len(self._flags):
            added = np.zeros(max(slots, 2 * len(self._flags)) - len(self._flags), dtype=np.bool_)
            self._flags = np.concatenate((self._flags, added))

    def set(self, slots: NDArray[np.int32]) -> None:
        """Sets the flags of these slots."""
        self._flags[slots] = True

    def clear(self, slots: NDArray[np.int32]) -> None:
        """Clears the flags of these slots."""
        self._flags[slots] = False

    def of(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns the flags of these slots."""
        return self._flags[slots]

    def only(self, slots: NDArray[np.int32], total: int) -> None:
        """Sets the flags of these slots, and clears all other flags. `total` is the new number of slots."""
        self._flags = np.zeros(max(1024, total), dtype=np.bool_)
        self._flags[slots] = True
