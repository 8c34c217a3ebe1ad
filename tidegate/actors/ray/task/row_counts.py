"""`RowCounts`: what one task of one attempt has done, for the coordinator and for Ray's metrics.

The coordinator is told when there are new rows, and of the first ones at once: they end a recovery. Metrics are written
once a second; the coordinator gets them with the rows, if they have changed.
"""

from __future__ import annotations

from dataclasses import replace

from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.task_host import TaskHost
from tidegate.actors.ray.exchange.line import Line
from tidegate.actors.ray.metrics import TaskMetrics
from tidegate.actors.runtimes.metrics.task_values import TaskMeter, TaskTotals, task_tags
from tidegate.actors.runtimes.vertex_metrics import SubtaskMetrics
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor
from tidegate.storage.clock import monotonic_ms, now_ms

METRICS_MS = 1_000


class RowCounts:
    """Those of one task; the coordinator is told over `line`."""

    def __init__(self, line: Line, context: JobContext, descriptor: TaskDescriptor) -> None:
        self._line = line
        self._task = descriptor.task
        self._attempt = descriptor.attempt
        self._meter = TaskMeter(descriptor.task, descriptor.attempt, monotonic_ms())
        self.metrics = TaskMetrics(task_tags(context, descriptor.task))
        self._told_rows_in = 0
        self._told: SubtaskMetrics | None = None
        self._metrics_due_ms = 0

    @property
    def nobody_knows(self) -> bool:
        """Whether the coordinator has not heard of any row that came in."""
        return self._told_rows_in == 0

    def forget(self) -> None:
        """Another coordinator has taken over, and has not heard of any."""
        self._told_rows_in, self._told = 0, None

    def tell(self, host: TaskHost, over: bool = False) -> None:
        """Tell how far the task is. `over`: nothing follows."""
        metrics: SubtaskMetrics | None = None
        at_ms = monotonic_ms()
        if over or at_ms >= self._metrics_due_ms:
            self._metrics_due_ms = at_ms + METRICS_MS
            metrics = self._measured(host, at_ms, over)
        if host.rows_in != self._told_rows_in or metrics is not None:
            self._told_rows_in = host.rows_in
            self._line.mention("counted", self._attempt, self._task, host.rows_in, metrics)

    def _measured(self, host: TaskHost, at_ms: int, over: bool) -> SubtaskMetrics | None:
        """Publish the metrics. Returns them if they have changed."""
        read = self._meter.read(TaskTotals.of(host, at_ms), now_ms())
        self.metrics.update(read, over)
        told, self._told = self._told, read.at_rest if over else read
        return None if told is not None and replace(self._told, at_ms=told.at_ms) == told else self._told
