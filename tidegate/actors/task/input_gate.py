"""`InputGate`: the input side of a task: a queue for each channel, checks of sequence numbers, and credit for the
senders.

The task machine queues arriving elements, and takes an element in each turn. Rules:

- Elements are handled exactly in the order of their sequence numbers. A repeated element is dropped, and a gap raises
  an error (invariant 1).
- Restored in-flight rows (`recover`), and the watermarks between them, come before all arriving elements.
- Small consecutive batches are taken as one (`take_merged`), but each still counts as an element.
- A queue never contains more than the granted credit plus one element (invariant 10): a sender may overdraw by one
  element, so that an element larger than the whole credit can pass.
- Receiving never blocks. A blocked channel keeps receiving, but `next_channel` does not return it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from tidegate.actors.task import invariants
from tidegate.actors.task.channels import (
    MERGED_BYTES_MAX,
    InFlightElement,
    ReadyChannels,
    keep_in_flight,
    merged,
    neighbours,
)
from tidegate.actors.task.turn_pacer import BATCHES_A_WINDOW, ROWS_UNLIMITED
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import (
    Element,
    EndOfData,
    EndOfPartition,
    Watermark,
    element_size_bytes,
    ends_in_flight,
)
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId


class InputChannel:
    """The queue of the elements that have arrived on one channel, and the credit of its sender."""

    __slots__ = (
        "_credit_bytes_max",
        "_granted_bytes",
        "_head_bytes",
        "_left_bytes",
        "_merged_rows_max",
        "arrived",
        "channel",
        "data_over",
        "last_bytes",
        "place",
        "queue",
        "reached",
        "recovered",
        "rows_taken",
        "taken",
        "taken_bytes",
        "window_bytes",
    )

    def __init__(
        self, channel: ChannelId, window_bytes: int, merged_rows_max: int = 1, credit_bytes_max: int | None = None
    ) -> None:
        """Creates the channel. `window_bytes`: number of bytes beyond the taken ones for which the sender has credit.
        `credit_bytes_max`: upper limit of the credit, or None.

        `merged_rows_max`: limit of the rows of merged batches.
        """
        self.channel = channel
        self.place = 0
        """Index of the channel in the input gate."""
        self._credit_bytes_max = credit_bytes_max
        self._merged_rows_max = merged_rows_max
        self.recovered: deque[InFlightElement] = deque()
        """In-flight elements that were restored from a checkpoint and not taken yet."""
        self.reached: Watermark | None = None
        """The greatest watermark that was taken from the channel. None before the first one."""
        self.queue: deque[Element] = deque()
        self.arrived = 0
        """Sequence number of the next element to arrive."""
        self.taken = 0
        """Sequence number of the next element to be taken."""
        self.rows_taken = 0
        """Number of rows that were taken in this attempt."""
        self.window_bytes = window_bytes
        """Bytes that may be in flight, and may wait at the sender, from now on. Credit that was already granted
        stays granted.
        """
        self.last_bytes = 0
        """Size in bytes of the last taken element, or part of a batch."""
        self.data_over = False
        """True once the end of the channel's data was taken."""
        self._granted_bytes = self._ahead_bytes
        self.taken_bytes = 0
        """Number of bytes that were taken in this attempt."""
        self._head_bytes: int | None = None
        """Size in bytes of the whole batch at the head of the queue, if a part of it was taken, else None."""
        self._left_bytes = 0
        """Size in bytes of the part of that batch that is still queued."""

    @property
    def waiting(self) -> bool:
        """Returns whether the channel has elements that were not taken yet."""
        return bool(self.recovered or self.queue)

    def recover(self, elements: Iterable[InFlightElement]) -> None:
        """Inserts restored in-flight elements before all queued elements. Raises InvariantError after the first
        row was taken.
        """
        invariants.check_recover(self.rows_taken)
        self.recovered.extend(elements)

    def accept(self, first_sequence: int, elements: Sequence[Element]) -> Sequence[Element]:
        """Queues the elements that are new, and returns them. `first_sequence` is the sequence number of the first
        element.

        Raises ProtocolError on a gap, and then changes nothing.
        """
        if not invariants.is_gapless(first_sequence, self.arrived):
            raise ProtocolError(
                f"{self.channel}: element {first_sequence} arrived where {self.arrived} was due: "
                f"{first_sequence - self.arrived} elements were lost on the way; the tasks restart from the newest "
                "checkpoint"
            )
        new = elements[self.arrived - first_sequence :]
        self.queue.extend(new)
        self.arrived += len(new)
        return new

    def take(self, rows_max: int = ROWS_UNLIMITED) -> Element:
        """Takes and returns the next element, or several small batches as one.

        Of a larger batch it returns the first `rows_max` rows. The next call continues with the remaining rows.
        """
        if self.recovered:
            return self._take_recovered(rows_max)
        batch = self.take_merged(rows_max)
        return batch if batch is not None else self._take_one(rows_max)

    def _take_recovered(self, rows_max: int) -> InFlightElement:
        element = self.recovered.popleft()
        if isinstance(element, Watermark):
            self._reach(element)
        elif element.num_rows > rows_max:
            self.recovered.appendleft(element.slice(rows_max))
            element = element.slice(0, rows_max)
        self.last_bytes = element_size_bytes(element)
        return element

    def take_merged(self, rows_max: int) -> pa.RecordBatch | None:
        """Takes several batches at the head of the queue as one, or returns None if they cannot be merged.

        Their total size is at most half of the window, so that the sender can fill the other half.
        """
        rows_max = min(rows_max, self._merged_rows_max)
        lonely = len(self.queue) < 2 or not isinstance(self.queue[1], pa.RecordBatch)
        if lonely or rows_max < 2 or self._head_bytes is not None:
            return None
        found = neighbours(self.queue, rows_max, min(MERGED_BYTES_MAX, self.window_bytes // BATCHES_A_WINDOW))
        batch = merged([part for part, _ in found]) if found else None
        if batch is None:
            return None
        self.last_bytes = sum(size_bytes for _, size_bytes in found)
        self.rows_taken += batch.num_rows
        self.taken_bytes += self.last_bytes
        self.taken += len(found)
        for _ in found:
            self.queue.popleft()
        invariants.check_contiguous(self.taken, len(self.queue), self.arrived)
        return batch

    def _take_one(self, rows_max: int) -> Element:
        element = self.queue.popleft()
        size_bytes = element_size_bytes(element) if self._head_bytes is None else self._head_bytes
        self.last_bytes = size_bytes if self._head_bytes is None else self._left_bytes
        if isinstance(element, pa.RecordBatch):
            self.rows_taken += min(rows_max, element.num_rows)
            if element.num_rows > rows_max:
                self._head_bytes = size_bytes
                left_bytes = self.last_bytes
                self.last_bytes = left_bytes * rows_max // element.num_rows
                self._left_bytes = left_bytes - self.last_bytes
                self.queue.appendleft(element.slice(rows_max))
                return element.slice(0, rows_max)
        elif isinstance(element, Watermark):
            self._reach(element)
        self._head_bytes = None
        self.data_over = self.data_over or isinstance(element, EndOfData | EndOfPartition)
        self.taken += 1
        self.taken_bytes += size_bytes
        invariants.check_contiguous(self.taken, len(self.queue), self.arrived)
        return element

    def _reach(self, watermark: Watermark) -> None:
        if self.reached is None or watermark.timestamp_ms > self.reached.timestamp_ms:
            self.reached = watermark

    def before(self, checkpoint_id: CheckpointId) -> tuple[list[InFlightElement], int, bool]:
        """Returns the elements that are in flight before a checkpoint's barrier, a number and a flag.

        The number counts the restored elements, which come first. The flag is True if the barrier, or the end of
        the channel, has arrived.
        """
        held: list[InFlightElement] = []
        keep_in_flight(held, (self.reached, *self.recovered))
        recovered = len(held) if self.recovered else 0
        for element in self.queue:
            if ends_in_flight(element, checkpoint_id):
                return held, recovered, True
            keep_in_flight(held, (element,))
        return held, recovered, False

    @property
    def granted_bytes(self) -> int:
        """Returns the cumulative credit that was granted last, in bytes."""
        return self._granted_bytes

    def credit_to_grant(self) -> int | None:
        """Grants new credit if at least half of the last grant was used. Returns the new cumulative credit in bytes, or
        None.
        """
        total_bytes = self.taken_bytes + self._ahead_bytes
        if total_bytes - self._granted_bytes < max(1, self._ahead_bytes // 2):
            return None
        self._granted_bytes = total_bytes
        return total_bytes

    @property
    def _ahead_bytes(self) -> int:
        most_bytes = self._credit_bytes_max
        return self.window_bytes if most_bytes is None else min(self.window_bytes, most_bytes)


class InputGate:
    """The input channels of a task, from which elements are taken in turn."""

    def __init__(
        self,
        channels: Sequence[ChannelId],
        window_bytes: int,
        merged_rows_max: int = 1,
        credit_bytes_max: int | None = None,
    ) -> None:
        self._channels = {
            channel: InputChannel(channel, window_bytes, merged_rows_max, credit_bytes_max) for channel in channels
        }
        self._in_order = list(self._channels.values())
        for place, channel in enumerate(self._in_order):
            channel.place = place
        self._marked = ReadyChannels(self._in_order)
        """Channels that may have queued elements."""
        self._turn = 0
        """Index of the channel that is offered next, if it has elements."""
        self._blocked = 0
        """Bits of the channels that were blocked when they were last checked."""
        self._blocked_for: CheckpointId | None = None
        self._over = 0
        """Bits of the channels that have reached the end of their data."""
        self._recovering = False
        """True if restored in-flight elements may still be waiting on a channel."""

    def __getitem__(self, channel: ChannelId) -> InputChannel:
        found = self._channels.get(channel)
        if found is None:
            raise ProtocolError(f"{channel} is not an input of this task; this is a bug in tidegate, please report it")
        self._marked.mark(found.place)
        return found

    def __iter__(self) -> Iterator[InputChannel]:
        return iter(self._channels.values())

    @property
    def open_channels(self) -> int:
        """Returns the number of channels whose data has not ended, or 1 if all have ended."""
        return max(1, len(self._in_order) - self._over.bit_count())

    @property
    def taken_bytes(self) -> int:
        """Returns the number of bytes that were taken from all channels in this attempt."""
        return sum(channel.taken_bytes for channel in self)

    def waits(self, blocked: Callable[[ChannelId], bool], blocked_for: CheckpointId | None = None) -> bool:
        """Returns whether a channel that is not blocked has an element. The arguments are as in `next_channel`."""
        return self._first(False, blocked, blocked_for) is not None

    def recover(self, channel: ChannelId, elements: Iterable[InFlightElement]) -> None:
        """Inserts restored in-flight elements, which come before all other input of the task."""
        self[channel].recover(elements)
        self._recovering = True

    def next_channel(
        self, blocked: Callable[[ChannelId], bool], blocked_for: CheckpointId | None = None
    ) -> InputChannel | None:
        """Returns the next channel, round-robin, that has an element and is not blocked, or None.

        Restored in-flight elements come first, on all channels: after rescaling, old rows of a split may wait on one
        channel while the split's next rows arrive on another one. `blocked_for`: the checkpoint for which channels are
        blocked. While it is the same, blocked channels are not checked again.
        """
        if self._recovering:
            self._recovering = any(channel.recovered for channel in self)
        place = self._first(self._recovering, blocked, blocked_for)
        if place is None:
            return None
        self._turn = place
        return self._in_order[place]

    def _first(
        self, recovered: bool, blocked: Callable[[ChannelId], bool], blocked_for: CheckpointId | None
    ) -> int | None:
        """Returns the index of the first channel from `_turn` on, wrapping around, from which an element may be taken,
        or None.

        `recovered`: consider only channels with restored elements.
        """
        if blocked_for is None or blocked_for != self._blocked_for:
            self._blocked = 0
            self._blocked_for = blocked_for
        place = self._turn
        passed = 0
        while (found := self._marked.next(place, self._blocked | passed)) is not None:
            candidate = self._in_order[found]
            passed |= 1 << found
            place = found + 1
            if not candidate.waiting:
                self._marked.unmark(found)
            elif not recovered or candidate.recovered:
                if not blocked(candidate.channel):
                    return found
                self._blocked |= 1 << found
        return None

    def served(self) -> None:
        """Records that an element was taken from the last offered channel, so that `next_channel` continues with
        the next one.
        """
        served = self._in_order[self._turn]
        if served.data_over:
            self._over |= 1 << self._turn
        self._turn = (self._turn + 1) % len(self._in_order)

    def positions(self) -> tuple[tuple[ChannelId, int], ...]:
        """Returns, for each channel, the sequence number of the next element to be taken."""
        return tuple((channel, state.taken) for channel, state in self._channels.items())

    def row_positions(self) -> tuple[tuple[ChannelId, int], ...]:
        """Returns, for each channel, the number of rows that were taken in this attempt."""
        return tuple((channel, state.rows_taken) for channel, state in self._channels.items())
