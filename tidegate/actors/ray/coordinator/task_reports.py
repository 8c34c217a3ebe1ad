"""`TaskReports`: what the tasks of a job have told its coordinator of themselves in numbers.

Tells may be late: what counts is what a task said in the attempt that it is in now. There is one entry a task.
"""

from __future__ import annotations

from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.drivers.coordinator_host import CoordinatorHost
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes.vertex_metrics import SubtaskMetrics, VertexMetrics, vertices_of
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber


class TaskReports:
    """Those of one job. `told` is called on one thread, the rest on any."""

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        self._rows_in: dict[TaskId, tuple[AttemptNumber, int]] = {}
        self._metrics: dict[TaskId, SubtaskMetrics] = {}

    def told(self, attempt: AttemptNumber, task: TaskId, rows_in: int, metrics: SubtaskMetrics | None) -> None:
        """So many rows have come into a task. `metrics`: None where they have not changed."""
        self._rows_in[task] = (attempt, rows_in)
        if metrics is not None:
            self._metrics[task] = metrics

    def rows_in(self, state: CoordinatorState) -> dict[str, int]:
        """Rows that have come in, by vertex."""
        found: dict[str, int] = {}
        for task, (attempt, rows) in list(self._rows_in.items()):
            if attempt == state.attempt_of(task):
                found[task.vertex] = found.get(task.vertex, 0) + rows
        return found

    def vertices(self, host: CoordinatorHost | None) -> tuple[VertexMetrics, ...]:
        """All metrics, by vertex. `host`: None while the log is replayed."""
        state = CoordinatorState() if host is None else host.machine.state
        told = dict(self._metrics)
        return vertices_of(self._graph, told, {task: state.attempt_of(task) for task in told})
