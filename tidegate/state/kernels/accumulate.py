"""Grouped accumulation: add a batch of values to the accumulators of their slots, in place, in pages (`paged.py`).

Rules: rows where `mask` is 0 (nulls) change nothing; an empty `mask` (`NO_MASK`) means no nulls; rows are
taken in order, so float sums are the same on every run. `sum_int64` reports an overflow instead of wrapping
around. In the order of `minimum` and `maximum` NaN is greater than any number (Spark's order, and one that
does not depend on row order).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, ask_ahead, load_value, store_value

Slots = NDArray[np.int32]
Mask = NDArray[np.uint8]


@kernel
def count(counts: Pages, slots: Slots, mask: Mask) -> None:
    """Add the number of rows of each slot. `counts` are pages of int64."""
    if mask.shape[0] == 0:
        for i in range(slots.shape[0]):
            ask_ahead(counts, slots, i, np.int64(0))
            store_value(counts, slots[i], load_value(counts, slots[i], np.int64(0)) + 1)
    else:
        for i in range(slots.shape[0]):
            ask_ahead(counts, slots, i, np.int64(0))
            store_value(counts, slots[i], load_value(counts, slots[i], np.int64(0)) + np.int64(mask[i]))


@kernel
def tally(counts: NDArray[np.int64], slots: Slots) -> None:
    """Add the number of rows of each slot to one array: `numpy.bincount` makes a copy of narrow slots first."""
    for slot in slots:
        counts[slot] += 1


@kernel
def discount(counts: Pages, slots: Slots, mask: Mask) -> None:
    """Take the number of rows of each slot away from what `count` has added."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(counts, slots, i, np.int64(0))
        if not masked or mask[i]:
            store_value(counts, slots[i], load_value(counts, slots[i], np.int64(0)) - 1)


@kernel
def mark(flags: Pages, slots: Slots, mask: Mask) -> None:
    """Set the flag of each slot that has a row. `flags` are pages of uint8."""
    if mask.shape[0] == 0:
        for i in range(slots.shape[0]):
            ask_ahead(flags, slots, i, np.uint8(0))
            store_value(flags, slots[i], np.uint8(1))
    else:
        for i in range(slots.shape[0]):
            ask_ahead(flags, slots, i, np.uint8(0))
            if mask[i]:
                store_value(flags, slots[i], np.uint8(1))


@kernel
def set_bits(seen: Pages, slots: Slots, bits: NDArray[np.int64], new: NDArray[np.int64]) -> None:
    """Set the bits of each slot. `new` gets those of each row that neither a row before it nor the slot had.

    `seen` are pages of int64.
    """
    for i in range(slots.shape[0]):
        ask_ahead(seen, slots, i, bits[i])
        had = load_value(seen, slots[i], bits[i])
        new[i] = bits[i] & ~had
        if new[i]:
            store_value(seen, slots[i], had | bits[i])


@kernel
def sum_float64(sums: Pages, slots: Slots, values: NDArray[np.float64], mask: Mask) -> None:
    """Add values to the sums of their slots. `sums` are pages of float64."""
    if mask.shape[0] == 0:
        for i in range(slots.shape[0]):
            ask_ahead(sums, slots, i, values[i])
            store_value(sums, slots[i], load_value(sums, slots[i], values[i]) + values[i])
    else:
        for i in range(slots.shape[0]):
            ask_ahead(sums, slots, i, values[i])
            if mask[i]:
                store_value(sums, slots[i], load_value(sums, slots[i], values[i]) + values[i])


@kernel
def sum_int64(sums: Pages, slots: Slots, values: NDArray[np.int64], mask: Mask) -> bool:
    """Add values to the sums of their slots. True when a sum left the range of int64 (it is wrong then)."""
    masked = mask.shape[0] > 0
    overflow = np.int64(0)
    for i in range(slots.shape[0]):
        ask_ahead(sums, slots, i, values[i])
        if not masked or mask[i]:
            before = load_value(sums, slots[i], values[i])
            after = before + values[i]
            # Negative when both summands have the sign that the sum lacks.
            overflow |= (before ^ after) & (values[i] ^ after)
            store_value(sums, slots[i], after)
    return bool(overflow < 0)


@kernel
def minimum(results: Pages, slots: Slots, values: NDArray[Any], mask: Mask) -> None:
    """Lower the results of slots (pages of the type of `values`) to smaller values.

    The identity is the type's greatest value (NaN for floats).
    """
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(results, slots, i, values[i])
        if not masked or mask[i]:
            known = load_value(results, slots[i], values[i])
            if values[i] < known or known != known:
                store_value(results, slots[i], values[i])


@kernel
def maximum(results: Pages, slots: Slots, values: NDArray[Any], mask: Mask) -> None:
    """Raise the results of slots (pages of the type of `values`) to greater values.

    The identity is the type's smallest value.
    """
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(results, slots, i, values[i])
        if not masked or mask[i]:
            value = values[i]
            if value > load_value(results, slots[i], value) or value != value:
                store_value(results, slots[i], value)
