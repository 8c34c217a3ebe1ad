"""Vectorised states in RocksDB: `RocksTable`, with a write-back cache as `CachedTable`, and both with namespaces.

With a cache, a batch reads from the database only rows that are not in memory, and writes none (`write_back.py`). Rows
that are loaded or converted are written to the database at once, before the first batch.

`CachedNamespaces` reads a namespace from the cache, a few key groups at a time. Rows that are only in the database are
added to the cache first, with one range read per key group (`StoredNamespaces`). A window that fits into memory
therefore fires as in the columnar backend. While a reader is active nothing is evicted, because slots would be
renumbered.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import rocksdict
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import pages_for
from tidegate.state.common.table_columns import BatchColumn
from tidegate.state.kernels.columns import NO_MASK, Strings
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.frozen_rows import RocksChanges
from tidegate.state.rocksdb.keys import encoded_rows, ordered_keys, strings_of
from tidegate.state.rocksdb.table_cache import NamespacedTableCache, TableCache
from tidegate.state.rocksdb.write_back import WriteBack
from tidegate.storage.state.rocksdb.database import reported
from tidegate.storage.state.rocksdb.keys import decode_rows
from tidegate.storage.state.rocksdb.scan import CHUNK_BYTES, CHUNK_ROWS
from tidegate.storage.state.rocksdb.value_layout import HEAD, RocksState, TableLayout, table_layout

_BROUGHT_ROWS = 16_384
"""Number of rows that are converted to Python bytes at a time, on their way into the cache."""
_RUN_ROWS = 65_536
"""Number of added rows after which a read of a namespace evicts rows."""
_NO_SLOTS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
_ESTIMATE = "rocksdb.estimate-num-keys"
_NAMESPACE = struct.Struct("<Bq")
"""The encoding of an int64 column that is not null, as in `row_encoding.py`."""
_BEHIND = b"\xff"
"""A key that is sorted after all keys of a namespace, whose next column begins with 0 or 1."""


class RocksTable:
    """A `VectorTable` whose rows are in RocksDB."""

    def __init__(self, session: RocksSession, state: RocksState, specs: Sequence[ValueSpec]) -> None:
        self.state = state
        self.specs = tuple(specs)
        self.layout = table_layout(state.values)
        self.new_slots: NDArray[np.int32] = _NO_SLOTS
        """Slots whose key has no row yet."""
        self.changes = RocksChanges(session, state) if session.keeps_changes else None
        """The changed keys, if a changelog needs them."""
        self._session = session
        self._columns = {spec.name: BatchColumn(self, spec) for spec in specs}
        self._batch_keys: list[bytes] = []
        self._removed: NDArray[np.int32] = _NO_SLOTS
        """Slots of the batch whose rows are removed."""
        self._unchanged: NDArray[np.int32] = _NO_SLOTS
        """Slots of the batch that do not change."""

    @property
    def rows(self) -> int:
        """Returns an estimate of the number of keys of the whole database, over all states."""
        return self._session.database.property_int_value(_ESTIMATE) or 0

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch: fetches the rows of its keys."""
        upserted = KeyIndex(tuple(keys.schema.names)).upsert(keys)
        first_rows = upserted.first_rows
        distinct = keys if len(first_rows) == keys.num_rows else gather(keys, first_rows)
        session = self._session
        self._batch_keys, order = ordered_keys(
            distinct, session.max_parallelism, self.state.number, namespace=session.namespace
        )
        found = self._session.fetch(self._batch_keys)
        ranks = np.empty(len(order), dtype=np.int32)
        ranks[order] = np.arange(len(order), dtype=np.int32)
        missing = np.array([row is None for row in found], dtype=np.bool_)
        known, self.new_slots = (np.flatnonzero(slots).astype(np.int32) for slots in (~missing, missing))
        self._unchanged = known if new_only else _NO_SLOTS
        stored = self.layout.columns([row for row in found if row is not None]) if len(known) else None
        self._fill(len(found), known, stored, self.new_slots)
        return Upserted(ranks[upserted.slots], first_rows, first_rows[missing[ranks]])

    def column(self, name: str) -> BatchColumn:
        """Returns a value column."""
        return self._columns[name]

    def remove(self, slots: NDArray[Any]) -> None:
        """Removes the rows of these slots of the batch."""
        self._removed = np.union1d(self._removed, slots).astype(np.int32)

    def done(self) -> None:
        """Ends the batch: writes its rows, and applies removals. Raises StorageError."""
        batch_keys, self._batch_keys = self._batch_keys, []
        gone, new = self._removed, self.new_slots
        same, self._unchanged = self._unchanged, _NO_SLOTS
        self._removed = self.new_slots = _NO_SLOTS
        stays = np.ones(len(batch_keys), dtype=np.bool_)
        stays[gone] = stays[same] = False
        slots = np.flatnonzero(stays).astype(np.int32)
        keys = [batch_keys[slot] for slot in slots.tolist()]
        removed = [batch_keys[slot] for slot in np.setdiff1d(gone, new, assume_unique=True).tolist()]
        if keys:
            self.put(keys, [column.take(slots) for column in self._columns.values()])
        if removed:
            self.delete(removed)
        if self.changes is not None:
            self.changes.put(keys)
            self.changes.removed(removed)

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Writes rows, replacing existing ones. `columns` are the value columns. Raises StorageError."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys, strings_of(self.packed(columns)), strict=True):
            batch.put(key, row)
        self._session.write(batch)

    def packed(self, columns: Sequence[pa.Array]) -> Strings:
        """Returns the rows of value columns, in the encoding of the database."""
        layout = self.layout
        if not isinstance(layout, TableLayout):
            return encoded_rows(columns, layout.schema)
        rows = layout.encoded(columns)
        return Strings(np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1], rows.reshape(-1), NO_MASK)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Removes the rows of these keys, if there are any. Raises StorageError."""
        self._session.remove(keys)

    def has(self, key: bytes) -> bool:
        """Returns True if a key has a row. Raises StorageError."""
        return self._session.has(key)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all keys, sorted by key group, in batches, with their slots."""
        keys = len(self._session.key_schema)
        for rows in self._session.scan(self.state, rows_max):
            slots = np.arange(rows.num_rows, dtype=np.int32)
            self._fill(rows.num_rows, slots, rows.columns[keys:], _NO_SLOTS)
            yield rows.select(range(keys)), slots

    def _fill(
        self, slots: int, known: NDArray[np.int32], stored: Sequence[pa.Array] | None, new: NDArray[np.int32]
    ) -> None:
        """Sets up `slots` slots: `known` with stored values, `new` with the identity or null."""
        for position, column in enumerate(self._columns.values()):
            column.paged.begin_batch()
            column.paged.grow(pages_for(slots))
            if stored is not None:
                column.paged.put(known, stored[position])
            if len(new):
                column.paged.reset(new)


class StoredNamespaces:
    """Reads the stored rows of a state with namespaces."""

    def __init__(self, session: RocksSession, state: RocksState) -> None:
        self._session = session
        self._number = state.number

    def found(self) -> dict[int, list[int]]:
        """Returns the namespaces with stored rows, each with its key groups that have rows. Raises StorageError."""
        found: dict[int, list[int]] = {}
        session = self._session
        with reported("read RocksDB", session.folder):
            cursor = session.database.iter()
            for group in session.key_groups:
                prefix = HEAD.pack(group, self._number)
                cursor.seek(prefix)
                while cursor.valid() and (key := cursor.key()).startswith(prefix):
                    found.setdefault(_NAMESPACE.unpack_from(key, HEAD.size)[1], []).append(group)
                    cursor.seek(key[: HEAD.size + _NAMESPACE.size] + _BEHIND)
            cursor.status()
        return found

    def range_of(self, namespace: int, group: int) -> tuple[bytes, bytes]:
        """Returns the key range of a namespace in a key group: its first possible key, and a key after all of them."""
        prefix = HEAD.pack(group, self._number) + _NAMESPACE.pack(1, namespace)
        return prefix, prefix + _BEHIND

    def rows(self, namespace: int, rows_max: int, groups: range) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yields keys and values of a namespace, sorted by key group, as of the first batch. Raises StorageError."""
        session = self._session
        if not session.has_keys:
            return
        keys: list[bytes] = []
        values: list[bytes] = []
        with reported("read RocksDB", session.folder):
            cursor = session.database.iter()
        for group in groups:
            prefix, _ = self.range_of(namespace, group)
            with reported("read RocksDB", session.folder):
                cursor.seek(prefix)
            more = True
            while more:
                with reported("read RocksDB", session.folder):
                    while more and len(keys) < rows_max:
                        more = cursor.valid() and (key := cursor.key()).startswith(prefix)
                        if more:
                            keys.append(key)
                            values.append(cursor.value())
                            cursor.next()
                    cursor.status()
                if len(keys) == rows_max:
                    yield keys, values
                    keys, values = [], []
        if keys:
            yield keys, values

    def key_columns(self, keys: list[bytes]) -> pa.RecordBatch:
        """Returns the key columns of these database keys."""
        return decode_rows([key[HEAD.size :] for key in keys], self._session.key_schema)


class SequentialNamespaces(ABC):
    """Mixin that reads several namespaces of a `NamespacedTable` one after the other."""

    @abstractmethod
    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of a namespace, in batches, with their slots. Raises StorageError."""

    @abstractmethod
    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Like `scan_namespace`, but removes the rows of each batch when it is drawn. Raises StorageError."""

    def scan_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of namespaces, one after the other, like `scan_namespace`. Raises StorageError."""
        return chain.from_iterable(self.scan_namespace(each, rows_max, groups) for each in namespaces)

    def drain_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Like `scan_namespaces`, but removes the rows of each batch when it is drawn. Raises StorageError."""
        return chain.from_iterable(self.drain_namespace(each, rows_max, groups) for each in namespaces)


class RocksNamespaces(SequentialNamespaces, RocksTable):
    """A `NamespacedTable` whose rows are in RocksDB."""

    def namespaces(self) -> NDArray[np.int64]:
        """The ascending namespaces that have a row. Raises StorageError."""
        return np.array(sorted(StoredNamespaces(self._session, self.state).found()), dtype=np.int64)

    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of a namespace, sorted by key group, as of the first batch. Raises StorageError."""
        for _, keys, slots in self._pieces(namespace, rows_max, groups):
            yield keys, slots

    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Like `scan_namespace`, but removes the rows of each batch when it is drawn. Raises StorageError."""
        for stored, keys, slots in self._pieces(namespace, rows_max, groups):
            self.delete(stored)
            if self.changes is not None:
                self.changes.removed(stored)
            yield keys, slots

    def _pieces(
        self, namespace: int, rows_max: int, groups: range | None
    ) -> Iterator[tuple[list[bytes], pa.RecordBatch, NDArray[np.int32]]]:
        """Yields database keys, key columns and slots of a namespace, after filling the columns with the values."""
        stored = StoredNamespaces(self._session, self.state)
        for keys, values in stored.rows(namespace, rows_max, self._session.key_groups if groups is None else groups):
            slots = np.arange(len(keys), dtype=np.int32)
            self._fill(len(keys), slots, self.layout.columns(values), _NO_SLOTS)
            yield keys, stored.key_columns(keys), slots


class CachedTable(RocksTable, WriteBack):
    """A `RocksTable` with a cache of about `cache_bytes` between batches."""

    def __init__(
        self,
        session: RocksSession,
        state: RocksState,
        specs: Sequence[ValueSpec],
        key_names: tuple[str, ...],
        cache_bytes: int,
    ) -> None:
        super().__init__(session, state, specs)
        self._cache_bytes = cache_bytes
        grouped_by = key_names[1:] if session.namespace else None
        self._space = KeySpace(session.max_parallelism, key_names, grouped_by=grouped_by)
        self._hot = self._new_cache(specs)
        self._hot.is_whole = session.is_empty

    @property
    def hot(self) -> TableCache:
        """Returns the cache."""
        return self._hot

    @property
    def rows(self) -> int:
        """Returns an estimated number of rows: of the database, or of the cache if the cache has more."""
        return max(super().rows, self.hot.rows)

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch: fetches its rows that are not in the cache."""
        self._space.fix(self._session.key_schema)
        return self.hot.upsert(keys, new_only)

    def column(self, name: str) -> BatchColumn:
        """Returns a value column."""
        return self.hot.column(name)

    def remove(self, slots: NDArray[Any]) -> None:
        """Removes the rows of these slots of the batch."""
        self.hot.remove(slots)

    def done(self) -> None:
        """Ends the batch, and evicts rows if the cache is too large. Raises StorageError."""
        self.hot.done()
        self._make_room()

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Writes rows before the first batch, replacing existing ones. Raises StorageError."""
        self._hot.is_whole = False
        super().put(keys, columns)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all keys, sorted by key group, with their slots. Other batches may run between two of them."""
        self.write_all()
        self._space.fix(self._session.key_schema)
        for stored, values in self._stored_rows(min(rows_max, CHUNK_ROWS)):
            keys = decode_rows([key[HEAD.size :] for key in stored], self._session.key_schema)
            slots = self.hot.bring_in(keys, self.layout.columns(values))
            living = self.hot.live(slots)
            if not living.all():  # removed since the scan began
                keys, slots = keys.filter(pa.array(living)), slots[living]
            if len(slots):
                yield keys, slots
            self._make_room()

    def _new_cache(self, specs: Sequence[ValueSpec]) -> TableCache:
        return TableCache(self._space, self.state.name, specs, self._fetched)

    def _fetched(self, keys: pa.RecordBatch) -> tuple[NDArray[np.int64], Sequence[pa.Array]]:
        session = self._session
        stored, order = ordered_keys(keys, session.max_parallelism, self.state.number, namespace=session.namespace)
        rows = session.fetch(stored)
        found = order[[row is not None for row in rows]]
        return found, self.layout.columns([row for row in rows if row is not None])

    def _stored_rows(self, rows_max: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yields keys and values of the database in key order, as of the moment when each batch is drawn.

        Raises StorageError.

        A RocksDB iterator does not see later writes. A row that was changed and evicted during the scan must not come
        back with its old values, so each batch has a new iterator.
        """
        groups = iter(self._session.key_groups)
        prefix = start = HEAD.pack(next(groups), self.state.number)
        more = True
        while more:
            keys: list[bytes] = []
            values: list[bytes] = []
            size_bytes = 0
            with reported("read RocksDB", self._session.folder):
                cursor = self._session.database.iter()
                cursor.seek(start)
                while more and len(keys) < rows_max and size_bytes < CHUNK_BYTES:
                    if cursor.valid() and (key := cursor.key()).startswith(prefix):
                        keys.append(key)
                        values.append(cursor.value())
                        size_bytes += len(key) + len(values[-1])
                        cursor.next()
                    elif more := (group := next(groups, None)) is not None:
                        prefix = HEAD.pack(group, self.state.number)
                        cursor.seek(prefix)
                cursor.status()
            if keys:
                yield keys, values
                start = keys[-1] + b"\0"


class CachedNamespaces(SequentialNamespaces, CachedTable):
    """A `NamespacedTable` with a cache of about `cache_bytes` between batches."""

    _hot: NamespacedTableCache

    def __init__(
        self,
        session: RocksSession,
        state: RocksState,
        specs: Sequence[ValueSpec],
        key_names: tuple[str, ...],
        cache_bytes: int,
    ) -> None:
        super().__init__(session, state, specs, key_names, cache_bytes)
        self._stored = StoredNamespaces(session, state)
        self._readers = 0
        self._known = session.is_empty
        """False until `_look` has read the stored namespaces."""

    @property
    def hot(self) -> NamespacedTableCache:
        """Returns the cache."""
        return self._hot

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch: fetches its rows that are not in the cache."""
        self._look()
        return super().upsert(keys, new_only)

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Writes rows before the first batch, replacing existing ones. Raises StorageError."""
        self._known = False
        super().put(keys, columns)

    def namespaces(self) -> NDArray[np.int64]:
        """The ascending namespaces that have a row. Raises StorageError."""
        self._look()
        self.write_all()
        return np.array(sorted(self._stored.found()), dtype=np.int64)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all keys, sorted by key group, in batches, with their slots."""
        self._look()
        return super().scan(rows_max)

    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of a namespace, in batches, with their slots. Raises StorageError."""
        for part in self._runs(namespace, groups):
            with self._reading():
                yield from self.hot.scan_namespace(namespace, rows_max, part)

    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Like `scan_namespace`, but removes the rows of each batch when it is drawn. Raises StorageError."""
        for part in self._runs(namespace, groups):
            drawn = [np.zeros(0, dtype=np.int32)]
            with self._reading():
                for keys, slots in self.hot.scan_namespace(namespace, rows_max, part):
                    self.hot.set_live(slots, np.zeros(len(slots), dtype=np.bool_))
                    drawn.append(slots)
                    yield keys, slots
            self.hot.drained(namespace, part, np.concatenate(drawn))
        self.hot.forget_empty(namespace)
        self._space.settle()

    def changed(self) -> Iterator[object]:
        """Freezes the changes that are not in the database.

        Each item drawn writes a part of them. Raises StorageError.
        """
        return chain(self._removing(self.hot.take_removed_ranges()), super().changed())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Within this context nothing is evicted, so that slots are not renumbered."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    def _make_room(self) -> None:
        if not self._readers:
            super()._make_room()

    def _new_cache(self, specs: Sequence[ValueSpec]) -> NamespacedTableCache:
        return NamespacedTableCache(self._space, self.state.name, specs, self._fetched, self._session.max_parallelism)

    def _settle(self) -> None:
        super()._settle()
        for _ in self._removing(self.hot.take_removed_ranges()):
            pass

    def _look(self) -> None:
        """Reads the stored namespaces, if the database began with files or rows were loaded. Raises StorageError."""
        if not self._known:
            self._space.fix(self._session.key_schema)
            self.hot.stored(self._stored.found())
            self._known = True

    def _runs(self, namespace: int, groups: range | None) -> Iterator[range]:
        """Yields key groups, a few at a time, after all rows of a namespace in them are in the cache."""
        self._look()
        asked = self._session.key_groups if groups is None else groups
        start = asked.start
        while start < asked.stop:
            rows, stop = 0, asked.stop
            # Read again for each run: evictions between two runs move rows of later groups to the database.
            for group in self.hot.cold_groups(namespace, range(start, stop)):
                if rows >= _RUN_ROWS:
                    stop = group
                    break
                rows += self._bring_in(namespace, group)
            yield range(start, stop)
            self._make_room()
            start = stop

    def _bring_in(self, namespace: int, group: int) -> int:
        """Adds the stored rows of a namespace in a key group to the cache.

        Returns their number. Raises StorageError.
        """
        rows = 0
        for keys, values in self._stored.rows(namespace, _BROUGHT_ROWS, range(group, group + 1)):
            self.hot.bring_in(self._stored.key_columns(keys), self.layout.columns(values))
            rows += len(keys)
        self.hot.warm(namespace, group)
        return rows

    def _removing(self, gone: Sequence[tuple[int, Sequence[int]]]) -> Iterator[object]:
        for namespace, groups in gone:
            self._session.apply_ranges(self._stored.range_of(namespace, group) for group in groups)
            yield None
