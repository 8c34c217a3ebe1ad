"""`PagedColumn`: a fixed-width column in pages, which snapshots share with their owner (copy-on-write).

Freezing a column takes references to its pages and pins them (`Pins`). No value is copied. Before the owner writes to a
pinned page, it replaces the page by a copy (`PagedColumn.copy_pages`), which is not pinned. Only the owner's thread
writes, copies and restores pages. The thread that writes a snapshot releases each page once it is encoded. Rules:

- Only the owner's thread pins pages, and reports which pages it has copied or put back. Any thread may release.
- The owner reads the pins without the lock. At worst it sees a pin that was just released, and copies a page
  needlessly.
- Each copy gets a version of its own. A page that was put back is therefore recognised by the snapshots that still
  read it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.page_memory import PAGE_MEMORY, address_of
from tidegate.state.kernels.columns import array_of, storage_dtype
from tidegate.state.kernels.paged import (
    NO_PAGES,
    PAGE_BITS,
    PAGE_ROWS,
    Pages,
    copy_whole,
    gathered,
    place,
    place_run,
    put_behind,
    scatter,
)
from tidegate.state.kernels.partition import Places

_VALID = np.dtype(np.uint8)

FormerPage = tuple[NDArray[Any], NDArray[Any] | None]
"""A page of a column and its validity. None if nothing had ever been null."""
_PAGES_MIN = 16


def pages_for(slots: int) -> int:
    """Returns how many pages are needed for this many slots."""
    return (slots + PAGE_ROWS - 1) >> PAGE_BITS


class PagedColumn:
    """A column with a fixed-width value for each slot, stored in memory pages.

    New slots contain the identity of the spec. From the first null on, the column also has validity pages (uint8, 1 for
    a value).
    """

    __slots__ = ("_addresses", "_arrays", "_valid", "_valid_addresses", "dtype", "spec")

    def __init__(self, spec: ValueSpec) -> None:
        dtype = storage_dtype(spec.data_type)
        assert dtype is not None, f"{spec.data_type} has no fixed-width storage"
        self.spec = spec
        self.dtype = dtype
        self._arrays: list[NDArray[Any]] = []
        self._addresses: Pages = NO_PAGES
        self._valid: list[NDArray[Any]] | None = None
        self._valid_addresses: Pages = NO_PAGES

    @property
    def pages(self) -> Pages:
        """Returns the addresses of the pages of values, valid until pages are added or copied."""
        return self._addresses

    @property
    def valid_pages(self) -> Pages:
        """Returns the addresses of the validity pages, or `NO_PAGES` if there has never been a null."""
        return self._valid_addresses

    def grow(self, pages: int) -> None:
        """Adds memory pages until the column has `pages` pages."""
        known = len(self._arrays)
        if pages <= known:
            return
        self._arrays += [_page_of(self.spec.identity, self.dtype) for _ in range(known, pages)]
        self._addresses = _extended(self._addresses, self._arrays)
        if self._valid is not None:
            self._valid += [_page_of(0, _VALID) for _ in range(known, pages)]
            self._valid_addresses = _extended(self._valid_addresses, self._valid)

    def start_nulls(self) -> Pages:
        """Starts to track validity, unless it is tracked already. Marks all slots as valid. Returns `valid_pages`."""
        if self._valid is None:
            self._valid = [_page_of(1, _VALID) for _ in self._arrays]
            self._valid_addresses = _extended(NO_PAGES, self._valid)
        return self._valid_addresses

    def reset(self, slots: NDArray[np.int32]) -> None:
        """Sets these slots to the identity, or to null if validity is tracked."""
        scatter(self._addresses, slots, np.full(len(slots), self.spec.identity, dtype=self.dtype))
        self.reset_valid(slots)

    def reset_valid(self, slots: NDArray[np.int32]) -> None:
        """Sets these slots to null, if the column tracks validity."""
        if self._valid is not None:
            scatter(self._valid_addresses, slots, np.zeros(len(slots), dtype=np.uint8))

    def copy_pages(self, pages: NDArray[np.int32]) -> list[FormerPage]:
        """Replaces pages by copies that the owner may write to. Returns the former pages."""
        values = _copied(self._arrays, self._addresses, pages, self.dtype)
        if self._valid is None:
            return [(former, None) for former in values]
        return list(zip(values, _copied(self._valid, self._valid_addresses, pages, _VALID), strict=True))

    def put_back(self, page: int, former: FormerPage) -> None:
        """Restores a page that `copy_pages` has returned, in place of its copy. `page` is the number of the page."""
        values, valid = former
        self._arrays[page], self._addresses[page] = values, address_of(values)
        if self._valid is not None:
            valid = _page_of(1, _VALID) if valid is None else valid
            self._valid[page], self._valid_addresses[page] = valid, address_of(valid)

    def take(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the values of these slots as an Arrow array (a copy)."""
        return _taken(self.spec, self.dtype, self._addresses, self._valid_addresses, slots)

    def raw(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Returns the values of these slots, as a copy. The value of a null is undefined."""
        return gathered(self._addresses, slots, self.dtype)

    def put(self, slots: NDArray[np.int32], values: pa.Array) -> None:
        """Stores values in these slots, from an Arrow array of the column's type."""
        if values.null_count > 0:
            self.start_nulls()
        if self._valid is not None:
            valid = values.is_valid().to_numpy(zero_copy_only=False).view(np.uint8)
            scatter(self._valid_addresses, slots, valid)
        scatter(self._addresses, slots, self._raw_of(values))

    def raw_valid(self, slots: NDArray[Any]) -> NDArray[np.uint8] | None:
        """Returns the validity of these slots: 1 for a value, 0 for null. None if there has never been a null."""
        return None if self._valid is None else gathered(self._valid_addresses, slots, _VALID)

    def put_raw(self, slots: NDArray[np.int32], values: NDArray[Any], valid: NDArray[np.uint8] | None) -> None:
        """Stores values in these slots, in the form of `raw` and `raw_valid`. If `valid` is None, no value is null."""
        scatter(self._addresses, slots, values)
        if self._valid is not None:
            scatter(self._valid_addresses, slots, np.ones(len(slots), dtype=np.uint8) if valid is None else valid)

    def extend(self, first_slot: int, values: pa.Array) -> None:
        """Stores values in the slots from `first_slot` on, none of which may have been set before.

        Each call must begin where the previous one ended. Adds pages as needed, and sets the slots after the last value
        to the identity. Faster than `grow` and `put`, because each page is written once.
        """
        self.begin_extend(first_slot, values)()

    def begin_extend(self, first_slot: int, values: pa.Array) -> Callable[[], None]:
        """Begins `extend` by adding the pages.

        Returns a function that copies the values, which any thread may call.
        """
        if values.null_count > 0:
            self.start_nulls()
        raw = self._raw_of(values)
        stop = first_slot + len(raw)
        _add_pages(self._arrays, stop, self.dtype, self.spec.identity)
        self._addresses = _extended(self._addresses, self._arrays)
        if self._valid is None:
            return partial(put_behind, self._addresses, first_slot, raw)
        valid = values.is_valid().to_numpy(zero_copy_only=False).view(np.uint8)
        _add_pages(self._valid, stop, _VALID, 0)
        self._valid_addresses = _extended(self._valid_addresses, self._valid)

        def put_both(pages: Pages = self._addresses, valid_pages: Pages = self._valid_addresses) -> None:
            put_behind(pages, first_slot, raw)
            put_behind(valid_pages, first_slot, valid)

        return put_both

    def _raw_of(self, values: pa.Array) -> NDArray[Any]:
        """Returns the values as a NumPy array, with the identity in place of nulls. Does not copy them if there are no
        nulls.
        """
        raw = values.view(pa.from_numpy_dtype(self.dtype))
        if raw.null_count > 0:
            raw = raw.fill_null(self.spec.identity)
        plain: NDArray[Any] = raw.to_numpy()
        return plain

    def rebuilt(self, kept: NDArray[np.int32]) -> PagedColumn:
        """Returns a new column whose slot i has the value of slot `kept[i]`."""
        column = self._another()
        column.grow(pages_for(len(kept)))
        if self._valid is not None:
            column.start_nulls()
        for page in range(len(column._arrays)):
            slots = kept[page << PAGE_BITS : (page + 1) << PAGE_BITS]
            column._arrays[page][: len(slots)] = self.raw(slots)
            if column._valid is not None:
                column._valid[page][:] = 0
                column._valid[page][: len(slots)] = gathered(self._valid_addresses, slots, _VALID)
        return column

    def _another(self) -> PagedColumn:
        """Returns an empty column with the same type and initial value."""
        return PagedColumn(self.spec)

    def begin_batch(self) -> None:
        """Does nothing, because values of a fixed width need no preparation before all slots are set."""

    @property
    def value_bytes(self) -> int:
        """Returns the size of one value in bytes."""
        return self.dtype.itemsize

    def freeze(self) -> FrozenColumn:
        """Returns a snapshot of the column: references to the current pages. The caller must pin the pages."""
        addresses = self._addresses.copy(), self._valid_addresses.copy()
        return FrozenColumn(self.spec, self.dtype, [*self._arrays], [*(self._valid or ())], *addresses)


class FrozenColumn:
    """The pages of a column at the time of a snapshot."""

    __slots__ = ("_addresses", "_arrays", "_dtype", "_valid", "_valid_addresses", "spec")

    def __init__(
        self,
        spec: ValueSpec,
        dtype: np.dtype[Any],
        arrays: list[NDArray[Any] | None],
        valid: list[NDArray[Any] | None],
        addresses: Pages,
        valid_addresses: Pages,
    ) -> None:
        self.spec = spec
        self._dtype = dtype
        self._arrays = arrays
        self._addresses = addresses
        self._valid = valid
        self._valid_addresses = valid_addresses

    def parts(
        self,
    ) -> tuple[np.dtype[Any], list[NDArray[Any] | None], list[NDArray[Any] | None], Pages, Pages]:
        """Returns the constructor's arguments after `spec`, for another column over the same pages."""
        return self._dtype, self._arrays, self._valid, self._addresses, self._valid_addresses

    def take(self, slots: NDArray[Any], places: Places | None = None) -> pa.Array:
        """Returns the values of these slots. Their pages must still be held.

        With `places`, the value of `slots[i]` is at index `places[i]`, and `slots` must ascend without duplicates.
        Otherwise values are in the order of `slots`.
        """
        return _taken(self.spec, self._dtype, self._addresses, self._valid_addresses, slots, places)

    def raw(self, slots: NDArray[Any], places: Places | None = None) -> NDArray[Any]:
        """Returns the values of these slots as a NumPy array. Values of nulls are undefined.

        With `places`, the value of `slots[i]` is at index `places[i]`. Otherwise values are in the order of `slots`.
        """
        return _found(self._addresses, slots, self._dtype, places)

    def raw_ascending(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Like `raw`, for distinct ascending slots. Faster if they are consecutive."""
        if not _is_run(slots):
            return self.raw(slots)
        first, stop = int(slots[0]), int(slots[-1]) + 1
        held = cast(list[NDArray[Any]], self._arrays[first >> PAGE_BITS : pages_for(stop)])
        start = first & (PAGE_ROWS - 1)
        return np.concatenate(held)[start : start + len(slots)]

    def drop_pages(self, start: int, stop: int) -> None:
        """Drops the references to the pages from `start` to `stop` (exclusive)."""
        self._arrays[start:stop] = [None] * (stop - start)
        if self._valid:
            self._valid[start:stop] = [None] * (stop - start)


def _taken(
    spec: ValueSpec,
    dtype: np.dtype[Any],
    pages: Pages,
    valid_pages: Pages,
    slots: NDArray[Any],
    places: Places | None = None,
) -> pa.Array:
    valid = _found(valid_pages, slots, _VALID, places) if len(valid_pages) else None
    return array_of(_found(pages, slots, dtype, places), valid, spec.data_type)


def _found(pages: Pages, slots: NDArray[Any], dtype: np.dtype[Any], places: Places | None) -> NDArray[Any]:
    if places is None:
        return gathered(pages, slots, dtype)
    values = PAGE_MEMORY.buffer(len(slots), dtype)
    if _is_run(slots):
        place_run(pages, int(slots[0]), places.places, values)
    else:
        place(pages, slots, places.places, values)
    return values


def _is_run(slots: NDArray[Any]) -> bool:
    """Returns whether slots are consecutive. `slots` must ascend, without duplicates, and not be empty."""
    return len(slots) > 0 and int(slots[-1]) - int(slots[0]) == len(slots) - 1


def _add_pages(pages: list[NDArray[Any]], slots: int, dtype: np.dtype[Any], rest: Any) -> None:
    """Adds pages for `slots` slots.

    Their memory is not initialised, except that the slots after the last of these slots get the value `rest`.
    """
    known, needed = len(pages), pages_for(slots)
    pages += [PAGE_MEMORY.page(PAGE_ROWS, dtype) for _ in range(known, needed)]
    if needed > known and slots & (PAGE_ROWS - 1):
        pages[-1][slots & (PAGE_ROWS - 1) :] = rest


def _page_of(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    page = PAGE_MEMORY.page(PAGE_ROWS, dtype)
    page.fill(value)
    return page


def _copied(
    arrays: list[NDArray[Any]], addresses: Pages, pages: NDArray[np.int32], dtype: np.dtype[Any]
) -> list[NDArray[Any]]:
    """Replaces pages of an array by copies, and updates their addresses. Returns the former pages."""
    numbers = pages.tolist()
    former = [arrays[page] for page in numbers]
    copies, targets = PAGE_MEMORY.pages(len(numbers), PAGE_ROWS, dtype)
    copy_whole(addresses[pages], targets, PAGE_ROWS * dtype.itemsize // 8)
    for page, copy in zip(numbers, copies, strict=True):
        arrays[page] = copy
    addresses[pages] = targets
    return former


def _extended(addresses: Pages, arrays: list[NDArray[Any]]) -> Pages:
    added = [address_of(array) for array in arrays[len(addresses) :]]
    return np.concatenate((addresses, np.array(added, dtype=np.uintp)))


class Pins:
    """Counts, for each page of a state, how many snapshots still read the page (pin it). All columns share the
    counts.
    """

    __slots__ = ("_any", "_held", "_last_version", "_lock", "_pages", "_versions", "counts", "shared")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages = 0
        self._any = False
        """False if no page is pinned. Only the owner pins pages and sets it."""
        self._held: weakref.WeakSet[Pinned] = weakref.WeakSet()
        self._last_version = 0
        self._versions = np.zeros(_PAGES_MIN, dtype=np.int64)
        self.counts: NDArray[np.int32] = np.zeros(_PAGES_MIN, dtype=np.int32)
        """How many snapshots still read each page. Kernels use it."""
        self.shared = self.counts.data
        """`counts` as a memoryview, which is faster to index for single pages."""

    def grow(self, pages: int) -> None:
        """Adds counters until there are `pages` of them."""
        with self._lock:
            self._pages = pages
            if pages > len(self.counts):
                added = np.zeros(max(pages, 2 * len(self.counts)) - len(self.counts), dtype=np.int32)
                self.counts = np.concatenate((self.counts, added))
                self._versions = np.concatenate((self._versions, added), dtype=np.int64)
                self.shared = self.counts.data

    def any(self) -> bool:
        """Returns whether a snapshot still reads any page."""
        self._any = self._any and bool(self.counts[: self._pages].any())
        return self._any

    def pin(self) -> Pinned:
        """Pins all current pages for a new snapshot."""
        with self._lock:
            self.counts[: self._pages] += 1
            self._any = True
            pinned = Pinned(self, self._versions[: self._pages].copy())
            self._held.add(pinned)
            return pinned

    def replaced(self, pages: NDArray[np.int32]) -> NDArray[np.int64]:
        """Records that the owner has replaced pages by copies, which no snapshot reads. Returns the version number of
        each former page.
        """
        with self._lock:
            former = self._versions[pages]
            self.counts[pages] = 0
            self._versions[pages] = np.arange(self._last_version + 1, self._last_version + 1 + len(pages))
            self._last_version += len(pages)
            return former

    def still_read(self, pages: NDArray[np.int32], versions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns a mask: True for each of these pages, in the version `versions`, that a snapshot still reads."""
        read = np.zeros(len(pages), dtype=np.bool_)
        with self._lock:
            for pinned in self._held:
                read |= pinned.reads(pages, versions)
        return read

    def put_back(self, pages: NDArray[np.int32], versions: NDArray[np.int64]) -> None:
        """Records that the owner has restored former pages, and pins them for the snapshots that still read them."""
        with self._lock:
            self._versions[pages] = versions
            self.counts[pages] = 0
            self._any = True
            for pinned in self._held:
                self.counts[pages] += pinned.reads(pages, versions)

    def release(self, pinned: Pinned, stop: int) -> None:
        """Records that a snapshot no longer reads its pages with numbers below `stop`."""
        with self._lock:
            start, versions = pinned.next, pinned.versions[pinned.next : stop]
            self.counts[start : start + len(versions)] -= self._versions[start : start + len(versions)] == versions
            pinned.next = max(start, stop)


class Pinned:
    """The pages that one snapshot has pinned. The snapshot releases them in order."""

    __slots__ = ("__weakref__", "_pins", "next", "versions")

    def __init__(self, pins: Pins, versions: NDArray[np.int64]) -> None:
        self._pins = pins
        self.versions = versions
        """The version of each page when it was pinned."""
        self.next = 0
        """The first page that is still read. Changed only under the lock of the pins."""

    def release(self, stop: int) -> None:
        """Releases the pages with numbers below `stop`. A second call has no effect."""
        self._pins.release(self, stop)

    def reads(self, pages: NDArray[np.int32], versions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns a mask: True for each of these pages that the snapshot still reads in the version `versions`."""
        known = (pages >= self.next) & (pages < len(self.versions))
        known[known] = self.versions[pages[known]] == versions[known]
        return known
