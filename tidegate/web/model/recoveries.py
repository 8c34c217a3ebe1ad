"""The recoveries of a job and their parts: until the failure was noticed, the wait, the restore, until the first row.

The chronicle of the coordinator knows the middle (`tidegate/actors/coordinator/chronicle.py`), the runtime both ends
(`tidegate/actors/runtimes/metrics/recovery_times.py`). `web/page/recoveries.py` draws them.
"""

from __future__ import annotations

from typing import Any

from tidegate.actors.coordinator.chronicle import Recovery
from tidegate.actors.runtimes.metrics.recovery_times import RecoveryEnds
from tidegate.web.model.history import task_name
from tidegate.web.seen_job import SeenJob


def recoveries(job: SeenJob) -> dict[str, Any]:
    """Deployments after the first one and how long they took, newest first."""
    return {"recoveries": [_recovery(job, each) for each in reversed(job.past.recoveries)]}


def _recovery(job: SeenJob, recovery: Recovery) -> dict[str, Any]:
    failure, running_ms = recovery.failure, recovery.running_at_ms
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
    """The parts of a recovery in ms, in their order; None for one that lasts. The first and the last may be unknown."""
    deployed_ms, running_ms, first_row_ms = recovery.deployed_at_ms, recovery.running_at_ms, ends.first_row_at_ms
    parts: dict[str, int | None] = {}
    if ends.unnoticed_ms is not None:
        parts["detect"] = ends.unnoticed_ms
    parts["wait"] = max(0, deployed_ms - started_ms)
    parts["restore"] = None if running_ms is None else max(0, running_ms - deployed_ms)
    if running_ms is not None and first_row_ms is not None:
        parts["first-row"] = max(0, first_row_ms - running_ms)
    return parts
