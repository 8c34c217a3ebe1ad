"""Index of keys that fit into a word: one integer, float, boolean, date or time column.

Words near each other are looked up in an array (`near_words.py` says when), others in a hash table; a word that the
array has a place for is never in the table. The array is made longer for words of the table when that is full, and when
they, or all keys, have doubled: a few that lie just beside it may be in each batch, which is slower behind each of
them. In the table the key lies in the entry itself (`entries.py` has the layout). Null has an entry of its own. With
tens of millions of keys the bitmap is not in the cache either: then its words are asked for ahead as well, and a row is
met `AHEAD_ROWS` after its turn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel, prefetch
from tidegate.state.key_index.entries import (
    AHEAD_MASK,
    AHEAD_ROWS,
    CAPACITY_MIN,
    SLOTS_MAX,
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
    too_many,
)
from tidegate.state.key_index.filling import spread
from tidegate.state.key_index.mixing import mix
from tidegate.state.key_index.near_words import (
    SOME_WORDS,
    NearWords,
    around_most,
    bounds_of,
    bounds_of_most,
    bounds_of_table,
    fill_near,
    near_words_for,
    settle,
    upsert_near,
)

_ENTRY = 2
"""Words of an entry."""
_OTHERS_MIN = 256
"""Rows that are looked up as any words may lie, from the first one that is not near on; then twice as many."""
_NEAR_WORDS = 1 << 17
"""A longer bitmap of met keys is not in the cache either: its words are asked for as entries are."""


class WordIndex:
    """int64 words → slots 0, 1, 2, … in order of first appearance, by an array of near words and a table of others."""

    __slots__ = ("_hashed", "_hashed_max", "_homes", "_met", "_near", "_null", "_size_max", "_table", "size")

    def __init__(self) -> None:
        self.size = 0
        self._near = NearWords()
        self._table = np.zeros(_ENTRY * CAPACITY_MIN, dtype=np.int64)
        self._hashed = np.zeros(1, dtype=np.int64)
        """How many keys the table has."""
        self._hashed_max = self._size_max = 1
        """With so many there, or so many in all, it is seen whether the array can have them."""
        self._null = np.zeros(2, dtype=np.int64)
        self._met = bitmap_of(0)
        self._make_room()
        self._homes = np.empty(AHEAD_ROWS, dtype=np.int64)

    @property
    def size_bytes(self) -> int:
        """Bytes of the array and of the table, and of what belongs to them."""
        return self._near.slots.nbytes + self._table.nbytes + self._met.nbytes

    def upsert(self, words: NDArray[np.int64], valid: NDArray[np.uint8]) -> Upserted:
        """Slots of a batch of keys; keys that are not known yet get one. `valid` may be `NO_MASK`."""
        if not self.size and not len(self._near.slots):
            self._near = near_words_for(words, valid)
            self._make_room()
        progress = Progress(len(words), self.size)
        others = _OTHERS_MIN
        while True:
            near = self._near
            if len(near.slots):
                upsert_near(
                    near.slots,
                    near.origin,
                    self._met,
                    words,
                    valid,
                    progress.slots,
                    progress.first_rows,
                    progress.new_rows,
                    progress.counters,
                )
                end = min(progress.row + others, len(words))
                others *= 2
            else:
                end = len(words)
            if progress.row < end:
                _upsert(
                    near.slots,
                    near.origin,
                    self._table,
                    self._null,
                    self._met,
                    self._homes,
                    self._hashed,
                    words[:end],
                    valid[:end],
                    progress.slots,
                    progress.first_rows,
                    progress.new_rows,
                    progress.counters,
                )
            self.size = progress.size
            if progress.done:
                result = progress.result()
                forget(self._met, result.slots, result.first_rows)
                if self._hashed[0] >= self._hashed_max or self.size >= self._size_max:
                    self._bring_near()
                return result
            if progress.row < end:
                self._grow()

    def fill(self, words: NDArray[np.int64], valid: NDArray[np.uint8], keys_to_come: int = 0) -> bool:
        """Give the next slots to many keys at once, in their order; so many more follow. `valid` may be `NO_MASK`.

        False if a key comes twice or was known: then the index is of no use any more.
        """
        if not take_null(self._null, self.size, valid):
            return False
        keys = self.size + len(words) + keys_to_come
        if (bounds := bounds_of(words, valid)) and not self._near.has(*bounds):
            near = self._near.reaching(*bounds, keys)
            if near is None and (bounds := bounds_of_most(words, valid)) and not self._near.has(*bounds):
                near = self._near.reaching(*bounds, keys)
            self._take_near(near)
        far = np.zeros(len(words), dtype=np.uint8)
        others = int(fill_near(self._near.slots, self._near.origin, words, valid, np.int64(self.size), far))
        if others < 0 or (others and not self._fill_table(words, far, others, keys_to_come)):
            return False
        self.size += len(words)
        self._make_room()
        return True

    def _fill_table(self, words: NDArray[np.int64], far: NDArray[np.uint8], others: int, keys_to_come: int) -> bool:
        """Give the next slots to the words that are marked `far`. It makes room for as many of the keys to come."""
        keys = int(self._hashed[0]) + others + keys_to_come * others // len(words)
        if keys > keys_max(len(self._table) // _ENTRY, _ENTRY):
            self._rehash(capacity_for(keys, _ENTRY))
        hashes = np.empty(len(words), dtype=np.uint64)
        _mix_all(words, hashes)
        ordered = spread(words, hashes, far, self._table.nbytes)
        del hashes
        self._hashed[0] += others
        return bool(_fill(self._table, ordered.words, ordered.rows, np.int64(self.size)))

    def _grow(self) -> None:
        """The table is full: the keys that are near enough go to the array; if there is none, all to a larger table."""
        if self.size >= SLOTS_MAX:
            raise too_many(SLOTS_MAX + 1)
        if not self._bring_near():
            self._rehash(capacity_after(len(self._table) // _ENTRY, _ENTRY))
            self._make_room()

    def _bring_near(self) -> bool:
        """Take those keys of the table to the array that are near enough to it. False if there is none."""
        grows = len(self._near.slots) > 0
        low, high = self._near.within_reach(self.size) if grows else around_most(self._some_hashed())
        bounds = np.zeros(2, dtype=np.int64)
        bounds_of_table(self._table, np.int64(low), np.int64(high), bounds)
        least, greatest = bounds.tolist()
        near = self._near.reaching(least, greatest, self.size) if least <= greatest else None
        taken = self._take_near(near)
        self._hashed_max, self._size_max = 2 * int(self._hashed[0]) + 1, 2 * self.size
        if taken:
            self._make_room()
        return taken

    def _some_hashed(self) -> NDArray[np.int64]:
        """Some words of the table, `SOME_WORDS` at most."""
        entries = self._table.reshape(-1, _ENTRY)[:: -(-len(self._table) // (_ENTRY * SOME_WORDS))]
        words: NDArray[np.int64] = entries[entries[:, 1] != 0, 0]
        return words

    def _take_near(self, near: NearWords | None) -> bool:
        """Look up near words in a longer array from now on. False, and nothing is done, if there is none."""
        if near is None:
            return False
        self._near = near
        self._hashed[0] = others = int(settle(self._table, near.slots, near.origin))
        self._rehash(capacity_for(others, _ENTRY))
        return True

    def _rehash(self, capacity: int) -> None:
        table = np.zeros(_ENTRY * capacity, dtype=np.int64)
        _rehash(self._table, table)
        self._table = table

    def _make_room(self) -> None:
        """The bitmap has a bit for each slot that there may be before the array or the table grows, null's too."""
        slots = len(self._near.slots) + keys_max(len(self._table) // _ENTRY, _ENTRY) + 1
        if slots > 64 * len(self._met):
            self._met = enlarged(self._met, len(self._met), slots // 64 + 1)


@kernel
def _home(word: np.int64, entries: int) -> np.int64:
    return home_of(mix(np.uint64(word)), entries)


@kernel
def _mix_all(words: NDArray[np.int64], hashes: NDArray[np.uint64]) -> None:
    for i in range(words.shape[0]):
        hashes[i] = mix(np.uint64(words[i]))


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
    near: NDArray[np.int32],
    origin: np.uint64,
    table: NDArray[np.int64],
    null: NDArray[np.int64],
    met: NDArray[np.uint64],
    homes: NDArray[np.int64],
    hashed: NDArray[np.int64],
    words: NDArray[np.int64],
    valid: NDArray[np.uint8],
    slots: NDArray[np.int32],
    first_rows: NDArray[np.int32],
    new_rows: NDArray[np.int32],
    counters: NDArray[np.int64],
) -> None:
    near_words = np.uint64(near.shape[0])
    entries = table.shape[0] // 2
    hashed_max = keys_max(entries, 2)
    masked = valid.shape[0] > 0
    far = met.shape[0] > _NEAR_WORDS
    row, size, first, new = counters[0], counters[1], counters[2], counters[3]
    rows = words.shape[0]
    for i in range(row, min(row + AHEAD_ROWS, rows)):
        _ask(near, origin, table, homes, words[i], np.int64(i))
    met_row = row
    while row < rows:
        word = words[row]
        home = homes[row & AHEAD_MASK]
        if row + AHEAD_ROWS < rows:
            _ask(near, origin, table, homes, words[row + AHEAD_ROWS], row)
        place = np.uint64(word) - origin
        is_null = masked and not valid[row]
        if is_null:
            meta = null[1]
        elif place < near_words:
            meta = np.int64(near[np.int64(place)])
        else:
            while table[2 * home + 1] != 0 and table[2 * home] != word:
                home = following(home, entries)
            meta = table[2 * home + 1]
        if meta == 0:
            if size >= SLOTS_MAX:
                break
            if is_null:
                null[1] = size + 1
            elif place < near_words:
                near[np.int64(place)] = size + 1
            else:
                if hashed[0] >= hashed_max:
                    break
                hashed[0] += 1
                table[2 * home] = word
                table[2 * home + 1] = size + 1
            size += 1
            meta = size
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


@kernel
def _ask(
    near: NDArray[np.int32],
    origin: np.uint64,
    table: NDArray[np.int64],
    homes: NDArray[np.int64],
    word: np.int64,
    row: np.int64,
) -> None:
    """Ask for the cache lines of a word, and keep its home if it is one of the table."""
    place = np.uint64(word) - origin
    if place < np.uint64(near.shape[0]):
        prefetch(near, np.int64(place))
    else:
        home = _home(word, table.shape[0] // 2)
        homes[row & AHEAD_MASK] = home
        prefetch(table, 2 * home)
        prefetch(table, 2 * home + 2)
