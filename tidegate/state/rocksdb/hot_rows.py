"""`HotRows`: the rows of a vectorised state that are in memory, as columns in front of RocksDB (a write-back cache).

Rules:
- A key with a slot is as it is here, also if it has no row; the database may have an older row. A key without a slot is
  as the database has it, and is read at its first use. As long as the database has only rows of keys with slots
  (`is_whole`), such a key is new, and is not looked up.
- Changes are written when a snapshot is taken, or when the slot is evicted.
- An eviction frees an eighth of the rows, so that it pays. It removes rows that were not used again since the last
  eviction, the oldest first.

`HotNamespaces` is the same for a state with namespaces, and tracks what the database may have of each namespace:
- A namespace is *cold* in a key group where the database may have a row that is not here. Only there are keys looked up
  in the database. Rows of a window are new, so as long as rows fit into memory nothing is read.
- A namespace is *written* in a key group where the database may have any row of it. When it is drained, its rows there
  are removed as a range, and its slots are free at once; if it was never written, it leaves no trace.
- Ranges wait until something else is written (`take_gone`), and are removed before it. Until then nothing reads there,
  because a drained namespace is not cold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.change_tracking import flags, words_for
from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.paged_state import FrozenSlots
from tidegate.state.columnar.vector_table import ColumnarNamespaces, ColumnarTable, note
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.table_columns import VaryingColumn
from tidegate.state.kernels.columns import fixed_values
from tidegate.state.kernels.paged import Bitmap, mark_below, scatter
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.rocksdb.write_back import Write
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, FrozenState

Fetch: TypeAlias = Callable[[pa.RecordBatch], tuple[NDArray[np.int64], Sequence[pa.Array]]]
"""Reads rows from the database: which of these keys have one, and the value columns of those."""

_LIVE_BYTES = 1
"""Of each slot, whether it has a row."""
_ROOM = 8
"""Room is made for an eighth of the rows."""
_WRITTEN_ROWS = 65_536
_RANGE_ROWS = 4
"""Rows are removed as a range from as many a key group: a range costs the database more than a row."""
GroupFlags = dict[int, NDArray[np.bool_]]
"""By namespace, one flag a key group. A namespace without any has no entry."""


class HotRows(ColumnarTable):
    """A `ColumnarTable` with some of the rows. `fetch` reads those that it does not have."""

    def __init__(self, space: KeySpace, name: str, specs: Sequence[ValueSpec], fetch: Fetch) -> None:
        self._fetch = fetch
        self._asked_again: Bitmap = np.zeros(words_for(0), dtype=np.uint64)
        """Slots whose keys have come in a batch after that which brought them in."""
        self._snapshots = 0
        self.is_whole = False
        """Whether a key without a slot has no row anywhere. Who knows says so; `put` and `make_room` end it."""
        super().__init__(space, name, specs, incremental=True)

    @property
    def size_bytes(self) -> int:
        """About how much memory the rows take."""
        columns = [column.paged for column in self._columns.values()]
        row_bytes = _LIVE_BYTES + sum(column.dtype.itemsize + (len(column.valid_pages) > 0) for column in columns)
        heaps_bytes = sum(column.heap_bytes for column in self._varying)
        return self._space.slots * row_bytes + heaps_bytes + self._space.size_bytes

    @property
    def unwritten(self) -> bool:
        """Whether anything has changed since the last snapshot."""
        assert self.dirty is not None
        return self.dirty.changed_since(CheckpointId(self._snapshots), self._space.slots) > 0

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch: bring in the rows of keys that are not here. Keys without a row get one."""
        known = self._space.slots
        upserted = self._space.upsert(keys)
        mark_below(self._asked_again, known, upserted.slots)
        wanted, stored = self._perhaps_stored(keys, upserted), 0
        if len(wanted):
            found, columns = self._fetch(keys if len(wanted) == keys.num_rows else gather(keys, wanted))
            stored = len(found)
            self._take_in(upserted.slots[wanted[found]], columns)
        new_rows = self._begin(upserted, stored=stored, new_only=new_only)
        return Upserted(upserted.slots, upserted.first_rows, new_rows)

    def show(self, keys: pa.RecordBatch, columns: Sequence[pa.Array]) -> NDArray[np.int32]:
        """Slots of keys that have these rows in the database, all of which is written."""
        upserted = self._space.upsert(keys)
        new = pa.array(upserted.new_rows)
        if len(new):
            self._take_in(upserted.slots[upserted.new_rows], [column.take(new) for column in columns])
        return upserted.slots

    def changed(self) -> Sequence[FrozenState]:
        """Rows that are to be written, and keys to be removed, as they are now. From now on they count as written."""
        base = CheckpointId(self._snapshots)
        self._snapshots += 1
        frozen = self.freeze(Cut(CheckpointId(self._snapshots), base))
        return [state.now() if isinstance(state, FrozenSlots) else state for state in frozen]

    def written(self) -> None:
        """What `changed` has given is in the database."""
        assert self.dirty is not None
        self.dirty.drop(CheckpointId(self._snapshots))

    def make_room(self, size_bytes_max: int, write: Write) -> None:
        """Between batches, all snapshots being written: let rows go, if there are too many, and write them."""
        self._let_values_go()
        slots, size_bytes = self._space.slots, self.size_bytes
        if size_bytes <= (size_bytes_max - size_bytes_max // _ROOM if self._varying else size_bytes_max):
            return
        left = size_bytes_max * slots // size_bytes
        gone = self._coldest(slots, slots - left + left // _ROOM)
        self._write(gone, write)
        leaving = gone.astype(np.int32)
        leaving = leaving[self.live(leaving)]
        self._leave(leaving)
        self._rows -= len(leaving)
        kept = np.ones(slots, dtype=np.bool_)
        kept[gone] = False
        self._space.keep(np.flatnonzero(kept).astype(np.int32))
        self._let_values_go()
        self._asked_again[:] = 0

    def grow(self, slots: int) -> None:
        """Grow to this many slots."""
        words = words_for(slots)
        if words > len(self._asked_again):
            larger = np.zeros(max(words, 2 * len(self._asked_again)), dtype=np.uint64)
            larger[: len(self._asked_again)] = self._asked_again
            self._asked_again = larger
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        asked = np.flatnonzero(flags((self._asked_again,), 0, slots)[kept]).astype(np.int32)
        self._asked_again = np.zeros(words_for(len(kept)), dtype=np.uint64)
        mark_below(self._asked_again, len(kept), asked)
        super().rebuild(kept, slots)

    @property
    def _varying(self) -> list[VaryingColumn]:
        columns = (column.paged for column in self._columns.values())
        return [column for column in columns if isinstance(column, VaryingColumn)]

    def _let_values_go(self) -> None:
        """Keep those values of varying width alone that a row here has."""
        for column in self._varying:
            slots = np.arange(self._space.slots, dtype=np.int32)
            column.collect([column.raw(slots[self.live(slots)])])

    def _perhaps_stored(self, keys: pa.RecordBatch, upserted: Upserted) -> NDArray[np.int32]:
        """Of the rows with new keys those that the database may have."""
        return upserted.new_rows[:0] if self.is_whole else upserted.new_rows

    def _leave(self, gone: NDArray[np.int32]) -> None:
        """These slots have rows, which are in the database now, and nowhere else."""
        self.is_whole = self.is_whole and not len(gone)

    def _take_in(self, slots: NDArray[np.int32], columns: Sequence[pa.Array]) -> None:
        """Put rows of the database into new slots."""
        self._own(slots)
        scatter(self._live.pages, slots, np.ones(len(slots), dtype=np.uint8))
        for column, values in zip(self._columns.values(), columns, strict=True):
            column.paged.put(slots, values)
        self._rows += len(slots)
        # The database knows them: if one of them is removed, a snapshot must say so.
        self._told_below = self._space.slots

    def _coldest(self, slots: int, wanted: int) -> NDArray[np.int64]:
        """So many slots, those that were not asked for again first, and of these the oldest."""
        asked = flags((self._asked_again,), 0, slots)
        cold = np.flatnonzero(~asked)
        return cold[:wanted] if len(cold) >= wanted else np.concatenate((cold, np.flatnonzero(asked)))[:wanted]

    def _write(self, slots: NDArray[np.int64], write: Write) -> None:
        """Write those of some slots that have changed."""
        assert self.dirty is not None
        changed = np.sort(slots[self.dirty.marked(self._space.slots)[slots]]).astype(np.int32)
        live = self.live(changed)
        keys, _ = self._space.freeze()
        for start in range(0, len(changed), _WRITTEN_ROWS):
            part = slice(start, start + _WRITTEN_ROWS)
            rows, gone = changed[part][live[part]], changed[part][~live[part]]
            if len(rows):
                write(keys.take(rows), [column.take(rows) for column in self._columns.values()])
            if len(gone):
                write(keys.take(gone), None)


class HotNamespaces(HotRows, ColumnarNamespaces):
    """`HotRows` in namespaces. `groups` is the number of all key groups."""

    def __init__(self, space: KeySpace, name: str, specs: Sequence[ValueSpec], fetch: Fetch, groups: int) -> None:
        self._groups = groups
        self._cold: GroupFlags = {}
        self._written: GroupFlags = {}
        self._gone: GroupFlags = {}
        super().__init__(space, name, specs, fetch)

    @property
    def size_bytes(self) -> int:
        """About how much memory the rows take."""
        return super().size_bytes + 4 * self._space.slots

    @property
    def unwritten(self) -> bool:
        """Whether anything has changed since the last snapshot."""
        return bool(self._gone) or super().unwritten

    def stored(self, found: Mapping[int, Sequence[int]]) -> None:
        """The database has rows in these namespaces, of these key groups; none is here."""
        for namespace, groups in found.items():
            for marked in (self._cold, self._written):
                self._set(marked, namespace, groups)

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch: bring in the rows of keys that are not here. Keys without a row get one."""
        known = self._space.slots
        upserted = super().upsert(keys, new_only)
        self._note_new(keys, upserted.slots, np.union1d(_beyond(upserted, known), upserted.new_rows))
        return upserted

    def show(self, keys: pa.RecordBatch, columns: Sequence[pa.Array]) -> NDArray[np.int32]:
        """As of `HotRows`."""
        known = self._space.slots
        slots = super().show(keys, columns)
        self._note_new(keys, slots, np.flatnonzero(slots >= known))
        return slots

    def changed(self) -> Sequence[FrozenState]:
        """As of `HotRows`. All namespaces count as written from now on, and those that have no row anywhere no more."""
        found = self._found()
        for namespace in [each for each in self._written if each not in found and each not in self._cold]:
            del self._written[namespace]
        for namespace in found:
            self._written[namespace] = np.ones(self._groups, dtype=np.bool_)
        return super().changed()

    def cold_groups(self, namespace: int, groups: range) -> list[int]:
        """Those of some key groups where the database may have rows of a namespace that are not here."""
        marked = self._cold.get(namespace)
        if marked is None:
            return []
        found: list[int] = (np.flatnonzero(marked[groups.start : groups.stop]) + groups.start).tolist()
        return found

    def warm(self, namespace: int, group: int) -> None:
        """All rows of a namespace in a key group are here."""
        self._clear_flags(self._cold, namespace, range(group, group + 1))

    def drained(self, namespace: int, groups: range, slots: NDArray[np.int32]) -> None:
        """A namespace has no row in some key groups any more. All that it had are here, in these slots, and removed."""
        assert self.dirty is not None
        marked = self._written.get(namespace)
        of = marked[groups.start : groups.stop] if marked is not None else np.zeros(0, dtype=np.bool_)
        written = np.flatnonzero(of) + groups.start
        if len(written) and len(slots) < _RANGE_ROWS * len(written):
            return  # each is removed from the database
        # One that got a row again, from who was given the former one, is new.
        self.dirty.unmark(slots[~self.live(slots)])
        if len(written):
            self._set(self._gone, namespace, written)
            self._clear_flags(self._written, namespace, groups)

    def forget_empty(self, namespace: int) -> None:
        """Do not know a namespace any more, if it has no row here."""
        self._slots(namespace)

    def take_gone(self) -> list[tuple[int, list[int]]]:
        """Namespaces, and key groups, that are to be removed before anything else is written. Only once."""
        gone, self._gone = self._gone, {}
        return [(namespace, np.flatnonzero(marked).tolist()) for namespace, marked in gone.items()]

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i. Others may have rows, which go to the database."""
        stays = np.zeros(slots, dtype=np.bool_)
        stays[kept] = True
        left: dict[int, list[NDArray[np.int32]]] = {}
        for namespace in list(self._found()):
            of = self._slots(namespace)
            moved = np.searchsorted(kept, of[stays[of]]).astype(np.int32)
            if len(moved):
                left[namespace] = [moved]
        self._noted = None
        super().rebuild(kept, slots)
        self._noted = left

    def _perhaps_stored(self, keys: pa.RecordBatch, upserted: Upserted) -> NDArray[np.int32]:
        """Of the rows with new keys those that the database may have."""
        new = upserted.new_rows
        if not self._cold or not len(new):
            return new[:0]
        names, groups = fixed_values(keys.column(0))[new], self._space.groups_of(upserted.slots[new])
        wanted = np.zeros(len(new), dtype=np.bool_)
        for namespace in np.unique(names).tolist():
            if (marked := self._cold.get(namespace)) is not None:
                of = names == namespace
                wanted[of] = marked[groups[of]]
        return new[wanted]

    def _leave(self, gone: NDArray[np.int32]) -> None:
        """These slots have rows, which are in the database now, and nowhere else."""
        groups = self._space.groups_of(gone)
        names = fixed_values(self._space.keys_of(gone).column(0))
        for namespace in np.unique(names).tolist():
            of = np.unique(groups[names == namespace])
            for marked in (self._cold, self._written):
                self._set(marked, namespace, of)

    def _note_new(self, keys: pa.RecordBatch, slots: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        if len(rows) and self._noted is not None:
            note(self._noted, fixed_values(keys.column(0))[rows], slots[rows])

    def _set(self, marked: GroupFlags, namespace: int, groups: Sequence[int] | NDArray[np.int64]) -> None:
        marked.setdefault(namespace, np.zeros(self._groups, dtype=np.bool_))[groups] = True

    def _clear_flags(self, marked: GroupFlags, namespace: int, groups: range) -> None:
        found = marked.get(namespace)
        if found is not None:
            found[groups.start : groups.stop] = False
            if not found.any():
                del marked[namespace]


def _beyond(upserted: Upserted, known: int) -> NDArray[np.int32]:
    """The first rows of keys that have got a slot beyond the first ones."""
    return upserted.first_rows[upserted.slots[upserted.first_rows] >= known]
