"""Memory of pages: used again as soon as nobody holds it, never before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.actors.kernels.paged import PAGE_ROWS
from tidegate.actors.state.arena import PageArena
from tidegate.actors.state.backend import ValueSpec
from tidegate.actors.state.pages import PagedColumn, Pins

_DTYPES = [np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.int64), np.dtype(np.float64)]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(_DTYPES)), max_size=80), st.randoms())
def test_no_two_holders_share_a_page(steps: list[tuple[bool, np.dtype[Any]]], chance: random.Random) -> None:
    """Whatever is taken and let go of in any order, each page keeps what its holder wrote."""
    arena = PageArena()
    held: list[tuple[int, NDArray[Any]]] = []
    for number, (take, dtype) in enumerate(steps):
        if take or not held:
            page = arena.take(dtype)
            assert page.shape == (PAGE_ROWS,)
            assert page.dtype == dtype
            page.fill(number)
            held.append((number, page))
            del page
        else:
            held.pop(chance.randrange(len(held)))
    assert all(np.all(page == number) for number, page in held)


def test_pages_that_are_let_go_of_are_used_again() -> None:
    """A thousand pages one after the other take no more memory than the first."""
    arena = PageArena()
    arena.take(np.dtype(np.int64))
    reserved = arena.reserved_bytes
    assert reserved <= 4 * PAGE_ROWS * 8
    for _ in range(1000):
        arena.take(np.dtype(np.int64))
    assert reserved == arena.reserved_bytes


def test_copies_of_snapshots_come_from_the_pages_of_earlier_ones() -> None:
    """However many snapshots are taken, memory is that of the state and of the copies of one of them."""
    arena, pins = PageArena(), Pins()
    column = PagedColumn(ValueSpec("x", pa.int64(), 0), arena)
    column.grow(64)
    pins.grow(64)
    reserved = []
    for _ in range(10):
        frozen, held = column.freeze(), pins.pin()
        for page in range(64):
            column.copy_page(page)
            pins.replaced(page)
        held.release(64)
        frozen.let_go(0, 64)
        reserved.append(arena.reserved_bytes)
    assert reserved[0] == reserved[-1]
    assert reserved[-1] <= 4 * 64 * PAGE_ROWS * 8
