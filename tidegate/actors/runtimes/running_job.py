"""`Submission`, `RunningJob` and `Runtime`: what is submitted to a runtime, and what a runtime gives back."""

from __future__ import annotations

from collections.abc import Sequence
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
"""The coordinator's status as users see it: a job runs when all of its tasks are ready."""


@dataclass(frozen=True, slots=True)
class JobCard:
    """What a driver that attaches to a job has to know of it. `submitted_at_ms`: since the epoch, by its submitter."""

    job_id: JobId
    name: str
    root: str
    """Where its checkpoints rest."""
    savepoints: str | None
    """Where its savepoints go when nobody names a folder."""
    detached: bool
    """Whether it outlives the driver that has submitted it."""
    submitted_at_ms: int


@dataclass(frozen=True, slots=True)
class FedJob:
    """What feeds a source of a job has to know of it. `uid` is that of the source."""

    job_id: JobId
    name: str
    root: str
    """Where its checkpoints rest."""
    uid: OperatorUid
    folder: str
    """The folder of this job for what is staged for the source."""
    savepoints: str | None
    """Where its savepoints go when nobody names a folder."""
    open_store: OpenStore


@dataclass(frozen=True, slots=True)
class Submission:
    """A job, ready to run, and what feeds its sources from then on, in the driver."""

    spec: JobSpec
    context: JobContext
    savepoints: str | None = None
    detached: bool = False
    submitted_at_ms: int = 0
    services: tuple[DriverService, ...] = ()

    @property
    def card(self) -> JobCard:
        """What others have to know of it."""
        spec = self.spec
        return JobCard(spec.job_id, spec.job_name, spec.root, self.savepoints, self.detached, self.submitted_at_ms)


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A job at a glance. Times in ms, `rows_in` by vertex id (rows of all its subtasks in this attempt)."""

    status: str
    reason: str | None
    """Why it has ended, without values of rows unless `log_rows` is on."""
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
    """Whether the job has ended because a newer one is in charge of a table of it."""
    coordinator_losses: int = 0
    """How often the coordinator was lost, and another one has taken over."""
    adoptions: int = 0
    """How often the tasks that ran have gone on under the new one."""
    waits_for: str | None = None
    """What the job waits for: room in the cluster, or storage that does not answer, with the time since when."""
    standbys_ready: int = 0
    """Spare processes that have started, and take over at once."""
    standbys_starting: int = 0
    """Spare processes that have not started yet."""
    suspect_nodes: int = 0
    """Nodes that may be lost: nothing is started there."""
    rows_before: dict[str, int] = field(default_factory=dict)
    """Rows of sources that were read before the checkpoint that this attempt started from, by vertex id."""
    splits_left: dict[str, int] = field(default_factory=dict)
    """Splits that no subtask has begun, by vertex id, of sources whose splits are assigned."""
    reason_with_values: str | None = None
    """The reason with the values of rows that it names, if they are known: for the program's driver alone."""
    coordinator_answers: bool = True
    """False: the coordinator starts, is lost, or replays its log. Then all else here is what was known last, and the
    tasks may go on meanwhile."""


class KnowsValues(Protocol):
    """What knows the values that were withheld from a text of the event log."""

    def whole_text(self, text: str | None) -> str | None:
        """The text with its values."""
        ...


def progress_of(state: CoordinatorState, rows_in: dict[str, int], values: KnowsValues | None = None) -> JobProgress:
    """Progress from the coordinator's memory, from any thread.

    `values`: the coordinator that has logged the reason, if it lives.
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
    """A line of a list of jobs. `last_checkpoint_at_ms`: when the newest one completed, by its coordinator's clock."""

    card: JobCard
    progress: JobProgress
    last_checkpoint_at_ms: int | None


@dataclass(frozen=True, slots=True)
class SilentJob:
    """A line of a list of jobs for one whose coordinator does not answer, or has died."""

    since_ms: int
    """Since when: when it died, or when it was first asked in vain. In ms since the epoch."""
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: the checkpoint, and the path of a savepoint, or why there is none."""

    checkpoint_id: CheckpointId | None
    error: str | None
    path: str | None = None


NOT_YET = ("created", "deploying", "restarting")
"""Statuses in which a job cannot take a checkpoint, and soon can."""
_STOPS = (SnapshotKind.SUSPEND, SnapshotKind.TERMINATE)
_ATTEMPT_FAILED = (Reason.JOB_FAILOVER, Reason.COORDINATOR_LOST)
_MAY_END = (Reason.JOB_ENDING, Reason.NOT_ALL_REQUIRED_TASKS_RUNNING, Reason.METADATA_NOT_WRITTEN)
"""Reasons that say nothing of what becomes of the job, or whose detail says it."""


def not_taken(kind: SnapshotKind, why: str | None) -> CheckpointError:
    """What whoever asked for a snapshot is told if there is none: why, and what becomes of the job."""
    stops = kind in _STOPS
    what = "the job was not stopped with a savepoint" if stops else f"no {kind.value} was taken"
    reason = next((r for r in Reason if why is not None and why.startswith(r.value)), None)
    follows = ""
    if reason in _ATTEMPT_FAILED:
        follows = "; the job restarts from its newest checkpoint and goes on: ask again"
    elif reason is Reason.NOT_ALL_REQUIRED_TASKS_RUNNING and any(f"the job is {s}" in (why or "") for s in NOT_YET):
        follows = "; ask again when its status is running"
    elif stops and reason is not None and reason not in _MAY_END:
        follows = "; the job goes on"
    return CheckpointError(f"{what}: {why}{follows}")


def answers_of(state: CoordinatorState) -> dict[str, Answer | None]:
    """What a coordinator's memory knows of requests, by their names; None where there is no answer yet.

    For one that replaces a lost one: the answer may have been decided, or be decided soon, and the asker still wait.
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
    """What a user asks a job for. `target`: the url under which a savepoint gets a folder; None for a checkpoint."""

    kind: SnapshotKind
    target: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL


@dataclass(frozen=True, slots=True)
class TaskProcessInfo:
    """Which process runs a task, and in which attempt of its region."""

    task: TaskId
    actor: str
    pid: int
    node_id: str
    attempt: int = 0


def not_there(name: str, where: str, running: Sequence[JobCard]) -> ConfigurationError:
    """No job has this name, or several have."""
    same = [card for card in running if card.name == name]
    if len(same) > 1:
        ids = ", ".join(sorted(card.job_id for card in same))
        return ConfigurationError(f"{len(same)} jobs named {name!r} run {where}: name one by its id ({ids})")
    others = ", ".join(sorted(card.name for card in running))
    return ConfigurationError(
        f"no job named {name!r} runs {where}; " + (f"running: {others}" if others else "no job runs there")
    )


class RunningJob(Protocol):
    """A job that was submitted."""

    def progress(self) -> JobProgress:
        """The job now."""
        ...

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """Wait for a terminal status; None when the time is over first."""
        ...

    def cancel(self) -> None:
        """Ask for cancellation."""
        ...

    def tasks(self) -> tuple[TaskProcessInfo, ...]:
        """Which process runs each task; empty where all run in the driver's."""
        ...

    def vertices(self) -> tuple[VertexMetrics, ...]:
        """What the tasks have reported of themselves last, by vertex; once the job is over, what was reported last."""
        ...

    def statistics(self) -> CheckpointStatistics:
        """Statistics of the checkpoints so far."""
        ...

    def request(self, wanted: SnapshotRequest, timeout_s: float) -> Answer:
        """Take a checkpoint or savepoint, and wait for it.

        SUSPEND and TERMINATE end the job after it. CheckpointError when it fails, JobTimeoutError after too long.
        """
        ...


class Runtime(Protocol):
    """Runs jobs."""

    open_store: OpenStore
    """Opens what the processes of a job read and write."""

    def check(self, graph: JobGraph, urls: Sequence[str]) -> None:
        """Refuse, with a ConfigurationError, what cannot run here; before a table is claimed or a source staged.

        `urls` are those of the checkpoints and the tables.
        """
        ...

    def check_detached(self, name: str, urls: Sequence[str]) -> None:
        """Refuse, with a ConfigurationError, a job of this name that is to outlive its driver, where it cannot."""
        ...

    def submit(self, submission: Submission) -> RunningJob:
        """Start a job."""
        ...

    def overviews(self) -> list[tuple[str, JobOverview | SilentJob]]:
        """The running jobs by name; None for one that does not answer."""
        ...

    def attach(self, name: str) -> tuple[JobCard, RunningJob]:
        """The running job of a name or id. ConfigurationError, with those that run, where there is none."""
        ...

    @property
    def memory_url(self) -> str:
        """Where checkpoints go that are to lie in memory."""
        ...

    @property
    def sends_functions(self) -> bool:
        """Whether tasks run in other processes, so that functions and what they capture have to be pickled."""
        ...

    def stop(self) -> None:
        """Cancel what runs and release everything."""
        ...
