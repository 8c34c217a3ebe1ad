"""Columns that lie in pages: access to a value by its slot, and what copy-on-write and increments ask of slots.

A page holds the values of `PAGE_ROWS` slots one behind the other; slot s lies in page `s >> PAGE_BITS`. Kernels get the
pages of a column as an array of their addresses, so that replacing one page (copy-on-write) moves no other.

Rules: whoever hands addresses to a kernel keeps the pages alive meanwhile, and every slot within them. A kernel of this
module or of `accumulate.py` is the only code that follows an address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels import page_size
from tidegate.state.kernels.jit import Instruction, kernel

PAGE_BITS, PAGE_ROWS = page_size.PAGE_BITS, page_size.PAGE_ROWS
AHEAD = 128
"""Rows between asking for a slot's cache line and using it, so that the misses of several rows overlap.

A row takes about a nanosecond, memory more than a hundred: with fewer rows a line is not there when its turn comes.
"""
CACHED_PAGES = 8
"""So many pages of a column stay in the cache: nobody waits for their slots."""

Pages = NDArray[np.uintp]
"""Addresses of the pages of one column."""
Bitmap = NDArray[np.uint64]
"""A bit a slot."""

NO_PAGES: Pages = np.zeros(0, dtype=np.uintp)
"""Of a column without such pages (validity, where nothing is null)."""


load_value = cast(Callable[[Pages, Any, Any], Any], Instruction("load_value"))
"""`load_value(pages, slot, like)`: the value of a slot, of the type that the scalar `like` has."""

load_at = cast(Callable[[Any, Any, Any], Any], Instruction("load_at"))
"""`load_at(page, position, like)`: the value at a position of one page, given by its address."""

store_value = cast(Callable[[Pages, Any, Any], None], Instruction("store_value"))
"""`store_value(pages, slot, value)`: set the value of a slot; the type of `value` must be that of the pages."""

store_at = cast(Callable[[Any, Any, Any], None], Instruction("store_at"))
"""`store_at(page, position, value)`: set the value at a position of one page."""

prefetch_value = cast(Callable[[Pages, Any, Any], None], Instruction("prefetch_value"))
"""`prefetch_value(pages, slot, like)`: start loading the cache line of a slot, soon to be written."""


@kernel
def ask_ahead(pages: Pages, slots: NDArray[np.int32], row: int, like: Any) -> None:
    """Ask for the cache line of the slot that has its turn `AHEAD` rows after this one, unless it is in the cache."""
    if pages.shape[0] > CACHED_PAGES:
        prefetch_value(pages, slots[min(row + AHEAD, slots.shape[0] - 1)], like)


def gathered(pages: Pages, slots: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Values of some slots, in new memory; `dtype` is that of the pages."""
    values = np.empty(len(slots), dtype=dtype)
    # Kernels know integers of each width: bits are all that is moved.
    _gather(pages, slots.astype(np.int32, copy=False), values.view(f"i{dtype.itemsize}"))
    return values


def place(pages: Pages, slots: NDArray[np.int32], places: NDArray[np.int32], values: NDArray[Any]) -> None:
    """Put the value of `slots[i]` to `values[places[i]]`; each place comes once. `values` has the type of the pages."""
    _place(pages, slots, places.view(np.uint32), values.view(f"i{values.dtype.itemsize}"))


def place_run(pages: Pages, first_slot: int, places: NDArray[np.int32], values: NDArray[Any]) -> None:
    """`place` for the slots from `first_slot` on. Faster: it looks a page up once."""
    _place_run(pages, first_slot, places.view(np.uint32), values.view(f"i{values.dtype.itemsize}"))


def scatter(pages: Pages, slots: NDArray[Any], values: NDArray[Any]) -> None:
    """Set the values of some slots; the type of `values` is that of the pages."""
    raw = np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}")
    _scatter(pages, slots.astype(np.int32, copy=False), raw)


def put_behind(pages: Pages, first_slot: int, values: NDArray[Any]) -> None:
    """Set the values of the slots from `first_slot` on; the type of `values` is that of the pages."""
    _put_behind(pages, first_slot, np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}"))


def touched_pages(slots: NDArray[np.int32], pins: NDArray[np.int32]) -> NDArray[np.int32]:
    """Pages that some slots lie in and whose entry in `pins` is not 0, each once."""
    touched = np.empty(min(len(slots), len(pins)), dtype=np.int32)
    return touched[: _touched(slots, pins, np.zeros(len(pins), dtype=np.uint8), touched)]


@kernel
def copy_whole(sources: Pages, targets: Pages, words: int) -> None:
    """Copy pages of so many words of 8 bytes, each to another one."""
    for page in range(sources.shape[0]):
        source, target = sources[page], targets[page]
        for i in range(words):
            store_at(target, i, load_at(source, i, np.int64(0)))


@kernel
def mark_slots(bitmap: Bitmap, slots: NDArray[np.int32]) -> None:
    """Set the bits of some slots."""
    for i in range(slots.shape[0]):
        slot = np.int64(slots[i])
        bitmap[slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)


@kernel
def mark_below(bitmap: Bitmap, slots_below: int, slots: NDArray[np.int32]) -> None:
    """Set the bits of those of some slots that are below a number."""
    for i in range(slots.shape[0]):
        slot = np.int64(slots[i])
        if slot < slots_below:
            bitmap[slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)


@kernel
def mark_first(bitmap: Bitmap, slots_below: int, slots: NDArray[np.int32], first: NDArray[np.int32]) -> int:
    """Set the bits of those of some slots that are below a number; slots whose bit was clear go to `first`.

    How many these are.
    """
    found = 0
    for i in range(slots.shape[0]):
        slot = np.int64(slots[i])
        if slot < slots_below:
            bit = np.uint64(1) << np.uint64(slot & 63)
            bits = bitmap[slot >> 6]
            if not bits & bit:
                bitmap[slot >> 6] = bits | bit
                first[found] = slots[i]
                found += 1
    return found


@kernel
def revive(flags: Pages, slots: NDArray[np.int32], rows: NDArray[np.int32], revived: NDArray[np.int32]) -> int:
    """Set the flags (uint8) of the slots that some rows have; those rows whose flag was clear go to `revived`.

    How many these are. No two of the rows have one slot.
    """
    found = 0
    for i in range(rows.shape[0]):
        slot = slots[rows[i]]
        if load_value(flags, slot, np.uint8(0)) == np.uint8(0):
            store_value(flags, slot, np.uint8(1))
            revived[found] = rows[i]
            found += 1
    return found


@kernel
def _gather(pages: Pages, slots: NDArray[np.int32], values: NDArray[Any]) -> None:
    for i in range(slots.shape[0]):
        ask_ahead(pages, slots, i, values[i])
        values[i] = load_value(pages, slots[i], values[i])


@kernel
def _place(pages: Pages, slots: NDArray[np.int32], places: NDArray[np.uint32], values: NDArray[Any]) -> None:
    for i in range(slots.shape[0]):
        ask_ahead(pages, slots, i, values[0])
        values[places[i]] = load_value(pages, slots[i], values[0])


@kernel
def _place_run(pages: Pages, first_slot: int, places: NDArray[np.uint32], values: NDArray[Any]) -> None:
    done = 0
    while done < places.shape[0]:
        slot = first_slot + done
        page, start = pages[slot >> PAGE_BITS], slot & (PAGE_ROWS - 1)
        rows = min(PAGE_ROWS - start, places.shape[0] - done)
        for i in range(rows):
            values[places[done + i]] = load_at(page, start + i, values[0])
        done += rows


@kernel
def _scatter(pages: Pages, slots: NDArray[np.int32], values: NDArray[Any]) -> None:
    for i in range(slots.shape[0]):
        ask_ahead(pages, slots, i, values[i])
        store_value(pages, slots[i], values[i])


@kernel
def _put_behind(pages: Pages, first_slot: int, values: NDArray[Any]) -> None:
    for i in range(values.shape[0]):
        store_value(pages, first_slot + i, values[i])


@kernel
def _touched(
    slots: NDArray[np.int32], pins: NDArray[np.int32], seen: NDArray[np.uint8], touched: NDArray[np.int32]
) -> int:
    found = 0
    for i in range(slots.shape[0]):
        page = slots[i] >> PAGE_BITS
        if pins[page] != 0 and not seen[page]:
            seen[page] = 1
            touched[found] = page
            found += 1
    return found
