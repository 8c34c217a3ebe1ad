"""`job_state`: returns the state of a job's coordinator at any time, computed from the events before that time.

It only uses the event log. A coordinator computes its state from the events of the log, and a restarted coordinator
computes the same state. Old events are folded into a snapshot and cut, unless the job keeps them (`keep_events`). The
state before the oldest existing snapshot is unknown, and the error names the first event for which it is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.runtimes.running_job import RUNNING_STATUSES
from tidegate.recovery.checkpoints import is_of_job
from tidegate.recovery.event_history import EventHistory
from tidegate.recovery.state_processor.timeline import first_whole_entry, fold_start
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import CheckpointId, EventId, JobId


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job after one of its events. `at_ms` is the time of that event, in ms since the epoch."""

    job_id: JobId
    event: EventId
    at_ms: int
    status: str
    """The status of the job, as `Job.status()` returns it."""
    attempt: int
    """The number of the newest attempt, starting with 0; -1 before the first one."""
    generation: int
    """How many coordinators there have been so far."""
    tasks: int
    """How many tasks the job has. `ready` of them had restored their state, and `finished` of them had finished."""
    ready: int
    finished: int
    completed_checkpoints: int
    failed_checkpoints: int
    retained: tuple[CheckpointId, ...]
    """The completed checkpoints that were available for a restore, newest last."""
    pending: dict[CheckpointId, tuple[str, ...]]
    """The checkpoints in progress, each with the tasks that had not acknowledged it yet."""
    last_failure: str | None
    reason: str | None
    """Why the job ended or was about to end, or None if it was not."""
    coordinator: CoordinatorState
    """The complete state of the coordinator."""


def job_state(
    path: str, *, at: int | datetime | None = None, job: str | None = None, open_store: OpenStore = open_store
) -> JobState:
    """Returns the state of a job after an event, or at a moment.

    `path` is a checkpoint root, or a job's folder in it. `at` is the number of an event, as `tidegate events` prints
    it, or a moment (UTC if it has no time zone); None is the end of the log. `job` is a name or id, needed if there are
    several jobs.

    Raises ConfigurationError if there is no such job, event or moment in the log; CorruptionError if an entry before it
    cannot be read; StorageError.

        state = recovery.job_state("s3://bucket/checkpoints", at=datetime(2026, 11, 23, 16, 27))
        print(state.status, state.retained)
    """
    log, job_id = only_one(logs_under(path, job, open_store), path, job)
    history = EventHistory.read(log, job_id)
    start = fold_start(log, history)
    if start is None:
        raise CorruptionError(
            f"event log of job {job_id} under {path}: entries before {first_whole_entry(history)} were deleted, and "
            "the snapshot that replaces them is missing; `job_state` needs it. Restore the log's folder from a copy, "
            "or use the newest checkpoint"
        )
    first_index, state = start
    machine = CoordinatorMachine(state)
    until_ms = None if not isinstance(at, datetime) else _ms(at)
    taken: tuple[EventId, int] | None = None
    first: EventId | None = None
    for index, entry, events, error in history.entries:
        if index < first_index:
            continue
        if entry is None:
            raise CorruptionError(
                f"entry {index} of the event log of job {job_id} cannot be read: {error}"
                "; restore this file from a copy, or use the newest checkpoint"
            )
        for logged in events:
            first = logged.number if first is None else first
            over = logged.number > at if isinstance(at, int) else until_ms is not None and logged.at_ms > until_ms
            if over:
                return _found(job_id, machine.state, taken, first, at)
            machine.handle(logged.event)
            taken = logged.number, logged.at_ms
    if isinstance(at, int) and (taken is None or taken[0] < at):
        last = "no event" if taken is None else f"event {taken[0]}"
        raise ConfigurationError(
            f"job {job_id} has no event {at}: its log ends with {last}; give the number of an earlier event"
        )
    return _found(job_id, machine.state, taken, first, at)


def _found(
    job_id: JobId,
    state: CoordinatorState,
    taken: tuple[EventId, int] | None,
    first: EventId | None,
    at: int | datetime | None,
) -> JobState:
    if taken is None:
        raise ConfigurationError(
            f"the state of job {job_id} at {at} is unknown: its log reaches back to event {first}. Older events were "
            "folded into a snapshot and cut; keep_events=True keeps the events of later jobs"
        )
    return JobState(
        job_id=job_id,
        event=taken[0],
        at_ms=taken[1],
        status=RUNNING_STATUSES[state.status],
        attempt=state.attempt,
        generation=state.generation,
        tasks=0 if state.spec is None else len(state.spec.tasks),
        ready=len(state.ready),
        finished=len(state.finished),
        completed_checkpoints=state.completed_checkpoints,
        failed_checkpoints=state.failed_checkpoints,
        retained=tuple(each.checkpoint_id for each in state.completed),
        pending={number: tuple(map(str, pending.waiting)) for number, pending in state.pending.items()},
        last_failure=state.last_failure,
        reason=state.ending_reason,
        coordinator=state,
    )


def _ms(moment: datetime) -> int:
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000)


def logs_under(path: str, job: str | None, open_store: OpenStore = open_store) -> dict[JobId, EventLog]:
    """Returns the logs of the jobs under a root, or of one job if `path` is its folder. Raises StorageError."""
    store, job = _root_of(path, job, open_store)
    logs = {JobId(name): EventLog(store, JobId(name)) for name in store.list("") if is_of_job(store, JobId(name), job)}
    return {job_id: log for job_id, log in logs.items() if log.indices()}


def _root_of(path: str, job: str | None, open_store: OpenStore) -> tuple[Store, str | None]:
    """Returns the store of the root, and the job. `path` may be a root, or the folder of a job."""
    store = open_store(path)
    root, _, name = store.url.rpartition("/")
    if job is None and root and name and any(entry.isdigit() for entry in store.list("events")):
        return open_store(root), name
    return store, job


def no_log(path: str, job: str | None) -> str:
    """Returns the error text for a missing event log."""
    of_job = f" of job {job}" if job else ""
    return (
        f"there is no event log under {path}{of_job}; give the root of the checkpoints, the folder that has a folder "
        "for each job"
    )


def only_one(logs: dict[JobId, EventLog], path: str, job: str | None) -> tuple[EventLog, JobId]:
    """Returns the event log and the id of the only job. Raises ConfigurationError if there are none or several."""
    of_job = f" of job {job}" if job else ""
    if not logs:
        raise ConfigurationError(no_log(path, job))
    if len(logs) > 1:
        names = ", ".join(sorted(logs))
        raise ConfigurationError(
            f"there are several event logs under {path}{of_job}: "
            f"name a job with job= (on the command line with --job), one of {names}"
        )
    return next((log, job_id) for job_id, log in logs.items())
