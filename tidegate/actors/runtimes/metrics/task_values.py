"""What the metrics of a task are: from what its host has counted so far in this attempt, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.hosts.job_context import JobContext
from tidegate.actors.hosts.task.task_host import TaskHost
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.protocol.snapshot_metrics import SnapshotMetrics
from tidegate.actors.runtimes.metrics import registry as m
from tidegate.actors.runtimes.metrics.registry import Metric

SECOND_MS = 1_000


@dataclass(frozen=True, slots=True)
class TaskTotals:
    """A task at a time of the clock that nobody sets. `watermark_ms`: None before its inputs had one."""

    at_ms: int
    rows_in: int = 0
    rows_out: int = 0
    busy_ms: int = 0
    queued_bytes: int = 0
    back_pressured: bool = False
    watermark_ms: int | None = None

    @staticmethod
    def of(host: TaskHost, rows_out: int, at_ms: int) -> TaskTotals:
        """From its host, which does not know what was sent."""
        machine = host.machine
        return TaskTotals(
            at_ms,
            host.rows_in,
            rows_out,
            host.busy_ms,
            machine.output_queue_bytes,
            machine.outputs.over_limit,
            machine.watermarks.reached_ms,
        )


def task_tags(context: JobContext, task: TaskId) -> dict[str, str]:
    """Whose metrics these are. All subtasks of a vertex share its name, so that they can be added up."""
    return {"job": context.job_name, "vertex": context.graph.vertex(task.vertex).name, "subtask": str(task.subtask)}


def gauges_of(before: TaskTotals, now: TaskTotals) -> dict[Metric, float]:
    """The gauges of a task. Its rate is that of the time between the two."""
    gauges: dict[Metric, float] = {m.QUEUED: now.queued_bytes, m.BACK_PRESSURED: int(now.back_pressured)}
    if (passed_ms := now.at_ms - before.at_ms) > 0:
        # What began before the first look ends after it.
        gauges[m.BUSY_TIME] = min(SECOND_MS, (now.busy_ms - before.busy_ms) * SECOND_MS / passed_ms)
    if now.watermark_ms is not None:
        gauges[m.INPUT_WATERMARK] = now.watermark_ms
    return gauges


def snapshot_gauges(measured: SnapshotMetrics) -> dict[Metric, float]:
    """The gauges of the newest snapshot that a task has acknowledged."""
    return {
        m.START_DELAY: measured.start_delay_ms,
        m.ALIGNMENT: measured.alignment_ms,
        m.SYNC: measured.sync_ms,
        m.ASYNC: measured.async_ms,
    }
