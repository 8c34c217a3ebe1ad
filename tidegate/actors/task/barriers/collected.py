"""Parts of the barrier aligner: the barriers of one checkpoint, one input, and when a barrier overtakes.

Each barrier's own options decide that: it overtakes what is queued if it is UNALIGNED, or ALIGNED and past its timeout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Alignment, Barrier
from tidegate.storage.ids import CheckpointId


@dataclass(slots=True)
class Collected:
    """The barriers of one checkpoint so far: on which channels one has arrived, and from which it was taken."""

    barrier: Barrier
    arrived: set[ChannelId] = field(default_factory=set)
    taken: set[ChannelId] = field(default_factory=set)
    started_at_ms: int | None = None
    timeout_at_ms: int | None = None
    timer_armed: bool = False

    def start(self, at_ms: int) -> None:
        """The alignment begins now, unless it has begun already."""
        if self.started_at_ms is None:
            self.started_at_ms = at_ms

    def arm(self, barrier: Barrier, at_ms: int) -> int | None:
        """When a timer has to fire: asked for once, by the first barrier that has a timeout. None otherwise."""
        timeout_at_ms = timeout_at_ms_of(barrier, at_ms)
        if self.timer_armed or timeout_at_ms is None:
            return None
        self.timer_armed = True
        self.timeout_at_ms = timeout_at_ms
        return timeout_at_ms


@dataclass(frozen=True, slots=True)
class Step:
    """One input of the aligner, as its actions get it."""

    checkpoint_id: CheckpointId
    at_ms: int = 0
    channel: ChannelId | None = None
    barrier: Barrier | None = None
    taken: bool = False


def overtakes(barrier: Barrier, at_ms: int) -> bool:
    """Whether the barrier overtakes what is queued before it."""
    timeout_at_ms = timeout_at_ms_of(barrier, at_ms)
    is_over = timeout_at_ms is not None and timeout_at_ms <= at_ms
    return is_over or barrier.options.alignment is Alignment.UNALIGNED


def timeout_at_ms_of(barrier: Barrier, at_ms: int) -> int | None:
    """When a barrier may overtake; None for one without a timeout.

    Another machine's clock says when it was triggered, or this one's before it was set back. A time later than now
    therefore counts as now.
    """
    if not barrier.options.timeoutable:
        return None
    assert barrier.options.aligned_timeout_ms is not None
    return min(barrier.triggered_at_ms, at_ms) + barrier.options.aligned_timeout_ms
