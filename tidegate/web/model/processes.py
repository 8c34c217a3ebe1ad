"""Processes of tasks, and subtasks by process, as Flink's REST API has task managers.

A task manager of Flink is a process with slots. Its nearest here is a process with tasks. Its id is `pid@node`, which
is `taskmanager-id` of a subtask as well. What Flink tells of the memory and the ports of a task manager is unknown
here, and is -1 or empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tidegate.actors.runtimes.job_snapshot import TaskNow
from tidegate.web.model.states import (
    TASK_STATES,
    UNKNOWN,
    NotKnown,
    count_states,
    ended_at_ms,
    vertex_state,
)
from tidegate.web.model.vertices import UNASSIGNED, deployed_at_ms, io_metrics, metrics_of, process_of, vertex_of
from tidegate.web.seen_job import SeenJob, View

_RESOURCES = ("cpuCores", "taskHeapMemory", "taskOffHeapMemory", "managedMemory", "networkMemory")


def task_managers(view: View) -> dict[str, Any]:
    """`/taskmanagers`: the processes of the tasks of running jobs."""
    return {"taskmanagers": [_task_manager(view, name, tasks) for name, tasks in sorted(_processes(view).items())]}


def task_manager(view: View, name: str) -> dict[str, Any]:
    """`/taskmanagers/<id>`: one of them, with the jobs that have a task there. Raises NotKnown."""
    tasks = _processes(view).get(name)
    if tasks is None:
        raise NotKnown(f"no task of a running job is in a process {name!r}; /taskmanagers lists those that there are")
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
    """`/jobs/<id>/vertices/<v>/taskmanagers`: the subtasks of a vertex, added up by process. Raises NotKnown."""
    vertex = vertex_of(job, vertex_id)
    by_process: dict[str, list[TaskNow]] = defaultdict(list)
    for task in _tasks_of(job, vertex_id):
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
    """Where each task of a job is, in the order of the graph, for its page. Without processes of tasks it is empty."""
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
    """`/jobs/<id>/vertices/<v>/subtasktimes`. Of the states of a subtask the newest one has a time. Raises NotKnown."""
    vertex = vertex_of(job, vertex_id)

    def times(task: TaskNow) -> dict[str, Any]:
        start_ms, end_ms = deployed_at_ms(job, task), ended_at_ms(job)
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

    subtasks = [times(task) for task in _tasks_of(job, vertex_id)]
    return {"id": vertex_id, "name": vertex.name, "now": job.now_ms, "subtasks": subtasks}


def _tasks_of(job: SeenJob, vertex_id: str) -> Iterable[TaskNow]:
    return (task for task in job.snapshot.tasks if task.task.vertex == vertex_id)
