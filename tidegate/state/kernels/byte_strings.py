"""Byte strings in arrays: a copy of one for other kernels, and `join`, which copies many to a new array."""

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
def copy_bytes(
    data: NDArray[np.uint8], begin: np.int64, out: NDArray[np.uint8], at: np.int64, size: np.int64
) -> np.uint64:
    """Copies `size` bytes from `data[begin]` to `out[at]`, which do not overlap. Returns their words, combined by or.

    A loop over bytes is not compiled to words, and takes several times as long.
    """
    seen = np.uint64(0)
    place = np.int64(0)
    while place + 8 <= size:
        word = load64(data, begin + place)
        seen |= word
        store64(out, at + place, word)
        place += 8
    while place < size:
        byte = data[begin + place]
        seen |= np.uint64(byte)
        out[at + place] = byte
        place += 1
    return seen


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
    at = np.int64(0)
    for number in range(len(starts)):
        if number > 0 and gap > 0:
            out[at] = separator
            at += 1
        begin = starts[number]
        size = ends[number] - begin
        seen |= copy_bytes(data, begin, out, at, size)
        at += size
    return np.int64((seen & _HIGH_BITS) != np.uint64(0))
