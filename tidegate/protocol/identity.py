"""`TaskId` names a subtask. `ChannelId` names a channel between two subtasks."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.codec import wire
from tidegate.storage.ids import SubtaskIndex, VertexId


@wire
@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """Names a subtask of a vertex of the job graph, such as `map[2]`."""

    vertex: VertexId
    subtask: SubtaskIndex

    def __str__(self) -> str:
        return f"{self.vertex}[{self.subtask}]"


@wire
@dataclass(frozen=True, slots=True, order=True)
class ChannelId:
    """Names the channel from an upstream to a downstream subtask. `edge` is the index of its edge in the job graph."""

    edge: int
    upstream: SubtaskIndex
    downstream: SubtaskIndex

    def __str__(self) -> str:
        return f"e{self.edge}:{self.upstream}>{self.downstream}"
