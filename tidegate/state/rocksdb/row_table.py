"""`RocksRows`: a row table with a cold tier. `TieredRows` has the rows of some keys in columns.

Rules:
- For a key in memory, the rows in memory are authoritative from some sequence number on. The database may have older
  rows, and rows that were removed since. If that number is 0, the key is *whole*, and the database is not read. For a
  key that is not in memory, the database is authoritative.
- A key that is new in memory, and was not evicted before (`EvictedKeysFilter`), is whole at once.
- Rows of a key form a chain, by their sequence numbers. Rows read from the database come before all rows in memory.
- Changes are written when a snapshot is taken, or when their key is evicted. A key is evicted with all its rows. Keys
  that were not used again since the last eviction go first, the oldest first, and all keys without rows.
- In the database a row is an entry under its key and its sequence number.

A ref is a slot. A scan does not bring rows of the database into memory: their refs are negative, and refer to positions
in the list of rows that the batch has read (`ScannedRows`). Rules for this list:
- It keeps the database keys until the batch ends. It keeps values as well, up to a limit; beyond it they are fetched
  again when they are used.
- Rows are removed when the batch ends, and refs are valid until then.
- Values are read in pieces, and only the requested columns of each piece are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
import rocksdict
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.row_table import RowChains, RowSlots
from tidegate.state.common.backend import FoundRows
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.hash_table import extended
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.cold_store import ColdStore, TieredTable, Write
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.evicted_keys_filter import EvictedKeysFilter, KeyReader
from tidegate.state.rocksdb.keys import ordered_keys
from tidegate.storage.errors import CorruptionError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.rocksdb.database import reported
from tidegate.storage.state.rocksdb.value_layout import HEAD, RocksState
from tidegate.storage.state.snapshot import Cut, FrozenState
from tidegate.storage.state.stored_rows import ROW_SEQUENCE, SEQUENCE_FIELD

Numbers: TypeAlias = NDArray[np.int32]
"""Positions of keys in the key index of the rows in memory."""
Slots: TypeAlias = NDArray[np.int32]
Entries: TypeAlias = list[tuple[bytes, bytes]]
"""Keys and values of the database."""

_WHOLE = 0
_UNKNOWN = np.iinfo(np.int64).max
"""The sequence number from which on rows are in memory, for a key without rows in memory."""
_SLOT_BYTES = 1 + 4 + 4
"""Bytes per slot: a flag for having a row, the key, and the next row of the key."""
_KEY_BYTES = 4 + 4 + 8 + 1
"""Bytes per key: first and last row, the number from which on rows are in memory, a flag for being used again."""
_ROOM = 8
"""An eviction frees an eighth of the rows."""
_WRITTEN_ROWS = 65_536
_FILTER_SHARE = 16
"""The filter of evicted keys gets 1/16 of the cache. With rows of 100 bytes, it covers ten times the cached keys."""
_READ_KEYS = 4_096
"""Number of stored keys that are read into the filter after each batch, during a scan of the keys."""
_PIECE_ROWS = 8_192
"""Rows whose values are read at a time."""
_HELD_BYTES = 16 << 20
"""The most bytes of values that a batch keeps."""


class RocksRows:
    """A `RowTable` in RocksDB, with a cache of rows in memory. The session assigns the sequence numbers."""

    def __init__(self, session: RocksSession, state: RocksState, key_names: tuple[str, ...], cache_bytes: int) -> None:
        self.cold = ColdStore(session, state)
        self.hot = TieredRows(self.cold, key_names, cache_bytes)
        """The rows in memory."""
        self._key_names = key_names
        self._scanned = ScannedRows(self.cold)
        self._moved: dict[int, int] = {}
        """Position to slot, for rows that were brought into memory after a scan of this batch had read them."""
        self._reader = KeyReader(session, state.number)

    @property
    def rows(self) -> int:
        """Returns the estimated number of rows in the table."""
        return self.hot.rows

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Appends a row to the table for each key. Row i of `values` has its value columns."""
        self._fix()
        if keys.num_rows:
            session = self.cold.session
            first = session.position
            session.position = first + keys.num_rows
            numbers = pa.array(np.arange(first, first + keys.num_rows, dtype=np.int64))
            self.hot.append(self.hot.batch([*keys.columns, numbers, *values.columns]))

    def find(self, keys: pa.RecordBatch) -> FoundRows:
        """Returns references to all rows of these keys. Makes one seek in the database for each key that is not in
        memory. Raises StorageError or CorruptionError.
        """
        self._fix()
        numbers, first_rows = self.hot.upsert_keys(keys)
        if self.hot.evicted:
            cold = first_rows[self.hot.since(numbers[first_rows]) > 0]
            if len(cold):
                self._bring_in(gather(keys, cold), numbers[cold])
        return FoundRows(*self.hot.rows_of(numbers, first_rows))

    def take(self, refs: NDArray[Any], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Returns the rows with these references, in the order of `refs`. Raises StorageError or CorruptionError."""
        self._fix()
        wanted = [*self._key_names, *self.cold.state.values.names] if columns is None else columns
        stored = refs < 0
        if not stored.any():
            return self.hot.take(refs, wanted)
        if stored.all():
            return self._scanned.take(~refs, wanted)
        both = [self.hot.take(refs[~stored], wanted), self._scanned.take(~refs[stored], wanted)]
        places = np.empty(len(refs), dtype=np.int64)
        places[np.concatenate((np.flatnonzero(~stored), np.flatnonzero(stored)))] = np.arange(len(refs))
        return pa.concat_batches(both).take(pa.array(places))

    def scan(self, columns: Sequence[str], rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all rows with their references: first the rows that are only in the database, by key group, then the
        rows in memory.

        Raises StorageError or CorruptionError.
        """
        if not self.cold.session.has_keys:
            return
        self._fix()
        if self.hot.evicted:
            index, since = self.hot.cached_since()

            def only_stored(piece: Entries) -> Entries:
                identity = self.cold.identities([key for key, _ in piece])
                slots = index.upsert(identity.select(list(self._key_names))).slots
                here = slots < len(since)
                here[here] = identity.column(ROW_SEQUENCE).to_numpy()[here] >= since[slots[here]]
                return [piece[each] for each in np.flatnonzero(~here).tolist()] if here.any() else piece

            for rows, positions in self._scanned.scan(columns, rows_max, only_stored):
                yield rows, ~positions
        slots = self.hot.in_order()
        for start in range(0, len(slots), rows_max):
            some = slots[start : start + rows_max]
            some = some[self.hot.live(some)]
            if len(some):
                yield self.hot.take(some, columns), some

    def remove(self, refs: NDArray[Any]) -> None:
        """Removes the rows with these references. Rows that are only in the database are removed when the batch
        ends.
        """
        stored = refs < 0
        slots = refs[~stored]
        if stored.any():
            positions = ~refs[stored]
            moved = [self._moved[each] for each in positions.tolist() if each in self._moved]
            slots = np.concatenate((slots, np.array(moved, dtype=np.int64)))
            self._scanned.remove(positions)
        slots = distinct_integers(slots).astype(np.int32)
        if len(slots):
            self.hot.set_live(slots, np.zeros(len(slots), dtype=np.bool_))

    def done(self) -> None:
        """Ends the batch: applies removals, reads some keys into the filter, and evicts rows. Raises StorageError."""
        self._scanned.done()
        self._moved = {}
        self.hot.done()
        self._read_keys()
        self.hot.make_room()

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Writes rows under these database keys, before the first batch. Raises StorageError."""
        self.hot.evicted.all = True
        self.cold.put(keys, columns)

    def number_seen(self, identity: pa.RecordBatch) -> None:
        """Makes the sequence numbers of later rows greater than the numbers in `identity`. Called for loaded rows."""
        if identity.num_rows:
            last = int(identity.column(ROW_SEQUENCE).to_numpy().max())
            self.cold.session.position = max(self.cold.session.position, last + 1)

    def _fix(self) -> None:
        self.hot.fix_keys(pa.schema([*self.cold.session.key_schema, SEQUENCE_FIELD, *self.cold.state.values]))

    def _bring_in(self, keys: pa.RecordBatch, numbers: Numbers) -> None:
        """Reads the stored rows of distinct keys into memory. Raises StorageError or CorruptionError."""
        session = self.cold.session
        prefixes, order = ordered_keys(keys, session.max_parallelism, self.cold.state.number)
        with reported("read RocksDB", session.folder):
            found, values, ends = read_prefixes(session.database.iter(), prefixes)
        of = np.repeat(order, np.diff(ends, prepend=0))
        sequence = numbers_of(found)
        cold = sequence < self.hot.since(numbers)[of]
        if gone := self._scanned.gone:
            cold &= np.array([key not in gone for key in found], dtype=np.bool_)
        chosen = np.flatnonzero(cold)
        chosen = chosen[np.lexsort((sequence[chosen], of[chosen]))]
        of, sequence = of[chosen], sequence[chosen]
        columns = [column.take(pa.array(of)) for column in keys.columns]
        decoded = self.cold.columns([values[each] for each in chosen.tolist()])
        rows = self.hot.batch([*columns, pa.array(sequence), *decoded])
        slots = self.hot.bring_in(rows, numbers[of], numbers)
        if entries := self._scanned.entries:
            slot_of = {found[each]: slot for each, slot in zip(chosen.tolist(), slots.tolist(), strict=True)}
            self._moved |= {at: slot_of[key] for at, (key, _) in enumerate(entries) if key in slot_of}

    def _read_keys(self) -> None:
        """Reads some stored keys into the filter of evicted keys, if a scan should begin or is running. Raises
        StorageError.
        """
        evicted = self.hot.evicted
        if evicted.needs_keys:
            self._reader.begin()
            evicted.begin()
        if evicted.is_read:
            keys, ended = self._reader.read(_READ_KEYS)
            if keys:
                evicted.found(hash_columns(self.cold.identities(keys), self._key_names))
            if ended and evicted.is_read:
                evicted.end()


class TieredRows(RowSlots, TieredTable):
    """The rows of a row table that are cached in memory.

    They are in a separate key space, whose columns are the keys, the sequence number, and the values.
    """

    def __init__(self, cold: ColdStore, key_names: tuple[str, ...], cache_bytes: int) -> None:
        self.cold = cold
        self.cache_bytes = cache_bytes
        self.evicted = EvictedKeysFilter(cache_bytes // _FILTER_SHARE)
        """The keys of which the database may have rows that are not in memory."""
        self.evicted.all = not cold.session.is_empty
        self.ascends = True
        """True if the slots of each key's rows ascend in arrival order."""
        self._keyed_by = key_names
        self._keys = KeyIndex(key_names)
        self._chains = RowChains()
        self._since = np.zeros(0, dtype=np.int64)
        self._used_again = np.zeros(0, dtype=np.bool_)
        self._of_slot = np.zeros(0, dtype=np.int32)
        self._linked = True
        """False if slots were renumbered since the chains were built."""
        identity = (*key_names, ROW_SEQUENCE)
        names = (*identity, *cold.state.values.names)
        space = KeySpace(cold.session.max_parallelism, names, grouped_by=key_names, identity=identity)
        super().__init__(space, cold.state.name, identity, incremental=True)
        space.drop_index(self)

    def fix_keys(self, schema: pa.Schema) -> None:
        """Sets the columns: the keys, the sequence number, and the values."""
        if self._space.schema is None:
            self._space.fix(schema)

    def batch(self, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        """Returns a batch with these columns, which have the names of the row table."""
        return pa.RecordBatch.from_arrays(list(columns), schema=self._space.schema)

    def take(self, slots: NDArray[Any], columns: Sequence[str]) -> pa.RecordBatch:
        """Returns the columns `columns` of the rows in these slots."""
        return self._space.keys_of(slots.astype(np.int32, copy=False), columns)

    @property
    def size_bytes(self) -> int:
        """Returns the estimated memory in bytes of the rows and of the filter of evicted keys."""
        of_keys = self._keys.size * _KEY_BYTES + self._keys.size_bytes
        return self._space.slots * _SLOT_BYTES + of_keys + self._space.size_bytes + self.evicted.size_bytes

    def append(self, rows: pa.RecordBatch) -> None:
        """Adds new rows to the cache. Their sequence numbers must be greater than all earlier ones."""
        assert self.dirty is not None
        numbers, _ = self.upsert_keys(rows, int(rows.column(ROW_SEQUENCE)[0].as_py()))
        self.dirty.mark(self._place(rows, numbers))

    def upsert_keys(self, keys: pa.RecordBatch, since: int = _UNKNOWN) -> tuple[Numbers, NDArray[np.int32]]:
        """Returns the number of each key, and the index of the first row of each distinct key. Adds keys that are not
        in memory.

        If the filter shows that an added key may have been evicted, memory has only its rows with sequence numbers from
        `since` on. Otherwise memory has all rows of the key.
        """
        known = self._keys.size
        upserted = self._keys.upsert(keys)
        self._grow_keys(known)
        self._since[known : self._keys.size] = _WHOLE
        if self.evicted and len(upserted.new_rows):
            new = gather(keys.select(list(self._keyed_by)), upserted.new_rows)
            there = self.evicted.has(hash_columns(new, self._keyed_by))
            self._since[upserted.slots[upserted.new_rows[there]]] = since
        self._used_again[upserted.slots[upserted.slots < known]] = True
        return upserted.slots, upserted.first_rows

    def since(self, numbers: Numbers) -> NDArray[np.int64]:
        """Returns, for each key, the sequence number from which on its rows are in memory. 0 if all its rows are."""
        return self._since[numbers]

    def cached_since(self) -> tuple[KeyIndex, NDArray[np.int64]]:
        """Returns the keys that have rows in memory and, for each, the sequence number from which on its rows are in
        memory.
        """
        index, slots = KeyIndex(self._keyed_by), np.arange(self._space.slots, dtype=np.int32)
        upserted = index.upsert(self._space.keys_of(slots, self._keyed_by))
        return index, self._since[self._of_slot[upserted.first_rows]]

    def bring_in(self, rows: pa.RecordBatch, numbers: Numbers, whole: Numbers) -> Slots:
        """Adds rows from the database, sorted by key and sequence number, to the cache. Returns their slots.

        Afterwards, memory has all rows of the keys in `whole`.
        """
        self._relink()
        mixed = distinct_integers(numbers[self._since[numbers] != _UNKNOWN])
        positions, after = self._chains.find(mixed, np.arange(len(mixed), dtype=np.int32), self._live.pages)
        self._chains.clear(mixed)
        self.ascends = self.ascends and not len(after)
        slots = self._place(rows, numbers) if len(numbers) else after[:0]
        self._chains.add(mixed[positions], after)
        self._since[whole] = _WHOLE
        # These rows are in the database: if one is removed, the next snapshot must record that.
        self._in_snapshot_below = self._space.slots
        return slots

    def rows_of(self, numbers: Numbers, first_rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], Slots]:
        """Finds the rows of keys in memory. Returns, for each found row, the index of its key in `numbers`, and its
        slot.
        """
        self._relink()
        return self._chains.find(numbers, first_rows, self._live.pages)

    def in_order(self) -> Slots:
        """Returns the slots of all rows. The rows of each key are in arrival order."""
        slots = np.arange(self._space.slots, dtype=np.int32)
        slots = slots[self.live(slots)]
        return slots if self.ascends else self._by_number(slots)

    def freeze_changes(self) -> Sequence[FrozenState]:
        """Freezes the changed and the removed rows, for writing them to the database. They are then no longer marked as
        changed.

        No rows are gathered: the pages of a row table only hold flags, so copying one is cheap.
        """
        base = CheckpointId(self._snapshots)
        self._snapshots += 1
        return self.freeze(Cut(CheckpointId(self._snapshots), base))

    def evict(self, size_bytes_max: int, write: Write) -> None:
        """Evicts keys with their rows if the cache exceeds `size_bytes_max`. Changed rows are passed to `write`
        first.
        """
        size_bytes = self.size_bytes
        share = 1 - (size_bytes_max - size_bytes_max // _ROOM) / size_bytes if size_bytes else 0
        while self.size_bytes > size_bytes_max and self._keys.size:
            self._evict(share, write)
            share = min(1, 2 * share)  # the index shrinks in steps, so one eviction may not be enough
        self._used_again[:] = False

    def grow(self, slots: int) -> None:
        """Makes room for `slots` slots of the state."""
        self._chains.grow(0, slots)
        if slots > len(self._of_slot):
            self._of_slot = extended(self._of_slot, len(self._of_slot), max(slots, 2 * len(self._of_slot)))
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of the state: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        self._of_slot = self._of_slot[kept]
        self._linked = False
        super().rebuild(kept, slots)

    def _place(self, rows: pa.RecordBatch, numbers: Numbers) -> Slots:
        slots = self.put_behind(rows)
        self._of_slot[slots] = numbers
        if self._linked:
            self._chains.add(numbers, slots)
        return slots

    def _relink(self) -> None:
        """Rebuilds the chains of rows after slots were renumbered."""
        if not self._linked:
            slots = self.in_order()
            self._chains.clear()
            self._chains.add(self._of_slot[slots], slots)
            self._linked = True

    def _by_number(self, slots: Slots) -> Slots:
        return slots[np.argsort(self._space.keys_of(slots, (ROW_SEQUENCE,)).column(0).to_numpy(), kind="stable")]

    def _grow_keys(self, known: int) -> None:
        keys = self._keys.size
        self._chains.grow(keys, 0)
        if keys > len(self._since):
            length = max(keys, 2 * known)
            self._since = extended(self._since, known, length)
            self._used_again = extended(self._used_again, known, length)

    def _evict(self, share: float, write: Write) -> None:
        """Evicts keys that have about the fraction `share` of the rows in memory. Changed rows are passed to `write`
        first.
        """
        slots = np.arange(self._space.slots, dtype=np.int32)
        live = self.live(slots)
        leaving = self._coldest(slots[live], share)[self._of_slot[: len(slots)]]
        self._write(slots, live, leaving, write)
        self.evicted.add(hash_columns(self._space.keys_of(slots[live & leaving], self._keyed_by), self._keyed_by))
        self._rows = int((live & ~leaving).sum())
        self._space.keep(slots[live & ~leaving])
        self._number_anew()

    def _coldest(self, live: Slots, share: float) -> NDArray[np.bool_]:
        """Chooses keys to evict that have about the fraction `share` of the rows. Returns a flag for each key."""
        keys = self._keys.size
        rows = np.bincount(self._of_slot[live], minlength=keys)
        used_again = self._used_again[:keys]
        order = np.concatenate((np.flatnonzero(~used_again), np.flatnonzero(used_again)))
        before = np.cumsum(rows[order] + 1) - (rows[order] + 1)
        goes = np.zeros(keys, dtype=np.bool_)
        goes[order[before < share * (int(rows.sum()) + keys)]] = True
        return goes

    def _write(self, slots: Slots, live: NDArray[np.bool_], leaving: NDArray[np.bool_], write: Write) -> None:
        """Writes the changed rows among the rows to evict (`leaving`), and all removals of rows."""
        assert self.dirty is not None
        marked = self.dirty.marked(len(slots))
        for some, names in ((marked & live & leaving, None), (marked & ~live, self._identity)):
            chosen = slots[some]
            for start in range(0, len(chosen), _WRITTEN_ROWS):
                rows = self._space.keys_of(chosen[start : start + _WRITTEN_ROWS], names)
                identity = rows.select(list(self._identity))
                write(identity, rows.columns[len(self._identity) :] if names is None else None)

    def _number_anew(self) -> None:
        """Rebuilds the key index with only the keys that have rows, which get new numbers."""
        since, used_again, of_slot = self._since, self._used_again, self._of_slot
        self._keys = KeyIndex(self._keyed_by)
        slots = np.arange(self._space.slots, dtype=np.int32)
        upserted = self._keys.upsert(self._space.keys_of(slots, self._keyed_by))
        former = of_slot[upserted.first_rows]
        self._since, self._used_again = since[former], used_again[former]
        self._of_slot = extended(upserted.slots, len(slots), len(slots))
        self._chains = RowChains()
        self._chains.grow(self._keys.size, len(slots))


class ScannedRows:
    """The stored rows that scans of the current batch have read. The index of a row in this list is its reference."""

    def __init__(self, cold: ColdStore) -> None:
        self.entries: list[tuple[bytes, bytes | None]] = []
        """Database keys and values. A value beyond the limit is None."""
        self.gone: dict[bytes, None] = {}
        """The database keys of rows to remove when the batch ends."""
        self._cold = cold
        self._held_bytes = 0

    def take(self, positions: NDArray[np.int64], columns: Sequence[str]) -> pa.RecordBatch:
        """Returns the columns `columns` of the rows with these indices in the list, in this order. Raises StorageError
        or CorruptionError.
        """
        wanted = positions.tolist()
        pieces = [wanted[start : start + _PIECE_ROWS] for start in range(0, len(wanted), _PIECE_ROWS)]
        return _together([self._decoded([self.entries[each] for each in piece], columns) for piece in pieces or [[]]])

    def scan(
        self, columns: Sequence[str], rows_max: int, only: Callable[[Entries], Entries]
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """Yields stored rows as of the first batch, sorted by key group and sequence number, with their indices in the
        list.

        `only` selects the entries of a group of entries that the scan yields. The named columns of each key group are
        sorted in memory, because RocksDB sorts rows by key first. Raises StorageError or CorruptionError.
        """
        session = self._cold.session
        with reported("read RocksDB", session.folder):
            cursor = session.database.iter()
        parts: list[pa.RecordBatch] = []
        positions: list[NDArray[np.int64]] = []
        rows = 0
        for found, of_found in self._read_in_order(cursor, columns, only):
            parts.append(found)
            positions.append(of_found)
            rows += len(of_found)
            if rows >= rows_max:
                yield from _cut(parts, positions, rows_max)
                parts, positions, rows = [], [], 0
        if rows:
            yield from _cut(parts, positions, rows_max)

    def remove(self, positions: NDArray[np.int64]) -> None:
        """Removes the rows with these indices in the list when the batch ends."""
        self.gone |= dict.fromkeys(self.entries[each][0] for each in distinct_integers(positions).tolist())

    def done(self) -> None:
        """Ends the batch: applies removals to the database, and empties the list. Raises StorageError."""
        gone, self.gone = list(self.gone), {}
        if gone:
            self._cold.delete(gone)
            if self._cold.changes is not None:
                self._cold.changes.removed(gone)
        self.entries, self._held_bytes = [], 0

    def _pieces(
        self, cursor: rocksdict.RdictIter, prefix: bytes, only: Callable[[Entries], Entries]
    ) -> Iterator[Entries]:
        """Yields the database entries whose keys have this prefix, some at a time. Raises StorageError."""
        entries = read_prefix(cursor, prefix)
        while True:
            with reported("read RocksDB", self._cold.session.folder):
                piece = list(islice(entries, _PIECE_ROWS))
            if not piece:
                return
            yield only(piece)

    def _read_in_order(
        self, cursor: rocksdict.RdictIter, columns: Sequence[str], only: Callable[[Entries], Entries]
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """Yields some columns of rows with their indices in the list, for one large key group or several small ones at
        a time.
        """
        small: Entries = []
        for group in self._cold.session.key_groups:
            pieces = self._pieces(cursor, HEAD.pack(group, self._cold.state.number), only)
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

    def _group(self, pieces: Iterable[Entries], columns: Sequence[str]) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Returns some columns of the rows in `pieces` (lists of database entries), with their indices in the list of
        scanned rows.

        The rows of one key group are sorted together. Rows that the caller has removed since they were read are
        omitted.
        """
        first = len(self.entries)
        parts = []
        for piece in pieces:
            there = [entry for entry in piece if entry[0] not in self.gone] if self.gone else piece
            parts.append(self._decoded(there, columns))
            self._note(there)
        if len(parts) == 1:
            return parts[0], np.arange(first, len(self.entries))
        positions = first + np.argsort(numbers_of([key for key, _ in self.entries[first:]]), kind="stable")
        return _together(parts).take(pa.array(positions - first)), positions

    def _note(self, entries: Entries) -> None:
        """Adds rows to the list of scanned rows. Their values are stored in memory up to a limit."""
        for key, value in entries:
            self._held_bytes += len(value)
            self.entries.append((key, value if self._held_bytes <= _HELD_BYTES else None))

    def _values_of(self, entries: Sequence[tuple[bytes, bytes | None]]) -> list[bytes]:
        """Returns the values of database entries. Raises CorruptionError if a row is missing, and StorageError."""
        session = self._cold.session
        missing = [key for key, value in entries if value is None]
        fetched = dict(zip(missing, session.fetch(missing), strict=True)) if missing else {}
        values = [fetched[key] if value is None else value for key, value in entries]
        if any(value is None for value in values):
            raise CorruptionError(
                f"RocksDB in {session.folder} has lost a row of state {self._cold.state.name!r} between two reads of "
                "a batch; restore from a checkpoint"
            )
        return cast("list[bytes]", values)

    def _decoded(self, entries: Sequence[tuple[bytes, bytes | None]], columns: Sequence[str]) -> pa.RecordBatch:
        keys, values = self._cold.session.key_schema, self._cold.state.values
        found: dict[str, pa.Array] = {}
        if any(name in keys.names for name in columns):
            rows = self._cold.identities([key for key, _ in entries])
            found |= dict(zip(keys.names, rows.columns, strict=False))
        if any(name in values.names for name in columns):
            found |= dict(zip(values.names, self._cold.columns(self._values_of(entries)), strict=True))
        fields = [keys.field(name) if name in keys.names else values.field(name) for name in columns]
        return pa.RecordBatch.from_arrays([found[name] for name in columns], schema=pa.schema(fields))


def _together(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(list(parts))


def _cut(
    parts: Sequence[pa.RecordBatch], refs: Sequence[NDArray[np.int64]], rows_max: int
) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
    """Divides rows and their references into batches of up to `rows_max` rows."""
    rows, of_rows = _together(parts), np.concatenate(refs)
    for start in range(0, len(of_rows), rows_max):
        yield rows.slice(start, rows_max), of_rows[start : start + rows_max]


def numbers_of(keys: Sequence[bytes]) -> NDArray[np.int64]:
    """Returns the sequence numbers of rows, which are the last 8 bytes of their database keys."""
    return np.frombuffer(b"".join([key[-8:] for key in keys]), dtype="<i8").astype(np.int64)


def read_prefix(cursor: rocksdict.RdictIter, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields all database entries whose keys have this prefix."""
    cursor.seek(prefix)
    while cursor.valid() and (key := cursor.key()).startswith(prefix):
        yield key, cursor.value()
        cursor.next()
    cursor.status()


def read_prefixes(cursor: rocksdict.RdictIter, prefixes: Sequence[bytes]) -> tuple[list[bytes], list[bytes], list[int]]:
    """Reads all database entries whose keys have one of these prefixes.

    Returns their keys, their values, and for each prefix the index after its last entry.
    """
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
