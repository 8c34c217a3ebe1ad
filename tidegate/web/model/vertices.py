"""A vertex of a job and its subtasks: state, back-pressure, watermarks, rates, as Flink's REST API has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tidegate.actors.runtimes.job_snapshot import PlanVertex, TaskNow
from tidegate.actors.runtimes.vertex_metrics import SubtaskMetrics, VertexMetrics
from tidegate.storage.ids import AttemptNumber
from tidegate.web.model.states import NotKnown, ended_at_ms, started_at_ms
from tidegate.web.seen_job import SeenJob

SECOND_MS = 1_000
UNASSIGNED = "(unassigned)"
"""Flink's word for the process of a task that has none yet."""
LOW_RATIO_MAX, OK_RATIO_MAX = 0.5, 0.1
_RANK = {"ok": 0, "low": 1, "high": 2}


def vertex_of(job: SeenJob, vertex_id: str) -> PlanVertex:
    """The vertex of this id. Raises NotKnown."""
    for vertex in job.about.vertices:
        if vertex.vertex == vertex_id:
            return vertex
    known = ", ".join(str(vertex.vertex) for vertex in job.about.vertices[:10])
    raise NotKnown(f"job {job.job_id} has no vertex {vertex_id!r}; it has {known}")


def metrics_of(job: SeenJob, vertex_id: str) -> VertexMetrics | None:
    """What the subtasks of a vertex have reported; None if nobody has."""
    return next((each for each in job.snapshot.vertices if each.vertex == vertex_id), None)


def _reported(job: SeenJob, vertex_id: str) -> tuple[SubtaskMetrics, ...]:
    metrics = metrics_of(job, vertex_id)
    return () if metrics is None else metrics.subtasks


def io_metrics(subtasks: Sequence[SubtaskMetrics], expected: int) -> dict[str, Any]:
    """Totals of subtasks of their present attempts. They are complete when all of them have reported."""
    complete = len(subtasks) == expected
    return {
        "read-bytes": sum(each.bytes_in for each in subtasks),
        "read-bytes-complete": complete,
        "write-bytes": sum(each.bytes_out for each in subtasks),
        "write-bytes-complete": complete,
        "read-records": sum(each.records_in for each in subtasks),
        "read-records-complete": complete,
        "write-records": sum(each.records_out for each in subtasks),
        "write-records-complete": complete,
    }


def vertex_details(job: SeenJob, vertex_id: str) -> dict[str, Any]:
    """`/jobs/<id>/vertices/<v>`. Raises NotKnown."""
    vertex = vertex_of(job, vertex_id)
    reported = {each.subtask: each for each in _reported(job, vertex_id)}
    return {
        "id": str(vertex.vertex),
        "name": vertex.name,
        "parallelism": vertex.parallelism,
        "maxParallelism": job.about.max_parallelism,
        "now": job.now_ms,
        "aggregated": {},
        "subtasks": [
            _subtask(job, task, reported.get(task.task.subtask))
            for task in job.snapshot.tasks
            if task.task.vertex == vertex.vertex
        ],
    }


def _subtask(job: SeenJob, task: TaskNow, metrics: SubtaskMetrics | None) -> dict[str, Any]:
    start_ms, end_ms = deployed_at_ms(job, task), ended_at_ms(job)
    return {
        "subtask": task.task.subtask,
        "status": task.status,
        "attempt": task.attempt,
        "endpoint": task.node_id or UNASSIGNED,
        "host": task.node_id or UNASSIGNED,
        "start-time": start_ms,
        "start_time": start_ms,
        "end-time": end_ms,
        "duration": max(0, (end_ms if job.over else job.now_ms) - start_ms),
        "taskmanager-id": process_of(task),
        "metrics": io_metrics(() if metrics is None else (metrics,), 1),
        "status-duration": {},
        "other-concurrent-attempts": None,
    }


def process_of(task: TaskNow) -> str:
    """Returns the id of the process of a task, or `UNASSIGNED` before there is one."""
    return UNASSIGNED if task.pid is None else f"{task.pid}@{task.node_id}"


def deployed_at_ms(job: SeenJob, task: TaskNow) -> int:
    """Returns when the present attempt of a task was deployed, in ms since the epoch."""
    deployed = {each.attempt: each.deployed_at_ms for each in job.past.recoveries}
    return deployed.get(AttemptNumber(task.attempt), started_at_ms(job))


def vertex_accumulators(job: SeenJob, vertex_id: str) -> dict[str, Any]:
    """`/jobs/<id>/vertices/<v>/accumulators`: there are none. Raises NotKnown."""
    return {"id": str(vertex_of(job, vertex_id).vertex), "user-accumulators": []}


def level_of(ratio: float) -> str:
    """Flink's word for how much of the time a subtask is held up."""
    if ratio <= OK_RATIO_MAX:
        return "ok"
    return "low" if ratio <= LOW_RATIO_MAX else "high"


def _ratio(subtask: SubtaskMetrics) -> float:
    return subtask.back_pressured_ms_per_second / SECOND_MS


def _worst(levels: Iterable[str]) -> str:
    return max(levels, key=_RANK.__getitem__, default="ok")


def backpressure(job: SeenJob, vertex_id: str) -> dict[str, Any]:
    """`/jobs/<id>/vertices/<v>/backpressure`. `deprecated`: no subtask has reported. Raises NotKnown."""
    vertex_of(job, vertex_id)
    subtasks = _reported(job, vertex_id)
    if not subtasks:
        return {"status": "deprecated", "backpressureLevel": None, "backpressure-level": None, "end-timestamp": None,
                "subtasks": None}  # fmt: skip
    level = _worst(level_of(_ratio(each)) for each in subtasks)
    return {
        "status": "ok",
        "backpressureLevel": level,
        "backpressure-level": level,
        "end-timestamp": max(each.at_ms for each in subtasks),
        "subtasks": [
            {
                "subtask": each.subtask,
                "attempt-number": each.attempt,
                "backpressureLevel": level_of(_ratio(each)),
                "backpressure-level": level_of(_ratio(each)),
                "ratio": round(_ratio(each), 3),
                "idleRatio": round(each.idle_ms_per_second / SECOND_MS, 3),
                "busyRatio": round(each.busy_ms_per_second / SECOND_MS, 3),
                "other-concurrent-attempts": None,
            }
            for each in subtasks
        ],
    }


def watermarks(job: SeenJob, vertex_id: str) -> list[dict[str, str]]:
    """`/jobs/<id>/vertices/<v>/watermarks`: of subtasks that have one. Raises NotKnown."""
    vertex_of(job, vertex_id)
    return [
        {"id": f"{each.subtask}.currentInputWatermark", "value": str(each.input_watermark_ms)}
        for each in _reported(job, vertex_id)
        if each.input_watermark_ms is not None
    ]


def vertex_rates(job: SeenJob) -> dict[str, dict[str, Any]]:
    """What each vertex does now: sums of its subtasks; times, and the level, of the one that has most. For the page."""
    return {str(vertex.vertex): _rates(vertex, metrics_of(job, vertex.vertex)) for vertex in job.about.vertices}


def _rates(vertex: PlanVertex, metrics: VertexMetrics | None) -> dict[str, Any]:
    subtasks = () if metrics is None else metrics.subtasks
    if metrics is None or not subtasks:
        return dict.fromkeys(_RATES) | {"parallelism": vertex.parallelism, "subtasks": []}
    return {
        "parallelism": vertex.parallelism,
        "numRecordsIn": metrics.records_in,
        "numRecordsOut": metrics.records_out,
        "numRecordsInPerSecond": metrics.records_in_per_second,
        "numRecordsOutPerSecond": metrics.records_out_per_second,
        "numBytesInPerSecond": sum(each.bytes_in_per_second for each in subtasks),
        "numBytesOutPerSecond": sum(each.bytes_out_per_second for each in subtasks),
        "busyTimeMsPerSecond": metrics.busy_ms_per_second,
        "idleTimeMsPerSecond": max(each.idle_ms_per_second for each in subtasks),
        "backPressuredTimeMsPerSecond": metrics.back_pressured_ms_per_second,
        "backpressureLevel": _worst(level_of(_ratio(each)) for each in subtasks),
        "currentInputWatermark": metrics.input_watermark_ms,
        "queuedBytes": sum(each.queued_bytes for each in subtasks),
        "subtasks": [asdict(each) for each in subtasks],
    }


_RATES = (
    "numRecordsIn", "numRecordsOut", "numRecordsInPerSecond", "numRecordsOutPerSecond", "numBytesInPerSecond",
    "numBytesOutPerSecond", "busyTimeMsPerSecond", "idleTimeMsPerSecond", "backPressuredTimeMsPerSecond",
    "backpressureLevel", "currentInputWatermark", "queuedBytes",
)  # fmt: skip
