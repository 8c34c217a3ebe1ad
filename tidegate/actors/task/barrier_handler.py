"""`BarrierHandler`: decides when a task takes its snapshot, and which channels are blocked until then.

`SubtaskCheckpoints` calls a handler for every barrier, and carries out the `Outcome`: it sends cancel barriers, takes
the snapshot, stores the rows that an unaligned barrier overtakes, and calls `timer` at the requested time. Handlers do
no I/O and read no clock. There are two: `BarrierAligner` (`barrier_aligner.py`) for exactly-once, and `BarrierTracker`
for at-least-once.
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
    """The result of an input to the handler: orders for the task to carry out, in the order of the fields."""

    cancelled: tuple[tuple[CheckpointId, CheckpointFailureReason | None], ...] = ()
    """Checkpoints to abort in this task, oldest first, each with the reason with which to decline it.

    The task also sends their cancel barriers. The reason is None if the coordinator aborted the checkpoint itself.
    """
    snapshot: Barrier | None = None
    """The barrier for which to take the snapshot now, or None. It is UNALIGNED if it overtakes queued elements."""
    timer_at_ms: int | None = None
    """The time, in ms, at which to call `timer`, or None. Earlier requests stay valid. An extra call of `timer`
    has no effect.
    """


NOTHING = Outcome()


class BarrierHandler(ABC):
    """Handles the barriers of one task over a fixed set of input channels. A source has no input channels.

    `announced`, `barrier`, `cancel_barrier` and `channel_ended` raise ProtocolError, and change nothing, for a channel
    that is not an input of the task or has ended. All of them except `announced` also raise for a blocked channel.
    """

    def __init__(self, channels: frozenset[ChannelId]) -> None:
        self._channels = Channels(channels)
        self._closed = CheckpointId(0)
        """Id of the newest checkpoint that has ended for this task. All older checkpoints have ended too."""
        self._aborted_early = RememberedIds(REMEMBERED_ABORTS_MAX)
        """Checkpoints that were aborted before any of their barriers arrived."""
        self._snapshot_started_at_ms: int | None = None

    @property
    @abstractmethod
    def pending(self) -> CheckpointId | None:
        """Returns the newest checkpoint whose barriers are being collected, or None. If it is unaligned, its
        snapshot is already taken.
        """

    @abstractmethod
    def invalidated_by_end_of_input(self) -> tuple[CheckpointId, ...]:
        """Pending checkpoints, newest first, whose snapshot is no longer possible once the data of all channels
        has ended.
        """

    @abstractmethod
    def blocks(self, channel: ChannelId) -> bool:
        """Returns whether no element of this channel may be processed, because its barrier was taken."""

    @property
    def blocks_for(self) -> CheckpointId | None:
        """Returns the checkpoint for which channels are blocked, or None. A blocked channel stays blocked until
        this value changes.
        """
        return None

    def passed(self, channel: ChannelId, checkpoint_id: CheckpointId) -> bool:
        """Returns whether a channel has no in-flight elements before a checkpoint's barrier: the barrier was
        taken, or the channel has ended.
        """
        return self._channels.passed(channel, checkpoint_id)

    @abstractmethod
    def announced(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """Handles a barrier that has arrived at the end of the channel's queue, behind other elements."""

    @abstractmethod
    def barrier(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """Handles a barrier that was taken from the channel's queue, in order."""

    @abstractmethod
    def trigger(self, barrier: Barrier, at_ms: int) -> Outcome:
        """Handles the coordinator's trigger of this task: a source, or a task whose upstream tasks have all finished.

        The handler waits for the EndOfPartition of channels that have not ended. They will deliver no barrier.
        """

    @abstractmethod
    def cancel_barrier(self, channel: ChannelId, checkpoint_id: CheckpointId, at_ms: int) -> Outcome:
        """Handles a cancel barrier that was taken from the channel's queue, in order."""

    @abstractmethod
    def abort(self, checkpoint_id: CheckpointId) -> Outcome:
        """Handles the coordinator's abort of a checkpoint, possibly before its first barrier has arrived."""

    @abstractmethod
    def channel_ended(self, channel: ChannelId, at_ms: int) -> Outcome:
        """Handles an EndOfPartition that was taken from the channel's queue. The channel then needs no barrier."""

    @abstractmethod
    def timer(self, at_ms: int) -> Outcome:
        """Handles a timer that an earlier outcome has requested."""

    def alignment_ms(self, at_ms: int) -> int:
        """Returns how long the alignment for the newest snapshot has taken by `at_ms`, in ms. 0 before the first
        snapshot.

        The alignment begins when the first barrier was taken or, with a timeout or unaligned, when it has arrived.
        """
        return 0 if self._snapshot_started_at_ms is None else max(0, at_ms - self._snapshot_started_at_ms)


TRACKED_MAX = 50
"""Limit of checkpoints that are pending in a task at a time."""


@dataclass(slots=True)
class _Counted:
    """The channels from which the barrier of one checkpoint was taken."""

    barrier: Barrier
    started_at_ms: int
    taken: set[ChannelId] = field(default_factory=set)


class BarrierTracker(BarrierHandler):
    """The `BarrierHandler` for at-least-once. It counts barriers and never blocks a channel.

    Rules (Flink's CheckpointBarrierTracker):

    - Several checkpoints may be pending. A snapshot is due when each channel has delivered its barrier or has ended.
    - A snapshot or a cancel barrier supersedes older pending checkpoints. An abort concerns its own checkpoint only.
    - A checkpoint ends only once for this task. Later inputs for it are ignored.
    - At most `TRACKED_MAX` checkpoints are pending. One more supersedes the oldest.
    """

    def __init__(self, channels: frozenset[ChannelId]) -> None:
        super().__init__(channels)
        self._pending: dict[CheckpointId, _Counted] = {}
        self._over = RememberedIds(REMEMBERED_ABORTS_MAX)
        """Aborted checkpoints that are newer than `_closed`. Checkpoints older than them may still be pending."""

    @property
    def pending(self) -> CheckpointId | None:
        """Returns the newest checkpoint whose barriers are being counted, or None."""
        return max(self._pending, default=None)

    def invalidated_by_end_of_input(self) -> tuple[CheckpointId, ...]:
        """Returns all pending checkpoints, newest first, except a stop. In a stop each channel ends its data
        before its barrier.
        """
        return tuple(n for n in sorted(self._pending, reverse=True) if not self._pending[n].barrier.options.kind.stops)

    def blocks(self, channel: ChannelId) -> bool:
        """Returns False, because this handler blocks no channel."""
        return False

    def announced(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """Does nothing: this handler counts a barrier when it is taken."""
        self._channels.check(channel)
        return NOTHING

    def barrier(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """Counts a barrier that was taken from the channel's queue."""
        self._channels.check(channel)
        self._channels.took(channel, barrier.checkpoint_id)
        return self._count(barrier, at_ms, channel)

    def trigger(self, barrier: Barrier, at_ms: int) -> Outcome:
        """Handles the coordinator's trigger of a checkpoint in this task."""
        return self._count(barrier, at_ms, None)

    def cancel_barrier(self, channel: ChannelId, checkpoint_id: CheckpointId, at_ms: int) -> Outcome:
        """Handles a cancel barrier that was taken from the channel's queue."""
        self._channels.check(channel)
        if self._is_over(checkpoint_id):
            return NOTHING
        reason = None if checkpoint_id in self._aborted_early else CheckpointFailureReason.CANCEL_BARRIER
        subsumed = self._subsume_before(checkpoint_id)
        self._close(checkpoint_id)
        return Outcome(cancelled=(*subsumed, (checkpoint_id, reason)))

    def abort(self, checkpoint_id: CheckpointId) -> Outcome:
        """Handles the abort of a checkpoint by the coordinator."""
        if self._is_over(checkpoint_id):
            return NOTHING
        if checkpoint_id not in self._pending:
            self._aborted_early.add(checkpoint_id)
            return NOTHING
        return self._give_up_aborted(checkpoint_id)

    def channel_ended(self, channel: ChannelId, at_ms: int) -> Outcome:
        """Handles the end of a channel. If several checkpoints waited only for this channel, the newest gets its
        snapshot.
        """
        self._channels.check(channel)
        self._channels.end(channel)
        for counted in self._pending.values():
            counted.taken.discard(channel)
        complete = [n for n, counted in self._pending.items() if not self._channels.missing(counted.taken)]
        return self._snapshot(max(complete)) if complete else NOTHING

    def timer(self, at_ms: int) -> Outcome:
        """Never called, because this handler requests no timers."""
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
        """Aborts a checkpoint in this task, because too many are pending."""
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
        """Raises ProtocolError if the channel is not an input of the task, or has ended."""
        if channel not in self._channels:
            raise ProtocolError(f"{channel} is not an input of this task; this is a bug in tidegate, please report it")
        if channel in self._ended:
            raise ProtocolError(
                f"{channel} has delivered an element after its end; this is a bug in tidegate, please report it"
            )

    def end(self, channel: ChannelId) -> None:
        """Records that the channel has delivered its last element."""
        self._ended.add(channel)

    def took(self, channel: ChannelId, checkpoint_id: CheckpointId) -> None:
        """Records that the barrier of this checkpoint was taken from the channel."""
        self._taken[channel] = max(checkpoint_id, self._taken.get(channel, checkpoint_id))

    def passed(self, channel: ChannelId, checkpoint_id: CheckpointId) -> bool:
        """Returns whether the channel has ended, or its barrier of this checkpoint or of a newer one was taken."""
        return channel in self._ended or self._taken.get(channel, CheckpointId(0)) >= checkpoint_id

    def missing(self, there: Set[ChannelId]) -> int:
        """Returns the number of channels that are still missing: they have not ended and are not in `there`.

        `there` must not contain ended channels.
        """
        return len(self._channels) - len(self._ended) - len(there)


class RememberedIds:
    """A set of checkpoint ids with a size limit. A full set drops the smallest id, which is the least likely to
    be needed.
    """

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._ids: set[CheckpointId] = set()

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._ids

    def add(self, checkpoint_id: CheckpointId) -> None:
        """Adds a checkpoint id to the set."""
        self._ids.add(checkpoint_id)
        if len(self._ids) > self._size_max:
            self._ids.remove(min(self._ids))

    def discard(self, checkpoint_id: CheckpointId) -> None:
        """Removes a checkpoint id from the set, if it is there."""
        self._ids.discard(checkpoint_id)

    def forget_up_to(self, checkpoint_id: CheckpointId) -> None:
        """Removes all checkpoint ids up to and including this one."""
        self._ids = {n for n in self._ids if n > checkpoint_id}
