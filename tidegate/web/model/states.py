"""The states of jobs and tasks, with Flink's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.runtimes.job_snapshot import TaskNow
from tidegate.web.jobs import SeenJob

JOB_STATES = (
    "INITIALIZING", "CREATED", "RUNNING", "FAILING", "FAILED", "CANCELLING", "CANCELED", "FINISHED", "RESTARTING",
    "SUSPENDED", "RECONCILING",
)  # fmt: skip
TASK_STATES = (
    "CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", "RUNNING", "FINISHED", "CANCELING", "CANCELED", "FAILED",
    "RECONCILING",
)  # fmt: skip

UNKNOWN = -1
"""The value that Flink uses for an unknown time or number."""

_STATES = {
    JobStatus.CREATED: "INITIALIZING",
    JobStatus.DEPLOYING: "CREATED",
    JobStatus.RUNNING: "RUNNING",
    JobStatus.ENDING: "RUNNING",
    JobStatus.RESTARTING: "RESTARTING",
    JobStatus.FINISHED: "FINISHED",
    JobStatus.FAILED: "FAILED",
    JobStatus.CANCELLED: "CANCELED",
    # Clients that stop a Flink job with a savepoint wait for FINISHED, with or without drain.
    JobStatus.SUSPENDED: "FINISHED",
}
_ENDING = {JobStatus.FAILED: "FAILING", JobStatus.CANCELLED: "CANCELLING"}


class NotKnown(Exception):
    """Raised if the requested object does not exist, or is no longer kept. The text names it."""


def job_state(job: SeenJob) -> str:
    """Returns the state of a job: RUNNING when all its tasks run, RECONCILING while its coordinator does not answer."""
    snapshot = job.snapshot
    if not job.reachable and not job.over:
        return "RECONCILING"
    if snapshot.status is JobStatus.DEPLOYING and snapshot.progress.attempt > 0:
        return "RESTARTING"
    if snapshot.status is JobStatus.ENDING and snapshot.ending is not None:
        return _ENDING.get(snapshot.ending, "RUNNING")
    return _STATES[snapshot.status]


def started_at_ms(job: SeenJob) -> int:
    """Returns the time when the job was submitted, in ms since the epoch."""
    return job.snapshot.card.submitted_at_ms


def entered_at_ms(job: SeenJob) -> dict[str, int]:
    """Returns the time when the job last entered each state, in ms since the epoch; 0 if never or unknown."""
    times = dict.fromkeys(JOB_STATES, 0)
    for status, at_ms in job.past.since_ms:
        state = _STATES[status]
        times[state] = max(times[state], at_ms)
    times["INITIALIZING"] = started_at_ms(job)
    return times


def ended_at_ms(job: SeenJob) -> int:
    """Returns the time when the job ended, in ms since the epoch, or -1 before its end."""
    if not job.over:
        return UNKNOWN
    return next((at_ms for status, at_ms in job.past.since_ms if status is job.snapshot.status), job.snapshot.at_ms)


def duration_ms(job: SeenJob) -> int:
    """Returns for how many ms the job has run, or ran until its end."""
    until_ms = ended_at_ms(job) if job.over else job.now_ms
    return max(0, until_ms - started_at_ms(job))


def count_states(tasks: Iterable[TaskNow], *, small: bool = False) -> dict[str, int]:
    """Returns how many tasks are in each state. `small`: names in lower case, as in lists of jobs."""
    counts = Counter(task.status for task in tasks)
    return {state.lower() if small else state: counts[state] for state in TASK_STATES}


def vertex_state(tasks: Iterable[TaskNow]) -> str:
    """Returns the state of a vertex: the worst state of its tasks, as in Flink."""
    present = {task.status for task in tasks}
    for state in ("FAILED", "CANCELING", "CANCELED", "RECONCILING"):
        if state in present:
            return state
    if present == {"FINISHED"}:
        return "FINISHED"
    for state in ("CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING"):
        if state in present:
            return state
    return "RUNNING"
