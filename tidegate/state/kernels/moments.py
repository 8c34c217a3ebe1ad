"""Counts, means and sums of squared differences from the mean, in place, in pages: what variances are made of.

Rows are added by Welford's formula, accumulators are merged by that of Chan, Golub and LeVeque ("Updating Formulae and
a Pairwise Algorithm for Computing Sample Variances", 1979). Neither subtracts two large sums, which would leave nothing
of a small variance around a large mean. Rules: rows where `mask` is 0 (nulls) change nothing; an empty `mask` means no
nulls; rows are taken in order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, ask_ahead, load_value, store_value


@kernel
def add_moments(
    counts: Pages,
    means: Pages,
    squares: Pages,
    slots: NDArray[np.int32],
    values: NDArray[np.float64],
    mask: NDArray[np.uint8],
) -> None:
    """Add values to their slots. `counts` are pages of int64, the others of float64."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(counts, slots, i, np.int64(0))
        ask_ahead(means, slots, i, 0.0)
        ask_ahead(squares, slots, i, 0.0)
        if not masked or mask[i]:
            slot, value = slots[i], values[i]
            count = load_value(counts, slot, np.int64(0)) + 1
            mean = load_value(means, slot, value)
            before = value - mean
            mean += before / count
            store_value(counts, slot, count)
            store_value(means, slot, mean)
            store_value(squares, slot, load_value(squares, slot, value) + before * (value - mean))


@kernel
def remove_moments(
    counts: Pages,
    means: Pages,
    squares: Pages,
    slots: NDArray[np.int32],
    values: NDArray[np.float64],
    mask: NDArray[np.uint8],
) -> None:
    """Take values out of their slots again: `add_moments` backwards. Nothing is left of a slot without values."""
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
    slots: NDArray[np.int32],
    other_counts: NDArray[np.int64],
    other_means: NDArray[np.float64],
    other_squares: NDArray[np.float64],
) -> None:
    """Merge other accumulators into slots, row i into slot `slots[i]`."""
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
