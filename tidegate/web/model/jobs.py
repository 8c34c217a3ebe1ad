"""The jobs, one job, its plan and its settings, as Flink's REST API has them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tidegate.actors.runtimes.job_snapshot import PlanVertex, TaskNow
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
from tidegate.web.model.vertices import io_metrics, metrics_of
from tidegate.web.seen_job import SeenJob, View

FLINK_VERSION = "2.1.0"
"""The version of Flink whose field names these are."""
_FINISHED, _CANCELLED, _FAILED = "FINISHED", "CANCELED", "FAILED"


def tidegate_version() -> str:
    """The version that is installed."""
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "unknown"


def overview(view: View) -> dict[str, Any]:
    """`/overview`: how many jobs are in which state."""
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
        "jobs-finished": states.count(_FINISHED),
        "jobs-cancelled": states.count(_CANCELLED),
        "jobs-failed": states.count(_FAILED),
        "flink-version": FLINK_VERSION,
        "flink-commit": "",
        "tidegate-version": tidegate_version(),
    }


def dashboard_config(refresh_ms: int, timezone_name: str, timezone_offset_ms: int) -> dict[str, Any]:
    """`/config`: what a dashboard asks first."""
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
    """`/jobs`."""
    return {"jobs": [{"id": str(job.job_id), "status": job_state(job)} for job in _sorted(view)]}


def jobs_overview(view: View) -> dict[str, Any]:
    """`/jobs/overview`."""
    return {"jobs": [_line(job) for job in _sorted(view)]}


def _sorted(view: View) -> list[SeenJob]:
    """Newest first."""
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
    """`/jobs/<id>/status`."""
    return {"status": job_state(job)}


def job_accumulators(job: SeenJob) -> dict[str, Any]:
    """`/jobs/<id>/accumulators`: there are none. What functions count is among the metrics."""
    return {"job-accumulators": [], "user-task-accumulators": [], "serialized-user-task-accumulators": {}}


def job_details(job: SeenJob) -> dict[str, Any]:
    """`/jobs/<id>`. What tidegate knows beyond Flink is under `tidegate`."""
    snapshot, progress = job.snapshot, job.snapshot.progress
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
    tasks = tasks_of(job, vertex)
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


def tasks_of(job: SeenJob, vertex: PlanVertex) -> list[TaskNow]:
    """The tasks of a vertex, in order."""
    return [task for task in job.snapshot.tasks if task.task.vertex == vertex.vertex]


def plan(job: SeenJob) -> dict[str, Any]:
    """`/jobs/<id>/plan`: the graph, in topological order."""
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
    """`/jobs/<id>/config`."""
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
    """`/jobs/<id>/jobmanager/config`: the settings in effect, as Flink lists those of a cluster."""
    return [{"key": key, "value": value} for key, value in sorted(job.about.configuration.items())]
