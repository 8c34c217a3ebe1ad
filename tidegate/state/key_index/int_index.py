"""Index of keys that fit into a word: one integer, float, boolean, date or time column.

`IntIndex` looks up keys that are close together in an array (`DenseIntIndex`), and all other keys in a hash table
(`hash_table.py` has the layout). Identifiers are usually consecutive numbers; an array from the least to the greatest
is then smaller than a hash table of the same keys, and finds a slot with one read, without hash or probe. Databases
call this perfect hashing. Null has its own entry. Rules:

- A word that the array covers is never in the table.
- The array has at most `WORDS_PER_KEY` words for each key of the index, or twice `FIRST_WORDS`. That is not more memory
  than a hash table that has just grown, so the array is useful even if a few subtasks share the keys.
- The array grows by at least half of the needed length, so the total number of copied words is proportional to its
  length.
- An index starts with an array if the words of its first batch are close together: within `FIRST_WORDS`, which need as
  much memory as the smallest hash table, or `WORDS_PER_ROW` for each row of the batch. The array has room on both
  sides, because a first batch rarely contains the least and the greatest key. It starts at 0 rather than below.
- A few distant words, such as -1 for an unknown key, must not prevent the array. Where an index has none yet, the
  middle three quarters of its words, and as much on either side, determine the range of the array.
- The array is extended to words of the table when the table is full, and when the keys of the table, or all keys, have
  doubled. Otherwise a few keys just outside the array could occur in each batch and slow down the rows behind them.
- With tens of millions of keys the bitmap of seen keys exceeds the cache too. Its words are then prefetched as well,
  and a row is marked as seen `AHEAD_ROWS` after its lookup.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel, prefetch
from tidegate.state.kernels.paged import AHEAD
from tidegate.state.key_index.hash_table import (
    AHEAD_MASK,
    AHEAD_ROWS,
    CAPACITY_MIN,
    SLOTS_MAX,
    WORD_MASK,
    Progress,
    Upserted,
    by_home,
    capacity_after,
    capacity_for,
    clear_seen,
    extended,
    home_of,
    keys_max,
    mark_seen,
    mix,
    next_entry,
    seen_bitmap,
    store_null,
    too_many_keys,
)

_ENTRY = 2
"""Words of an entry."""
WORDS_PER_KEY = 8
WORDS_PER_ROW = 4
FIRST_WORDS = 4096
SAMPLED_WORDS = 1 << 16
"""How many words are sampled to find the range of most words."""
_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1
_OTHERS_MIN = 256
"""How many rows the general kernel looks up, from the first row outside the array on; then twice as many."""
_NEAR_WORDS = 1 << 17
"""A longer bitmap of seen keys exceeds the cache: its words are prefetched like entries."""


class IntIndex:
    """Maps int64 words to slots 0, 1, 2, … in the order in which they first appear. Uses an array for close words, and
    a hash table for others.
    """

    __slots__ = ("_dense", "_hashed", "_hashed_max", "_homes", "_null", "_seen", "_size_max", "_table", "size")

    def __init__(self) -> None:
        self.size = 0
        self._dense = DenseIntIndex()
        self._table = np.zeros(_ENTRY * CAPACITY_MIN, dtype=np.int64)
        self._hashed = np.zeros(1, dtype=np.int64)
        """How many keys the table contains."""
        self._hashed_max = 1
        self._size_max = 1
        """With this many keys in the table, or in all, the array is extended if possible."""
        self._null = np.zeros(2, dtype=np.int64)
        self._seen = seen_bitmap(0)
        self._enlarge()
        self._homes = np.empty(AHEAD_ROWS, dtype=np.int64)

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of the array, the hash table and the bitmap."""
        return self._dense.slots.nbytes + self._table.nbytes + self._seen.nbytes

    def upsert(self, words: NDArray[np.int64], valid: NDArray[np.uint8]) -> Upserted:
        """Returns the slots of a batch of keys, with new slots for new keys. `valid` may be `NO_MASK`."""
        if not self.size and not len(self._dense.slots):
            self._dense = dense_index_for(words, valid)
            self._enlarge()
        progress = Progress(len(words), self.size)
        others = _OTHERS_MIN
        while True:
            dense = self._dense
            if len(dense.slots):
                _upsert_dense(
                    dense.slots,
                    dense.origin,
                    self._seen,
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
                    dense.slots,
                    dense.origin,
                    self._table,
                    self._null,
                    self._seen,
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
                clear_seen(self._seen, result.slots, result.first_rows)
                if self._hashed[0] >= self._hashed_max or self.size >= self._size_max:
                    self._extend_dense()
                return result
            if progress.row < end:
                self._grow()

    def fill(self, words: NDArray[np.int64], valid: NDArray[np.uint8], keys_to_come: int = 0) -> bool:
        """Assigns the next slots to many new keys, in their order, and reserves memory for `keys_to_come` more keys.

        `valid` may be `NO_MASK`. Returns False if a key occurs twice or already existed. Then the index must not be
        used any more.
        """
        if not store_null(self._null, self.size, valid):
            return False
        keys = self.size + len(words) + keys_to_come
        if (bounds := bounds_of(words, valid)) and not self._dense.has(*bounds):
            dense = self._dense.extended_to(*bounds, keys)
            if dense is None and (bounds := _bounds_of_most(words, valid)) and not self._dense.has(*bounds):
                dense = self._dense.extended_to(*bounds, keys)
            self._use_dense(dense)
        far = np.zeros(len(words), dtype=np.uint8)
        others = int(_fill_dense(self._dense.slots, self._dense.origin, words, valid, np.int64(self.size), far))
        if others < 0 or (others and not self._fill_table(words, far, others, keys_to_come)):
            return False
        self.size += len(words)
        self._enlarge()
        return True

    def _fill_table(self, words: NDArray[np.int64], far: NDArray[np.uint8], others: int, keys_to_come: int) -> bool:
        """Assigns the next slots to the words that are too far apart for the array, which `far` marks.

        Reserves memory for the same share of the keys to come.
        """
        keys = int(self._hashed[0]) + others + keys_to_come * others // len(words)
        if keys > keys_max(len(self._table) // _ENTRY, _ENTRY):
            self._rehash(capacity_for(keys, _ENTRY))
        hashes = np.empty(len(words), dtype=np.uint64)
        _mix_all(words, hashes)
        ordered = by_home(words, hashes, far, self._table.nbytes)
        del hashes
        self._hashed[0] += others
        return bool(_fill(self._table, ordered.words, ordered.rows, np.int64(self.size)))

    def _grow(self) -> None:
        """Makes space in a full hash table: moves keys to the array if it can be extended, otherwise enlarges the
        table.
        """
        if self.size >= SLOTS_MAX:
            raise too_many_keys(SLOTS_MAX + 1)
        if not self._extend_dense():
            self._rehash(capacity_after(len(self._table) // _ENTRY, _ENTRY))
            self._enlarge()

    def _extend_dense(self) -> bool:
        """Extends the array so that it covers keys of the hash table that are close enough. Returns False if there are
        none.
        """
        grows = len(self._dense.slots) > 0
        low, high = self._dense.reachable(self.size) if grows else _around_most(self._some_hashed())
        bounds = np.zeros(2, dtype=np.int64)
        _bounds_of_table(self._table, np.int64(low), np.int64(high), bounds)
        least, greatest = bounds.tolist()
        dense = self._dense.extended_to(least, greatest, self.size) if least <= greatest else None
        taken = self._use_dense(dense)
        self._hashed_max, self._size_max = 2 * int(self._hashed[0]) + 1, 2 * self.size
        if taken:
            self._enlarge()
        return taken

    def _some_hashed(self) -> NDArray[np.int64]:
        """Returns a sample of the words in the hash table, at most `SAMPLED_WORDS`."""
        entries = self._table.reshape(-1, _ENTRY)[:: -(-len(self._table) // (_ENTRY * SAMPLED_WORDS))]
        words: NDArray[np.int64] = entries[entries[:, 1] != 0, 0]
        return words

    def _use_dense(self, dense: DenseIntIndex | None) -> bool:
        """Replaces the array by the longer array `dense`, and moves keys from the hash table into it. Returns whether
        `dense` was given.
        """
        if dense is None:
            return False
        self._dense = dense
        self._hashed[0] = others = int(_move_to_dense(self._table, dense.slots, dense.origin))
        self._rehash(capacity_for(others, _ENTRY))
        return True

    def _rehash(self, capacity: int) -> None:
        table = np.zeros(_ENTRY * capacity, dtype=np.int64)
        _rehash(self._table, table)
        self._table = table

    def _enlarge(self) -> None:
        """Enlarges the bitmap, so that it has a bit for null and for each slot that may be used before the array or the
        hash table grows.
        """
        slots = len(self._dense.slots) + keys_max(len(self._table) // _ENTRY, _ENTRY) + 1
        if slots > 64 * len(self._seen):
            self._seen = extended(self._seen, len(self._seen), slots // 64 + 1)


@dataclass(frozen=True, slots=True)
class DenseIntIndex:
    """An array that has slot + 1 for each word from `first` on, or 0 for a word that is not a key."""

    first: int = 0
    slots: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    @property
    def origin(self) -> np.uint64:
        """Returns the first word of the array as uint64.

        Subtracted from a smaller word, it gives a number that is greater than any array index.
        """
        return np.uint64(self.first & WORD_MASK)

    def has(self, least: int, greatest: int) -> bool:
        """Returns whether the array covers all words from `least` to `greatest`."""
        return self.first <= least and greatest < self.first + len(self.slots)

    def reachable(self, keys: int) -> tuple[int, int]:
        """Returns the least and the greatest word that the array could cover if it were extended for an index of `keys`
        keys.
        """
        words = _words_max(keys)
        return max(self.first + len(self.slots) - words, _LEAST), min(self.first + words, _GREATEST)

    def extended_to(self, least: int, greatest: int, keys: int) -> DenseIntIndex | None:
        """Returns a longer array that also covers the words from `least` to `greatest`, or None if it would be too long
        for `keys` keys.

        The array gets a reserve on the side of the new words, where more are likely to follow. The first array has a
        reserve on both sides.
        """
        first, end = (self.first, self.first + len(self.slots)) if len(self.slots) else (least, least)
        low, high = min(least, first), max(greatest + 1, end)
        words = high - low
        if words + words // 2 > _words_max(keys):
            return None
        if not len(self.slots):
            low, high = max(low - words // 4, _LEAST if low < 0 else 0), min(high + words - words // 4, _GREATEST + 1)
        elif least < first:
            low = max(low - words // 2, _LEAST)
        else:
            high = min(high + words // 2, _GREATEST + 1)
        slots = np.zeros(high - low, dtype=np.int32)
        slots[first - low : end - low] = self.slots
        return DenseIntIndex(low, slots)


def _words_max(keys: int) -> int:
    return max(WORDS_PER_KEY * keys, 2 * FIRST_WORDS)


def dense_index_for(words: NDArray[np.int64], valid: NDArray[np.uint8]) -> DenseIntIndex:
    """Returns the array with which an index starts, given the words of its first batch. `valid` may be `NO_MASK`."""
    words_max = max(FIRST_WORDS, WORDS_PER_ROW * len(words))
    bounds = bounds_of(words, valid)
    if bounds is None or (between := bounds[1] - bounds[0] + 1) > words_max:
        return DenseIntIndex()
    length = max(FIRST_WORDS, min(between + between // 4, words_max))
    first = bounds[0] - (length - between) // 2
    first = 0 if first < 0 <= bounds[0] else min(max(first, _LEAST), _GREATEST + 1 - length)
    return DenseIntIndex(first, np.zeros(length, dtype=np.int32))


def _bounds_of_most(words: NDArray[np.int64], valid: NDArray[np.uint8]) -> tuple[int, int] | None:
    """Returns the least and the greatest word without far outliers, or None if all words are null."""
    some = words[:SAMPLED_WORDS]
    low, high = _around_most(some[valid[:SAMPLED_WORDS].view(np.bool_)] if len(valid) else some)
    bounds = np.array([_GREATEST, _LEAST], dtype=np.int64)
    _bounds_within(words, valid, np.int64(low), np.int64(high), bounds)
    least, greatest = bounds.tolist()
    return None if least > greatest else (least, greatest)


def _around_most(words: NDArray[np.int64]) -> tuple[int, int]:
    """Returns the range of the middle three quarters of words, widened on both sides by its own length.

    Returns the whole range of int64 for less than eight words.
    """
    outside = len(words) // 8
    if not outside:
        return _LEAST, _GREATEST
    ordered = np.partition(words, (outside, len(words) - 1 - outside))
    low, high = int(ordered[outside]), int(ordered[-1 - outside])
    return max(2 * low - high, _LEAST), min(2 * high - low, _GREATEST)


def bounds_of(words: NDArray[np.int64], valid: NDArray[np.uint8]) -> tuple[int, int] | None:
    """Returns the least and the greatest of the words that are not null, or None if all words are null.

    `valid` may be `NO_MASK`.
    """
    bounds = np.array([_GREATEST, _LEAST], dtype=np.int64)
    _bounds(words, valid, bounds)
    least, greatest = bounds.tolist()
    return None if least > greatest else (least, greatest)


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
            home = next_entry(home, entries)
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
                home = next_entry(home, entries)
            new[2 * home] = old[position]
            new[2 * home + 1] = old[position + 1]


@kernel
def _upsert(
    dense: NDArray[np.int32],
    origin: np.uint64,
    table: NDArray[np.int64],
    null: NDArray[np.int64],
    seen: NDArray[np.uint64],
    homes: NDArray[np.int64],
    hashed: NDArray[np.int64],
    words: NDArray[np.int64],
    valid: NDArray[np.uint8],
    slots: NDArray[np.int32],
    first_rows: NDArray[np.int32],
    new_rows: NDArray[np.int32],
    counters: NDArray[np.int64],
) -> None:
    dense_words = np.uint64(dense.shape[0])
    entries = table.shape[0] // 2
    hashed_max = keys_max(entries, 2)
    masked = valid.shape[0] > 0
    far = seen.shape[0] > _NEAR_WORDS
    row, size, first, new = counters[0], counters[1], counters[2], counters[3]
    rows = words.shape[0]
    for i in range(row, min(row + AHEAD_ROWS, rows)):
        _prefetch_entry(dense, origin, table, homes, words[i], np.int64(i))
    seen_row = row
    while row < rows:
        word = words[row]
        home = homes[row & AHEAD_MASK]
        if row + AHEAD_ROWS < rows:
            _prefetch_entry(dense, origin, table, homes, words[row + AHEAD_ROWS], row)
        place = np.uint64(word) - origin
        is_null = masked and not valid[row]
        if is_null:
            meta = null[1]
        elif place < dense_words:
            meta = np.int64(dense[np.int64(place)])
        else:
            while table[2 * home + 1] != 0 and table[2 * home] != word:
                home = next_entry(home, entries)
            meta = table[2 * home + 1]
        if meta == 0:
            if size >= SLOTS_MAX:
                break
            if is_null:
                null[1] = size + 1
            elif place < dense_words:
                dense[np.int64(place)] = size + 1
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
            prefetch(seen, (meta - 1) >> 6)
            if row - seen_row > AHEAD_ROWS:
                first_rows[first] = seen_row
                first += mark_seen(seen, np.int64(slots[seen_row]))
                seen_row += 1
        else:
            first_rows[first] = row - 1
            first += mark_seen(seen, meta - 1)
    if far:
        for i in range(seen_row, row):
            first_rows[first] = i
            first += mark_seen(seen, np.int64(slots[i]))
    counters[0], counters[1], counters[2], counters[3] = row, size, first, new


@kernel
def _prefetch_entry(
    dense: NDArray[np.int32],
    origin: np.uint64,
    table: NDArray[np.int64],
    homes: NDArray[np.int64],
    word: np.int64,
    row: np.int64,
) -> None:
    """Prefetches the cache lines for looking up a word.

    If the array does not cover the word, also stores its home in the hash table in `homes[row]`.
    """
    place = np.uint64(word) - origin
    if place < np.uint64(dense.shape[0]):
        prefetch(dense, np.int64(place))
    else:
        home = _home(word, table.shape[0] // 2)
        homes[row & AHEAD_MASK] = home
        prefetch(table, 2 * home)
        prefetch(table, 2 * home + 2)


@kernel
def _bounds(words: NDArray[np.int64], valid: NDArray[np.uint8], bounds: NDArray[np.int64]) -> None:
    least, greatest = bounds[0], bounds[1]
    if valid.shape[0] > 0:
        for i in range(words.shape[0]):
            if valid[i]:
                least, greatest = min(least, words[i]), max(greatest, words[i])
    else:
        for i in range(words.shape[0]):
            least, greatest = min(least, words[i]), max(greatest, words[i])
    bounds[0], bounds[1] = least, greatest


@kernel
def _bounds_within(
    words: NDArray[np.int64], valid: NDArray[np.uint8], low: np.int64, high: np.int64, bounds: NDArray[np.int64]
) -> None:
    masked = valid.shape[0] > 0
    for i in range(words.shape[0]):
        if low <= words[i] <= high and not (masked and not valid[i]):
            bounds[0], bounds[1] = min(bounds[0], words[i]), max(bounds[1], words[i])


@kernel
def _bounds_of_table(table: NDArray[np.int64], low: np.int64, high: np.int64, bounds: NDArray[np.int64]) -> None:
    """Stores in `bounds` the least and the greatest word of a hash table between `low` and `high`. If there is none,
    the first is greater than the second.
    """
    bounds[0], bounds[1] = _GREATEST, _LEAST
    for position in range(0, table.shape[0], 2):
        if table[position + 1] != 0 and low <= table[position] <= high:
            bounds[0], bounds[1] = min(bounds[0], table[position]), max(bounds[1], table[position])


@kernel
def _move_to_dense(
    table: NDArray[np.int64],
    dense: NDArray[np.int32],
    origin: np.uint64,
) -> np.int64:
    """Moves the keys that the array covers from the hash table into the array. Returns how many keys remain in the
    table.
    """
    others = np.int64(0)
    for position in range(0, table.shape[0], 2):
        if table[position + 1] != 0:
            place = np.uint64(table[position]) - origin
            if place < np.uint64(dense.shape[0]):
                dense[np.int64(place)] = table[position + 1]
                table[position + 1] = 0
            else:
                others += 1
    return others


@kernel
def _fill_dense(
    dense: NDArray[np.int32],
    origin: np.uint64,
    words: NDArray[np.int64],
    valid: NDArray[np.uint8],
    first_slot: np.int64,
    others: NDArray[np.uint8],
) -> np.int64:
    """Assigns the next slots to the words that the array covers, and marks all other words in `others`.

    Returns how many words are marked, or -1 if a key occurs twice or already existed.
    """
    masked = valid.shape[0] > 0
    marked = np.int64(0)
    for i in range(words.shape[0]):
        if masked and not valid[i]:
            continue
        place = np.uint64(words[i]) - origin
        if place >= np.uint64(dense.shape[0]):
            others[i] = 1
            marked += 1
        elif dense[np.int64(place)] != 0:
            return np.int64(-1)
        else:
            dense[np.int64(place)] = first_slot + i + 1
    return marked


@kernel
def _upsert_dense(
    dense: NDArray[np.int32],
    origin: np.uint64,
    seen: NDArray[np.uint64],
    words: NDArray[np.int64],
    valid: NDArray[np.uint8],
    slots: NDArray[np.int32],
    first_rows: NDArray[np.int32],
    new_rows: NDArray[np.int32],
    counters: NDArray[np.int64],
) -> None:
    """Looks up rows in the array, from the current row on, until a row is null or outside of the array.

    The loop takes a nanosecond for each row, so it prefetches `AHEAD` rows ahead. A second loop finds the first row of
    each key. It is skipped where all keys are new.
    """
    dense_words = np.uint64(dense.shape[0])
    masked = valid.shape[0] > 0
    begin, size, first, new = counters[0], counters[1], counters[2], counters[3]
    row, rows = begin, words.shape[0]
    all_new = size == 0
    while row < rows:
        ahead = np.uint64(words[min(row + AHEAD, rows - 1)]) - origin
        prefetch(dense, np.int64(min(ahead, dense_words)))
        place = np.uint64(words[row]) - origin
        if place >= dense_words or (masked and not valid[row]):
            break
        meta = dense[np.int64(place)]
        if meta == 0:
            if size >= SLOTS_MAX:
                break
            size += 1
            meta = np.int32(size)
            dense[np.int64(place)] = meta
            new_rows[new] = row
            new += 1
        slots[row] = meta - 1
        row += 1
    if all_new and row == rows:
        for i in range(new):
            first_rows[i] = new_rows[i]
        first = new
    else:
        for i in range(begin, row):
            first_rows[first] = i
            first += mark_seen(seen, np.int64(slots[i]))
    counters[0], counters[1], counters[2], counters[3] = row, size, first, new
