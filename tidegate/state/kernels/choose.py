"""Chooses one row for each slot: the first, the last, or that with the least or greatest value; in place, in pages.

Two steps, so that one choice serves columns of any number and type. A kernel goes through the rows of a batch in order,
and sets `chosen[i]` where row i takes the place of what its slot has. Then `store_chosen` stores the values of these
rows; of several rows of one slot the last one stays. Rules: rows where `mask` is 0 are not looked at; an empty `mask`
means all are. `seen` (pages of uint8) tells which slots have a row. NaN is greater than any number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, ask_ahead, load_value, store_value

Slots = NDArray[np.int32]
Mask = NDArray[np.uint8]
Chosen = NDArray[np.uint8]


@kernel
def choose_first(seen: Pages, slots: Slots, mask: Mask, chosen: Chosen) -> None:
    """Choose the first row of each slot that has none."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(seen, slots, i, np.uint8(0))
        if (not masked or mask[i]) and load_value(seen, slots[i], np.uint8(0)) == 0:
            store_value(seen, slots[i], np.uint8(1))
            chosen[i] = 1


@kernel
def choose_last(seen: Pages, slots: Slots, mask: Mask, chosen: Chosen) -> None:
    """Choose each row."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(seen, slots, i, np.uint8(0))
        if not masked or mask[i]:
            store_value(seen, slots[i], np.uint8(1))
            chosen[i] = 1


@kernel
def choose_least(
    seen: Pages, bests: Pages, slots: Slots, values: NDArray[Any], mask: Mask, chosen: Chosen, ties: bool
) -> None:
    """Choose rows with a value less than that of the slot, in `bests`; with `ties` also one that is equal."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(seen, slots, i, np.uint8(0))
        ask_ahead(bests, slots, i, values[i])
        if not masked or mask[i]:
            value, known = values[i], load_value(bests, slots[i], values[i])
            same = value == known or (value != value and known != known)
            less = value < known or (known != known and value == value)
            if load_value(seen, slots[i], np.uint8(0)) == 0 or less or (ties and same):
                store_value(seen, slots[i], np.uint8(1))
                store_value(bests, slots[i], value)
                chosen[i] = 1


@kernel
def choose_greatest(
    seen: Pages, bests: Pages, slots: Slots, values: NDArray[Any], mask: Mask, chosen: Chosen, ties: bool
) -> None:
    """Choose rows with a value greater than that of the slot, in `bests`; with `ties` also one that is equal."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(seen, slots, i, np.uint8(0))
        ask_ahead(bests, slots, i, values[i])
        if not masked or mask[i]:
            value, known = values[i], load_value(bests, slots[i], values[i])
            same = value == known or (value != value and known != known)
            greater = value > known or (value != value and known == known)
            if load_value(seen, slots[i], np.uint8(0)) == 0 or greater or (ties and same):
                store_value(seen, slots[i], np.uint8(1))
                store_value(bests, slots[i], value)
                chosen[i] = 1


def store_chosen(pages: Pages, slots: Slots, values: NDArray[Any], chosen: Chosen) -> None:
    """Store the values of the chosen rows; the type of `values` is that of the pages."""
    # Integers of each width are enough: bits are all that is moved.
    _store(pages, slots, np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}"), chosen)


@kernel
def _store(pages: Pages, slots: Slots, values: NDArray[Any], chosen: Chosen) -> None:
    for i in range(slots.shape[0]):
        ask_ahead(pages, slots, i, values[i])
        if chosen[i]:
            store_value(pages, slots[i], values[i])


@kernel
def choose_strings(
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    rows: NDArray[np.int64],
    groups: NDArray[np.int32],
    best: NDArray[np.int64],
    greatest: bool,
) -> None:
    """Set `best[g]` to the row with the least or the greatest bytes among `rows` that are in group g.

    The first of several. `best` is -1 for a group without a row; `groups[i]` is that of `rows[i]`.
    """
    for i in range(rows.shape[0]):
        row, known = rows[i], best[groups[i]]
        if known < 0:
            best[groups[i]] = row
            continue
        at, of_known = offsets[row], offsets[known]
        length, known_length = offsets[row + 1] - at, offsets[known + 1] - of_known
        order = length - known_length
        for j in range(min(length, known_length)):
            if data[at + j] != data[of_known + j]:
                order = np.int64(data[at + j]) - np.int64(data[of_known + j])
                break
        if (order > 0) if greatest else (order < 0):
            best[groups[i]] = row
