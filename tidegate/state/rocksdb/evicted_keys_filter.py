"""`EvictedKeysFilter`: a Bloom filter over the keys of a row table that have left memory.

With it, new keys are not looked up in the database. Rules:
- It has no false negatives. A false positive costs a lookup, as it would without the filter. False positives become
  frequent once there are more keys than it has room for.
- After a backend was opened on files, or rows were loaded, their keys are unknown. Until they have been read, the
  filter is positive for all keys.
- When the filter is full, keys without rows are dropped: the owner of the database reads the stored keys into a new
  filter, a few at a time (`KeyReader`), which then replaces the old one. Keys that are evicted during the scan are
  added to both. If there are too many keys for the new filter, the old one stays.
- Before a scan begins, as many rows must have been evicted as the last scan has read. At most one row is therefore
  read per evicted row, however large the database is. Unsuccessful scans become rarer and rarer.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.storage.state.rocksdb.database import reported
from tidegate.storage.state.rocksdb.value_layout import HEAD

_PROBES = 4
_BITS_MIN = 5
"""With fewer bits per key most positives are false, and reading keys into the filter is in vain."""
_WORD_BITS = 64
_ODD = np.uint64(0x9E3779B97F4A7C15)
Hashes: TypeAlias = NDArray[np.uint64]


class EvictedKeysFilter:
    """A Bloom filter over the hashes of keys whose rows were evicted from memory.

    It takes at most `size_bytes_max` bytes, and twice that during a scan of stored keys. Memory is allocated with the
    first evicted key.
    """

    def __init__(self, size_bytes_max: int) -> None:
        self.all = False
        """True if any key may have rows in the database."""
        self._words_max = max(1, size_bytes_max // 8)
        self._known = _Filter(self._words_max)
        self._read: _Filter | None = None
        """The new filter during a scan."""
        self._left = 0
        """How many rows were evicted since the last scan began."""
        self._pause = 0
        """How many rows must be evicted before the next scan begins."""
        self._seen = 0
        """How many rows this scan, or the last one, has read."""

    def __bool__(self) -> bool:
        """Returns whether any key may have been evicted."""
        return self.all or self._known.size_bytes > 0

    @property
    def is_crowded(self) -> bool:
        """Returns whether more keys were added than the filter is made for, so that false positives become frequent."""
        return self._known.is_crowded

    @property
    def is_read(self) -> bool:
        """Returns whether a scan of the stored keys is running, which fills a new filter."""
        return self._read is not None

    @property
    def needs_keys(self) -> bool:
        """Returns whether a scan of the stored keys should begin."""
        return self._read is None and (self.all or self.is_crowded) and self._left >= self._pause

    @property
    def size_bytes(self) -> int:
        """Returns the memory of the filter in bytes, including the new filter during a scan."""
        return self._known.size_bytes + (0 if self._read is None else self._read.size_bytes)

    def add(self, hashes: Hashes) -> None:
        """Adds the hashes of keys whose rows were evicted. A key may be added once for each of its rows."""
        self._left += len(hashes)
        self._known.add(hashes)
        if self._read is not None:
            self._read.add(hashes)

    def begin(self) -> None:
        """Begins a scan of the stored keys, which fills a new filter."""
        self._read = _Filter(self._words_max)
        self._left = self._seen = 0

    def found(self, hashes: Hashes) -> None:
        """Adds the hashes of keys that the scan has found to the new filter. Ends the scan if there are too many
        keys.
        """
        assert self._read is not None, "no scan is under way"
        self._seen += len(hashes)
        self._read.add(hashes)
        if self._read.is_crowded:
            self._read = None
            self._pause = max(2 * self._pause, self._seen)

    def end(self) -> None:
        """Ends a complete scan: the new filter replaces the old filter."""
        assert self._read is not None, "no scan is under way"
        self._known, self._read = self._read, None
        self.all = False
        self._pause = self._seen

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Returns a mask: True for each hash whose key may have been evicted."""
        return np.full(len(hashes), True) if self.all else self._known.has(hashes)


class _Filter:
    """A Bloom filter of up to `words_max` words, which are allocated with the first key."""

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
            new = distinct_integers(hashes)
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
        """Returns the bits of each hash, as one pair of arrays for each probe: the index of the word, and the bit in
        the word.
        """
        mask = np.uint64(len(self._words) * _WORD_BITS - 1)
        # The lower bits chose the subtask, so they are similar for all its keys. The product spreads the higher bits.
        mixed = hashes * _ODD
        first, step = mixed >> np.uint64(24), (mixed >> np.uint64(40)) | np.uint64(1)
        bits = [(first + np.uint64(probe) * step) & mask for probe in range(_PROBES)]
        return [(each >> np.uint64(6), np.uint64(1) << (each & np.uint64(63))) for each in bits]


class KeyReader:
    """Reads the database keys of a state, some in each call.

    A key that is added or removed between two calls may or may not be returned. All other keys are returned.
    """

    def __init__(self, session: RocksSession, number: int) -> None:
        self._session = session
        self._all = [HEAD.pack(group, number) for group in session.key_groups]
        self.begin()

    def begin(self) -> None:
        """Makes the next call of `read` begin at the first key."""
        self._start, self._prefixes = self._all[0], self._all

    def read(self, keys_max: int) -> tuple[list[bytes], bool]:
        """Returns up to `keys_max` further keys, and whether the end was reached. Raises StorageError or
        CorruptionError.
        """
        prefixes, keys, ended = self._prefixes, list[bytes](), False
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            cursor.seek(self._start)
            for _ in range(keys_max):
                if (key := cursor.key()) is not None and key.startswith(prefixes[0]):
                    keys.append(key)
                    cursor.next()
                elif len(prefixes) > 1:
                    prefixes = prefixes[1:]
                    cursor.seek(prefixes[0])
                else:
                    ended = True
                    break
            cursor.status()
        last = keys[-1] if keys and keys[-1].startswith(prefixes[0]) else None
        self._start, self._prefixes = prefixes[0] if last is None else last + b"\0", prefixes
        return keys, ended
