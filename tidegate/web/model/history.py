"""What has happened to a job: exceptions as Flink's REST API has them, and the decisions."""

from __future__ import annotations

import re
from typing import Any

from tidegate.actors.coordinator.chronicle import FAILURES_MAX, LINES_MAX, Failure
from tidegate.actors.coordinator.state.coordinator_state import JobStatus
from tidegate.protocol.identity import TaskId
from tidegate.web.model.states import ended_at_ms
from tidegate.web.seen_job import SeenJob

_CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*(?=:|$)")


def exceptions(job: SeenJob, limit: int = FAILURES_MAX) -> dict[str, Any]:
    """`/jobs/<id>/exceptions`: failures, newest first; those of one attempt belong to its first."""
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
    told = {failure.reason for failure in job.past.failures}
    if job.snapshot.status is JobStatus.FAILED and reason is not None and reason not in told:
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
    """The class of an error, where its text begins with one."""
    found = _CLASS.match(reason)
    return found[0] if found else "JobFailure"


def task_name(job: SeenJob, task: TaskId) -> str:
    """`sum by key (2/4)`."""
    vertex = next((each for each in job.about.vertices if each.vertex == task.vertex), None)
    return str(task) if vertex is None else f"{vertex.name} ({task.subtask + 1}/{vertex.parallelism})"


def last_hour(job: SeenJob) -> list[dict[str, Any]]:
    """Numbers of the last hour for the charts of the page, oldest first; null where nothing was reported."""
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
    """What the coordinator has decided, newest first, without checkpoints that went well."""
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
