"""Index of keys of two words: a window's slice and a key, or any two columns of numbers, dates and times.

Both words lie in the entry itself, 32 bytes, so a probe touches one cache line. As bytes (`bytes_index.py`) such keys
would have to be encoded, hashed and compared in an arena, which costs a cache miss more and twice the time. An entry is
the two words, which of them are null (their words are 0 then), and slot + 1, which is 0 when it is free. Pairs that
come again and again close together are found in arrays in front of the table (`near_pairs.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import NO_MASK, Words
from tidegate.state.kernels.jit import kernel, prefetch
from tidegate.state.key_index.entries import (
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
)
from tidegate.state.key_index.filling import spread
from tidegate.state.key_index.mixing import WORD_MASK, mix_pair
from tidegate.state.key_index.near_pairs import NearPairs

_ENTRY = 4
_NO_SLOTS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class PairIndex:
    """Open-addressing table of pairs of int64 words → slots 0, 1, 2, … in order of first appearance."""

    __slots__ = ("_homes", "_met", "_near", "_table", "size")

    def __init__(self) -> None:
        self.size = 0
        self._table = np.zeros(_ENTRY * CAPACITY_MIN, dtype=np.int64)
        self._met = bitmap_of(keys_max(CAPACITY_MIN, _ENTRY))
        self._homes = np.empty(AHEAD_ROWS, dtype=np.int64)
        self._near = NearPairs()

    @property
    def size_bytes(self) -> int:
        """Bytes of the table, and of what belongs to it."""
        return self._table.nbytes + self._met.nbytes + self._near.slots.nbytes

    def upsert(self, first: Words, second: Words) -> Upserted:
        """Slots of a batch of keys; keys that are not known yet get one."""
        progress = Progress(len(first.words), self.size)
        near = self._near
        near_slots = near.slots if near.look_at(first, second, self.size) else _NO_SLOTS
        while True:
            _upsert(
                near_slots,
                near.firsts,
                near.found,
                np.uint64(near.origin & WORD_MASK),
                self._table,
                self._met,
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
                forget(self._met, result.slots, result.first_rows)
                return result
            self._grow(capacity_after(len(self._table) // _ENTRY, _ENTRY))

    def fill(self, first: Words, second: Words, keys_to_come: int = 0) -> bool:
        """Give the next slots to many keys at once, in their order; so many more follow.

        False if a key comes twice or was known: then the index is of no use any more.
        """
        keys = self.size + len(first.words) + keys_to_come
        if keys > keys_max(len(self._table) // _ENTRY, _ENTRY):
            self._grow(capacity_for(keys, _ENTRY))
        hashes = np.empty(len(first.words), dtype=np.uint64)
        words = first.words, first.valid, second.words, second.valid
        _mix_all(*words, hashes)
        ordered = spread(first.words, hashes, NO_MASK, self._table.nbytes)
        del hashes
        filled = _fill(self._table, *words, ordered.rows, np.int64(self.size))
        self.size += len(first.words)
        return bool(filled)

    def _grow(self, capacity: int) -> None:
        table = np.zeros(_ENTRY * capacity, dtype=np.int64)
        _rehash(self._table, table)
        self._table = table
        self._met = enlarged(self._met, len(self._met), keys_max(capacity, _ENTRY) // 64 + 1)


@kernel
def _mix(first: np.int64, second: np.int64, nulls: np.int64) -> np.uint64:
    return mix_pair(np.uint64(first) ^ (np.uint64(nulls) << np.uint64(62)), np.uint64(second))


@kernel
def _nulls(row: int, first_valid: NDArray[np.uint8], second_valid: NDArray[np.uint8]) -> np.int64:
    """Bit 0: the first word is null. Bit 1: the second one is."""
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
            at = 4 * following(at >> 2, entries)
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
                at = 4 * following(at >> 2, entries)
            for j in range(4):
                new[at + j] = old[position + j]


@kernel
def _near_place(
    near: NDArray[np.int32], near_firsts: NDArray[np.int64], origin: np.uint64, first: np.int64, second: np.int64
) -> np.int64:
    """Where the arrays have the slot of a pair of words; -1: nowhere."""
    span = near.shape[0] // 2
    place = np.uint64(second) - origin
    if place >= np.uint64(span):
        return np.int64(-1)
    if first == near_firsts[0]:
        return np.int64(place)
    return np.int64(place) + span if first == near_firsts[1] else np.int64(-1)


@kernel
def _ask(
    near: NDArray[np.int32],
    near_firsts: NDArray[np.int64],
    origin: np.uint64,
    table: NDArray[np.int64],
    first: np.int64,
    second: np.int64,
    nulls: np.int64,
) -> np.int64:
    """The home of a pair, whose cache lines are asked for; if the arrays know its slot, -1 less its place in them."""
    place = _near_place(near, near_firsts, origin, first, second)
    if place >= 0 and near[place] != 0:
        return np.int64(-1) - place
    home = 4 * home_of(_mix(first, second, nulls), table.shape[0] // 4)
    prefetch(table, home)
    prefetch(table, home + 4)
    return home


@kernel
def _upsert(
    near: NDArray[np.int32],
    near_firsts: NDArray[np.int64],
    near_found: NDArray[np.int64],
    origin: np.uint64,
    table: NDArray[np.int64],
    met: NDArray[np.uint64],
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
    """`near` is empty where a batch has nulls. Rows whose slots it knows are added to `near_found`."""
    entries = table.shape[0] // 4
    size_max = keys_max(entries, 4)
    row, size, firsts, new = counters[0], counters[1], counters[2], counters[3]
    rows, found = first.shape[0], np.int64(0)
    for i in range(row, min(row + AHEAD_ROWS, rows)):
        nulls = _nulls(i, first_valid, second_valid)
        a = np.int64(0) if nulls & 1 else first[i]
        b = np.int64(0) if nulls & 2 else second[i]
        homes[i & AHEAD_MASK] = _ask(near, near_firsts, origin, table, a, b, nulls)
    while row < rows:
        at = homes[row & AHEAD_MASK]
        ahead = row + AHEAD_ROWS
        if ahead < rows:
            nulls = _nulls(ahead, first_valid, second_valid)
            a = np.int64(0) if nulls & 1 else first[ahead]
            b = np.int64(0) if nulls & 2 else second[ahead]
            homes[row & AHEAD_MASK] = _ask(near, near_firsts, origin, table, a, b, nulls)
        if at < 0:
            meta = np.int64(near[-1 - at])
            found += 1
        else:
            nulls = _nulls(row, first_valid, second_valid)
            a = np.int64(0) if nulls & 1 else first[row]
            b = np.int64(0) if nulls & 2 else second[row]
            while table[at + 3] != 0 and (table[at] != a or table[at + 1] != b or table[at + 2] != nulls):
                at = 4 * following(at >> 2, entries)
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
            place = _near_place(near, near_firsts, origin, a, b)
            if place >= 0:
                near[place] = meta
        slots[row] = meta - 1
        first_rows[firsts] = row
        firsts += meet(met, meta - 1)
        row += 1
    near_found[0] += found
    counters[0], counters[1], counters[2], counters[3] = row, size, firsts, new
