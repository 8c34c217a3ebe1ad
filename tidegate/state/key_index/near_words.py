"""Keys that lie close together have their slots in an array, each at its place: no hash, no probe.

Identifiers are most often counted up. An array from the least of them to the greatest is then smaller than a hash table
of the same keys, and finds a slot with one read. Databases know this as perfect hashing. `WordIndex` asks here which
words the array should stand for; words outside of it are in its hash table. Rules:

- The array has at most `WORDS_A_KEY` words for each key of the index, or twice `FIRST_WORDS`: no more memory than a
  hash table that has just grown. So the array pays for the keys of a few subtasks that share them all.
- It grows by half of what it must have, at least. So all that is ever copied is in proportion to its length.
- An index begins with an array if the words of its first batch are near each other: `FIRST_WORDS`, which need as much
  memory as the smallest hash table, or `WORDS_A_ROW` for each row of that batch. There is room on both sides: a first
  batch rarely has the least key of all and the greatest. It begins at 0 rather than below it.
- A few words far away, such as a -1 for a key that is not known, must not keep the others from an array: where an index
  has none yet, the middle three quarters of its words say where the array may lie, and as much on either side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel, prefetch
from tidegate.state.kernels.paged import AHEAD
from tidegate.state.key_index.entries import SLOTS_MAX, meet
from tidegate.state.key_index.mixing import WORD_MASK

WORDS_A_KEY = 8
WORDS_A_ROW = 4
FIRST_WORDS = 4096
SOME_WORDS = 1 << 16
"""So many words say where most of them lie."""
_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class NearWords:
    """An array of slots + 1, 0 where there is no key, for the words from `first` on."""

    first: int = 0
    slots: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    @property
    def origin(self) -> np.uint64:
        """The first word as a kernel takes it: what is below it is far above the last one when it is subtracted."""
        return np.uint64(self.first & WORD_MASK)

    def has(self, least: int, greatest: int) -> bool:
        """Whether the array has a place for both words, and for all between them."""
        return self.first <= least and greatest < self.first + len(self.slots)

    def within_reach(self, keys: int) -> tuple[int, int]:
        """The least and the greatest word that this array could have a place for if it grew, with so many keys."""
        words = _words_max(keys)
        return max(self.first + len(self.slots) - words, _LEAST), min(self.first + words, _GREATEST)

    def reaching(self, least: int, greatest: int, keys: int) -> NearWords | None:
        """The array that has the words from `least` to `greatest` as well. None if it would be too long for the keys.

        What it grows by lies where the new words are: more are likely to come there. The first array has room on both
        sides.
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
        return NearWords(low, slots)


def _words_max(keys: int) -> int:
    return max(WORDS_A_KEY * keys, 2 * FIRST_WORDS)


def near_words_for(words: NDArray[np.int64], valid: NDArray[np.uint8]) -> NearWords:
    """What an index begins with whose first batch has these keys. `valid` may be `NO_MASK`."""
    words_max = max(FIRST_WORDS, WORDS_A_ROW * len(words))
    bounds = bounds_of(words, valid)
    if bounds is None or (between := bounds[1] - bounds[0] + 1) > words_max:
        return NearWords()
    length = max(FIRST_WORDS, min(between + between // 4, words_max))
    first = bounds[0] - (length - between) // 2
    first = 0 if first < 0 <= bounds[0] else min(max(first, _LEAST), _GREATEST + 1 - length)
    return NearWords(first, np.zeros(length, dtype=np.int32))


def bounds_of_most(words: NDArray[np.int64], valid: NDArray[np.uint8]) -> tuple[int, int] | None:
    """The least and the greatest word but for those far away from most; None if all are null."""
    some = words[:SOME_WORDS]
    low, high = around_most(some[valid[:SOME_WORDS].view(np.bool_)] if len(valid) else some)
    bounds = np.array([_GREATEST, _LEAST], dtype=np.int64)
    _bounds_within(words, valid, np.int64(low), np.int64(high), bounds)
    least, greatest = bounds.tolist()
    return None if least > greatest else (least, greatest)


def around_most(words: NDArray[np.int64]) -> tuple[int, int]:
    """The least and the greatest word that is as near to the middle three quarters of words as these are to each other.

    Anything, if there are less than eight.
    """
    outside = len(words) // 8
    if not outside:
        return _LEAST, _GREATEST
    ordered = np.partition(words, (outside, len(words) - 1 - outside))
    low, high = int(ordered[outside]), int(ordered[-1 - outside])
    return max(2 * low - high, _LEAST), min(2 * high - low, _GREATEST)


def bounds_of(words: NDArray[np.int64], valid: NDArray[np.uint8]) -> tuple[int, int] | None:
    """The least and the greatest word; None if all are null. `valid` may be `NO_MASK`."""
    bounds = np.array([_GREATEST, _LEAST], dtype=np.int64)
    _bounds(words, valid, bounds)
    least, greatest = bounds.tolist()
    return None if least > greatest else (least, greatest)


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
def bounds_of_table(table: NDArray[np.int64], low: np.int64, high: np.int64, bounds: NDArray[np.int64]) -> None:
    """The least and the greatest word of a hash table from `low` to `high`; the other way round if there is none."""
    bounds[0], bounds[1] = _GREATEST, _LEAST
    for position in range(0, table.shape[0], 2):
        if table[position + 1] != 0 and low <= table[position] <= high:
            bounds[0], bounds[1] = min(bounds[0], table[position]), max(bounds[1], table[position])


@kernel
def settle(
    table: NDArray[np.int64],
    near: NDArray[np.int32],
    origin: np.uint64,
) -> np.int64:
    """Take the keys of a hash table that the array has a place for to it. Returns how many others there are."""
    others = np.int64(0)
    for position in range(0, table.shape[0], 2):
        if table[position + 1] != 0:
            place = np.uint64(table[position]) - origin
            if place < np.uint64(near.shape[0]):
                near[np.int64(place)] = table[position + 1]
                table[position + 1] = 0
            else:
                others += 1
    return others


@kernel
def fill_near(
    near: NDArray[np.int32],
    origin: np.uint64,
    words: NDArray[np.int64],
    valid: NDArray[np.uint8],
    first_slot: np.int64,
    others: NDArray[np.uint8],
) -> np.int64:
    """Give the next slots to the words that the array has a place for, and mark the others.

    Returns how many are marked; -1 if a key comes twice or was known.
    """
    masked = valid.shape[0] > 0
    marked = np.int64(0)
    for i in range(words.shape[0]):
        if masked and not valid[i]:
            continue
        place = np.uint64(words[i]) - origin
        if place >= np.uint64(near.shape[0]):
            others[i] = 1
            marked += 1
        elif near[np.int64(place)] != 0:
            return np.int64(-1)
        else:
            near[np.int64(place)] = first_slot + i + 1
    return marked


@kernel
def upsert_near(
    near: NDArray[np.int32],
    origin: np.uint64,
    met: NDArray[np.uint64],
    words: NDArray[np.int64],
    valid: NDArray[np.uint8],
    slots: NDArray[np.int32],
    first_rows: NDArray[np.int32],
    new_rows: NDArray[np.int32],
    counters: NDArray[np.int64],
) -> None:
    """Slots of the rows from the next one on, up to one that is null or that the array has no place for.

    A loop that does nothing else takes a nanosecond a row, so it asks for memory `AHEAD` rows before. Which keys the
    batch meets first is for a second one: where all keys are new, these are they.
    """
    near_words = np.uint64(near.shape[0])
    masked = valid.shape[0] > 0
    begin, size, first, new = counters[0], counters[1], counters[2], counters[3]
    row, rows = begin, words.shape[0]
    all_new = size == 0
    while row < rows:
        ahead = np.uint64(words[min(row + AHEAD, rows - 1)]) - origin
        prefetch(near, np.int64(min(ahead, near_words)))
        place = np.uint64(words[row]) - origin
        if place >= near_words or (masked and not valid[row]):
            break
        meta = near[np.int64(place)]
        if meta == 0:
            if size >= SLOTS_MAX:
                break
            size += 1
            meta = np.int32(size)
            near[np.int64(place)] = meta
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
            first += meet(met, np.int64(slots[i]))
    counters[0], counters[1], counters[2], counters[3] = row, size, first, new
