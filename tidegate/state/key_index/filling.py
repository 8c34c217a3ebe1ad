"""Fills an index with many keys at once, none of which it knows: what a restore does.

Keys that come in any order hit a large table in any order, and wait for memory at each of them. So they are first put
in the order of their homes, coarsely: parts of the table that fit into the cache are filled one after the other. This
is the partitioning step of a radix join (Manegold, Boncz, Kersten: Optimizing Main-Memory Join on Modern Hardware,
2002).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel

PART_BYTES = 1 << 20
"""A part of the table that fits into the cache of a core."""
_PARTS_BITS_MAX = 9
"""More parts than this are written to by more streams than a processor has addresses at hand for."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Keys in the order of the parts of the table that their homes lie in.

    `words` and `rows` are those of each key; rows that are null are left out.
    """

    words: NDArray[np.int64]
    rows: NDArray[np.int32]


def spread(words: NDArray[np.int64], hashes: NDArray[np.uint64], valid: NDArray[np.uint8], table_bytes: int) -> Spread:
    """Put keys in that order; the high bits of a hash are the home. `valid` may be `NO_MASK`."""
    bits = min(max(table_bytes // PART_BYTES, 1).bit_length() - 1, _PARTS_BITS_MAX)
    count = len(words) if not len(valid) else int(np.count_nonzero(valid))
    ordered = Spread(np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32))
    ends = np.zeros((1 << bits) + 1, dtype=np.int64)
    _spread(words, hashes, valid, np.uint64(bits), ends, ordered.words, ordered.rows)
    return ordered


@kernel
def _spread(
    words: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    valid: NDArray[np.uint8],
    bits: np.uint64,
    ends: NDArray[np.int64],
    spread_words: NDArray[np.int64],
    spread_rows: NDArray[np.int32],
) -> None:
    masked = valid.shape[0] > 0
    # Two shifts: by 64 bits at once, for a single part, none would be shifted.
    rest = np.uint64(63) - bits
    one = np.uint64(1)
    for i in range(words.shape[0]):
        if not masked or valid[i]:
            ends[np.int64((hashes[i] >> rest) >> one) + 1] += 1
    for following in range(1, ends.shape[0]):
        ends[following] += ends[following - 1]
    for i in range(words.shape[0]):
        if not masked or valid[i]:
            part = np.int64((hashes[i] >> rest) >> one)
            at = ends[part]
            spread_words[at] = words[i]
            spread_rows[at] = i
            ends[part] = at + 1
