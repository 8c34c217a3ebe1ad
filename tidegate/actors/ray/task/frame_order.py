"""Puts the frames of a task's inputs in order again: `FrameOrder` decides, `OrderedFrames` waits. `WorkerProcess` asks.

Where a connection breaks, Ray sends the frames again that were on their way: behind those that were sent meanwhile, and
whether or not they had arrived. Frames have numbers, so that changes nothing. Rules:

- A frame is handed on once all before it have been. What comes early waits.
- What comes twice is handed on twice: the machine drops elements that it has (`is_gapless`).
- What waits is bounded: by the credit of its channel, and in number by `EARLY_MAX`. Whoever waits for a frame does so
  for `GAP_MS_MAX`. Then frames are handed on as they are, and the machine fails for the gap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tidegate.actors.task.messages.events import FrameArrived
from tidegate.protocol.identity import ChannelId

EARLY_MAX = 10_000
"""Frames of a task that may wait. Watermarks and barriers need no credit."""
GAP_MS_MAX = 20_000
"""Ray sends again as soon as it reaches the process, as it does with what has come early."""


class FrameOrder:
    """That of one attempt of a task. Pure."""

    def __init__(self) -> None:
        self._due: dict[ChannelId, int] = {}
        """The number of the element that comes next, of each channel."""
        self._early: dict[ChannelId, dict[int, FrameArrived]] = {}
        """What waits, by channel and number."""
        self._waiting = 0

    def arrived(self, frame: FrameArrived) -> tuple[FrameArrived, ...]:
        """A frame came in: the frames that are to be handed on now."""
        channel, first = frame.channel, frame.first_sequence
        due = self._due.get(channel, 0)
        if first > due:
            early = self._early.setdefault(channel, {})
            self._waiting += first not in early
            early.setdefault(first, frame)
            return self.give_up(channel) if self._waiting > EARLY_MAX else ()
        self._due[channel] = due = max(due, first + len(frame.elements))
        if channel not in self._early:
            return (frame,)
        return (frame, *self._follow(channel, due))

    def _follow(self, channel: ChannelId, due: int) -> list[FrameArrived]:
        """What had come early and is not early any more."""
        early, frames = self._early[channel], []
        for first in sorted(early):
            if first > due:
                break
            frames.append(early.pop(first))
            due = max(due, first + len(frames[-1].elements))
        self._waiting -= len(frames)
        self._due[channel] = due
        if not early:
            del self._early[channel]
        return frames

    def gap(self, channel: ChannelId) -> int | None:
        """The number that frames of a channel wait for; None where none waits."""
        return self._due.get(channel, 0) if channel in self._early else None

    def give_up(self, channel: ChannelId) -> tuple[FrameArrived, ...]:
        """What waits, though something is missing before it."""
        early = self._early.pop(channel, {})
        self._waiting -= len(early)
        return tuple(early[first] for first in sorted(early))


class OrderedFrames:
    """Hands the frames of one attempt of a task on. All on its mailbox."""

    def __init__(
        self, hand_on: Callable[[FrameArrived], object], call_later: Callable[[int, Callable[[], None]], None]
    ) -> None:
        self._hand_on = hand_on
        self._call_later = call_later
        self._order = FrameOrder()

    def arrived(self, frame: FrameArrived) -> None:
        """A frame came in."""
        before = self._order.gap(frame.channel)
        for one in self._order.arrived(frame):
            self._hand_on(one)
        if before is None and (due := self._order.gap(frame.channel)) is not None:
            self._call_later(GAP_MS_MAX, partial(self._look, frame.channel, due))

    def _look(self, channel: ChannelId, due: int) -> None:
        gap = self._order.gap(channel)
        if gap == due:
            for frame in self._order.give_up(channel):
                self._hand_on(frame)
        elif gap is not None:
            self._call_later(GAP_MS_MAX, partial(self._look, channel, gap))
