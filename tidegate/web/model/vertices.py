"""Vertices, subtasks, processes and metrics of a job, in the form of Flink's REST API.

A process with tasks is shown as a task manager of Flink. Its id is `pid@node`, which is also the `taskmanager-id` of a
subtask. Memory and ports of a task manager are unknown here, and are -1 or empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tidegate.actors.runtimes.job_snapshot import PlanVertex, TaskNow
from tidegate.actors.runtimes.task_metrics import SubtaskMetrics, VertexMetrics
from tidegate.storage.ids import AttemptNumber
from tidegate.web.jobs import SeenJob, View
from tidegate.web.model.states import (
    TASK_STATES,
    UNKNOWN,
    NotKnown,
    count_states,
    ended_at_ms,
    started_at_ms,
    vertex_state,
)

SECOND_MS = 1_000

UNASSIGNED = "(unassigned)"
"""The name that Flink uses for the process of a task that has no process yet."""

LOW_RATIO_MAX = 0.5
OK_RATIO_MAX = 0.1
_RANK = {"ok": 0, "low": 1, "high": 2}

_OF_SUBTASK = {
    "numRecordsIn": "records_in",
    "numRecordsOut": "records_out",
    "numBytesIn": "bytes_in",
    "numBytesOut": "bytes_out",
    "numRecordsInPerSecond": "records_in_per_second",
    "numRecordsOutPerSecond": "records_out_per_second",
    "numBytesInPerSecond": "bytes_in_per_second",
    "numBytesOutPerSecond": "bytes_out_per_second",
    "busyTimeMsPerSecond": "busy_ms_per_second",
    "idleTimeMsPerSecond": "idle_ms_per_second",
    "backPressuredTimeMsPerSecond": "back_pressured_ms_per_second",
    "isBackPressured": "is_back_pressured",
    "currentInputWatermark": "input_watermark_ms",
    "currentOutputWatermark": "output_watermark_ms",
    "watermarkAlignmentDrift": "alignment_drift_ms",
}

_RESOURCES = ("cpuCores", "taskHeapMemory", "taskOffHeapMemory", "managedMemory", "networkMemory")

_RATES = (
    "numRecordsIn", "numRecordsOut", "numRecordsInPerSecond", "numRecordsOutPerSecond", "numBytesInPerSecond",
    "numBytesOutPerSecond", "busyTimeMsPerSecond", "idleTimeMsPerSecond", "backPressuredTimeMsPerSecond",
    "backpressureLevel", "currentInputWatermark", "queuedBytes",
)  # fmt: skip


def vertex_of(job: SeenJob, vertex_id: str) -> PlanVertex:
    """Returns the vertex with this id. Raises NotKnown if there is none."""
    for vertex in job.about.vertices:
        if vertex.vertex == vertex_id:
            return vertex
    known = ", ".join(str(vertex.vertex) for vertex in job.about.vertices[:10])
    raise NotKnown(f"job {job.job_id} has no vertex {vertex_id!r}; it has {known}")


def tasks_of(job: SeenJob, vertex_id: str) -> list[TaskNow]:
    """Returns the tasks of a vertex, in the order of subtasks."""
    return [task for task in job.snapshot.tasks if task.task.vertex == vertex_id]


def metrics_of(job: SeenJob, vertex_id: str) -> VertexMetrics | None:
    """Returns the figures that the subtasks of a vertex have reported, or None if there are none."""
    return next((each for each in job.snapshot.vertices if each.vertex == vertex_id), None)


def _reported(job: SeenJob, vertex_id: str) -> tuple[SubtaskMetrics, ...]:
    metrics = metrics_of(job, vertex_id)
    return () if metrics is None else metrics.subtasks


def io_metrics(subtasks: Sequence[SubtaskMetrics], expected: int) -> dict[str, Any]:
    """Returns totals of subtasks in their current attempts.

    They are complete if all `expected` subtasks have reported.
    """
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
    """Returns the answer to `/jobs/<id>/vertices/<v>`. Raises NotKnown if there is no such vertex."""
    vertex = vertex_of(job, vertex_id)
    reported = {each.subtask: each for each in _reported(job, vertex_id)}
    return {
        "id": str(vertex.vertex),
        "name": vertex.name,
        "parallelism": vertex.parallelism,
        "maxParallelism": job.about.max_parallelism,
        "now": job.now_ms,
        "aggregated": {},
        "subtasks": [_subtask(job, task, reported.get(task.task.subtask)) for task in tasks_of(job, vertex.vertex)],
    }


def _subtask(job: SeenJob, task: TaskNow, metrics: SubtaskMetrics | None) -> dict[str, Any]:
    start_ms = deployed_at_ms(job, task)
    end_ms = ended_at_ms(job)
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
    """Returns the id of the process of a task, or `UNASSIGNED`."""
    return UNASSIGNED if task.pid is None else f"{task.pid}@{task.node_id}"


def deployed_at_ms(job: SeenJob, task: TaskNow) -> int:
    """Returns the time when the current attempt of a task was deployed, in ms since the epoch."""
    deployed = {each.attempt: each.deployed_at_ms for each in job.past.recoveries}
    return deployed.get(AttemptNumber(task.attempt), started_at_ms(job))


def vertex_accumulators(job: SeenJob, vertex_id: str) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/vertices/<v>/accumulators`, which is empty.

    Raises NotKnown if there is no such vertex.
    """
    return {"id": str(vertex_of(job, vertex_id).vertex), "user-accumulators": []}


def level_of(ratio: float) -> str:
    """Returns Flink's name for the share of time in which a subtask is back-pressured: ok, low or high."""
    if ratio <= OK_RATIO_MAX:
        return "ok"
    return "low" if ratio <= LOW_RATIO_MAX else "high"


def _ratio(subtask: SubtaskMetrics) -> float:
    return subtask.back_pressured_ms_per_second / SECOND_MS


def _worst(levels: Iterable[str]) -> str:
    return max(levels, key=_RANK.__getitem__, default="ok")


def backpressure(job: SeenJob, vertex_id: str) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/vertices/<v>/backpressure`. Its status is `deprecated` if there are no reports.

    Raises NotKnown if there is no such vertex.
    """
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
    """Returns the answer to `/jobs/<id>/vertices/<v>/watermarks`: the subtasks that have a watermark.

    Raises NotKnown if there is no such vertex.
    """
    vertex_of(job, vertex_id)
    return [
        {"id": f"{each.subtask}.currentInputWatermark", "value": str(each.input_watermark_ms)}
        for each in _reported(job, vertex_id)
        if each.input_watermark_ms is not None
    ]


def vertex_rates(job: SeenJob) -> dict[str, dict[str, Any]]:
    """Returns the rates of each vertex for the page: sums of its subtasks, but for times and level the maximum."""
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


def job_metrics(job: SeenJob, names: Collection[str] | None = None) -> list[dict[str, str]]:
    """Returns the answer to `/jobs/<id>/metrics`. If `names` is None, it only lists the names."""
    return _chosen(job.snapshot.values, names)


def vertex_metrics(job: SeenJob, vertex_id: str, names: Collection[str] | None = None) -> list[dict[str, str]]:
    """Returns the answer to `/jobs/<id>/vertices/<v>/metrics`. Names begin with the number of the subtask, such as
    `0.`.

    Raises NotKnown if there is no such vertex.
    """
    vertex_of(job, vertex_id)
    metrics = metrics_of(job, vertex_id)
    values: dict[str, Any] = {}
    for each in () if metrics is None else metrics.subtasks:
        values |= {f"{each.subtask}.{name}": value for name, value in _values(each).items()}
    return _chosen(values, names)


def _values(subtask: SubtaskMetrics) -> dict[str, Any]:
    values = {name: getattr(subtask, field) for name, field in _OF_SUBTASK.items()}
    return {name: value for name, value in values.items() if value is not None}


def _chosen(values: Mapping[str, Any], names: Collection[str] | None) -> list[dict[str, str]]:
    if names is None:
        return [{"id": name} for name in sorted(values)]
    return [{"id": name, "value": _text(values[name])} for name in sorted(set(names)) if name in values]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def task_managers(view: View) -> dict[str, Any]:
    """Returns the answer to `/taskmanagers`: the processes with tasks of running jobs."""
    return {"taskmanagers": [_task_manager(view, name, tasks) for name, tasks in sorted(_processes(view).items())]}


def task_manager(view: View, name: str) -> dict[str, Any]:
    """Returns the answer to `/taskmanagers/<id>`: one process, with the jobs that have a task in it.

    Raises NotKnown if there is no such process.
    """
    tasks = _processes(view).get(name)
    if tasks is None:
        raise NotKnown(f"process {name!r} has no task of a running job; /taskmanagers lists the processes")
    slots = [{"jobId": str(job.job_id), "resource": _resources()} for job, _ in tasks]
    return _task_manager(view, name, tasks) | {"allocatedSlots": slots, "metrics": {}}


def _processes(view: View) -> dict[str, list[tuple[SeenJob, TaskNow]]]:
    found: dict[str, list[tuple[SeenJob, TaskNow]]] = defaultdict(list)
    for job in view.jobs.values():
        for task in () if job.over else job.snapshot.tasks:
            if task.pid is not None:
                found[process_of(task)].append((job, task))
    return found


def _task_manager(view: View, name: str, tasks: list[tuple[SeenJob, TaskNow]]) -> dict[str, Any]:
    return {
        "id": name,
        "path": name,
        "dataPort": UNKNOWN,
        "jmxPort": UNKNOWN,
        "timeSinceLastHeartbeat": max(job.snapshot.at_ms for job, _ in tasks),
        "slotsNumber": len(tasks),
        "freeSlots": 0,
        "totalResource": _resources(),
        "freeResource": _resources(),
        "hardware": dict.fromkeys(("cpuCores", "physicalMemory", "freeMemory", "managedMemory"), UNKNOWN),
        "memoryConfiguration": {},
        "blocked": False,
    }


def _resources() -> dict[str, Any]:
    return {**dict.fromkeys(_RESOURCES, UNKNOWN), "extendedResources": {}}


def vertex_task_managers(job: SeenJob, vertex_id: str) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/vertices/<v>/taskmanagers`: totals of a vertex by process.

    Raises NotKnown if there is no such vertex.
    """
    vertex = vertex_of(job, vertex_id)
    by_process: dict[str, list[TaskNow]] = defaultdict(list)
    for task in tasks_of(job, vertex_id):
        by_process[process_of(task)].append(task)
    metrics = metrics_of(job, vertex_id)
    reported = () if metrics is None else metrics.subtasks

    def line(name: str, tasks: list[TaskNow]) -> dict[str, Any]:
        own = {task.task.subtask for task in tasks}
        start_ms = min(deployed_at_ms(job, task) for task in tasks)
        return {
            "host": tasks[0].node_id or UNASSIGNED,
            "endpoint": tasks[0].node_id or UNASSIGNED,
            "status": vertex_state(tasks),
            "start-time": start_ms,
            "end-time": ended_at_ms(job),
            "duration": max(0, (ended_at_ms(job) if job.over else job.now_ms) - start_ms),
            "metrics": io_metrics([each for each in reported if each.subtask in own], len(tasks)),
            "status-counts": count_states(tasks),
            "taskmanager-id": name,
            "aggregated": {},
        }

    lines = [line(name, tasks) for name, tasks in sorted(by_process.items())]
    return {"id": vertex_id, "name": vertex.name, "now": job.now_ms, "taskmanagers": lines}


def task_processes(job: SeenJob) -> list[dict[str, Any]]:
    """Returns the process of each task for the page, in the order of the graph. Empty for a local job."""
    if all(task.pid is None for task in job.snapshot.tasks):
        return []
    vertices = {vertex.vertex: vertex for vertex in job.about.vertices}
    return [
        {
            "vertex": vertices[task.task.vertex].name,
            "subtask": task.task.subtask,
            "parallelism": vertices[task.task.vertex].parallelism,
            "status": task.status,
            "attempt": task.attempt,
            "actor": task.actor,
            "pid": task.pid,
            "node": task.node_id,
        }
        for task in job.snapshot.tasks
    ]


def subtask_times(job: SeenJob, vertex_id: str) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/vertices/<v>/subtasktimes`. Only the newest state has a time.

    Raises NotKnown if there is no such vertex.
    """
    vertex = vertex_of(job, vertex_id)

    def times(task: TaskNow) -> dict[str, Any]:
        start_ms = deployed_at_ms(job, task)
        end_ms = ended_at_ms(job)
        timestamps = dict.fromkeys(TASK_STATES, 0) | {"DEPLOYING": start_ms}
        if task.status in timestamps and task.status != "DEPLOYING":
            timestamps[task.status] = end_ms if job.over else start_ms
        return {
            "subtask": task.task.subtask,
            "host": task.node_id or UNASSIGNED,
            "endpoint": task.node_id or UNASSIGNED,
            "duration": max(0, (end_ms if job.over else job.now_ms) - start_ms),
            "timestamps": timestamps,
        }

    subtasks = [times(task) for task in tasks_of(job, vertex_id)]
    return {"id": vertex_id, "name": vertex.name, "now": job.now_ms, "subtasks": subtasks}
