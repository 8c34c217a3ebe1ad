"""`CachedTable`: a vectorised state in RocksDB whose hot rows are in memory, in columns.

A batch reads from the database only rows that are not in memory, and writes none: the rows that have changed are
written with the next snapshot (`changed`), beside processing, or when they make room for others. What is loaded or
moved goes to the database at once, before the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.key_index.entries import Upserted
from tidegate.actors.state_backends.columnar.key_space import KeySpace
from tidegate.actors.state_backends.common.backend import ValueSpec
from tidegate.actors.state_backends.common.batch_column import BatchColumn
from tidegate.actors.state_backends.rocksdb.cached.hot_rows import HotRows
from tidegate.actors.state_backends.rocksdb.database_session import RocksSession
from tidegate.actors.state_backends.rocksdb.keys import ordered_keys
from tidegate.actors.state_backends.rocksdb.vector_table import RocksTable
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.keys import decode_rows
from tidegate.storage.rocksdb.scan import CHUNK_BYTES, CHUNK_ROWS
from tidegate.storage.rocksdb.value_layout import HEAD, RocksState
from tidegate.storage.state.snapshot import FrozenState

_WRITTEN_ROWS = 8_192
"""Rows that are written with one call. They become Python values, so many at a time."""


class CachedTable(RocksTable):
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
        self.hot = self._hot_rows(specs)

    @property
    def rows(self) -> int:
        """An estimate: of what the database has, or of what is in memory, if that is more."""
        return max(super().rows, self.hot.rows)

    def upsert(self, keys: pa.RecordBatch) -> Upserted:
        """Begin a batch: fetch those of its rows that are not in memory."""
        self._space.fix(self._session.key_schema)
        return self.hot.upsert(keys)

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
            self.hot.make_room(self._cache_bytes, self._write_rows)

    def _hot_rows(self, specs: Sequence[ValueSpec]) -> HotRows:
        return HotRows(self._space, self.state.name, specs, self._fetched)

    def _settle(self) -> None:
        """See to it that rows may be written."""
        self._session.settle()
        self.hot.written()

    def _fetched(self, keys: pa.RecordBatch) -> tuple[NDArray[np.int64], Sequence[pa.Array]]:
        session = self._session
        if session.is_empty:
            return np.zeros(0, dtype=np.int64), [pa.nulls(0, spec.data_type) for spec in self.specs]
        stored, order = ordered_keys(keys, session.max_parallelism, self.state.number, session.namespace)
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

    def _writing(self, states: Sequence[FrozenState]) -> Iterator[object]:
        keys = len(self._session.key_schema) if states else 0
        for state in states:
            for chunk in state.chunks():
                rows, values = chunk.rows, None if state.removed else chunk.rows.columns[keys:]
                yield from self._in_parts(rows.select(range(keys)), values)

    def _write_rows(self, keys: pa.RecordBatch, values: Sequence[pa.Array] | None) -> None:
        for _ in self._in_parts(keys, values):
            pass

    def _in_parts(self, keys: pa.RecordBatch, values: Sequence[pa.Array] | None) -> Iterator[object]:
        """Write rows, or remove them, in the order of the database."""
        session = self._session
        stored, order = ordered_keys(keys, session.max_parallelism, self.state.number, session.namespace)
        rows = pa.array(order)
        packed = None if values is None else self.packed([column.take(rows) for column in values])
        for start in range(0, len(stored), _WRITTEN_ROWS):
            part = slice(start, start + _WRITTEN_ROWS)
            session.apply(stored[part], None if packed is None else packed[part])
            yield None
