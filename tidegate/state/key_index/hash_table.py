"""The hash table of all key indexes: layout of an entry, hash, prefetching, bulk order, and the upsert result.

Layout. An entry is two to four words: the key itself if it is short, and in the last word slot + 1, which is 0 when the
entry is free. A probe therefore touches one cache line, rarely two. The *high* bits of the hash choose an entry's home
(the low bits choose the key group and are similar within a subtask), so growing a table only reads and writes forwards.
A table has any number of entries (`home_of`) and grows by half. At most 9/16 of the entries are used, in small tables a
quarter (`keys_max`). Probing is linear. A bitmap over slots stores which keys the current batch has contained already;
it fits into the cache and is cleared through the rows that set its bits.

Prefetching. An index is bound by memory latency. The home of a row is therefore computed, and its cache line and the
next one prefetched, `AHEAD_ROWS` rows before the row is looked up, so that the misses of many rows overlap.

Hash. `mix` is two rounds of shift, xor and multiply, as in the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), with the multipliers of "Mix13" (David Stafford, "Better bit
mixing", 2011). The shifts differ: a home needs only the high half of the hash, so the last step moves the low half up,
while the finalizer moves the high half down. The hash is not part of any format and may change.

Bulk order. A restore fills an index with many keys at once. Keys in random order would miss the cache at each entry, so
`by_home` first sorts them coarsely by home, and parts of the table that fit into the cache are filled one after the
other. This is the partitioning step of a radix join (Manegold, Boncz, Kersten: Optimizing Main-Memory Join on Modern
Hardware, 2002).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel
from tidegate.storage.errors import ConfigurationError

CAPACITY_MIN = 1024
SPARSE_WORDS = 1 << 17
"""Tables up to this size (1 MiB) have a larger part of free entries than larger ones."""
_HIGH = np.uint64(32)
SLOTS_MAX = (1 << 31) - 2
"""Slots are int32, and slot + 1 must be an int32 as well."""
_ENTRIES_MAX = (1 << 32) - 1
"""`home_of` multiplies 32 bits by the number of entries. This many entries have room for all slots."""
AHEAD_ROWS = 32
"""How many rows ahead entries are prefetched. It must be a power of two."""
AHEAD_MASK = AHEAD_ROWS - 1
"""After its computation, the home of row r is stored at `r & AHEAD_MASK`."""
PART_BYTES = 1 << 20
"""Size of a part of the table that fits into the cache of a core."""
_PARTS_BITS_MAX = 9
"""With more parts, sorting would write to more streams than a processor has address translations for."""
WORD_MASK = (1 << 64) - 1
"""The low 64 bits. `number & WORD_MASK` is the uint64 with the bits of an int64."""
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Upserted:
    """The result of an upsert of a batch of keys.

    - `slots`: the slot of each row.
    - `first_rows`: the first row of each distinct key of the batch, ascending.
    - `new_rows`: the entries of `first_rows` whose key was new. They got the next free slots, in order.
    """

    slots: NDArray[np.int32]
    first_rows: NDArray[np.int32]
    new_rows: NDArray[np.int32]


class Progress:
    """The progress of an upsert. The kernel stops when the hash table is full, and continues with a larger table."""

    __slots__ = ("counters", "first_rows", "new_rows", "slots")

    def __init__(self, rows: int, size: int) -> None:
        self.slots = np.empty(rows, dtype=np.int32)
        self.first_rows = np.empty(rows, dtype=np.int32)
        self.new_rows = np.empty(rows, dtype=np.int32)
        self.counters = np.array([0, size, 0, 0], dtype=np.int64)
        """Next row, slots in use, first rows found, new rows found."""

    @property
    def row(self) -> int:
        return int(self.counters[0])

    @property
    def done(self) -> bool:
        return self.row == len(self.slots)

    @property
    def size(self) -> int:
        return int(self.counters[1])

    def result(self) -> Upserted:
        assert self.done
        _, _, first, new = self.counters.tolist()
        return Upserted(self.slots, self.first_rows[:first], self.new_rows[:new])


def seen_bitmap(slots_max: int) -> NDArray[np.uint64]:
    """Returns a bitmap for slots below `slots_max`, with all bits 0."""
    return np.zeros(slots_max // 64 + 1, dtype=np.uint64)


def extended(values: NDArray[Any], used: int, length: int) -> NDArray[Any]:
    """Returns a longer copy of an array: its first `used` entries, followed by zeros."""
    larger = np.zeros(length, dtype=values.dtype)
    larger[:used] = values[:used]
    return larger


def capacity_for(keys: int, entry_words: int) -> int:
    """Returns how many entries a hash table for `keys` keys should have, with some reserve for growth."""
    if keys > SLOTS_MAX:
        raise too_many_keys(keys)
    sparse = max(CAPACITY_MIN, 4 * keys)
    if entry_words * sparse <= SPARSE_WORDS:
        return sparse
    return min(max(SPARSE_WORDS // entry_words, keys) * 15 // 8, _ENTRIES_MAX)


def capacity_after(entries: int, entry_words: int) -> int:
    """Returns how many entries the table must have that replaces a full table of `entries` entries."""
    if keys_max(entries, entry_words) >= SLOTS_MAX:
        raise too_many_keys(SLOTS_MAX + 1)
    return 2 * entries if entry_words * entries <= SPARSE_WORDS else min(entries + entries // 2, _ENTRIES_MAX)


def too_many_keys(keys: int) -> ConfigurationError:
    """Returns the ConfigurationError for more keys than slots.

    The error is permanent, because a restart would process the same keys again.
    """
    return ConfigurationError(
        f"one subtask has {keys:,} keys, but an index holds at most {SLOTS_MAX:,}: restore the newest checkpoint at a "
        "higher parallelism, or set a time to live (ttl=) so that old keys are removed"
    )


def store_null(null: NDArray[np.int64], first_slot: int, valid: NDArray[np.uint8]) -> bool:
    """Stores the slot of the null key, if it is among keys that get the slots from `first_slot` on. `null` is the index
    entry of the null key. `valid` may be `NO_MASK`. Returns False if null occurs twice or already existed.
    """
    nulls = np.flatnonzero(valid == 0)
    if len(nulls) + (null[1] != 0) > 1:
        return False
    if len(nulls):
        null[1] = first_slot + nulls[0] + 1
    return True


@kernel
def keys_max(entries: int, entry_words: int) -> int:
    """Returns how many keys a hash table of `entries` entries may contain before it grows.

    A table that fits into the CPU cache has more free entries, because its probes cost mispredicted branches rather
    than memory access.
    """
    return entries // 4 if entries * entry_words <= SPARSE_WORDS else min(entries * 9 // 16, SLOTS_MAX)


@kernel
def home_of(hashed: np.uint64, entries: int) -> np.int64:
    """Returns the index of the first entry to probe for a hash (its home). The index increases with the high half of
    the hash.
    """
    return np.int64(((hashed >> _HIGH) * np.uint64(entries)) >> _HIGH)


@kernel
def next_entry(entry: np.int64, entries: int) -> np.int64:
    """Returns the index of the entry to probe after entry `entry`. After the last entry, continues at the first."""
    return np.int64(entry + 1 if entry + 1 < entries else 0)


@kernel
def mark_seen(seen: NDArray[np.uint64], slot: np.int64) -> np.int64:
    """Sets the bit of a slot in a bitmap. Returns 1 if the bit was not set before, otherwise 0."""
    bit = np.uint64(slot & 63)
    bits = seen[slot >> 6]
    seen[slot >> 6] = bits | (np.uint64(1) << bit)
    return np.int64(1) - np.int64((bits >> bit) & np.uint64(1))


@kernel
def clear_seen(seen: NDArray[np.uint64], slots: NDArray[np.int32], first_rows: NDArray[np.int32]) -> None:
    """Clears the bits of the slots of these rows in a bitmap."""
    for row in first_rows:
        seen[slots[row] >> 6] = np.uint64(0)


@kernel
def mix(word: np.uint64) -> np.uint64:
    """Returns a hash of one 64-bit word."""
    h = (word ^ (word >> np.uint64(32))) * _MIX_1
    h = (h ^ (h >> np.uint64(29))) * _MIX_2
    return h ^ (h << np.uint64(32))


@kernel
def mix_pair(first: np.uint64, second: np.uint64) -> np.uint64:
    """Returns a hash of two 64-bit words, which depends on their order."""
    h = first * _MIX_2
    return mix((h ^ (h >> np.uint64(32))) + second)


@dataclass(frozen=True, slots=True)
class HomeOrder:
    """Keys in an order in which lookups access the hash table part by part, each with its row index. Null rows are
    omitted.
    """

    words: NDArray[np.int64]
    rows: NDArray[np.int32]


def by_home(
    words: NDArray[np.int64], hashes: NDArray[np.uint64], valid: NDArray[np.uint8], table_bytes: int
) -> HomeOrder:
    """Sorts keys by the part of the hash table that contains their home, so that lookups stay in the CPU cache.

    `valid` may be `NO_MASK`.
    """
    bits = min(max(table_bytes // PART_BYTES, 1).bit_length() - 1, _PARTS_BITS_MAX)
    count = len(words) if not len(valid) else int(np.count_nonzero(valid))
    ordered = HomeOrder(np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32))
    ends = np.zeros((1 << bits) + 1, dtype=np.int64)
    _sort_by_home(words, hashes, valid, np.uint64(bits), ends, ordered.words, ordered.rows)
    return ordered


@kernel
def _sort_by_home(
    words: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    valid: NDArray[np.uint8],
    bits: np.uint64,
    ends: NDArray[np.int64],
    spread_words: NDArray[np.int64],
    spread_rows: NDArray[np.int32],
) -> None:
    masked = valid.shape[0] > 0
    # Two shifts, because shifting by 64 bits at once (a single part) would not shift at all.
    rest = np.uint64(63) - bits
    one = np.uint64(1)
    for i in range(words.shape[0]):
        if not masked or valid[i]:
            ends[np.int64((hashes[i] >> rest) >> one) + 1] += 1
    for next_entry in range(1, ends.shape[0]):
        ends[next_entry] += ends[next_entry - 1]
    for i in range(words.shape[0]):
        if not masked or valid[i]:
            part = np.int64((hashes[i] >> rest) >> one)
            at = ends[part]
            spread_words[at] = words[i]
            spread_rows[at] = i
            ends[part] = at + 1
