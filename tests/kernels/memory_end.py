"""Bytes behind which there is no memory: to read one more ends the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray


@contextmanager
def ending_with_memory(content: bytes) -> Iterator[NDArray[np.uint8]]:
    """The bytes, at most a page of them, where they end a page behind which there is none while this lasts."""
    page = mmap.PAGESIZE
    mapped = mmap.mmap(-1, 2 * page)
    behind = (ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + page), ctypes.c_size_t(page))
    protect = ctypes.CDLL(None).mprotect
    mapped[page - len(content) : page] = content
    assert protect(*behind, 0) == 0
    try:
        yield np.frombuffer(mapped, dtype=np.uint8, count=page)[page - len(content) :]
    finally:
        assert protect(*behind, mmap.PROT_READ | mmap.PROT_WRITE) == 0
