"""Memory for pages: used again, given back, and never by two arrays at once."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.state.common.page_memory import SLAB_BYTES, PageMemory, singles_max

VALUES = 1 << 15
INT64 = np.dtype(np.int64)
PAGES = SLAB_BYTES // (VALUES * 8)
"""Of a slab."""


def _with_a_slab() -> tuple[PageMemory, list[NDArray[np.int64]]]:
    memory = PageMemory()
    return memory, [memory.page(VALUES, INT64) for _ in range(singles_max(VALUES * 8))]


def test_a_small_state_takes_no_slab() -> None:
    """The first pages of each size come one by one."""
    memory, singles = _with_a_slab()
    assert memory.bytes == 0
    singles.append(memory.page(VALUES, INT64))
    assert memory.bytes == SLAB_BYTES


def test_pages_come_with_their_addresses() -> None:
    """Those that come one by one, and those of slabs."""
    memory = PageMemory()
    pages, addresses = memory.pages(singles_max(VALUES * 8) + PAGES + 1, VALUES, INT64)
    assert addresses.tolist() == [page.ctypes.data for page in pages]


def test_free_pages_are_used_again() -> None:
    """However often pages are replaced, the slabs are those of the pages in use and one more."""
    memory, _ = _with_a_slab()
    pages = [memory.page(VALUES, INT64) for _ in range(3 * PAGES)]
    for turn in range(20 * PAGES):
        pages[turn % len(pages)] = memory.page(VALUES, INT64)
    assert memory.bytes <= 4 * SLAB_BYTES


def test_slabs_without_pages_are_given_back() -> None:
    """All but one, which is there for the next page."""
    memory, _ = _with_a_slab()
    pages = [memory.page(VALUES, INT64) for _ in range(5 * PAGES)]
    assert memory.bytes == 5 * SLAB_BYTES
    del pages
    assert memory.bytes == SLAB_BYTES


def test_the_garbage_collector_leaves_the_pages_of_full_slabs() -> None:
    """Slabs without a free page are known all the same: their pages come back."""
    memory, _ = _with_a_slab()
    pages = [memory.page(VALUES, INT64) for _ in range(3 * PAGES)]
    gc.collect()
    assert memory.bytes == 3 * SLAB_BYTES
    del pages
    assert len([memory.page(VALUES, INT64) for _ in range(3 * PAGES)]) == 3 * PAGES
    assert memory.bytes == SLAB_BYTES


def test_a_page_needs_few_objects() -> None:
    """A gigabyte has 30,000 pages: what Python needs for each is below a hundredth of it."""
    memory, page_bytes = PageMemory(), 1 << 15
    singles, _ = memory.pages(singles_max(page_bytes), page_bytes // 8, INT64)
    tracemalloc.start()
    pages, _ = memory.pages(10 * SLAB_BYTES // page_bytes, page_bytes // 8, INT64)
    objects_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(singles) * 40 == len(pages)
    assert objects_bytes < len(pages) * page_bytes // 100


def test_buffers_are_used_again_by_whatever_thread() -> None:
    """Buffers of about one size that come and go on one thread after the other take no more than those of one turn."""
    memory = PageMemory()

    def work() -> None:
        for turn in range(20):
            buffers = [memory.buffer((1 << 16) - turn, INT64) for _ in range(13)]
            for number, buffer in enumerate(buffers):
                buffer[:] = number
            assert all((buffer == number).all() for number, buffer in enumerate(buffers))

    for _ in range(4):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=240)
    assert 0 < memory.bytes <= 2 * SLAB_BYTES


def test_buffers_have_the_length_that_was_asked_for() -> None:
    """Small ones and those that are larger than a slab are left to the allocator."""
    memory = PageMemory()
    for values in (0, 1, 1000, 1 << 15, (1 << 15) + 1, 1 << 16, SLAB_BYTES // 8, SLAB_BYTES // 8 + 1):
        buffers = [memory.buffer(values, INT64) for _ in range(5)]
        for number, buffer in enumerate(buffers):
            buffer[:] = number
        assert [len(buffer) for buffer in buffers] == [values] * 5
        assert all((buffer == number).all() for number, buffer in enumerate(buffers))
    assert memory.buffer(1000, np.dtype(np.uint8)).dtype == np.uint8


def test_a_view_keeps_its_page() -> None:
    """A page whose array is gone, but not a view of it, is not given to another one."""
    memory, _ = _with_a_slab()
    page = memory.page(VALUES, INT64)
    page[:] = 7
    view = page[10:20].view(np.uint64)
    del page
    others = [memory.page(VALUES, INT64) for _ in range(PAGES)]
    for other in others:
        other[:] = 1
    assert view.tolist() == [7] * 10


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1 << 15, 1 << 16])), max_size=60))
def test_no_two_arrays_share_memory(steps: list[tuple[int, int]]) -> None:
    """Whatever comes and goes, of whatever size: each array holds what was written to it."""
    memory, _ = _with_a_slab()
    held: dict[int, NDArray[np.int64]] = {}
    for number, (place, values) in enumerate(steps):
        held[place] = page = memory.page(values, INT64)
        page[:] = number * 100 + place
        assert all((page == page[0]).all() and page[0] % 100 == place for place, page in held.items())


def test_pages_come_and_go_on_several_threads() -> None:
    """Each thread finds in its pages what it wrote."""
    memory, _ = _with_a_slab()
    wrong: list[int] = []

    def work(mark: int) -> None:
        held: list[NDArray[np.int64]] = []
        for turn in range(300):
            page = memory.page(VALUES, INT64)
            page[::1024] = mark
            held.append(page)
            if turn % 3:
                gone = held.pop(0)
                if (gone[::1024] != mark).any():
                    wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert wrong == []
