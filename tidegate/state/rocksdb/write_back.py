"""`WriteBack`: writes rows that are only in memory into the database, for all states with hot rows.

A batch writes nothing. Changes are written with the next snapshot (`changed`), during processing, or when they are
evicted. Rows are written in the order of the database.
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
from tidegate.storage.rocksdb.value_layout import RocksState
from tidegate.storage.state.snapshot import FrozenState

Write: TypeAlias = Callable[[pa.RecordBatch, Sequence[pa.Array] | None], None]
"""Writes rows of some keys; without values, removes them."""


class Hot(Protocol):
    """The rows in memory."""

    @property
    def rows(self) -> int:
        """How many there are."""
        ...

    @property
    def size_bytes(self) -> int:
        """About how much memory they take."""
        ...

    @property
    def unwritten(self) -> bool:
        """Whether anything has changed since the last snapshot."""
        ...

    def changed(self) -> Sequence[FrozenState]:
        """Rows that are to be written, and keys to be removed, as they are now. From now on they count as written."""
        ...

    def written(self) -> None:
        """What `changed` has given is in the database."""
        ...

    def make_room(self, size_bytes_max: int, write: Write) -> None:
        """Between batches, all snapshots being written: let rows go, if there are too many, and write them."""
        ...


class WriteBack(ABC):
    """A state with hot rows. What tells its rows apart are the first columns of what `hot` gives."""

    state: RocksState
    _session: RocksSession
    _cache_bytes: int

    @property
    @abstractmethod
    def hot(self) -> Hot:
        """Its rows in memory."""

    @abstractmethod
    def packed(self, columns: Sequence[pa.Array]) -> Strings:
        """Rows of value columns, as they lie in the database."""

    @property
    def _identity(self) -> pa.Schema:
        """The columns that tell rows apart."""
        return self._session.key_schema

    @property
    def _grouped_by(self) -> int | None:
        """How many of them choose the key group; None: all, but for a namespace."""
        return None

    def changed(self) -> Iterator[object]:
        """Freeze what is not in the database. The result writes it, a part with each item drawn. StorageError."""
        return self._writing(self.hot.changed())

    def write_all(self) -> None:
        """Write what is not in the database. StorageError."""
        self._session.settle()
        if self.hot.unwritten:
            for _ in self.changed():
                pass
        self.hot.written()

    def _make_room(self) -> None:
        size_bytes, unwritten = self.hot.size_bytes, self._session.unwritten
        # While a snapshot is being written the rows in it stay, and up to half as many come on top.
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
        """See to it that rows may be written."""
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
        """Rows as they lie in the database, given by what tells them apart and their values, if they have any."""
        session = self._session
        keys = encoded_keys(rows, session.max_parallelism, self.state.number, self._grouped_by, session.namespace)
        return keys, None if values is None else self.packed(values)
