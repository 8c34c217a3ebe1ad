"""`TaskId` and `ChannelId`: names of a subtask, and of a channel between two subtasks."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.codec import wire
from tidegate.storage.ids import SubtaskIndex, VertexId


@wire
@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """Names one subtask of one vertex."""

    vertex: VertexId
    subtask: SubtaskIndex

    def __str__(self) -> str:
        return f"{self.vertex}[{self.subtask}]"


@wire
@dataclass(frozen=True, slots=True, order=True)
class ChannelId:
    """Names the channel from an upstream subtask to a downstream subtask, on one edge of the job graph."""

    edge: int
    upstream: SubtaskIndex
    downstream: SubtaskIndex

    def __str__(self) -> str:
        return f"e{self.edge}:{self.upstream}>{self.downstream}"
