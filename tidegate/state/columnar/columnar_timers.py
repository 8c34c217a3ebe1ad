"""`ColumnarTimers`: timers in memory, as a table without values whose keys are (key, clock, moment).

Rules: snapshots and the undo log treat this table like any other state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.state.columnar.frozen_slots import FrozenSlots
from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.slot_flags import SlotFlags
from tidegate.state.columnar.sorted_slots import SortedSlots
from tidegate.state.columnar.timer_runs import TimerRuns
from tidegate.state.columnar.undo_log import Notes, UndoLog
from tidegate.state.columnar.vector_table import ColumnarTable
from tidegate.state.common.timers import DueTimers
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.schemas.plain_types import comparable
from tidegate.storage.state.snapshot import Cut, FrozenChanged, FrozenState, StateChunk, StateTable
from tidegate.storage.state.timer_rows import (
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
"""After a restore, timers are put into order so many slots at a time."""


class ColumnarTimers:
    """A `KeyedTimers` with a key space of its own. `beside` is the undo log of the operator's other states."""

    def __init__(self, max_parallelism: int, key_names: tuple[str, ...], incremental: bool, beside: UndoLog) -> None:
        names = (*key_names, TIMER_DOMAIN, TIMER_MOMENT)
        self.undo = UndoLog(beside.bytes_max, beside)
        """Notes how to go back to a checkpoint."""
        self._space = KeySpace(max_parallelism, names, self.undo, grouped_by=key_names)
        self._table = _TimerTable(self._space, len(key_names), incremental)
        self._keys: pa.Schema | None = None
        self.used = False
        """Whether there has ever been a timer."""

    def count(self, limit: int) -> int:
        """The number of timers, but at most `limit`."""
        return min(self._table.rows, limit)

    def fix_keys(self, schema: pa.Schema) -> None:
        """Set the stored key columns."""
        self._keys = schema
        self._space.fix(pa.schema([*schema, (TIMER_DOMAIN, pa.uint8()), (TIMER_MOMENT, pa.int64())]))

    def change(
        self, keys: pa.RecordBatch, domains: Sequence[int], moments: Sequence[int], registered: Sequence[bool]
    ) -> None:
        """Register or delete timers. If one timer is changed several times, the last change counts."""
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
        """The moment of a clock's first timer; None without one."""
        return self._table.queues[domain].first_ms()

    def due(self, domain: int, time_ms: int, timers_max: int) -> DueTimers:
        """A clock's first timers up to a moment."""
        assert self._keys is not None, "timers before their key columns are known"
        moments, slots, more = self._table.queues[domain].due(time_ms, timers_max)
        keys = self._space.keys_of(slots).select(self._keys.names)
        return DueTimers(moments.tolist(), keys, more)

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Timers that are marked as changed since the base, and all timers."""
        return self._table.changed_rows(base)

    def freeze(self, cut: Cut) -> list[FrozenState]:
        """All timers, or what has changed since the base. Takes one reference a page."""
        parts = self._table.freeze(cut) if self.used else ()
        return [FrozenTimers(part.now() if isinstance(part, FrozenSlots) else part) for part in parts]

    def load(self, table: StateTable) -> None:
        """Load a stored table. CorruptionError for wrong columns, or (here or later) a timer twice in layer 0."""
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
        """All stored tables are loaded. CorruptionError if a timer came twice in layer 0."""
        self._space.build_index()
        self._table.loaded()

    def keep(self, checkpoint_id: CheckpointId, after_freeze: bool) -> None:
        """The current timers are those of this checkpoint."""
        if self._space.schema is not None:
            self._space.undo.begin(checkpoint_id, (self._table,), after_freeze)

    def settle(self) -> None:
        """Trim the undo log to its limit."""
        self._space.undo.settle()

    def kept(self) -> list[StateTable]:
        """A table without rows that stands for the timers; empty if there was never a timer."""
        if not self.used or self._keys is None:
            return []
        rows = pa.RecordBatch.from_pylist([], timers_schema(self._keys))
        return [StateTable(TIMERS_STATE, StateKind.KEYED, rows)]


class _TimerTable(ColumnarTable):
    """One row for each timer, without values, and the order in which they fire."""

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
        """Register or delete the timers of these slots, each given once."""
        self.set_live(slots, registered)
        new = registered & ~self._queued.of(slots)
        for domain, queue in enumerate(self.queues):
            mine = domains == domain
            queue.push(moments[mine & new], slots[mine & new])
            for told, those in ((queue.registered, mine & registered), (queue.deleted, mine & ~registered)):
                if those.any():
                    told(int(moments[those].min()))

    def loaded(self) -> None:
        """Put the loaded timers into order."""
        if self._unqueued:
            self._unqueued = False
            self._queue(np.arange(self._space.slots, dtype=np.int32))

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Put stored rows."""
        self._unqueued |= rows.num_rows > 0
        super().load(rows, layer)

    def grow(self, slots: int) -> None:
        """Grow to this many slots."""
        self._queued.grow(slots)
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        for queue in self.queues:
            queue.rebuild(kept)
        self._queued.only(np.concatenate([queue.slots() for queue in self.queues]), len(kept))
        super().rebuild(kept, slots)

    def undo(self, notes: Notes) -> None:
        """Restore the timers at the moment when these notes began."""
        super().undo(notes)
        for queue in self.queues:
            queue.forget_first()
        self._queue(np.unique(notes.slots()))

    def _queue(self, slots: NDArray[np.int32]) -> None:
        """Put those of these ascending slots into order that have a timer and are in no queue."""
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
        """Positions, sorted by moment and then by key."""
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
    """A `FrozenState` of timers, in their stored form."""

    def chunks(self) -> Iterator[StateChunk]:
        """The rows."""
        for chunk in self.frozen.chunks():
            position = chunk.rows.schema.get_field_index(TIMER_DOMAIN)
            names = domain_column(chunk.rows.column(position).to_numpy())
            yield replace(chunk, rows=chunk.rows.set_column(position, TIMER_DOMAIN, names))


def _sorted(columns: list[pa.Array]) -> pa.Array:
    """Positions of rows, sorted by all columns in ascending order. NaN comes last, and null after it."""
    plain = [comparable(column) for column in columns]
    by = pa.RecordBatch.from_arrays(plain, names=[str(number) for number in range(len(plain))])
    return pc.sort_indices(by, sort_keys=[(name, "ascending") for name in by.schema.names])
