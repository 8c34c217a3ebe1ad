"""`SharedSegment`: memory of one channel that two processes on a node map: the sender writes, the receiver reads.

Rules:

- The memory is anonymous (`memfd_create`). It has no name that could be left behind, and goes with the last process
  that maps it, however that ends. It needs no room in `/dev/shm`.
- A segment belongs to one channel of one attempt, and is never used again for another one. So nothing that the sender
  of an older attempt still writes can be read in a newer one.
- The receiver opens it by the sender's process id and descriptor (`/proc`). Both may belong to somebody else by then:
  it takes only memory that begins with the token of the offer.
- The receiver cannot write rows, and nobody can change the size: a page that is gone would end who reads it.
- The first page says which frames the receiver still needs: a word for each, set by the sender, cleared by the
  receiver.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

PAGE_BYTES = mmap.PAGESIZE
TOKEN_BYTES = 16
_WORDS_AT, _WORD_BYTES = 64, 8
FRAMES_MAX = (PAGE_BYTES - _WORDS_AT) // _WORD_BYTES
"""Frames of a channel that are in the memory at once, at most."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the sender of a channel has put its segment."""

    node_id: str
    pid: int
    descriptor: int
    token: bytes
    size_bytes: int


class SharedSegment:
    """One mapping of the memory. `words`: one for each frame that may be there.

    Never unmapped by hand: views of it live for as long as the rows that somebody holds.
    """

    def __init__(self, first_page: mmap.mmap, rows: mmap.mmap, rows_at: int) -> None:
        self.words = memoryview(first_page)[_WORDS_AT:PAGE_BYTES].cast("q")
        self._rows = memoryview(rows)[rows_at:]
        self._address = int(pa.py_buffer(self._rows).address)
        self.size_bytes = len(self._rows)

    def part(self, begin: int, end: int) -> pa.Buffer:
        """A buffer over a part of the rows; the sender's can be written to."""
        return pa.py_buffer(self._rows[begin:end])

    def lent(self, begin: int, size_bytes: int, lease: object) -> pa.Buffer:
        """A buffer over a part of the rows that holds a lease for as long as anybody needs it."""
        return pa.foreign_buffer(self._address + begin, size_bytes, lease)


class OwnSegment(SharedSegment):
    """The sender's: makes the memory. OSError where the system gives none."""

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
        self._token = secrets.token_bytes(TOKEN_BYTES)
        memory[:TOKEN_BYTES] = self._token
        super().__init__(memory, memory, PAGE_BYTES)

    def offer(self, node_id: str) -> Offer:
        """What the receiver needs to know."""
        assert self.descriptor is not None
        return Offer(node_id, os.getpid(), self.descriptor, self._token, self.size_bytes)

    def hide(self) -> None:
        """Nobody else opens it from now on."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        if getattr(self, "descriptor", None) is not None:
            self.hide()


class ForeignSegment(SharedSegment):
    """The receiver's: maps what was offered. OSError where that is not there, or not to be seen from here."""

    @classmethod
    def open(cls, offer: Offer) -> Self:
        """Map it."""
        descriptor = os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_size != PAGE_BYTES + offer.size_bytes:
                raise OSError("the memory that was offered is gone: something else is in its place")
            first_page = mmap.mmap(descriptor, PAGE_BYTES)
            if first_page[:TOKEN_BYTES] != offer.token:
                raise OSError("the memory that was offered is gone: that of somebody else is in its place")
            rows = mmap.mmap(descriptor, offer.size_bytes, prot=mmap.PROT_READ, offset=PAGE_BYTES)
        finally:
            os.close(descriptor)
        return cls(first_page, rows, 0)
