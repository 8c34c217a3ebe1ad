"""Pipelined regions: the parts of a job that fail and restart independently (Flink's `PipelinedRegion`).

If one of two tasks that a channel joins fails, the rows on the channel are lost: one task has sent them, and the other
has not received them. A region is therefore a connected component of the tasks, and no channel leaves it. The
coordinator restarts the regions of failed tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import VertexId

Joined = tuple[VertexId, VertexId, bool]
"""An edge: its upstream vertex, its downstream vertex, and whether it joins only subtask i to subtask i
(pointwise).
"""


def pipelined_regions(tasks: Sequence[TaskId], edges: Iterable[Joined]) -> tuple[tuple[TaskId, ...], ...]:
    """Returns the regions of a job. Each is a tuple of tasks, in the order of the job.

    An all-to-all edge puts every task of both vertices into one region. A pointwise edge puts subtask i of one vertex
    with subtask i of the other. A vertex without edges has a region for each subtask. The cost is linear in the tasks
    of each edge's vertices.
    """
    regions = _Components(tasks)
    of_vertex: dict[VertexId, list[TaskId]] = {}
    for task in tasks:
        of_vertex.setdefault(task.vertex, []).append(task)
    for upstream, downstream, pointwise in edges:
        senders = of_vertex[upstream]
        receivers = of_vertex[downstream]
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
    """Returns an edge with a channel between a task in `part` and a task outside of `part`, or None.

    Rows on such a channel are lost if either task fails, so both must return to the same checkpoint.
    """
    subtasks: dict[VertexId, set[int]] = {}
    for task in part:
        subtasks.setdefault(task.vertex, set()).add(task.subtask)
    parallelism = Counter(task.vertex for task in tasks)
    for upstream, downstream, pointwise in edges:
        senders = subtasks.get(upstream, set())
        receivers = subtasks.get(downstream, set())
        whole = len(senders) == parallelism[upstream] and len(receivers) == parallelism[downstream]
        if not (whole or (pointwise and senders == receivers) or not (senders or receivers)):
            return upstream, downstream, pointwise
    return None


class _Components:
    """Union-find over tasks, with path halving: finds the connected components.

    Source: Tarjan and van Leeuwen, Worst-case Analysis of Set Union Algorithms, 1984.
    """

    def __init__(self, tasks: Iterable[TaskId]) -> None:
        self._parent = {task: task for task in tasks}

    def of(self, task: TaskId) -> TaskId:
        """Returns the root of a task's tree, which represents its component."""
        while (parent := self._parent[task]) != task:
            # Path halving: point to the grandparent, so that the next search is shorter.
            self._parent[task] = task = self._parent[parent]
        return task

    def join(self, one: TaskId, other: TaskId) -> None:
        """Merges the components of two tasks."""
        self._parent[self.of(other)] = self.of(one)
