"""Grouped accumulation that keeps what each row has made of its slot: the results after each row, not after each batch.

Rules:

- A kernel changes the accumulators exactly as its counterpart in `accumulate.py`, `moments.py` or `decimals.py` does,
  one row at a time and in the order of the rows. So a row has the same result wherever batches are cut, to the bit.
- `after[i]` is the accumulator of slot `slots[i]` when row i has been added. A row with `mask` 0 adds nothing and finds
  what the rows before it have left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.decimals import Highs, Lows, has_more_digits
from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, ask_ahead, load_value, store_value

Slots = NDArray[np.int32]
Mask = NDArray[np.uint8]


@kernel
def running_count(counts: Pages, slots: Slots, mask: Mask, after: NDArray[np.int64]) -> None:
    """Count the rows of each slot. `counts` are pages of int64."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(counts, slots, i, np.int64(0))
        known = load_value(counts, slots[i], np.int64(0))
        if not masked or mask[i]:
            known += 1
            store_value(counts, slots[i], known)
        after[i] = known


@kernel
def running_mark(flags: Pages, slots: Slots, mask: Mask, after: NDArray[np.uint8]) -> None:
    """Set the flag of each slot that has a row. `flags` are pages of uint8."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(flags, slots, i, np.uint8(0))
        if not masked or mask[i]:
            store_value(flags, slots[i], np.uint8(1))
        after[i] = load_value(flags, slots[i], np.uint8(0))


@kernel
def running_sum_float64(
    sums: Pages, slots: Slots, values: NDArray[np.float64], mask: Mask, after: NDArray[np.float64]
) -> None:
    """Add values to the sums of their slots. `sums` are pages of float64."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(sums, slots, i, values[i])
        known = load_value(sums, slots[i], values[i])
        if not masked or mask[i]:
            known += values[i]
            store_value(sums, slots[i], known)
        after[i] = known


@kernel
def running_sum_int64(
    sums: Pages, slots: Slots, values: NDArray[np.int64], mask: Mask, after: NDArray[np.int64]
) -> bool:
    """Add values to the sums of their slots. True when a sum left the range of int64 (it is wrong then)."""
    masked = mask.shape[0] > 0
    overflow = np.int64(0)
    for i in range(slots.shape[0]):
        ask_ahead(sums, slots, i, values[i])
        before = load_value(sums, slots[i], values[i])
        if not masked or mask[i]:
            total = before + values[i]
            # Negative when both summands have the sign that the sum lacks.
            overflow |= (before ^ total) & (values[i] ^ total)
            store_value(sums, slots[i], total)
            before = total
        after[i] = before
    return bool(overflow < 0)


@kernel
def running_minimum(results: Pages, slots: Slots, values: NDArray[Any], mask: Mask, after: NDArray[Any]) -> None:
    """Lower the results of slots (pages of the type of `values`) to smaller values. NaN is greater than any number."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(results, slots, i, values[i])
        known = load_value(results, slots[i], values[i])
        if (not masked or mask[i]) and (values[i] < known or known != known):
            known = values[i]
            store_value(results, slots[i], known)
        after[i] = known


@kernel
def running_maximum(results: Pages, slots: Slots, values: NDArray[Any], mask: Mask, after: NDArray[Any]) -> None:
    """Raise the results of slots (pages of the type of `values`) to greater values. NaN is greater than any number."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(results, slots, i, values[i])
        known = load_value(results, slots[i], values[i])
        if (not masked or mask[i]) and (values[i] > known or values[i] != values[i]):
            known = values[i]
            store_value(results, slots[i], known)
        after[i] = known


@kernel
def running_moments(
    counts: Pages,
    means: Pages,
    squares: Pages,
    slots: Slots,
    values: NDArray[np.float64],
    mask: Mask,
    after_counts: NDArray[np.int64],
    after_squares: NDArray[np.float64],
) -> None:
    """Add values to the counts, means and sums of squared differences of their slots, as `add_moments`."""
    masked = mask.shape[0] > 0
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
        after_counts[i] = count
        after_squares[i] = square


def running_sum_decimals(
    high_pages: Pages,
    low_pages: Pages,
    slots: Slots,
    words: tuple[Highs, Lows],
    mask: Mask,
    digits: int,
    after: tuple[Highs, Lows],
) -> bool:
    """Add decimals to the sums of their slots. True when a sum has more than `digits` digits (it is wrong then)."""
    bound = 10**digits
    bounds = np.array([bound >> 64, bound & (2**64 - 1)], dtype=np.uint64)
    return bool(_sum_decimals(high_pages, low_pages, slots, *words, mask, bounds, *after))


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
            overflow |= ((before ^ high) & (highs[i] ^ high)) < 0 or has_more_digits(high, low, bound)
        after_highs[i] = high
        after_lows[i] = low
    return overflow


@kernel
def running_least_decimals(
    high_pages: Pages,
    low_pages: Pages,
    slots: Slots,
    highs: Highs,
    lows: Lows,
    mask: Mask,
    after_highs: Highs,
    after_lows: Lows,
) -> None:
    """Lower the results of slots to smaller decimals."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(high_pages, slots, i, highs[i])
        ask_ahead(low_pages, slots, i, lows[i])
        high, low = load_value(high_pages, slots[i], highs[i]), load_value(low_pages, slots[i], lows[i])
        if (not masked or mask[i]) and (highs[i] < high or (highs[i] == high and lows[i] < low)):
            high, low = highs[i], lows[i]
            store_value(high_pages, slots[i], high)
            store_value(low_pages, slots[i], low)
        after_highs[i] = high
        after_lows[i] = low


@kernel
def running_greatest_decimals(
    high_pages: Pages,
    low_pages: Pages,
    slots: Slots,
    highs: Highs,
    lows: Lows,
    mask: Mask,
    after_highs: Highs,
    after_lows: Lows,
) -> None:
    """Raise the results of slots to greater decimals."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(high_pages, slots, i, highs[i])
        ask_ahead(low_pages, slots, i, lows[i])
        high, low = load_value(high_pages, slots[i], highs[i]), load_value(low_pages, slots[i], lows[i])
        if (not masked or mask[i]) and (highs[i] > high or (highs[i] == high and lows[i] > low)):
            high, low = highs[i], lows[i]
            store_value(high_pages, slots[i], high)
            store_value(low_pages, slots[i], low)
        after_highs[i] = high
        after_lows[i] = low


@kernel
def newest_chosen(
    groups: NDArray[np.int32], chosen: NDArray[np.uint8], newest: NDArray[np.int64], after: NDArray[np.int64]
) -> None:
    """Set `after[i]` to the newest row of the group of row i that is chosen, up to row i itself.

    `newest` has the row of each group from before, and has the last one in the end.
    """
    for i in range(groups.shape[0]):
        if chosen[i]:
            newest[groups[i]] = i
        after[i] = newest[groups[i]]


@kernel
def running_strings(
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    rows: NDArray[np.int64],
    groups: NDArray[np.int32],
    mask: Mask,
    best: NDArray[np.int64],
    after: NDArray[np.int64],
    greatest: bool,
) -> None:
    """Set `after[i]` to the row with the least or the greatest bytes among `rows[: i + 1]` that are in the group of i.

    The first of several. `best` has the row of each group from before, -1 for none, and has the last one in the end.
    """
    masked = mask.shape[0] > 0
    for i in range(rows.shape[0]):
        row, known = rows[i], best[groups[i]]
        if not masked or mask[i]:
            if known < 0:
                known = row
            else:
                at, of_known = offsets[row], offsets[known]
                length, known_length = offsets[row + 1] - at, offsets[known + 1] - of_known
                order = length - known_length
                for j in range(min(length, known_length)):
                    if data[at + j] != data[of_known + j]:
                        order = np.int64(data[at + j]) - np.int64(data[of_known + j])
                        break
                if (order > 0) if greatest else (order < 0):
                    known = row
            best[groups[i]] = known
        after[i] = known
