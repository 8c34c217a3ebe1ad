"""`RowCounts`: what one task of one attempt has taken in and sent, for the coordinator and for Ray's metrics.

The coordinator is told when there are new rows, and of the first ones at once: they end a recovery. Metrics are written
once a second.
"""

from __future__ import annotations

from tidegate.actors.hosts.job_context import JobContext
from tidegate.actors.hosts.task.task_host import TaskHost
from tidegate.actors.runtimes.metrics.task_values import TaskTotals, task_tags
from tidegate.actors.runtimes.ray.metrics import TaskMetrics
from tidegate.actors.runtimes.ray.process.orders import Handle
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor
from tidegate.storage.clock import monotonic_ms

METRICS_MS = 1_000


class RowCounts:
    """Those of one task; `coordinator` is told."""

    def __init__(self, coordinator: Handle, context: JobContext, descriptor: TaskDescriptor) -> None:
        self._coordinator = coordinator
        self._task = descriptor.task
        self._attempt = descriptor.attempt
        self.metrics = TaskMetrics(task_tags(context, descriptor.task))
        self.rows_out = 0
        self._told_rows_in = 0
        self._metrics_due_ms = 0

    @property
    def nobody_knows(self) -> bool:
        """Whether the coordinator has not heard of any row that came in."""
        return self._told_rows_in == 0

    def forget(self) -> None:
        """Another coordinator has taken over, and has not heard of any."""
        self._told_rows_in = 0

    def tell(self, host: TaskHost, at_ms: int | None) -> None:
        """Tell how far the task is; None: nothing follows."""
        rows_in = host.rows_in
        if rows_in != self._told_rows_in:
            self._told_rows_in = rows_in
            self._coordinator.counted.remote(self._attempt, self._task, rows_in)
        if at_ms is None or at_ms >= self._metrics_due_ms:
            self._metrics_due_ms = (at_ms or 0) + METRICS_MS
            self.metrics.update(TaskTotals.of(host, self.rows_out, monotonic_ms()))
