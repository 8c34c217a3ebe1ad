"""`LeftKeys`: which keys may have rows in the database that are not in memory, so that nobody looks there for new ones.

A Bloom filter over the keys that have left memory. Rules:
- It never says no of a key that has left. It says yes of a few others, and of more and more once there are more keys
  than it has room for: then each costs a look at the database, as it would without it.
- Of files that a backend was opened on, and of rows that were loaded, nobody knows the keys at first: until they have
  been read, it says yes of all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_PROBES = 4
_BITS_MIN = 5
"""With fewer bits a key most answers are wrong, and to read keys for it is in vain."""
_WORD_BITS = 64
_ODD = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


class LeftKeys:
    """Keys by their hashes, in at most so many bytes. It takes memory with the first key that leaves."""

    def __init__(self, size_bytes_max: int) -> None:
        self.all = False
        """Whether any key may have rows there, as far as is known."""
        self._added = 0
        self._words_max = max(1, size_bytes_max // 8)
        self._words: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    def __bool__(self) -> bool:
        """Whether any key may have left."""
        return self.all or len(self._words) > 0

    @property
    def is_crowded(self) -> bool:
        """Whether more were added than it has room for. A key counts each time."""
        return self._added * _BITS_MIN > self._words_max * _WORD_BITS

    @property
    def size_bytes(self) -> int:
        """How much memory it takes."""
        return self._words.nbytes

    def add(self, hashes: Hashes) -> None:
        """These keys have left."""
        if len(hashes):
            self._added += len(hashes)
            if not len(self._words):
                self._words = np.zeros(1 << (self._words_max.bit_length() - 1), dtype=np.uint64)
            for word, bit in self._probes(hashes):
                np.bitwise_or.at(self._words, word, bit)

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Which of these keys may have left."""
        if self.all or not len(self._words):
            return np.full(len(hashes), self.all)
        found = np.ones(len(hashes), dtype=np.bool_)
        for word, bit in self._probes(hashes):
            found &= self._words[word] & bit != 0
        return found

    def _probes(self, hashes: Hashes) -> list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        """Of each key, a few bits: the word of each, and the bit in it."""
        mask = np.uint64(len(self._words) * _WORD_BITS - 1)
        # The lower bits of keys of one subtask are alike: they have chosen it.
        mixed = hashes * _ODD
        first, step = mixed >> np.uint64(24), (mixed >> np.uint64(40)) | np.uint64(1)
        bits = [(first + np.uint64(probe) * step) & mask for probe in range(_PROBES)]
        return [(each >> np.uint64(6), np.uint64(1) << (each & np.uint64(63))) for each in bits]
