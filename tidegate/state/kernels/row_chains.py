"""Rows of keys as chains: each key has a first row, each row the next row of its key.

A row is a slot; one that is gone has a flag of 0. Walks unlink the rows that are gone, so that nobody passes them
twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, load_value

END = -1
"""Stands for no row."""


@kernel
def link(
    heads: NDArray[np.int32],
    tails: NDArray[np.int32],
    nexts: NDArray[np.int32],
    keys: NDArray[np.int32],
    slots: NDArray[np.int32],
) -> None:
    """Put row `slots[i]` behind the last one of key `keys[i]`."""
    for i in range(slots.shape[0]):
        key, slot = keys[i], slots[i]
        nexts[slot] = END
        if heads[key] == END:
            heads[key] = slot
        else:
            nexts[tails[key]] = slot
        tails[key] = slot


def prune_and_count(
    heads: NDArray[np.int32],
    tails: NDArray[np.int32],
    nexts: NDArray[np.int32],
    flags: Pages,
    keys: NDArray[np.int32],
    first: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    """Unlink rows that are gone from the chains of some keys, each given by its first position in `keys`.

    `counts[i]` becomes the number of rows of key `keys[i]`. Returns the sum of all.
    """
    lengths = np.empty(len(heads), dtype=np.int64)
    return _prune_and_count(heads, tails, nexts, flags, keys, first, lengths, counts)


@kernel
def _prune_and_count(
    heads: NDArray[np.int32],
    tails: NDArray[np.int32],
    nexts: NDArray[np.int32],
    flags: Pages,
    keys: NDArray[np.int32],
    first: NDArray[np.int32],
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> int:
    """`lengths[key]` becomes the number of rows of a key."""
    total = 0
    for i in range(first.shape[0]):
        key = keys[first[i]]
        last, slot, length = np.int64(END), np.int64(heads[key]), 0
        while slot != END:
            after = np.int64(nexts[slot])
            if load_value(flags, slot, np.uint8(0)) != np.uint8(0):
                if last == END:
                    heads[key] = np.int32(slot)
                else:
                    nexts[last] = np.int32(slot)
                last = slot
                length += 1
            slot = after
        if last == END:
            heads[key] = END
        else:
            nexts[last] = END
        tails[key] = np.int32(last)
        lengths[key] = length
    for i in range(keys.shape[0]):
        counts[i] = lengths[keys[i]]
        total += counts[i]
    return total


@kernel
def collect(
    heads: NDArray[np.int32],
    nexts: NDArray[np.int32],
    keys: NDArray[np.int32],
    positions: NDArray[np.int64],
    slots: NDArray[np.int32],
) -> None:
    """The rows of each of some keys, one key after the other, after `prune_and_count` has counted them."""
    found = 0
    for i in range(keys.shape[0]):
        slot = np.int64(heads[keys[i]])
        while slot != END:
            positions[found] = i
            slots[found] = np.int32(slot)
            found += 1
            slot = np.int64(nexts[slot])
