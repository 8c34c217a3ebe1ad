"""What Flink calls the states of jobs and tasks. Pure, as all of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tidegate.actors.coordinator.state.coordinator_state import JobStatus
from tidegate.actors.runtimes.job_snapshot import TaskNow
from tidegate.web.seen_job import SeenJob

JOB_STATES = (
    "INITIALIZING", "CREATED", "RUNNING", "FAILING", "FAILED", "CANCELLING", "CANCELED", "FINISHED", "RESTARTING",
    "SUSPENDED", "RECONCILING",
)  # fmt: skip
TASK_STATES = (
    "CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", "RUNNING", "FINISHED", "CANCELING", "CANCELED", "FAILED",
    "RECONCILING",
)  # fmt: skip

UNKNOWN = -1
"""Where there is no time or number to tell."""

_STATES = {
    JobStatus.CREATED: "INITIALIZING",
    JobStatus.DEPLOYING: "CREATED",
    JobStatus.RUNNING: "RUNNING",
    JobStatus.ENDING: "RUNNING",
    JobStatus.RESTARTING: "RESTARTING",
    JobStatus.FINISHED: "FINISHED",
    JobStatus.FAILED: "FAILED",
    JobStatus.CANCELLED: "CANCELED",
    # Who stops a Flink job with a savepoint waits for FINISHED, with or without drain.
    JobStatus.SUSPENDED: "FINISHED",
}
_ENDING = {JobStatus.FAILED: "FAILING", JobStatus.CANCELLED: "CANCELLING"}


class NotKnown(Exception):
    """There is no such thing, or none any more. The text says which."""


def job_state(job: SeenJob) -> str:
    """The state of a job. It is RUNNING when all of its tasks are, RECONCILING while its coordinator is silent."""
    snapshot = job.snapshot
    if not job.reachable and not job.over:
        return "RECONCILING"
    if snapshot.status is JobStatus.DEPLOYING and snapshot.progress.attempt > 0:
        return "RESTARTING"
    if snapshot.status is JobStatus.ENDING and snapshot.ending is not None:
        return _ENDING.get(snapshot.ending, "RUNNING")
    return _STATES[snapshot.status]


def started_at_ms(job: SeenJob) -> int:
    """When it was submitted."""
    return job.snapshot.card.submitted_at_ms


def entered_at_ms(job: SeenJob) -> dict[str, int]:
    """When the job has entered each state last; 0: never, or nobody knows."""
    times = dict.fromkeys(JOB_STATES, 0)
    for status, at_ms in job.past.since_ms:
        state = _STATES[status]
        times[state] = max(times[state], at_ms)
    times["INITIALIZING"] = started_at_ms(job)
    return times


def ended_at_ms(job: SeenJob) -> int:
    """When the job has ended; -1 while it has not."""
    if not job.over:
        return UNKNOWN
    return next((at_ms for status, at_ms in job.past.since_ms if status is job.snapshot.status), job.snapshot.at_ms)


def duration_ms(job: SeenJob) -> int:
    """For how long the job has been there."""
    until_ms = ended_at_ms(job) if job.over else job.now_ms
    return max(0, until_ms - started_at_ms(job))


def count_states(tasks: Iterable[TaskNow], *, small: bool = False) -> dict[str, int]:
    """How many of the tasks are in each state; `small`: names as lists of jobs have them."""
    counts = Counter(task.status for task in tasks)
    return {state.lower() if small else state: counts[state] for state in TASK_STATES}


def vertex_state(tasks: Iterable[TaskNow]) -> str:
    """The state of a vertex out of those of its tasks: the worst one, as Flink does."""
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
