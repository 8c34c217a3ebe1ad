"""`KeySpace`: maps the keys of one operator in one subtask to slots, which all its states share.

Rules:
- A key gets its slot when it first appears, and keeps it until a rebuild. Key columns and key group of a slot never
  change, so to freeze them is to take references.
- Every state has pages for all slots, whether a key has the state or not.
- A slot is dead if no state has it, and no later snapshot must say that it is gone. When more than half of the slots
  are dead, everything is rebuilt without them, and slots get new numbers. Older snapshots keep what they hold.
- A restore appends the keys of one state without a lookup, because each key comes once (`append`). The index is built
  when somebody first asks for a key, and then finds any key that came twice. If many keys are expected and there are
  threads for it, the index is filled meanwhile (`RestoreThreads`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.block_size import BlockSize
from tidegate.state.columnar.key_columns import FrozenKeys, KeyColumns
from tidegate.state.columnar.restore_threads import RestoreThreads
from tidegate.state.columnar.undo_log import UndoLog
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import FrozenColumn, PagedColumn
from tidegate.state.common.refusals import held_twice
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.state.key_groups import MAX_PARALLELISM_LIMIT, key_groups_of

COMPACTED_SLOTS_MIN = 4096

_THREADED_KEYS_MIN = 1 << 17
"""Fewer keys than this are loaded before threads have even started."""
_GROUP = ValueSpec("group", pa.uint16(), 0)


class SlotState(Protocol):
    """A state over the slots, as the key space sees it."""

    @property
    def name(self) -> str:
        """Name of the state."""
        ...

    @property
    def rows(self) -> int:
        """How many slots have the state."""
        ...

    def grow(self, slots: int) -> None:
        """Grow to this many slots."""
        ...

    def needed(self, slots: int) -> NDArray[np.bool_]:
        """Which slots have the state, or lost it and a later snapshot may have to say so. O(slots)."""
        ...

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber: of so many slots, slot `kept[i]` becomes slot i."""
        ...


class KeySpace:
    """Keys, their slots and key groups, and the undo log of their states. `key_names` are the stored key columns.

    `grouped_by` are the columns that choose the key group, if not all do; `identity` those that tell keys apart.
    """

    def __init__(
        self,
        max_parallelism: int,
        key_names: tuple[str, ...],
        undo: UndoLog | None = None,
        restore_threads: int = 1,
        grouped_by: tuple[str, ...] | None = None,
        identity: tuple[str, ...] | None = None,
    ) -> None:
        assert 0 < max_parallelism <= MAX_PARALLELISM_LIMIT, f"max_parallelism {max_parallelism} is out of range"
        self._max_parallelism = max_parallelism
        self.names = key_names
        self._grouped_by = key_names if grouped_by is None else grouped_by
        self._identity = key_names if identity is None else identity
        self._index = KeyIndex(self._identity)
        self._keys: KeyColumns | None = None
        """None until the key columns are known."""
        self._groups = PagedColumn(_GROUP)
        self.undo = UndoLog(0) if undo is None else undo
        self._states: list[SlotState] = [self.undo]
        self._appended_by: SlotState | None = None
        """The state that has appended all keys so far: during a restore, or if there is no index (`drop_index`)."""
        self._dropped = False
        """Whether there is no index."""
        self._restore_threads = restore_threads
        self._threads: RestoreThreads | None = None
        """The threads that index appended keys, if there are many."""
        self._readers = 0
        self._looked_at = (0, 0)
        """Number of slots, and of rows of the largest state, when the last look found too few dead slots."""

    @property
    def slots(self) -> int:
        """How many slots are in use. Also the number of the next free slot."""
        return 0 if self._keys is None else self._keys.rows

    @property
    def schema(self) -> pa.Schema | None:
        """Key columns; None until they are known."""
        return None if self._keys is None else self._keys.schema

    def fix(self, schema: pa.Schema) -> None:
        """Set the key columns."""
        assert tuple(schema.names) == self.names, f"key columns {schema.names} are not {self.names}"
        assert self._keys is None or self._keys.schema.equals(schema), "key columns have changed"
        if self._keys is None:
            self._keys = KeyColumns(schema)

    def add(self, state: SlotState) -> None:
        """Add a state."""
        self._states.append(state)
        state.grow(self.slots)

    def drop(self, state: SlotState) -> None:
        """Remove a state."""
        self._states.remove(state)

    def can_append(self, state: SlotState) -> bool:
        """Whether this state has appended all keys so far, if any, and nobody has asked for a key yet."""
        return self.slots == 0 or self._appended_by is state

    def expect(self, keys: int) -> None:
        """At most so many keys will be appended."""
        if self._restore_threads > 1 and keys >= _THREADED_KEYS_MIN and self.slots == 0:
            self._threads = RestoreThreads(self._index, keys, self._restore_threads)

    def side_by_side(self, steps: Sequence[Callable[[], None]]) -> None:
        """Run steps that share no memory, on several threads if a large state is being restored."""
        if self._threads is not None:
            self._threads.side_by_side(steps)
        else:
            for step in steps:
                step()

    def append(self, state: SlotState, keys: pa.RecordBatch) -> None:
        """Give the next slots to keys of a state for which `can_append`. Each key must come once in all batches.

        If one comes twice, `build_index` finds it.
        """
        assert self._keys is not None and self.can_append(state)
        self._appended_by = state
        own = gather(keys, np.arange(keys.num_rows, dtype=np.int32))
        if self._threads is not None:
            self._threads.index(own)
        self._add(own)
        for each in self._states:
            each.grow(self.slots)

    def build_index(self) -> None:
        """Index the appended keys, if that is still to do. CorruptionError if one came twice."""
        state, self._appended_by = self._appended_by, None
        threads, self._threads = self._threads, None
        if state is None:
            if threads is not None:
                threads.end()
            return
        if not (self._fill_index() if threads is None else threads.finish()):
            raise held_twice(state.name)

    def drop_index(self, state: SlotState) -> None:
        """From now on keys are only appended, by this state, and nobody asks for one."""
        self._index = KeyIndex(self._identity)
        self._appended_by, self._dropped = state, True

    def close(self) -> None:
        """End the threads of a restore that failed."""
        if self._threads is not None:
            self._threads.end()

    def upsert(self, keys: pa.RecordBatch) -> Upserted:
        """Slots of a batch of keys (the key columns alone). New keys get new slots."""
        assert self._keys is not None, "keys before their columns are known"
        assert not self._dropped, "a key space without an index"
        self.build_index()
        upserted = self._index.upsert(keys)
        if len(upserted.new_rows):
            self._add(gather(keys, upserted.new_rows))
            for state in self._states:
                state.grow(self.slots)
        return upserted

    def keys_of(self, slots: NDArray[np.int32], names: Sequence[str] | None = None) -> pa.RecordBatch:
        """Keys of these slots, in the given order: all columns, or those that are named."""
        assert self._keys is not None, "slots before their columns are known"
        return self._keys.freeze().take(slots, names)

    def groups_of(self, slots: NDArray[np.int32]) -> NDArray[np.uint16]:
        """Key groups of these slots."""
        groups: NDArray[np.uint16] = self._groups.raw(slots)
        return groups

    def freeze(self) -> tuple[FrozenKeys, FrozenColumn]:
        """Keys and key groups of all slots. Takes one reference a page."""
        assert self._keys is not None, "a state without keys"
        return self._keys.freeze(), self._groups.freeze()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within this context no slot gets another number."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    def settle(self) -> None:
        """Between batches: trim the undo log, and drop dead slots if more than half of at least 4,096 are dead.

        Looks for dead slots only when enough has come or gone since the last look.
        """
        self.undo.settle()
        slots, rows = self.slots, max((state.rows for state in self._states), default=0)
        if slots < COMPACTED_SLOTS_MIN or 2 * rows >= slots or self._readers:
            return
        looked_slots, looked_rows = self._looked_at
        if (slots - looked_slots) + max(0, looked_rows - rows) < slots // 8:
            return
        needed = np.zeros(slots, dtype=np.bool_)
        for state in self._states:
            needed |= state.needed(slots)
        kept = np.flatnonzero(needed).astype(np.int32)
        if 2 * len(kept) < slots:
            self._rebuild(kept, slots)
            slots = self.slots
        self._looked_at = (slots, rows)

    def keep(self, kept: NDArray[np.int32]) -> None:
        """Forget all keys but those of these slots, which get new numbers. No batch is under way.

        They ascend; only while nothing is noted or marked as changed, after a restore, may they come in another order.
        """
        assert not self._readers, "slots that somebody reads by their numbers"
        self._rebuild(kept, self.slots)
        self._looked_at = (0, 0)

    @property
    def size_bytes(self) -> int:
        """Bytes of keys, index and key groups."""
        keys_bytes = 0 if self._keys is None else self._keys.size_bytes
        return keys_bytes + self._index.size_bytes + 2 * self.slots

    def look_again(self) -> None:
        """A snapshot was taken: slots that were needed to report a deletion may be dead now."""
        self._looked_at = (0, 0)

    def _fill_index(self) -> bool:
        """Index all keys; False if one comes twice."""
        assert self._keys is not None
        to_come = self._keys.rows
        for keys in self._keys.pieces():
            to_come -= keys.num_rows
            if not self._index.fill(keys, to_come):
                return False
        return True

    def _add(self, keys: pa.RecordBatch) -> None:
        """Give the next slots to these keys."""
        assert self._keys is not None
        groups = key_groups_of(hash_columns(keys, self._grouped_by), self._max_parallelism)
        self._groups.extend(self.slots, pa.array(groups))
        self._keys.append(keys)

    def _rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        assert self._keys is not None
        if not self._dropped:
            self.build_index()
        frozen, schema = self._keys.freeze(), self._keys.schema
        self._index, self._keys, self._groups = (
            KeyIndex(self._identity),
            KeyColumns(schema),
            PagedColumn(_GROUP),
        )
        left, size = kept, BlockSize(frozen)
        while len(left):
            rows = size.rows(left)
            keys, left = frozen.take(left[:rows]), left[rows:]
            if not self._dropped:
                assert len(self._index.upsert(keys).new_rows) == keys.num_rows, "two slots with one key"
            self._add(keys)
        for state in self._states:
            state.rebuild(kept, slots)


LiveSlots = Callable[[NDArray[np.int32]], NDArray[np.bool_]]


def key_pieces(space: KeySpace, live: LiveSlots, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int32]]]:
    """Keys and slots, in slot order, of the slots that are live when their batch is drawn."""
    if space.schema is None:
        return
    with space.reading():
        keys, _ = space.freeze()
        for start in range(0, int(keys.bounds[-1]), rows_max):
            slots = np.arange(start, min(start + rows_max, int(keys.bounds[-1])), dtype=np.int32)
            slots = slots[live(slots)]
            if len(slots):
                yield keys.take(slots), slots
