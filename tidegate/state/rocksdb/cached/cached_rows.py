"""`CachedRows`: a row table in RocksDB the rows of whose hot keys are in memory, in columns.

A batch reads from the database only rows of keys that are not in memory, and writes none (`write_back.py`). Refs are
slots in memory. A scan does not bring into memory what the database alone has: refs of such rows are negative, and
stand for positions in what the batch has read (`RocksRows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import rocksdict
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.common.row_table import FoundRows
from tidegate.state.kernels.columns import Strings
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.cached.hot_keys import HotKeys
from tidegate.state.rocksdb.cached.key_reader import KeyReader
from tidegate.state.rocksdb.cached.left_keys import LeftKeys
from tidegate.state.rocksdb.cached.write_back import WriteBack
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.keys import encoded_rows, ordered_keys
from tidegate.state.rocksdb.row_table import RocksRows, numbers_of, read_prefixes
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.keys import decode_rows
from tidegate.storage.rocksdb.row_values import unpacked
from tidegate.storage.rocksdb.value_layout import HEAD, RocksState
from tidegate.storage.state.stored_rows import ROW_SEQUENCE, SEQUENCE_FIELD, row_identity

_LEFT = 16
"""A sixteenth of the memory says which keys have left it: enough for ten times as many as it has, of some 100 bytes."""
_READ_KEYS = 4_096
"""So many keys are read after each batch while it is not known which the database has."""


class CachedRows(RocksRows, WriteBack):
    """A `RowTable`. Of its rows, about `cache_bytes` are in memory between batches."""

    def __init__(self, session: RocksSession, state: RocksState, key_names: tuple[str, ...], cache_bytes: int) -> None:
        super().__init__(session, state)
        self._cache_bytes = cache_bytes
        self._key_names = key_names
        identity = (*key_names, ROW_SEQUENCE)
        names = (*identity, *state.values.names)
        self._space = KeySpace(session.max_parallelism, names, grouped_by=key_names, identity=identity)
        self._hot = HotKeys(self._space, state.name, key_names, LeftKeys(cache_bytes // _LEFT))
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
