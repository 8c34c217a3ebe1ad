"""Grouped accumulation: adds a batch of values to the accumulators of their slots, in place, in pages (`paged.py`).

There are counts, flags, sums, extremes, and moments (count, mean and sum of squared differences, for variances). A
decimal of 128 bits is two words of its unscaled integer, the high word signed and the low word unsigned. Columns that
are added or compared must therefore have the same scale. Rules:

- Rows where `mask` is 0 (nulls) change nothing. An empty `mask` (`NO_MASK`) means no nulls.
- Rows are added in order, so float sums are identical in every run and for every division into batches.
- With `after`, an array with one value per row, `after[i]` is set to the accumulator of slot `slots[i]` after row i was
  added. A masked row gets the accumulator after the earlier rows. Without `after` only the accumulators change.
- Sums report an overflow, of int64 or of the digits of a decimal, instead of wrapping around.
- NaN is greater than any number. Spark uses the same order, which does not depend on the order of rows.
- Moments are added with Welford's formula and merged with the formula of Chan, Golub and LeVeque ("Updating Formulae
  and a Pairwise Algorithm for Computing Sample Variances", 1979). Neither subtracts two large sums, which would lose a
  small variance around a large mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, ask_ahead, load_value, store_value

Slots = NDArray[np.int32]
Mask = NDArray[np.uint8]
Highs = NDArray[np.int64]
Lows = NDArray[np.uint64]

_NO_INT64: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_NO_UINT64: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
_NO_FLOAT64: NDArray[np.float64] = np.zeros(0, dtype=np.float64)
_NO_FLAGS: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)


def count(counts: Pages, slots: Slots, mask: Mask, after: NDArray[np.int64] = _NO_INT64) -> None:
    """Increases the count of each row's slot by one. `counts` are pages of int64."""
    _count(counts, slots, mask, after)


def mark(flags: Pages, slots: Slots, mask: Mask, after: NDArray[np.uint8] = _NO_FLAGS) -> None:
    """Sets the flag of each row's slot to 1. `flags` are pages of uint8."""
    _mark(flags, slots, mask, after)


def sum_float64(
    sums: Pages, slots: Slots, values: NDArray[np.float64], mask: Mask, after: NDArray[np.float64] = _NO_FLOAT64
) -> None:
    """Adds each value to the sum of its slot. `sums` are pages of float64."""
    _sum_float64(sums, slots, values, mask, after)


def sum_int64(
    sums: Pages, slots: Slots, values: NDArray[np.int64], mask: Mask, after: NDArray[np.int64] = _NO_INT64
) -> bool:
    """Adds each value to the sum of its slot. Returns True if a sum has exceeded int64, and is therefore wrong."""
    return bool(_sum_int64(sums, slots, values, mask, after))


def sum_decimals(
    high_pages: Pages,
    low_pages: Pages,
    slots: Slots,
    highs: Highs,
    lows: Lows,
    mask: Mask,
    digits: int,
    after_highs: Highs = _NO_INT64,
    after_lows: Lows = _NO_UINT64,
) -> bool:
    """Adds each decimal to the sum of its slot. Returns True if a sum has more than `digits` digits, and is therefore
    wrong.
    """
    bound = 10**digits
    bound_words = np.array([bound >> 64, bound & (2**64 - 1)], dtype=np.uint64)
    return bool(_sum_decimals(high_pages, low_pages, slots, highs, lows, mask, bound_words, after_highs, after_lows))


def minimum(results: Pages, slots: Slots, values: NDArray[Any], mask: Mask, after: NDArray[Any] | None = None) -> None:
    """Replaces the result of a slot by each smaller value. `results` are pages of the type of `values`.

    The initial result of a slot must be the type's greatest value (NaN for floats).
    """
    _minimum(results, slots, values, mask, np.empty(0, values.dtype) if after is None else after)


def maximum(results: Pages, slots: Slots, values: NDArray[Any], mask: Mask, after: NDArray[Any] | None = None) -> None:
    """Replaces the result of a slot by each greater value. `results` are pages of the type of `values`.

    The initial result of a slot must be the type's smallest value.
    """
    _maximum(results, slots, values, mask, np.empty(0, values.dtype) if after is None else after)


def least_decimals(
    high_pages: Pages,
    low_pages: Pages,
    slots: Slots,
    highs: Highs,
    lows: Lows,
    mask: Mask,
    after_highs: Highs = _NO_INT64,
    after_lows: Lows = _NO_UINT64,
) -> None:
    """Replaces the result of a slot by each smaller decimal. The initial result must be the greatest number of 128
    bits.
    """
    _extreme_decimals(high_pages, low_pages, slots, highs, lows, mask, True, after_highs, after_lows)


def greatest_decimals(
    high_pages: Pages,
    low_pages: Pages,
    slots: Slots,
    highs: Highs,
    lows: Lows,
    mask: Mask,
    after_highs: Highs = _NO_INT64,
    after_lows: Lows = _NO_UINT64,
) -> None:
    """Replaces the result of a slot by each greater decimal. The initial result must be the least number of 128
    bits.
    """
    _extreme_decimals(high_pages, low_pages, slots, highs, lows, mask, False, after_highs, after_lows)


def add_moments(
    counts: Pages,
    means: Pages,
    squares: Pages,
    slots: Slots,
    values: NDArray[np.float64],
    mask: Mask,
    after_counts: NDArray[np.int64] = _NO_INT64,
    after_squares: NDArray[np.float64] = _NO_FLOAT64,
) -> None:
    """Adds each value to the moments of its slot: count, mean and sum of squared differences.

    `counts` are pages of int64, `means` and `squares` of float64.
    """
    _add_moments(counts, means, squares, slots, values, mask, after_counts, after_squares)


def decimal_words(column: pa.Array) -> tuple[Highs, Lows]:
    """Returns the high and the low 64-bit words of a decimal128 column, as copies. The words of nulls are undefined."""
    buffer = column.buffers()[1]
    if len(column) == 0 or buffer is None:
        return np.zeros(len(column), dtype=np.int64), np.zeros(len(column), dtype=np.uint64)
    words = np.frombuffer(buffer, dtype=np.uint64, count=2 * len(column), offset=16 * column.offset)
    return np.ascontiguousarray(words[1::2]).view(np.int64), np.ascontiguousarray(words[::2])


def decimals_of(highs: Highs, lows: Lows, valid: NDArray[np.uint8] | None, data_type: pa.DataType) -> pa.Array:
    """Returns a decimal128 column made of its high and low 64-bit words. Entries with `valid` 0 are null."""
    words = np.empty((len(highs), 2), dtype=np.uint64)
    words[:, 0] = lows
    words[:, 1] = highs.view(np.uint64)
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(data_type, len(highs), [bitmap, pa.py_buffer(words)])


@kernel
def tally(counts: NDArray[np.int64], slots: Slots) -> None:
    """Increases the count of each row's slot in an array. `numpy.bincount` would first copy slots of smaller types."""
    for slot in slots:
        counts[slot] += 1


@kernel
def discount(counts: Pages, slots: Slots, mask: Mask) -> None:
    """Decreases the count of each row's slot by one: the inverse of `count`."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(counts, slots, i, np.int64(0))
        if not masked or mask[i]:
            store_value(counts, slots[i], load_value(counts, slots[i], np.int64(0)) - 1)


@kernel
def set_bits(seen: Pages, slots: Slots, bits: NDArray[np.int64], new: NDArray[np.int64]) -> None:
    """Adds the bits of each row to its slot. `new[i]` gets the bits of row i that its slot did not have before.

    `seen` are pages of int64.
    """
    for i in range(slots.shape[0]):
        ask_ahead(seen, slots, i, bits[i])
        had = load_value(seen, slots[i], bits[i])
        new[i] = bits[i] & ~had
        if new[i]:
            store_value(seen, slots[i], had | bits[i])


@kernel
def remove_moments(
    counts: Pages, means: Pages, squares: Pages, slots: Slots, values: NDArray[np.float64], mask: Mask
) -> None:
    """Removes each value from the moments of its slot: the inverse of `add_moments`. All moments of an empty slot are
    zero.
    """
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(counts, slots, i, np.int64(0))
        ask_ahead(means, slots, i, 0.0)
        ask_ahead(squares, slots, i, 0.0)
        if not masked or mask[i]:
            slot, value = slots[i], values[i]
            count = load_value(counts, slot, np.int64(0)) - 1
            mean, square = load_value(means, slot, value), load_value(squares, slot, value)
            before = value - mean
            mean = mean - before / count if count > 0 else 0.0
            store_value(counts, slot, count)
            store_value(means, slot, mean)
            store_value(squares, slot, max(square - before * (value - mean), 0.0) if count > 1 else 0.0)


@kernel
def merge_moments(
    counts: Pages,
    means: Pages,
    squares: Pages,
    slots: Slots,
    other_counts: NDArray[np.int64],
    other_means: NDArray[np.float64],
    other_squares: NDArray[np.float64],
) -> None:
    """Merges other moments (count, mean, sum of squared differences) into slots: entry i into slot `slots[i]`."""
    for i in range(slots.shape[0]):
        ask_ahead(counts, slots, i, np.int64(0))
        ask_ahead(means, slots, i, 0.0)
        ask_ahead(squares, slots, i, 0.0)
        added = other_counts[i]
        if added == 0:
            continue
        slot = slots[i]
        known = load_value(counts, slot, added)
        count = known + added
        store_value(counts, slot, count)
        if known == 0:
            store_value(means, slot, other_means[i])
            store_value(squares, slot, other_squares[i])
        else:
            mean = load_value(means, slot, other_means[i])
            apart = other_means[i] - mean
            store_value(means, slot, mean + apart * (added / count))
            merged = load_value(squares, slot, mean) + other_squares[i] + apart * apart * (known * (added / count))
            store_value(squares, slot, merged)


@kernel
def _count(counts: Pages, slots: Slots, mask: Mask, after: NDArray[np.int64]) -> None:
    masked = mask.shape[0] > 0
    stored = after.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(counts, slots, i, np.int64(0))
        # Without a branch on the mask, which a processor could not predict.
        known = load_value(counts, slots[i], np.int64(0)) + (np.int64(mask[i]) if masked else np.int64(1))
        store_value(counts, slots[i], known)
        if stored:
            after[i] = known


@kernel
def _mark(flags: Pages, slots: Slots, mask: Mask, after: NDArray[np.uint8]) -> None:
    masked = mask.shape[0] > 0
    stored = after.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(flags, slots, i, np.uint8(0))
        if not masked or mask[i]:
            store_value(flags, slots[i], np.uint8(1))
        if stored:
            after[i] = load_value(flags, slots[i], np.uint8(0))


@kernel
def _sum_float64(
    sums: Pages, slots: Slots, values: NDArray[np.float64], mask: Mask, after: NDArray[np.float64]
) -> None:
    masked = mask.shape[0] > 0
    stored = after.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(sums, slots, i, values[i])
        known = load_value(sums, slots[i], values[i])
        total = known + values[i]
        # Chosen without a branch, because random nulls would be mispredicted.
        known = total if not masked or mask[i] else known
        store_value(sums, slots[i], known)
        if stored:
            after[i] = known


@kernel
def _sum_int64(sums: Pages, slots: Slots, values: NDArray[np.int64], mask: Mask, after: NDArray[np.int64]) -> bool:
    masked = mask.shape[0] > 0
    stored = after.shape[0] > 0
    overflow = np.int64(0)
    for i in range(slots.shape[0]):
        ask_ahead(sums, slots, i, values[i])
        known = load_value(sums, slots[i], values[i])
        total = known + values[i]
        total = total if not masked or mask[i] else known
        # Negative when both summands have the sign that the sum lacks.
        overflow |= (known ^ total) & (values[i] ^ total)
        store_value(sums, slots[i], total)
        if stored:
            after[i] = total
    return bool(overflow < 0)


@kernel
def _minimum(results: Pages, slots: Slots, values: NDArray[Any], mask: Mask, after: NDArray[Any]) -> None:
    masked = mask.shape[0] > 0
    stored = after.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(results, slots, i, values[i])
        known = load_value(results, slots[i], values[i])
        better = values[i] < known or known != known
        known = values[i] if better and (not masked or mask[i]) else known
        store_value(results, slots[i], known)
        if stored:
            after[i] = known


@kernel
def _maximum(results: Pages, slots: Slots, values: NDArray[Any], mask: Mask, after: NDArray[Any]) -> None:
    masked = mask.shape[0] > 0
    stored = after.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(results, slots, i, values[i])
        known = load_value(results, slots[i], values[i])
        better = values[i] > known or values[i] != values[i]
        known = values[i] if better and (not masked or mask[i]) else known
        store_value(results, slots[i], known)
        if stored:
            after[i] = known


@kernel
def _exceeds(high: Any, low: Any, bound: NDArray[np.uint64]) -> bool:
    """Returns whether the absolute value of a decimal is at least `bound`.

    The decimal and `bound`, a power of ten, have a high and a low 64-bit word.
    """
    size_high, size_low = np.uint64(high), low
    if high < 0:  # the two's complement: all bits inverted, plus one
        size_low = ~low + np.uint64(1)
        size_high = np.uint64(~high)
        if size_low == 0:
            size_high += np.uint64(1)
    return bool(size_high > bound[0] or (size_high == bound[0] and size_low >= bound[1]))


@kernel
def _sum_decimals(
    high_pages: Pages,
    low_pages: Pages,
    slots: Slots,
    highs: Highs,
    lows: Lows,
    mask: Mask,
    bound: NDArray[np.uint64],
    after_highs: Highs,
    after_lows: Lows,
) -> bool:
    masked = mask.shape[0] > 0
    stored = after_highs.shape[0] > 0
    overflow = False
    for i in range(slots.shape[0]):
        ask_ahead(high_pages, slots, i, highs[i])
        ask_ahead(low_pages, slots, i, lows[i])
        slot = slots[i]
        high = load_value(high_pages, slot, highs[i])
        low = load_value(low_pages, slot, lows[i])
        if not masked or mask[i]:
            before = high
            low += lows[i]
            high += highs[i]
            if low < lows[i]:
                high += np.int64(1)
            store_value(low_pages, slot, low)
            store_value(high_pages, slot, high)
            overflow |= ((before ^ high) & (highs[i] ^ high)) < 0 or _exceeds(high, low, bound)
        if stored:
            after_highs[i] = high
            after_lows[i] = low
    return overflow


@kernel
def _extreme_decimals(
    high_pages: Pages,
    low_pages: Pages,
    slots: Slots,
    highs: Highs,
    lows: Lows,
    mask: Mask,
    least: bool,
    after_highs: Highs,
    after_lows: Lows,
) -> None:
    masked = mask.shape[0] > 0
    stored = after_highs.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(high_pages, slots, i, highs[i])
        ask_ahead(low_pages, slots, i, lows[i])
        high, low = load_value(high_pages, slots[i], highs[i]), load_value(low_pages, slots[i], lows[i])
        if not masked or mask[i]:
            less = highs[i] < high or (highs[i] == high and lows[i] < low)
            greater = highs[i] > high or (highs[i] == high and lows[i] > low)
            if less if least else greater:
                high, low = highs[i], lows[i]
                store_value(high_pages, slots[i], high)
                store_value(low_pages, slots[i], low)
        if stored:
            after_highs[i] = high
            after_lows[i] = low


@kernel
def _add_moments(
    counts: Pages,
    means: Pages,
    squares: Pages,
    slots: Slots,
    values: NDArray[np.float64],
    mask: Mask,
    after_counts: NDArray[np.int64],
    after_squares: NDArray[np.float64],
) -> None:
    masked = mask.shape[0] > 0
    stored = after_counts.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(counts, slots, i, np.int64(0))
        ask_ahead(means, slots, i, 0.0)
        ask_ahead(squares, slots, i, 0.0)
        slot, value = slots[i], values[i]
        count = load_value(counts, slot, np.int64(0))
        square = load_value(squares, slot, value)
        if not masked or mask[i]:
            count += 1
            mean = load_value(means, slot, value)
            before = value - mean
            mean += before / count
            square += before * (value - mean)
            store_value(counts, slot, count)
            store_value(means, slot, mean)
            store_value(squares, slot, square)
        if stored:
            after_counts[i] = count
            after_squares[i] = square
