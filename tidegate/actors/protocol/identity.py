"""`TaskId` and `ChannelId`: which subtask, and which channel between two subtasks."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.codec import wire
from tidegate.storage.ids import SubtaskIndex, VertexId


@wire
@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """One subtask of one vertex."""

    vertex: VertexId
    subtask: SubtaskIndex

    def __str__(self) -> str:
        return f"{self.vertex}[{self.subtask}]"


@wire
@dataclass(frozen=True, slots=True, order=True)
class ChannelId:
    """One upstream subtask to one downstream subtask over one edge of the job graph."""

    edge: int
    upstream: SubtaskIndex
    downstream: SubtaskIndex

    def __str__(self) -> str:
        return f"e{self.edge}:{self.upstream}>{self.downstream}"
