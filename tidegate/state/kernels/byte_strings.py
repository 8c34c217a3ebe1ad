"""Joins byte strings that are scattered in one array to a new array, without an object per string."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel, load64, store64

_HIGH_BITS = np.uint64(0x8080808080808080)


def join(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], separator: bytes = b""
) -> tuple[NDArray[np.uint8], bool]:
    """Joins the strings from `starts[i]` to `ends[i]`. `separator`: one byte or none, between two strings.

    Also returns whether all strings are ASCII.
    """
    gap = len(separator)
    size = int((ends - starts).sum()) + gap * max(0, len(starts) - 1)
    out = np.empty(size, dtype=np.uint8)
    seen = _join(data, starts, ends, gap, separator[0] if separator else 0, out)
    return out, not seen


@kernel
def _join(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    gap: int,
    separator: int,
    out: NDArray[np.uint8],
) -> np.int64:
    seen = np.uint64(0)
    at = 0
    for number in range(len(starts)):
        if number > 0 and gap > 0:
            out[at] = separator
            at += 1
        begin = starts[number]
        size = ends[number] - begin
        for word in range(size >> 3):
            found = load64(data, begin + 8 * word)
            seen |= found
            store64(out, at + 8 * word, found)
        for place in range(size & ~7, size):
            byte = data[begin + place]
            seen |= np.uint64(byte)
            out[at + place] = byte
        at += size
    return np.int64((seen & _HIGH_BITS) != np.uint64(0))
