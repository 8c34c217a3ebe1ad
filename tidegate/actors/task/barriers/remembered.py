"""What both barrier handlers remember.

`Channels`: the newest barrier that was taken from each channel, and which channels have ended. `RememberedIds`:
checkpoints that were aborted out of order.

Everything here is bounded: one entry for each channel, and a fixed number of ids.
"""

from __future__ import annotations

from collections.abc import Set

from tidegate.protocol.identity import ChannelId
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId

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
        """Whether the channel has ended, or its barrier of this checkpoint (or of a newer one) was taken."""
        return channel in self._ended or self._taken.get(channel, CheckpointId(0)) >= checkpoint_id

    def missing(self, there: Set[ChannelId]) -> int:
        """How many channels are missing: not in `there`, and not ended. `there` must not hold ended channels."""
        return len(self._channels) - len(self._ended) - len(there)


class RememberedIds:
    """A bounded set of checkpoint ids. When it is full it forgets the smallest: the least likely to come again."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._ids: set[CheckpointId] = set()

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._ids

    def add(self, checkpoint_id: CheckpointId) -> None:
        """Remember one."""
        self._ids.add(checkpoint_id)
        if len(self._ids) > self._size_max:
            self._ids.remove(min(self._ids))

    def discard(self, checkpoint_id: CheckpointId) -> None:
        """Forget one, if it is there."""
        self._ids.discard(checkpoint_id)

    def forget_up_to(self, checkpoint_id: CheckpointId) -> None:
        """Forget all ids up to this one: nobody will ask for them again."""
        self._ids = {n for n in self._ids if n > checkpoint_id}
