"""`LeftKeys`: which keys may have rows in the database that are not in memory, so that nobody looks there for new ones.

A Bloom filter over the keys that have left memory. Rules:
- It never says no of a key that has left. It says yes of a few others, and of more and more once there are more keys
  than it has room for: then each costs a look at the database, as it would without it.
- Of files that a backend was opened on, and of rows that were loaded, nobody knows the keys at first: until they have
  been read, it says yes of all.
- Keys whose rows are gone are forgotten when it is full: whoever has the database reads the keys that are there into a
  new filter, some at a time, which takes the place of the old one once it has all. Keys that leave meanwhile are noted
  in both. If there are too many for it, the old one stays.
- Before a reading begins, as many rows must have left as the last one has read. So for each row that leaves at most one
  is read, however large the database is. Readings in vain become rarer and rarer.
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
    """Keys by their hashes, in at most so many bytes, and twice that while keys are read.

    It takes memory with the first key that leaves.
    """

    def __init__(self, size_bytes_max: int) -> None:
        self.all = False
        """Whether any key may have rows there, as far as is known."""
        self._words_max = max(1, size_bytes_max // 8)
        self._known = _Filter(self._words_max)
        self._read: _Filter | None = None
        """What has been read of the database, while that is done."""
        self._left = 0
        """Rows of so many have left since the last reading began."""
        self._pause = 0
        """So many must have left before the next one begins."""
        self._seen = 0
        """So many rows were read by this reading, or the last one."""

    def __bool__(self) -> bool:
        """Whether any key may have left."""
        return self.all or self._known.size_bytes > 0

    @property
    def is_crowded(self) -> bool:
        """Whether more keys were added than it has room for."""
        return self._known.is_crowded

    @property
    def is_read(self) -> bool:
        """Whether a reading is under way."""
        return self._read is not None

    @property
    def wants_keys(self) -> bool:
        """Whether it is time to read the keys that are there, from the first one on."""
        return self._read is None and (self.all or self.is_crowded) and self._left >= self._pause

    @property
    def size_bytes(self) -> int:
        """How much memory it takes."""
        return self._known.size_bytes + (0 if self._read is None else self._read.size_bytes)

    def add(self, hashes: Hashes) -> None:
        """Rows of these keys have left; a key may come several times."""
        self._left += len(hashes)
        self._known.add(hashes)
        if self._read is not None:
            self._read.add(hashes)

    def begin(self) -> None:
        """A reading begins."""
        self._read = _Filter(self._words_max)
        self._left = self._seen = 0

    def found(self, hashes: Hashes) -> None:
        """The reading has found rows of these keys. It ends if they are too many."""
        assert self._read is not None, "no reading is under way"
        self._seen += len(hashes)
        self._read.add(hashes)
        if self._read.is_crowded:
            self._read = None
            self._pause = max(2 * self._pause, self._seen)

    def end(self) -> None:
        """The reading has found all that are there. Those that were not are forgotten."""
        assert self._read is not None, "no reading is under way"
        self._known, self._read = self._read, None
        self.all = False
        self._pause = self._seen

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Which of these keys may have left."""
        return np.full(len(hashes), True) if self.all else self._known.has(hashes)


class _Filter:
    """A Bloom filter of so many words, which it takes with the first key."""

    def __init__(self, words_max: int) -> None:
        self._keys = 0
        self._words_max = words_max
        self._words: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    @property
    def is_crowded(self) -> bool:
        return self._keys * _BITS_MIN > self._words_max * _WORD_BITS

    @property
    def size_bytes(self) -> int:
        return self._words.nbytes

    def add(self, hashes: Hashes) -> None:
        if len(hashes):
            new = np.unique(hashes)
            new = new[~self.has(new)]
            self._keys += len(new)
            if not len(self._words):
                self._words = np.zeros(1 << (self._words_max.bit_length() - 1), dtype=np.uint64)
            for word, bit in self._probes(new):
                np.bitwise_or.at(self._words, word, bit)

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        if not len(self._words):
            return np.zeros(len(hashes), dtype=np.bool_)
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
