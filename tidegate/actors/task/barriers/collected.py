"""`Collected`: which barriers of one checkpoint a task has, and when its barrier may overtake what is queued.

The barrier's own options decide: it overtakes when it is UNALIGNED, or aligned and over its timeout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.actors.protocol.identity import ChannelId
from tidegate.actors.protocol.stream_elements import Alignment, Barrier
from tidegate.storage.ids import CheckpointId


@dataclass(slots=True)
class Collected:
    """The barriers of one checkpoint that are there: `arrived` in their queues, of which some were `taken`."""

    barrier: Barrier
    arrived: set[ChannelId] = field(default_factory=set)
    taken: set[ChannelId] = field(default_factory=set)
    started_at_ms: int | None = None
    timeout_at_ms: int | None = None
    timer_armed: bool = False

    def start(self, at_ms: int) -> None:
        """The alignment counts from here, unless it has begun before."""
        if self.started_at_ms is None:
            self.started_at_ms = at_ms

    def arm(self, barrier: Barrier, at_ms: int) -> int | None:
        """The time to ask a timer for, the first time that a barrier with a timeout is there; else None."""
        timeout_at_ms = timeout_at_ms_of(barrier, at_ms)
        if self.timer_armed or timeout_at_ms is None:
            return None
        self.timer_armed = True
        self.timeout_at_ms = timeout_at_ms
        return timeout_at_ms


@dataclass(frozen=True, slots=True)
class Step:
    """One input of the aligner, for the action that answers it."""

    checkpoint_id: CheckpointId
    at_ms: int = 0
    channel: ChannelId | None = None
    barrier: Barrier | None = None
    taken: bool = False


def overtakes(barrier: Barrier, at_ms: int) -> bool:
    """Whether the barrier goes before what is queued in front of it."""
    timeout_at_ms = timeout_at_ms_of(barrier, at_ms)
    is_over = timeout_at_ms is not None and timeout_at_ms <= at_ms
    return is_over or barrier.options.alignment is Alignment.UNALIGNED


def timeout_at_ms_of(barrier: Barrier, at_ms: int) -> int | None:
    """When a barrier that is looked at now may overtake; None for one without a timeout.

    It was triggered by the clock of another machine, or by this one's before that was set back: it cannot have been
    later than now.
    """
    if not barrier.options.timeoutable:
        return None
    assert barrier.options.aligned_timeout_ms is not None
    return min(barrier.triggered_at_ms, at_ms) + barrier.options.aligned_timeout_ms
