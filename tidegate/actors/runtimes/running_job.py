"""The interface of runtimes: a `Submission` is submitted to a `Runtime`, which returns a `RunningJob`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.coordinator.source_coordinator import splits_left
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes.driver_services import DriverService
from tidegate.actors.runtimes.task_metrics import VertexMetrics
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.errors import CheckpointError, ConfigurationError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid

RUNNING_STATUSES = {
    JobStatus.CREATED: "created",
    JobStatus.DEPLOYING: "deploying",
    JobStatus.RUNNING: "running",
    JobStatus.ENDING: "running",
    JobStatus.RESTARTING: "restarting",
    JobStatus.FINISHED: "finished",
    JobStatus.FAILED: "failed",
    JobStatus.CANCELLED: "cancelled",
    JobStatus.SUSPENDED: "suspended",
}
"""The status that users see for each status of the coordinator. "running" means that all tasks are ready."""


@dataclass(frozen=True, slots=True)
class JobCard:
    """The description of a job for drivers that attach to it.

    `submitted_at_ms` is in ms since the epoch, by the clock of the submitting driver.
    """

    job_id: JobId
    name: str
    root: str
    """URL of the job's checkpoints."""
    savepoints: str | None
    """URL below which savepoints get their folders by default, or None."""
    detached: bool
    """True if the job outlives the driver that has submitted it."""
    submitted_at_ms: int


@dataclass(frozen=True, slots=True)
class FedJob:
    """The description of a job for a driver service that feeds one of its sources. `uid` is the uid of the
    source.
    """

    job_id: JobId
    name: str
    root: str
    """URL of the job's checkpoints."""
    uid: OperatorUid
    folder: str
    """Path of the job's folder for staged files of the source."""
    savepoints: str | None
    """URL below which savepoints get their folders by default, or None."""
    open_store: OpenStore


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that is ready to run, with the services in the driver that feed its sources."""

    spec: JobSpec
    context: JobContext
    savepoints: str | None = None
    detached: bool = False
    submitted_at_ms: int = 0
    services: tuple[DriverService, ...] = ()

    @property
    def card(self) -> JobCard:
        """Returns the description of the job for other drivers."""
        spec = self.spec
        return JobCard(spec.job_id, spec.job_name, spec.root, self.savepoints, self.detached, self.submitted_at_ms)


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job. Times are in ms.

    `rows_in` is the number of received rows in this attempt, summed over the subtasks of each vertex.
    """

    status: str
    reason: str | None
    """The reason why the job has ended, or None. Values of rows are withheld unless `log_rows` is on."""
    attempt: int
    restarts: int
    completed_checkpoints: int
    failed_checkpoints: int
    last_checkpoint: int | None
    last_checkpoint_ms: int | None
    last_checkpoint_bytes: int | None
    last_failure: str | None
    rows_in: dict[str, int]
    superseded: bool = False
    """True if the job has ended because a newer job has taken over one of its tables."""
    coordinator_losses: int = 0
    """Number of coordinators that were lost and replaced."""
    adoptions: int = 0
    """Number of times that all tasks have continued under a new coordinator."""
    waits_for: str | None = None
    """Text about what the job waits for and since when: slots in the cluster, or storage that does not answer.
    None if the job waits for neither.
    """
    standbys_ready: int = 0
    """Number of spare processes that have started and can take over at once."""
    standbys_starting: int = 0
    """Number of spare processes that have not started yet."""
    suspect_nodes: int = 0
    """Number of nodes that may be lost, on which no process is started."""
    rows_before: dict[str, int] = field(default_factory=dict)
    """Number of rows of sources that were read before the checkpoint from which this attempt started, by vertex id."""
    splits_left: dict[str, int] = field(default_factory=dict)
    """Number of splits that are not assigned to a subtask, by vertex id, for sources with assigned splits."""
    reason_with_values: str | None = None
    """The reason with the values of rows, or None if they are not available. Only for the driver of the program."""
    coordinator_answers: bool = True
    """False if the coordinator is starting, is lost, or replays its log. The other fields are then the last known ones,
    and tasks may continue.
    """


class KnowsValues(Protocol):
    """The interface of an object that has the row values which the event log leaves out of its texts."""

    def whole_text(self, text: str | None) -> str | None:
        """Returns a text of the event log with the omitted row values filled in, as far as they are available."""
        ...


def progress_of(state: CoordinatorState, rows_in: dict[str, int], values: KnowsValues | None = None) -> JobProgress:
    """Returns the progress of a job, from the coordinator's state. May be called from any thread.

    `values` is the coordinator's driver, which has the row values omitted from the failure reason, or None.
    """
    newest = state.statistics.latest_completed
    reason = state.ending_reason if state.status.terminal else None
    rows_before: dict[str, int] = {}
    # A copy, because the coordinator may deploy more tasks meanwhile.
    for task, rows in list(state.rows_before.items()):
        if rows:
            rows_before[task.vertex] = rows_before.get(task.vertex, 0) + rows
    return JobProgress(
        status=RUNNING_STATUSES[state.status],
        reason=reason,
        reason_with_values=None if values is None else values.whole_text(reason),
        attempt=max(0, state.attempt),
        restarts=max(0, state.attempt),
        completed_checkpoints=state.completed_checkpoints,
        failed_checkpoints=state.failed_checkpoints,
        last_checkpoint=None if newest is None else newest.checkpoint_id,
        last_checkpoint_ms=None if newest is None else newest.duration_ms,
        last_checkpoint_bytes=None if newest is None else newest.state_bytes + newest.in_flight_bytes,
        last_failure=state.last_failure,
        rows_in=rows_in,
        superseded=state.superseded,
        coordinator_losses=max(0, state.generation - 1),
        adoptions=state.adoptions,
        rows_before=rows_before,
        splits_left={str(vertex): left for vertex, left in splits_left(state).items()},
    )


@dataclass(frozen=True, slots=True)
class JobOverview:
    """The entry of a job in a list of jobs.

    `last_checkpoint_at_ms` is when the newest checkpoint completed, by its coordinator's clock, or None.
    """

    card: JobCard
    progress: JobProgress
    last_checkpoint_at_ms: int | None


@dataclass(frozen=True, slots=True)
class SilentJob:
    """The entry in a list of jobs of a job whose coordinator does not answer or has died."""

    since_ms: int
    """Time of the coordinator's death, or of the first call without an answer, in ms since the epoch."""
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: the id of the checkpoint, and the path of a savepoint, or the error."""

    checkpoint_id: CheckpointId | None
    error: str | None
    path: str | None = None


NOT_YET = ("created", "deploying", "restarting")
"""Statuses in which a job cannot take a checkpoint yet."""
_STOPS = (SnapshotKind.SUSPEND, SnapshotKind.TERMINATE)
_ATTEMPT_FAILED = (Reason.JOB_FAILOVER, Reason.COORDINATOR_LOST)
_MAY_END = (Reason.JOB_ENDING, Reason.NOT_ALL_REQUIRED_TASKS_RUNNING, Reason.METADATA_NOT_WRITTEN)
"""Failure reasons that leave open whether the job continues, or whose details report it."""


def not_taken(kind: SnapshotKind, why: str | None) -> CheckpointError:
    """Returns the CheckpointError for a checkpoint or savepoint that was not taken.

    Its text has the reason, and whether the job continues.
    """
    stops = kind in _STOPS
    what = "the job was not stopped with a savepoint" if stops else f"no {kind.value} was taken"
    reason = next((r for r in Reason if why is not None and why.startswith(r.value)), None)
    follows = ""
    if reason in _ATTEMPT_FAILED:
        follows = "; the job restarts from its newest checkpoint and continues: request it again"
    elif reason is Reason.NOT_ALL_REQUIRED_TASKS_RUNNING and any(f"the job is {s}" in (why or "") for s in NOT_YET):
        follows = "; request it again when its status is running"
    elif stops and reason is not None and reason not in _MAY_END:
        follows = "; the job continues"
    return CheckpointError(f"{what}: {why}{follows}")


def answers_of(state: CoordinatorState) -> dict[str, Answer | None]:
    """Returns the answer to each request in a coordinator's state, or None for a request without an answer yet.

    A new coordinator needs them, because the lost one may have decided a request whose caller still waits.
    """
    statistics = state.statistics
    newest = (statistics.latest_completed, statistics.latest_savepoint, statistics.latest_failed)
    over = [record for record in (*statistics.history, *newest) if record is not None]
    answers: dict[str, Answer | None] = {
        request: Answer(record.checkpoint_id if record.reason is None else None, record.message, record.path)
        for record in over
        for request in record.requests
    }
    return (
        answers
        | {request: None for pending in state.under_way.values() for request in pending.requests}
        | {waiting.request: None for waiting in state.requests}
    )


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A user's request for a checkpoint or savepoint.

    `target` is the URL below which a savepoint gets a folder, or None for a checkpoint.
    """

    kind: SnapshotKind
    target: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL


@dataclass(frozen=True, slots=True)
class TaskProcessInfo:
    """The process that runs a task, and the task's attempt. `actor` is the name of its Ray actor."""

    task: TaskId
    actor: str
    pid: int
    node_id: str
    attempt: int = 0


def not_there(name: str, where: str, running: Sequence[JobCard]) -> ConfigurationError:
    """Returns the error for a name that belongs to no running job, or to several. `where` completes the text
    "runs …".
    """
    same = [card for card in running if card.name == name]
    if len(same) > 1:
        ids = ", ".join(sorted(card.job_id for card in same))
        return ConfigurationError(f"{len(same)} jobs named {name!r} run {where}: name one by its id ({ids})")
    others = ", ".join(sorted(card.name for card in running))
    return ConfigurationError(
        f"no job named {name!r} runs {where}; " + (f"running: {others}" if others else "no job runs there")
    )


class RunningJob(Protocol):
    """The interface to a submitted job."""

    def progress(self) -> JobProgress:
        """Returns the progress of the job."""
        ...

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """Waits for the end of the job, and returns its progress. Returns None if the timeout passes first. No
        timeout if None.
        """
        ...

    def cancel(self) -> None:
        """Requests the cancellation of the job, and does not wait."""
        ...

    def tasks(self) -> tuple[TaskProcessInfo, ...]:
        """Returns the process of each task. Empty if all tasks run in the driver's process."""
        ...

    def vertices(self) -> tuple[VertexMetrics, ...]:
        """Returns the last reported metrics of the tasks, by vertex. Also after the end of the job."""
        ...

    def statistics(self) -> CheckpointStatistics:
        """Returns the statistics of the checkpoints so far."""
        ...

    def request(self, wanted: SnapshotRequest, timeout_s: float) -> Answer:
        """Takes a checkpoint or savepoint, and waits for the answer.

        The kinds SUSPEND and TERMINATE end the job after the savepoint. Raises CheckpointError if it fails, and
        JobTimeoutError after `timeout_s`.
        """
        ...


class Runtime(Protocol):
    """The interface of a runtime, which runs jobs in this process or on Ray."""

    open_store: OpenStore
    """A function that opens the storage at a URL for the processes of a job."""

    def check(self, graph: JobGraph, urls: Mapping[str, str]) -> None:
        """Raises ConfigurationError for a job that this runtime cannot run. Called before a table is claimed or a
        source staged.

        `urls` are the URLs of checkpoints, savepoints and tables, each with the name of the setting that defines it.
        """
        ...

    def check_detached(self, name: str, urls: Sequence[str]) -> None:
        """Raises ConfigurationError if a job with this name cannot run detached on this runtime."""
        ...

    def submit(self, submission: Submission) -> RunningJob:
        """Starts a job, and returns it without waiting."""
        ...

    def overviews(self) -> list[tuple[str, JobOverview | SilentJob]]:
        """Returns the name and overview of each running job."""
        ...

    def attach(self, name: str) -> tuple[JobCard, RunningJob]:
        """Returns the card and the job with this name or id. Raises ConfigurationError, which lists the running
        jobs, if there is none.
        """
        ...

    @property
    def memory_url(self) -> str:
        """Returns the URL of a checkpoint storage that is in memory."""
        ...

    @property
    def sends_functions(self) -> bool:
        """Returns whether tasks run in other processes, so that functions and the values that they capture must
        be picklable.
        """
        ...

    def stop(self) -> None:
        """Cancels running jobs and releases all resources."""
        ...
