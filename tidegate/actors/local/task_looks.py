"""`TaskLooks`: what the tasks of a local job do, in numbers. The job's thread looks; any thread reads what it saw."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.actors.drivers.task_host import TaskHost
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes.metrics.recovery_times import RecoveryWatch
from tidegate.actors.runtimes.metrics.task_values import TaskMeter, TaskTotals
from tidegate.actors.runtimes.vertex_metrics import SubtaskMetrics, VertexMetrics, vertices_of
from tidegate.protocol.identity import TaskId
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.ids import AttemptNumber


class TaskLooks:
    """Those of one job."""

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        self._meters: dict[TaskId, TaskMeter] = {}
        self._seen: dict[TaskId, SubtaskMetrics] = {}
        self.recoveries = RecoveryWatch(graph)
        """As far as looks have shown."""

    def begin(self, task: TaskId, attempt: AttemptNumber) -> None:
        """A task begins an attempt."""
        self._meters[task] = TaskMeter(task, attempt, monotonic_ms())
        self._seen.pop(task, None)

    def look(self, hosts: Mapping[TaskId, TaskHost]) -> None:
        """Look at the tasks that run."""
        came = [(host.first_row_at_ms, task) for task, host in hosts.items() if host.first_row_at_ms is not None]
        for at_ms, task in sorted(came):
            self.recoveries.row_came_in(hosts[task].machine.attempt, task, at_ms)
        for task, host in hosts.items():
            self._seen[task] = self._meters[task].read(TaskTotals.of(host, monotonic_ms()), now_ms())

    def leave(self, task: TaskId, host: TaskHost) -> None:
        """A task is over, or is stopped: look for the last time."""
        self.look({task: host})
        self._seen[task] = self._seen[task].at_rest

    def rows_in(self) -> dict[TaskId, int]:
        """Returns how many rows have come into each task in its newest attempt, as far as looks have shown."""
        return {task: seen.records_in for task, seen in dict(self._seen).items()}

    def vertices(self) -> tuple[VertexMetrics, ...]:
        """What was seen last."""
        seen = dict(self._seen)
        return vertices_of(self._graph, seen, {task: each.attempt for task, each in seen.items()})
