"""`ColdStore`: the rows of one state in RocksDB. `TieredTable`: a table in columns above it, with some of the rows.

Rules:
- A batch changes rows in memory. Rows that are not there are fetched first.
- Changed rows are written to the cold store with the next snapshot (`changed`), while processing continues, or when
  they are evicted. Rows are written in the key order of the database.
- Rows are evicted between batches, when they exceed the size of the cache. With a size of 0 no row stays in memory.
- If a changelog needs the changed keys (`ColdStore.changes`), they are recorded when their rows are written. A snapshot
  then writes all rows at once, because the keys belong to the moment of the freeze.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import rocksdict
from numpy.typing import NDArray

from tidegate.state.columnar.paged_state import FrozenSlots
from tidegate.state.columnar.vector_table import ColumnarTable
from tidegate.state.kernels.columns import NO_MASK, Strings
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.frozen_rows import RocksChanges
from tidegate.state.rocksdb.keys import encoded_keys, encoded_rows, order_of, strings_of
from tidegate.state.rocksdb.row_writer import RowWriter
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.rocksdb.database import reported
from tidegate.storage.state.rocksdb.keys import decode_rows
from tidegate.storage.state.rocksdb.scan import CHUNK_BYTES, CHUNK_ROWS
from tidegate.storage.state.rocksdb.value_layout import (
    HEAD,
    RocksForm,
    RocksState,
    TableLayout,
    VaryingLayout,
    table_layout,
)
from tidegate.storage.state.snapshot import Cut, FrozenState
from tidegate.storage.state.stored_rows import row_identity

Write: TypeAlias = Callable[[pa.RecordBatch, Sequence[pa.Array] | None], None]
"""Writes rows of some keys, or removes them if the values are None."""

_ESTIMATE = "rocksdb.estimate-num-keys"


class ColdStore:
    """The rows of a vectorised state or a row table that are stored in the RocksDB database of an operator."""

    def __init__(self, session: RocksSession, state: RocksState) -> None:
        self.session = session
        self.state = state
        self.changes = RocksChanges(session, state) if session.keeps_changes else None
        """The changed keys, if a changelog needs them."""
        self._has_sequence = state.form is RocksForm.ROWS
        self._layout = VaryingLayout(state.values) if self._has_sequence else table_layout(state.values)

    @property
    def rows(self) -> int:
        """Returns RocksDB's estimate of the number of keys in the whole database, over all states."""
        return self.session.database.property_int_value(_ESTIMATE) or 0

    @property
    def identity(self) -> pa.Schema:
        """Returns the columns that identify a row: the key columns and, in a row table, the sequence number."""
        keys = self.session.key_schema
        return row_identity(keys) if self._has_sequence else keys

    def fetch(self, keys: pa.RecordBatch) -> tuple[NDArray[np.int64], Sequence[pa.Array]]:
        """Reads the rows of these keys (at least one).

        Returns the indices in `keys` of the keys that have a row, and the value columns of their rows. Raises
        StorageError or CorruptionError.
        """
        encoded = self.encoded(keys)
        order = order_of(encoded)
        rows = self.session.fetch(strings_of(encoded, order))
        found = order[[row is not None for row in rows]]
        return found, self.columns([row for row in rows if row is not None])

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Writes rows immediately, given their keys and value columns. The rows are not marked as changed. Raises
        StorageError.
        """
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys, strings_of(self.packed(columns)), strict=True):
            batch.put(key, row)
        self.session.write(batch)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Removes the rows of these keys from the database, if there are any. Raises StorageError."""
        self.session.remove(keys)

    def has(self, key: bytes) -> bool:
        """Returns whether a key has a row in the database. Raises StorageError."""
        return self.session.has(key)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, list[pa.Array]]]:
        """Yields keys and value columns in key order. Each batch shows the database as of the moment when the batch is
        requested. Raises StorageError.

        A RocksDB iterator does not see later writes. Each batch uses a new iterator, so that a row that was changed and
        evicted during the scan does not appear with its old values.
        """
        session = self.session
        rows_max = min(rows_max, CHUNK_ROWS)
        groups = iter(session.key_groups)
        prefix = start = HEAD.pack(next(groups), self.state.number)
        more = True
        while more:
            keys: list[bytes] = []
            values: list[bytes] = []
            size_bytes = 0
            with reported("read RocksDB", session.folder):
                cursor = session.database.iter()
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
                yield self.identities(keys), self.columns(values)
                start = keys[-1] + b"\0"

    def writer(self, for_snapshot: bool) -> ColdWriter:
        """Returns a writer for many rows: as part of a pending snapshot (`for_snapshot`), or between batches."""
        return ColdWriter(self, for_snapshot)

    def database_keys(self, rows: pa.RecordBatch) -> list[bytes]:
        """Returns the database key of each row. `rows` has the columns that identify a row."""
        return strings_of(self.encoded(rows))

    def identities(self, keys: Sequence[bytes]) -> pa.RecordBatch:
        """Decodes database keys to the columns that identify a row."""
        return decode_rows([key[HEAD.size :] for key in keys], self.identity)

    def columns(self, values: Sequence[bytes]) -> list[pa.Array]:
        """Decodes rows in the encoding of the database to their value columns."""
        return self._layout.columns(values)

    def encoded(self, rows: pa.RecordBatch) -> Strings:
        """Returns the database keys of rows like `database_keys`, as byte strings in arrays."""
        session = self.session
        grouped_by = len(session.key_schema) if self._has_sequence else None
        namespace = session.namespace and not self._has_sequence
        return encoded_keys(rows, session.max_parallelism, self.state.number, grouped_by, namespace)

    def packed(self, columns: Sequence[pa.Array]) -> Strings:
        """Encodes the rows of value columns as in the database."""
        layout = self._layout
        if not isinstance(layout, TableLayout):
            return encoded_rows(columns, layout.schema)
        rows = layout.encoded(columns)
        return Strings(np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1], rows.reshape(-1), NO_MASK)


class ColdWriter:
    """Writes and removes many rows of one state. Each row occurs once.

    Records the changed keys if the changelog needs them.
    """

    def __init__(self, store: ColdStore, for_snapshot: bool) -> None:
        self._store = store
        self._puts, self._removals = (RowWriter(store.session, for_snapshot) for _ in range(2))

    def add(
        self,
        rows: pa.RecordBatch,
        values: Sequence[pa.Array] | None,
        first_group: int = 0,
        group_rows: Sequence[int] = (),
    ) -> None:
        """Adds rows to write, or to remove if `values` is None. They are written at the latest in `finish`. Raises
        StorageError.

        `rows` has the columns that identify them. `first_group` and `group_rows` are as in `RowWriter.add`.
        """
        keys, changes = self._store.encoded(rows), self._store.changes
        if changes is not None:
            (changes.removed if values is None else changes.put)(strings_of(keys))
        if values is None:
            self._removals.add(keys, None, first_group, group_rows)
        else:
            self._puts.add(keys, self._store.packed(values), first_group, group_rows)

    def finish(self) -> None:
        """Writes all rows that `add` has not written yet. Raises StorageError."""
        self._removals.finish()
        self._puts.finish()


class TieredTable(ColumnarTable):
    """A vectorised table in memory that caches rows of a RocksDB state (cold store).

    The first columns of its keys identify a row.
    """

    cold: ColdStore
    """The store of all other rows, and of the rows here as of the last snapshot."""
    cache_bytes: int
    """The size in bytes beyond which rows are evicted."""
    _snapshots = 0

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Returns the estimated size in bytes of the rows in memory."""

    @abstractmethod
    def evict(self, size_bytes_max: int, write: Write) -> None:
        """Evicts rows from memory if they exceed `size_bytes_max`. Changed rows are passed to `write` first.

        Called between batches, while no snapshot is being written.
        """

    @property
    def rows(self) -> int:
        """Returns an estimated number of rows: the number in the database, or in memory if that is greater."""
        return max(self.cold.rows, self._rows)

    @property
    def unwritten(self) -> bool:
        """Returns whether any row has changed since the last snapshot."""
        assert self.dirty is not None
        return self.dirty.changed_since(CheckpointId(self._snapshots), self._space.slots) > 0

    def freeze_changes(self) -> Sequence[FrozenState]:
        """Freezes the changed rows and the removed keys, for writing them to the database. They are then no longer
        marked as changed.
        """
        base = CheckpointId(self._snapshots)
        self._snapshots += 1
        frozen = self.freeze(Cut(CheckpointId(self._snapshots), base))
        return [state.now() if isinstance(state, FrozenSlots) else state for state in frozen]

    def changed(self, for_snapshot: bool = True) -> Iterator[object]:
        """Freezes the changes that are not in the database yet. Returns an iterator that writes a part of them at each
        step. Raises StorageError.
        """
        return self._writing(self.freeze_changes(), for_snapshot)

    def write_all(self, for_snapshot: bool = True) -> None:
        """Writes all changes that are only in memory to the database. Raises StorageError."""
        self.cold.session.settle()
        if self.unwritten:
            for _ in self.changed(for_snapshot):
                pass
        self._written()

    def make_room(self) -> None:
        """Evicts rows from memory if they exceed the size of the cache. Called between batches. Raises StorageError."""
        size_bytes, pending = self.size_bytes, self.cold.session.unwritten
        if size_bytes <= self.cache_bytes or self._space.is_read:
            return
        # While a snapshot is being written, its rows stay in memory, and the cache may grow by half.
        waits = pending is not None and not pending.done and not pending.overlaps
        if not waits or 2 * size_bytes > 3 * self.cache_bytes:
            self._settle()
            writer = self.cold.writer(for_snapshot=False)
            self.evict(self.cache_bytes, writer.add)
            writer.finish()

    def _settle(self) -> None:
        """Finishes the writes of the last snapshot, so that the task may write other rows."""
        pending = self.cold.session.unwritten
        if pending is not None and not pending.overlaps:
            self.cold.session.settle()
        self._written()

    def _written(self) -> None:
        """Records that the changes which `freeze_changes` returned are in the database."""
        assert self.dirty is not None
        self.dirty.drop(CheckpointId(self._snapshots))

    def _writing(self, states: Sequence[FrozenState], for_snapshot: bool) -> Iterator[object]:
        columns = len(self.cold.identity) if states else 0
        for state in states:
            writer = self.cold.writer(for_snapshot)
            for chunk in state.chunks():
                values = None if state.removed else chunk.rows.columns[columns:]
                writer.add(chunk.rows.select(range(columns)), values, chunk.first_group, chunk.group_rows)
                yield None
            writer.finish()
