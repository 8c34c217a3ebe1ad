"""The metrics of tasks: `SubtaskMetrics`, their sums for a vertex, and the published metrics that follow from them.

A task reports about once a second, and not again while nothing changes. Rates are averages since a previous report.
Totals begin with the attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.task_driver import TaskDriver
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes import metric_registry as m
from tidegate.actors.runtimes.metric_registry import Metric
from tidegate.operators.user_metrics import Histogram, UserMetric
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.state.common.backend import StateSize
from tidegate.storage.files.file_system import RequestCounts


@dataclass(frozen=True, slots=True)
class SubtaskMetrics:
    """The metrics of one subtask in one attempt. `at_ms` is the time of the report, in ms since the epoch.

    The busy, back-pressured and idle times are in ms per second, and add up to one second. A watermark is None before
    the first one.
    """

    subtask: int
    attempt: int
    at_ms: int
    records_in: int = 0
    records_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    records_in_per_second: float = 0.0
    records_out_per_second: float = 0.0
    bytes_in_per_second: float = 0.0
    bytes_out_per_second: float = 0.0
    busy_ms_per_second: float = 0.0
    back_pressured_ms_per_second: float = 0.0
    idle_ms_per_second: float = 0.0
    is_back_pressured: bool = False
    queued_bytes: int = 0
    """Size in bytes of output that waits for credit."""
    input_watermark_ms: int | None = None
    output_watermark_ms: int | None = None
    states: tuple[tuple[str, StateSize], ...] = ()
    """The name of each operator with keyed state, and its approximate state size."""
    user: tuple[UserMetric, ...] = ()
    """The metrics that functions of the user define."""
    alignment_drift_ms: int | None = None
    """How far, in ms, the source task is ahead of the slowest member of its watermark group. None if unknown."""
    waits_for: str | None = None
    """Text about the storage for which the task waits, since when, and the newest error. None if it does not
    wait.
    """

    @property
    def at_rest(self) -> SubtaskMetrics:
        """Returns a copy for a task that has ended: rates are 0, and totals are unchanged."""
        return replace(
            self,
            records_in_per_second=0.0,
            records_out_per_second=0.0,
            bytes_in_per_second=0.0,
            bytes_out_per_second=0.0,
            busy_ms_per_second=0.0,
            back_pressured_ms_per_second=0.0,
            idle_ms_per_second=0.0,
            is_back_pressured=False,
            queued_bytes=0,
            alignment_drift_ms=None if self.alignment_drift_ms is None else 0,
            waits_for=None,
        )


@dataclass(frozen=True, slots=True)
class VertexMetrics:
    """The metrics of one vertex of the job graph.

    `subtasks` are in order, without subtasks that have not reported in their current attempt.
    """

    vertex: str
    name: str
    parallelism: int
    subtasks: tuple[SubtaskMetrics, ...] = ()

    @property
    def records_in(self) -> int:
        """Returns the number of rows received by all subtasks."""
        return sum(each.records_in for each in self.subtasks)

    @property
    def records_out(self) -> int:
        """Returns the number of rows sent by all subtasks."""
        return sum(each.records_out for each in self.subtasks)

    @property
    def records_in_per_second(self) -> float:
        """Returns the number of rows per second received by all subtasks."""
        return sum(each.records_in_per_second for each in self.subtasks)

    @property
    def records_out_per_second(self) -> float:
        """Returns the number of rows per second sent by all subtasks."""
        return sum(each.records_out_per_second for each in self.subtasks)

    @property
    def busy_ms_per_second(self) -> float:
        """Returns the busy time of the busiest subtask, in ms per second."""
        return max((each.busy_ms_per_second for each in self.subtasks), default=0.0)

    @property
    def back_pressured_ms_per_second(self) -> float:
        """Back-pressured time of the most back-pressured subtask, in ms per second."""
        return max((each.back_pressured_ms_per_second for each in self.subtasks), default=0.0)

    @property
    def input_watermark_ms(self) -> int | None:
        """Returns the lowest input watermark of the subtasks, in ms. None until all have one."""
        return _least([each.input_watermark_ms for each in self.subtasks], self.parallelism)

    @property
    def output_watermark_ms(self) -> int | None:
        """Returns the lowest output watermark of the subtasks, in ms. None until all have one."""
        return _least([each.output_watermark_ms for each in self.subtasks], self.parallelism)


def vertices_of(
    graph: JobGraph, told: Mapping[TaskId, SubtaskMetrics], attempts: Mapping[TaskId, int]
) -> tuple[VertexMetrics, ...]:
    """Returns the metrics of all vertices, in the order of the graph. Metrics of earlier attempts are omitted.

    The second argument has the last metrics of each task, and `attempts` the current attempt of each task.
    """
    return tuple(
        VertexMetrics(
            str(vertex.vertex),
            vertex.name,
            vertex.parallelism,
            tuple(
                metrics
                for task in graph.tasks()
                if task.vertex == vertex.vertex
                and (metrics := told.get(task)) is not None
                and metrics.attempt == attempts.get(task)
            ),
        )
        for vertex in graph.vertices
    )


def waits_of(vertices: Iterable[VertexMetrics]) -> str | None:
    """Returns text about the storage for which the first waiting task waits, or None if no task waits."""
    return next((each.waits_for for vertex in vertices for each in vertex.subtasks if each.waits_for), None)


def _least(watermarks_ms: list[int | None], expected: int) -> int | None:
    known = [each for each in watermarks_ms if each is not None]
    return min(known) if known and len(known) == expected else None


SECOND_MS = 1_000


@dataclass(frozen=True, slots=True)
class TaskTotals:
    """The totals of a task at `at_ms` of a monotonic clock. A watermark is None before the first one."""

    at_ms: int
    rows_in: int = 0
    rows_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    busy_ms: int = 0
    back_pressured_ms: int = 0
    idle_ms: int = 0
    queued_bytes: int = 0
    back_pressured: bool = False
    input_watermark_ms: int | None = None
    output_watermark_ms: int | None = None
    states: tuple[tuple[str, StateSize], ...] = ()
    user: tuple[UserMetric, ...] = ()
    alignment_drift_ms: int | None = None
    waits_for: str | None = None

    @staticmethod
    def of(host: TaskDriver, at_ms: int) -> TaskTotals:
        """Returns the totals of a task's driver. Must be called on the thread of the task, between two events."""
        host.look(at_ms)
        machine, times = host.machine, host.times
        outputs = machine.outputs
        alignment = None if machine.source is None else machine.source.alignment
        return TaskTotals(
            at_ms,
            host.rows_in,
            outputs.rows_put,
            host.bytes_read + machine.inputs.taken_bytes,
            outputs.sent_bytes,
            times.busy_ms,
            times.back_pressured_ms,
            times.idle_ms,
            machine.outputs.queued_bytes,
            outputs.over_limit,
            machine.watermarks.reached_ms,
            outputs.watermark_ms,
            machine.chain.state_sizes,
            machine.user_metrics,
            None if alignment is None else alignment.drift_ms,
            host.waits_for,
        )


class TaskMeter:
    """Computes the metrics of one attempt of a task, with rates from its totals at two times."""

    def __init__(self, task: TaskId, attempt: int, begin_ms: int) -> None:
        self._task = task
        self._attempt = attempt
        self._seen = TaskTotals(begin_ms)

    def read(self, now: TaskTotals, wall_ms: int) -> SubtaskMetrics:
        """Returns the current metrics. `wall_ms` is their time. Rates are averages since an earlier read, at
        least a second ago if there was one.
        """
        before = self._seen
        passed_ms = max(1, now.at_ms - before.at_ms)
        if passed_ms >= SECOND_MS:
            self._seen = now

        def a_second(after: int, earlier: int) -> float:
            return (after - earlier) * SECOND_MS / passed_ms

        return SubtaskMetrics(
            int(self._task.subtask),
            self._attempt,
            wall_ms,
            now.rows_in,
            now.rows_out,
            now.bytes_in,
            now.bytes_out,
            a_second(now.rows_in, before.rows_in),
            a_second(now.rows_out, before.rows_out),
            a_second(now.bytes_in, before.bytes_in),
            a_second(now.bytes_out, before.bytes_out),
            a_second(now.busy_ms, before.busy_ms),
            a_second(now.back_pressured_ms, before.back_pressured_ms),
            a_second(now.idle_ms, before.idle_ms),
            now.back_pressured,
            now.queued_bytes,
            now.input_watermark_ms,
            now.output_watermark_ms,
            now.states,
            now.user,
            now.alignment_drift_ms,
            now.waits_for,
        )


def task_tags(context: JobContext, task: TaskId) -> dict[str, str]:
    """Returns the tags of a task's metrics. All subtasks have the name of their vertex, so that their metrics can be
    summed.
    """
    return {"job": context.job_name, "vertex": context.graph.vertex(task.vertex).name, "subtask": str(task.subtask)}


def totals_of(told: SubtaskMetrics) -> dict[Metric, int]:
    """Returns the values of a task's counters, which begin with the attempt."""
    return {
        m.RECORDS_IN: told.records_in,
        m.RECORDS_OUT: told.records_out,
        m.BYTES_IN: told.bytes_in,
        m.BYTES_OUT: told.bytes_out,
    }


def gauges_of(told: SubtaskMetrics) -> dict[Metric, float]:
    """Returns the values of a task's gauges."""
    gauges: dict[Metric, float] = {
        m.RECORDS_IN_RATE: told.records_in_per_second,
        m.RECORDS_OUT_RATE: told.records_out_per_second,
        m.BYTES_IN_RATE: told.bytes_in_per_second,
        m.BYTES_OUT_RATE: told.bytes_out_per_second,
        m.BUSY_TIME: told.busy_ms_per_second,
        m.BACK_PRESSURED_TIME: told.back_pressured_ms_per_second,
        m.IDLE_TIME: told.idle_ms_per_second,
        m.BACK_PRESSURED: int(told.is_back_pressured),
        m.QUEUED: told.queued_bytes,
    }
    for metric, lag, watermark_ms in (
        (m.INPUT_WATERMARK, m.INPUT_WATERMARK_LAG, told.input_watermark_ms),
        (m.OUTPUT_WATERMARK, m.OUTPUT_WATERMARK_LAG, told.output_watermark_ms),
    ):
        if watermark_ms is not None:
            gauges[metric] = watermark_ms
            gauges[lag] = _lag_ms(watermark_ms, told.at_ms)
    if told.alignment_drift_ms is not None:
        gauges[m.ALIGNMENT_DRIFT] = told.alignment_drift_ms
    return gauges


def gauges_at_rest(told: SubtaskMetrics) -> Mapping[Metric, float]:
    """Returns the gauges of a task that has ended in this process. Rates and lags are 0, so that they trigger no
    alert.
    """
    lags = (m.INPUT_WATERMARK_LAG, m.OUTPUT_WATERMARK_LAG)
    return {metric: 0 if metric in lags else value for metric, value in gauges_of(told.at_rest).items()}


def state_values(size: StateSize) -> dict[Metric, float]:
    """Returns the gauges of an operator's keyed state. Values that the backend does not measure are omitted."""
    told = {m.STATE_ROWS: size.rows, m.STATE_TIMERS: size.timers, m.STATE_SIZE: size.size_bytes}
    return {metric: value for metric, value in told.items() if value is not None}


def request_values(counts: RequestCounts) -> dict[Metric, float]:
    """Returns the gauges that count a process's requests to storage."""
    return {m.S3_REQUESTS: counts.s3_requests, m.STORAGE_RETRIES: counts.retries}


def user_values(metric: UserMetric) -> list[tuple[str, str, float]]:
    """Returns the gauges of a metric that a user's function defines, as tuples of name, tag `quantile` and value.

    A histogram has a series for each quantile, and one with the suffix `_count` for the number of its values.
    """
    name = f"tidegate_operator_{metric.name}"
    if metric.kind != Histogram.kind:
        return [(name, "", metric.value)]
    return [(f"{name}_count", "", metric.value), *((name, str(share), value) for share, value in metric.quantiles)]


def snapshot_gauges(measured: SnapshotMetrics) -> dict[Metric, float]:
    """Returns the gauges for the measurements of a task's newest acknowledged snapshot."""
    return {
        m.START_DELAY: measured.start_delay_ms,
        m.ALIGNMENT: measured.alignment_ms,
        m.SYNC: measured.sync_ms,
        m.ASYNC: measured.async_ms,
        m.SNAPSHOT_FULL_SIZE: measured.state_bytes + measured.in_flight_bytes,
        m.SNAPSHOT_SIZE: measured.incremental_bytes + measured.in_flight_bytes,
        m.SNAPSHOT_IN_FLIGHT: measured.in_flight_bytes,
    }


def _lag_ms(watermark_ms: int, now_ms: int) -> int:
    """Returns how far a watermark is behind the clock, in ms. The lag of the final watermark is 0."""
    return 0 if watermark_ms >= MAX_WATERMARK_MS else now_ms - watermark_ms
