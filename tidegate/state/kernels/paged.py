"""Columns in pages: access to a value by its slot, and marking slots for copy-on-write and increments.

A page contains the values of `PAGE_ROWS` consecutive slots; slot s is in page `s >> PAGE_BITS`. Kernels get the pages
of a column as an array of their addresses, so that replacing one page (copy-on-write) does not move the other pages.

Rules: the caller of a kernel keeps the pages alive during the call, and passes only slots that the pages contain. Only
the kernels of this folder dereference an address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import Instruction, kernel
from tidegate.state.kernels.machine_code import page_size

PAGE_BITS = page_size.PAGE_BITS
PAGE_ROWS = page_size.PAGE_ROWS
AHEAD = 128
"""How many rows before its use the cache line of a slot is prefetched, so that the misses of several rows overlap.

A row takes about a nanosecond, memory more than a hundred. With fewer rows the line would not arrive in time.
"""
CACHED_PAGES = 8
"""A column with up to this many pages stays in the cache and needs no prefetching."""

Pages = NDArray[np.uintp]
"""Addresses of the pages of one column."""
Bitmap = NDArray[np.uint64]
"""One bit per slot."""

NO_PAGES: Pages = np.zeros(0, dtype=np.uintp)
"""Represents the pages of a column that has none, such as the validity of a column without nulls."""


load_value = cast(Callable[[Pages, Any, Any], Any], Instruction("load_value"))
"""`load_value(pages, slot, like)`: the value of a slot, of the type that the scalar `like` has."""

load_at = cast(Callable[[Any, Any, Any], Any], Instruction("load_at"))
"""`load_at(page, position, like)`: the value at a position of one page, given by its address."""

store_value = cast(Callable[[Pages, Any, Any], None], Instruction("store_value"))
"""`store_value(pages, slot, value)`: set the value of a slot. `value` must have the type of the pages."""

store_at = cast(Callable[[Any, Any, Any], None], Instruction("store_at"))
"""`store_at(page, position, value)`: set the value at a position of one page."""

prefetch_value = cast(Callable[[Pages, Any, Any], None], Instruction("prefetch_value"))
"""`prefetch_value(pages, slot, like)`: start loading the cache line of a slot, soon to be written."""


@kernel
def ask_ahead(pages: Pages, slots: NDArray[np.int32], row: int, like: Any) -> None:
    """Prefetches the cache line of a row that is `AHEAD` rows after row `row`, unless the column is small enough to
    stay in the cache.
    """
    if pages.shape[0] > CACHED_PAGES:
        prefetch_value(pages, slots[min(row + AHEAD, slots.shape[0] - 1)], like)


def gathered(pages: Pages, slots: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the values of some slots, as a copy. `dtype` is the type of the pages."""
    values = np.empty(len(slots), dtype=dtype)
    # Integers of each width suffice, because only bits are copied.
    _gather(pages, slots.astype(np.int32, copy=False), values.view(f"i{dtype.itemsize}"))
    return values


def place(pages: Pages, slots: NDArray[np.int32], places: NDArray[np.int32], values: NDArray[Any]) -> None:
    """Copies the value of `slots[i]` to `values[places[i]]`. The indices `places` are distinct. `values` has the type
    of the pages.
    """
    _place(pages, slots, places.view(np.uint32), values.view(f"i{values.dtype.itemsize}"))


def place_run(pages: Pages, first_slot: int, places: NDArray[np.int32], values: NDArray[Any]) -> None:
    """Copies the values of the slots from `first_slot` on: slot `first_slot + i` to `values[places[i]]`.

    Faster than `place`, because each page is looked up once.
    """
    _place_run(pages, first_slot, places.view(np.uint32), values.view(f"i{values.dtype.itemsize}"))


def scatter(pages: Pages, slots: NDArray[Any], values: NDArray[Any]) -> None:
    """Stores `values[i]` in slot `slots[i]`. `values` has the type of the pages."""
    raw = np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}")
    _scatter(pages, slots.astype(np.int32, copy=False), raw)


def put_behind(pages: Pages, first_slot: int, values: NDArray[Any]) -> None:
    """Stores values in the consecutive slots from `first_slot` on. `values` has the type of the pages."""
    _put_behind(pages, first_slot, np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}"))


def touched_pages(slots: NDArray[np.int32], pins: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the pages of these slots whose entry in `pins` is not 0, each once."""
    touched = np.empty(min(len(slots), len(pins)), dtype=np.int32)
    return touched[: _touched(slots, pins, np.zeros(len(pins), dtype=np.uint8), touched)]


@kernel
def copy_whole(sources: Pages, targets: Pages, words: int) -> None:
    """Copies whole pages of `words` 8-byte words: from the addresses `sources` to the addresses `targets`."""
    for page in range(sources.shape[0]):
        source, target = sources[page], targets[page]
        for i in range(words):
            store_at(target, i, load_at(source, i, np.int64(0)))


@kernel
def mark_slots(bitmap: Bitmap, slots: NDArray[np.int32]) -> None:
    """Sets the bits of these slots in a bitmap."""
    for i in range(slots.shape[0]):
        slot = np.int64(slots[i])
        bitmap[slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)


@kernel
def mark_below(bitmap: Bitmap, slots_below: int, slots: NDArray[np.int32]) -> None:
    """Sets the bits of these slots in a bitmap, but only of slots below `slots_below`."""
    for i in range(slots.shape[0]):
        slot = np.int64(slots[i])
        if slot < slots_below:
            bitmap[slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)


@kernel
def mark_first(bitmap: Bitmap, slots_below: int, slots: NDArray[np.int32], first: NDArray[np.int32]) -> int:
    """Sets the bits of these slots below `slots_below` in a bitmap.

    Writes the slots whose bit was not set before to `first`, and returns the number of these slots.
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
    """Sets the flags (uint8) of the slots of these rows, which must be distinct.

    Writes the rows whose flag was not set before to `revived`, and returns the number of these rows.
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
