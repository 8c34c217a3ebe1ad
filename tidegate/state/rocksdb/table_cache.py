"""`TableCache`: a write-back cache of a vectorised state's rows, as columns in front of RocksDB.

Rules:
- For a key with a slot the cache is authoritative, also if it has no row; the database may have an older row. For a key
  without a slot the database is authoritative, and is read at the first use of the key. While the database only has
  rows of keys with slots (`is_whole`), a key without a slot is new, and is not looked up.
- Changes are written when a snapshot is taken, or when the slot is evicted.
- An eviction frees an eighth of the rows, so that it pays. It removes rows that were not used again since the last
  eviction, the oldest first.

`NamespacedTableCache` caches a state with namespaces, and tracks which rows of each namespace the database may have:
- A namespace is *cold* in a key group where the database may have a row that is not in the cache. Keys are looked up in
  the database only there. Rows of a window are new, so while rows fit into memory nothing is read.
- A namespace is *written* in a key group where the database may have any row of it. When the namespace is drained,
  these rows are removed as a range, and its slots are free at once. If it was never written, nothing is removed.
- Ranges are removed before the next write (`take_removed_ranges`). Until then nothing reads there, because a drained
  namespace is not cold.
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
"""Reads rows from the database: returns the positions of the keys that have a row, and their value columns."""

_LIVE_BYTES = 1
"""Number of bytes of the flag of a slot that it has a row."""
_ROOM = 8
"""The part of the rows that one eviction frees."""
_WRITTEN_ROWS = 65_536
_RANGE_ROWS = 4
"""Number of rows per key group below which rows are removed one by one, because a range costs the database more than a
row.
"""
GroupFlags = dict[int, NDArray[np.bool_]]
"""One flag per key group, by namespace. A namespace without set flags has no entry."""


class TableCache(ColumnarTable):
    """A `ColumnarTable` with some of the rows of a state. `fetch` reads the missing ones from the database."""

    def __init__(self, space: KeySpace, name: str, specs: Sequence[ValueSpec], fetch: Fetch) -> None:
        self._fetch = fetch
        self._used_again: Bitmap = np.zeros(words_for(0), dtype=np.uint64)
        """Slots whose keys were used in a later batch than the one that added them."""
        self._snapshots = 0
        self.is_whole = False
        """True if a key without a slot has no row in the database. The owner sets it; `put` and `make_room` end it."""
        super().__init__(space, name, specs, incremental=True)

    @property
    def size_bytes(self) -> int:
        """Returns the estimated memory of the rows, in bytes."""
        columns = [column.paged for column in self._columns.values()]
        row_bytes = _LIVE_BYTES + sum(column.dtype.itemsize + (len(column.valid_pages) > 0) for column in columns)
        heaps_bytes = sum(column.heap_bytes for column in self._varying)
        return self._space.slots * row_bytes + heaps_bytes + self._space.size_bytes

    @property
    def unwritten(self) -> bool:
        """Returns True if rows have changed since the last snapshot."""
        assert self.dirty is not None
        return self.dirty.changed_since(CheckpointId(self._snapshots), self._space.slots) > 0

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch: reads the rows of keys that are not in the cache. Keys without a row get one."""
        known = self._space.slots
        upserted = self._space.upsert(keys)
        mark_below(self._used_again, known, upserted.slots)
        wanted, stored = self._perhaps_stored(keys, upserted), 0
        if len(wanted):
            found, columns = self._fetch(keys if len(wanted) == keys.num_rows else gather(keys, wanted))
            stored = len(found)
            self._insert_stored(upserted.slots[wanted[found]], columns)
        new_rows = self._begin(upserted, stored=stored, new_only=new_only)
        return Upserted(upserted.slots, upserted.first_rows, new_rows)

    def bring_in(self, keys: pa.RecordBatch, columns: Sequence[pa.Array]) -> NDArray[np.int32]:
        """Adds rows that were read from the database, after `write_all`. Returns the slots of their keys.

        Keys that are in the cache already stay unchanged.
        """
        upserted = self._space.upsert(keys)
        new = pa.array(upserted.new_rows)
        if len(new):
            self._insert_stored(upserted.slots[upserted.new_rows], [column.take(new) for column in columns])
        return upserted.slots

    def changed(self) -> Sequence[FrozenState]:
        """Freezes the rows to write, and the keys to remove. From now on they count as written."""
        base = CheckpointId(self._snapshots)
        self._snapshots += 1
        frozen = self.freeze(Cut(CheckpointId(self._snapshots), base))
        return [state.now() if isinstance(state, FrozenSlots) else state for state in frozen]

    def written(self) -> None:
        """Notes that the result of `changed` is in the database."""
        assert self.dirty is not None
        self.dirty.drop(CheckpointId(self._snapshots))

    def make_room(self, size_bytes_max: int, write: Write) -> None:
        """Evicts rows if they exceed the limit, and writes them. Called between batches, while no snapshot is being
        written.
        """
        self._drop_unused_values()
        slots, size_bytes = self._space.slots, self.size_bytes
        if size_bytes <= (size_bytes_max - size_bytes_max // _ROOM if self._varying else size_bytes_max):
            return
        left = size_bytes_max * slots // size_bytes
        gone = self._coldest(slots, slots - left + left // _ROOM)
        self._write(gone, write)
        leaving = gone.astype(np.int32)
        leaving = leaving[self.live(leaving)]
        self._evicted(leaving)
        self._rows -= len(leaving)
        kept = np.ones(slots, dtype=np.bool_)
        kept[gone] = False
        self._space.keep(np.flatnonzero(kept).astype(np.int32))
        self._drop_unused_values()
        self._used_again[:] = 0

    def grow(self, slots: int) -> None:
        """Grows to this many slots."""
        words = words_for(slots)
        if words > len(self._used_again):
            larger = np.zeros(max(words, 2 * len(self._used_again)), dtype=np.uint64)
            larger[: len(self._used_again)] = self._used_again
            self._used_again = larger
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers slots: slot `kept[i]` becomes slot i."""
        asked = np.flatnonzero(flags((self._used_again,), 0, slots)[kept]).astype(np.int32)
        self._used_again = np.zeros(words_for(len(kept)), dtype=np.uint64)
        mark_below(self._used_again, len(kept), asked)
        super().rebuild(kept, slots)

    @property
    def _varying(self) -> list[VaryingColumn]:
        columns = (column.paged for column in self._columns.values())
        return [column for column in columns if isinstance(column, VaryingColumn)]

    def _drop_unused_values(self) -> None:
        """Drops values of varying width to which no row refers."""
        for column in self._varying:
            slots = np.arange(self._space.slots, dtype=np.int32)
            column.collect([column.raw(slots[self.live(slots)])])

    def _perhaps_stored(self, keys: pa.RecordBatch, upserted: Upserted) -> NDArray[np.int32]:
        """Returns the rows with new keys that the database may have."""
        return upserted.new_rows[:0] if self.is_whole else upserted.new_rows

    def _evicted(self, gone: NDArray[np.int32]) -> None:
        """Handles an eviction: the rows of these slots are now only in the database."""
        self.is_whole = self.is_whole and not len(gone)

    def _insert_stored(self, slots: NDArray[np.int32], columns: Sequence[pa.Array]) -> None:
        """Puts rows from the database into new slots."""
        self._own(slots)
        scatter(self._live.pages, slots, np.ones(len(slots), dtype=np.uint8))
        for column, values in zip(self._columns.values(), columns, strict=True):
            column.paged.put(slots, values)
        self._rows += len(slots)
        # These rows are in the database: if one is removed, the next snapshot must record that.
        self._in_snapshot_below = self._space.slots

    def _coldest(self, slots: int, wanted: int) -> NDArray[np.int64]:
        """Chooses `wanted` slots to evict: first slots that were not used again, then the rest, oldest first."""
        asked = flags((self._used_again,), 0, slots)
        cold = np.flatnonzero(~asked)
        return cold[:wanted] if len(cold) >= wanted else np.concatenate((cold, np.flatnonzero(asked)))[:wanted]

    def _write(self, slots: NDArray[np.int64], write: Write) -> None:
        """Writes the changed slots among `slots`."""
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


class NamespacedTableCache(TableCache, ColumnarNamespaces):
    """A `TableCache` of a state with namespaces. `groups` is the total number of key groups."""

    def __init__(self, space: KeySpace, name: str, specs: Sequence[ValueSpec], fetch: Fetch, groups: int) -> None:
        self._groups = groups
        self._cold: GroupFlags = {}
        self._written: GroupFlags = {}
        self._gone: GroupFlags = {}
        super().__init__(space, name, specs, fetch)

    @property
    def size_bytes(self) -> int:
        """Returns the estimated memory of the rows, in bytes."""
        return super().size_bytes + 4 * self._space.slots

    @property
    def unwritten(self) -> bool:
        """Returns True if rows have changed since the last snapshot."""
        return bool(self._gone) or super().unwritten

    def stored(self, found: Mapping[int, Sequence[int]]) -> None:
        """Notes that the database has rows in these key groups of each namespace that are not in the cache."""
        for namespace, groups in found.items():
            for marked in (self._cold, self._written):
                self._set(marked, namespace, groups)

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch: reads the rows of keys that are not in the cache. Keys without a row get one."""
        known = self._space.slots
        upserted = super().upsert(keys, new_only)
        self._note_new(keys, upserted.slots, np.union1d(_beyond(upserted, known), upserted.new_rows))
        return upserted

    def bring_in(self, keys: pa.RecordBatch, columns: Sequence[pa.Array]) -> NDArray[np.int32]:
        """Adds rows that were read from the database, as in `TableCache`."""
        known = self._space.slots
        slots = super().bring_in(keys, columns)
        self._note_new(keys, slots, np.flatnonzero(slots >= known))
        return slots

    def changed(self) -> Sequence[FrozenState]:
        """Freezes the rows to write, as in `TableCache`.

        From now on all namespaces with rows count as written. Namespaces without any row do not count any more.
        """
        found = self._found()
        for namespace in [each for each in self._written if each not in found and each not in self._cold]:
            del self._written[namespace]
        for namespace in found:
            self._written[namespace] = np.ones(self._groups, dtype=np.bool_)
        return super().changed()

    def cold_groups(self, namespace: int, groups: range) -> list[int]:
        """Returns the key groups where the database may have rows of a namespace that are not in the cache."""
        marked = self._cold.get(namespace)
        if marked is None:
            return []
        found: list[int] = (np.flatnonzero(marked[groups.start : groups.stop]) + groups.start).tolist()
        return found

    def warm(self, namespace: int, group: int) -> None:
        """Notes that all rows of a namespace in a key group are in the cache."""
        self._clear_flags(self._cold, namespace, range(group, group + 1))

    def drained(self, namespace: int, groups: range, slots: NDArray[np.int32]) -> None:
        """Notes that all rows of a namespace in some key groups were removed from the cache.

        `slots`: the slots in which the rows were. If there are enough of them, the database removes them as a range.
        """
        assert self.dirty is not None
        marked = self._written.get(namespace)
        of = marked[groups.start : groups.stop] if marked is not None else np.zeros(0, dtype=np.bool_)
        written = np.flatnonzero(of) + groups.start
        if len(written) and len(slots) < _RANGE_ROWS * len(written):
            return  # few rows are removed from the database one by one
        # A slot that got a row again while the namespace was drained stays marked.
        self.dirty.unmark(slots[~self.live(slots)])
        if len(written):
            self._set(self._gone, namespace, written)
            self._clear_flags(self._written, namespace, groups)

    def forget_empty(self, namespace: int) -> None:
        """Drops a namespace from the index, if it has no rows in the cache."""
        self._slots(namespace)

    def take_removed_ranges(self) -> list[tuple[int, list[int]]]:
        """Returns and clears the namespaces and key groups to remove before the next write."""
        gone, self._gone = self._gone, {}
        return [(namespace, np.flatnonzero(marked).tolist()) for namespace, marked in gone.items()]

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers slots: slot `kept[i]` becomes slot i. Rows of other slots are in the database."""
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
        """Returns the rows with new keys that the database may have."""
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

    def _evicted(self, gone: NDArray[np.int32]) -> None:
        """Called with slots whose rows are now only in the database."""
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
    """Returns the first rows of keys whose slot is `known` or higher."""
    return upserted.first_rows[upserted.slots[upserted.first_rows] >= known]
