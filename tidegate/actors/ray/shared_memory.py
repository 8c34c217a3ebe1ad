"""Frames of one connection and direction in memory that both its processes map: one writes, the other one reads.

Rules:

- Batches are stored as one Arrow stream. Nothing is pickled, and the receiver reads them in place.
- A frame stays until the receiver drops the last of its batches, or part of a batch. Frames are dropped in any order,
  so rows that one operator keeps do not block others. When kept batches fill half of the memory, the receiver copies
  new ones. So kept rows never use up the memory.
- Batches that do not fit, or that Arrow's format cannot describe, go over the socket: `write` returns None.
- Frames are numbered. The receiver checks the number, so it never reads another frame in the same place.
- The memory is anonymous (`memfd_create`). It has no name that could be left behind, ends with the last process that
  maps it, and needs no space in `/dev/shm`. The receiver gets the sender's descriptor over the connection, so no other
  process can open it.
- The receiver cannot write rows, and the size cannot change: a page that is gone would end the process that reads it.
- The first page stores which frames the receiver still needs: a word for each, set by the sender, cleared by the
  receiver.
- The lowest gap that is large enough is used. So unneeded memory is never touched, and used memory stays warm.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple, Self

import pyarrow as pa

from tidegate.protocol.stream_elements import element_size_bytes
from tidegate.storage.errors import ProtocolError

BATCH_HEAD_BYTES = 256
"""Upper bound of the bytes that a stream needs for a batch in addition to its rows, including alignment. With many
columns it may need more.
"""


class Place(NamedTuple):
    """The place of a frame in the memory. `word` is the index of the word that marks it as in use. `copied` is whether
    the receiver must copy it.
    """

    number: int
    word: int
    offset: int
    size_bytes: int
    copied: bool


class EdgeSchema:
    """Caches the schema of the batches of an edge, which hardly ever changes."""

    def __init__(self) -> None:
        self.schema: pa.Schema | None = None
        """Schema of the last batches that were checked."""
        self.size_bytes = 0

    def fits(self, batches: Sequence[pa.RecordBatch]) -> bool:
        """Returns whether the batches have one schema that Arrow's format fully describes. Sets `schema` to it."""
        for batch in batches:
            if self.schema is None or (
                batch.schema is not self.schema and not self.schema.equals(batch.schema, check_metadata=True)
            ):
                if batch is not batches[0] or not all(is_arrow_type(field.type) for field in batch.schema):
                    return False
                self.schema, self.size_bytes = batch.schema, batch.schema.serialize().size + BATCH_HEAD_BYTES
        return True


class FrameWriter:
    """The sender's end of the shared memory. Writes frames."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self._extents = SharedMemoryAllocator(segment.size_bytes)
        self._next = 0
        """Number of the next frame."""
        self._free_words = list(range(FRAMES_MAX))

    @property
    def taken_bytes(self) -> int:
        """Returns the number of bytes that the receiver still uses, as far as the sender has noticed."""
        return self._extents.taken_bytes

    def write(self, batches: Sequence[pa.RecordBatch], schema: EdgeSchema) -> Place | None:
        """Writes a frame of batches of this schema. Returns None if it does not fit."""
        self._collect()
        need_bytes = schema.size_bytes + sum(element_size_bytes(batch) + BATCH_HEAD_BYTES for batch in batches)
        gap = self._extents.gap(need_bytes) if self._free_words else None
        if gap is None:
            return None
        begin, end = gap
        sink = pa.FixedSizeBufferWriter(self._segment.part(begin, end))
        try:
            with pa.ipc.new_stream(sink, schema.schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)
        except OSError:
            return None  # Larger than computed, for example because of a dictionary.
        size_bytes, word, number = sink.tell(), self._free_words.pop(), self._next
        self._next += 1
        self._extents.take(word, begin, size_bytes)
        self._segment.words[word] = number + 1
        copied = 2 * self._extents.taken_bytes > self._segment.size_bytes
        return Place(number, word, begin, size_bytes, copied)

    def _collect(self) -> None:
        """Frees the places of frames that the receiver has dropped."""
        words = self._segment.words
        for word in self._extents.numbers:
            if not words[word]:
                self._extents.give_back(word)
                self._free_words.append(word)


class FrameReader:
    """The receiver's end of the shared memory. `read` must be called on one thread. Batches may be dropped on any
    thread.
    """

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment

    def read(self, place: Place) -> list[pa.RecordBatch]:
        """Returns the batches of a frame. Raises ProtocolError if another frame is in that place."""
        if self._segment.words[place.word] != place.number + 1:
            raise ProtocolError(f"frame {place.number} is not at the place that its sender reported")
        lease = _Lease(self._segment, place.word)
        buffer = self._segment.lent(place.offset, place.size_bytes, lease)
        if place.copied:
            buffer = pa.py_buffer(buffer.to_pybytes())
        with pa.ipc.open_stream(buffer) as stream:
            return list(stream)


class _Lease:
    """An object that the buffers of a frame hold. When the last buffer is dropped, the place is returned to the
    sender.
    """

    __slots__ = ("_segment", "_word")

    def __init__(self, segment: SharedSegment, word: int) -> None:
        self._segment = segment
        self._word = word

    def __del__(self) -> None:
        self._segment.words[self._word] = 0


def is_arrow_type(kind: pa.DataType) -> bool:
    """Returns whether every process can read this type from Arrow's format. False for types that a program has
    defined."""
    if isinstance(kind, pa.ExtensionType):
        return False
    if isinstance(kind, pa.DictionaryType):
        return is_arrow_type(kind.value_type)
    return all(is_arrow_type(kind.field(index).type) for index in range(kind.num_fields))


ALIGNMENT = 64
"""Number of bytes to whose multiples parts are aligned, because Arrow reads fastest there."""


class SharedMemoryAllocator:
    """Allocates parts of a memory of `size_bytes` bytes. The caller chooses a number for each part."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._taken: dict[int, tuple[int, int]] = {}
        """Start and end of each allocated part, by number."""
        self.taken_bytes = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the allocated parts."""
        return tuple(self._taken)

    def gap(self, least_bytes: int) -> tuple[int, int] | None:
        """Returns start and end of the lowest gap of at least this size, or None."""
        begin = 0
        for taken_begin, taken_end in sorted(self._taken.values()):
            if taken_begin - begin >= least_bytes:
                return begin, taken_begin
            begin = taken_end
        return (begin, self._size_bytes) if self._size_bytes - begin >= least_bytes else None

    def take(self, number: int, begin: int, size_bytes: int) -> None:
        """Allocates the first bytes of a gap."""
        assert number not in self._taken and begin % ALIGNMENT == 0
        end = min(begin + -(-size_bytes // ALIGNMENT) * ALIGNMENT, self._size_bytes)
        self._taken[number] = begin, end
        self.taken_bytes += end - begin

    def give_back(self, number: int) -> None:
        """Frees a part."""
        begin, end = self._taken.pop(number)
        self.taken_bytes -= end - begin


PAGE_BYTES = mmap.PAGESIZE
_WORD_BYTES = 8
FRAMES_MAX = PAGE_BYTES // _WORD_BYTES
"""Limit of frames of a connection that are in the memory at the same time."""


class SharedSegment:
    """A mapping of the shared memory. `words` has one word for each frame that may be in it.

    Never unmapped explicitly: views of it live until the last rows in it are dropped.
    """

    def __init__(self, first_page: mmap.mmap, rows: mmap.mmap, rows_at: int) -> None:
        self.words = memoryview(first_page)[:PAGE_BYTES].cast("q")
        self._rows = memoryview(rows)[rows_at:]
        self._address = int(pa.py_buffer(self._rows).address)
        self.size_bytes = len(self._rows)

    def part(self, begin: int, end: int) -> pa.Buffer:
        """Returns a buffer over a part of the rows. The sender's buffer is writable."""
        return pa.py_buffer(self._rows[begin:end])

    def lent(self, begin: int, size_bytes: int, lease: object) -> pa.Buffer:
        """Returns a buffer over a part of the rows that holds a lease until it is dropped."""
        return pa.foreign_buffer(self._address + begin, size_bytes, lease)


class OwnSegment(SharedSegment):
    """The sender's mapping. Its constructor creates the memory. Raises OSError if the system provides none."""

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
        """Closes the descriptor, once the receiver has its own."""
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
        """Maps the memory of a descriptor, and closes the descriptor. Raises OSError if there is no room."""
        try:
            size_bytes = os.fstat(descriptor).st_size - PAGE_BYTES
            first_page = mmap.mmap(descriptor, PAGE_BYTES)
            rows = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ, offset=PAGE_BYTES)
        finally:
            os.close(descriptor)
        return cls(first_page, rows, 0)
