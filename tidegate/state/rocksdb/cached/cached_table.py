"""`CachedTable`: a vectorised state in RocksDB whose hot rows are in memory, in columns.

A batch reads from the database only rows that are not in memory, and writes none (`write_back.py`). What is loaded or
moved goes to the database at once, before the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.batch_column import BatchColumn
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.rocksdb.cached.hot_rows import HotRows
from tidegate.state.rocksdb.cached.write_back import WriteBack
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.keys import ordered_keys
from tidegate.state.rocksdb.vector_table import RocksTable
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.keys import decode_rows
from tidegate.storage.rocksdb.scan import CHUNK_BYTES, CHUNK_ROWS
from tidegate.storage.rocksdb.value_layout import HEAD, RocksState


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
