"""`RocksRows`: a row table in RocksDB: an entry for each row, under its key and its number.

Rules: rows are written, and removed, with one call a batch. What a batch finds or scans stays in memory until it ends,
as bytes; a ref is its position there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import rocksdict
from numpy.typing import NDArray

from tidegate.actors.kernels.key_index.key_index import KeyIndex
from tidegate.actors.kernels.partition import gather
from tidegate.actors.state_backends.common.row_table import FoundRows
from tidegate.actors.state_backends.rocksdb.changes import RocksChanges
from tidegate.actors.state_backends.rocksdb.database_session import RocksSession
from tidegate.actors.state_backends.rocksdb.keys import database_keys, packed_rows
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.keys import decode_rows
from tidegate.storage.rocksdb.row_values import unpacked
from tidegate.storage.rocksdb.value_layout import HEAD, RocksState
from tidegate.storage.state.stored_rows import ROW_SEQUENCE, row_identity

_ESTIMATE = "rocksdb.estimate-num-keys"


class RocksRows:
    """A `RowTable` whose rows are in RocksDB. The numbers of rows are positions of the session."""

    def __init__(self, session: RocksSession, state: RocksState) -> None:
        self.state = state
        self.changes = RocksChanges(session, state) if session.keeps_changes else None
        """The rows that came and went, if a changelog wants them."""
        self._session = session
        self._found: list[tuple[bytes, bytes]] = []
        """What this batch has found: database keys and values."""

    @property
    def rows(self) -> int:
        """An estimate of how many keys the whole database has, all states together."""
        return self._session.database.property_int_value(_ESTIMATE) or 0

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Append a row for each key. StorageError."""
        first = self._session.position
        self._session.position = first + keys.num_rows
        numbers = pa.array(np.arange(first, first + keys.num_rows, dtype=np.int64))
        schema = row_identity(self._session.key_schema)
        identity = pa.RecordBatch.from_arrays([*keys.columns, numbers], schema=schema)
        entries = self.database_keys(identity)
        self.put(entries, values.columns)
        if self.changes is not None:
            self.changes.put(entries)

    def find(self, keys: pa.RecordBatch) -> FoundRows:
        """All rows of these keys, with one seek for each key. StorageError, CorruptionError."""
        upserted = KeyIndex(tuple(keys.schema.names)).upsert(keys)
        distinct = gather(keys, upserted.first_rows)
        prefixes = database_keys(distinct, self._session.max_parallelism, self.state.number)
        runs: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * len(prefixes)
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            for position in sorted(range(len(prefixes)), key=prefixes.__getitem__):
                start = len(self._found)
                self._found += sorted(_read(cursor, prefixes[position]), key=_number_of)
                runs[position] = np.arange(start, len(self._found))
        of_slots = upserted.slots.tolist()
        number_of_rows = np.array([len(runs[slot]) for slot in of_slots], dtype=np.int64)
        refs = [runs[slot] for slot in of_slots]
        positions = np.repeat(np.arange(keys.num_rows, dtype=np.int64), number_of_rows)
        return FoundRows(positions, np.concatenate(refs) if refs else np.zeros(0, dtype=np.int64))

    def take(self, refs: NDArray[np.int64], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Rows in the order of `refs`. CorruptionError."""
        entries = [self._found[ref] for ref in refs.tolist()]
        return self._decoded(entries, columns)

    def scan(self, columns: Sequence[str], rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """All rows that were there at the beginning, by key group, then by number. StorageError, CorruptionError.

        A key group is read as a whole, because RocksDB sorts numbers by their bytes. What is scanned stays in memory
        until the batch ends anyway.
        """
        if not self._session.has_keys:
            return
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
        entries: list[tuple[bytes, bytes]] = []
        for group in self._session.key_groups:
            prefix = HEAD.pack(group, self.state.number)
            with reported("read RocksDB", self._session.folder):
                entries += sorted(_read(cursor, prefix), key=_number_of)
            whole = len(entries) - len(entries) % rows_max
            for start in range(0, whole, rows_max):
                yield self._handed(entries[start : start + rows_max], columns)
            del entries[:whole]
        if entries:
            yield self._handed(entries, columns)

    def remove(self, refs: NDArray[np.int64]) -> None:
        """Remove rows. StorageError."""
        keys = [self._found[ref][0] for ref in np.unique(refs).tolist()]
        self.delete(keys)
        if self.changes is not None:
            self.changes.removed(keys)

    def done(self) -> None:
        """End the batch: let go of what it has found."""
        self._found = []

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Write rows: their value columns. StorageError."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys, packed_rows(columns, self.state.values), strict=True):
            batch.put(key, row)
        self._session.write(batch)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove what is stored under these database keys, if anything. StorageError."""
        self._session.remove(keys)

    def has(self, key: bytes) -> bool:
        """Whether there is a row under a database key. StorageError."""
        return self._session.has(key)

    def database_keys(self, identity: pa.RecordBatch) -> list[bytes]:
        """The database keys of rows, given by key and number."""
        session = self._session
        return database_keys(identity, session.max_parallelism, self.state.number, len(session.key_schema))

    def number_seen(self, identity: pa.RecordBatch) -> None:
        """Rows with these numbers are there: later ones get greater numbers."""
        if identity.num_rows:
            last = int(identity.column(ROW_SEQUENCE).to_numpy().max())
            self._session.position = max(self._session.position, last + 1)

    def _handed(
        self, entries: list[tuple[bytes, bytes]], columns: Sequence[str]
    ) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        start = len(self._found)
        self._found += entries
        return self._decoded(entries, columns), np.arange(start, len(self._found))

    def _decoded(self, entries: Sequence[tuple[bytes, bytes]], columns: Sequence[str] | None) -> pa.RecordBatch:
        keys, values = self._session.key_schema, self.state.values
        wanted = [*keys.names, *values.names] if columns is None else list(columns)
        found: dict[str, pa.Array] = {}
        if any(name in keys.names for name in wanted):
            rows = decode_rows([key[HEAD.size :] for key, _ in entries], row_identity(keys))
            found |= dict(zip(keys.names, rows.columns, strict=False))
        if any(name in values.names for name in wanted):
            found |= dict(zip(values.names, unpacked([value for _, value in entries], values), strict=True))
        fields = [keys.field(name) if name in keys.names else values.field(name) for name in wanted]
        return pa.RecordBatch.from_arrays([found[name] for name in wanted], schema=pa.schema(fields))


def _number_of(entry: tuple[bytes, bytes]) -> int:
    """The number of a row: the last word of its key."""
    return int.from_bytes(entry[0][-8:], "little")


def _read(cursor: rocksdict.RdictIter, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All entries whose keys begin so."""
    cursor.seek(prefix)
    while cursor.valid() and (key := cursor.key()).startswith(prefix):
        yield key, cursor.value()
        cursor.next()
    cursor.status()
