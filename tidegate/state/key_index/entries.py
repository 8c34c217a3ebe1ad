"""What the key indexes share: the answer to an upsert, and the layout of an entry.

An entry is two to four words, so that a probe touches one cache line, now and then two: the key itself, if it is short,
and in the last word slot + 1. That word is 0 when the entry is free. An entry's home is given by the *high* bits of its
hash (the low ones chose the key group and are alike within a subtask), so a table grows by reading and writing forwards
only. A table has any number of entries (`home_of`), and grows by half. At most nine in sixteen of them are taken, of
small ones a quarter (`keys_max`); probing is linear. Which keys a batch has met already is a bitmap over slots, small
enough for the cache and cleared through the rows that set its bits.

What an index waits for is memory. So a row's home is computed and its cache line asked for `AHEAD_ROWS` rows before its
turn, and the line of the entry behind it, where the probe goes on. In that way the misses of many rows overlap, and
never end all at once.
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
"""Tables up to a megabyte are kept emptier than others."""
_HIGH = np.uint64(32)
SLOTS_MAX = (1 << 31) - 2
"""A slot is an int32, and its number and one more have to fit."""
_ENTRIES_MAX = (1 << 32) - 1
"""`home_of` multiplies 32 bits with the number of entries. So many have room for all slots."""
AHEAD_ROWS = 32
"""A power of two."""
AHEAD_MASK = AHEAD_ROWS - 1
"""Row r has entry `r & AHEAD_MASK` of the homes that are known ahead."""


@dataclass(frozen=True, slots=True)
class Upserted:
    """Result of an upsert of a batch of keys.

    `slots` has the slot of each row; `first_rows` the first row of each distinct key of the batch, ascending;
    `new_rows` those of `first_rows` whose key was not known: their slots are the next free ones, in order.
    """

    slots: NDArray[np.int32]
    first_rows: NDArray[np.int32]
    new_rows: NDArray[np.int32]


class Progress:
    """Where an upsert is: the kernel stops when the table is full and goes on in a larger one."""

    __slots__ = ("counters", "first_rows", "new_rows", "slots")

    def __init__(self, rows: int, size: int) -> None:
        self.slots = np.empty(rows, dtype=np.int32)
        self.first_rows = np.empty(rows, dtype=np.int32)
        self.new_rows = np.empty(rows, dtype=np.int32)
        self.counters = np.array([0, size, 0, 0], dtype=np.int64)
        """Next row, slots in use, first rows found, new rows found."""

    @property
    def row(self) -> int:
        """The next row."""
        return int(self.counters[0])

    @property
    def done(self) -> bool:
        """Whether every row has its slot."""
        return self.row == len(self.slots)

    @property
    def size(self) -> int:
        """Slots in use."""
        return int(self.counters[1])

    def result(self) -> Upserted:
        """The answer, once `done`."""
        assert self.done
        _, _, first, new = self.counters.tolist()
        return Upserted(self.slots, self.first_rows[:first], self.new_rows[:new])


def bitmap_of(slots_max: int) -> NDArray[np.uint64]:
    """A bitmap for slots below `slots_max`, all clear."""
    return np.zeros(slots_max // 64 + 1, dtype=np.uint64)


def enlarged(values: NDArray[Any], used: int, length: int) -> NDArray[Any]:
    """A longer copy of an array: its first `used` entries, then zeros."""
    larger = np.zeros(length, dtype=values.dtype)
    larger[:used] = values[:used]
    return larger


def capacity_for(keys: int, entry_words: int) -> int:
    """Entries of a table for so many keys, and some more."""
    if keys > SLOTS_MAX:
        raise too_many(keys)
    sparse = max(CAPACITY_MIN, 4 * keys)
    if entry_words * sparse <= SPARSE_WORDS:
        return sparse
    return min(max(SPARSE_WORDS // entry_words, keys) * 15 // 8, _ENTRIES_MAX)


def capacity_after(entries: int, entry_words: int) -> int:
    """Entries of the table that follows one of so many which is full."""
    if keys_max(entries, entry_words) >= SLOTS_MAX:
        raise too_many(SLOTS_MAX + 1)
    return 2 * entries if entry_words * entries <= SPARSE_WORDS else min(entries + entries // 2, _ENTRIES_MAX)


def too_many(keys: int) -> ConfigurationError:
    """What is wrong with so many keys. No restart helps: the same keys come again."""
    return ConfigurationError(
        f"one subtask has {keys:,} keys, and there is room for {SLOTS_MAX:,}: restore the newest checkpoint at a "
        "higher parallelism, or give the state a time to live (ttl=), so that keys are forgotten"
    )


def take_null(null: NDArray[np.int64], first_slot: int, valid: NDArray[np.uint8]) -> bool:
    """Give the null among keys for the slots from `first_slot` on its slot. False if null comes twice or was known.

    `null` is the entry of null. `valid` may be `NO_MASK`.
    """
    nulls = np.flatnonzero(valid == 0)
    if len(nulls) + (null[1] != 0) > 1:
        return False
    if len(nulls):
        null[1] = first_slot + nulls[0] + 1
    return True


@kernel
def keys_max(entries: int, entry_words: int) -> int:
    """How many keys a table of so many entries takes before it grows.

    One that stays in the cache is kept emptier: there what a probe costs is not memory, but that the processor guesses
    wrong whether the first entry is the right one.
    """
    return entries // 4 if entries * entry_words <= SPARSE_WORDS else min(entries * 9 // 16, SLOTS_MAX)


@kernel
def home_of(hashed: np.uint64, entries: int) -> np.int64:
    """The first entry to look at for a hash. It grows with the high half of the hash."""
    return np.int64(((hashed >> _HIGH) * np.uint64(entries)) >> _HIGH)


@kernel
def following(entry: np.int64, entries: int) -> np.int64:
    """The entry to look at after one."""
    return np.int64(entry + 1 if entry + 1 < entries else 0)


@kernel
def meet(met: NDArray[np.uint64], slot: np.int64) -> np.int64:
    """Set the bit of a slot. 1 if it was clear, else 0."""
    bit = np.uint64(slot & 63)
    bits = met[slot >> 6]
    met[slot >> 6] = bits | (np.uint64(1) << bit)
    return np.int64(1) - np.int64((bits >> bit) & np.uint64(1))


@kernel
def forget(met: NDArray[np.uint64], slots: NDArray[np.int32], first_rows: NDArray[np.int32]) -> None:
    """Clear the bits of the slots that the first rows have."""
    for row in first_rows:
        met[slots[row] >> 6] = np.uint64(0)
