"""The events that the coordinator machine handles: facts, in the past tense. `at_ms` is the time by the clock of the
sender.

`CoordinatorDriver` logs each event before it acts on it. An event has a text for people (`describe`), the names of the
orders that it may answer (`answers`), and a log level (`importance`).

An *order* is an instruction that is answered. Its name consists of its kind, and the attempt, checkpoint or timer that
it concerns (`CoordinatorInstruction.order`). The answers of tasks and storage contain these values too. So the cause of
an answer is found without an extra field: it is the event from which the order followed. `CauseTracker`
(`tidegate/actors/drivers/event_log_writer.py`) stores the causes, also across generations of the coordinator.

Some events answer no order and begin a chain of causes (`begins`): users request something, tasks fail or request
splits, processes hang, sources reach their end, storage does not answer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.protocol.task_reports import NO_METRICS, SnapshotMetrics, StateOrigin
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind, SubtaskState, TableHead
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation

OrderName = tuple[str, int | str]
"""The name of an order: its kind, such as "commit", and the id of its subject, such as the checkpoint id."""

ANSWERED_BY_MANY = ("trigger", "complete", "deploy", "ask")
"""Kinds of orders that are sent to many tasks. Each task answers, and an answer may arrive twice."""

STORAGE_AWAY: OrderName = ("storage", 0)
"""The name that connects `StorageCameBack` with the preceding `StorageWentAway` in the chain of causes. It is not an
order.
"""


class Importance(enum.Enum):
    """The importance of an event. It determines in which logs the event is written as a line of text."""

    SILENT = "silent"
    """Appears in no log, because the line about the following decision is enough."""
    DETAIL = "detail"
    """Appears in logs at level DEBUG: it happens for every task at every checkpoint."""
    NEWS = "news"
    """Appears in every log, at level INFO."""
    TROUBLE = "trouble"
    """Appears in every log, as a warning."""


class _Event:
    """Base class of the coordinator's events."""

    __slots__ = ()
    begins: ClassVar[bool] = False
    """True if the event may begin a chain of causes, because it answers no order."""
    importance: ClassVar[Importance] = Importance.SILENT
    about_restart: ClassVar[bool] = False
    """True if `tidegate events --restarts` shows the event."""

    def describe(self) -> str:
        """Returns one line of text for people that describes the event."""
        raise NotImplementedError

    @property
    def answers(self) -> tuple[OrderName, ...]:
        """Returns the names of the orders that the event may answer. If there are two, the order that was given first
        counts.
        """
        return ()


# --- the job and its coordinator --------------------------------------------------------------------------------------


@wire
@dataclass(frozen=True, slots=True)
class JobSubmitted(_Event):
    """A job was submitted. It is the first event of a log."""

    at_ms: int
    spec: JobSpec
    begins = True

    def describe(self) -> str:
        start = "afresh" if self.spec.restore is None else f"from {self.spec.restore.pointer}"
        return f"the job was submitted, to start {start}"


@wire
@dataclass(frozen=True, slots=True)
class CoordinatorStarted(_Event):
    """A new generation of the coordinator has replayed the log and starts. Answers to the previous generation may be
    lost.
    """

    at_ms: int
    generation: Generation
    begins = True

    def describe(self) -> str:
        return (
            f"coordinator generation {self.generation} took over" if self.generation > 1 else "the coordinator started"
        )


@wire
@dataclass(frozen=True, slots=True)
class CancelRequested(_Event):
    """A user requested the cancellation of the job."""

    at_ms: int
    begins = True
    importance = Importance.NEWS

    def describe(self) -> str:
        return "a user cancelled the job"


@wire
@dataclass(frozen=True, slots=True)
class TimerFired(_Event):
    """A timer of the machine has fired. The machine ignores it if the timer is outdated."""

    at_ms: int
    timer: str

    def describe(self) -> str:
        name, _, about = self.timer.partition(":")
        return _TIMERS.get(name, f"timer {self.timer} was due").format(about)

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("timer", self.timer),)


_TIMERS = {
    "restart": "it was time to start attempt {}",
    "deploy": "tasks of attempt {} were not ready in time",
    "deploy-delayed": "tasks that wait for storage were not ready in time",
    "hooks": "it was time to call the master hooks of attempt {} again",
    "tables": "it was time to claim the output tables for attempt {} again",
    "ending": "tasks did not end in time",
    "copies": "the folders of failed savepoints could not be deleted in time, and are left as they are",
    "ask": "it was time to request the status of tasks again, for coordinator generation {}",
    "adopt": "tasks had not answered coordinator generation {} in time",
    "periodic": "a periodic checkpoint was due in attempt {}",
    "final": "the final checkpoint was due in attempt {}",
    "leave": "it was time to notify tasks of attempt {} again that they may commit and end",
    "timeout": "checkpoint {} had taken too long",
    "export": "it was time to write the folder of savepoint {} again",
    "copy": "the copy of savepoint {} had taken too long",
    "void": "it was time to find out again what became of checkpoint {}",
    "commit": "it was time to commit the output of checkpoint {} again",
    "discard": "it was time to delete checkpoint {} again",
    "discard-savepoint": "it was time to delete the folder of savepoint {} again",
}


@wire
@dataclass(frozen=True, slots=True)
class StorageWentAway(_Event):
    """The event log cannot be written. The machine decides nothing until `StorageCameBack`."""

    at_ms: int
    error: str
    begins = True
    importance = Importance.TROUBLE

    def describe(self) -> str:
        return f"the event log could not be written: {self.error}"


@wire
@dataclass(frozen=True, slots=True)
class StorageCameBack(_Event):
    """The event log can be written again."""

    at_ms: int
    importance = Importance.NEWS

    def describe(self) -> str:
        return "the event log could be written again"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (STORAGE_AWAY,)


@wire
@dataclass(frozen=True, slots=True)
class ProcessGivenUp(_Event):
    """The coordinator gave up a process: it gets no more tasks and is killed, because it hangs or is unusable.

    No process of a running job is killed before this event is in the log: a coordinator that was cut off from the
    network takes every process for hung, but cannot write to the log. `process` is an id that is unique across
    coordinators. `reason` describes the process and the failure for people.
    """

    at_ms: int
    process: str
    reason: str
    begins = True
    importance = Importance.TROUBLE
    about_restart = True

    def describe(self) -> str:
        return f"a process was given up: {self.reason}"


# --- tasks ------------------------------------------------------------------------------------------------------------


@wire
@dataclass(frozen=True, slots=True)
class TaskReady(_Event):
    """A task has restored its state and opened its operators."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    origin: StateOrigin | None = None
    """The place from which the task's state was restored. None if the task started without state."""
    splits: tuple[str, ...] | None = ()
    """The ids of the splits that a task of a source with assigned splits has. None if the task was restored as
    finished, so that all its splits are read.
    """
    rows_read: int = 0
    """For a source task: the number of rows of its splits that were read before the checkpoint from which it starts."""
    importance = Importance.DETAIL

    def describe(self) -> str:
        return f"task {self.task} of attempt {self.attempt} was ready"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("deploy", self.attempt),)


@wire
@dataclass(frozen=True, slots=True)
class RestoreDelayed(_Event):
    """A task cannot read its state, because storage does not answer. The task keeps trying."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    importance = Importance.TROUBLE

    def describe(self) -> str:
        return f"task {self.task} of attempt {self.attempt} could not read its state, and keeps trying"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("deploy", self.attempt),)


@wire
@dataclass(frozen=True, slots=True)
class TaskFailed(_Event):
    """A task raised an exception, or its process died."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    reason: str
    permanent: bool = False
    """True if the program itself is wrong, so that no restart can help."""
    fingerprint: str = ""
    """Text that is equal for two failures with the same error at the same row. Empty if unknown."""
    begins = True
    importance = Importance.TROUBLE
    about_restart = True

    def describe(self) -> str:
        # The reason may have several lines, such as the frames of a function; a decision is one line of the log.
        reason = "; ".join(line.strip() for line in self.reason.splitlines())
        return f"task {self.task} of attempt {self.attempt} failed: {reason}"


@wire
@dataclass(frozen=True, slots=True)
class TaskAnswered(_Event):
    """A running task reported its status to a coordinator that took over.

    The task repeats what it had reported to the previous generation, because those events may not be in the log.
    """

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    generation: Generation
    """Generation of the coordinator that the task obeys."""
    started: bool = True
    """True if the task was notified of the start: all tasks of its attempt were ready."""
    ended: bool = False
    """True if the operators of the task have reached the end of their data."""
    finished: bool = False
    """True if the task has finished."""
    covered_by: CheckpointId | None = None
    """The checkpoint whose completion allowed the task to finish, or None."""
    snapshotted: CheckpointId = CheckpointId(0)
    """The newest checkpoint of which the task has taken a snapshot, or 0."""
    collecting: CheckpointId | None = None
    """The checkpoint for which the task has received some, but not all, barriers, or None."""
    importance = Importance.DETAIL

    def describe(self) -> str:
        return f"task {self.task} of attempt {self.attempt} continues under coordinator generation {self.generation}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("ask", self.generation),)


@wire
@dataclass(frozen=True, slots=True)
class SplitsRequested(_Event):
    """A subtask has read all its splits and requests more. It repeats the request until it is answered.

    `first` is the number of splits that the subtask has been given in its attempt so far. It identifies the request, so
    that a repeated request gets the same answer, and a repeated answer is ignored.
    """

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    first: int
    begins = True

    def describe(self) -> str:
        return f"task {self.task} of attempt {self.attempt} requested more splits"


@wire
@dataclass(frozen=True, slots=True)
class WatermarkReported(_Event):
    """A source task reported the lowest watermark of its splits, for the alignment of watermarks between source tasks.

    `watermark_ms` is None if all splits are idle, so that no task waits for them. `waits`: the task reads nothing until
    the watermarks of other tasks have advanced. The event is neither logged nor given to the machine, because the next
    report makes up for a lost one.
    """

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    watermark_ms: int | None
    waits: bool
    begins = True

    def describe(self) -> str:
        return f"task {self.task} of attempt {self.attempt} reported its watermark"


@wire
@dataclass(frozen=True, slots=True)
class TaskReachedEndOfData(_Event):
    """The operators of a task have reached the end of their data and were closed."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    stop: CheckpointId | None = None
    """The savepoint that ended the data, or None if the source reached its end."""
    begins = True
    importance = Importance.DETAIL

    def describe(self) -> str:
        if self.stop is not None:
            return f"task {self.task} of attempt {self.attempt} was stopped, with savepoint {self.stop}"
        return f"task {self.task} of attempt {self.attempt} reached the end of its data"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return () if self.stop is None else (("trigger", self.stop),)


@wire
@dataclass(frozen=True, slots=True)
class TaskFinished(_Event):
    """A task has finished: its data has ended, and a completed checkpoint covers its output."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    covered_by: CheckpointId | None = None
    """The checkpoint whose completion allowed the task to finish, or None."""
    importance = Importance.DETAIL

    def describe(self) -> str:
        return f"task {self.task} of attempt {self.attempt} finished"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return () if self.covered_by is None else (("complete", self.covered_by),)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@wire
@dataclass(frozen=True, slots=True)
class CheckpointRequested(_Event):
    """A user requested a checkpoint, a savepoint, or (kinds SUSPEND and TERMINATE) a stop of the job with a savepoint.

    `request` is the id under which the user is answered. `target` is the URL below which the savepoint gets a folder,
    or None for a checkpoint.
    """

    at_ms: int
    request: str
    kind: SnapshotKind = SnapshotKind.CHECKPOINT
    target: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL
    begins = True
    importance = Importance.NEWS

    def describe(self) -> str:
        where = f" in {self.target}, {self.savepoint_format.value}" if self.target else ""
        return f"a user requested a {self.kind.words}{where} (request {self.request})"


@wire
@dataclass(frozen=True, slots=True)
class CheckpointAcknowledged(_Event):
    """A task has stored its part of a checkpoint durably. `kind` is the kind of checkpoint for which it took its
    snapshot.
    """

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    checkpoint_id: CheckpointId
    state: SubtaskState
    metrics: SnapshotMetrics = NO_METRICS
    kind: SnapshotKind = SnapshotKind.CHECKPOINT

    def describe(self) -> str:
        return f"task {self.task} acknowledged checkpoint {self.checkpoint_id}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("trigger", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDeclined(_Event):
    """A task has declined a checkpoint, because it cannot take part."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    checkpoint_id: CheckpointId
    reason: CheckpointFailureReason
    message: str
    away_ms: int = 0
    """With the reason STORAGE_AWAY: how long, in ms, storage could not be written. Otherwise 0."""
    importance = Importance.TROUBLE

    def describe(self) -> str:
        return f"checkpoint {self.checkpoint_id} was declined by task {self.task}: {self.message}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("trigger", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDamaged(_Event):
    """A part of the checkpoint from which the attempt starts is damaged or missing, so that no attempt can start from
    it.

    An outage of storage is not damage.
    """

    at_ms: int
    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    reason: str
    importance = Importance.TROUBLE
    about_restart = True

    def describe(self) -> str:
        return (
            f"checkpoint {self.checkpoint_id}, from which attempt {self.attempt} was to start, is damaged: "
            f"{self.reason}"
        )

    @property
    def answers(self) -> tuple[OrderName, ...]:
        # Hooks are restored before tasks are deployed: until then a hook has found the damage.
        return ("deploy", self.attempt), ("restore-hooks", self.attempt)


@wire
@dataclass(frozen=True, slots=True)
class MetadataWritten(_Event):
    """`_metadata` of a checkpoint exists, so the checkpoint is complete."""

    at_ms: int
    checkpoint_id: CheckpointId

    def describe(self) -> str:
        return f"checkpoint {self.checkpoint_id} was completed"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("metadata", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class CheckpointVoided(_Event):
    """A tombstone exists under the name of the checkpoint's `_metadata`, so the checkpoint can never complete."""

    at_ms: int
    checkpoint_id: CheckpointId
    importance = Importance.NEWS

    def describe(self) -> str:
        return f"checkpoint {self.checkpoint_id} was voided: it can never be completed"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("metadata", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class MetadataWriteFailed(_Event):
    """The write of `_metadata` (or of the tombstone) has an unknown result.

    `away_ms`: how long, in ms, writes have failed.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    away_ms: int = 0
    importance = Importance.TROUBLE

    def describe(self) -> str:
        return f"it is not known whether checkpoint {self.checkpoint_id} is complete: {self.error}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("metadata", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class SinksCommitted(_Event):
    """The sink files of a completed checkpoint are committed. `heads` has the newest entry in the log of each table."""

    at_ms: int
    checkpoint_id: CheckpointId
    heads: tuple[TableHead, ...] = ()
    importance = Importance.DETAIL

    def describe(self) -> str:
        return f"the output of checkpoint {self.checkpoint_id} was committed"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("commit", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class SinkCommitFailed(_Event):
    """The commit of a completed checkpoint's sink files has failed or has an unknown result.

    `fenced`: another job has claimed the table, so that the files are not committed. `away_ms`: how long, in ms,
    commits have failed. `permanent`: a retry cannot help, because the table has changed or a user's sink hangs.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    fenced: bool = False
    away_ms: int = 0
    permanent: bool = False
    importance = Importance.TROUBLE

    def describe(self) -> str:
        return f"the output of checkpoint {self.checkpoint_id} could not be committed: {self.error}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("commit", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDiscarded(_Event):
    """The files of a checkpoint are deleted from storage."""

    at_ms: int
    checkpoint_id: CheckpointId
    importance = Importance.DETAIL

    def describe(self) -> str:
        return f"checkpoint {self.checkpoint_id} was deleted"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("discard", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDiscardFailed(_Event):
    """The deletion of a checkpoint has failed, and files may be left. `away_ms`: how long, in ms, deletions have
    failed.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    away_ms: int = 0
    importance = Importance.DETAIL

    def describe(self) -> str:
        return f"checkpoint {self.checkpoint_id} could not be deleted: {self.error}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("discard", self.checkpoint_id),)


# --- folders of savepoints --------------------------------------------------------------------------------------------


@wire
@dataclass(frozen=True, slots=True)
class SavepointWritten(_Event):
    """The copy of a savepoint into the user's folder `path` is complete. A job can be restored from this copy."""

    at_ms: int
    checkpoint_id: CheckpointId
    path: str
    importance = Importance.NEWS

    def describe(self) -> str:
        return f"the folder of savepoint {self.checkpoint_id} was written: {self.path}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("savepoint", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class SavepointWriteFailed(_Event):
    """The copy of a savepoint has failed, and its folder is not usable.

    `permanent`: the folder itself cannot be used, so that a retry cannot help. `away_ms`: how long, in ms, writes have
    failed.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    permanent: bool = False
    away_ms: int = 0
    importance = Importance.TROUBLE

    def describe(self) -> str:
        return f"the folder of savepoint {self.checkpoint_id} could not be written: {self.error}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("savepoint", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class SavepointDiscarded(_Event):
    """The folder of a failed savepoint is deleted, except for the tombstone of a voided savepoint.

    `exported`: the previous coordinator had completed the folder, and its user was not notified. Otherwise the folder
    can never become complete.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    exported: bool = False
    importance = Importance.DETAIL

    def describe(self) -> str:
        completed = ", which the previous coordinator had completed," if self.exported else ""
        return f"the folder of savepoint {self.checkpoint_id}{completed} was deleted"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("discard-savepoint", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class SavepointDiscardFailed(_Event):
    """The deletion of a failed savepoint's folder has failed, and files may be left.

    `away_ms`: how long, in ms, deletions have failed.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    away_ms: int = 0
    importance = Importance.DETAIL

    def describe(self) -> str:
        return f"the folder of savepoint {self.checkpoint_id} could not be deleted: {self.error}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("discard-savepoint", self.checkpoint_id),)


# --- master hooks and tables ------------------------------------------------------------------------------------------


@wire
@dataclass(frozen=True, slots=True)
class HooksTriggered(_Event):
    """Every master hook has answered for a checkpoint. `states` has the name of each hook and the state to store for
    it.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    states: tuple[tuple[str, bytes], ...]
    importance = Importance.DETAIL

    def describe(self) -> str:
        return f"the master hooks answered for checkpoint {self.checkpoint_id}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("hooks", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class HookFailed(_Event):
    """A master hook raised an exception when it was called for a checkpoint."""

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    importance = Importance.TROUBLE

    def describe(self) -> str:
        return f"a master hook failed at checkpoint {self.checkpoint_id}: {self.error}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("hooks", self.checkpoint_id),)


@wire
@dataclass(frozen=True, slots=True)
class HooksRestored(_Event):
    """Every master hook has received its state from the checkpoint from which the attempt starts."""

    at_ms: int
    attempt: AttemptNumber
    importance = Importance.DETAIL

    def describe(self) -> str:
        return f"the master hooks were restored for attempt {self.attempt}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("restore-hooks", self.attempt),)


@wire
@dataclass(frozen=True, slots=True)
class HookRestoreFailed(_Event):
    """The restore of a master hook failed: it raised an exception, or its state could not be read.

    `away_ms`: how long, in ms, storage has not answered, or None if storage is not the cause.
    """

    at_ms: int
    attempt: AttemptNumber
    error: str
    away_ms: int | None = None
    importance = Importance.TROUBLE
    about_restart = True

    def describe(self) -> str:
        return f"the master hooks could not be restored for attempt {self.attempt}: {self.error}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("restore-hooks", self.attempt),)


@wire
@dataclass(frozen=True, slots=True)
class TablesTakenBack(_Event):
    """Every output table was reset to the checkpoint from which the attempt starts.

    `heads` has the newest entry in the log of each table.
    """

    at_ms: int
    attempt: AttemptNumber
    heads: tuple[TableHead, ...] = ()
    importance = Importance.NEWS
    about_restart = True

    def describe(self) -> str:
        return f"the output tables were claimed for attempt {self.attempt}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("tables", self.attempt),)


@wire
@dataclass(frozen=True, slots=True)
class TablesNotTakenBack(_Event):
    """An output table could not be reset to an older checkpoint. `fenced`: another job has claimed a table.

    `away_ms`: how long, in ms, storage has not answered, or None if storage is not the cause. `permanent`: neither a
    retry nor a restart can help.
    """

    at_ms: int
    attempt: AttemptNumber
    error: str
    fenced: bool = False
    away_ms: int | None = None
    permanent: bool = False
    importance = Importance.TROUBLE
    about_restart = True

    def describe(self) -> str:
        return f"the output tables could not be claimed for attempt {self.attempt}: {self.error}"

    @property
    def answers(self) -> tuple[OrderName, ...]:
        return (("tables", self.attempt),)


CoordinatorEvent = (
    JobSubmitted
    | CoordinatorStarted
    | TaskReady
    | RestoreDelayed
    | TaskFailed
    | ProcessGivenUp
    | TaskAnswered
    | SplitsRequested
    | WatermarkReported
    | TaskReachedEndOfData
    | TaskFinished
    | CheckpointRequested
    | CheckpointAcknowledged
    | CheckpointDeclined
    | HooksTriggered
    | HookFailed
    | HooksRestored
    | HookRestoreFailed
    | CheckpointDamaged
    | TablesTakenBack
    | TablesNotTakenBack
    | SavepointWritten
    | SavepointWriteFailed
    | SavepointDiscarded
    | SavepointDiscardFailed
    | MetadataWritten
    | CheckpointVoided
    | MetadataWriteFailed
    | SinksCommitted
    | SinkCommitFailed
    | CheckpointDiscarded
    | CheckpointDiscardFailed
    | CancelRequested
    | TimerFired
    | StorageWentAway
    | StorageCameBack
)
