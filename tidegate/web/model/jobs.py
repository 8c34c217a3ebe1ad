"""Jobs, their plan, settings, failures, decisions and recoveries, in the form of Flink's REST API."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tidegate.actors.coordinator.coordinator_state import JobStatus
from tidegate.actors.coordinator.job_history import FAILURES_MAX, LINES_MAX, Failure, Recovery
from tidegate.actors.runtimes.job_metrics import RecoveryEnds
from tidegate.actors.runtimes.job_snapshot import PlanVertex
from tidegate.protocol.identity import TaskId
from tidegate.web.jobs import SeenJob, View
from tidegate.web.model.states import (
    UNKNOWN,
    count_states,
    duration_ms,
    ended_at_ms,
    entered_at_ms,
    job_state,
    started_at_ms,
    vertex_state,
)
from tidegate.web.model.vertices import io_metrics, metrics_of, tasks_of

FLINK_VERSION = "2.1.0"
"""The version of Flink that uses these field names."""

_CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*(?=:|$)")


def tidegate_version() -> str:
    """Returns the installed version of tidegate, or "unknown"."""
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "unknown"


def overview(view: View) -> dict[str, Any]:
    """Returns the answer to `/overview`: counts of jobs by state."""
    states = [job_state(job) for job in view.jobs.values()]
    running = [job for job in view.jobs.values() if not job.over]
    processes = {(task.node_id, task.pid) for job in running for task in job.snapshot.tasks if task.pid is not None}
    tasks = sum(len(job.snapshot.tasks) for job in running)
    return {
        "taskmanagers": len(processes),
        "taskmanagers-blocked": 0,
        "slots-total": tasks,
        "slots-available": 0,
        "slots-free-and-blocked": 0,
        "jobs-running": len(running),
        "jobs-finished": states.count("FINISHED"),
        "jobs-cancelled": states.count("CANCELED"),
        "jobs-failed": states.count("FAILED"),
        "flink-version": FLINK_VERSION,
        "flink-commit": "",
        "tidegate-version": tidegate_version(),
    }


def dashboard_config(refresh_ms: int, timezone_name: str, timezone_offset_ms: int) -> dict[str, Any]:
    """Returns the answer to `/config`, the first request of a dashboard."""
    return {
        "refresh-interval": refresh_ms,
        "timezone-name": timezone_name,
        "timezone-offset": timezone_offset_ms,
        "flink-version": FLINK_VERSION,
        "flink-revision": "",
        "features": {"web-submit": False, "web-cancel": True, "web-rescale": False, "web-history": False},
        "tidegate-version": tidegate_version(),
    }


def job_ids(view: View) -> dict[str, Any]:
    """Returns the answer to `/jobs`."""
    return {"jobs": [{"id": str(job.job_id), "status": job_state(job)} for job in _newest_first(view)]}


def jobs_overview(view: View) -> dict[str, Any]:
    """Returns the answer to `/jobs/overview`."""
    return {"jobs": [_line(job) for job in _newest_first(view)]}


def _newest_first(view: View) -> list[SeenJob]:
    return sorted(view.jobs.values(), key=lambda job: (-started_at_ms(job), job.job_id))


def _line(job: SeenJob) -> dict[str, Any]:
    tasks = job.snapshot.tasks
    return {
        "jid": str(job.job_id),
        "name": job.snapshot.card.name,
        "state": job_state(job),
        "start-time": started_at_ms(job),
        "end-time": ended_at_ms(job),
        "duration": duration_ms(job),
        "last-modification": max([started_at_ms(job), *(at_ms for _, at_ms in job.past.since_ms)]),
        "tasks": {"total": len(tasks), **count_states(tasks, small=True)},
    }


def job_status(job: SeenJob) -> dict[str, str]:
    """Returns the answer to `/jobs/<id>/status`."""
    return {"status": job_state(job)}


def job_accumulators(job: SeenJob) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/accumulators`, which is empty: counters of functions are metrics."""
    return {"job-accumulators": [], "user-task-accumulators": [], "serialized-user-task-accumulators": {}}


def job_details(job: SeenJob) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>`. Fields that Flink does not have are under `tidegate`."""
    snapshot = job.snapshot
    progress = snapshot.progress
    vertices = [_vertex(job, vertex) for vertex in job.about.vertices]
    states = [vertex["status"] for vertex in vertices]
    return {
        "jid": str(job.job_id),
        "name": snapshot.card.name,
        "isStoppable": not job.over,
        "state": job_state(job),
        "job-type": "STREAMING",
        "start-time": started_at_ms(job),
        "end-time": ended_at_ms(job),
        "duration": duration_ms(job),
        "maxParallelism": job.about.max_parallelism,
        "now": job.now_ms,
        "timestamps": entered_at_ms(job),
        "vertices": vertices,
        "status-counts": {state: states.count(state) for state in count_states(())},
        "plan": plan(job)["plan"],
        "pending-operators": 0,
        "tidegate": {
            "attempt": progress.attempt,
            "restarts": progress.restarts,
            "uptime": snapshot.values.get("uptime", UNKNOWN),
            "downtime": snapshot.values.get("downtime", UNKNOWN),
            "waits-for": progress.waits_for,
            "failure-cause": progress.last_failure,
            "reason": progress.reason,
            "coordinator-losses": progress.coordinator_losses,
            "standbys-ready": progress.standbys_ready,
            "root": snapshot.card.root,
            "detached": snapshot.card.detached,
            "stale-ms": job.stale_ms,
        },
    }


def _vertex(job: SeenJob, vertex: PlanVertex) -> dict[str, Any]:
    tasks = tasks_of(job, vertex.vertex)
    metrics = metrics_of(job, vertex.vertex)
    return {
        "id": str(vertex.vertex),
        "name": vertex.name,
        "slotSharingGroupId": vertex.slot_group,
        "maxParallelism": job.about.max_parallelism,
        "parallelism": vertex.parallelism,
        "status": vertex_state(tasks),
        "start-time": started_at_ms(job),
        "end-time": ended_at_ms(job),
        "duration": duration_ms(job),
        "tasks": count_states(tasks),
        "metrics": io_metrics(() if metrics is None else metrics.subtasks, vertex.parallelism),
    }


def plan(job: SeenJob) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/plan`: the graph, in topological order."""
    nodes = []
    for vertex in job.about.vertices:
        inputs = [edge for edge in job.about.edges if edge.downstream == vertex.vertex]
        node: dict[str, Any] = {
            "id": str(vertex.vertex),
            "parallelism": vertex.parallelism,
            "operator": "",
            "operator_strategy": "",
            "description": " -> ".join(vertex.operators),
            "optimizer_properties": {},
        }
        if inputs:
            node["inputs"] = [
                {
                    "num": number,
                    "id": str(edge.upstream),
                    "ship_strategy": edge.ship_strategy,
                    "exchange": "pipelined_bounded",
                }
                for number, edge in enumerate(inputs)
            ]
        nodes.append(node)
    name = job.snapshot.card.name
    return {"plan": {"jid": str(job.job_id), "name": name, "type": "STREAMING", "nodes": nodes}}


def job_config(job: SeenJob) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/config`."""
    settings = dict(job.about.configuration)
    return {
        "jid": str(job.job_id),
        "name": job.snapshot.card.name,
        "execution-config": {
            "execution-mode": "PIPELINED",
            "restart-strategy": settings.get("restart-strategy.type", ""),
            "job-parallelism": max((vertex.parallelism for vertex in job.about.vertices), default=0),
            "object-reuse-mode": False,
            "user-config": settings,
        },
    }


def configuration(job: SeenJob) -> list[dict[str, str]]:
    """Returns the answer to `/jobs/<id>/jobmanager/config`: the settings in effect."""
    return [{"key": key, "value": value} for key, value in sorted(job.about.configuration.items())]


def exceptions(job: SeenJob, limit: int = FAILURES_MAX) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/exceptions`, newest first.

    Failures of one attempt are grouped under the first one.
    """
    groups: list[list[Failure]] = []
    for failure in job.past.failures:
        if groups and groups[-1][0].attempt == failure.attempt:
            groups[-1].append(failure)
        else:
            groups.append([failure])
    entries = [
        _entry(job, group[0]) | {"concurrentExceptions": [_entry(job, f) for f in group[1:]]} for group in groups
    ]
    entries.reverse()
    reason = job.snapshot.progress.reason
    reported = {failure.reason for failure in job.past.failures}
    if job.snapshot.status is JobStatus.FAILED and reason is not None and reason not in reported:
        entries.insert(0, _end(job, reason))
    truncated = len(entries) > limit or len(job.past.failures) >= FAILURES_MAX
    shown = entries[:limit]
    return {
        "root-exception": shown[0]["stacktrace"] if shown else None,
        "timestamp": shown[0]["timestamp"] if shown else None,
        "all-exceptions": [],
        "truncated": truncated,
        "exceptionHistory": {"entries": shown, "truncated": truncated},
    }


def _entry(job: SeenJob, failure: Failure) -> dict[str, Any]:
    return {
        "exceptionName": _class_of(failure.reason),
        "stacktrace": failure.reason,
        "timestamp": failure.at_ms,
        "failureLabels": {},
        "taskName": task_name(job, failure.task),
        "endpoint": None,
        "location": None,
        "taskManagerId": None,
    }


def _end(job: SeenJob, reason: str) -> dict[str, Any]:
    return {
        "exceptionName": _class_of(reason),
        "stacktrace": reason,
        "timestamp": ended_at_ms(job),
        "failureLabels": {},
        "taskName": None,
        "endpoint": None,
        "location": None,
        "taskManagerId": None,
        "concurrentExceptions": [],
    }


def _class_of(reason: str) -> str:
    """Returns the class of an error if its text begins with one, otherwise "JobFailure"."""
    found = _CLASS.match(reason)
    return found[0] if found else "JobFailure"


def task_name(job: SeenJob, task: TaskId) -> str:
    """Returns the text for a task, such as `sum by key (2/4)`."""
    vertex = next((each for each in job.about.vertices if each.vertex == task.vertex), None)
    return str(task) if vertex is None else f"{vertex.name} ({task.subtask + 1}/{vertex.parallelism})"


def last_hour(job: SeenJob) -> list[dict[str, Any]]:
    """Returns the samples of the last hour for the charts, oldest first. Values are None if nothing was reported."""
    return [
        {
            "timestamp": sample.at_ms,
            "rows-per-second": sample.rows_per_second,
            "lag": sample.lag_ms,
            "checkpoint-duration": sample.checkpoint_ms,
        }
        for sample in job.samples
    ]


def timeline(job: SeenJob) -> dict[str, Any]:
    """Returns the decisions of the coordinator, newest first, without successful checkpoints."""
    lines = job.past.lines
    entries = [
        {
            "timestamp": line.at_ms,
            "text": line.text,
            "checkpoint": line.checkpoint,
            "attempt": line.attempt,
            "trouble": line.trouble,
            "restart": line.restart,
        }
        for line in reversed(lines)
    ]
    return {"entries": entries, "truncated": len(lines) >= LINES_MAX}


def recoveries(job: SeenJob) -> dict[str, Any]:
    """Returns the deployments after the first one, with the parts of their duration, newest first.

    The parts are: until the failure was noticed, until the deployment, the restore, and until the first row. The
    `JobHistory` of the coordinator records the two in the middle, the runtime the first and the last one.
    """
    return {"recoveries": [_recovery(job, each) for each in reversed(job.past.recoveries)]}


def _recovery(job: SeenJob, recovery: Recovery) -> dict[str, Any]:
    failure = recovery.failure
    running_ms = recovery.running_at_ms
    started_ms = recovery.deployed_at_ms if failure is None else failure.at_ms
    tasks = len(job.snapshot.tasks)
    parts = _parts(recovery, started_ms, job.snapshot.recovery_ends.get(recovery.attempt, RecoveryEnds()))
    return {
        "attempt": recovery.attempt,
        "started-at": started_ms,
        "cause": None if failure is None else failure.reason,
        "task": None if failure is None else task_name(job, failure.task),
        "tasks-restarted": tasks if recovery.tasks is None else recovery.tasks,
        "tasks": tasks,
        "checkpoint": recovery.checkpoint,
        "deployed-at": recovery.deployed_at_ms,
        "running-at": running_ms,
        "total": None if running_ms is None else sum(part or 0 for part in parts.values()),
        "parts": parts,
    }


def _parts(recovery: Recovery, started_ms: int, ends: RecoveryEnds) -> dict[str, int | None]:
    """Returns the parts of a recovery in ms. A part that has not ended is None; unknown parts are omitted."""
    deployed_ms = recovery.deployed_at_ms
    running_ms = recovery.running_at_ms
    first_row_ms = ends.first_row_at_ms
    parts: dict[str, int | None] = {}
    if ends.unnoticed_ms is not None:
        parts["detect"] = ends.unnoticed_ms
    parts["wait"] = max(0, deployed_ms - started_ms)
    parts["restore"] = None if running_ms is None else max(0, running_ms - deployed_ms)
    if running_ms is not None and first_row_ms is not None:
        parts["first-row"] = max(0, first_row_ms - running_ms)
    return parts
