"""Grouped accumulation: add a batch of values to the accumulators of their slots, in place.

Rules: rows where `mask` is 0 (nulls) change nothing; an empty `mask` (`NO_MASK`) means no nulls; rows are
taken in order, so float sums are the same on every run. `sum_int64` reports an overflow instead of wrapping
around. In the order of `minimum` and `maximum` NaN is greater than any number (Spark's order, and one that
does not depend on row order).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.actors.kernels.jit import kernel

Slots = NDArray[np.int32]
Mask = NDArray[np.uint8]


@kernel
def count(counts: NDArray[np.int64], slots: Slots, mask: Mask) -> None:
    """Add the number of rows of each slot."""
    if mask.shape[0] == 0:
        for i in range(slots.shape[0]):
            counts[slots[i]] += 1
    else:
        for i in range(slots.shape[0]):
            counts[slots[i]] += mask[i]


@kernel
def mark(flags: NDArray[np.uint8], slots: Slots, mask: Mask) -> None:
    """Set the flag of each slot that has a row."""
    if mask.shape[0] == 0:
        for i in range(slots.shape[0]):
            flags[slots[i]] = 1
    else:
        for i in range(slots.shape[0]):
            flags[slots[i]] |= mask[i]


@kernel
def sum_float64(sums: NDArray[np.float64], slots: Slots, values: NDArray[np.float64], mask: Mask) -> None:
    """Add values to the sums of their slots."""
    if mask.shape[0] == 0:
        for i in range(slots.shape[0]):
            sums[slots[i]] += values[i]
    else:
        for i in range(slots.shape[0]):
            if mask[i]:
                sums[slots[i]] += values[i]


@kernel
def sum_int64(sums: NDArray[np.int64], slots: Slots, values: NDArray[np.int64], mask: Mask) -> bool:
    """Add values to the sums of their slots. True when a sum left the range of int64 (it is wrong then)."""
    masked = mask.shape[0] > 0
    overflow = np.int64(0)
    for i in range(slots.shape[0]):
        if not masked or mask[i]:
            before = sums[slots[i]]
            after = before + values[i]
            # Negative when both summands have the sign that the sum lacks.
            overflow |= (before ^ after) & (values[i] ^ after)
            sums[slots[i]] = after
    return bool(overflow < 0)


@kernel
def minimum(results: NDArray[Any], slots: Slots, values: NDArray[Any], mask: Mask) -> None:
    """Lower the results of slots to smaller values.

    The identity is the type's greatest value (NaN for floats).
    """
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        if not masked or mask[i]:
            known = results[slots[i]]
            if values[i] < known or known != known:
                results[slots[i]] = values[i]


@kernel
def maximum(results: NDArray[Any], slots: Slots, values: NDArray[Any], mask: Mask) -> None:
    """Raise the results of slots to greater values. The identity is the type's smallest value."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        if not masked or mask[i]:
            value = values[i]
            if value > results[slots[i]] or value != value:
                results[slots[i]] = value
