"""`RocksNamespaces`: a vectorised state in RocksDB that reads the rows of a namespace with one seek a key group.

The namespace is the first column of the key, so the rows of one lie together in each key group. Which namespaces there
are is found by skipping from one to the next. `StoredNamespaces` does both, also for states with rows in memory.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.vector_table import RocksTable
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.keys import decode_rows
from tidegate.storage.rocksdb.value_layout import HEAD, RocksState

_NO_SLOTS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
_NAMESPACE = struct.Struct("<Bq")
"""A column that is not null, and its word, as in `row_encoding.py`."""
_BEHIND = b"\xff"
"""No key goes on so behind a namespace: the next column begins with 0 or 1."""


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
