"""Memory for pages: cut from slabs so large that the operating system backs them with huge pages, and used again.

Random access over a large state would miss the translation cache for nearly every value if each page lay somewhere in
the heap; and the copies that follow a freeze would each touch fresh memory. So pages come from slabs (NumPy asks for
huge pages for arrays of 4 MiB), and a page that nobody holds any more, neither the owner nor a snapshot, goes to the
next one who asks. Slabs begin small, so that a small state stays small, and live as long as a page of theirs or the
arena does.

Rules: one thread takes pages; they are given back by any thread, by letting go of the array. An array that was made
from a page (a slice, a view) does not keep the page.
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.actors.kernels.paged import PAGE_ROWS

_SLAB_PAGES_MIN = 4
_SLAB_BYTES_MAX = 1 << 26

_Place: TypeAlias = tuple[NDArray[np.uint8], int]
"""A slab, and the offset of a page in it."""


class PageArena:
    """Pages of all widths for the columns of one operator."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def take(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A page of `PAGE_ROWS` values, with anything in it."""
        pool = self._pools.get(dtype.itemsize)
        if pool is None:
            pool = self._pools[dtype.itemsize] = _Pool(PAGE_ROWS * dtype.itemsize)
        return pool.take(dtype)

    @property
    def reserved_bytes(self) -> int:
        """Size of all slabs."""
        return sum(pool.reserved_bytes for pool in self._pools.values())


class _Pool:
    """Pages of one size. A lent page tells by its weak reference when it is free again."""

    __slots__ = ("_free", "_lent", "_page_bytes", "reserved_bytes")

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._free: deque[_Place] = deque()
        self._lent: dict[int, weakref.ref[NDArray[Any]]] = {}
        self.reserved_bytes = 0

    def take(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        if not self._free:
            self._reserve()
        slab, offset = place = self._free.popleft()
        page = slab[offset : offset + self._page_bytes].view(dtype)
        # The reference knows the list of free places and not the pool: that goes as soon as its owner lets go of it.
        self._lent[page.ctypes.data] = weakref.ref(page, partial(_given_back, self._free, place))
        return page

    def _reserve(self) -> None:
        """One more slab: as large as all so far, within bounds."""
        size_bytes = max(_SLAB_PAGES_MIN * self._page_bytes, min(self.reserved_bytes, _SLAB_BYTES_MAX))
        slab = np.empty(size_bytes, dtype=np.uint8)
        self.reserved_bytes += size_bytes
        self._free.extend((slab, offset) for offset in range(0, size_bytes, self._page_bytes))


def _given_back(free: deque[_Place], place: _Place, _: weakref.ref[NDArray[Any]]) -> None:
    free.append(place)
