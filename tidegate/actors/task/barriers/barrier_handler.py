"""`BarrierHandler`: what both barrier handlers are and share, and `Outcome`, their answer.

A handler only decides. Its task sends the cancel barriers, takes the snapshot, stores what an unaligned one overtakes,
and calls `timer` when it was asked to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tidegate.actors.task.barriers.remembered import REMEMBERED_ABORTS_MAX, Channels, RememberedIds
from tidegate.protocol.failure_reasons import CheckpointFailureReason
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Barrier
from tidegate.storage.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the task has to do after an input of its handler, in this order."""

    cancelled: tuple[tuple[CheckpointId, CheckpointFailureReason | None], ...] = ()
    """Give these up, oldest first: send a cancel barrier, and decline with the reason. None: the coordinator knows."""
    snapshot: Barrier | None = None
    """Take this snapshot now. It is UNALIGNED when it overtakes what is queued (also after a timeout)."""
    timer_at_ms: int | None = None
    """Call `timer` at this time. It replaces no time that was asked for before; a call too many does nothing."""


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
    def spoilt_by_the_end(self) -> tuple[CheckpointId, ...]:
        """Pending checkpoints that can get no snapshot any more once the data of all channels has ended."""

    @abstractmethod
    def blocks(self, channel: ChannelId) -> bool:
        """Whether no element of this channel may be processed."""

    @property
    def blocks_for(self) -> CheckpointId | None:
        """The checkpoint for which channels are blocked: each of them until this is another one. None: none is."""
        return None

    def passed(self, channel: ChannelId, checkpoint_id: CheckpointId) -> bool:
        """Whether nothing on the channel is in flight before this barrier: it was taken, or the channel has ended."""
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
        """A time that an outcome asked for has come."""

    def alignment_ms(self, at_ms: int) -> int:
        """Time since the first barrier of the checkpoint whose snapshot was taken last; 0 before the first one.

        That barrier was taken, or has arrived with a timeout or unaligned.
        """
        return 0 if self._snapshot_started_at_ms is None else max(0, at_ms - self._snapshot_started_at_ms)
