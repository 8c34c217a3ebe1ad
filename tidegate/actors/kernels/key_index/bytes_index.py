"""Index of keys that are strings of bytes: one string column, or several columns encoded into rows.

An entry holds the hash (`entries.py` has the layout); the keys' bytes lie one behind the other in an arena,
in slot order. Two keys are equal when their bytes are: an equal hash alone never is enough. Null has an entry
outside the table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.actors.kernels.columns import Strings
from tidegate.actors.kernels.jit import kernel, load64, prefetch
from tidegate.actors.kernels.key_index.entries import (
    CAPACITY_MIN,
    SLOTS_MAX,
    Progress,
    Upserted,
    bitmap_of,
    capacity_for,
    enlarged,
    forget,
    keys_max,
    meet,
    take_null,
)
from tidegate.actors.kernels.key_index.filling import spread

_BLOCK_ROWS = 16
_ARENA_BYTES_MIN = 1 << 14


class BytesIndex:
    """Open-addressing table of byte strings → slots 0, 1, 2, … in order of first appearance."""

    __slots__ = ("_arena", "_met", "_null", "_offsets", "_shift", "_table", "size")

    def __init__(self) -> None:
        self.size = 0
        self._table = np.zeros(2 * CAPACITY_MIN, dtype=np.int64)
        self._shift = np.uint64(64 - CAPACITY_MIN.bit_length() + 1)
        self._null = np.zeros(2, dtype=np.int64)
        self._met = bitmap_of(CAPACITY_MIN // 2)
        self._arena = np.empty(_ARENA_BYTES_MIN, dtype=np.uint8)
        self._offsets = np.zeros(CAPACITY_MIN // 2 + 1, dtype=np.int64)

    @property
    def size_bytes(self) -> int:
        """Bytes of the table, and of what belongs to it."""
        return self._table.nbytes + self._met.nbytes + self._arena.nbytes + self._offsets.nbytes

    def upsert(self, keys: Strings, hashes: NDArray[np.uint64]) -> Upserted:
        """Slots of a batch of keys.

        Keys that are not known yet get one. `hashes` is any function of the keys.
        """
        progress = Progress(len(hashes), self.size)
        while True:
            _upsert(
                self._table,
                self._shift,
                self._null,
                self._met,
                self._offsets,
                self._arena,
                hashes,
                keys.offsets,
                keys.data,
                keys.valid,
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
            self._make_room(keys, int(progress.counters[0]))

    def fill(self, keys: Strings, hashes: NDArray[np.uint64], keys_to_come: int = 0) -> bool:
        """Give the next slots to many keys at once, in their order; so many more follow. `hashes` as of `upsert`.

        False if a key comes twice or was known: then the index is of no use any more.
        """
        rows = len(hashes)
        if 4 * (self.size + rows + keys_to_come) > len(self._table):
            self._grow(capacity_for(self.size + rows + keys_to_come))
        if not take_null(self._null, self.size, keys.valid):
            return False
        used_bytes = int(self._offsets[self.size])
        added_bytes = int(keys.offsets[rows] - keys.offsets[0])
        if used_bytes + added_bytes > len(self._arena):
            # Those to come are taken to be as long: that spares a copy of everything for each batch.
            to_come_bytes = added_bytes * keys_to_come // max(rows, 1)
            self._arena = enlarged(self._arena, used_bytes, used_bytes + added_bytes + to_come_bytes)
        _append(self._offsets, self._arena, self.size, keys.offsets, keys.data, keys.valid)
        ordered = spread(hashes.view(np.int64), hashes, keys.valid, self._table.nbytes)
        slots = (self._offsets, self._arena, np.int64(self.size))
        filled = _fill(self._table, self._shift, *slots, ordered.words, ordered.rows)
        self.size += rows
        return bool(filled)

    def _make_room(self, keys: Strings, row: int) -> None:
        """Grow what is too small for the key of `row`: the arena, or else the table."""
        used_bytes = int(self._offsets[self.size])
        needed_bytes = used_bytes + int(keys.offsets[row + 1] - keys.offsets[row])
        if needed_bytes > len(self._arena):
            self._arena = enlarged(self._arena, used_bytes, max(needed_bytes, 2 * len(self._arena)))
        else:
            self._grow(len(self._table))

    def _grow(self, capacity: int) -> None:
        assert self.size < SLOTS_MAX, f"{self.size} keys in one subtask: raise the parallelism"
        table = np.zeros(2 * capacity, dtype=np.int64)
        self._shift = np.uint64(64 - capacity.bit_length() + 1)
        _rehash(self._table, table, self._shift)
        self._table = table
        self._met = enlarged(self._met, len(self._met), len(table) // 256 + 1)
        self._offsets = enlarged(self._offsets, self.size + 1, len(table) // 4 + 1)


@kernel
def _rehash(old: NDArray[np.int64], new: NDArray[np.int64], shift: np.uint64) -> None:
    mask = new.shape[0] // 2 - 1
    for position in range(0, old.shape[0], 2):
        if old[position + 1] != 0:
            home = np.int64(np.uint64(old[position]) >> shift)
            while new[2 * home + 1] != 0:
                home = (home + 1) & mask
            new[2 * home] = old[position]
            new[2 * home + 1] = old[position + 1]


@kernel
def _equal(a: NDArray[np.uint8], a_start: int, b: NDArray[np.uint8], b_start: int, length: int) -> bool:
    position = 0
    while position + 8 <= length:
        if load64(a, a_start + position) != load64(b, b_start + position):
            return False
        position += 8
    while position < length:
        if a[a_start + position] != b[b_start + position]:
            return False
        position += 1
    return True


@kernel
def _append(
    arena_offsets: NDArray[np.int64],
    arena: NDArray[np.uint8],
    size: int,
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    valid: NDArray[np.uint8],
) -> None:
    masked = valid.shape[0] > 0
    for i in range(offsets.shape[0] - 1):
        used = arena_offsets[size + i]
        length = offsets[i + 1] - offsets[i]
        if masked and not valid[i]:
            length = np.int64(0)
        for j in range(length):
            arena[used + j] = data[offsets[i] + j]
        arena_offsets[size + i + 1] = used + length


@kernel
def _fill(
    table: NDArray[np.int64],
    shift: np.uint64,
    arena_offsets: NDArray[np.int64],
    arena: NDArray[np.uint8],
    first_slot: np.int64,
    words: NDArray[np.int64],
    rows: NDArray[np.int32],
) -> bool:
    mask = table.shape[0] // 2 - 1
    for i in range(words.shape[0]):
        if i + _BLOCK_ROWS < words.shape[0]:
            prefetch(table, 2 * np.int64(np.uint64(words[i + _BLOCK_ROWS]) >> shift))
        word = words[i]
        slot = first_slot + rows[i]
        start = arena_offsets[slot]
        length = arena_offsets[slot + 1] - start
        home = np.int64(np.uint64(word) >> shift)
        while table[2 * home + 1] != 0:
            if table[2 * home] == word:
                known = arena_offsets[table[2 * home + 1] - 1]
                known_length = arena_offsets[table[2 * home + 1]] - known
                if known_length == length and _equal(arena, known, arena, start, length):
                    return False
            home = (home + 1) & mask
        table[2 * home] = word
        table[2 * home + 1] = slot + 1
    return True


@kernel
def _upsert(
    table: NDArray[np.int64],
    shift: np.uint64,
    null: NDArray[np.int64],
    met: NDArray[np.uint64],
    arena_offsets: NDArray[np.int64],
    arena: NDArray[np.uint8],
    hashes: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    valid: NDArray[np.uint8],
    slots: NDArray[np.int32],
    first_rows: NDArray[np.int32],
    new_rows: NDArray[np.int32],
    counters: NDArray[np.int64],
) -> None:
    mask = table.shape[0] // 2 - 1
    size_max = keys_max(table.shape[0], 2)
    masked = valid.shape[0] > 0
    row, size, first, new = counters[0], counters[1], counters[2], counters[3]
    rows = hashes.shape[0]
    full = False
    while row < rows and not full:
        stop = min(row + _BLOCK_ROWS, rows)
        for i in range(row, stop):
            prefetch(table, 2 * np.int64(hashes[i] >> shift))
        while row < stop:
            word = np.int64(hashes[row])
            start = offsets[row]
            length = offsets[row + 1] - start
            home = np.int64(hashes[row] >> shift)
            entries = table
            if masked and not valid[row]:
                entries = null
                home = np.int64(0)
                length = np.int64(0)
            else:
                while entries[2 * home + 1] != 0:
                    if entries[2 * home] == word:
                        slot = entries[2 * home + 1] - 1
                        known = arena_offsets[slot]
                        if arena_offsets[slot + 1] - known == length and _equal(arena, known, data, start, length):
                            break
                    home = (home + 1) & mask
            meta = entries[2 * home + 1]
            if meta == 0:
                used = arena_offsets[size]
                if size >= size_max or used + length > arena.shape[0]:
                    full = True
                    break
                for j in range(length):
                    arena[used + j] = data[start + j]
                entries[2 * home] = word
                size += 1
                arena_offsets[size] = used + length
                entries[2 * home + 1] = meta = size
                new_rows[new] = row
                new += 1
            slots[row] = meta - 1
            first_rows[first] = row
            first += meet(met, meta - 1)
            row += 1
    counters[0], counters[1], counters[2], counters[3] = row, size, first, new
