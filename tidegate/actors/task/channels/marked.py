"""`Marked`: those of a task's channels in which something may have to be done, in the order of the channels.

Each turn asks all queues of a task several times over. With a thousand channels, of which two have something, that was
all that a turn did; a checkpoint, with a barrier from each channel, cost the square of their number. Rules:

- A mark says that a channel may have something. Who reaches for a channel marks it; who finds nothing in it may take
  the mark away. So a channel without a mark has nothing.
- Marks are bits of one number, so that the next one behind a place is found without looking at each.
- Few channels are always marked: to look at them all takes no longer than to look at the marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

ALWAYS_MARKED = 8
"""So many channels, or fewer, keep their marks."""

ChannelT = TypeVar("ChannelT")


class Marked(Generic[ChannelT]):
    """Channels by their places, from 0 on. None is marked at first."""

    def __init__(self, channels: Sequence[ChannelT]) -> None:
        self._channels = list(channels)
        self._all = (1 << len(self._channels)) - 1
        self._always = len(self._channels) <= ALWAYS_MARKED
        self._bits = self._all if self._always else 0

    def __iter__(self) -> Iterator[ChannelT]:
        """The channels that are marked as it begins."""
        if self._bits == self._all:
            return iter(self._channels)
        return (self._channels[place] for place in places(self._bits))

    def mark(self, place: int) -> None:
        """This channel may have something."""
        self._bits |= 1 << place

    def mark_all(self) -> None:
        """Every channel may."""
        self._bits = self._all

    def unmark(self, place: int) -> None:
        """This channel has nothing."""
        if not self._always:
            self._bits &= ~(1 << place)

    def next(self, place: int, but: int = 0) -> int | None:
        """The first marked place from this one on, around the end; `but`: the bits of those that do not count."""
        bits = self._bits & ~but
        behind = bits >> place
        if behind:
            return place + (behind & -behind).bit_length() - 1
        return (bits & -bits).bit_length() - 1 if bits else None


def places(bits: int) -> Iterator[int]:
    """The places of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
