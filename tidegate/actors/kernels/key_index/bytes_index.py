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
_ARENA_BYTES_MIN = 1 << 14


class BytesIndex:
    """Open-addressing table of byte strings → slots 0, 1, 2, … in order of first appearance."""

    __slots__ = ("_arena", "_met", "_null", "_offsets", "_table", "size")

    def __init__(self) -> None:
        self.size = 0
        self._table = np.zeros(_ENTRY * CAPACITY_MIN, dtype=np.int64)
        self._null = np.zeros(2, dtype=np.int64)
        self._met = bitmap_of(keys_max(CAPACITY_MIN, _ENTRY))
        self._arena = np.empty(_ARENA_BYTES_MIN, dtype=np.uint8)
        self._offsets = np.zeros(keys_max(CAPACITY_MIN, _ENTRY) + 1, dtype=np.int64)

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
        keys_in_all = self.size + rows + keys_to_come
        if keys_in_all > keys_max(len(self._table) // _ENTRY, _ENTRY):
            self._grow(capacity_for(keys_in_all, _ENTRY))
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
        filled = _fill(self._table, *slots, ordered.words, ordered.rows)
        self.size += rows
        return bool(filled)

    def _make_room(self, keys: Strings, row: int) -> None:
        """Grow what is too small for the key of `row`: the arena, or else the table."""
        used_bytes = int(self._offsets[self.size])
        needed_bytes = used_bytes + int(keys.offsets[row + 1] - keys.offsets[row])
        if needed_bytes > len(self._arena):
            self._arena = enlarged(self._arena, used_bytes, max(needed_bytes, 2 * len(self._arena)))
        else:
            self._grow(capacity_after(len(self._table) // _ENTRY, _ENTRY))

    def _grow(self, capacity: int) -> None:
        table = np.zeros(_ENTRY * capacity, dtype=np.int64)
        _rehash(self._table, table)
        self._table = table
        self._met = enlarged(self._met, len(self._met), keys_max(capacity, _ENTRY) // 64 + 1)
        self._offsets = enlarged(self._offsets, self.size + 1, keys_max(capacity, _ENTRY) + 1)


@kernel
def _rehash(old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
    entries = new.shape[0] // 2
    for position in range(0, old.shape[0], 2):
        if old[position + 1] != 0:
            home = home_of(np.uint64(old[position]), entries)
            while new[2 * home + 1] != 0:
                home = following(home, entries)
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
    arena_offsets: NDArray[np.int64],
    arena: NDArray[np.uint8],
    first_slot: np.int64,
    words: NDArray[np.int64],
    rows: NDArray[np.int32],
) -> bool:
    entries = table.shape[0] // 2
    for i in range(words.shape[0]):
        if i + AHEAD_ROWS < words.shape[0]:
            prefetch(table, 2 * home_of(np.uint64(words[i + AHEAD_ROWS]), entries))
        word = words[i]
        slot = first_slot + rows[i]
        start = arena_offsets[slot]
        length = arena_offsets[slot + 1] - start
        home = home_of(np.uint64(word), entries)
        while table[2 * home + 1] != 0:
            if table[2 * home] == word:
                known = arena_offsets[table[2 * home + 1] - 1]
                known_length = arena_offsets[table[2 * home + 1]] - known
                if known_length == length and _equal(arena, known, arena, start, length):
                    return False
            home = following(home, entries)
        table[2 * home] = word
        table[2 * home + 1] = slot + 1
    return True


@kernel
def _upsert(
    table: NDArray[np.int64],
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
    entries = table.shape[0] // 2
    size_max = keys_max(entries, 2)
    masked = valid.shape[0] > 0
    row, size, first, new = counters[0], counters[1], counters[2], counters[3]
    rows = hashes.shape[0]
    for i in range(row, min(row + AHEAD_ROWS, rows)):
        prefetch(table, 2 * home_of(hashes[i], entries))
    while row < rows:
        if row + AHEAD_ROWS < rows:
            prefetch(table, 2 * home_of(hashes[row + AHEAD_ROWS], entries))
        word = np.int64(hashes[row])
        start = offsets[row]
        length = offsets[row + 1] - start
        home = home_of(hashes[row], entries)
        found_in = table
        if masked and not valid[row]:
            found_in = null
            home = np.int64(0)
            length = np.int64(0)
        else:
            while found_in[2 * home + 1] != 0:
                if found_in[2 * home] == word:
                    slot = found_in[2 * home + 1] - 1
                    known = arena_offsets[slot]
                    if arena_offsets[slot + 1] - known == length and _equal(arena, known, data, start, length):
                        break
                home = following(home, entries)
        meta = found_in[2 * home + 1]
        if meta == 0:
            used = arena_offsets[size]
            if size >= size_max or used + length > arena.shape[0]:
                break
            for j in range(length):
                arena[used + j] = data[start + j]
            found_in[2 * home] = word
            size += 1
            arena_offsets[size] = used + length
            found_in[2 * home + 1] = meta = size
            new_rows[new] = row
            new += 1
        slots[row] = meta - 1
        first_rows[first] = row
        first += meet(met, meta - 1)
        row += 1
    counters[0], counters[1], counters[2], counters[3] = row, size, first, new
