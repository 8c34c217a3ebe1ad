"""Index of keys of two words: a window's slice and a key, or any two columns of numbers, dates and times.

Both words are stored in the entry, 32 bytes, so a probe touches one cache line. Encoded as bytes (`bytes_index.py`),
such keys would have to be hashed and compared in an arena, which costs one more cache miss and twice the time. An entry
has the two words, which of them are null (their words are 0 then), and slot + 1, which is 0 when the entry is free.

`DensePairCache` is used before the table. Rows of windows have the slice and the key as their words, and arrive roughly
in order of time: at any time nearly all belong to one or two slices. One array for each of the two, from the least key
to the greatest, finds a slot with one read. Rules:

- The table contains every pair. The arrays only cache its answers and may be dropped.
- There are two arrays: for the least and the greatest first word of a batch that contains hardly any other. Entries of
  other first words are evicted, and all entries when the second words are too far away.
- After an eviction, rows are found in the table only at first, which costs twice as much as a table without arrays. It
  is worth it if half of the rows are found before the next eviction. If it was not, the batches that would evict again
  use the table alone: first 1 batch, then 3, 7 and so on, up to `SKIPS_MAX`. So key ranges that alternate, or batches
  of only new pairs, cost little more than the table.
- An array has at most `WORDS_PER_ROW` words for each row of a batch, or `WORDS_PER_PAIR` for each pair of the index. It
  grows by half of what it must have, on the side of the new words, so copying is proportional to its length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import NO_MASK, Words
from tidegate.state.kernels.jit import kernel, prefetch
from tidegate.state.key_index.hash_table import (
    AHEAD_MASK,
    AHEAD_ROWS,
    CAPACITY_MIN,
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
    mix_pair,
    next_entry,
    seen_bitmap,
)
from tidegate.state.key_index.int_index import bounds_of

_ENTRY = 4
WORDS_PER_ROW = 4
WORDS_PER_PAIR = 2
SKIPS_MAX = 63
_SAMPLES = 16
"""How many rows are sampled for their first words."""
_LEAST = -(1 << 63)
_NO_SLOTS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class IntPairIndex:
    """Maps pairs of int64 words to slots 0, 1, 2, … in the order in which they first appear."""

    __slots__ = ("_dense", "_homes", "_seen", "_table", "size")

    def __init__(self) -> None:
        self.size = 0
        self._table = np.zeros(_ENTRY * CAPACITY_MIN, dtype=np.int64)
        self._seen = seen_bitmap(keys_max(CAPACITY_MIN, _ENTRY))
        self._homes = np.empty(AHEAD_ROWS, dtype=np.int64)
        self._dense = DensePairCache()

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of the hash table, the bitmap and the cache arrays."""
        return self._table.nbytes + self._seen.nbytes + self._dense.slots.nbytes

    def upsert(self, first: Words, second: Words) -> Upserted:
        """Returns the slots of a batch of keys, with new slots for new keys."""
        progress = Progress(len(first.words), self.size)
        dense = self._dense
        dense_slots = dense.slots if dense.prepare(first, second, self.size) else _NO_SLOTS
        while True:
            _upsert(
                dense_slots,
                dense.firsts,
                dense.found,
                np.uint64(dense.origin & WORD_MASK),
                self._table,
                self._seen,
                self._homes,
                first.words,
                first.valid,
                second.words,
                second.valid,
                progress.slots,
                progress.first_rows,
                progress.new_rows,
                progress.counters,
            )
            self.size = progress.size
            if progress.done:
                result = progress.result()
                clear_seen(self._seen, result.slots, result.first_rows)
                return result
            self._grow(capacity_after(len(self._table) // _ENTRY, _ENTRY))

    def fill(self, first: Words, second: Words, keys_to_come: int = 0) -> bool:
        """Assigns the next slots to many new keys, in their order, and reserves memory for `keys_to_come` more keys.

        Returns False if a key occurs twice or already existed. Then the index must not be used any more.
        """
        keys = self.size + len(first.words) + keys_to_come
        if keys > keys_max(len(self._table) // _ENTRY, _ENTRY):
            self._grow(capacity_for(keys, _ENTRY))
        hashes = np.empty(len(first.words), dtype=np.uint64)
        words = first.words, first.valid, second.words, second.valid
        _mix_all(*words, hashes)
        ordered = by_home(first.words, hashes, NO_MASK, self._table.nbytes)
        del hashes
        filled = _fill(self._table, *words, ordered.rows, np.int64(self.size))
        self.size += len(first.words)
        return bool(filled)

    def _grow(self, capacity: int) -> None:
        table = np.zeros(_ENTRY * capacity, dtype=np.int64)
        _rehash(self._table, table)
        self._table = table
        self._seen = extended(self._seen, len(self._seen), keys_max(capacity, _ENTRY) // 64 + 1)


class DensePairCache:
    """A cache in front of the hash table: two arrays, each for the pairs with one first word, indexed by the second
    word.

    The arrays have slot + 1, or 0 where nothing is cached. They are stored one after the other in `slots`.
    """

    __slots__ = ("_rows", "_skip", "_skips_left", "_span", "firsts", "found", "origin", "slots")

    def __init__(self) -> None:
        self.firsts: NDArray[np.int64] = np.zeros(2, dtype=np.int64)
        """First word of each array. If they are equal, only the first array is used."""
        self.origin = 0
        """Second word of the first entry of each array."""
        self._span = 0
        self.slots: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.found: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        """Number of rows found in arrays since the last eviction. The kernel counts them."""
        self._rows = 0
        """Number of rows since the last eviction, including rows of skipped batches."""
        self._skip = 0
        """Number of batches that would evict and are skipped before the next eviction."""
        self._skips_left = 0

    def prepare(self, first: Words, second: Words, pairs: int) -> bool:
        """Prepares the arrays for a batch. `pairs` is the number of pairs in the index. Returns False if the arrays
        would not help for this batch.
        """
        rows = len(first.words)
        if not rows or len(first.valid) or len(second.valid):
            return False
        seen = first.words[:: max(1, rows // _SAMPLES)]
        ends = int(seen.min()), int(seen.max())
        if ((seen != ends[0]) & (seen != ends[1])).any():
            return False
        bounds = bounds_of(second.words, second.valid)
        assert bounds is not None, "rows without a key"
        words_max = max(WORDS_PER_ROW * rows, WORDS_PER_PAIR * pairs)
        if bounds[1] - bounds[0] >= words_max:
            return False
        self._rows += rows
        far = not self._can_extend(*bounds, words_max)
        if self._evicts(ends, far) and not self._may_evict():
            return False
        if far or not self._span:
            self._span, self.firsts[:] = 0, ends
        self._extend(*bounds, words_max)
        self._assign_firsts(ends)
        return True

    def _evicts(self, ends: tuple[int, int], far: bool) -> bool:
        """Returns whether cached entries must be evicted for a batch, because of its first words or because its second
        words are too far away.
        """
        known = set(self.firsts.tolist())
        return self._span > 0 and (far or len({*ends} - known) > 2 - len(known))

    def _may_evict(self) -> bool:
        """Returns whether a batch may evict cached entries. Otherwise the batch uses only the hash table."""
        if self._skips_left:
            self._skips_left -= 1
            return False
        paid = 2 * int(self.found[0]) >= self._rows
        self._skips_left = self._skip = 0 if paid else min(2 * self._skip + 1, SKIPS_MAX)
        self._rows = self.found[0] = 0
        return True

    def _can_extend(self, least: int, greatest: int, words_max: int) -> bool:
        """Returns whether the arrays may be extended to the second words from `least` to `greatest`, given the limit
        `words_max`.
        """
        low, high = min(self.origin, least), max(self.origin + self._span, greatest + 1)
        return high - low <= max(words_max, self._span)

    def _extend(self, least: int, greatest: int, words_max: int) -> None:
        """Extends the arrays to the second words from `least` to `greatest`."""
        if self._span and self.origin <= least and greatest < self.origin + self._span:
            return
        first, end = (self.origin, self.origin + self._span) if self._span else (least, least)
        low, high = min(first, least), max(end, greatest + 1)
        more = min((high - low) // 2, words_max - (high - low))
        if self._span and least < first:
            low = max(low - more, _LEAST)
        else:
            high += more
        slots = np.zeros(2 * (high - low), dtype=np.int32)
        for half in range(2):
            start = half * (high - low) + first - low
            slots[start : start + self._span] = self.slots[half * self._span : (half + 1) * self._span]
        self.origin, self._span, self.slots = low, high - low, slots

    def _assign_firsts(self, ends: tuple[int, int]) -> None:
        """Assigns an array of the cache to each of these first words."""
        known = self.firsts.tolist()
        for word in ends:
            if word not in known:
                # The array that is free, or that this batch does not need.
                place = 0 if known[0] not in ends and known[0] != known[1] else 1
                known[place] = self.firsts[place] = word
                self.slots[place * self._span : (place + 1) * self._span] = 0


@kernel
def _mix(first: np.int64, second: np.int64, nulls: np.int64) -> np.uint64:
    return mix_pair(np.uint64(first) ^ (np.uint64(nulls) << np.uint64(62)), np.uint64(second))


@kernel
def _nulls(row: int, first_valid: NDArray[np.uint8], second_valid: NDArray[np.uint8]) -> np.int64:
    """Returns a number that shows which words of the pair in a row are null: bit 0 for the first word, bit 1 for the
    second.
    """
    nulls = np.int64(0)
    if first_valid.shape[0] > 0 and not first_valid[row]:
        nulls += 1
    if second_valid.shape[0] > 0 and not second_valid[row]:
        nulls += 2
    return nulls


@kernel
def _mix_all(
    first: NDArray[np.int64],
    first_valid: NDArray[np.uint8],
    second: NDArray[np.int64],
    second_valid: NDArray[np.uint8],
    hashes: NDArray[np.uint64],
) -> None:
    for i in range(first.shape[0]):
        nulls = _nulls(i, first_valid, second_valid)
        a = np.int64(0) if nulls & 1 else first[i]
        b = np.int64(0) if nulls & 2 else second[i]
        hashes[i] = _mix(a, b, nulls)


@kernel
def _fill(
    table: NDArray[np.int64],
    first: NDArray[np.int64],
    first_valid: NDArray[np.uint8],
    second: NDArray[np.int64],
    second_valid: NDArray[np.uint8],
    rows: NDArray[np.int32],
    first_slot: np.int64,
) -> bool:
    entries = table.shape[0] // 4
    for i in range(rows.shape[0]):
        row = rows[i]
        nulls = _nulls(row, first_valid, second_valid)
        a = np.int64(0) if nulls & 1 else first[row]
        b = np.int64(0) if nulls & 2 else second[row]
        at = 4 * home_of(_mix(a, b, nulls), entries)
        while table[at + 3] != 0:
            if table[at] == a and table[at + 1] == b and table[at + 2] == nulls:
                return False
            at = 4 * next_entry(at >> 2, entries)
        table[at] = a
        table[at + 1] = b
        table[at + 2] = nulls
        table[at + 3] = first_slot + row + 1
    return True


@kernel
def _rehash(old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
    entries = new.shape[0] // 4
    for position in range(0, old.shape[0], 4):
        if old[position + 3] != 0:
            at = 4 * home_of(_mix(old[position], old[position + 1], old[position + 2]), entries)
            while new[at + 3] != 0:
                at = 4 * next_entry(at >> 2, entries)
            for j in range(4):
                new[at + j] = old[position + j]


@kernel
def _dense_place(
    dense: NDArray[np.int32], dense_firsts: NDArray[np.int64], origin: np.uint64, first: np.int64, second: np.int64
) -> np.int64:
    """Returns the index of a pair in the cache arrays, or -1 if they do not cover it."""
    span = dense.shape[0] // 2
    place = np.uint64(second) - origin
    if place >= np.uint64(span):
        return np.int64(-1)
    if first == dense_firsts[0]:
        return np.int64(place)
    return np.int64(place) + span if first == dense_firsts[1] else np.int64(-1)


@kernel
def _prefetch_entry(
    dense: NDArray[np.int32],
    dense_firsts: NDArray[np.int64],
    origin: np.uint64,
    table: NDArray[np.int64],
    first: np.int64,
    second: np.int64,
    nulls: np.int64,
) -> np.int64:
    """Prefetches the cache lines for looking up a pair.

    Returns its home in the hash table, or -1 - index if the cache arrays have its slot.
    """
    place = _dense_place(dense, dense_firsts, origin, first, second)
    if place >= 0 and dense[place] != 0:
        return np.int64(-1) - place
    home = 4 * home_of(_mix(first, second, nulls), table.shape[0] // 4)
    prefetch(table, home)
    prefetch(table, home + 4)
    return home


@kernel
def _upsert(
    dense: NDArray[np.int32],
    dense_firsts: NDArray[np.int64],
    dense_found: NDArray[np.int64],
    origin: np.uint64,
    table: NDArray[np.int64],
    seen: NDArray[np.uint64],
    homes: NDArray[np.int64],
    first: NDArray[np.int64],
    first_valid: NDArray[np.uint8],
    second: NDArray[np.int64],
    second_valid: NDArray[np.uint8],
    slots: NDArray[np.int32],
    first_rows: NDArray[np.int32],
    new_rows: NDArray[np.int32],
    counters: NDArray[np.int64],
) -> None:
    """Looks up the pairs of a batch, and adds new ones.

    `dense` is empty if the cache arrays do not help. Counts the rows that are found there in `dense_found`.
    """
    entries = table.shape[0] // 4
    size_max = keys_max(entries, 4)
    row, size, firsts, new = counters[0], counters[1], counters[2], counters[3]
    rows, found = first.shape[0], np.int64(0)
    for i in range(row, min(row + AHEAD_ROWS, rows)):
        nulls = _nulls(i, first_valid, second_valid)
        a = np.int64(0) if nulls & 1 else first[i]
        b = np.int64(0) if nulls & 2 else second[i]
        homes[i & AHEAD_MASK] = _prefetch_entry(dense, dense_firsts, origin, table, a, b, nulls)
    while row < rows:
        at = homes[row & AHEAD_MASK]
        ahead = row + AHEAD_ROWS
        if ahead < rows:
            nulls = _nulls(ahead, first_valid, second_valid)
            a = np.int64(0) if nulls & 1 else first[ahead]
            b = np.int64(0) if nulls & 2 else second[ahead]
            homes[row & AHEAD_MASK] = _prefetch_entry(dense, dense_firsts, origin, table, a, b, nulls)
        if at < 0:
            meta = np.int64(dense[-1 - at])
            found += 1
        else:
            nulls = _nulls(row, first_valid, second_valid)
            a = np.int64(0) if nulls & 1 else first[row]
            b = np.int64(0) if nulls & 2 else second[row]
            while table[at + 3] != 0 and (table[at] != a or table[at + 1] != b or table[at + 2] != nulls):
                at = 4 * next_entry(at >> 2, entries)
            meta = table[at + 3]
            if meta == 0:
                if size >= size_max:
                    break
                table[at] = a
                table[at + 1] = b
                table[at + 2] = nulls
                size += 1
                table[at + 3] = meta = size
                new_rows[new] = row
                new += 1
            place = _dense_place(dense, dense_firsts, origin, a, b)
            if place >= 0:
                dense[place] = meta
        slots[row] = meta - 1
        first_rows[firsts] = row
        firsts += mark_seen(seen, meta - 1)
        row += 1
    dense_found[0] += found
    counters[0], counters[1], counters[2], counters[3] = row, size, firsts, new
