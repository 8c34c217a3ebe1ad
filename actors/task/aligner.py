"""Aligned exactly-once barrier handling of one task, as a machine of its own.

Rules that it keeps (Carbone et al., "Lightweight Asynchronous Snapshots for Distributed Dataflows"; Flink's
SingleCheckpointBarrierHandler):

- From a channel's barrier on, nothing of that channel is processed until the barrier of every channel is there.
- A checkpoint ends for this task in one way only, complete or cancelled, and ids only grow: what arrives for an id
  that has ended is ignored.
- A barrier of a newer checkpoint supersedes the one that is pending.
- An abort that comes before the first barrier is remembered, so that the barrier blocks nobody.
- A channel that has ended needs no barrier.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.elements import Barrier
from tidegate.actors.identity import ChannelId
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId

REMEMBERED_ABORTS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the task has to do after an input of the aligner, in this order."""

    cancelled: tuple[CheckpointId, ...] = ()
    """Send a cancel barrier for each of these."""
    snapshot: Barrier | None = None
    """Take this snapshot now: all channels are aligned."""


_NOTHING = Outcome()


class BarrierAligner:
    """Barrier alignment over a fixed set of channels."""

    def __init__(self, channels: frozenset[ChannelId]) -> None:
        assert channels, "a task without input channels has nothing to align"
        self._channels = channels
        self._ended: set[ChannelId] = set()
        self._pending: Barrier | None = None
        self._arrived: set[ChannelId] = set()
        self._started_at_ms = 0
        self._closed = CheckpointId(0)
        self._aborted_early: set[CheckpointId] = set()

    @property
    def pending(self) -> CheckpointId | None:
        """The checkpoint whose barriers are being collected."""
        return None if self._pending is None else self._pending.checkpoint_id

    def blocks(self, channel: ChannelId) -> bool:
        """Whether elements of this channel must wait."""
        return channel in self._arrived

    def barrier(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """A barrier is the next element of a channel."""
        self._check(channel)
        checkpoint_id = barrier.checkpoint_id
        if channel in self._arrived:
            raise ProtocolError(f"{channel} is blocked at barrier {self.pending} and delivered {checkpoint_id}")
        if checkpoint_id <= self._closed:
            return _NOTHING
        if self._pending is not None and checkpoint_id < self._pending.checkpoint_id:
            return _NOTHING
        cancelled: tuple[CheckpointId, ...] = ()
        if self._pending is not None and checkpoint_id > self._pending.checkpoint_id:
            cancelled = (self._end_pending(),)
        if checkpoint_id in self._aborted_early:
            self._close(checkpoint_id)
            return Outcome(cancelled=(*cancelled, checkpoint_id))
        if self._pending is None:
            self._pending = barrier
            self._started_at_ms = at_ms
        self._arrived.add(channel)
        return Outcome(cancelled=cancelled, snapshot=self._complete_if_aligned())

    def cancel_barrier(self, channel: ChannelId, checkpoint_id: CheckpointId) -> Outcome:
        """A cancel barrier is the next element of a channel."""
        self._check(channel)
        return self._cancel(checkpoint_id)

    def abort(self, checkpoint_id: CheckpointId) -> Outcome:
        """The coordinator has given a checkpoint up."""
        if self._pending is not None and self._pending.checkpoint_id == checkpoint_id:
            return Outcome(cancelled=(self._end_pending(),))
        if checkpoint_id > self._closed:
            self._aborted_early.add(checkpoint_id)
            if len(self._aborted_early) > REMEMBERED_ABORTS_MAX:
                self._aborted_early.remove(min(self._aborted_early))
        return _NOTHING

    def channel_ended(self, channel: ChannelId) -> Outcome:
        """A channel has delivered its last element."""
        self._check(channel)
        self._ended.add(channel)
        return Outcome(snapshot=self._complete_if_aligned()) if self._pending is not None else _NOTHING

    def alignment_ms(self, at_ms: int) -> int:
        """Time since the first barrier of the checkpoint that was aligned last."""
        return max(0, at_ms - self._started_at_ms)

    def _cancel(self, checkpoint_id: CheckpointId) -> Outcome:
        if checkpoint_id <= self._closed:
            return _NOTHING
        if self._pending is not None and checkpoint_id < self._pending.checkpoint_id:
            return _NOTHING
        cancelled: tuple[CheckpointId, ...] = ()
        if self._pending is not None and self._pending.checkpoint_id != checkpoint_id:
            cancelled = (self._end_pending(),)
        self._close(checkpoint_id)
        return Outcome(cancelled=(*cancelled, checkpoint_id))

    def _complete_if_aligned(self) -> Barrier | None:
        pending = self._pending
        assert pending is not None
        if self._arrived | self._ended != self._channels:
            return None
        self._close(pending.checkpoint_id)
        return pending

    def _end_pending(self) -> CheckpointId:
        assert self._pending is not None
        checkpoint_id = self._pending.checkpoint_id
        self._close(checkpoint_id)
        return checkpoint_id

    def _close(self, checkpoint_id: CheckpointId) -> None:
        assert checkpoint_id > self._closed, "checkpoint ids only grow"
        self._closed = checkpoint_id
        self._pending = None
        self._arrived.clear()
        self._aborted_early = {n for n in self._aborted_early if n > checkpoint_id}

    def _check(self, channel: ChannelId) -> None:
        if channel not in self._channels:
            raise ProtocolError(f"{channel} is not an input of this task")
        if channel in self._ended:
            raise ProtocolError(f"{channel} has ended and delivered one more element")
