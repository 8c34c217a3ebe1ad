"""Vectorised states in RocksDB whose hot rows are in memory, in columns: `RocksTable`, and with namespaces.

A batch reads from the database only rows that are not in memory, and writes none (`write_back.py`). Rows that are
loaded or moved go to the database at once, before the first batch.

`RocksNamespaces` reads the rows of a namespace in memory, a few key groups at a time; rows of these that are only in
the database are read first, a range for each key group (`StoredNamespaces`). A window that fits into memory therefore
fires as in the columnar backend, whatever the database has of it. While a reader is active, nothing is evicted, because
slots would be renumbered.
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
from tidegate.state.rocksdb.hot_rows import HotNamespaces, HotRows
from tidegate.state.rocksdb.keys import encoded_rows, ordered_keys, strings_of
from tidegate.state.rocksdb.write_back import WriteBack
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.keys import decode_rows
from tidegate.storage.rocksdb.scan import CHUNK_BYTES, CHUNK_ROWS
from tidegate.storage.rocksdb.value_layout import HEAD, RocksState, TableLayout, table_layout

_BROUGHT_ROWS = 16_384
"""Rows on their way into memory become Python values, so many at a time."""
_RUN_ROWS = 65_536
"""Room is made when so many have been brought in."""
_NO_SLOTS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
_ESTIMATE = "rocksdb.estimate-num-keys"
_NAMESPACE = struct.Struct("<Bq")
"""A column that is not null, and its word, as in `row_encoding.py`."""
_BEHIND = b"\xff"
"""No key goes on so behind a namespace: the next column begins with 0 or 1."""


class RocksTable:
    """A `VectorTable` whose rows are in RocksDB."""

    def __init__(self, session: RocksSession, state: RocksState, specs: Sequence[ValueSpec]) -> None:
        self.state = state
        self.specs = tuple(specs)
        self.layout = table_layout(state.values)
        self.new_slots: NDArray[np.int32] = _NO_SLOTS
        """Slots whose key has no row yet."""
        self.changes = RocksChanges(session, state) if session.keeps_changes else None
        """The changed keys, if a changelog wants them."""
        self._session = session
        self._columns = {spec.name: BatchColumn(self, spec) for spec in specs}
        self._batch_keys: list[bytes] = []
        self._removed: NDArray[np.int32] = _NO_SLOTS
        """Slots of the batch whose rows are taken away."""
        self._unchanged: NDArray[np.int32] = _NO_SLOTS
        """Slots of the batch that do not change."""

    @property
    def rows(self) -> int:
        """An estimate of how many keys the whole database has, all states together."""
        return self._session.database.property_int_value(_ESTIMATE) or 0

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch: fetch the rows of its keys."""
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
        """A value column."""
        return self._columns[name]

    def remove(self, slots: NDArray[Any]) -> None:
        """Take away the rows of these slots of the batch."""
        self._removed = np.union1d(self._removed, slots).astype(np.int32)

    def done(self) -> None:
        """End the batch: write its rows, and remove those that were taken away."""
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
        """Write rows over what is there. `columns` are the value columns. StorageError."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys, strings_of(self.packed(columns)), strict=True):
            batch.put(key, row)
        self._session.write(batch)

    def packed(self, columns: Sequence[pa.Array]) -> Strings:
        """Rows of value columns, as they lie in the database."""
        layout = self.layout
        if not isinstance(layout, TableLayout):
            return encoded_rows(columns, layout.schema)
        rows = layout.encoded(columns)
        return Strings(np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1], rows.reshape(-1), NO_MASK)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove the rows of these keys, if there are any. StorageError."""
        self._session.remove(keys)

    def has(self, key: bytes) -> bool:
        """Whether a key has a row. StorageError."""
        return self._session.has(key)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All keys, sorted by key group, in batches, with their slots."""
        keys = len(self._session.key_schema)
        for rows in self._session.scan(self.state, rows_max):
            slots = np.arange(rows.num_rows, dtype=np.int32)
            self._fill(rows.num_rows, slots, rows.columns[keys:], _NO_SLOTS)
            yield rows.select(range(keys)), slots

    def _fill(
        self, slots: int, known: NDArray[np.int32], stored: Sequence[pa.Array] | None, new: NDArray[np.int32]
    ) -> None:
        """Set up this many slots: `known` ones with stored values, `new` ones with the identity or null."""
        for position, column in enumerate(self._columns.values()):
            column.paged.begin_batch()
            column.paged.grow(pages_for(slots))
            if stored is not None:
                column.paged.put(known, stored[position])
            if len(new):
                column.paged.reset(new)


class StoredNamespaces:
    """What the database has of a state with namespaces."""

    def __init__(self, session: RocksSession, state: RocksState) -> None:
        self._session = session
        self._number = state.number

    def found(self) -> dict[int, list[int]]:
        """The namespaces that have a row, each with the key groups where it has one. StorageError."""
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
        """Where its rows lie: the first key that one may have, and a key behind all of them."""
        prefix = HEAD.pack(group, self._number) + _NAMESPACE.pack(1, namespace)
        return prefix, prefix + _BEHIND

    def rows(self, namespace: int, rows_max: int, groups: range) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Keys and values of the rows in a namespace, sorted by key group, as they are at first. StorageError."""
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
        """The key columns of some keys."""
        return decode_rows([key[HEAD.size :] for key in keys], self._session.key_schema)


class NamespacesInTurn(ABC):
    """What a `NamespacedTable` in RocksDB does with several namespaces: with one after the other."""

    @abstractmethod
    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The keys in a namespace, in batches, with their slots. StorageError."""

    @abstractmethod
    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The same; the rows of a batch are removed when it is drawn. StorageError."""

    def scan_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The keys in namespaces, one after the other, as of `scan_namespace`. StorageError."""
        return chain.from_iterable(self.scan_namespace(each, rows_max, groups) for each in namespaces)

    def drain_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The same; the rows of a batch are removed when it is drawn. StorageError."""
        return chain.from_iterable(self.drain_namespace(each, rows_max, groups) for each in namespaces)


class RocksNamespaces(NamespacesInTurn, RocksTable):
    """A `NamespacedTable` whose rows are in RocksDB."""

    def namespaces(self) -> NDArray[np.int64]:
        """The namespaces that have a row, ascending. StorageError."""
        return np.array(sorted(StoredNamespaces(self._session, self.state).found()), dtype=np.int64)

    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The keys in a namespace, sorted by key group, as they are when the first batch is drawn. StorageError."""
        for _, keys, slots in self._pieces(namespace, rows_max, groups):
            yield keys, slots

    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The same; the rows of a batch are removed when it is drawn. StorageError."""
        for stored, keys, slots in self._pieces(namespace, rows_max, groups):
            self.delete(stored)
            if self.changes is not None:
                self.changes.removed(stored)
            yield keys, slots

    def _pieces(
        self, namespace: int, rows_max: int, groups: range | None
    ) -> Iterator[tuple[list[bytes], pa.RecordBatch, NDArray[np.int32]]]:
        """Database keys, key columns and slots of the rows in a namespace, whose values the columns have then."""
        stored = StoredNamespaces(self._session, self.state)
        for keys, values in stored.rows(namespace, rows_max, self._session.key_groups if groups is None else groups):
            slots = np.arange(len(keys), dtype=np.int32)
            self._fill(len(keys), slots, self.layout.columns(values), _NO_SLOTS)
            yield keys, stored.key_columns(keys), slots


class CachedTable(RocksTable, WriteBack):
    """A `VectorTable`. Of its rows, about `cache_bytes` are in memory between batches."""

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
        self._hot = self._hot_rows(specs)
        self._hot.is_whole = session.is_empty

    @property
    def hot(self) -> HotRows:
        """The rows in memory."""
        return self._hot

    @property
    def rows(self) -> int:
        """An estimate: of what the database has, or of what is in memory, if that is more."""
        return max(super().rows, self.hot.rows)

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch: fetch those of its rows that are not in memory."""
        self._space.fix(self._session.key_schema)
        return self.hot.upsert(keys, new_only)

    def column(self, name: str) -> BatchColumn:
        """A value column."""
        return self.hot.column(name)

    def remove(self, slots: NDArray[Any]) -> None:
        """Take away the rows of these slots of the batch."""
        self.hot.remove(slots)

    def done(self) -> None:
        """End the batch."""
        self.hot.done()
        self._make_room()

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Write rows over what is there, before the first batch. StorageError."""
        self._hot.is_whole = False
        super().put(keys, columns)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All keys, sorted by key group, in batches, with their slots. Other batches may come between two of them."""
        self.write_all()
        self._space.fix(self._session.key_schema)
        for stored, values in self._stored_rows(min(rows_max, CHUNK_ROWS)):
            keys = decode_rows([key[HEAD.size :] for key in stored], self._session.key_schema)
            slots = self.hot.show(keys, self.layout.columns(values))
            living = self.hot.live(slots)
            if not living.all():  # removed since the scan began
                keys, slots = keys.filter(pa.array(living)), slots[living]
            if len(slots):
                yield keys, slots
            self._make_room()

    def _hot_rows(self, specs: Sequence[ValueSpec]) -> HotRows:
        return HotRows(self._space, self.state.name, specs, self._fetched)

    def _fetched(self, keys: pa.RecordBatch) -> tuple[NDArray[np.int64], Sequence[pa.Array]]:
        session = self._session
        stored, order = ordered_keys(keys, session.max_parallelism, self.state.number, namespace=session.namespace)
        rows = session.fetch(stored)
        found = order[[row is not None for row in rows]]
        return found, self.layout.columns([row for row in rows if row is not None])

    def _stored_rows(self, rows_max: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Keys and values of the database, in its order, each as it is when it is drawn. StorageError.

        An iterator sees what there was when it was made. A row that has been changed since, and has left memory, must
        not come back as it was: so each batch has an iterator of its own.
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


class CachedNamespaces(NamespacesInTurn, CachedTable):
    """A `NamespacedTable`. Of its rows, about `cache_bytes` are in memory between batches."""

    _hot: HotNamespaces

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
        """Whether it is known what the database has."""

    @property
    def hot(self) -> HotNamespaces:
        """The rows in memory."""
        return self._hot

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch: fetch those of its rows that are not in memory."""
        self._look()
        return super().upsert(keys, new_only)

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Write rows over what is there, before the first batch. StorageError."""
        self._known = False
        super().put(keys, columns)

    def namespaces(self) -> NDArray[np.int64]:
        """The namespaces that have a row, ascending. StorageError."""
        self._look()
        self.write_all()
        return np.array(sorted(self._stored.found()), dtype=np.int64)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All keys, sorted by key group, in batches, with their slots."""
        self._look()
        return super().scan(rows_max)

    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The keys in a namespace, in batches, with their slots. StorageError."""
        for part in self._runs(namespace, groups):
            with self._reading():
                yield from self.hot.scan_namespace(namespace, rows_max, part)

    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The same; the rows of a batch are removed when it is drawn. StorageError."""
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
        """Freeze what is not in the database. The result writes it, a part with each item drawn. StorageError."""
        return chain(self._removing(self.hot.take_gone()), super().changed())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Within this context no slot gets another number."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    def _make_room(self) -> None:
        if not self._readers:
            super()._make_room()

    def _hot_rows(self, specs: Sequence[ValueSpec]) -> HotNamespaces:
        return HotNamespaces(self._space, self.state.name, specs, self._fetched, self._session.max_parallelism)

    def _settle(self) -> None:
        super()._settle()
        for _ in self._removing(self.hot.take_gone()):
            pass

    def _look(self) -> None:
        """Find what the database has, if rows were put there, or it began with files."""
        if not self._known:
            self._space.fix(self._session.key_schema)
            self.hot.stored(self._stored.found())
            self._known = True

    def _runs(self, namespace: int, groups: range | None) -> Iterator[range]:
        """Some key groups, a few at a time, whose rows of a namespace are all in memory then."""
        self._look()
        asked = self._session.key_groups if groups is None else groups
        start = asked.start
        while start < asked.stop:
            rows, stop = 0, asked.stop
            # Asked anew for each run: who makes room between two of them sends rows of later groups to the database.
            for group in self.hot.cold_groups(namespace, range(start, stop)):
                if rows >= _RUN_ROWS:
                    stop = group
                    break
                rows += self._bring_in(namespace, group)
            yield range(start, stop)
            self._make_room()
            start = stop

    def _bring_in(self, namespace: int, group: int) -> int:
        """Bring in the rows of a namespace in a key group that are not in memory. How many there are. StorageError."""
        rows = 0
        for keys, values in self._stored.rows(namespace, _BROUGHT_ROWS, range(group, group + 1)):
            self.hot.show(self._stored.key_columns(keys), self.layout.columns(values))
            rows += len(keys)
        self.hot.warm(namespace, group)
        return rows

    def _removing(self, gone: Sequence[tuple[int, Sequence[int]]]) -> Iterator[object]:
        for namespace, groups in gone:
            self._session.apply_ranges(self._stored.range_of(namespace, group) for group in groups)
            yield None
