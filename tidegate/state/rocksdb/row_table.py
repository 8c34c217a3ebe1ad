"""`RocksRows`: a row table in RocksDB the rows of whose hot keys are in memory, in columns.

In the database a row is an entry under its key and its number. A batch reads only rows of keys that are not in memory,
and writes none (`write_back.py`). Refs are slots in memory. A scan does not bring rows of the database into memory:
their refs are negative, and stand for positions in what the batch has read. Rules for these:

- The database keys of what a batch scans stay in memory until it ends. Values stay as well, up to a limit; beyond it
  they are fetched again when they are used.
- Rows are removed when the batch ends; until then a ref is valid.
- Values are read in pieces, and of each piece only the requested columns are decoded.
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
from tidegate.state.rocksdb.hot_keys import EvictedKeysFilter, HotKeys
from tidegate.state.rocksdb.keys import database_keys, encoded_rows, ordered_keys, packed_rows
from tidegate.state.rocksdb.write_back import WriteBack
from tidegate.storage.errors import CorruptionError
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.keys import decode_rows
from tidegate.storage.rocksdb.value_layout import HEAD, RocksState, unpacked
from tidegate.storage.state.stored_rows import ROW_SEQUENCE, SEQUENCE_FIELD, row_identity

_LEFT = 16
"""A sixteenth of the memory says which keys have left it: enough for ten times as many as it has, of some 100 bytes."""
_READ_KEYS = 4_096
"""So many keys are read after each batch while it is not known which the database has."""
_ESTIMATE = "rocksdb.estimate-num-keys"
_PIECE_ROWS = 8_192
"""Rows whose values are read at a time."""
_HELD_BYTES = 16 << 20
"""How many bytes of values a batch holds at most."""


class RocksRows:
    """A `RowTable` whose rows are in RocksDB. The numbers of rows are positions of the session."""

    def __init__(self, session: RocksSession, state: RocksState) -> None:
        self.state = state
        self.changes = RocksChanges(session, state) if session.keeps_changes else None
        """The rows that came and went, if a changelog wants them."""
        self._session = session
        self._found: list[tuple[bytes, bytes | None]] = []
        """What this batch has found: database keys, and values; None: not held."""
        self._held_bytes = 0
        self._gone: dict[bytes, None] = {}
        """The database keys of rows that go when this batch ends."""

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
        """Rows in the order of `refs`. StorageError, CorruptionError."""
        wanted = refs.tolist()
        pieces = [wanted[start : start + _PIECE_ROWS] for start in range(0, len(wanted), _PIECE_ROWS)]
        return _together([self._decoded([self._found[ref] for ref in piece], columns) for piece in pieces or [[]]])

    def scan(self, columns: Sequence[str], rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """All rows that were there at the beginning, by key group, then by number. StorageError, CorruptionError.

        These columns of a key group are put in order as a whole, because RocksDB sorts numbers by their bytes.
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
        """Remove rows, when the batch ends."""
        self._gone |= dict.fromkeys(self._found[ref][0] for ref in np.unique(refs).tolist())

    def done(self) -> None:
        """End the batch: remove what goes, and let go of what it has found. StorageError."""
        gone, self._gone = list(self._gone), {}
        if gone:
            self.delete(gone)
            if self.changes is not None:
                self.changes.removed(gone)
        self._found, self._held_bytes = [], 0

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

    def _there(self, cursor: rocksdict.RdictIter, prefix: bytes) -> Iterator[list[tuple[bytes, bytes]]]:
        """The entries whose keys begin so, in pieces. StorageError."""
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
        """Some columns of all rows with their refs: of several small key groups, or of a large one."""
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
        """Some columns of what is read, with its refs. Several pieces are of one key group: they are put in order.

        A piece may have been read before rows of it were removed, by who was given the rows in front of it.
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
        """Give refs to rows, but to those that go. Values are held up to the limit, and none behind it."""
        found, gone, held_bytes = self._found, self._gone, self._held_bytes
        for key, value in entries:
            if not gone or key not in gone:
                held_bytes += len(value)
                found.append((key, value if held_bytes <= _HELD_BYTES else None))
        self._held_bytes = held_bytes

    def _in_order(self, first: int) -> NDArray[np.int64]:
        """The refs of what was found since, by number."""
        numbers = numbers_of([key for key, _ in self._found[first:]])
        return first + np.argsort(numbers, kind="stable")

    def _values_of(self, entries: Sequence[tuple[bytes, bytes | None]]) -> list[bytes]:
        """The values of rows. CorruptionError for one that is not there, StorageError."""
        missing = [key for key, value in entries if value is None]
        fetched = dict(zip(missing, self._session.fetch(missing), strict=True)) if missing else {}
        values = [fetched[key] if value is None else value for key, value in entries]
        if any(value is None for value in values):
            raise CorruptionError(f"{self._session.folder}: a row of {self.state.name!r} was read, and is gone")
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
    """A `RowTable`. Of its rows, about `cache_bytes` are in memory between batches."""

    def __init__(self, session: RocksSession, state: RocksState, key_names: tuple[str, ...], cache_bytes: int) -> None:
        super().__init__(session, state)
        self._cache_bytes = cache_bytes
        self._key_names = key_names
        identity = (*key_names, ROW_SEQUENCE)
        names = (*identity, *state.values.names)
        self._space = KeySpace(session.max_parallelism, names, grouped_by=key_names, identity=identity)
        self._hot = HotKeys(self._space, state.name, key_names, EvictedKeysFilter(cache_bytes // _LEFT))
        self._reader = KeyReader(session, state.number)
        self._hot.left.all = not session.is_empty
        self._known: tuple[KeyIndex, NDArray[np.int64]] | None = None
        """While a scan reads the database: the keys in memory, and from which number on the rows of each are there."""
        self._moved: dict[int, int] = {}
        """Of rows that a scan of this batch has read, and that came into memory later: position to slot."""

    @property
    def hot(self) -> HotKeys:
        """The rows in memory."""
        return self._hot

    @property
    def rows(self) -> int:
        """An estimate: of what the database has, or of what is in memory, if that is more."""
        return max(super().rows, self._hot.rows)

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Append a row for each key."""
        self._fix()
        if keys.num_rows:
            first = self._session.position
            self._session.position = first + keys.num_rows
            numbers = pa.array(np.arange(first, first + keys.num_rows, dtype=np.int64))
            self._hot.append(self._batch([*keys.columns, numbers, *values.columns]))

    def find(self, keys: pa.RecordBatch) -> FoundRows:
        """All rows of these keys, with one seek for each key that is not in memory. StorageError, CorruptionError."""
        self._fix()
        numbers, first_rows = self._hot.ask(keys)
        if self._hot.left:
            cold = first_rows[self._hot.since(numbers[first_rows]) > 0]
            if len(cold):
                self._bring_in(gather(keys, cold), numbers[cold])
        return FoundRows(*self._hot.rows_of(numbers, first_rows))

    def take(self, refs: NDArray[Any], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Rows in the order of `refs`. StorageError, CorruptionError."""
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
        """All rows: first what the database alone has, by key group, then what is in memory.

        StorageError, CorruptionError.
        """
        if not self._session.has_keys:
            return
        self._fix()
        if self._hot.left:
            self._known = self._hot.known()
            yield from ((rows, ~refs) for rows, refs in super().scan(columns, rows_max))
            self._known = None
        slots = self._hot.in_order()
        for start in range(0, len(slots), rows_max):
            some = slots[start : start + rows_max]
            some = some[self._hot.live(some)]
            if len(some):
                yield self._taken(some, columns), some

    def remove(self, refs: NDArray[Any]) -> None:
        """Remove rows: of those that the database alone has, when the batch ends."""
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
        """End the batch. StorageError."""
        super().done()
        self._moved = {}
        self._hot.done()
        self._read_keys()
        self._make_room()

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Write rows, before the first batch. StorageError."""
        self._hot.left.all = True
        super().put(keys, columns)

    def packed(self, columns: Sequence[pa.Array]) -> Strings:
        """Rows of value columns, as they lie in the database."""
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
        """Bring in the rows of distinct keys that are not in memory. StorageError, CorruptionError."""
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
        """Read some of the keys that the database has, if it is not known which there are. StorageError."""
        left = self._hot.left
        if left.wants_keys:
            self._reader.begin()
            left.begin()
        if left.is_read:
            keys, ended = self._reader.read(_READ_KEYS)
            if keys:
                identity = decode_rows([key[HEAD.size :] for key in keys], self._identity)
                left.found(hash_columns(identity, self._key_names))
            if ended and left.is_read:
                left.end()

    def _there(self, cursor: rocksdict.RdictIter, prefix: bytes) -> Iterator[list[tuple[bytes, bytes]]]:
        """Of the entries whose keys begin so those that are not in memory, and were not removed there."""
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
    """Rows and their refs in batches of so many."""
    rows, of_rows = _together(parts), np.concatenate(refs)
    for start in range(0, len(of_rows), rows_max):
        yield rows.slice(start, rows_max), of_rows[start : start + rows_max]


def numbers_of(keys: Sequence[bytes]) -> NDArray[np.int64]:
    """The numbers of rows: the last words of their keys."""
    return np.frombuffer(b"".join([key[-8:] for key in keys]), dtype="<i8").astype(np.int64)


def read_prefix(cursor: rocksdict.RdictIter, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All entries whose keys begin so."""
    cursor.seek(prefix)
    while cursor.valid() and (key := cursor.key()).startswith(prefix):
        yield key, cursor.value()
        cursor.next()
    cursor.status()


def read_prefixes(cursor: rocksdict.RdictIter, prefixes: Sequence[bytes]) -> tuple[list[bytes], list[bytes], list[int]]:
    """All keys that begin with one of some prefixes, their values, and where those of each prefix end."""
    keys: list[bytes] = []
    values: list[bytes] = []
    ends: list[int] = []
    # Bound methods and lists without tuples: this is what a key that is not in memory costs.
    seek, key_at, value_at, go_on = cursor.seek, cursor.key, cursor.value, cursor.next
    for prefix in prefixes:
        seek(prefix)
        while (key := key_at()) is not None and key.startswith(prefix):
            keys.append(key)
            values.append(value_at())
            go_on()
        ends.append(len(keys))
    cursor.status()
    return keys, values, ends


class KeyReader:
    """Of what comes or goes between two calls it may give keys or not; all others it gives."""

    def __init__(self, session: RocksSession, number: int) -> None:
        self._session = session
        self._all = [HEAD.pack(group, number) for group in session.key_groups]
        self.begin()

    def begin(self) -> None:
        """From the first one again."""
        self._start, self._prefixes = self._all[0], self._all

    def read(self, keys_max: int) -> tuple[list[bytes], bool]:
        """The next keys, at most so many, and whether there are no more. StorageError, CorruptionError."""
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
