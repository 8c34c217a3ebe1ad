"""Vectorised states with a cold tier: `RocksTable`, and `RocksNamespaces` for a state with namespaces.

Rules:
- For a key with a slot the rows in memory are authoritative, also if it has no row; the database may have an older row.
  For a key without a slot the database is authoritative, and is read at the first use of the key. While the database
  only has rows of keys with slots (`is_whole`), a key without a slot is new, and is not looked up.
- An eviction frees an eighth of the rows, so that it pays. It removes rows that were not used again since the last
  eviction, the oldest first.
- Rows that are loaded or converted are written to the database at once, before the first batch.

`RocksNamespaces` tracks which rows of each namespace the database may have:
- A namespace is *cold* in a key group where the database may have a row that is not in memory. Keys are looked up in
  the database only there. Rows of a window are new, so while rows fit into memory nothing is read.
- A namespace is read from memory, a few key groups at a time. Its cold rows are brought in first, with one range read
  per key group. A window that fits into memory therefore fires as in the columnar backend. While a reader is active
  nothing is evicted, because slots would be renumbered.
- A namespace is *written* in a key group where the database may have any row of it. When the namespace is drained,
  these rows are removed as a range, and its slots are free at once. If it was never written, nothing is removed.
- Ranges are removed before the next write (`_take_removed_ranges`). Until then nothing reads there, because a drained
  namespace is not cold. If a changelog needs the removed keys, they are removed one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.change_tracking import flags, words_for
from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.vector_table import ColumnarNamespaces, note
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.table_columns import VaryingColumn
from tidegate.state.kernels.columns import fixed_values
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.paged import Bitmap, mark_below, scatter
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.rocksdb.cold_store import ColdStore, TieredTable, Write
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.storage.state.rocksdb.database import reported
from tidegate.storage.state.rocksdb.value_layout import HEAD, RocksState
from tidegate.storage.state.snapshot import FrozenState

_LIVE_BYTES = 1
"""Number of bytes of the flag of a slot that it has a row."""
_ROOM = 8
"""The part of the rows that one eviction frees."""
_WRITTEN_ROWS = 65_536
_RANGE_ROWS = 4
"""Number of rows per key group below which rows are removed one by one, because a range costs the database more than a
row.
"""
_BROUGHT_ROWS = 16_384
"""Number of rows that are converted to Python bytes at a time, on their way into memory."""
_RUN_ROWS = 65_536
"""Number of added rows after which a read of a namespace evicts rows."""
_NAMESPACE = struct.Struct("<Bq")
"""The encoding of an int64 column that is not null, as in `row_encoding.py`."""
_BEHIND = b"\xff"
"""A key that is sorted after all keys of a namespace, whose next column begins with 0 or 1."""
GroupFlags = dict[int, NDArray[np.bool_]]
"""One flag per key group, by namespace. A namespace without set flags has no entry."""


class RocksTable(TieredTable):
    """A `VectorTable` in RocksDB, with a cache of rows in memory."""

    def __init__(
        self,
        session: RocksSession,
        state: RocksState,
        specs: Sequence[ValueSpec],
        key_names: tuple[str, ...],
        cache_bytes: int,
    ) -> None:
        self.cold = self._new_store(session, state)
        self.cache_bytes = cache_bytes
        self.is_whole = session.is_empty
        """True if a key without a slot has no row in the database."""
        self._used_again: Bitmap = np.zeros(words_for(0), dtype=np.uint64)
        """Slots whose keys were used in a later batch than the one that added them."""
        self._known_slots = 0
        """The number of slots when the batch began."""
        grouped_by = key_names[1:] if session.namespace else None
        space = KeySpace(session.max_parallelism, key_names, grouped_by=grouped_by)
        super().__init__(space, state.name, specs, incremental=True)

    @property
    def size_bytes(self) -> int:
        """Returns the estimated memory of the cached rows in bytes."""
        columns = [column.paged for column in self._columns.values()]
        row_bytes = _LIVE_BYTES + sum(column.dtype.itemsize + (len(column.valid_pages) > 0) for column in columns)
        heaps_bytes = sum(column.heap_bytes for column in self._varying)
        return self._space.slots * row_bytes + heaps_bytes + self._space.size_bytes

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch of keys, and returns their slots. Reads rows that are not in memory, and adds a row for each
        key that has none.
        """
        self._space.fix(self.cold.session.key_schema)
        self._known_slots = self._space.slots
        upserted = self._space.upsert(keys)
        mark_below(self._used_again, self._known_slots, upserted.slots)
        wanted, stored = self._perhaps_stored(keys, upserted), 0
        if len(wanted):
            found, columns = self.cold.fetch(keys if len(wanted) == keys.num_rows else gather(keys, wanted))
            stored = len(found)
            self._insert_stored(upserted.slots[wanted[found]], columns)
        new_rows = self._begin(upserted, stored=stored, new_only=new_only)
        return Upserted(upserted.slots, upserted.first_rows, new_rows)

    def remove(self, slots: NDArray[Any]) -> None:
        """Removes the rows of these slots, which belong to the current batch."""
        assert self.dirty is not None
        super().remove(slots)
        # A key that was added by this batch, and was not found in the database, leaves no trace.
        added = self.new_slots[self.new_slots >= self._known_slots]
        self.dirty.unmark(np.intersect1d(distinct_integers(slots), added, assume_unique=True).astype(np.int32))

    def done(self) -> None:
        """Ends the batch. Evicts rows if there are too many in memory. Raises StorageError."""
        super().done()
        self.make_room()

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Writes rows under these database keys before the first batch. They replace existing rows. Raises
        StorageError.
        """
        self.is_whole = False
        self.cold.put(keys, columns)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all keys, sorted by key group, in batches, each with the slots of its keys.

        Other batches may be processed between two of them.
        """
        self.write_all()
        self._space.fix(self.cold.session.key_schema)
        for keys, columns in self.cold.scan(rows_max):
            slots = self._bring_in(keys, columns)
            living = self.live(slots)
            if not living.all():  # removed since the scan began
                keys, slots = keys.filter(pa.array(living)), slots[living]
            if len(slots):
                yield keys, slots
            self.make_room()

    def evict(self, size_bytes_max: int, write: Write) -> None:
        """Evicts rows from memory if they exceed `size_bytes_max`. Changed rows are passed to `write` first."""
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
        """Makes room for `slots` slots of the state."""
        words = words_for(slots)
        if words > len(self._used_again):
            larger = np.zeros(max(words, 2 * len(self._used_again)), dtype=np.uint64)
            larger[: len(self._used_again)] = self._used_again
            self._used_again = larger
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of the state: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        used_again = np.flatnonzero(flags((self._used_again,), 0, slots)[kept]).astype(np.int32)
        self._used_again = np.zeros(words_for(len(kept)), dtype=np.uint64)
        mark_below(self._used_again, len(kept), used_again)
        super().rebuild(kept, slots)

    def _new_store(self, session: RocksSession, state: RocksState) -> ColdStore:
        return ColdStore(session, state)

    @property
    def _varying(self) -> list[VaryingColumn]:
        columns = (column.paged for column in self._columns.values())
        return [column for column in columns if isinstance(column, VaryingColumn)]

    def _bring_in(self, keys: pa.RecordBatch, columns: Sequence[pa.Array]) -> NDArray[np.int32]:
        """Adds rows that were read from the database to memory, after `write_all`. Returns the slots of their keys.

        Keys that are in memory already are not changed.
        """
        upserted = self._space.upsert(keys)
        new = pa.array(upserted.new_rows)
        if len(new):
            self._insert_stored(upserted.slots[upserted.new_rows], [column.take(new) for column in columns])
        return upserted.slots

    def _drop_unused_values(self) -> None:
        """Drops values of variable width to which no row in memory refers."""
        for column in self._varying:
            slots = np.arange(self._space.slots, dtype=np.int32)
            column.collect([column.raw(slots[self.live(slots)])])

    def _perhaps_stored(self, keys: pa.RecordBatch, upserted: Upserted) -> NDArray[np.int32]:
        """Returns the indices of rows with new keys for which the database may have a row."""
        return upserted.new_rows[:0] if self.is_whole else upserted.new_rows

    def _evicted(self, gone: NDArray[np.int32]) -> None:
        """Records that the rows of these slots were evicted, so that they are only in the database."""
        self.is_whole = self.is_whole and not len(gone)

    def _insert_stored(self, slots: NDArray[np.int32], columns: Sequence[pa.Array]) -> None:
        """Stores rows that were read from the database in new slots."""
        self._own(slots)
        scatter(self._live.pages, slots, np.ones(len(slots), dtype=np.uint8))
        for column, values in zip(self._columns.values(), columns, strict=True):
            column.paged.put(slots, values)
        self._rows += len(slots)
        # These rows are in the database: if one is removed, the next snapshot must record that.
        self._in_snapshot_below = self._space.slots

    def _coldest(self, slots: int, wanted: int) -> NDArray[np.int64]:
        """Chooses `wanted` slots to evict: first slots that were used only once, then others, oldest first."""
        used_again = flags((self._used_again,), 0, slots)
        cold = np.flatnonzero(~used_again)
        return cold[:wanted] if len(cold) >= wanted else np.concatenate((cold, np.flatnonzero(used_again)))[:wanted]

    def _write(self, slots: NDArray[np.int64], write: Write) -> None:
        """Passes the changed rows among `slots` to `write`."""
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


class NamespacedStore(ColdStore):
    """A `ColdStore` (stored rows) of a state with namespaces."""

    def namespaces(self) -> dict[int, list[int]]:
        """Returns the namespaces with stored rows. For each namespace, the key groups that have rows. Raises
        StorageError.
        """
        found: dict[int, list[int]] = {}
        session = self.session
        with reported("read RocksDB", session.folder):
            cursor = session.database.iter()
            for group in session.key_groups:
                prefix = HEAD.pack(group, self.state.number)
                cursor.seek(prefix)
                while cursor.valid() and (key := cursor.key()).startswith(prefix):
                    found.setdefault(_NAMESPACE.unpack_from(key, HEAD.size)[1], []).append(group)
                    cursor.seek(key[: HEAD.size + _NAMESPACE.size] + _BEHIND)
            cursor.status()
        return found

    def scan_group(self, namespace: int, group: int, rows_max: int) -> Iterator[tuple[pa.RecordBatch, list[pa.Array]]]:
        """Yields keys and value columns of a namespace in one key group. Shows the database as of the first batch.
        Raises StorageError.
        """
        prefix, _ = self._range_of(namespace, group)
        folder = self.session.folder
        with reported("read RocksDB", folder):
            cursor = self.session.database.iter()
            cursor.seek(prefix)
        more = True
        while more:
            keys: list[bytes] = []
            values: list[bytes] = []
            with reported("read RocksDB", folder):
                while more and len(keys) < rows_max:
                    more = cursor.valid() and (key := cursor.key()).startswith(prefix)
                    if more:
                        keys.append(key)
                        values.append(cursor.value())
                        cursor.next()
                cursor.status()
            if keys:
                yield self.identities(keys), self.columns(values)

    def drain(self, namespace: int, groups: Sequence[int]) -> None:
        """Removes all stored rows of a namespace in some key groups, as part of a pending snapshot. Raises
        StorageError.
        """
        self.session.apply_ranges(self._range_of(namespace, group) for group in groups)

    def _range_of(self, namespace: int, group: int) -> tuple[bytes, bytes]:
        """Returns the range of database keys of a namespace in a key group: its first possible key, and a key after all
        its keys.
        """
        prefix = HEAD.pack(group, self.state.number) + _NAMESPACE.pack(1, namespace)
        return prefix, prefix + _BEHIND


class RocksNamespaces(RocksTable, ColumnarNamespaces):
    """A `NamespacedTable` in RocksDB, with a cache of rows in memory."""

    cold: NamespacedStore

    def __init__(
        self,
        session: RocksSession,
        state: RocksState,
        specs: Sequence[ValueSpec],
        key_names: tuple[str, ...],
        cache_bytes: int,
    ) -> None:
        self._groups = session.max_parallelism
        self._cold: GroupFlags = {}
        self._in_database: GroupFlags = {}
        self._removed: GroupFlags = {}
        """The key groups of drained namespaces that are still to be removed from the database."""
        self._is_known = session.is_empty
        """False until `_look` has read the stored namespaces."""
        super().__init__(session, state, specs, key_names, cache_bytes)

    @property
    def size_bytes(self) -> int:
        """Returns the estimated size in bytes of the rows in memory."""
        return super().size_bytes + 4 * self._space.slots

    @property
    def unwritten(self) -> bool:
        """Returns whether any row has changed since the last snapshot."""
        return bool(self._removed) or super().unwritten

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch of keys, and returns their slots. Reads rows that are not in memory, and adds a row for each
        key that has none.
        """
        self._look()
        known = self._space.slots
        upserted = super().upsert(keys, new_only)
        self._note_new(
            keys, upserted.slots, distinct_integers(np.concatenate([_beyond(upserted, known), upserted.new_rows]))
        )
        return upserted

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Writes rows under these database keys before the first batch. They replace existing rows. Raises
        StorageError.
        """
        self._is_known = False
        super().put(keys, columns)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all keys, sorted by key group, in batches, each with the slots of its keys."""
        self._look()
        return super().scan(rows_max)

    def namespaces(self) -> NDArray[np.int64]:
        """Returns the namespaces that have a row, ascending. Raises StorageError."""
        self._look()
        self.write_all()
        return np.array(sorted(self.cold.namespaces()), dtype=np.int64)

    def scan_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of several namespaces, one namespace after the other, in batches, each with the slots of its
        keys. Raises StorageError.
        """
        for namespace in namespaces:
            for part in self._runs(namespace, groups):
                yield from super().scan_namespaces((namespace,), rows_max, part)

    def drain_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of several namespaces like `scan_namespaces`, and removes the rows of each batch when it is
        yielded. Raises StorageError.
        """
        for namespace in namespaces:
            for part in self._runs(namespace, groups):
                drawn = [np.zeros(0, dtype=np.int32)]
                for keys, slots in super().scan_namespaces((namespace,), rows_max, part):
                    self.set_live(slots, np.zeros(len(slots), dtype=np.bool_))
                    drawn.append(slots)
                    yield keys, slots
                self._drained(namespace, part, np.concatenate(drawn))
            self._slots(namespace)  # drops the namespace from the index if it has no rows
            self._space.settle()

    def freeze_changes(self) -> Sequence[FrozenState]:
        """Freezes the changed rows and the removed keys, for writing them to the database.

        From now on, all namespaces that have rows are recorded as stored, and namespaces without rows as not stored.
        """
        found = self._found()
        for namespace in [each for each in self._in_database if each not in found and each not in self._cold]:
            del self._in_database[namespace]
        for namespace in found:
            self._in_database[namespace] = np.ones(self._groups, dtype=np.bool_)
        return super().freeze_changes()

    def changed(self, for_snapshot: bool = True) -> Iterator[object]:
        """Freezes the changes that are not in the database yet. Returns an iterator that writes a part of them at each
        step. Raises StorageError.
        """
        return chain(self._draining(self._take_removed_ranges()), super().changed(for_snapshot))

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers slots: slot `kept[i]` becomes slot i. Rows of slots that are not in `kept` are in the database."""
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

    def _new_store(self, session: RocksSession, state: RocksState) -> NamespacedStore:
        return NamespacedStore(session, state)

    def _look(self) -> None:
        """Reads which namespaces have stored rows, if the database began with files or rows were loaded. Raises
        StorageError.
        """
        if not self._is_known:
            self._space.fix(self.cold.session.key_schema)
            for namespace, groups in self.cold.namespaces().items():
                for marked in (self._cold, self._in_database):
                    self._set(marked, namespace, groups)
            self._is_known = True

    def _runs(self, namespace: int, groups: range | None) -> Iterator[range]:
        """Reads the rows of a namespace into memory, some key groups at a time. Yields each range of key groups after
        its rows are in memory.
        """
        self._look()
        wanted = self.cold.session.key_groups if groups is None else groups
        start = wanted.start
        while start < wanted.stop:
            rows, stop = 0, wanted.stop
            # Read again for each run: evictions between two runs move rows of later groups to the database.
            for group in self._cold_groups(namespace, range(start, stop)):
                if rows >= _RUN_ROWS:
                    stop = group
                    break
                for keys, columns in self.cold.scan_group(namespace, group, _BROUGHT_ROWS):
                    self._bring_in(keys, columns)
                    rows += keys.num_rows
                self._clear_flags(self._cold, namespace, range(group, group + 1))
            yield range(start, stop)
            self.make_room()
            start = stop

    def _bring_in(self, keys: pa.RecordBatch, columns: Sequence[pa.Array]) -> NDArray[np.int32]:
        known = self._space.slots
        slots = super()._bring_in(keys, columns)
        self._note_new(keys, slots, np.flatnonzero(slots >= known))
        return slots

    def _cold_groups(self, namespace: int, groups: range) -> list[int]:
        """Returns the key groups for which the database may have rows of a namespace that are not in memory."""
        marked = self._cold.get(namespace)
        if marked is None:
            return []
        found: list[int] = (np.flatnonzero(marked[groups.start : groups.stop]) + groups.start).tolist()
        return found

    def _drained(self, namespace: int, groups: range, slots: NDArray[np.int32]) -> None:
        """Records that all rows of a namespace in some key groups were removed from memory.

        `slots` are the slots of these rows. If there are enough rows, the database removes them as a range of keys.
        """
        assert self.dirty is not None
        marked = self._in_database.get(namespace)
        of = marked[groups.start : groups.stop] if marked is not None else np.zeros(0, dtype=np.bool_)
        written = np.flatnonzero(of) + groups.start
        if len(written) and (self.cold.changes is not None or len(slots) < _RANGE_ROWS * len(written)):
            return  # the rows are removed from the database one by one
        # A slot that got a row again while the namespace was drained stays marked.
        self.dirty.unmark(slots[~self.live(slots)])
        if len(written):
            self._set(self._removed, namespace, written)
            self._clear_flags(self._in_database, namespace, groups)

    def _take_removed_ranges(self) -> list[tuple[int, list[int]]]:
        """Returns and forgets the pairs of a namespace and its key groups whose stored rows must be removed before the
        next write.
        """
        removed, self._removed = self._removed, {}
        return [(namespace, np.flatnonzero(marked).tolist()) for namespace, marked in removed.items()]

    def _draining(self, removed: Sequence[tuple[int, Sequence[int]]]) -> Iterator[object]:
        for namespace, groups in removed:
            self.cold.drain(namespace, groups)
            yield None

    def _settle(self) -> None:
        super()._settle()
        if self._removed:
            self.cold.session.settle()
            for _ in self._draining(self._take_removed_ranges()):
                pass

    def _perhaps_stored(self, keys: pa.RecordBatch, upserted: Upserted) -> NDArray[np.int32]:
        new = upserted.new_rows
        if not self._cold or not len(new):
            return new[:0]
        names, groups = fixed_values(keys.column(0))[new], self._space.groups_of(upserted.slots[new])
        wanted = np.zeros(len(new), dtype=np.bool_)
        for namespace in distinct_integers(names).tolist():
            if (marked := self._cold.get(namespace)) is not None:
                of = names == namespace
                wanted[of] = marked[groups[of]]
        return new[wanted]

    def _evicted(self, gone: NDArray[np.int32]) -> None:
        groups = self._space.groups_of(gone)
        names = fixed_values(self._space.keys_of(gone).column(0))
        for namespace in distinct_integers(names).tolist():
            of = distinct_integers(groups[names == namespace])
            for marked in (self._cold, self._in_database):
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
    """Returns the first rows of the keys whose slot is `known` or higher."""
    return upserted.first_rows[upserted.slots[upserted.first_rows] >= known]
