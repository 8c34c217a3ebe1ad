"""`FrameWriter` and `FrameReader`: frames of one connection and direction in memory that both its processes map.

Rules:

- Batches lie there as one Arrow stream. Nothing is pickled, and the receiver reads them where they lie.
- A frame stays until the receiver lets go of the last of its batches, also of parts of them. Frames are let go of in
  any order: what one operator keeps does not stand in the way of others.
- Where batches that somebody keeps have filled half of the memory, the receiver copies what comes. So rows that stay
  never use up the memory.
- What does not fit, or cannot be told by Arrow's format alone, goes over the socket: `write` gives None.
- Frames are numbered: a place that holds another frame than its sender says is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from tidegate.actors.ray.exchange.extents import Extents
from tidegate.actors.ray.exchange.shared_segment import FRAMES_MAX, SharedSegment
from tidegate.protocol.stream_elements import element_size_bytes
from tidegate.storage.errors import ProtocolError

BATCH_HEAD_BYTES = 256
"""What a stream says about a batch beside its rows, and what is lost by alignment, at most, but for many columns."""


class Place(NamedTuple):
    """Where a frame lies. `word`: the one that says whether it is needed. `copied`: the receiver must copy it."""

    number: int
    word: int
    offset: int
    size_bytes: int
    copied: bool


class OneSchema:
    """The schema of the batches of an edge, which hardly ever changes."""

    def __init__(self) -> None:
        self.schema: pa.Schema | None = None
        """The schema of the last batches that were asked about."""
        self.size_bytes = 0

    def is_that_of(self, batches: Sequence[pa.RecordBatch]) -> bool:
        """Whether the batches have one schema, and Arrow's format tells all of it. It is `schema` then."""
        for batch in batches:
            if self.schema is None or (
                batch.schema is not self.schema and not self.schema.equals(batch.schema, check_metadata=True)
            ):
                if batch is not batches[0] or not all(is_arrows_own(field.type) for field in batch.schema):
                    return False
                self.schema, self.size_bytes = batch.schema, batch.schema.serialize().size + BATCH_HEAD_BYTES
        return True


class FrameWriter:
    """The sender's end."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self._extents = Extents(segment.size_bytes)
        self._next = 0
        """Number of the frame that is written next."""
        self._free_words = list(range(FRAMES_MAX))

    @property
    def taken_bytes(self) -> int:
        """Bytes that the receiver still needs, as far as is known."""
        return self._extents.taken_bytes

    def write(self, batches: Sequence[pa.RecordBatch], schema: OneSchema) -> Place | None:
        """Write a frame of batches of this schema; None if it does not fit."""
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
            return None  # Larger than it says, by a dictionary for instance.
        size_bytes, word, number = sink.tell(), self._free_words.pop(), self._next
        self._next += 1
        self._extents.take(word, begin, size_bytes)
        self._segment.words[word] = number + 1
        copied = 2 * self._extents.taken_bytes > self._segment.size_bytes
        return Place(number, word, begin, size_bytes, copied)

    def _collect(self) -> None:
        """Take back what the receiver has let go of."""
        words = self._segment.words
        for word in self._extents.numbers:
            if not words[word]:
                self._extents.give_back(word)
                self._free_words.append(word)


class FrameReader:
    """The receiver's end. `read` is for one thread; rows may be let go of on any."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment

    def read(self, place: Place) -> list[pa.RecordBatch]:
        """Return the batches of a frame. ProtocolError if something else is there."""
        if self._segment.words[place.word] != place.number + 1:
            raise ProtocolError(f"frame {place.number} is not where its sender says")
        lease = _Lease(self._segment, place.word)
        buffer = self._segment.lent(place.offset, place.size_bytes, lease)
        if place.copied:
            buffer = pa.py_buffer(buffer.to_pybytes())
        with pa.ipc.open_stream(buffer) as stream:
            return list(stream)


class _Lease:
    """Held by the buffers of a frame: when the last of them goes, the sender gets the place back."""

    __slots__ = ("_segment", "_word")

    def __init__(self, segment: SharedSegment, word: int) -> None:
        self._segment = segment
        self._word = word

    def __del__(self) -> None:
        self._segment.words[self._word] = 0


def is_arrows_own(kind: pa.DataType) -> bool:
    """Whether every process reads this type out of Arrow's format: none that a program has defined."""
    if isinstance(kind, pa.ExtensionType):
        return False
    if isinstance(kind, pa.DictionaryType):
        return is_arrows_own(kind.value_type)
    return all(is_arrows_own(kind.field(index).type) for index in range(kind.num_fields))
