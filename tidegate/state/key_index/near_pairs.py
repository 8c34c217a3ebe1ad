"""Slots of pairs whose first word is one of two, and whose second words lie close together: in front of `PairIndex`.

Rows of windows have the slice and the key as their words, and come in order of time, more or less: at any time nearly
all are of one slice, or of two. Then an array for each of both, from the least key to the greatest, finds a slot with
one read, as `near_words.py` does for single words. Rules:

- The table of `PairIndex` has every pair. The arrays repeat what it has answered, so they may be thrown away.
- There are two arrays, for the least and the greatest first word of a batch in which hardly any other is seen. What was
  known of other first words is forgotten, as is all when the second words are far away.
- After something was forgotten rows are in the table alone at first, which costs twice as much as the table without
  arrays. It pays if half of the rows are found until the next time. If it did not pay, that next time the batches
  that would have something forgotten are left to the table: 1 of them, then 3, 7 and so on, up to `LEFT_MAX`; none any
  more once it has paid. So ranges of keys that take turns, or new pairs in each batch, cost little more than the table.
- An array has `WORDS_A_ROW` words for each row of a batch at most, or `WORDS_A_PAIR` for each pair of the index. It
  grows by half of what it must have, where new words are: what is copied is in proportion to its length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import Words
from tidegate.state.key_index.near_words import bounds_of

WORDS_A_ROW = 4
WORDS_A_PAIR = 2
LEFT_MAX = 63
_SAMPLES = 16
"""Rows whose first words are looked at."""
_LEAST = -(1 << 63)


class NearPairs:
    """Two arrays of slots + 1, 0 where nothing is known, one behind the other in `slots`."""

    __slots__ = ("_leave", "_left", "_rows", "_span", "firsts", "found", "origin", "slots")

    def __init__(self) -> None:
        self.firsts: NDArray[np.int64] = np.zeros(2, dtype=np.int64)
        """First words of both; only one of them has an array if they are the same. Without arrays they mean nothing."""
        self.origin = 0
        """Second word of the first place of each."""
        self._span = 0
        self.slots: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.found: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        """How many rows were found in arrays since something was forgotten. The kernel counts them."""
        self._rows = 0
        """How many rows there were since then, with those that were left to the table so that nothing is forgotten."""
        self._leave = self._left = 0
        """How many batches are left to the table after something was forgotten; how many of them are to come."""

    def look_at(self, first: Words, second: Words, pairs: int) -> bool:
        """Be ready for a batch; the index has so many pairs. False if the arrays are of no use to it."""
        rows = len(first.words)
        if not rows or len(first.valid) or len(second.valid):
            return False
        seen = first.words[:: max(1, rows // _SAMPLES)]
        ends = int(seen.min()), int(seen.max())
        if ((seen != ends[0]) & (seen != ends[1])).any():
            return False
        bounds = bounds_of(second.words, second.valid)
        assert bounds is not None, "rows without a key"
        words_max = max(WORDS_A_ROW * rows, WORDS_A_PAIR * pairs)
        if bounds[1] - bounds[0] >= words_max:
            return False
        self._rows += rows
        far = not self._can_reach(*bounds, words_max)
        if self._forgets(ends, far) and not self._may_forget():
            return False
        if far or not self._span:
            self._span, self.firsts[:] = 0, ends
        self._reach(*bounds, words_max)
        self._take(ends)
        return True

    def _forgets(self, ends: tuple[int, int], far: bool) -> bool:
        """Whether something that is known has to go for these first words, or because second words are far away."""
        known = set(self.firsts.tolist())
        return self._span > 0 and (far or len({*ends} - known) > 2 - len(known))

    def _may_forget(self) -> bool:
        """Whether a batch may have something forgotten; else it is left to the table."""
        if self._left:
            self._left -= 1
            return False
        paid = 2 * int(self.found[0]) >= self._rows
        self._left = self._leave = 0 if paid else min(2 * self._leave + 1, LEFT_MAX)
        self._rows = self.found[0] = 0
        return True

    def _can_reach(self, least: int, greatest: int, words_max: int) -> bool:
        """Whether arrays that have places for these second words, and for those that they have already, may be made."""
        low, high = min(self.origin, least), max(self.origin + self._span, greatest + 1)
        return high - low <= max(words_max, self._span)

    def _reach(self, least: int, greatest: int, words_max: int) -> None:
        """Have places for these second words. What is known stays."""
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

    def _take(self, ends: tuple[int, int]) -> None:
        """Have an array for each of these first words."""
        known = self.firsts.tolist()
        for word in ends:
            if word not in known:
                # The place that is free, or of the one that this batch does not need.
                place = 0 if known[0] not in ends and known[0] != known[1] else 1
                known[place] = self.firsts[place] = word
                self.slots[place * self._span : (place + 1) * self._span] = 0
