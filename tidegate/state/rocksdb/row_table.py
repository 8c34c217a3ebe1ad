"""`RocksRows`: a row table in RocksDB. `CachedRows` has a write-back cache of rows by key in front of it.

In the database a row is an entry under its key and its sequence number. With a cache, a batch reads only rows of keys
that are not in memory, and writes none (`write_back.py`). Refs are slots of the cache. A scan does not add rows of the
database to the cache: their refs are negative, and stand for positions in the list of rows that the batch has read.
Rules for this list:

- It keeps the database keys until the batch ends. It keeps values as well, up to a limit; beyond it they are fetched
  again when they are used.
- Rows are removed when the batch ends, and refs are valid until then.
- Values are read in pieces, and only the requested columns of each piece are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import pyarrow as pa
import rocksdict
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.common.backend import FoundRows
from tidegate.state.kernels.columns import Strings
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.frozen_rows import RocksChanges
from tidegate.state.rocksdb.keys import database_keys, encoded_rows, ordered_keys, packed_rows
from tidegate.state.rocksdb.row_table_cache import EvictedKeysFilter, RowTableCache
from tidegate.state.rocksdb.write_back import WriteBack
from tidegate.storage.errors import CorruptionError
from tidegate.storage.state.rocksdb.database import reported
from tidegate.storage.state.rocksdb.keys import decode_rows
from tidegate.storage.state.rocksdb.value_layout import HEAD, RocksState, unpacked
from tidegate.storage.state.stored_rows import ROW_SEQUENCE, SEQUENCE_FIELD, row_identity

_FILTER_SHARE = 16
"""The filter of evicted keys gets 1/16 of the cache. With rows of 100 bytes, it covers ten times the cached keys."""
_READ_KEYS = 4_096
"""Number of stored keys that are read into the filter after each batch, during a scan of the keys."""
_ESTIMATE = "rocksdb.estimate-num-keys"
_PIECE_ROWS = 8_192
"""Rows whose values are read at a time."""
_HELD_BYTES = 16 << 20
"""The most bytes of values that a batch keeps."""


class RocksRows:
    """A `RowTable` whose rows are in RocksDB. The session assigns the sequence numbers."""

    def __init__(self, session: RocksSession, state: RocksState) -> None:
        self.state = state
        self.changes = RocksChanges(session, state) if session.keeps_changes else None
        """The added and removed rows, if a changelog needs them."""
        self._session = session
        self._found: list[tuple[bytes, bytes | None]] = []
        """The rows that this batch has read: database keys and values. A value beyond the limit is None."""
        self._held_bytes = 0
        self._gone: dict[bytes, None] = {}
        """The database keys of rows to remove when this batch ends."""

    @property
    def rows(self) -> int:
        """Returns an estimate of the number of keys of the whole database, over all states."""
        return self._session.database.property_int_value(_ESTIMATE) or 0

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Appends a row for each key. Raises StorageError."""
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
        """Returns all rows of these keys, with one seek per key. Raises StorageError or CorruptionError."""
        upserted = KeyIndex(tuple(keys.schema.names)).upsert(keys)
        distinct = gather(keys, upserted.first_rows)
        prefixes = database_keys(distinct, self._session.max_parallelism, self.state.number)
        runs: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * len(prefixes)
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            for position in sorted(range(len(prefixes)), key=prefixes.__getitem__):
                first = len(self._found)
                self._note(read_prefix(cursor, prefixes[position]))
                several = len(self._found) - first > 1
                runs[position] = self._in_order(first) if several else np.arange(first, len(self._found))
        of_slots = upserted.slots.tolist()
        number_of_rows = np.array([len(runs[slot]) for slot in of_slots], dtype=np.int64)
        refs = [runs[slot] for slot in of_slots]
        positions = np.repeat(np.arange(keys.num_rows, dtype=np.int64), number_of_rows)
        return FoundRows(positions, np.concatenate(refs) if refs else np.zeros(0, dtype=np.int64))

    def take(self, refs: NDArray[np.int64], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Returns the rows in the order of `refs`. Raises StorageError or CorruptionError."""
        wanted = refs.tolist()
        pieces = [wanted[start : start + _PIECE_ROWS] for start in range(0, len(wanted), _PIECE_ROWS)]
        return _together([self._decoded([self._found[ref] for ref in piece], columns) for piece in pieces or [[]]])

    def scan(self, columns: Sequence[str], rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """Yields all rows as of the first batch, by key group, then by number. Raises StorageError or CorruptionError.

        The named columns of each key group are sorted in memory, because RocksDB sorts numbers by their bytes.
        """
        if not self._session.has_keys:
            return
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
        parts: list[pa.RecordBatch] = []
        refs: list[NDArray[np.int64]] = []
        rows = 0
        for found, of_found in self._read_in_order(cursor, columns):
            parts.append(found)
            refs.append(of_found)
            rows += len(of_found)
            if rows >= rows_max:
                yield from _cut(parts, refs, rows_max)
                parts, refs, rows = [], [], 0
        if rows:
            yield from _cut(parts, refs, rows_max)

    def remove(self, refs: NDArray[np.int64]) -> None:
        """Removes rows. This happens when the batch ends."""
        self._gone |= dict.fromkeys(self._found[ref][0] for ref in np.unique(refs).tolist())

    def done(self) -> None:
        """Ends the batch: applies removals, and drops the rows that it has read. Raises StorageError."""
        gone, self._gone = list(self._gone), {}
        if gone:
            self.delete(gone)
            if self.changes is not None:
                self.changes.removed(gone)
        self._found, self._held_bytes = [], 0

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Writes the value columns of rows. Raises StorageError."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys, packed_rows(columns, self.state.values), strict=True):
            batch.put(key, row)
        self._session.write(batch)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Removes the rows under these database keys, if there are any. Raises StorageError."""
        self._session.remove(keys)

    def has(self, key: bytes) -> bool:
        """Returns True if there is a row under a database key. Raises StorageError."""
        return self._session.has(key)

    def database_keys(self, identity: pa.RecordBatch) -> list[bytes]:
        """Returns the database keys of rows, which are given by key and sequence number."""
        session = self._session
        return database_keys(identity, session.max_parallelism, self.state.number, len(session.key_schema))

    def number_seen(self, identity: pa.RecordBatch) -> None:
        """Makes later rows get greater sequence numbers than this one. Called for loaded rows."""
        if identity.num_rows:
            last = int(identity.column(ROW_SEQUENCE).to_numpy().max())
            self._session.position = max(self._session.position, last + 1)

    def _there(self, cursor: rocksdict.RdictIter, prefix: bytes) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yields the entries whose keys have this prefix, in pieces. Raises StorageError."""
        entries = read_prefix(cursor, prefix)
        while True:
            with reported("read RocksDB", self._session.folder):
                piece = list(islice(entries, _PIECE_ROWS))
            if not piece:
                return
            yield piece

    def _read_in_order(
        self, cursor: rocksdict.RdictIter, columns: Sequence[str]
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """Yields some columns of all rows with their refs, for several small key groups or one large one at a time."""
        small: list[tuple[bytes, bytes]] = []
        for group in self._session.key_groups:
            pieces = self._there(cursor, HEAD.pack(group, self.state.number))
            first, second = next(pieces, []), next(pieces, None)
            if small and (second is not None or len(small) + len(first) > _PIECE_ROWS):
                yield self._group([small], columns)
                small = []
            if second is not None:
                yield self._group(chain((first, second), pieces), columns)
            else:
                small += [first[each] for each in np.argsort(numbers_of([key for key, _ in first])).tolist()]
        if small:
            yield self._group([small], columns)

    def _group(
        self, pieces: Iterable[list[tuple[bytes, bytes]]], columns: Sequence[str]
    ) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Some columns of rows with their refs. Several pieces that belong to one key group are sorted together.

        Rows of a piece may have been removed since it was read, by the consumer of the rows before it.
        """
        first = len(self._found)
        parts = []
        for piece in pieces:
            there = [entry for entry in piece if entry[0] not in self._gone] if self._gone else piece
            parts.append(self._decoded(there, columns))
            self._note(there)
        if len(parts) == 1:
            return parts[0], np.arange(first, len(self._found))
        refs = self._in_order(first)
        return _together(parts).take(pa.array(refs - first)), refs

    def _note(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Gives refs to rows, except removed ones. Values are kept up to the limit."""
        found, gone, held_bytes = self._found, self._gone, self._held_bytes
        for key, value in entries:
            if not gone or key not in gone:
                held_bytes += len(value)
                found.append((key, value if held_bytes <= _HELD_BYTES else None))
        self._held_bytes = held_bytes

    def _in_order(self, first: int) -> NDArray[np.int64]:
        """Returns the refs from `first` on, sorted by sequence number."""
        numbers = numbers_of([key for key, _ in self._found[first:]])
        return first + np.argsort(numbers, kind="stable")

    def _values_of(self, entries: Sequence[tuple[bytes, bytes | None]]) -> list[bytes]:
        """Returns the values of rows. Raises CorruptionError if a row is missing, and StorageError."""
        missing = [key for key, value in entries if value is None]
        fetched = dict(zip(missing, self._session.fetch(missing), strict=True)) if missing else {}
        values = [fetched[key] if value is None else value for key, value in entries]
        if any(value is None for value in values):
            raise CorruptionError(
                f"RocksDB in {self._session.folder} has lost a row of state {self.state.name!r} between two reads of a "
                "batch; restore from a checkpoint"
            )
        return cast("list[bytes]", values)

    def _decoded(self, entries: Sequence[tuple[bytes, bytes | None]], columns: Sequence[str] | None) -> pa.RecordBatch:
        keys, values = self._session.key_schema, self.state.values
        wanted = [*keys.names, *values.names] if columns is None else list(columns)
        found: dict[str, pa.Array] = {}
        if any(name in keys.names for name in wanted):
            rows = decode_rows([key[HEAD.size :] for key, _ in entries], row_identity(keys))
            found |= dict(zip(keys.names, rows.columns, strict=False))
        if any(name in values.names for name in wanted):
            found |= dict(zip(values.names, unpacked(self._values_of(entries), values), strict=True))
        fields = [keys.field(name) if name in keys.names else values.field(name) for name in wanted]
        return pa.RecordBatch.from_arrays([found[name] for name in wanted], schema=pa.schema(fields))


class CachedRows(RocksRows, WriteBack):
    """A `RocksRows` with a cache of about `cache_bytes` between batches."""

    def __init__(self, session: RocksSession, state: RocksState, key_names: tuple[str, ...], cache_bytes: int) -> None:
        super().__init__(session, state)
        self._cache_bytes = cache_bytes
        self._key_names = key_names
        identity = (*key_names, ROW_SEQUENCE)
        names = (*identity, *state.values.names)
        self._space = KeySpace(session.max_parallelism, names, grouped_by=key_names, identity=identity)
        self._hot = RowTableCache(self._space, state.name, key_names, EvictedKeysFilter(cache_bytes // _FILTER_SHARE))
        self._reader = KeyReader(session, state.number)
        self._hot.evicted.all = not session.is_empty
        self._known: tuple[KeyIndex, NDArray[np.int64]] | None = None
        """The result of `cached_since` while a scan reads the database, else None."""
        self._moved: dict[int, int] = {}
        """Position to slot, for rows that were added to the cache after a scan of this batch had read them."""

    @property
    def hot(self) -> RowTableCache:
        """Returns the cache."""
        return self._hot

    @property
    def rows(self) -> int:
        """Returns an estimated number of rows: of the database, or of the cache if the cache has more."""
        return max(super().rows, self._hot.rows)

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Appends a row for each key."""
        self._fix()
        if keys.num_rows:
            first = self._session.position
            self._session.position = first + keys.num_rows
            numbers = pa.array(np.arange(first, first + keys.num_rows, dtype=np.int64))
            self._hot.append(self._batch([*keys.columns, numbers, *values.columns]))

    def find(self, keys: pa.RecordBatch) -> FoundRows:
        """Returns all rows of these keys, with one seek per key that is not cached.

        Raises StorageError or CorruptionError.
        """
        self._fix()
        numbers, first_rows = self._hot.upsert_keys(keys)
        if self._hot.evicted:
            cold = first_rows[self._hot.since(numbers[first_rows]) > 0]
            if len(cold):
                self._bring_in(gather(keys, cold), numbers[cold])
        return FoundRows(*self._hot.rows_of(numbers, first_rows))

    def take(self, refs: NDArray[Any], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Returns the rows in the order of `refs`. Raises StorageError or CorruptionError."""
        self._fix()
        stored = refs < 0
        if not stored.any():
            return self._taken(refs, columns)
        if stored.all():
            return super().take(~refs, columns)
        both = [self._taken(refs[~stored], columns), super().take(~refs[stored], columns)]
        places = np.empty(len(refs), dtype=np.int64)
        places[np.concatenate((np.flatnonzero(~stored), np.flatnonzero(stored)))] = np.arange(len(refs))
        return pa.concat_batches(both).take(pa.array(places))

    def scan(self, columns: Sequence[str], rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all rows: first the rows that are only in the database, by key group, then the cached ones.

        Raises StorageError or CorruptionError.
        """
        if not self._session.has_keys:
            return
        self._fix()
        if self._hot.evicted:
            self._known = self._hot.cached_since()
            yield from ((rows, ~refs) for rows, refs in super().scan(columns, rows_max))
            self._known = None
        slots = self._hot.in_order()
        for start in range(0, len(slots), rows_max):
            some = slots[start : start + rows_max]
            some = some[self._hot.live(some)]
            if len(some):
                yield self._taken(some, columns), some

    def remove(self, refs: NDArray[Any]) -> None:
        """Removes rows. Rows that are only in the database are removed when the batch ends."""
        stored = refs < 0
        slots = refs[~stored]
        if stored.any():
            positions = ~refs[stored]
            moved = [self._moved[each] for each in positions.tolist() if each in self._moved]
            slots = np.concatenate((slots, np.array(moved, dtype=np.int64)))
            super().remove(positions)
        slots = np.unique(slots).astype(np.int32)
        if len(slots):
            self._hot.set_live(slots, np.zeros(len(slots), dtype=np.bool_))

    def done(self) -> None:
        """Ends the batch: reads keys again whose rows moved, and cuts the cache to its size. Raises StorageError."""
        super().done()
        self._moved = {}
        self._hot.done()
        self._read_keys()
        self._make_room()

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Writes rows, before the first batch. Raises StorageError."""
        self._hot.evicted.all = True
        super().put(keys, columns)

    def packed(self, columns: Sequence[pa.Array]) -> Strings:
        """Returns the rows of value columns, in the encoding of the database."""
        return encoded_rows(columns, self.state.values)

    @property
    def _identity(self) -> pa.Schema:
        return row_identity(self._session.key_schema)

    @property
    def _grouped_by(self) -> int:
        return len(self._key_names)

    def _fix(self) -> None:
        if self._space.schema is None:
            self._space.fix(pa.schema([*self._session.key_schema, SEQUENCE_FIELD, *self.state.values]))

    def _batch(self, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(list(columns), schema=self._space.schema)

    def _taken(self, slots: NDArray[Any], columns: Sequence[str] | None) -> pa.RecordBatch:
        stored = (*self._key_names, *self.state.values.names)
        return self._space.keys_of(slots.astype(np.int32, copy=False), stored if columns is None else columns)

    def _bring_in(self, keys: pa.RecordBatch, numbers: NDArray[np.int32]) -> None:
        """Adds the stored rows of distinct keys to the cache. Raises StorageError or CorruptionError."""
        prefixes, order = ordered_keys(keys, self._session.max_parallelism, self.state.number)
        with reported("read RocksDB", self._session.folder):
            found, values, ends = read_prefixes(self._session.database.iter(), prefixes)
        of = np.repeat(order, np.diff(ends, prepend=0))
        sequence = numbers_of(found)
        cold = sequence < self._hot.since(numbers)[of]
        if self._gone:
            cold &= np.array([key not in self._gone for key in found], dtype=np.bool_)
        chosen = np.flatnonzero(cold)
        chosen = chosen[np.lexsort((sequence[chosen], of[chosen]))]
        of, sequence = of[chosen], sequence[chosen]
        columns = [column.take(pa.array(of)) for column in keys.columns]
        decoded = unpacked([values[each] for each in chosen.tolist()], self.state.values)
        slots = self._hot.bring_in(self._batch([*columns, pa.array(sequence), *decoded]), numbers[of], numbers)
        if self._found:
            slot_of = {found[each]: slot for each, slot in zip(chosen.tolist(), slots.tolist(), strict=True)}
            self._moved |= {at: slot_of[key] for at, (key, _) in enumerate(self._found) if key in slot_of}

    def _read_keys(self) -> None:
        """Reads some stored keys into the filter of evicted keys, if that is due. Raises StorageError."""
        evicted = self._hot.evicted
        if evicted.needs_keys:
            self._reader.begin()
            evicted.begin()
        if evicted.is_read:
            keys, ended = self._reader.read(_READ_KEYS)
            if keys:
                identity = decode_rows([key[HEAD.size :] for key in keys], self._identity)
                evicted.found(hash_columns(identity, self._key_names))
            if ended and evicted.is_read:
                evicted.end()

    def _there(self, cursor: rocksdict.RdictIter, prefix: bytes) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yields the entries with this prefix that are neither in the cache nor removed there."""
        assert self._known is not None, "only a scan reads so"
        index, since = self._known
        for piece in super()._there(cursor, prefix):
            identity = decode_rows([key[HEAD.size :] for key, _ in piece], self._identity)
            slots = index.upsert(identity.select(list(self._key_names))).slots
            here = slots < len(since)
            here[here] = identity.column(ROW_SEQUENCE).to_numpy()[here] >= since[slots[here]]
            if not here.all():
                yield [piece[each] for each in np.flatnonzero(~here).tolist()]


def _together(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(list(parts))


def _cut(
    parts: Sequence[pa.RecordBatch], refs: Sequence[NDArray[np.int64]], rows_max: int
) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
    """Cuts rows and their refs into batches of `rows_max`."""
    rows, of_rows = _together(parts), np.concatenate(refs)
    for start in range(0, len(of_rows), rows_max):
        yield rows.slice(start, rows_max), of_rows[start : start + rows_max]


def numbers_of(keys: Sequence[bytes]) -> NDArray[np.int64]:
    """Returns the sequence numbers of rows: the last 8 bytes of their keys."""
    return np.frombuffer(b"".join([key[-8:] for key in keys]), dtype="<i8").astype(np.int64)


def read_prefix(cursor: rocksdict.RdictIter, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields all entries whose keys have this prefix."""
    cursor.seek(prefix)
    while cursor.valid() and (key := cursor.key()).startswith(prefix):
        yield key, cursor.value()
        cursor.next()
    cursor.status()


def read_prefixes(cursor: rocksdict.RdictIter, prefixes: Sequence[bytes]) -> tuple[list[bytes], list[bytes], list[int]]:
    """Returns all keys that have one of these prefixes, their values, and the position where each prefix ends."""
    keys: list[bytes] = []
    values: list[bytes] = []
    ends: list[int] = []
    # Bound methods and no tuples, because this loop dominates the cost of a key that is not cached.
    seek, key_at, value_at, advance = cursor.seek, cursor.key, cursor.value, cursor.next
    for prefix in prefixes:
        seek(prefix)
        while (key := key_at()) is not None and key.startswith(prefix):
            keys.append(key)
            values.append(value_at())
            advance()
        ends.append(len(keys))
    cursor.status()
    return keys, values, ends


class KeyReader:
    """Reads the keys of a state, a few per call.

    A key that is added or removed between two calls may or may not be returned. All other keys are returned.
    """

    def __init__(self, session: RocksSession, number: int) -> None:
        self._session = session
        self._all = [HEAD.pack(group, number) for group in session.key_groups]
        self.begin()

    def begin(self) -> None:
        """Starts over from the first key."""
        self._start, self._prefixes = self._all[0], self._all

    def read(self, keys_max: int) -> tuple[list[bytes], bool]:
        """Returns up to `keys_max` next keys, and whether the end was reached.

        Raises StorageError or CorruptionError.
        """
        prefixes, keys, ended = self._prefixes, list[bytes](), False
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            cursor.seek(self._start)
            for _ in range(keys_max):
                if (key := cursor.key()) is not None and key.startswith(prefixes[0]):
                    keys.append(key)
                    cursor.next()
                elif len(prefixes) > 1:
                    prefixes = prefixes[1:]
                    cursor.seek(prefixes[0])
                else:
                    ended = True
                    break
            cursor.status()
        last = keys[-1] if keys and keys[-1].startswith(prefixes[0]) else None
        self._start, self._prefixes = prefixes[0] if last is None else last + b"\0", prefixes
        return keys, ended
