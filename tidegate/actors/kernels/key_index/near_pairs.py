"""Slots of pairs whose first word is one of two, and whose second words lie close together: in front of `PairIndex`.

Rows of windows have the slice and the key as their words, and come in order of time, more or less: at any time nearly
all are of one slice, or of two. Then an array for each of both, from the least key to the greatest, finds a slot with
one read, as `near_words.py` does for single words. Rules:

- The table of `PairIndex` has every pair. The arrays repeat what it has answered, so they may be thrown away.
- There are two arrays, for the least and the greatest first word of a batch in which hardly any other is seen. What was
  known of other first words is forgotten.
- An array has `WORDS_A_ROW` words for each row of a batch at most, or `WORDS_A_PAIR` for each pair of the index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.actors.kernels.columns import Words
from tidegate.actors.kernels.key_index.near_words import bounds_of

WORDS_A_ROW = 4
WORDS_A_PAIR = 2
_SAMPLES = 16
"""Rows whose first words are looked at."""


class NearPairs:
    """Two arrays of slots + 1, 0 where nothing is known, one behind the other in `slots`."""

    __slots__ = ("_span", "firsts", "origin", "slots")

    def __init__(self) -> None:
        self.firsts: NDArray[np.int64] = np.zeros(2, dtype=np.int64)
        """First words of both. Without arrays they mean nothing."""
        self.origin = 0
        """Second word of the first place of each."""
        self._span = 0
        self.slots: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def look_at(self, first: Words, second: Words, pairs: int) -> bool:
        """Be ready for a batch; the index has so many pairs. False if the arrays are of no use to it."""
        rows = len(first.words)
        if not rows or len(first.valid) or len(second.valid):
            return False
        seen = first.words[:: max(1, rows // _SAMPLES)]
        least, greatest = int(seen.min()), int(seen.max())
        if ((seen != least) & (seen != greatest)).any():
            return False
        bounds = bounds_of(second.words, second.valid)
        assert bounds is not None, "rows without a key"
        if not self._reach(*bounds, max(WORDS_A_ROW * rows, WORDS_A_PAIR * pairs)):
            return False
        known = self.firsts.tolist()
        for word in (least, greatest):
            if word not in known:
                # The place of the one that this batch does not need.
                place = 0 if known[0] not in (least, greatest) else 1
                known[place] = self.firsts[place] = word
                self.slots[place * self._span : (place + 1) * self._span] = 0
        return True

    def _reach(self, least: int, greatest: int, words_max: int) -> bool:
        """Have places for these second words, unless there were more than `words_max`. What is known stays."""
        if self._span and self.origin <= least and greatest < self.origin + self._span:
            return True
        low, high = (self.origin, self.origin + self._span) if self._span else (least, greatest + 1)
        low, high = min(low, least), max(high, greatest + 1)
        if high - low > words_max:
            # What lies far away may be over: begin anew with the words of this batch alone.
            low, high = least, greatest + 1
            if high - low > words_max:
                return False
            self._span = 0
        high += min((high - low) // 2, words_max - (high - low))
        slots = np.zeros(2 * (high - low), dtype=np.int32)
        for half in range(2):
            start = half * (high - low) + self.origin - low
            slots[start : start + self._span] = self.slots[half * self._span : (half + 1) * self._span]
        self.origin, self._span, self.slots = low, high - low, slots
        return True
