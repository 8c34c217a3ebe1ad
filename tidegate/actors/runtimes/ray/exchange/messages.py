"""What a frame and a grant of credit are on a connection: bytes, and back.

Rules:

- Batches that lie in no shared memory are sent as one Arrow stream. What Arrow's format cannot tell goes by a call of
  Ray: plain pickle does not know the classes of programs.
- Whatever else is pickled is ours: only who has shown its token is listened to (`connections.py`).
- The receiver copies batches to where Arrow likes them.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate.actors.protocol.stream_elements import Element, element_size_bytes
from tidegate.actors.runtimes.ray.exchange.frame_heads import Head
from tidegate.actors.runtimes.ray.exchange.frames import BATCH_HEAD_BYTES, OneSchema
from tidegate.actors.runtimes.ray.exchange.link import MESSAGE_BYTES_MAX, Bytes

_SIZE = struct.Struct("<I")
_CREDIT = struct.Struct("<6q")
ROWS_BYTES_MAX = MESSAGE_BYTES_MAX // 2
"""Of the batches of one frame: more go by Ray's call."""

Frame: TypeAlias = tuple[Head, tuple[Any, ...], tuple[Any, ...] | None]
"""The arguments of Ray's call: a head, and what `Outgoing.pack` gives."""


def pack_frame(frame: Frame, schema: OneSchema) -> Sequence[Bytes] | None:
    """A frame in pieces; None if it has to go another way. `schema`: that of the channel."""
    head, elements, place = frame
    batches = [element for element in elements if isinstance(element, pa.RecordBatch)]
    if not batches:
        return (b"\0\0\0\0", pickle.dumps(frame, 5))
    need_bytes = sum(element_size_bytes(batch) + BATCH_HEAD_BYTES for batch in batches)
    if need_bytes > ROWS_BYTES_MAX or not schema.is_that_of(batches):
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema.schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    rows = memoryview(sink.getvalue())
    controls = tuple((i, e) for i, e in enumerate(elements) if not isinstance(e, pa.RecordBatch))
    return (_SIZE.pack(len(rows)), rows, pickle.dumps((head, controls, place), 5))


def unpack_frame(payload: bytes) -> Frame:
    """What was packed."""
    (size_bytes,) = _SIZE.unpack_from(payload)
    frame: Frame = pickle.loads(memoryview(payload)[_SIZE.size + size_bytes :])
    if not size_bytes:
        return frame
    rows = pa.allocate_buffer(size_bytes)
    memoryview(rows).cast("B")[:] = memoryview(payload)[_SIZE.size : _SIZE.size + size_bytes]
    with pa.ipc.open_stream(rows) as stream:
        elements: list[Element] = list(stream)
    head, controls, place = frame
    for index, element in controls:
        elements.insert(index, element)
    return head, tuple(elements), place


def pack_credit(head: Head, window_bytes: int) -> bytes:
    """A grant of credit."""
    return _CREDIT.pack(*head, window_bytes)


def unpack_credit(payload: bytes) -> tuple[Head, int]:
    """What was packed."""
    attempt, edge, upstream, downstream, total_bytes, window_bytes = _CREDIT.unpack(payload)
    return (attempt, edge, upstream, downstream, total_bytes), window_bytes
