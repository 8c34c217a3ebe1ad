"""`PageMemory`: memory for the pages of columns, in slabs that the kernel may back by huge pages.

A large state has tens of thousands of pages of some kilobytes. Taken one by one they lie in memory pages of 4 KB. Then
each first touch is a page fault, and nearly each access to a random key misses the TLB. When the process dies, the
kernel takes them back one by one before anybody learns of its death. In slabs of some megabytes all three cost less.

Rules:
- A page belongs to its array. When the last reference to the array goes, on any thread, the page is free again. A view
  of the array keeps it alive; a raw address does not.
- Free pages are used again before new ones, because memory that is new is dear. Of each size one slab without used
  pages is kept, and as many as there are with some. So a page that comes and goes costs nothing, and what the copies of
  one snapshot took is there for those of the next. All others go back to the system.
- The contents of a new page are undefined.
- The first pages of each size come one by one: a small state takes no slab.
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
"""So many pages of a size, and so many bytes, come one by one before the first slab."""
BUFFER_BYTES_MIN = 1 << 18
"""A smaller buffer is left to the allocator."""

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def singles_max(page_bytes: int) -> int:
    """How many pages of a size come one by one."""
    return min(SINGLE_PAGES_MAX, SINGLE_BYTES_MAX // page_bytes)


def address_of(array: NDArray[Any]) -> int:
    """Where the values of an array lie."""
    # `array.ctypes.data` is the same, but creates three objects to find it.
    address: int = array.__array_interface__["data"][0]
    return address


class _Slab:
    """Pages of one size behind one another."""

    __slots__ = ("address", "free", "memory", "pages", "used")

    def __init__(self, page_bytes: int) -> None:
        self.memory = mmap.mmap(-1, SLAB_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _HUGE_PAGES is not None:
            with suppress(OSError):  # a kernel without huge pages: small ones do
                self.memory.madvise(_HUGE_PAGES)
        self.address = address_of(np.frombuffer(self.memory, dtype=np.uint8))
        self.pages = SLAB_BYTES // page_bytes
        self.free = list(range(self.pages - 1, -1, -1))
        self.used: dict[int, _Page] = {}
        """Pages that have an array, by number. This keeps the references, or nobody would be told."""


class _Page(weakref.ref[NDArray[Any]]):
    """Tells when the array of a page is gone. A page has two objects, this one and its array: there are many pages."""

    __slots__ = ("number", "slab")
    slab: _Slab
    number: int


class _Pages:
    """The pages of one size."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._singles = singles_max(page_bytes)
        """How many pages are still to come one by one."""
        self._open: list[_Slab] = []
        """Slabs with free pages. The last one is used first."""
        self._returned: deque[_Page] = deque()
        """Pages whose arrays are gone. Any thread adds to it, at any moment, also within a call of this class."""
        self._give_back: Callable[[Any], None] = self._returned.append
        self._slabs: set[_Slab] = set()
        """All of them: with its pages a slab is a circle, which the garbage collector would take apart."""
        self._in_use = 0
        """How many slabs have used pages."""

    def take(self, count: int, values: int, dtype: np.dtype[Any]) -> tuple[list[NDArray[Any]], NDArray[np.uintp]]:
        """Several pages as arrays, and their addresses."""
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
        """Pages whose arrays are gone are free."""
        while self._returned:
            page = self._returned.popleft()
            slab = page.slab
            del slab.used[page.number]
            slab.free.append(page.number)
            if len(slab.free) == 1:
                self._open.append(slab)
            self._in_use -= len(slab.free) == slab.pages

    def trim(self) -> None:
        """Give slabs without used pages back to the system, where there are too many."""
        excess = len(self._slabs) - self._in_use - max(1, self._in_use)
        if excess > 0:
            unused = set([slab for slab in self._open if len(slab.free) == slab.pages][:excess])
            self._open = [slab for slab in self._open if slab not in unused]
            self._slabs -= unused

    @property
    def bytes(self) -> int:
        """What its slabs take."""
        return len(self._slabs) * SLAB_BYTES


class PageMemory:
    """Pages of any size. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, _Pages] = {}

    def page(self, values: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of so many values, in no particular state."""
        (page,), _ = self.pages(1, values, dtype)
        return page

    def pages(self, count: int, values: int, dtype: np.dtype[Any]) -> tuple[list[NDArray[Any]], NDArray[np.uintp]]:
        """Several of them, and their addresses: to ask an array for its own takes as long as to make it."""
        page_bytes = values * dtype.itemsize
        with self._lock:
            pages = self._sizes.get(page_bytes)
            if pages is None:
                pages = self._sizes[page_bytes] = _Pages(page_bytes)
            return pages.take(count, values, dtype)

    def buffer(self, values: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of so many values, in no particular state, for a short while: what is encoded, and written.

        An allocator keeps what large arrays have left for the thread that asks next, of each thread anew. These lie in
        pages of few sizes, which are used again whoever asks.
        """
        size_bytes = values * dtype.itemsize
        if not BUFFER_BYTES_MIN <= size_bytes <= SLAB_BYTES:
            return np.empty(values, dtype=dtype)
        page_bytes = 1 << (max(size_bytes, 2 * BUFFER_BYTES_MIN) - 1).bit_length()
        return self.page(page_bytes // dtype.itemsize, dtype)[:values]

    @property
    def bytes(self) -> int:
        """What the slabs take. What has become free since is counted out first."""
        with self._lock:
            for pages in self._sizes.values():
                pages.take_back()
                pages.trim()
            return sum(pages.bytes for pages in self._sizes.values())


PAGE_MEMORY = PageMemory()
"""That of the process: the states of all its tasks share it."""
