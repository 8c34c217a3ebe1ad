"""Index of keys that fit into a word: one integer, float, boolean, date or time column.

The key lies in the entry itself (`entries.py` has the layout). Null has an entry outside the table. With tens of
millions of keys the bitmap is not in the cache either: then its words are asked for ahead as well, and a row is met
`AHEAD_ROWS` after its turn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.actors.kernels.jit import kernel, prefetch
from tidegate.actors.kernels.key_index.entries import (
    AHEAD_MASK,
    AHEAD_ROWS,
    CAPACITY_MIN,
    Progress,
    Upserted,
    bitmap_of,
    capacity_after,
    capacity_for,
    enlarged,
    following,
    forget,
    home_of,
    keys_max,
    meet,
    take_null,
)
from tidegate.actors.kernels.key_index.filling import spread

_ENTRY = 2
"""Words of an entry."""
_NEAR_WORDS = 1 << 17
"""A longer bitmap of met keys is not in the cache either: its words are asked for as entries are."""
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class WordIndex:
    """Open-addressing table of int64 words → slots 0, 1, 2, … in order of first appearance."""

    __slots__ = ("_homes", "_met", "_null", "_table", "size")

    def __init__(self) -> None:
        self.size = 0
        self._table = np.zeros(_ENTRY * CAPACITY_MIN, dtype=np.int64)
        self._null = np.zeros(2, dtype=np.int64)
        self._met = bitmap_of(keys_max(CAPACITY_MIN, _ENTRY))
        self._homes = np.empty(AHEAD_ROWS, dtype=np.int64)

    @property
    def size_bytes(self) -> int:
        """Bytes of the table, and of what belongs to it."""
        return self._table.nbytes + self._met.nbytes

    def upsert(self, words: NDArray[np.int64], valid: NDArray[np.uint8]) -> Upserted:
        """Slots of a batch of keys; keys that are not known yet get one. `valid` may be `NO_MASK`."""
        progress = Progress(len(words), self.size)
        while True:
            _upsert(
                self._table,
                self._null,
                self._met,
                self._homes,
                words,
                valid,
                progress.slots,
                progress.first_rows,
                progress.new_rows,
                progress.counters,
            )
            self.size = progress.size
            if progress.done:
                result = progress.result()
                forget(self._met, result.slots, result.first_rows)
                return result
            self._grow(capacity_after(len(self._table) // _ENTRY, _ENTRY))

    def fill(self, words: NDArray[np.int64], valid: NDArray[np.uint8], keys_to_come: int = 0) -> bool:
        """Give the next slots to many keys at once, in their order; so many more follow. `valid` may be `NO_MASK`.

        False if a key comes twice or was known: then the index is of no use any more.
        """
        keys = self.size + len(words) + keys_to_come
        if keys > keys_max(len(self._table) // _ENTRY, _ENTRY):
            self._grow(capacity_for(keys, _ENTRY))
        if not take_null(self._null, self.size, valid):
            return False
        hashes = np.empty(len(words), dtype=np.uint64)
        _mix_all(words, hashes)
        ordered = spread(words, hashes, valid, self._table.nbytes)
        del hashes
        filled = _fill(self._table, ordered.words, ordered.rows, np.int64(self.size))
        self.size += len(words)
        return bool(filled)

    def _grow(self, capacity: int) -> None:
        table = np.zeros(_ENTRY * capacity, dtype=np.int64)
        _rehash(self._table, table)
        self._table = table
        self._met = enlarged(self._met, len(self._met), keys_max(capacity, _ENTRY) // 64 + 1)


@kernel
def _mix(word: np.int64) -> np.uint64:
    h = np.uint64(word)
    h = (h ^ (h >> np.uint64(32))) * _MIX_1
    h = (h ^ (h >> np.uint64(29))) * _MIX_2
    return h ^ (h << np.uint64(32))


@kernel
def _home(word: np.int64, entries: int) -> np.int64:
    return home_of(_mix(word), entries)


@kernel
def _mix_all(words: NDArray[np.int64], hashes: NDArray[np.uint64]) -> None:
    for i in range(words.shape[0]):
        hashes[i] = _mix(words[i])


@kernel
def _fill(table: NDArray[np.int64], words: NDArray[np.int64], rows: NDArray[np.int32], first_slot: np.int64) -> bool:
    entries = table.shape[0] // 2
    for i in range(words.shape[0]):
        if i + AHEAD_ROWS < words.shape[0]:
            prefetch(table, 2 * _home(words[i + AHEAD_ROWS], entries))
        word = words[i]
        home = _home(word, entries)
        while table[2 * home + 1] != 0:
            if table[2 * home] == word:
                return False
            home = following(home, entries)
        table[2 * home] = word
        table[2 * home + 1] = first_slot + rows[i] + 1
    return True


@kernel
def _rehash(old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
    entries = new.shape[0] // 2
    for position in range(0, old.shape[0], 2):
        if old[position + 1] != 0:
            home = _home(old[position], entries)
            while new[2 * home + 1] != 0:
                home = following(home, entries)
            new[2 * home] = old[position]
            new[2 * home + 1] = old[position + 1]


@kernel
def _upsert(
    table: NDArray[np.int64],
    null: NDArray[np.int64],
    met: NDArray[np.uint64],
    homes: NDArray[np.int64],
    words: NDArray[np.int64],
    valid: NDArray[np.uint8],
    slots: NDArray[np.int32],
    first_rows: NDArray[np.int32],
    new_rows: NDArray[np.int32],
    counters: NDArray[np.int64],
) -> None:
    entries = table.shape[0] // 2
    size_max = keys_max(entries, 2)
    masked = valid.shape[0] > 0
    far = met.shape[0] > _NEAR_WORDS
    row, size, first, new = counters[0], counters[1], counters[2], counters[3]
    rows = words.shape[0]
    for i in range(row, min(row + AHEAD_ROWS, rows)):
        home = _home(words[i], entries)
        homes[i & AHEAD_MASK] = home
        prefetch(table, 2 * home)
    met_row = row
    while row < rows:
        word = words[row]
        home = homes[row & AHEAD_MASK]
        if row + AHEAD_ROWS < rows:
            ahead = _home(words[row + AHEAD_ROWS], entries)
            homes[row & AHEAD_MASK] = ahead
            prefetch(table, 2 * ahead)
        found_in = table
        if masked and not valid[row]:
            found_in = null
            home = np.int64(0)
        else:
            while found_in[2 * home + 1] != 0 and found_in[2 * home] != word:
                home = following(home, entries)
        meta = found_in[2 * home + 1]
        if meta == 0:
            if size >= size_max:
                break
            found_in[2 * home] = word
            size += 1
            found_in[2 * home + 1] = meta = size
            new_rows[new] = row
            new += 1
        slots[row] = meta - 1
        row += 1
        if far:
            prefetch(met, (meta - 1) >> 6)
            if row - met_row > AHEAD_ROWS:
                first_rows[first] = met_row
                first += meet(met, np.int64(slots[met_row]))
                met_row += 1
        else:
            first_rows[first] = row - 1
            first += meet(met, meta - 1)
    if far:
        for i in range(met_row, row):
            first_rows[first] = i
            first += meet(met, np.int64(slots[i]))
    counters[0], counters[1], counters[2], counters[3] = row, size, first, new
