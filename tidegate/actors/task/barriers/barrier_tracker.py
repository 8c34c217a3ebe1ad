"""`BarrierTracker`: barrier handling for at-least-once. It counts barriers and never blocks a channel.

Rules that it keeps (Flink's CheckpointBarrierTracker):

- Several checkpoints may be pending. A snapshot is due when each channel has delivered its barrier or has ended.
- A snapshot or a cancel barrier supersedes older pending checkpoints. An abort concerns its own checkpoint only.
- A checkpoint ends only once for this task. What arrives for it later is ignored.
- At most `TRACKED_MAX` checkpoints are pending. One more supersedes the oldest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.actors.task.barriers.barrier_handler import NOTHING, BarrierHandler, Outcome
from tidegate.actors.task.barriers.remembered import REMEMBERED_ABORTS_MAX, RememberedIds
from tidegate.actors.task.invariants import check_newer
from tidegate.protocol.failure_reasons import CheckpointFailureReason
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Barrier
from tidegate.storage.ids import CheckpointId

TRACKED_MAX = 50
"""Checkpoints that may be pending at a time."""


@dataclass(slots=True)
class _Counted:
    """The barriers of one checkpoint that were taken."""

    barrier: Barrier
    started_at_ms: int
    taken: set[ChannelId] = field(default_factory=set)


class BarrierTracker(BarrierHandler):
    """The at-least-once `BarrierHandler`."""

    def __init__(self, channels: frozenset[ChannelId]) -> None:
        super().__init__(channels)
        self._pending: dict[CheckpointId, _Counted] = {}
        self._over = RememberedIds(REMEMBERED_ABORTS_MAX)
        """Aborted checkpoints after `_closed`: they are over, and older ones go on."""

    @property
    def pending(self) -> CheckpointId | None:
        """The newest checkpoint whose barriers are being counted."""
        return max(self._pending, default=None)

    def spoilt_by_the_end(self) -> tuple[CheckpointId, ...]:
        """All that are pending, newest first. Not a stop: each channel ends its data before the barrier of a stop."""
        return tuple(n for n in sorted(self._pending, reverse=True) if not self._pending[n].barrier.options.kind.stops)

    def blocks(self, channel: ChannelId) -> bool:
        """Never."""
        return False

    def announced(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """A barrier has arrived in the channel's queue. It counts when it is taken."""
        self._channels.check(channel)
        return NOTHING

    def barrier(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """A barrier was taken from the channel's queue."""
        self._channels.check(channel)
        self._channels.took(channel, barrier.checkpoint_id)
        return self._count(barrier, at_ms, channel)

    def trigger(self, barrier: Barrier, at_ms: int) -> Outcome:
        """The coordinator triggers this task."""
        return self._count(barrier, at_ms, None)

    def cancel_barrier(self, channel: ChannelId, checkpoint_id: CheckpointId, at_ms: int) -> Outcome:
        """A cancel barrier was taken from the channel's queue."""
        self._channels.check(channel)
        if self._is_over(checkpoint_id):
            return NOTHING
        reason = None if checkpoint_id in self._aborted_early else CheckpointFailureReason.CANCEL_BARRIER
        subsumed = self._subsume_before(checkpoint_id)
        self._close(checkpoint_id)
        return Outcome(cancelled=(*subsumed, (checkpoint_id, reason)))

    def abort(self, checkpoint_id: CheckpointId) -> Outcome:
        """The coordinator has given a checkpoint up."""
        if self._is_over(checkpoint_id):
            return NOTHING
        if checkpoint_id not in self._pending:
            self._aborted_early.add(checkpoint_id)
            return NOTHING
        return self._give_up_aborted(checkpoint_id)

    def channel_ended(self, channel: ChannelId, at_ms: int) -> Outcome:
        """A channel has ended. If several checkpoints waited for it alone, the newest gets its snapshot."""
        self._channels.check(channel)
        self._channels.end(channel)
        for counted in self._pending.values():
            counted.taken.discard(channel)
        complete = [n for n, counted in self._pending.items() if not self._channels.missing(counted.taken)]
        return self._snapshot(max(complete)) if complete else NOTHING

    def timer(self, at_ms: int) -> Outcome:
        """No timer is ever asked for."""
        return NOTHING

    def _count(self, barrier: Barrier, at_ms: int, channel: ChannelId | None) -> Outcome:
        checkpoint_id = barrier.checkpoint_id
        if self._is_over(checkpoint_id):
            return NOTHING
        if checkpoint_id in self._aborted_early:
            return self._give_up_aborted(checkpoint_id)
        subsumed: tuple[tuple[CheckpointId, CheckpointFailureReason | None], ...] = ()
        if checkpoint_id not in self._pending:
            if len(self._pending) == TRACKED_MAX:
                oldest = min(self._pending)
                if checkpoint_id < oldest:
                    return self._give_up(checkpoint_id)
                subsumed = self._give_up(oldest).cancelled
            self._pending[checkpoint_id] = _Counted(barrier, at_ms)
        counted = self._pending[checkpoint_id]
        if channel is not None:
            counted.taken.add(channel)
        if self._channels.missing(counted.taken):
            return Outcome(cancelled=subsumed)
        outcome = self._snapshot(checkpoint_id)
        return Outcome(cancelled=subsumed + outcome.cancelled, snapshot=outcome.snapshot)

    def _snapshot(self, checkpoint_id: CheckpointId) -> Outcome:
        counted = self._pending[checkpoint_id]
        self._snapshot_started_at_ms = counted.started_at_ms
        subsumed = self._subsume_before(checkpoint_id)
        self._close(checkpoint_id)
        return Outcome(cancelled=subsumed, snapshot=counted.barrier)

    def _subsume_before(
        self, checkpoint_id: CheckpointId
    ) -> tuple[tuple[CheckpointId, CheckpointFailureReason | None], ...]:
        return tuple((n, CheckpointFailureReason.SUBSUMED) for n in sorted(self._pending) if n < checkpoint_id)

    def _give_up(self, checkpoint_id: CheckpointId) -> Outcome:
        """Give up the oldest checkpoint to make room."""
        self._close(checkpoint_id)
        return Outcome(cancelled=((checkpoint_id, CheckpointFailureReason.SUBSUMED),))

    def _give_up_aborted(self, checkpoint_id: CheckpointId) -> Outcome:
        self._pending.pop(checkpoint_id, None)
        self._aborted_early.discard(checkpoint_id)
        self._over.add(checkpoint_id)
        return Outcome(cancelled=((checkpoint_id, None),))

    def _is_over(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id <= self._closed or checkpoint_id in self._over

    def _close(self, checkpoint_id: CheckpointId) -> None:
        check_newer(checkpoint_id, self._closed)
        self._closed = checkpoint_id
        self._pending = {n: counted for n, counted in self._pending.items() if n > checkpoint_id}
        self._aborted_early.forget_up_to(checkpoint_id)
        self._over.forget_up_to(checkpoint_id)
