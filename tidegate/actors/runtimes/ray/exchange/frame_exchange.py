"""`Outgoing` and `Incoming`: how the rows of a task's frames travel: in Ray's calls, or in memory beside them.

`Outgoing` is the sender's side of all channels of a task, `Incoming` the receiver's. Rules:

- Ray's call carries every frame's head and its control elements. So order, sequences and attempts are those of one
  channel, wherever the rows are.
- A channel begins with Ray's calls. When enough has gone through it the sender makes a segment and offers it. Rows go
  there from the moment on when the receiver has taken it. A receiver on another node, or one that cannot see the
  memory, refuses, and all goes on as before.
- Frames for which there is no room go by Ray's call. Nothing ever waits for room here: that is what credit is for.
- Each mapping keeps a descriptor open, of which a process has a thousand or so: channels beyond `CHANNELS_MAX` stay
  with Ray's calls.
- Segments go with the attempt, on both sides. The receiver's rows stay for as long as somebody holds them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.protocol.identity import ChannelId, TaskId
from tidegate.actors.protocol.stream_elements import Element, element_size_bytes
from tidegate.actors.runtimes.ray.exchange.frames import FrameReader, FrameWriter, Place
from tidegate.actors.runtimes.ray.exchange.shared_segment import ForeignSegment, Offer, OwnSegment
from tidegate.storage.errors import ProtocolError

log = logging.getLogger(__name__)

OFFER_AFTER_BYTES = 64 * 1024
"""Rows of this size go by Ray's calls before a segment is made: a channel with little to say needs none."""
CHANNELS_MAX = 128
"""Channels of a task that share memory, of its outputs and of its inputs each."""
TOO_MANY = f"{CHANNELS_MAX} channels of a task share memory already"
ELSEWHERE = "another node"
"""The answer of a receiver that is on another node."""

Elements: TypeAlias = tuple[Element, ...]
Packed: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...] | None]
"""All elements and None; or the control elements with their positions, and the place in which the batches lie."""


class Outgoing:
    """The sender's side. `offer` asks the receiver of a channel; its answer comes to `answered`."""

    def __init__(self, task: TaskId, node_id: str, size_bytes: int, offer: Callable[[ChannelId, Offer], None]) -> None:
        self._task, self._node_id, self._size_bytes, self._offer = task, node_id, size_bytes, offer
        self._sent_bytes: dict[ChannelId, int] = {}
        """By Ray's calls, of channels that may have a segment and have not offered one."""
        self._offered: dict[ChannelId, OwnSegment] = {}
        self._writers: dict[ChannelId, FrameWriter] = {}
        self._refused: set[ChannelId] = set()
        self._noted: set[str] = set()
        """What was logged, once for each reason."""

    def pack(self, channel: ChannelId, elements: Elements) -> Packed:
        """What Ray's call carries: all elements, or where the batches of the frame lie."""
        writer = self._writers.get(channel)
        if writer is None:
            self._consider(channel, elements)
            return elements, None
        batches = [element for element in elements if isinstance(element, pa.RecordBatch)]
        place = writer.write(batches) if batches else None
        if place is None:
            return elements, None
        return tuple((i, e) for i, e in enumerate(elements) if not isinstance(e, pa.RecordBatch)), tuple(place)

    def answered(self, channel: ChannelId, refusal: str) -> None:
        """The receiver has taken the segment, or says why it has not."""
        segment = self._offered.pop(channel, None)
        if segment is None:
            return
        segment.hide()
        if refusal:
            self._refuse(channel, refusal)
        else:
            self._writers[channel] = FrameWriter(segment)

    def close(self) -> None:
        """The task is over."""
        self._offered.clear()
        self._writers.clear()
        self._size_bytes = 0

    def _consider(self, channel: ChannelId, elements: Elements) -> None:
        if not self._size_bytes or channel in self._offered or channel in self._refused:
            return
        sent_bytes = self._sent_bytes.get(channel, 0) + sum(map(element_size_bytes, elements))
        self._sent_bytes[channel] = sent_bytes
        if sent_bytes < OFFER_AFTER_BYTES:
            return
        del self._sent_bytes[channel]
        if len(self._offered) + len(self._writers) >= CHANNELS_MAX:
            self._refuse(channel, TOO_MANY)
            return
        try:
            segment = self._offered[channel] = OwnSegment(self._size_bytes)
        except (OSError, ValueError) as error:
            self._refuse(channel, error_text(error))
            return
        self._offer(channel, segment.offer(self._node_id))

    def _refuse(self, channel: ChannelId, reason: str) -> None:
        self._refused.add(channel)
        if reason != ELSEWHERE and reason not in self._noted:
            self._noted.add(reason)
            log.warning("rows of %s go through Ray's object store, not through shared memory: %s", self._task, reason)


class Incoming:
    """The receiver's side. `take` may be called from any thread."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._readers: dict[ChannelId, FrameReader] = {}

    def take(self, channel: ChannelId, offer: Offer) -> str:
        """Take what the sender of a channel offers. Returns why not; empty: it is taken."""
        if offer.node_id != self._node_id:
            return ELSEWHERE
        if len(self._readers) >= CHANNELS_MAX and channel not in self._readers:
            return TOO_MANY
        try:
            self._readers[channel] = FrameReader(ForeignSegment.open(offer))
        except (OSError, ValueError) as error:
            return error_text(error)
        return ""

    def unpack(self, channel: ChannelId, packed: Packed) -> Elements | None:
        """The elements of a frame; None: they have come before. ProtocolError if the batches are not there."""
        elements, place = packed
        if place is None:
            return elements
        reader = self._readers.get(channel)
        if reader is None:
            raise ProtocolError(f"{channel}: a frame lies in memory that was never taken")
        batches = reader.read(Place(*place))
        if batches is None:
            return None
        found: list[Element] = list(batches)
        for index, element in elements:
            found.insert(index, element)
        return tuple(found)
