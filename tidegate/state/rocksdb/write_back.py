"""`WriteBack`: writes cached rows into the database, for all states with a write-back cache.

A batch writes nothing. Changes are written with the next snapshot (`changed`) while processing continues, or when they
are evicted. Rows are written in the key order of the database.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import pyarrow as pa

from tidegate.state.kernels.columns import Strings
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.keys import encoded_keys
from tidegate.state.rocksdb.row_writer import RowWriter
from tidegate.storage.state.rocksdb.value_layout import RocksState
from tidegate.storage.state.snapshot import FrozenState

Write: TypeAlias = Callable[[pa.RecordBatch, Sequence[pa.Array] | None], None]
"""Writes rows of some keys, or removes them if the values are None."""


class WriteBackCache(Protocol):
    """The cache of one state: its rows in memory."""

    @property
    def rows(self) -> int:
        """Returns the number of rows in memory."""
        ...

    @property
    def size_bytes(self) -> int:
        """Returns the estimated memory of the rows, in bytes."""
        ...

    @property
    def unwritten(self) -> bool:
        """Returns True if anything has changed since the last snapshot."""
        ...

    def changed(self) -> Sequence[FrozenState]:
        """Freezes the rows to write, and the keys to remove. From now on they count as written."""
        ...

    def written(self) -> None:
        """Called when the result of `changed` is in the database."""
        ...

    def make_room(self, size_bytes_max: int, write: Write) -> None:
        """Between batches, with no snapshot being written: evict rows if they exceed the limit, and write them."""
        ...


class WriteBack(ABC):
    """A state with a write-back cache. The first columns of the cached rows identify a row."""

    state: RocksState
    _session: RocksSession
    _cache_bytes: int

    @property
    @abstractmethod
    def hot(self) -> WriteBackCache:
        """Returns the cache of the state."""

    @abstractmethod
    def packed(self, columns: Sequence[pa.Array]) -> Strings:
        """Returns the rows of value columns, in the encoding of the database."""

    @property
    def _identity(self) -> pa.Schema:
        """Returns the columns that identify a row."""
        return self._session.key_schema

    @property
    def _grouped_by(self) -> int | None:
        """Returns how many of the identity columns choose the key group; None for all except a namespace."""
        return None

    def changed(self) -> Iterator[object]:
        """Freezes the changes that are not in the database.

        Each item drawn writes a part of them. Raises StorageError.
        """
        return self._writing(self.hot.changed())

    def write_all(self) -> None:
        """Writes all changes that are not in the database. Raises StorageError."""
        self._session.settle()
        if self.hot.unwritten:
            for _ in self.changed():
                pass
        self.hot.written()

    def _make_room(self) -> None:
        size_bytes, unwritten = self.hot.size_bytes, self._session.unwritten
        # While a snapshot is being written, its rows stay in memory, and the cache may grow by half.
        if size_bytes <= self._cache_bytes:
            return
        if unwritten is None or unwritten.done or 2 * size_bytes > 3 * self._cache_bytes:
            self._settle()
            puts, removals = (RowWriter(self._session, for_snapshot=False) for _ in range(2))
            self.hot.make_room(
                self._cache_bytes,
                lambda rows, values: (removals if values is None else puts).add(*self._encoded(rows, values)),
            )
            removals.finish()
            puts.finish()

    def _settle(self) -> None:
        """Finishes the writes of the last snapshot, so that other rows may be written."""
        self._session.settle()
        self.hot.written()

    def _writing(self, states: Sequence[FrozenState]) -> Iterator[object]:
        columns = len(self._identity) if states else 0
        for state in states:
            writer = RowWriter(self._session, for_snapshot=True)
            for chunk in state.chunks():
                rows, values = chunk.rows, None if state.removed else chunk.rows.columns[columns:]
                encoded = self._encoded(rows.select(range(columns)), values)
                writer.add(*encoded, chunk.first_group, chunk.group_rows)
                yield None
            writer.finish()

    def _encoded(self, rows: pa.RecordBatch, values: Sequence[pa.Array] | None) -> tuple[Strings, Strings | None]:
        """Returns database keys and values. `rows` has the columns that identify them; `values` None removes."""
        session = self._session
        keys = encoded_keys(rows, session.max_parallelism, self.state.number, self._grouped_by, session.namespace)
        return keys, None if values is None else self.packed(values)
