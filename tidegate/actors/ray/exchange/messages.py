"""How frames and grants of credit are written into messages between two workers, and read again.

Rules:

- A frame is a head, the batches as one Arrow stream, and what is left by pickle. The stream is in shared memory where
  it fits, else in the message. So a frame takes one way, whatever its size, and keeps its place among the others.
- Batches that Arrow's format cannot describe, because a program has defined their types, are pickled by cloudpickle,
  which sends classes that the receiver cannot import.
- What is unpickled comes from a process of the same job, which has proved that (`connections.py`).
"""

from __future__ import annotations

import pickle
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import cloudpickle
import pyarrow as pa

from tidegate.actors.ray.exchange.frames import FrameReader, FrameWriter, OneSchema, Place
from tidegate.actors.ray.exchange.link import Bytes
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Element
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, SubtaskIndex

Head: TypeAlias = tuple[int, int, int, int, int]
"""(attempt, edge, upstream, downstream, number): plain numbers cost Ray a tenth of what a dataclass does."""
ALIGNMENT = 64
"""Arrow reads fastest from addresses that are multiples of this."""
_FRAME = struct.Struct("<6q16x")
_CREDIT = struct.Struct("<6q")


def make_head(attempt: AttemptNumber, channel: ChannelId, number: int) -> Head:
    """Return the head of a frame (`number`: its first sequence) or of a grant (`number`: the total in bytes)."""
    return (attempt, channel.edge, channel.upstream, channel.downstream, number)


def read_head(head: Head) -> tuple[AttemptNumber, ChannelId, int]:
    """Return attempt, channel and number."""
    attempt, edge, upstream, downstream, number = head
    channel = ChannelId(edge, SubtaskIndex(upstream), SubtaskIndex(downstream))
    return AttemptNumber(attempt), channel, number


class FramePacker:
    """Packs the frames that go over one connection, for one thread. `writer`: of the shared memory, None without."""

    def __init__(self, writer: FrameWriter | None) -> None:
        self.writer = writer
        self._schemas: defaultdict[int, OneSchema] = defaultdict(OneSchema)
        """By edge."""

    def pack(self, head: Head, elements: Sequence[Element]) -> Sequence[Bytes]:
        """Return a frame in pieces."""
        batches = [element for element in elements if isinstance(element, pa.RecordBatch)]
        if not batches:
            return (_FRAME.pack(*head, 0), pickle.dumps((tuple(enumerate(elements)), None), 5))
        schema = self._schemas[head[1]]
        if not schema.is_that_of(batches):
            return (_FRAME.pack(*head, 0), pickled_elements((tuple(enumerate(elements)), None)))
        controls = tuple((i, e) for i, e in enumerate(elements) if not isinstance(e, pa.RecordBatch))
        place = None if self.writer is None else self.writer.write(batches, schema)
        if place is not None:
            return (_FRAME.pack(*head, 0), pickle.dumps((controls, tuple(place)), 5))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema.schema) as stream:
            for batch in batches:
                stream.write_batch(batch)
        rows = memoryview(sink.getvalue())
        return (_FRAME.pack(*head, len(rows)), rows, pickle.dumps((controls, None), 5))


def pickled_elements(elements: object) -> bytes:
    """Pickle elements with batches whose types a program has defined.

    By a pickle of its own: what Ray registers with its copy loses such types of schemas.
    """
    pickled: bytes = cloudpickle.dumps(elements, 5)
    return pickled


def read_elements(elements: tuple[Element, ...] | bytes) -> tuple[Element, ...]:
    """Read the elements that came with a call: as they are, or as `pickled_elements` has made them."""
    read: tuple[Element, ...] = pickle.loads(elements) if isinstance(elements, bytes) else elements
    return read


def unpack_frame(payload: bytes | memoryview, reader: FrameReader | None) -> tuple[Head, tuple[Element, ...]]:
    """Read what was packed. ProtocolError if its batches are not in the shared memory."""
    *head, rows_bytes = _FRAME.unpack_from(payload)
    body = memoryview(payload)[_FRAME.size :]
    controls, place = pickle.loads(body[rows_bytes:])
    elements: list[Element] = []
    if rows_bytes:
        with pa.ipc.open_stream(_aligned(body[:rows_bytes])) as stream:
            elements += stream
    elif place is not None:
        if reader is None:
            raise ProtocolError("a frame is in shared memory that this process does not map")
        elements += reader.read(Place(*place))
    for index, element in controls:
        elements.insert(index, element)
    attempt, edge, upstream, downstream, number = head
    return (attempt, edge, upstream, downstream, number), tuple(elements)


def pack_credit(head: Head, window_bytes: int) -> bytes:
    """Return a grant of credit as bytes."""
    return _CREDIT.pack(*head, window_bytes)


def unpack_credit(payload: bytes | memoryview) -> tuple[Head, int]:
    """Read what was packed."""
    attempt, edge, upstream, downstream, total_bytes, window_bytes = _CREDIT.unpack(payload)
    return (attempt, edge, upstream, downstream, total_bytes), window_bytes


def _aligned(rows: memoryview) -> pa.Buffer:
    """Return the bytes at an address that Arrow likes: where they are, if they are at one."""
    buffer = pa.py_buffer(rows)
    if buffer.address % ALIGNMENT == 0:
        return buffer
    copy = pa.allocate_buffer(len(rows))
    memoryview(copy).cast("B")[:] = rows
    return copy
