"""The input side of a task: one queue a channel, contiguous sequences, credit for the sender.

Rules that it keeps:

- Elements are taken in exactly the order of their numbers; what came before is dropped, a gap raises (invariant 1).
- A queue never holds more than the credit that was granted plus one element (invariant 10): a sender may overdraw by
  one element, so that an element larger than the whole credit can pass.
- Receiving never blocks. A blocked channel only stops being offered by `next_channel`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tidegate.actors.elements import Element, element_size_bytes
from tidegate.actors.identity import ChannelId
from tidegate.storage.errors import ProtocolError


class InputChannel:
    """What has arrived on one channel and waits to be processed."""

    __slots__ = ("_credit_bytes", "_granted_bytes", "_taken_bytes", "arrived", "channel", "queue", "taken")

    def __init__(self, channel: ChannelId, credit_bytes: int) -> None:
        self.channel = channel
        self.queue: deque[Element] = deque()
        self.arrived = 0
        """Number of the element that must arrive next."""
        self.taken = 0
        """Number of the element that is taken next."""
        self._credit_bytes = credit_bytes
        self._granted_bytes = credit_bytes
        self._taken_bytes = 0

    def accept(self, first_sequence: int, elements: Sequence[Element]) -> None:
        """Queue the elements that are new. Raises ProtocolError on a gap, and then changes nothing."""
        if first_sequence > self.arrived:
            raise ProtocolError(
                f"{self.channel}: element {first_sequence} arrived where {self.arrived} was due: "
                f"{first_sequence - self.arrived} elements were lost on the way"
            )
        known = self.arrived - first_sequence
        if known < len(elements):
            self.queue.extend(elements[known:])
            self.arrived = first_sequence + len(elements)

    def take(self) -> Element:
        """The next element, in order."""
        element = self.queue.popleft()
        self.taken += 1
        self._taken_bytes += element_size_bytes(element)
        assert self.taken + len(self.queue) == self.arrived, "numbers of a queue are contiguous"
        return element

    def credit_to_grant(self) -> int | None:
        """The new cumulative credit, when at least half of the window has been freed since the last grant."""
        total_bytes = self._taken_bytes + self._credit_bytes
        if total_bytes - self._granted_bytes < max(1, self._credit_bytes // 2):
            return None
        self._granted_bytes = total_bytes
        return total_bytes


class InputGate:
    """All input channels of a task, served in turn."""

    def __init__(self, channels: Sequence[ChannelId], credit_bytes: int) -> None:
        self._channels = {channel: InputChannel(channel, credit_bytes) for channel in channels}
        self._order = deque(channels)

    def __getitem__(self, channel: ChannelId) -> InputChannel:
        found = self._channels.get(channel)
        if found is None:
            raise ProtocolError(f"{channel} is not an input of this task")
        return found

    def next_channel(self, blocked: Callable[[ChannelId], bool]) -> InputChannel | None:
        """The next channel, round-robin, that has an element and is not blocked."""
        for _ in range(len(self._order)):
            candidate = self._channels[self._order[0]]
            if candidate.queue and not blocked(candidate.channel):
                return candidate
            self._order.rotate(-1)
        return None

    def served(self) -> None:
        """The channel offered last was served: another one goes first next time."""
        self._order.rotate(-1)

    def positions(self) -> tuple[tuple[ChannelId, int], ...]:
        """For each channel the number of the next element to be taken."""
        return tuple((channel, state.taken) for channel, state in self._channels.items())

    @property
    def queued_elements(self) -> int:
        """Elements that wait on all channels."""
        return sum(len(state.queue) for state in self._channels.values())
