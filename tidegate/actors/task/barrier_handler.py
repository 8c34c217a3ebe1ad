"""`BarrierHandler`: decides when a task takes its snapshot, and which channels are blocked until then.

`SubtaskCheckpoints` calls a handler for every barrier, and carries out the `Outcome`: it sends cancel barriers, takes
the snapshot, stores what an unaligned barrier overtakes, and calls `timer` when asked to. Handlers do no I/O and read
no clock. There are two, with one interface: `BarrierAligner` (`barrier_aligner.py`) for exactly-once, and
`BarrierTracker` for at-least-once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass, field

from tidegate.actors.task.invariants import check_newer
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Barrier
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class Outcome:
    """The orders to the task after an input of its handler, to be carried out in this order."""

    cancelled: tuple[tuple[CheckpointId, CheckpointFailureReason | None], ...] = ()
    """Give these up, oldest first: send a cancel barrier, and decline with the reason. None: the coordinator gave it up
    itself."""
    snapshot: Barrier | None = None
    """Take this snapshot now. It is UNALIGNED when it overtakes what is queued (also after a timeout)."""
    timer_at_ms: int | None = None
    """Call `timer` at this time. It replaces no time that was requested before. An additional call does nothing."""


NOTHING = Outcome()


class BarrierHandler(ABC):
    """Barriers of one task, over a fixed set of input channels; a source has none.

    `announced`, `barrier`, `cancel_barrier` and `channel_ended` raise ProtocolError, and change nothing, for a channel
    that is not an input of the task or has ended. All but `announced` also do so for a blocked channel.
    """

    def __init__(self, channels: frozenset[ChannelId]) -> None:
        self._channels = Channels(channels)
        self._closed = CheckpointId(0)
        """This checkpoint and all before it are over for this task."""
        self._aborted_early = RememberedIds(REMEMBERED_ABORTS_MAX)
        """Aborted before anything of them came."""
        self._snapshot_started_at_ms: int | None = None

    @property
    @abstractmethod
    def pending(self) -> CheckpointId | None:
        """The newest checkpoint whose barriers are being collected. An unaligned one has its snapshot already."""

    @abstractmethod
    def invalidated_by_end_of_input(self) -> tuple[CheckpointId, ...]:
        """Pending checkpoints that can get no snapshot any more once the data of all channels has ended."""

    @abstractmethod
    def blocks(self, channel: ChannelId) -> bool:
        """Returns whether no element of this channel may be processed."""

    @property
    def blocks_for(self) -> CheckpointId | None:
        """The checkpoint for which channels are blocked: each of them until this is another one. None: none is."""
        return None

    def passed(self, channel: ChannelId, checkpoint_id: CheckpointId) -> bool:
        """Returns whether nothing on the channel is in flight before this barrier: it was taken, or the channel has
        ended.
        """
        return self._channels.passed(channel, checkpoint_id)

    @abstractmethod
    def announced(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """A barrier has arrived in the channel's queue, where elements may wait before it."""

    @abstractmethod
    def barrier(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """A barrier was taken from the channel's queue, in order."""

    @abstractmethod
    def trigger(self, barrier: Barrier, at_ms: int) -> Outcome:
        """The coordinator triggers this task: a source, or one whose upstream tasks have all finished.

        It waits for channels that have not ended: their EndOfPartition is on its way, but no barrier is.
        """

    @abstractmethod
    def cancel_barrier(self, channel: ChannelId, checkpoint_id: CheckpointId, at_ms: int) -> Outcome:
        """A cancel barrier was taken from the channel's queue, in order."""

    @abstractmethod
    def abort(self, checkpoint_id: CheckpointId) -> Outcome:
        """The coordinator has given a checkpoint up, maybe before its first barrier is here."""

    @abstractmethod
    def channel_ended(self, channel: ChannelId, at_ms: int) -> Outcome:
        """EndOfPartition was taken from the channel's queue: from now on it needs no barrier."""

    @abstractmethod
    def timer(self, at_ms: int) -> Outcome:
        """Handles a timer that an outcome requested."""

    def alignment_ms(self, at_ms: int) -> int:
        """Time since the first barrier of the checkpoint whose snapshot was taken last; 0 before the first one.

        That barrier was taken, or has arrived with a timeout or unaligned.
        """
        return 0 if self._snapshot_started_at_ms is None else max(0, at_ms - self._snapshot_started_at_ms)


TRACKED_MAX = 50
"""Checkpoints that may be pending at a time."""


@dataclass(slots=True)
class _Counted:
    """The barriers of one checkpoint that were taken."""

    barrier: Barrier
    started_at_ms: int
    taken: set[ChannelId] = field(default_factory=set)


class BarrierTracker(BarrierHandler):
    """Barrier handling for at-least-once. It counts barriers and never blocks a channel.

    Rules that it keeps (Flink's CheckpointBarrierTracker):

    - Several checkpoints may be pending. A snapshot is due when each channel has delivered its barrier or has ended.
    - A snapshot or a cancel barrier supersedes older pending checkpoints. An abort concerns its own checkpoint only.
    - A checkpoint ends only once for this task. What arrives for it later is ignored.
    - At most `TRACKED_MAX` checkpoints are pending. One more supersedes the oldest.
    """

    def __init__(self, channels: frozenset[ChannelId]) -> None:
        super().__init__(channels)
        self._pending: dict[CheckpointId, _Counted] = {}
        self._over = RememberedIds(REMEMBERED_ABORTS_MAX)
        """Aborted checkpoints after `_closed`: they are over, and older ones continue."""

    @property
    def pending(self) -> CheckpointId | None:
        """The newest checkpoint whose barriers are being counted."""
        return max(self._pending, default=None)

    def invalidated_by_end_of_input(self) -> tuple[CheckpointId, ...]:
        """Returns all pending checkpoints, newest first, except a stop: each channel ends its data before the barrier
        of a stop."""
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
        """Never called: this handler requests no timers."""
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
        """Gives up the oldest checkpoint to make room."""
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


REMEMBERED_ABORTS_MAX = 1_000


class Channels:
    """The input channels of one task: which have ended, and the newest barrier that was taken from each."""

    def __init__(self, channels: frozenset[ChannelId]) -> None:
        self._channels = channels
        self._ended: set[ChannelId] = set()
        self._taken: dict[ChannelId, CheckpointId] = {}

    def check(self, channel: ChannelId) -> None:
        """Raises ProtocolError if the channel cannot deliver anything."""
        if channel not in self._channels:
            raise ProtocolError(f"{channel} is not an input of this task")
        if channel in self._ended:
            raise ProtocolError(f"{channel} has ended and delivered one more element")

    def end(self, channel: ChannelId) -> None:
        """The channel has delivered its last element."""
        self._ended.add(channel)

    def took(self, channel: ChannelId, checkpoint_id: CheckpointId) -> None:
        """The barrier of this checkpoint was taken from the channel."""
        self._taken[channel] = max(checkpoint_id, self._taken.get(channel, checkpoint_id))

    def passed(self, channel: ChannelId, checkpoint_id: CheckpointId) -> bool:
        """Returns whether the channel has ended, or its barrier of this checkpoint (or of a newer one) was taken."""
        return channel in self._ended or self._taken.get(channel, CheckpointId(0)) >= checkpoint_id

    def missing(self, there: Set[ChannelId]) -> int:
        """Returns how many channels are missing: not in `there`, and not ended. `there` must not hold ended
        channels.
        """
        return len(self._channels) - len(self._ended) - len(there)


class RememberedIds:
    """A bounded set of checkpoint ids. When it is full it forgets the smallest: the least likely to come again."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._ids: set[CheckpointId] = set()

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._ids

    def add(self, checkpoint_id: CheckpointId) -> None:
        """Remembers one."""
        self._ids.add(checkpoint_id)
        if len(self._ids) > self._size_max:
            self._ids.remove(min(self._ids))

    def discard(self, checkpoint_id: CheckpointId) -> None:
        """Forgets one, if it is there."""
        self._ids.discard(checkpoint_id)

    def forget_up_to(self, checkpoint_id: CheckpointId) -> None:
        """Forgets all ids up to this one: they are not looked up again."""
        self._ids = {n for n in self._ids if n > checkpoint_id}
