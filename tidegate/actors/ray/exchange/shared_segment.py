"""`SharedSegment`: memory of one connection and direction that two processes map: one writes, the other one reads.

Rules:

- The memory is anonymous (`memfd_create`). It has no name that could be left behind, and goes with the last process
  that maps it, however that ends. It needs no room in `/dev/shm`.
- The receiver gets the sender's descriptor with the first message over the connection. So nobody else can open it, and
  what another process has written is never read.
- The receiver cannot write rows, and the size cannot change: a page that is gone would end the process that reads it.
- The first page says which frames the receiver still needs: a word for each, set by the sender, cleared by the
  receiver.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Self

import pyarrow as pa

PAGE_BYTES = mmap.PAGESIZE
_WORD_BYTES = 8
FRAMES_MAX = PAGE_BYTES // _WORD_BYTES
"""Frames of a connection that are in the memory at once, at most."""


class SharedSegment:
    """One mapping of the memory. `words`: one for each frame that may be there.

    Never unmapped by hand: views of it live for as long as somebody holds rows in it.
    """

    def __init__(self, first_page: mmap.mmap, rows: mmap.mmap, rows_at: int) -> None:
        self.words = memoryview(first_page)[:PAGE_BYTES].cast("q")
        self._rows = memoryview(rows)[rows_at:]
        self._address = int(pa.py_buffer(self._rows).address)
        self.size_bytes = len(self._rows)

    def part(self, begin: int, end: int) -> pa.Buffer:
        """Return a buffer over a part of the rows. The sender's can be written to."""
        return pa.py_buffer(self._rows[begin:end])

    def lent(self, begin: int, size_bytes: int, lease: object) -> pa.Buffer:
        """Return a buffer over a part of the rows that holds a lease for as long as anybody needs it."""
        return pa.foreign_buffer(self._address + begin, size_bytes, lease)


class OwnSegment(SharedSegment):
    """The sender's mapping, which makes the memory. OSError where the system gives none."""

    def __init__(self, size_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous memory that two processes can map (memfd_create)")
        self.descriptor: int | None = os.memfd_create("tidegate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, PAGE_BYTES + size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            memory = mmap.mmap(self.descriptor, PAGE_BYTES + size_bytes)
        except BaseException:
            self.hide()
            raise
        super().__init__(memory, memory, PAGE_BYTES)

    def hide(self) -> None:
        """Close the descriptor, once the receiver has its own."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        if getattr(self, "descriptor", None) is not None:
            self.hide()


class ForeignSegment(SharedSegment):
    """The receiver's mapping."""

    @classmethod
    def open(cls, descriptor: int) -> Self:
        """Map the memory of a descriptor, and close that. OSError if there is no room."""
        try:
            size_bytes = os.fstat(descriptor).st_size - PAGE_BYTES
            first_page = mmap.mmap(descriptor, PAGE_BYTES)
            rows = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ, offset=PAGE_BYTES)
        finally:
            os.close(descriptor)
        return cls(first_page, rows, 0)
