"""Index of keys that are byte strings: one string column, or several columns encoded into rows.

Most keys are short. A key with less than `SHORT_BYTES` is stored in its entry as two words: its first eight bytes, and
the remaining bytes with the length in the highest byte, and zeros between them. Different bytes or lengths give
different words. A probe compares both words and accesses nothing else. For a longer key the entry stores its position
in an arena and its length, marked as `_LONG`; the bytes are compared only if the upper halves of the hashes are equal.
The third word stores that half of the hash, and slot + 1, which is 0 if the entry is free. Keys are equal if their
bytes are equal; an equal hash alone is never enough. Null has an entry outside the table. `hash_table.py` describes the
rest of the layout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import Strings
from tidegate.state.kernels.hashing import hash_string
from tidegate.state.kernels.jit import kernel, load64, prefetch
from tidegate.state.key_index.hash_table import (
    AHEAD_ROWS,
    CAPACITY_MIN,
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
    store_null,
)

SHORT_BYTES = 16
_ENTRY = 3
"""How many words an entry has."""
_ARENA_BYTES_MIN = 1 << 14
_ARENA_AHEAD = AHEAD_ROWS // 2
"""The bytes of a long key are prefetched this many rows ahead; its entry is in the cache by then."""
_LONG = np.int64(-1 << 56)
"""Marks long keys in an entry's second word. The highest byte of a short key's word is its length, never this."""
_HALF = np.int64(32)
_SLOT = np.int64(0xFFFFFFFF)
"""The bits of the third word that store slot + 1."""
_ZERO, _ONE, _THREE, _WORD = (np.uint64(number) for number in (0, 1, 3, 8))
_LENGTH = np.uint64(56)


class BytesIndex:
    """A hash table (open addressing) that maps byte strings to slots 0, 1, 2, … in the order in which they first
    appear.
    """

    __slots__ = ("_arena", "_null", "_seen", "_table", "_used", "size")

    def __init__(self) -> None:
        self.size = 0
        self._table = np.zeros(_ENTRY * CAPACITY_MIN, dtype=np.int64)
        self._null = np.zeros(2, dtype=np.int64)
        self._seen = seen_bitmap(keys_max(CAPACITY_MIN, _ENTRY))
        self._arena = np.empty(0, dtype=np.uint8)
        self._used = np.zeros(1, dtype=np.int64)
        """How many bytes of the arena are in use."""

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of the table, the bitmap and the arena (the memory for the bytes of long keys)."""
        return self._table.nbytes + self._seen.nbytes + self._arena.nbytes

    def upsert(self, keys: Strings, hashes: NDArray[np.uint64]) -> Upserted:
        """Returns the slots of a batch of keys, with new slots for new keys.

        `hashes` are the result of `hash_keys`, or of any other function of the keys.
        """
        progress = Progress(len(hashes), self.size)
        while True:
            _upsert(
                self._table,
                self._null,
                self._seen,
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
                clear_seen(self._seen, result.slots, result.first_rows)
                return result
            self._enlarge(keys, int(progress.counters[0]))

    def fill(self, keys: Strings, hashes: NDArray[np.uint64], keys_to_come: int = 0) -> bool:
        """Assigns the next slots to many new keys, in their order, and reserves memory for `keys_to_come` more keys.

        Returns False if a key occurs twice or already existed. Then the index must not be used any more.
        """
        rows = len(hashes)
        keys_in_all = self.size + rows + keys_to_come
        if keys_in_all > keys_max(len(self._table) // _ENTRY, _ENTRY):
            self._grow(capacity_for(keys_in_all, _ENTRY))
        if not store_null(self._null, self.size, keys.valid):
            return False
        used_bytes = int(self._used[0])
        added_bytes = int(_long_bytes(keys.offsets, keys.valid))
        if used_bytes + added_bytes > len(self._arena):
            # Assumes that the keys to come are as long, so that the arena is not copied for each batch.
            to_come_bytes = added_bytes * keys_to_come // max(rows, 1)
            self._arena = extended(self._arena, used_bytes, used_bytes + added_bytes + to_come_bytes)
        places = np.empty(rows if added_bytes else 0, dtype=np.int64)
        if added_bytes:
            _append(self._arena, self._used, keys.offsets, keys.data, keys.valid, places)
        ordered = by_home(hashes.view(np.int64), hashes, keys.valid, self._table.nbytes)
        slots = (self._arena, np.int64(self.size))
        filled = _fill(self._table, *slots, keys.offsets, keys.data, places, ordered.words, ordered.rows)
        self.size += rows
        return bool(filled)

    def _enlarge(self, keys: Strings, row: int) -> None:
        """Enlarges the hash table or the arena (the memory for long keys), whichever is too small for the key in row
        `row`.
        """
        entries = len(self._table) // _ENTRY
        if self.size >= keys_max(entries, _ENTRY):
            self._grow(capacity_after(entries, _ENTRY))
        else:
            used_bytes = int(self._used[0])
            needed_bytes = used_bytes + int(keys.offsets[row + 1] - keys.offsets[row])
            larger = max(needed_bytes, 2 * len(self._arena), _ARENA_BYTES_MIN)
            self._arena = extended(self._arena, used_bytes, larger)

    def _grow(self, capacity: int) -> None:
        table = np.zeros(_ENTRY * capacity, dtype=np.int64)
        _rehash(self._table, table)
        self._table = table
        self._seen = extended(self._seen, len(self._seen), keys_max(capacity, _ENTRY) // 64 + 1)


@kernel
def _rehash(old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
    entries = new.shape[0] // 3
    for position in range(0, old.shape[0], 3):
        if old[position + 2] != 0:
            home = home_of(np.uint64(old[position + 2]), entries)
            while new[3 * home + 2] != 0:
                home = next_entry(home, entries)
            new[3 * home] = old[position]
            new[3 * home + 1] = old[position + 1]
            new[3 * home + 2] = old[position + 2]


@kernel
def _equal(a: NDArray[np.uint8], a_start: np.int64, b: NDArray[np.uint8], b_start: np.int64, length: np.int64) -> bool:
    """Returns whether two byte strings of the same length, at least eight, are equal.

    One begins at `a[a_start]`, the other at `b[b_start]`.
    """
    position = np.int64(0)
    while position + 8 <= length:
        if load64(a, a_start + position) != load64(b, b_start + position):
            return False
        position += 8
    return bool(load64(a, a_start + length - 8) == load64(b, b_start + length - 8))


@kernel
def _long_bytes(offsets: NDArray[np.int64], valid: NDArray[np.uint8]) -> np.int64:
    """Returns how many bytes the long keys of a batch need in the arena."""
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
    """Returns the index of a key's entry in the hash table, or of the free entry where the key has to be stored."""
    entries = table.shape[0] // 3
    home = home_of(hashed, entries)
    if length < SHORT_BYTES:
        first = first_word(data, start, length)
        second = second_word(data, start, length)
        while table[3 * home + 2] != 0 and (table[3 * home] != first or table[3 * home + 1] != second):
            home = next_entry(home, entries)
    else:
        half = np.int64(hashed) >> _HALF
        second = _LONG | length
        while table[3 * home + 2] != 0 and (
            table[3 * home + 1] != second
            or table[3 * home + 2] >> _HALF != half
            or not _equal(arena, table[3 * home], data, start, length)
        ):
            home = next_entry(home, entries)
    return np.int64(3 * home)


@kernel
def _keep(
    arena: NDArray[np.uint8], used: NDArray[np.int64], data: NDArray[np.uint8], start: np.int64, length: np.int64
) -> np.int64:
    """Appends the bytes of a long key to the arena. Returns their position, or 0 for a short key, whose bytes fit into
    its entry.
    """
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
    """Stores a key in a free entry of the hash table. `place` is the position of a long key in the arena."""
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
    """Appends the long keys of a batch to the arena, and stores the position of each in `places`."""
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
    seen: NDArray[np.uint64],
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
        _prefetch_entry(table, 3 * home_of(hashes[i], entries))
    while row < rows:
        if row + AHEAD_ROWS < rows:
            _prefetch_entry(table, 3 * home_of(hashes[row + AHEAD_ROWS], entries))
            soon = row + _ARENA_AHEAD
            if offsets[soon + 1] - offsets[soon] >= SHORT_BYTES:
                _prefetch_bytes(table, 3 * home_of(hashes[soon], entries), arena)
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
        first += mark_seen(seen, found - 1)
        row += 1
    counters[0], counters[1], counters[2], counters[3] = row, size, first, new


@kernel
def _prefetch_entry(table: NDArray[np.int64], at: np.int64) -> None:
    """Prefetches a hash table entry and the entry after it, which is probed next. Both are in at most two cache
    lines.
    """
    prefetch(table, at)
    prefetch(table, at + 5)


@kernel
def _prefetch_bytes(table: NDArray[np.int64], at: np.int64, arena: NDArray[np.uint8]) -> None:
    """Prefetches the bytes of the long key to which a hash table entry refers, if there is one."""
    if table[at + 1] < 0:
        prefetch(arena, table[at])


def hash_keys(keys: Strings) -> NDArray[np.uint64]:
    """Returns a hash of each key for use in a key index.

    The hash is not stored in any file, and is cheaper to compute than the hash for key groups.
    """
    hashes = np.empty(len(keys.offsets) - 1, dtype=np.uint64)
    _hash_keys(keys.offsets, keys.data, keys.valid, hashes)
    return hashes


@kernel
def _hash_keys(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], valid: NDArray[np.uint8], hashes: NDArray[np.uint64]
) -> None:
    masked = valid.shape[0] > 0
    for i in range(hashes.shape[0]):
        start = offsets[i]
        length = offsets[i + 1] - start
        if masked and not valid[i]:
            hashes[i] = _ZERO
        elif length < SHORT_BYTES:
            first, second = first_word(data, start, length), second_word(data, start, length)
            hashes[i] = mix_pair(np.uint64(first), np.uint64(second))
        else:
            hashes[i] = hash_string(data, start, start + length, _ZERO)


@kernel
def first_word(data: NDArray[np.uint8], start: np.int64, length: np.int64) -> np.int64:
    """Returns the first of the two 64-bit words that contain a key of less than `SHORT_BYTES` bytes."""
    if start + 16 > data.shape[0]:
        return np.int64(_read(data, start, min(length, np.int64(8))))
    return np.int64(load64(data, start) & (_below(length) | _if_eight(length)))


@kernel
def second_word(data: NDArray[np.uint8], start: np.int64, length: np.int64) -> np.int64:
    """Returns the second of the two 64-bit words that contain a key of less than `SHORT_BYTES` bytes."""
    if start + 16 > data.shape[0]:
        word = _read(data, start + 8, length - 8)
    else:
        word = load64(data, start + 8) & _below(length) & _if_eight(length)
    return np.int64(word | (np.uint64(length) << _LENGTH))


@kernel
def _below(length: np.int64) -> np.uint64:
    """Returns a bit mask of the lowest `length` modulo eight bytes of a word."""
    return (_ONE << (_WORD * np.uint64(length & 7))) - _ONE


@kernel
def _if_eight(length: np.int64) -> np.uint64:
    """Returns a word with all bits set if `length` is from 8 to 15, otherwise 0.

    The code has no branch, because processors would often mispredict it.
    """
    return _ZERO - (np.uint64(length) >> _THREE)


@kernel
def _read(data: NDArray[np.uint8], start: np.int64, length: np.int64) -> np.uint64:
    """Returns `length` bytes from `start` on as a 64-bit word. A negative length means no bytes."""
    word = _ZERO
    for i in range(length):
        word |= np.uint64(data[start + i]) << np.uint64(8 * i)
    return word
