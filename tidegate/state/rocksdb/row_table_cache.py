"""`RowTableCache`: a write-back cache of a row table's rows by key, as columns in front of RocksDB.

Rules:
- For a key in the cache, the cache is authoritative for all rows from some sequence number on. The database may have
  older rows, and rows that were removed since. If that number is 0, the key is *whole*, and the database is not read.
  For a key that is not in the cache, the database is authoritative.
- A key that is new in the cache, and was not evicted before (`EvictedKeysFilter`), is whole at once.
- Rows of a key form a chain, by their sequence numbers. Rows read from the database come before the cached rows.
- Changes are written when a snapshot is taken, or when their key is evicted. A key is evicted with all its rows. Keys
  that were not used again since the last eviction go first, the oldest first, and all keys without rows.

`EvictedKeysFilter` is a Bloom filter over the keys that have left memory, so that new keys are not looked up in the
database. Rules:
- It has no false negatives. A false positive costs a lookup, as it would without the filter. False positives become
  frequent once there are more keys than it has room for.
- After a backend was opened on files, or rows were loaded, their keys are unknown. Until they have been read, the
  filter is positive for all keys.
- When the filter is full, keys without rows are dropped: the owner of the database reads the stored keys into a new
  filter, a few at a time, which then replaces the old one. Keys that are evicted during the scan are added to both. If
  there are too many keys for the new filter, the old one stays.
- Before a scan begins, as many rows must have been evicted as the last scan has read. At most one row is therefore
  read per evicted row, however large the database is. Unsuccessful scans become rarer and rarer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.row_table import END, RowSlots, collect, link, prune_and_count
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.hash_table import extended
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.write_back import Write
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, FrozenState
from tidegate.storage.state.stored_rows import ROW_SEQUENCE

Numbers = NDArray[np.int32]
"""Positions of keys in the cache's key index."""
Slots = NDArray[np.int32]

_WHOLE = 0
_UNKNOWN = np.iinfo(np.int64).max
"""The sequence number from which on rows are cached, for a key without cached rows."""
_SLOT_BYTES = 1 + 4 + 4
"""Bytes per slot: a flag for having a row, the key, and the next row of the key."""
_KEY_BYTES = 4 + 4 + 8 + 1
"""Bytes per key: first and last row, the number from which on rows are cached, and a flag for being used again."""
_ROOM = 8
"""An eviction frees an eighth of the rows."""
_WRITTEN_ROWS = 65_536
_PROBES = 4
_BITS_MIN = 5
"""With fewer bits per key most positives are false, and reading keys into the filter is in vain."""
_WORD_BITS = 64
_ODD = np.uint64(0x9E3779B97F4A7C15)
Hashes = NDArray[np.uint64]


class RowTableCache(RowSlots):
    """The cached rows, in a separate key space whose columns are the keys, the sequence number, and the values."""

    def __init__(self, space: KeySpace, name: str, key_names: tuple[str, ...], evicted: EvictedKeysFilter) -> None:
        self.evicted = evicted
        """The keys of which the database may have rows that are not in the cache."""
        self.ascends = True
        """True if the slots of each key's rows ascend in arrival order."""
        self._keyed_by = key_names
        self._keys = KeyIndex(key_names)
        self._heads = self._tails = np.zeros(0, dtype=np.int32)
        self._since = np.zeros(0, dtype=np.int64)
        self._used_again = np.zeros(0, dtype=np.bool_)
        self._nexts = self._of_slot = np.zeros(0, dtype=np.int32)
        self._linked = True
        """False if slots were renumbered since the chains were built."""
        self._snapshots = 0
        super().__init__(space, name, (*key_names, ROW_SEQUENCE), incremental=True)
        space.drop_index(self)

    @property
    def size_bytes(self) -> int:
        """Returns the estimated memory of the rows and the filter, in bytes."""
        of_keys = self._keys.size * _KEY_BYTES + self._keys.size_bytes
        return self._space.slots * _SLOT_BYTES + of_keys + self._space.size_bytes + self.evicted.size_bytes

    @property
    def unwritten(self) -> bool:
        """Returns True if anything has changed since the last snapshot."""
        assert self.dirty is not None
        return self.dirty.changed_since(CheckpointId(self._snapshots), self._space.slots) > 0

    def append(self, rows: pa.RecordBatch) -> None:
        """Appends new rows, whose sequence numbers are greater than all before."""
        assert self.dirty is not None
        numbers, _ = self.upsert_keys(rows, int(rows.column(ROW_SEQUENCE)[0].as_py()))
        self.dirty.mark(self._place(rows, numbers))

    def upsert_keys(self, keys: pa.RecordBatch, since: int = _UNKNOWN) -> tuple[Numbers, NDArray[np.int32]]:
        """Returns the numbers of keys, and the first row of each. Keys that are not in the cache are added.

        If the filter is positive for such a key, its rows are cached from `since` on; else it is whole.
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
        """For each key, the sequence number from which on its rows are cached; 0 if it is whole."""
        return self._since[numbers]

    def cached_since(self) -> tuple[KeyIndex, NDArray[np.int64]]:
        """The keys that have rows in the cache, and for each the sequence number from which on they are cached."""
        index, slots = KeyIndex(self._keyed_by), np.arange(self._space.slots, dtype=np.int32)
        upserted = index.upsert(self._space.keys_of(slots, self._keyed_by))
        return index, self._since[self._of_slot[upserted.first_rows]]

    def bring_in(self, rows: pa.RecordBatch, numbers: Numbers, whole: Numbers) -> Slots:
        """Adds rows of the database, sorted by key and then by number. Returns their slots.

        The keys in `whole` have all their rows in the cache afterwards.
        """
        self._relink()
        mixed = np.unique(numbers[self._since[numbers] != _UNKNOWN])
        positions, after = self._chained(mixed, np.arange(len(mixed), dtype=np.int32))
        self._heads[mixed] = END
        self.ascends = self.ascends and not len(after)
        slots = self._place(rows, numbers) if len(numbers) else after[:0]
        link(self._heads, self._tails, self._nexts, mixed[positions], after)
        self._since[whole] = _WHOLE
        # These rows are in the database: if one is removed, the next snapshot must record that.
        self._in_snapshot_below = self._space.slots
        return slots

    def rows_of(self, numbers: Numbers, first_rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], Slots]:
        """Returns the cached rows of keys: the position of the key in `numbers`, and the slot of each row."""
        self._relink()
        return self._chained(numbers, first_rows)

    def in_order(self) -> Slots:
        """Returns the slots of all rows. The rows of each key are in arrival order."""
        slots = np.arange(self._space.slots, dtype=np.int32)
        slots = slots[self.live(slots)]
        return slots if self.ascends else self._by_number(slots)

    def changed(self) -> Sequence[FrozenState]:
        """Freezes the rows to write and to remove. From now on they count as written.

        No rows are gathered: the pages of a row table only hold flags, so copying one is cheap.
        """
        base = CheckpointId(self._snapshots)
        self._snapshots += 1
        return self.freeze(Cut(CheckpointId(self._snapshots), base))

    def written(self) -> None:
        """Called when the result of `changed` is in the database."""
        assert self.dirty is not None
        self.dirty.drop(CheckpointId(self._snapshots))

    def make_room(self, size_bytes_max: int, write: Write) -> None:
        """Between batches, with no snapshot being written: evict keys if they exceed the limit, and write the rows."""
        size_bytes = self.size_bytes
        share = 1 - (size_bytes_max - size_bytes_max // _ROOM) / size_bytes if size_bytes else 0
        while self.size_bytes > size_bytes_max and self._keys.size:
            self._evict(share, write)
            share = min(1, 2 * share)  # the index shrinks in steps, so one eviction may not be enough
        self._used_again[:] = False

    def grow(self, slots: int) -> None:
        """Grows to this many slots."""
        if slots > len(self._nexts):
            length = max(slots, 2 * len(self._nexts))
            self._nexts = extended(self._nexts, len(self._nexts), length)
            self._of_slot = extended(self._of_slot, len(self._of_slot), length)
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers slots: slot `kept[i]` becomes slot i."""
        self._of_slot = self._of_slot[kept]
        self._nexts = np.zeros(len(kept), dtype=np.int32)
        self._linked = False
        super().rebuild(kept, slots)

    def _place(self, rows: pa.RecordBatch, numbers: Numbers) -> Slots:
        slots = self.put_behind(rows)
        self._of_slot[slots] = numbers
        if self._linked:
            link(self._heads, self._tails, self._nexts, numbers, slots)
        return slots

    def _chained(self, numbers: Numbers, first_rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], Slots]:
        counts = np.zeros(len(numbers), dtype=np.int64)
        pages = self._live.pages
        total = prune_and_count(self._heads, self._tails, self._nexts, pages, numbers, first_rows, counts)
        positions, slots = np.empty(int(total), dtype=np.int64), np.empty(int(total), dtype=np.int32)
        collect(self._heads, self._nexts, numbers, positions, slots)
        return positions, slots

    def _relink(self) -> None:
        """Builds the chains again, if slots were renumbered."""
        if not self._linked:
            slots = self.in_order()
            self._heads[:] = END
            link(self._heads, self._tails, self._nexts, self._of_slot[slots], slots)
            self._linked = True

    def _by_number(self, slots: Slots) -> Slots:
        return slots[np.argsort(self._space.keys_of(slots, (ROW_SEQUENCE,)).column(0).to_numpy(), kind="stable")]

    def _grow_keys(self, known: int) -> None:
        keys = self._keys.size
        if keys > len(self._heads):
            length = max(keys, 2 * known)
            self._heads, self._tails = (extended(each, known, length) for each in (self._heads, self._tails))
            self._since, self._used_again = (
                extended(self._since, known, length),
                extended(self._used_again, known, length),
            )
        self._heads[known:keys] = END

    def _evict(self, share: float, write: Write) -> None:
        """Evicts keys that hold about `share` of the rows."""
        slots = np.arange(self._space.slots, dtype=np.int32)
        live = self.live(slots)
        leaving = self._coldest(slots[live], share)[self._of_slot[: len(slots)]]
        self._write(slots, live, leaving, write)
        self.evicted.add(hash_columns(self._space.keys_of(slots[live & leaving], self._keyed_by), self._keyed_by))
        self._rows = int((live & ~leaving).sum())
        self._space.keep(slots[live & ~leaving])
        self._number_anew()

    def _coldest(self, live: Slots, share: float) -> NDArray[np.bool_]:
        """Chooses keys to evict that hold about `share` of the rows. Returns a flag for each key."""
        keys = self._keys.size
        rows = np.bincount(self._of_slot[live], minlength=keys)
        asked = self._used_again[:keys]
        order = np.concatenate((np.flatnonzero(~asked), np.flatnonzero(asked)))
        before = np.cumsum(rows[order] + 1) - (rows[order] + 1)
        goes = np.zeros(keys, dtype=np.bool_)
        goes[order[before < share * (int(rows.sum()) + keys)]] = True
        return goes

    def _write(self, slots: Slots, live: NDArray[np.bool_], leaving: NDArray[np.bool_], write: Write) -> None:
        """Writes the changed rows among the leaving ones, and all removals."""
        assert self.dirty is not None
        marked = self.dirty.marked(len(slots))
        for some, names in ((marked & live & leaving, None), (marked & ~live, self._identity)):
            chosen = slots[some]
            for start in range(0, len(chosen), _WRITTEN_ROWS):
                rows = self._space.keys_of(chosen[start : start + _WRITTEN_ROWS], names)
                identity = rows.select(list(self._identity))
                write(identity, rows.columns[len(self._identity) :] if names is None else None)

    def _number_anew(self) -> None:
        """Builds the key index again, with only the keys that have rows."""
        since, asked, of_slot = self._since, self._used_again, self._of_slot
        self._keys = KeyIndex(self._keyed_by)
        slots = np.arange(self._space.slots, dtype=np.int32)
        upserted = self._keys.upsert(self._space.keys_of(slots, self._keyed_by))
        former = of_slot[upserted.first_rows]
        self._since, self._used_again = since[former], asked[former]
        self._of_slot = extended(upserted.slots, len(slots), len(slots))
        self._heads = np.full(self._keys.size, END, dtype=np.int32)
        self._tails = self._heads.copy()


class EvictedKeysFilter:
    """A Bloom filter of evicted keys by their hashes. It takes at most `size_bytes_max`, and twice that during a scan.

    It allocates memory with the first evicted key.
    """

    def __init__(self, size_bytes_max: int) -> None:
        self.all = False
        """True if any key may have rows in the database."""
        self._words_max = max(1, size_bytes_max // 8)
        self._known = _Filter(self._words_max)
        self._read: _Filter | None = None
        """The new filter during a scan."""
        self._left = 0
        """How many rows were evicted since the last scan began."""
        self._pause = 0
        """How many rows must be evicted before the next scan begins."""
        self._seen = 0
        """How many rows this scan, or the last one, has read."""

    def __bool__(self) -> bool:
        """Returns True if any key may be evicted."""
        return self.all or self._known.size_bytes > 0

    @property
    def is_crowded(self) -> bool:
        """Returns True if more keys were added than the filter has room for."""
        return self._known.is_crowded

    @property
    def is_read(self) -> bool:
        """True during a scan."""
        return self._read is not None

    @property
    def needs_keys(self) -> bool:
        """Returns True if a scan of the stored keys is due."""
        return self._read is None and (self.all or self.is_crowded) and self._left >= self._pause

    @property
    def size_bytes(self) -> int:
        """Memory in bytes, including the new filter during a scan."""
        return self._known.size_bytes + (0 if self._read is None else self._read.size_bytes)

    def add(self, hashes: Hashes) -> None:
        """Adds keys whose rows were evicted. A key may be given once per row."""
        self._left += len(hashes)
        self._known.add(hashes)
        if self._read is not None:
            self._read.add(hashes)

    def begin(self) -> None:
        """Begins a scan of the stored keys."""
        self._read = _Filter(self._words_max)
        self._left = self._seen = 0

    def found(self, hashes: Hashes) -> None:
        """Adds keys that the scan has found. Ends the scan if there are too many."""
        assert self._read is not None, "no scan is under way"
        self._seen += len(hashes)
        self._read.add(hashes)
        if self._read.is_crowded:
            self._read = None
            self._pause = max(2 * self._pause, self._seen)

    def end(self) -> None:
        """Ends a complete scan: the new filter replaces the old one."""
        assert self._read is not None, "no scan is under way"
        self._known, self._read = self._read, None
        self.all = False
        self._pause = self._seen

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Returns for each of these keys whether it may be evicted."""
        return np.full(len(hashes), True) if self.all else self._known.has(hashes)


class _Filter:
    """A Bloom filter of up to `words_max` words, which are allocated with the first key."""

    def __init__(self, words_max: int) -> None:
        self._keys = 0
        self._words_max = words_max
        self._words: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    @property
    def is_crowded(self) -> bool:
        return self._keys * _BITS_MIN > self._words_max * _WORD_BITS

    @property
    def size_bytes(self) -> int:
        return self._words.nbytes

    def add(self, hashes: Hashes) -> None:
        if len(hashes):
            new = np.unique(hashes)
            new = new[~self.has(new)]
            self._keys += len(new)
            if not len(self._words):
                self._words = np.zeros(1 << (self._words_max.bit_length() - 1), dtype=np.uint64)
            for word, bit in self._probes(new):
                np.bitwise_or.at(self._words, word, bit)

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        if not len(self._words):
            return np.zeros(len(hashes), dtype=np.bool_)
        found = np.ones(len(hashes), dtype=np.bool_)
        for word, bit in self._probes(hashes):
            found &= self._words[word] & bit != 0
        return found

    def _probes(self, hashes: Hashes) -> list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        """Returns the bits of each key, one array pair per probe: the word, and the bit in it."""
        mask = np.uint64(len(self._words) * _WORD_BITS - 1)
        # The lower bits chose the subtask, so they are similar for all its keys. The product spreads the higher bits.
        mixed = hashes * _ODD
        first, step = mixed >> np.uint64(24), (mixed >> np.uint64(40)) | np.uint64(1)
        bits = [(first + np.uint64(probe) * step) & mask for probe in range(_PROBES)]
        return [(each >> np.uint64(6), np.uint64(1) << (each & np.uint64(63))) for each in bits]
