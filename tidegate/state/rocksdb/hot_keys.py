"""`HotKeys`: the rows of hot keys of a row table, as columns in front of RocksDB (a write-back cache).

Rules:
- All rows of a key that is known here, from some number on, are as they are here, also if there are none; the database
  may have older rows, and rows that are gone. If that number is 0, the key is *whole* and the database is not read. A
  key that is not known is as the database has it.
- A key that is new here, and was not evicted before (`EvictedKeysFilter`), is whole at once.
- Rows of a key form a chain, by their numbers. Rows read from the database come before the rows that are here.
- Changes are written when a snapshot is taken, or when their key is evicted. A key is evicted as a whole: keys that
  were not used again since the last eviction, the oldest first, and all keys without rows.

`EvictedKeysFilter` is a Bloom filter over the keys that have left memory, so that new keys are not looked up in the
database. Rules:
- It never answers no for an evicted key. It answers yes for a few others, and for more once there are more keys than it
  has room for: each of them costs a lookup, as it would without the filter.
- The keys of files that a backend was opened on, and of loaded rows, are unknown at first. Until they have been read,
  the filter answers yes for all keys.
- When it is full, keys whose rows are gone are dropped: the owner of the database reads its keys into a new filter, a
  few at a time, which then replaces the old one. Keys that are evicted meanwhile are added to both. If there are too
  many for the new filter, the old one stays.
- Before a reading begins, as many rows must have been evicted as the last one has read. For each evicted row at most
  one row is then read, however large the database is. Readings in vain become rarer and rarer.
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
"""Keys by their numbers here."""
Slots = NDArray[np.int32]

_WHOLE = 0
_UNKNOWN = np.iinfo(np.int64).max
"""Rows of a key are here from this number on: none."""
_SLOT_BYTES = 1 + 4 + 4
"""Of each slot whether it has a row, its key, and the next row of the key."""
_KEY_BYTES = 4 + 4 + 8 + 1
"""Of each key its first and last row, from which number on it is here, and whether it was asked for again."""
_ROOM = 8
"""Room is made for an eighth of the rows."""
_WRITTEN_ROWS = 65_536
_PROBES = 4
_BITS_MIN = 5
"""With fewer bits a key most answers are wrong, and to read keys for it is in vain."""
_WORD_BITS = 64
_ODD = np.uint64(0x9E3779B97F4A7C15)
Hashes = NDArray[np.uint64]


class HotKeys(RowSlots):
    """Rows in a space of their own, whose columns are those of the keys, the number, and the values."""

    def __init__(self, space: KeySpace, name: str, key_names: tuple[str, ...], left: EvictedKeysFilter) -> None:
        self.left = left
        """The keys of which the database may have rows that are not here."""
        self.ascends = True
        """Whether the slots of each key's rows ascend as the rows came."""
        self._keyed_by = key_names
        self._keys = KeyIndex(key_names)
        self._heads = self._tails = np.zeros(0, dtype=np.int32)
        self._since = np.zeros(0, dtype=np.int64)
        self._asked_again = np.zeros(0, dtype=np.bool_)
        self._nexts = self._of_slot = np.zeros(0, dtype=np.int32)
        self._linked = True
        """Whether the chains are there; slots with other numbers need new ones."""
        self._snapshots = 0
        super().__init__(space, name, (*key_names, ROW_SEQUENCE), incremental=True)
        space.drop_index(self)

    @property
    def size_bytes(self) -> int:
        """About how much memory the rows take."""
        of_keys = self._keys.size * _KEY_BYTES + self._keys.size_bytes
        return self._space.slots * _SLOT_BYTES + of_keys + self._space.size_bytes + self.left.size_bytes

    @property
    def unwritten(self) -> bool:
        """Whether anything has changed since the last snapshot."""
        assert self.dirty is not None
        return self.dirty.changed_since(CheckpointId(self._snapshots), self._space.slots) > 0

    def append(self, rows: pa.RecordBatch) -> None:
        """New rows, whose numbers are greater than all before."""
        assert self.dirty is not None
        numbers, _ = self.ask(rows, int(rows.column(ROW_SEQUENCE)[0].as_py()))
        self.dirty.mark(self._place(rows, numbers))

    def ask(self, keys: pa.RecordBatch, since: int = _UNKNOWN) -> tuple[Numbers, NDArray[np.int32]]:
        """The numbers of keys, and the row where each first comes. New ones are here since then, or are whole."""
        known = self._keys.size
        upserted = self._keys.upsert(keys)
        self._grow_keys(known)
        self._since[known : self._keys.size] = _WHOLE
        if self.left and len(upserted.new_rows):
            new = gather(keys.select(list(self._keyed_by)), upserted.new_rows)
            there = self.left.has(hash_columns(new, self._keyed_by))
            self._since[upserted.slots[upserted.new_rows[there]]] = since
        self._asked_again[upserted.slots[upserted.slots < known]] = True
        return upserted.slots, upserted.first_rows

    def since(self, numbers: Numbers) -> NDArray[np.int64]:
        """From which number on the rows of some keys are here; 0 if they are whole."""
        return self._since[numbers]

    def known(self) -> tuple[KeyIndex, NDArray[np.int64]]:
        """The keys in memory that the database may know, and from which number on the rows of each are here."""
        index, slots = KeyIndex(self._keyed_by), np.arange(self._space.slots, dtype=np.int32)
        upserted = index.upsert(self._space.keys_of(slots, self._keyed_by))
        return index, self._since[self._of_slot[upserted.first_rows]]

    def bring_in(self, rows: pa.RecordBatch, numbers: Numbers, whole: Numbers) -> Slots:
        """Rows of the database, by key and then by number, of keys that are whole then. Their slots."""
        self._relink()
        mixed = np.unique(numbers[self._since[numbers] != _UNKNOWN])
        positions, after = self._chained(mixed, np.arange(len(mixed), dtype=np.int32))
        self._heads[mixed] = END
        self.ascends = self.ascends and not len(after)
        slots = self._place(rows, numbers) if len(numbers) else after[:0]
        link(self._heads, self._tails, self._nexts, mixed[positions], after)
        self._since[whole] = _WHOLE
        # The database knows them: if one of them is removed, a snapshot must say so.
        self._told_below = self._space.slots
        return slots

    def rows_of(self, numbers: Numbers, first_rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], Slots]:
        """The rows of keys, by the position of the key."""
        self._relink()
        return self._chained(numbers, first_rows)

    def in_order(self) -> Slots:
        """The slots of all rows, those of each key in the order in which they came."""
        slots = np.arange(self._space.slots, dtype=np.int32)
        slots = slots[self.live(slots)]
        return slots if self.ascends else self._by_number(slots)

    def changed(self) -> Sequence[FrozenState]:
        """Rows that are to be written, and those to be removed, as they are now. From now on they count as written.

        Nothing is gathered here: pages of a row table hold flags alone, so a copy of one is cheap.
        """
        base = CheckpointId(self._snapshots)
        self._snapshots += 1
        return self.freeze(Cut(CheckpointId(self._snapshots), base))

    def written(self) -> None:
        """What `changed` has given is in the database."""
        assert self.dirty is not None
        self.dirty.drop(CheckpointId(self._snapshots))

    def make_room(self, size_bytes_max: int, write: Write) -> None:
        """Between batches, all snapshots being written: let keys go, if there are too many, and write their rows."""
        size_bytes = self.size_bytes
        share = 1 - (size_bytes_max - size_bytes_max // _ROOM) / size_bytes if size_bytes else 0
        while self.size_bytes > size_bytes_max and self._keys.size:
            self._let_go(share, write)
            share = min(1, 2 * share)  # an index does not shrink with each key
        self._asked_again[:] = False

    def grow(self, slots: int) -> None:
        """Grow to this many slots."""
        if slots > len(self._nexts):
            length = max(slots, 2 * len(self._nexts))
            self._nexts = extended(self._nexts, len(self._nexts), length)
            self._of_slot = extended(self._of_slot, len(self._of_slot), length)
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
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
        """Make the chains, if slots have got other numbers."""
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
            self._since, self._asked_again = (
                extended(self._since, known, length),
                extended(self._asked_again, known, length),
            )
        self._heads[known:keys] = END

    def _let_go(self, share: float, write: Write) -> None:
        """Let the keys go that have about that share of what there is."""
        slots = np.arange(self._space.slots, dtype=np.int32)
        live = self.live(slots)
        leaving = self._coldest(slots[live], share)[self._of_slot[: len(slots)]]
        self._write(slots, live, leaving, write)
        self.left.add(hash_columns(self._space.keys_of(slots[live & leaving], self._keyed_by), self._keyed_by))
        self._rows = int((live & ~leaving).sum())
        self._space.keep(slots[live & ~leaving])
        self._number_anew()

    def _coldest(self, live: Slots, share: float) -> NDArray[np.bool_]:
        """Of each key, whether it goes: such as have about that share of what there is."""
        keys = self._keys.size
        rows = np.bincount(self._of_slot[live], minlength=keys)
        asked = self._asked_again[:keys]
        order = np.concatenate((np.flatnonzero(~asked), np.flatnonzero(asked)))
        before = np.cumsum(rows[order] + 1) - (rows[order] + 1)
        goes = np.zeros(keys, dtype=np.bool_)
        goes[order[before < share * (int(rows.sum()) + keys)]] = True
        return goes

    def _write(self, slots: Slots, live: NDArray[np.bool_], leaving: NDArray[np.bool_], write: Write) -> None:
        """Write what has changed of rows that leave, and all that is removed."""
        assert self.dirty is not None
        marked = self.dirty.marked(len(slots))
        for some, names in ((marked & live & leaving, None), (marked & ~live, self._identity)):
            chosen = slots[some]
            for start in range(0, len(chosen), _WRITTEN_ROWS):
                rows = self._space.keys_of(chosen[start : start + _WRITTEN_ROWS], names)
                identity = rows.select(list(self._identity))
                write(identity, rows.columns[len(self._identity) :] if names is None else None)

    def _number_anew(self) -> None:
        """Only keys with rows are known any more."""
        since, asked, of_slot = self._since, self._asked_again, self._of_slot
        self._keys = KeyIndex(self._keyed_by)
        slots = np.arange(self._space.slots, dtype=np.int32)
        upserted = self._keys.upsert(self._space.keys_of(slots, self._keyed_by))
        former = of_slot[upserted.first_rows]
        self._since, self._asked_again = since[former], asked[former]
        self._of_slot = extended(upserted.slots, len(slots), len(slots))
        self._heads = np.full(self._keys.size, END, dtype=np.int32)
        self._tails = self._heads.copy()


class EvictedKeysFilter:
    """Keys by their hashes, in at most so many bytes, and twice that while keys are read.

    It takes memory with the first key that leaves.
    """

    def __init__(self, size_bytes_max: int) -> None:
        self.all = False
        """Whether any key may have rows there, as far as is known."""
        self._words_max = max(1, size_bytes_max // 8)
        self._known = _Filter(self._words_max)
        self._read: _Filter | None = None
        """What has been read of the database, while that is done."""
        self._left = 0
        """Rows of so many have left since the last reading began."""
        self._pause = 0
        """So many must have left before the next one begins."""
        self._seen = 0
        """So many rows were read by this reading, or the last one."""

    def __bool__(self) -> bool:
        """Whether any key may have left."""
        return self.all or self._known.size_bytes > 0

    @property
    def is_crowded(self) -> bool:
        """Whether more keys were added than it has room for."""
        return self._known.is_crowded

    @property
    def is_read(self) -> bool:
        """Whether a reading is under way."""
        return self._read is not None

    @property
    def wants_keys(self) -> bool:
        """Whether it is time to read the keys that are there, from the first one on."""
        return self._read is None and (self.all or self.is_crowded) and self._left >= self._pause

    @property
    def size_bytes(self) -> int:
        """How much memory it takes."""
        return self._known.size_bytes + (0 if self._read is None else self._read.size_bytes)

    def add(self, hashes: Hashes) -> None:
        """Rows of these keys have left; a key may come several times."""
        self._left += len(hashes)
        self._known.add(hashes)
        if self._read is not None:
            self._read.add(hashes)

    def begin(self) -> None:
        """A reading begins."""
        self._read = _Filter(self._words_max)
        self._left = self._seen = 0

    def found(self, hashes: Hashes) -> None:
        """The reading has found rows of these keys. It ends if they are too many."""
        assert self._read is not None, "no reading is under way"
        self._seen += len(hashes)
        self._read.add(hashes)
        if self._read.is_crowded:
            self._read = None
            self._pause = max(2 * self._pause, self._seen)

    def end(self) -> None:
        """The reading has found all that are there. Those that were not are forgotten."""
        assert self._read is not None, "no reading is under way"
        self._known, self._read = self._read, None
        self.all = False
        self._pause = self._seen

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Which of these keys may have left."""
        return np.full(len(hashes), True) if self.all else self._known.has(hashes)


class _Filter:
    """A Bloom filter of so many words, which it takes with the first key."""

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
        """Of each key, a few bits: the word of each, and the bit in it."""
        mask = np.uint64(len(self._words) * _WORD_BITS - 1)
        # The lower bits of keys of one subtask are alike: they have chosen it.
        mixed = hashes * _ODD
        first, step = mixed >> np.uint64(24), (mixed >> np.uint64(40)) | np.uint64(1)
        bits = [(first + np.uint64(probe) * step) & mask for probe in range(_PROBES)]
        return [(each >> np.uint64(6), np.uint64(1) << (each & np.uint64(63))) for each in bits]
