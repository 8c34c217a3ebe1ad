"""Frames of one connection and direction in shared memory: one process writes them, the other process reads them.

Rules:

- Batches are stored as one Arrow stream. They are not pickled, and the receiver reads them in place.
- A frame stays until the receiver drops the last of its batches, or part of a batch. Frames are dropped in any order,
  so rows that one operator keeps do not block other frames. When more than half of the memory is in use, the receiver
  copies new batches. So kept rows never use up the memory.
- Batches that do not fit, or that Arrow's format cannot describe, go over the socket: `write` returns None.
- Frames are numbered. The receiver checks the number, so it never reads another frame in the same place.
- The memory is anonymous (`memfd_create`). It has no name that could be left behind, ends with the last process that
  maps it, and needs no space in `/dev/shm`. The receiver gets the sender's descriptor over the connection, so no other
  process can open it.
- The receiver cannot write rows, and the size cannot change: a missing page would kill the process that reads it.
- The first page stores which frames the receiver still uses: a word for each, set by the sender, cleared by the
  receiver.
- A frame is written to the lowest gap that is large enough. So unneeded memory is never touched, and used memory stays
  in the cache.
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
"""Bytes to allow for each batch in a stream in addition to its rows, including alignment. Many columns may need
more.
"""


class Place(NamedTuple):
    """The byte range of a frame in the shared memory.

    `word` is the index in `words` of the segment: that word is not 0 while the frame is in use. `copied`: the receiver
    must copy the rows.
    """

    number: int
    word: int
    offset: int
    size_bytes: int
    copied: bool


class EdgeSchema:
    """Caches the schema of the batches of an edge, which rarely changes."""

    def __init__(self) -> None:
        self.schema: pa.Schema | None = None
        """Schema of the last batches that were checked."""
        self.size_bytes = 0

    def fits(self, batches: Sequence[pa.RecordBatch]) -> bool:
        """Returns whether all batches have one schema that Arrow's format can describe. Stores it in `schema`."""
        for batch in batches:
            if self.schema is None or (
                batch.schema is not self.schema and not self.schema.equals(batch.schema, check_metadata=True)
            ):
                if batch is not batches[0] or not all(is_arrow_type(field.type) for field in batch.schema):
                    return False
                self.schema, self.size_bytes = batch.schema, batch.schema.serialize().size + BATCH_HEAD_BYTES
        return True


class FrameWriter:
    """The sender's end of the shared memory, which writes frames."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self._extents = SharedMemoryAllocator(segment.size_bytes)
        self.num_frames = 0
        """Number of frames written so far, which is the number of the next one."""
        self._free_words = list(range(FRAMES_MAX))

    @property
    def taken_bytes(self) -> int:
        """Returns the number of bytes in frames that the receiver still used at the last write."""
        return self._extents.taken_bytes

    def write(self, batches: Sequence[pa.RecordBatch], schema: EdgeSchema) -> Place | None:
        """Writes batches of this schema as a frame, and returns the place of the frame. Returns None if the memory has
        no free range for the frame.
        """
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
        size_bytes, word, number = sink.tell(), self._free_words.pop(), self.num_frames
        self.num_frames += 1
        self._extents.take(word, begin, size_bytes)
        self._segment.words[word] = number + 1
        copied = 2 * self._extents.taken_bytes > self._segment.size_bytes
        return Place(number, word, begin, size_bytes, copied)

    def _collect(self) -> None:
        """Frees the byte ranges of frames that the receiver no longer uses."""
        words = self._segment.words
        for word in self._extents.numbers:
            if not words[word]:
                self._extents.give_back(word)
                self._free_words.append(word)


class FrameReader:
    """The receiver's end of the shared memory. `read` must be called on one thread, but batches may be dropped on
    any.
    """

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment

    def read(self, place: Place) -> list[pa.RecordBatch]:
        """Returns the batches of a frame. Raises ProtocolError if another frame is at that place."""
        if self._segment.words[place.word] != place.number + 1:
            raise ProtocolError(
                f"frame {place.number} is not at the place that its sender reported; this is a bug in tidegate, "
                "please report it"
            )
        lease = _Lease(self._segment, place.word)
        buffer = self._segment.lent(place.offset, place.size_bytes, lease)
        if place.copied:
            buffer = pa.py_buffer(buffer.to_pybytes())
        with pa.ipc.open_stream(buffer) as stream:
            return list(stream)


class _Lease:
    """Marks the place of a frame as free when the last buffer of the frame is dropped. Each buffer refers to this
    object.
    """

    __slots__ = ("_segment", "_word")

    def __init__(self, segment: SharedSegment, word: int) -> None:
        self._segment = segment
        self._word = word

    def __del__(self) -> None:
        self._segment.words[self._word] = 0


def is_arrow_type(kind: pa.DataType) -> bool:
    """Returns whether every process can read this type from Arrow's format. False for extension types of a
    program.
    """
    if isinstance(kind, pa.ExtensionType):
        return False
    if isinstance(kind, pa.DictionaryType):
        return is_arrow_type(kind.value_type)
    return all(is_arrow_type(kind.field(index).type) for index in range(kind.num_fields))


ALIGNMENT = 64
"""Alignment of the allocated parts in bytes, at which Arrow reads fastest."""


class SharedMemoryAllocator:
    """Allocates byte ranges of a memory of `size_bytes` bytes. The caller gives each range a number."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._taken: dict[int, tuple[int, int]] = {}
        """Start and end of each allocated range, by number."""
        self.taken_bytes = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns the numbers of the allocated byte ranges."""
        return tuple(self._taken)

    def gap(self, least_bytes: int) -> tuple[int, int] | None:
        """Returns start and end of the lowest free range of at least `least_bytes` bytes, or None."""
        begin = 0
        for taken_begin, taken_end in sorted(self._taken.values()):
            if taken_begin - begin >= least_bytes:
                return begin, taken_begin
            begin = taken_end
        return (begin, self._size_bytes) if self._size_bytes - begin >= least_bytes else None

    def take(self, number: int, begin: int, size_bytes: int) -> None:
        """Allocates `size_bytes` bytes at `begin`, which is the start of a free range, rounded up to `ALIGNMENT`."""
        assert number not in self._taken and begin % ALIGNMENT == 0
        end = min(begin + -(-size_bytes // ALIGNMENT) * ALIGNMENT, self._size_bytes)
        self._taken[number] = begin, end
        self.taken_bytes += end - begin

    def give_back(self, number: int) -> None:
        """Frees the byte range with this number."""
        begin, end = self._taken.pop(number)
        self.taken_bytes -= end - begin


PAGE_BYTES = mmap.PAGESIZE
_WORD_BYTES = 8
FRAMES_MAX = PAGE_BYTES // _WORD_BYTES
"""Limit of the frames of a connection that are in the shared memory at the same time."""


class SharedSegment:
    """A mapping of the shared memory. `words` has one word for each frame, which is 0 if no frame uses it.

    The memory is never unmapped explicitly: views of it live until the last rows in it are dropped.
    """

    def __init__(self, first_page: mmap.mmap, rows: mmap.mmap, rows_at: int) -> None:
        self.words = memoryview(first_page)[:PAGE_BYTES].cast("q")
        self._rows = memoryview(rows)[rows_at:]
        self._address = int(pa.py_buffer(self._rows).address)
        self.size_bytes = len(self._rows)

    def part(self, begin: int, end: int) -> pa.Buffer:
        """Returns a buffer over the bytes from `begin` to `end`. The sender's buffer is writable."""
        return pa.py_buffer(self._rows[begin:end])

    def lent(self, begin: int, size_bytes: int, lease: object) -> pa.Buffer:
        """Returns a buffer over a range of bytes. The buffer refers to `lease`, so `lease` is dropped with the last
        such buffer.
        """
        return pa.foreign_buffer(self._address + begin, size_bytes, lease)


class OwnSegment(SharedSegment):
    """The sender's mapping of the shared memory, which its constructor creates. Raises OSError if the system has
    no memory for it.
    """

    def __init__(self, size_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(
                "this system has no anonymous memory that two processes can map (memfd_create); rows go over sockets, "
                "unless the job runs on Linux"
            )
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
        """Closes this process's file descriptor of the memory, once the receiver has its own. The mapping stays."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        if getattr(self, "descriptor", None) is not None:
            self.hide()


class ForeignSegment(SharedSegment):
    """The receiver's mapping of the shared memory. Its rows are read-only."""

    @classmethod
    def open(cls, descriptor: int) -> Self:
        """Maps the memory behind a file descriptor, and closes the descriptor. Raises OSError if that fails."""
        try:
            size_bytes = os.fstat(descriptor).st_size - PAGE_BYTES
            first_page = mmap.mmap(descriptor, PAGE_BYTES)
            rows = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ, offset=PAGE_BYTES)
        finally:
            os.close(descriptor)
        return cls(first_page, rows, 0)
