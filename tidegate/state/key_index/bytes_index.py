"""Index of keys that are strings of bytes: one string column, or several columns encoded into rows.

Most keys are short. So one of less than `SHORT_BYTES` lies in its entry, as two words: its bytes, and its length in the
highest one. A probe compares both, and touches nothing else. Of a longer key the entry has where it begins in an arena,
and the length, marked as `_LONG`; the bytes are compared only if the upper halves of the hashes are equal. An entry's
third word has that half, and slot + 1, which is 0 when it is free. Two keys are equal when their bytes are: an equal
hash alone never is enough. Null has an entry outside the table. `entries.py` has the rest of the layout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import Strings
from tidegate.state.kernels.jit import kernel, load64, prefetch
from tidegate.state.key_index.bytes_words import SHORT_BYTES, first_word, second_word
from tidegate.state.key_index.entries import (
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
from tidegate.state.key_index.filling import spread

_ENTRY = 3
"""Words of an entry."""
_ARENA_BYTES_MIN = 1 << 14
_ARENA_AHEAD = AHEAD_ROWS // 2
"""So many rows before its turn the bytes of a long key are asked for; its entry has come by then."""
_LONG = np.int64(-1 << 56)
"""In an entry's second word: the highest byte of a short key's is its length, and never this."""
_HALF = np.int64(32)
_SLOT = np.int64(0xFFFFFFFF)
"""The bits of the third word that are slot + 1."""


class BytesIndex:
    """Open-addressing table of byte strings → slots 0, 1, 2, … in order of first appearance."""

    __slots__ = ("_arena", "_met", "_null", "_table", "_used", "size")

    def __init__(self) -> None:
        self.size = 0
        self._table = np.zeros(_ENTRY * CAPACITY_MIN, dtype=np.int64)
        self._null = np.zeros(2, dtype=np.int64)
        self._met = bitmap_of(keys_max(CAPACITY_MIN, _ENTRY))
        self._arena = np.empty(0, dtype=np.uint8)
        self._used = np.zeros(1, dtype=np.int64)
        """Bytes of the arena that have keys."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the table, and of what belongs to it."""
        return self._table.nbytes + self._met.nbytes + self._arena.nbytes

    def upsert(self, keys: Strings, hashes: NDArray[np.uint64]) -> Upserted:
        """Slots of a batch of keys.

        Keys that are not known yet get one. `hashes` are those of `hash_keys`, or of any other function of the keys.
        """
        progress = Progress(len(hashes), self.size)
        while True:
            _upsert(
                self._table,
                self._null,
                self._met,
                self._arena,
                self._used,
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
        used_bytes = int(self._used[0])
        added_bytes = int(_long_bytes(keys.offsets, keys.valid))
        if used_bytes + added_bytes > len(self._arena):
            # Those to come are taken to be as long: that spares a copy of everything for each batch.
            to_come_bytes = added_bytes * keys_to_come // max(rows, 1)
            self._arena = enlarged(self._arena, used_bytes, used_bytes + added_bytes + to_come_bytes)
        places = np.empty(rows if added_bytes else 0, dtype=np.int64)
        if added_bytes:
            _append(self._arena, self._used, keys.offsets, keys.data, keys.valid, places)
        ordered = spread(hashes.view(np.int64), hashes, keys.valid, self._table.nbytes)
        slots = (self._arena, np.int64(self.size))
        filled = _fill(self._table, *slots, keys.offsets, keys.data, places, ordered.words, ordered.rows)
        self.size += rows
        return bool(filled)

    def _make_room(self, keys: Strings, row: int) -> None:
        """Grow what is too small for the key of `row`: the arena, or else the table."""
        entries = len(self._table) // _ENTRY
        if self.size >= keys_max(entries, _ENTRY):
            self._grow(capacity_after(entries, _ENTRY))
        else:
            used_bytes = int(self._used[0])
            needed_bytes = used_bytes + int(keys.offsets[row + 1] - keys.offsets[row])
            larger = max(needed_bytes, 2 * len(self._arena), _ARENA_BYTES_MIN)
            self._arena = enlarged(self._arena, used_bytes, larger)

    def _grow(self, capacity: int) -> None:
        table = np.zeros(_ENTRY * capacity, dtype=np.int64)
        _rehash(self._table, table)
        self._table = table
        self._met = enlarged(self._met, len(self._met), keys_max(capacity, _ENTRY) // 64 + 1)


@kernel
def _rehash(old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
    entries = new.shape[0] // 3
    for position in range(0, old.shape[0], 3):
        if old[position + 2] != 0:
            home = home_of(np.uint64(old[position + 2]), entries)
            while new[3 * home + 2] != 0:
                home = following(home, entries)
            new[3 * home] = old[position]
            new[3 * home + 1] = old[position + 1]
            new[3 * home + 2] = old[position + 2]


@kernel
def _equal(a: NDArray[np.uint8], a_start: np.int64, b: NDArray[np.uint8], b_start: np.int64, length: np.int64) -> bool:
    """Whether strings of so many bytes, at least eight, are equal."""
    position = np.int64(0)
    while position + 8 <= length:
        if load64(a, a_start + position) != load64(b, b_start + position):
            return False
        position += 8
    return bool(load64(a, a_start + length - 8) == load64(b, b_start + length - 8))


@kernel
def _long_bytes(offsets: NDArray[np.int64], valid: NDArray[np.uint8]) -> np.int64:
    """How many bytes of an arena the keys need."""
    masked = valid.shape[0] > 0
    found = np.int64(0)
    for i in range(offsets.shape[0] - 1):
        length = offsets[i + 1] - offsets[i]
        if length >= SHORT_BYTES and not (masked and not valid[i]):
            found += length
    return found


@kernel
def _find(
    table: NDArray[np.int64],
    arena: NDArray[np.uint8],
    hashed: np.uint64,
    data: NDArray[np.uint8],
    start: np.int64,
    length: np.int64,
) -> np.int64:
    """Where in the table the entry of a key begins, or the free one that it belongs into."""
    entries = table.shape[0] // 3
    home = home_of(hashed, entries)
    if length < SHORT_BYTES:
        first = first_word(data, start, length)
        second = second_word(data, start, length)
        while table[3 * home + 2] != 0 and (table[3 * home] != first or table[3 * home + 1] != second):
            home = following(home, entries)
    else:
        half = np.int64(hashed) >> _HALF
        second = _LONG | length
        while table[3 * home + 2] != 0 and (
            table[3 * home + 1] != second
            or table[3 * home + 2] >> _HALF != half
            or not _equal(arena, table[3 * home], data, start, length)
        ):
            home = following(home, entries)
    return np.int64(3 * home)


@kernel
def _keep(
    arena: NDArray[np.uint8], used: NDArray[np.int64], data: NDArray[np.uint8], start: np.int64, length: np.int64
) -> np.int64:
    """Put the bytes of a long key behind those that the arena has. Returns where they begin; 0 for a short key."""
    place = used[0]
    if length < SHORT_BYTES:
        return np.int64(0)
    for j in range(length):
        arena[place + j] = data[start + j]
    used[0] = place + length
    return np.int64(place)


@kernel
def _put(
    table: NDArray[np.int64],
    at: np.int64,
    slot: np.int64,
    hashed: np.uint64,
    data: NDArray[np.uint8],
    start: np.int64,
    length: np.int64,
    place: np.int64,
) -> None:
    """Put a key into a free entry. `place` is that of a long one in the arena."""
    if length < SHORT_BYTES:
        table[at] = first_word(data, start, length)
        table[at + 1] = second_word(data, start, length)
    else:
        table[at] = place
        table[at + 1] = _LONG | length
    table[at + 2] = (np.int64(hashed) & ~_SLOT) | (slot + 1)


@kernel
def _append(
    arena: NDArray[np.uint8],
    used: NDArray[np.int64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    valid: NDArray[np.uint8],
    places: NDArray[np.int64],
) -> None:
    """Put the long keys of a batch into the arena, in their order; and where each begins."""
    masked = valid.shape[0] > 0
    for i in range(places.shape[0]):
        if not (masked and not valid[i]):
            places[i] = _keep(arena, used, data, offsets[i], offsets[i + 1] - offsets[i])


@kernel
def _fill(
    table: NDArray[np.int64],
    arena: NDArray[np.uint8],
    first_slot: np.int64,
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    places: NDArray[np.int64],
    words: NDArray[np.int64],
    rows: NDArray[np.int32],
) -> bool:
    entries = table.shape[0] // 3
    for i in range(words.shape[0]):
        if i + AHEAD_ROWS < words.shape[0]:
            prefetch(table, 3 * home_of(np.uint64(words[i + AHEAD_ROWS]), entries))
        hashed, row = np.uint64(words[i]), rows[i]
        start = offsets[row]
        length = offsets[row + 1] - start
        at = _find(table, arena, hashed, data, start, length)
        if table[at + 2] != 0:
            return False
        place = np.int64(0) if length < SHORT_BYTES else places[row]
        _put(table, at, first_slot + row, hashed, data, start, length, place)
    return True


@kernel
def _upsert(
    table: NDArray[np.int64],
    null: NDArray[np.int64],
    met: NDArray[np.uint64],
    arena: NDArray[np.uint8],
    used: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    valid: NDArray[np.uint8],
    slots: NDArray[np.int32],
    first_rows: NDArray[np.int32],
    new_rows: NDArray[np.int32],
    counters: NDArray[np.int64],
) -> None:
    entries = table.shape[0] // 3
    size_max = keys_max(entries, 3)
    masked = valid.shape[0] > 0
    row, size, first, new = counters[0], counters[1], counters[2], counters[3]
    rows = hashes.shape[0]
    for i in range(row, min(row + AHEAD_ROWS, rows)):
        _ask(table, 3 * home_of(hashes[i], entries))
    while row < rows:
        if row + AHEAD_ROWS < rows:
            _ask(table, 3 * home_of(hashes[row + AHEAD_ROWS], entries))
            soon = row + _ARENA_AHEAD
            if offsets[soon + 1] - offsets[soon] >= SHORT_BYTES:
                _ask_for_bytes(table, 3 * home_of(hashes[soon], entries), arena)
        start = offsets[row]
        length = offsets[row + 1] - start
        is_null = masked and not valid[row]
        at = np.int64(0)
        if is_null:
            found = null[1]
        else:
            at = _find(table, arena, hashes[row], data, start, length)
            found = table[at + 2] & _SLOT
        if found == 0:
            if size >= size_max or (not is_null and length >= SHORT_BYTES and used[0] + length > arena.shape[0]):
                break
            if is_null:
                null[1] = size + 1
            else:
                place = _keep(arena, used, data, start, length)
                _put(table, at, size, hashes[row], data, start, length, place)
            size += 1
            found = size
            new_rows[new] = row
            new += 1
        slots[row] = found - 1
        first_rows[first] = row
        first += meet(met, found - 1)
        row += 1
    counters[0], counters[1], counters[2], counters[3] = row, size, first, new


@kernel
def _ask(table: NDArray[np.int64], at: np.int64) -> None:
    """Ask for an entry and the one behind it, where the probe goes on: they lie on two cache lines at most."""
    prefetch(table, at)
    prefetch(table, at + 5)


@kernel
def _ask_for_bytes(table: NDArray[np.int64], at: np.int64, arena: NDArray[np.uint8]) -> None:
    """Ask for the bytes of the long key that an entry has, if it does."""
    if table[at + 1] < 0:
        prefetch(arena, table[at])
