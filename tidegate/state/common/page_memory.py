"""`PageMemory`: memory for the pages of columns, in slabs that the kernel may back by huge pages.

A large state has tens of thousands of pages of some kilobytes. Allocated one by one, they occupy memory pages of 4 KB.
Each first touch is then a page fault, and nearly each access to a random key misses the TLB. When the process dies, the
kernel frees these pages one by one before it reports the exit. Slabs of some megabytes make all three cheaper.

Rules:
- A page belongs to its array. When the last reference to the array is dropped, on any thread, the page is free again.
  A view of the array keeps it alive; a raw address does not.
- Free pages are reused before new ones, because new memory is expensive. For each page size, one unused slab is kept,
  or as many unused slabs as there are slabs in use. Short-lived pages therefore cost nothing, and the copies of the
  next snapshot reuse the memory of the last one. Further unused slabs are returned to the system.
- The content of a new page is undefined.
- The first pages of each size are allocated one by one, so a small state needs no slab.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLAB_BYTES = 1 << 23
"""A multiple of the size of a huge page, 2 MB on most machines."""
SINGLE_PAGES_MAX = 64
SINGLE_BYTES_MAX = 1 << 21
"""Up to this many pages of a size, and this many bytes, are allocated one by one before the first slab."""
BUFFER_BYTES_MIN = 1 << 18
"""Smaller buffers, in bytes, are allocated without pages."""

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def singles_max(page_bytes: int) -> int:
    """Returns how many pages of this size are allocated one by one, before memory is allocated for many at once."""
    return min(SINGLE_PAGES_MAX, SINGLE_BYTES_MAX // page_bytes)


def address_of(array: NDArray[Any]) -> int:
    """Returns the memory address of an array's values."""
    # `array.ctypes.data` is the same, but creates three objects to find it.
    address: int = array.__array_interface__["data"][0]
    return address


class _Slab:
    """One memory mapping, divided into pages of one size, which are allocated separately."""

    __slots__ = ("address", "free", "memory", "pages", "used")

    def __init__(self, page_bytes: int) -> None:
        self.memory = mmap.mmap(-1, SLAB_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _HUGE_PAGES is not None:
            with suppress(OSError):  # a kernel without huge pages uses small ones
                self.memory.madvise(_HUGE_PAGES)
        self.address = address_of(np.frombuffer(self.memory, dtype=np.uint8))
        self.pages = SLAB_BYTES // page_bytes
        self.free = list(range(self.pages - 1, -1, -1))
        self.used: dict[int, _Page] = {}
        """Pages that have an array, by number. A weak reference must stay alive for its callback to run."""


class _Page(weakref.ref[NDArray[Any]]):
    """A weak reference to the array of a page. Its callback frees the page.

    There are many pages, so each has only two objects: this one and the array.
    """

    __slots__ = ("number", "slab")
    slab: _Slab
    number: int


class _Pages:
    """The allocator for pages of one size."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._singles = singles_max(page_bytes)
        """How many more pages are allocated one by one."""
        self._open: list[_Slab] = []
        """Slabs with free pages. The last one is used first."""
        self._returned: deque[_Page] = deque()
        """Pages whose arrays were freed. Any thread adds to it, at any time, even during a call of this class."""
        self._give_back: Callable[[Any], None] = self._returned.append
        self._slabs: set[_Slab] = set()
        """The set of all slabs. A slab and its pages are a reference cycle, which this set protects from collection."""
        self._in_use = 0
        """How many slabs have used pages."""

    def take(self, count: int, values: int, dtype: np.dtype[Any]) -> tuple[list[NDArray[Any]], NDArray[np.uintp]]:
        """Allocates several pages. Returns them as arrays, and their addresses."""
        self.take_back()
        pages, addresses = [], np.empty(count, dtype=np.uintp)
        for number in range(count):
            page, addresses[number] = self._page(values, dtype)
            pages.append(page)
        self.trim()
        return pages, addresses

    def _page(self, values: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], int]:
        if self._singles:
            self._singles -= 1
            single = np.empty(values, dtype=dtype)
            return single, address_of(single)
        if not self._open:
            self._open.append(_Slab(self._page_bytes))
            self._slabs.add(self._open[-1])
        slab = self._open[-1]
        self._in_use += len(slab.free) == slab.pages
        number = slab.free.pop()
        if not slab.free:
            self._open.pop()
        # Not `np.frombuffer`, which makes two objects more: views of the array keep the array all the same.
        start = number * self._page_bytes
        array: NDArray[Any] = np.ndarray(values, dtype, slab.memory, start)
        page = _Page(array, self._give_back)
        page.slab, page.number = slab, number
        slab.used[number] = page
        return array, slab.address + start

    def take_back(self) -> None:
        """Makes the memory of pages whose arrays were garbage-collected available again."""
        while self._returned:
            page = self._returned.popleft()
            slab = page.slab
            del slab.used[page.number]
            slab.free.append(page.number)
            if len(slab.free) == 1:
                self._open.append(slab)
            self._in_use -= len(slab.free) == slab.pages

    def trim(self) -> None:
        """Returns unused memory mappings (slabs) to the system if there are too many."""
        excess = len(self._slabs) - self._in_use - max(1, self._in_use)
        if excess > 0:
            unused = set([slab for slab in self._open if len(slab.free) == slab.pages][:excess])
            self._open = [slab for slab in self._open if slab not in unused]
            self._slabs -= unused

    @property
    def bytes(self) -> int:
        """Returns the total size of all memory mappings (slabs) in bytes."""
        return len(self._slabs) * SLAB_BYTES


class PageMemory:
    """Allocates memory pages of any size. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, _Pages] = {}

    def page(self, values: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Allocates a page, and returns it as an uninitialised array of `values` values."""
        (page,), _ = self.pages(1, values, dtype)
        return page

    def pages(self, count: int, values: int, dtype: np.dtype[Any]) -> tuple[list[NDArray[Any]], NDArray[np.uintp]]:
        """Returns several uninitialised arrays, and their addresses.

        Finding the address of an array takes as long as creating the array, so both are returned together.
        """
        page_bytes = values * dtype.itemsize
        with self._lock:
            pages = self._sizes.get(page_bytes)
            if pages is None:
                pages = self._sizes[page_bytes] = _Pages(page_bytes)
            return pages.take(count, values, dtype)

    def buffer(self, values: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised array of `values` values for a short time, for example to encode a chunk.

        An allocator would keep freed large arrays for each thread. Buffers use pages of a few sizes instead, which all
        threads reuse.
        """
        size_bytes = values * dtype.itemsize
        if not BUFFER_BYTES_MIN <= size_bytes <= SLAB_BYTES:
            return np.empty(values, dtype=dtype)
        page_bytes = 1 << (max(size_bytes, 2 * BUFFER_BYTES_MIN) - 1).bit_length()
        return self.page(page_bytes // dtype.itemsize, dtype)[:values]

    @property
    def bytes(self) -> int:
        """Returns the total size of all memory mappings (slabs) in bytes, after unused ones were returned to the
        system.
        """
        with self._lock:
            for pages in self._sizes.values():
                pages.take_back()
                pages.trim()
            return sum(pages.bytes for pages in self._sizes.values())


PAGE_MEMORY = PageMemory()
"""The page memory of the process, shared by the states of all its tasks."""
