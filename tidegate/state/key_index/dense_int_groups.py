"""Groups the rows of one batch whose keys are close together: the position of a key is the slot of its group.

`KeyIndex` numbers keys in the order of their appearance, and stores them. The groups of a single batch need neither:
keys within a short range need no index at all. One pass over the rows gives their slots, the number of rows of each
group, and its first row. Databases call this perfect hashing. Rules:

- Keys are columns of words (`Words`). Several columns form one number, with their positions as digits.
- There are at least `ROWS_PER_PLACE` rows for each position, so that the work for positions costs less than the pass
  over the rows.
- Null has its own position, after the greatest word.
- For one column without nulls, the bounds of the previous batch are tried first, which saves reading all keys to find
  the bounds. Groups and their order do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import Words
from tidegate.state.kernels.jit import kernel
from tidegate.state.key_index.int_index import bounds_of

ROWS_PER_PLACE = 4
_GREATEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of the rows of a batch that have equal keys, numbered in the order of their first rows."""

    slots: NDArray[np.int32]
    """The slot of the group of each row."""
    slots_end: int
    """An upper bound of the slots. Not every slot below it has a group."""
    group_slots: NDArray[np.int32]
    """The slot of each group."""
    first_rows: NDArray[np.int32]
    """The first row of each group, ascending."""
    counts: NDArray[np.int64]
    """The number of rows of each group."""


class DenseIntGroups:
    """Groups the rows of batches by integer keys, with arrays that are indexed by key. Used for one batch after the
    other.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: tuple[int, int] | None = None
        """Least word and number of positions of the last batch. None if it was not one column without nulls."""

    def of(self, keys: Sequence[Words]) -> Groups | None:
        """Groups rows by these key columns (at least one). Returns None if the keys are too far apart for an array."""
        rows = len(keys[0].words)
        places_max = max(rows // ROWS_PER_PLACE, 1)
        alone = len(keys) == 1 and not len(keys[0].valid)
        if alone and self._known is not None and self._known[1] <= places_max:
            found = _groups(keys[0].words, *self._known)
            if found is not None:
                return found
        self._known = None
        digits: list[tuple[NDArray[np.int64], int, int]] = []
        places = 1
        for column in keys:
            digits.append(_digit(column))
            places *= digits[-1][2]
            if not 0 < places <= places_max:
                return None
        words, origin, _ = digits[0]
        if alone:
            self._known = origin, places
        elif len(digits) > 1:
            numbers: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
            for words, origin, length in digits:
                _append_digit(numbers, words, origin, length)
            words, origin = numbers, 0
        return _groups(words, origin, places)


def _digit(column: Words) -> tuple[NDArray[np.int64], int, int]:
    """Prepares a key column as one digit of a combined array index.

    Returns its words without nulls, the least word, and the number of possible values up to the greatest word.
    """
    bounds = bounds_of(column.words, column.valid)
    if bounds is None:
        return np.zeros(len(column.words), dtype=np.int64), 0, 1
    least, greatest = bounds
    if not len(column.valid):
        return column.words, least, greatest - least + 1
    if greatest == _GREATEST:
        return column.words, least, 0  # no word remains for null
    return np.where(column.valid.view(np.bool_), column.words, greatest + 1), least, greatest - least + 2


def _groups(words: NDArray[np.int64], origin: int, places: int) -> Groups | None:
    """Returns the groups of rows, or None if a word is outside of the array of `places` positions that begins at
    `origin`.
    """
    slots = np.empty(len(words), dtype=np.int32)
    first_rows = np.empty(places, dtype=np.int32)
    counts = np.zeros(places, dtype=np.int64)
    groups = _group(words, origin, slots, counts, first_rows)
    if groups < 0:
        return None
    first_rows = first_rows[:groups]
    group_slots = slots[first_rows]
    return Groups(slots, places, group_slots, first_rows, counts[group_slots])


@kernel
def _append_digit(numbers: NDArray[np.int64], words: NDArray[np.int64], origin: int, length: int) -> None:
    for row in range(words.shape[0]):
        numbers[row] = numbers[row] * length + (words[row] - origin)


@kernel
def _group(
    words: NDArray[np.int64],
    origin: int,
    slots: NDArray[np.int32],
    counts: NDArray[np.int64],
    first_rows: NDArray[np.int32],
) -> int:
    """Assigns each row to a group. Returns the number of groups, or -1 if a word is outside of the array."""
    groups = 0
    for row in range(words.shape[0]):
        place = words[row] - origin
        if np.uint64(place) >= np.uint64(counts.shape[0]):
            return -1
        if counts[place] == 0:
            first_rows[groups] = row
            groups += 1
        counts[place] += 1
        slots[row] = place
    return groups
