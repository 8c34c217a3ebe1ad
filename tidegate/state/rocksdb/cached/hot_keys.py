"""`HotKeys`: the rows of hot keys of a row table, in columns in front of RocksDB (a write-back cache).

`CachedRows` has one. Rules:
- Of a key that is known here, all rows from some number on are as they are here, also if there are none; the database
  may have older ones, and know of rows that are gone. If that number is 0, the key is *whole*: nobody has to ask the
  database. A key that is not known is as the database has it.
- A key that comes for the first time, and has not left memory before (`LeftKeys`), is whole at once.
- Rows of a key are a chain, by their numbers. What is brought in comes before what is here.
- What has changed is written when a snapshot is taken, or when its key makes room for others. A key goes as a whole:
  those go that have not been asked for again since room was last made, the longest known first, and all without rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.row_slots import RowSlots
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import gather
from tidegate.state.kernels.row_chains import END, collect, link, prune_and_count
from tidegate.state.key_index.hash_table import extended
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.cached.left_keys import LeftKeys
from tidegate.state.rocksdb.cached.write_back import Write
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


class HotKeys(RowSlots):
    """Rows in a space of their own, whose columns are those of the keys, the number, and the values."""

    def __init__(self, space: KeySpace, name: str, key_names: tuple[str, ...], left: LeftKeys) -> None:
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
