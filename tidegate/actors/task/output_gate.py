"""`OutputGate`: the output side of a task: a queue for each channel, sequence numbers, credit and frames.

`Emitter` queues rows and sends frames. `SubtaskCheckpoints` queues barriers and lets them overtake. Rules:

- Elements are sent in the order in which they were queued, and get their sequence numbers then. Only a barrier may
  overtake queued elements. The overtaken elements belong to its checkpoint.
- Batches are sent only while there is credit, and the last one may overdraw it. Control elements need no credit, and
  still never overtake a batch.
- A frame is sent when enough bytes are queued, when a control element is queued (a barrier must not linger), or when
  the linger time is over. The frame size adapts: it grows while the receiver is the bottleneck (large frames cost least
  per row), and shrinks while frames are sent because of the linger time (latency matters more then).
- A watermark for which no operator behind a channel waits is sent together with lingering output, or before the next
  other control element, and only the newest one. So it neither makes frames small nor keeps batches apart.
- When a queue is full the task processes no more input: back-pressure continues to the source (invariant 10).
- For a receiver with a *narrow* window, smaller than the queue limit, queues, frames and batches stay small as well,
  because queued elements delay barriers just as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.actors.task import invariants
from tidegate.actors.task.channels import MERGED_ROWS_MAX, InFlightElement, ReadyChannels, keep_in_flight
from tidegate.actors.task.turn_pacer import BATCHES_A_WINDOW, ROWS_UNLIMITED, SenderPace
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import (
    MAX_WATERMARK_MS,
    Barrier,
    Control,
    Element,
    Watermark,
    element_size_bytes,
)
from tidegate.storage.argument_checks import check_whole
from tidegate.storage.errors import ConfigurationError, ProtocolError
from tidegate.storage.ids import CheckpointId

PROBE_MS_MIN = 10
WINDOW_BYTES_AT_FIRST = 64 * 1024
"""The first size of a window in bytes. It is small because the receiver may be slow, and sent bytes cannot be
taken back.
"""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits of the data plane, for each channel unless stated otherwise. Sizes are in bytes, times in ms."""

    credit_bytes: int = 8 * 1024 * 1024
    queue_bytes_max: int = 8 * 1024 * 1024
    frame_bytes_min: int = 64 * 1024
    frame_bytes_max: int = 8 * 1024 * 1024
    frame_elements_max: int = 1_024
    linger_ms: int = 20
    probe_ms: int = 2_000
    """Time in ms for which output waits for credit. Then an empty frame requests the grant again, because it may
    be lost.
    """
    in_flight_bytes_max: int = 256 * 1024 * 1024
    """Limit in bytes of the in-flight data of one unaligned snapshot of a task, over all channels. Beyond it the
    task declines the checkpoint.
    """
    turn_rows_max: int = ROWS_UNLIMITED
    """Limit of the rows that a task processes before it handles other messages."""
    merged_rows_max: int = MERGED_ROWS_MAX
    """Limit of the rows of a batch that is merged from small queued batches. With 1, batches are not merged."""
    debloat_target_ms: int = 0
    """Time in ms that the receiver should need for the bytes in flight. With 0, only bytes are limited."""
    window_bytes_min: int = 4 * 1024
    """The smallest size of a window, in bytes."""

    def __post_init__(self) -> None:
        check_whole(self, "credit_bytes", "queue_bytes_max", "frame_bytes_min", "frame_bytes_max", least=1)
        check_whole(self, "frame_elements_max", least=1)
        check_whole(self, "linger_ms", "debloat_target_ms", least=0)
        check_whole(self, "probe_ms", least=PROBE_MS_MIN)
        check_whole(self, "in_flight_bytes_max", "turn_rows_max", "merged_rows_max", "window_bytes_min", least=1)
        if self.frame_bytes_min > self.frame_bytes_max:
            raise ConfigurationError(
                f"BufferLimits(frame_bytes_min={self.frame_bytes_min}, frame_bytes_max={self.frame_bytes_max}): the "
                "smallest frame is larger than the largest; give frame_bytes_min up to frame_bytes_max"
            )

    @property
    def widest_window_bytes(self) -> int:
        """Returns the largest size of a window, in bytes, which a receiver gets if it is fast enough.

        The sender's queue is as large as the window, so the window may be larger than the credit. Otherwise a sender
        with little credit and a large queue would not notice a slow receiver.
        """
        return max(self.credit_bytes, self.queue_bytes_max) if self.debloat_target_ms else self.credit_bytes

    @property
    def first_window_bytes(self) -> int:
        """Returns the size of a channel's window, in bytes, before the rate of its receiver was measured."""
        if not self.debloat_target_ms:
            return self.credit_bytes
        return min(self.widest_window_bytes, max(self.window_bytes_min, WINDOW_BYTES_AT_FIRST))


class OutputChannel:
    """The queue of one output channel: elements that wait to be sent, and the credit of the receiver."""

    __slots__ = (
        "_awaited",
        "_credit_bytes",
        "_full_bytes",
        "_held",
        "_left",
        "_limits",
        "_urgent",
        "barriers",
        "bytes_put",
        "channel",
        "frame_bytes",
        "narrow_bytes",
        "next_sequence",
        "place",
        "queue",
        "queued_bytes",
        "rows_put",
        "sent_bytes",
    )

    def __init__(self, channel: ChannelId, limits: BufferLimits, awaited: bool = True) -> None:
        self.channel = channel
        self.place = 0
        """Index of the channel in the output gate."""
        self._awaited = awaited
        self._held: Watermark | None = None
        """The newest watermark, if it is delayed because no operator waits for it, else None."""
        self._left: Watermark | None = None
        """The newest watermark that was sent, or None."""
        self.queue: deque[Element] = deque()
        self.queued_bytes = 0
        self.next_sequence = 0
        """Sequence number of the next element to send."""
        self.rows_put = 0
        """Number of rows that were queued in this attempt."""
        self.barriers: set[CheckpointId] = set()
        """Checkpoints with a barrier in the queue."""
        self._limits = limits
        self.bytes_put = 0
        """Size in bytes of the batches that were queued in this turn."""
        self.narrow_bytes: int | None = None
        """The receiver's window in bytes if it is narrow (smaller than the widest), else None."""
        self._full_bytes = limits.queue_bytes_max
        """The limit of the queue, in bytes."""
        self._set_window(limits.first_window_bytes)
        self._credit_bytes = min(limits.credit_bytes, limits.first_window_bytes)
        self.sent_bytes = 0
        """Size in bytes of the batches that were sent in this attempt."""
        self.frame_bytes = limits.frame_bytes_min
        self._urgent = 0
        """Number of control elements in the queue."""

    def _set_window(self, window_bytes: int) -> None:
        limits = self._limits
        narrow = window_bytes < limits.widest_window_bytes
        self.narrow_bytes = window_bytes if narrow else None
        self._full_bytes = min(window_bytes, limits.queue_bytes_max) if narrow else limits.queue_bytes_max

    @property
    def over_limit(self) -> bool:
        """Returns whether the queue is full."""
        return invariants.is_full(self.queued_bytes, self._full_bytes)

    @property
    def exhausted(self) -> bool:
        """Returns whether the credit is used up, so that no batch may be sent."""
        return not invariants.may_send(self.sent_bytes, self._credit_bytes)

    @property
    def sendable(self) -> bool:
        """Returns whether the first queued element may be sent now."""
        return bool(self.queue) and (not isinstance(self.queue[0], pa.RecordBatch) or not self.exhausted)

    @property
    def starved_at_bytes(self) -> int | None:
        """Returns the total granted credit, in bytes, if the first queued element waits for more credit.
        Otherwise None.
        """
        return self._credit_bytes if self.queue and not self.sendable else None

    @property
    def idle(self) -> bool:
        """Returns whether there is nothing to send, now or after the linger time."""
        return not self.queue and self._held is None

    @property
    def lingering(self) -> bool:
        """Returns whether a queued element waits only for the end of the linger time."""
        return self.sendable or (self._held is not None and not self.queue)

    def put(self, element: Element) -> None:
        """Queues an element. A watermark for which no operator waits is delayed."""
        if isinstance(element, Watermark):
            self._held = None
            if not self._awaited and element.timestamp_ms < MAX_WATERMARK_MS:
                self._held = element
                return
        elif not isinstance(element, pa.RecordBatch):
            self._release()
        self._queue(element)

    def _release(self) -> None:
        """Queues the delayed watermark, if there is one."""
        held = self._held
        self._held = None
        if held is not None:
            self._queue(held)

    def _queue(self, element: Element) -> None:
        self.queue.append(element)
        if isinstance(element, pa.RecordBatch):
            size_bytes = element_size_bytes(element)
            self.rows_put += element.num_rows
            self.queued_bytes += size_bytes
            self.bytes_put += size_bytes
            return
        self._urgent += 1
        if isinstance(element, Barrier):
            self.barriers.add(element.checkpoint_id)

    def overtake(self, barrier: Barrier) -> list[InFlightElement]:
        """Moves a barrier to the head of the queue. Returns the elements that the barrier has overtaken.

        If the barrier is not in the queue yet, it is inserted.
        """
        overtaken: list[InFlightElement] = []
        keep_in_flight(overtaken, (self._left,))
        for index, element in enumerate(self.queue):
            if isinstance(element, Barrier) and element.checkpoint_id == barrier.checkpoint_id:
                del self.queue[index]
                self._urgent -= 1
                break
            keep_in_flight(overtaken, (element,))
        self.queue.appendleft(barrier)
        self.barriers.add(barrier.checkpoint_id)
        self._urgent += 1
        return overtaken

    def grant(self, total_bytes: int, window_bytes: int) -> None:
        """Sets the granted credit and the window, in bytes. A grant older than the newest one changes nothing."""
        if total_bytes >= self._credit_bytes:
            self._credit_bytes = total_bytes
            self._set_window(window_bytes)

    def take_frame(self, flush: bool) -> tuple[int, tuple[Element, ...]] | None:
        """Removes and returns the next frame: the sequence number of its first element, and its elements.

        None if no frame may be sent yet. `flush`: the linger time is over, so a small frame is sent too.
        """
        by_time = flush and self.queued_bytes > 0 and not self._urgent
        if flush:
            self._release()
        if not self.sendable:
            if self.queue:
                self.frame_bytes = min(self.frame_bytes * 2, self._limits.frame_bytes_max)
            return None
        full = self.queued_bytes >= self.frame_bytes
        if self.narrow_bytes is not None:
            full = full or self.queued_bytes >= self.narrow_bytes // BATCHES_A_WINDOW
        if not (flush or self._urgent or full):
            return None
        if by_time and self.queued_bytes * 2 < self.frame_bytes:
            self.frame_bytes = max(self.frame_bytes // 2, self._limits.frame_bytes_min)
        first_sequence = self.next_sequence
        elements: list[Element] = []
        frame_bytes = 0
        while self.sendable and len(elements) < self._limits.frame_elements_max:
            size_bytes = element_size_bytes(self.queue[0])
            if elements and frame_bytes + size_bytes > self._limits.frame_bytes_max:
                break
            element = self.queue.popleft()
            if not isinstance(element, pa.RecordBatch):
                self._urgent -= 1
                if isinstance(element, Barrier):
                    self.barriers.discard(element.checkpoint_id)
                elif isinstance(element, Watermark):
                    self._left = element
            frame_bytes += size_bytes
            self.sent_bytes += size_bytes
            elements.append(element)
        self.next_sequence += len(elements)
        self.queued_bytes -= frame_bytes
        assert self.queued_bytes >= 0
        return first_sequence, tuple(elements)


class OutputGate:
    """The output channels of a task, and the frames to send."""

    def __init__(
        self, channels: Sequence[ChannelId], limits: BufferLimits, unawaited: Collection[ChannelId] = ()
    ) -> None:
        """Creates the channels. `unawaited`: channels behind which no operator waits for watermarks."""
        self.channels = {channel: OutputChannel(channel, limits, channel not in unawaited) for channel in channels}
        for place, of_channel in enumerate(self.channels.values()):
            of_channel.place = place
        self._marked = ReadyChannels(tuple(self.channels.values()))
        """Channels that may have queued elements, or got elements in this turn."""
        self.lingering = False
        """True if the last `take_frames` has left elements that could be sent with the credit."""
        self.starving = False
        """True if the last `take_frames` has left elements because there was no credit for them."""
        self.watermark_ms: int | None = None
        """The newest watermark that was queued, in ms since 1970, or None."""
        self._pace = SenderPace()

    def __getitem__(self, channel: ChannelId) -> OutputChannel:
        found = self.channels.get(channel)
        if found is None:
            raise ProtocolError(f"{channel} is not an output of this task; this is a bug in tidegate, please report it")
        self._marked.mark(found.place)
        return found

    @property
    def over_limit(self) -> bool:
        """Returns whether the queue of any channel is full."""
        for channel in self._marked:  # noqa: SIM110 (read many times a turn: a generator takes longer)
            if channel.over_limit:
                return True
        return False

    @property
    def turn_rows_max(self) -> int:
        """Returns the maximum number of rows that the task should process in one turn, so that its output suits the
        slowest receiver.
        """
        return self._pace.rows_max

    def turn_over(self, rows: int) -> None:
        """Records the end of a turn that processed `rows` rows."""
        filled = 0.0
        for channel in self._marked:
            if channel.narrow_bytes is not None:
                filled = max(filled, channel.bytes_put / channel.narrow_bytes)
            channel.bytes_put = 0
        self._pace.took(rows, filled)

    @property
    def queued_bytes(self) -> int:
        """Returns the bytes that are queued on all channels."""
        return sum(channel.queued_bytes for channel in self.channels.values())

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes that were sent in this attempt, on all channels."""
        return sum(channel.sent_bytes for channel in self.channels.values())

    @property
    def rows_put(self) -> int:
        """Returns the rows that were queued in this attempt, on all channels."""
        return sum(channel.rows_put for channel in self.channels.values())

    @property
    def empty(self) -> bool:
        """Returns whether no channel has queued elements."""
        return not any(channel.queue for channel in self._marked)

    def starved(self) -> dict[ChannelId, int]:
        """Returns the total granted credit, in bytes, of each channel that waits for credit."""
        found = ((state.channel, state.starved_at_bytes) for state in self._marked)
        return {channel: credit_bytes for channel, credit_bytes in found if credit_bytes is not None}

    def broadcast(self, element: Control) -> None:
        """Queues a control element on every channel."""
        if isinstance(element, Watermark):
            invariants.check_watermark(self.watermark_ms, element.timestamp_ms)
            self.watermark_ms = element.timestamp_ms
        self._marked.mark_all()
        for channel in self._marked:
            channel.put(element)

    def take_frames(self, flush: bool) -> list[tuple[ChannelId, int, tuple[Element, ...]]]:
        """Removes and returns all frames to send now: for each the channel, the first sequence number, and the
        elements.

        `flush`: send lingering output too.
        """
        frames = []
        self.lingering = self.starving = False
        for channel in self._marked:
            if channel.idle:
                if not channel.bytes_put:
                    self._marked.unmark(channel.place)
                continue
            while (frame := channel.take_frame(flush)) is not None:
                frames.append((channel.channel, *frame))
            self.lingering = self.lingering or channel.lingering
            self.starving = self.starving or channel.starved_at_bytes is not None
        return frames

    def row_positions(self) -> tuple[tuple[ChannelId, int], ...]:
        """Returns, for each channel, the number of rows that were queued in this attempt."""
        return tuple((channel, state.rows_put) for channel, state in self.channels.items())
