"""The head of a call between tasks on Ray: it goes before the elements of a frame, or stands for a grant of credit."""

from __future__ import annotations

from typing import TypeAlias

from tidegate.actors.protocol.identity import ChannelId
from tidegate.storage.ids import AttemptNumber, SubtaskIndex

Head: TypeAlias = tuple[int, int, int, int, int]
"""(attempt, edge, upstream, downstream, number): plain numbers cost Ray a tenth of what a dataclass does."""


def make_head(attempt: AttemptNumber, channel: ChannelId, number: int) -> Head:
    """The head of a frame (`number`: its first sequence) or of a grant (the total of bytes)."""
    return (attempt, channel.edge, channel.upstream, channel.downstream, number)


def read_head(head: Head) -> tuple[AttemptNumber, ChannelId, int]:
    """Attempt, channel and number."""
    attempt, edge, upstream, downstream, number = head
    channel = ChannelId(edge, SubtaskIndex(upstream), SubtaskIndex(downstream))
    return AttemptNumber(attempt), channel, number
