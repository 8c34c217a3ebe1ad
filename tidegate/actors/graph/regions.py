"""Pipelined regions: the parts of a job that fail and restart on their own (Flink's `PipelinedRegion`).

Two tasks that a channel joins depend on each other: rows that one had sent and the other had not taken are lost with
either. So a region is a connected component of the tasks, and nothing that is in flight leaves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tidegate.actors.protocol.identity import TaskId
from tidegate.storage.ids import VertexId

Joined = tuple[VertexId, VertexId, bool]
"""Upstream and downstream vertex of an edge; True: it joins subtask i to subtask i alone."""


def pipelined_regions(tasks: Sequence[TaskId], edges: Iterable[Joined]) -> tuple[tuple[TaskId, ...], ...]:
    """The regions of a job, and the tasks of each, in the order of the job. The cost is linear in tasks and edges.

    Over an edge from all to all every task of both vertices is in one region; over a pointwise one subtask i is in that
    of subtask i. A vertex without edges has as many regions as it has subtasks.
    """
    regions = _Components(tasks)
    of_vertex: dict[VertexId, list[TaskId]] = {}
    for task in tasks:
        of_vertex.setdefault(task.vertex, []).append(task)
    for upstream, downstream, pointwise in edges:
        senders, receivers = of_vertex[upstream], of_vertex[downstream]
        if pointwise:
            for sender, receiver in zip(senders, receivers, strict=True):
                regions.join(sender, receiver)
        else:
            for task in (*senders, *receivers):
                regions.join(senders[0], task)
    found: dict[TaskId, list[TaskId]] = {}
    for task in tasks:
        found.setdefault(regions.of(task), []).append(task)
    return tuple(map(tuple, found.values()))


def cut_edge(part: Iterable[TaskId], tasks: Iterable[TaskId], edges: Iterable[Joined]) -> Joined | None:
    """An edge over which a channel joins some of these tasks of a job to one that is not among them, if there is one.

    What was on its way there is lost with either end, so both have to go back to the same checkpoint.
    """
    subtasks: dict[VertexId, set[int]] = {}
    for task in part:
        subtasks.setdefault(task.vertex, set()).add(task.subtask)
    parallelism = Counter(task.vertex for task in tasks)
    for upstream, downstream, pointwise in edges:
        senders, receivers = subtasks.get(upstream, set()), subtasks.get(downstream, set())
        whole = len(senders) == parallelism[upstream] and len(receivers) == parallelism[downstream]
        if not (whole or (pointwise and senders == receivers) or not (senders or receivers)):
            return upstream, downstream, pointwise
    return None


class _Components:
    """Which tasks belong together: a forest, whose trees are joined at their roots (union-find)."""

    def __init__(self, tasks: Iterable[TaskId]) -> None:
        self._parent = {task: task for task in tasks}

    def of(self, task: TaskId) -> TaskId:
        """The task that stands for the component of this one."""
        while (parent := self._parent[task]) != task:
            # Halving the way makes the next one shorter.
            self._parent[task] = task = self._parent[parent]
        return task

    def join(self, one: TaskId, other: TaskId) -> None:
        """Both are in one component from now on."""
        self._parent[self.of(other)] = self.of(one)
