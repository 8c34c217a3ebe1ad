"""Decimals of 128 bits as two words, the high one signed and the low one not: sums and extremes in place, in pages.

Rules: as in `accumulate.py`. A sum that leaves its number of digits is reported, not wrapped around. The words of a
column are those of its unscaled integers: who compares or adds two columns gives them one scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, ask_ahead, load_value, store_value

Highs = NDArray[np.int64]
Lows = NDArray[np.uint64]


def decimal_words(column: pa.Array) -> tuple[Highs, Lows]:
    """The high and the low words of a column of decimal128 (a copy). Undefined under a null."""
    buffer = column.buffers()[1]
    if len(column) == 0 or buffer is None:
        return np.zeros(len(column), dtype=np.int64), np.zeros(len(column), dtype=np.uint64)
    words = np.frombuffer(buffer, dtype=np.uint64, count=2 * len(column), offset=16 * column.offset)
    return np.ascontiguousarray(words[1::2]).view(np.int64), np.ascontiguousarray(words[::2])


def decimals_of(highs: Highs, lows: Lows, valid: NDArray[np.uint8] | None, data_type: pa.DataType) -> pa.Array:
    """A column of decimal128 out of its words. Entries with `valid` 0 are null."""
    words = np.empty((len(highs), 2), dtype=np.uint64)
    words[:, 0], words[:, 1] = lows, highs.view(np.uint64)
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(data_type, len(highs), [bitmap, pa.py_buffer(words)])


def sum_decimals(
    high_pages: Pages,
    low_pages: Pages,
    slots: NDArray[np.int32],
    highs: Highs,
    lows: Lows,
    mask: NDArray[np.uint8],
    digits: int,
) -> bool:
    """Add decimals to the sums of their slots. True when a sum has more than so many digits (it is wrong then)."""
    bound = 10**digits
    words = np.array([bound >> 64, bound & (2**64 - 1)], dtype=np.uint64)
    return bool(_sum(high_pages, low_pages, slots, highs, lows, mask, words))


@kernel
def has_more_digits(high: Any, low: Any, bound: NDArray[np.uint64]) -> bool:
    """Whether a decimal is as large as `bound`, the words of a power of ten, or larger, whatever its sign."""
    size_high, size_low = np.uint64(high), low
    if high < 0:  # the bits turned round, and one more
        size_low = ~low + np.uint64(1)
        size_high = np.uint64(~high)
        if size_low == 0:
            size_high += np.uint64(1)
    return bool(size_high > bound[0] or (size_high == bound[0] and size_low >= bound[1]))


@kernel
def _sum(
    high_pages: Pages,
    low_pages: Pages,
    slots: NDArray[np.int32],
    highs: Highs,
    lows: Lows,
    mask: NDArray[np.uint8],
    bound: NDArray[np.uint64],
) -> bool:
    masked = mask.shape[0] > 0
    overflow = False
    for i in range(slots.shape[0]):
        ask_ahead(high_pages, slots, i, highs[i])
        ask_ahead(low_pages, slots, i, lows[i])
        if not masked or mask[i]:
            slot = slots[i]
            high_before = load_value(high_pages, slot, highs[i])
            low = load_value(low_pages, slot, lows[i]) + lows[i]
            high = high_before + highs[i]
            if low < lows[i]:
                high += np.int64(1)
            store_value(low_pages, slot, low)
            store_value(high_pages, slot, high)
            overflow |= ((high_before ^ high) & (highs[i] ^ high)) < 0 or has_more_digits(high, low, bound)
    return overflow


@kernel
def least_decimals(
    high_pages: Pages, low_pages: Pages, slots: NDArray[np.int32], highs: Highs, lows: Lows, mask: NDArray[np.uint8]
) -> None:
    """Lower the results of slots to smaller decimals. The identity is the greatest number of 128 bits."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(high_pages, slots, i, highs[i])
        ask_ahead(low_pages, slots, i, lows[i])
        if not masked or mask[i]:
            high, low = load_value(high_pages, slots[i], highs[i]), load_value(low_pages, slots[i], lows[i])
            if highs[i] < high or (highs[i] == high and lows[i] < low):
                store_value(high_pages, slots[i], highs[i])
                store_value(low_pages, slots[i], lows[i])


@kernel
def greatest_decimals(
    high_pages: Pages, low_pages: Pages, slots: NDArray[np.int32], highs: Highs, lows: Lows, mask: NDArray[np.uint8]
) -> None:
    """Raise the results of slots to greater decimals. The identity is the least number of 128 bits."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(high_pages, slots, i, highs[i])
        ask_ahead(low_pages, slots, i, lows[i])
        if not masked or mask[i]:
            high, low = load_value(high_pages, slots[i], highs[i]), load_value(low_pages, slots[i], lows[i])
            if highs[i] > high or (highs[i] == high and lows[i] > low):
                store_value(high_pages, slots[i], highs[i])
                store_value(low_pages, slots[i], lows[i])
