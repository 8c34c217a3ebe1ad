"""The events of the coordinator machine: facts that it is told. `at_ms` is when, by the clock of who tells.

`CoordinatorHost` logs each before it does anything that follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.job.job_spec import JobSpec
from tidegate.actors.coordinator.messages.outages import StorageCameBack as StorageCameBack
from tidegate.actors.coordinator.messages.outages import StorageWentAway as StorageWentAway
from tidegate.actors.coordinator.messages.splits import SplitsRequested as SplitsRequested
from tidegate.actors.coordinator.messages.takeovers import CoordinatorStarted as CoordinatorStarted
from tidegate.actors.coordinator.messages.takeovers import ProcessGivenUp as ProcessGivenUp
from tidegate.actors.coordinator.messages.takeovers import TaskAnswered as TaskAnswered
from tidegate.actors.coordinator.messages.watermarks import WatermarkReported as WatermarkReported
from tidegate.protocol.failure_reasons import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.protocol.snapshot_metrics import NO_METRICS, SnapshotMetrics
from tidegate.protocol.state_origin import StateOrigin
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind, SubtaskState, TableHead
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId


@wire
@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """The job exists from now on."""

    at_ms: int
    spec: JobSpec


@wire
@dataclass(frozen=True, slots=True)
class TaskReady:
    """A task has restored its state and opened its operators."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    origin: StateOrigin | None = None
    """Where its state comes from; None on a fresh start."""
    splits: tuple[str, ...] | None = ()
    """Of a source whose splits are assigned: those that it has. None: it was restored as finished, so no split is left.
    """
    rows_read: int = 0
    """Of a source: rows of its splits that were read before the checkpoint that it starts from."""


@wire
@dataclass(frozen=True, slots=True)
class RestoreDelayed:
    """A task cannot read its state because storage does not answer. It goes on trying."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId


@wire
@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task raised, or its process died."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    reason: str
    permanent: bool = False
    """Whether the program itself is wrong, so that no restart can help."""
    fingerprint: str = ""
    """Equal to that of the failure before if the same error came back at the same row; empty if that is not known."""


@wire
@dataclass(frozen=True, slots=True)
class TaskReachedEndOfData:
    """A task's operators have finished. `stop`: the savepoint that ended the data; None if that ran dry."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    stop: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A task is over. `covered_by`: the checkpoint whose completion let it go; older logs do not say."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    covered_by: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """A user asks for a checkpoint, a savepoint, or (kinds SUSPEND and TERMINATE) for an end after a savepoint.

    `target`: the url under which the savepoint's own folder is made; None for a checkpoint."""

    at_ms: int
    request: str
    kind: SnapshotKind = SnapshotKind.CHECKPOINT
    target: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL


@wire
@dataclass(frozen=True, slots=True)
class CheckpointAcknowledged:
    """A task's part of a checkpoint is durable. `kind`: the kind of checkpoint that the task took it for."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    checkpoint_id: CheckpointId
    state: SubtaskState
    metrics: SnapshotMetrics = NO_METRICS
    kind: SnapshotKind = SnapshotKind.CHECKPOINT


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDeclined:
    """A task cannot take part in a checkpoint."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    checkpoint_id: CheckpointId
    reason: CheckpointFailureReason
    message: str
    away_ms: int = 0
    """With reason STORAGE_AWAY: for how long nothing could be written."""


@wire
@dataclass(frozen=True, slots=True)
class HooksTriggered:
    """Every master hook has answered for this checkpoint, with the state that it wants to keep."""

    at_ms: int
    checkpoint_id: CheckpointId
    states: tuple[tuple[str, bytes], ...]


@wire
@dataclass(frozen=True, slots=True)
class HookFailed:
    """A master hook raised."""

    at_ms: int
    checkpoint_id: CheckpointId
    error: str


@wire
@dataclass(frozen=True, slots=True)
class HooksRestored:
    """Every master hook has got back its state from the checkpoint that this attempt starts from."""

    at_ms: int
    attempt: AttemptNumber


@wire
@dataclass(frozen=True, slots=True)
class HookRestoreFailed:
    """A master hook raised, or its state could not be read.

    `away_ms`: how long storage has not answered; None where that is not the cause.
    """

    at_ms: int
    attempt: AttemptNumber
    error: str
    away_ms: int | None = None


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDamaged:
    """A part of the checkpoint that this attempt starts from is damaged or gone: nobody can start from it.

    A storage that does not answer is no damage.
    """

    at_ms: int
    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    reason: str


@wire
@dataclass(frozen=True, slots=True)
class TablesTakenBack:
    """Every table of the job is taken back to the checkpoint that this attempt starts from.

    `heads`: how far the log of each table has got.
    """

    at_ms: int
    attempt: AttemptNumber
    heads: tuple[TableHead, ...] = ()


@wire
@dataclass(frozen=True, slots=True)
class TablesNotTakenBack:
    """Some table of the job may not be taken back. `fenced`: another job has claimed one.

    `away_ms`: for how long storage has not answered; None where that is not the cause. `permanent`: trying again, or
    starting anew, cannot help.
    """

    at_ms: int
    attempt: AttemptNumber
    error: str
    fenced: bool = False
    away_ms: int | None = None
    permanent: bool = False


@wire
@dataclass(frozen=True, slots=True)
class SavepointWritten:
    """The savepoint's own folder is whole; `path` is where a job can be restored from."""

    at_ms: int
    checkpoint_id: CheckpointId
    path: str


@wire
@dataclass(frozen=True, slots=True)
class SavepointWriteFailed:
    """The savepoint's own folder could not be written; nothing usable is left of it.

    `permanent`: the folder itself is unfit, so that trying again cannot help. `away_ms`: for how long that has been so.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    permanent: bool = False
    away_ms: int = 0


@wire
@dataclass(frozen=True, slots=True)
class SavepointDiscarded:
    """Nothing is left of the folder of a savepoint that had failed, but for the tombstone of one that was voided.

    `exported`: the coordinator before had made it whole, which nobody was told. Else it can never become whole.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    exported: bool = False


@wire
@dataclass(frozen=True, slots=True)
class SavepointDiscardFailed:
    """Something of the folder of a savepoint that had failed may be left. `away_ms`: for how long that has been so."""

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    away_ms: int = 0


@wire
@dataclass(frozen=True, slots=True)
class MetadataWritten:
    """`_metadata` of this checkpoint is there: it is complete."""

    at_ms: int
    checkpoint_id: CheckpointId


@wire
@dataclass(frozen=True, slots=True)
class CheckpointVoided:
    """A tombstone stands in the place of `_metadata`: this checkpoint can never complete."""

    at_ms: int
    checkpoint_id: CheckpointId


@wire
@dataclass(frozen=True, slots=True)
class MetadataWriteFailed:
    """It is not known whether `_metadata` (or the tombstone) was written. `away_ms`: for how long that has been so."""

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    away_ms: int = 0


@wire
@dataclass(frozen=True, slots=True)
class SinksCommitted:
    """The sink files of a completed checkpoint are visible. `heads`: how far the log of each table has got."""

    at_ms: int
    checkpoint_id: CheckpointId
    heads: tuple[TableHead, ...] = ()


@wire
@dataclass(frozen=True, slots=True)
class SinkCommitFailed:
    """It is not known whether the sink files of a completed checkpoint are visible.

    `fenced`: they are not, because another job has claimed the table. `away_ms`: for how long commits have failed.
    `permanent`: trying again cannot help, as the table itself has changed, or a sink of the user's hangs.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    fenced: bool = False
    away_ms: int = 0
    permanent: bool = False


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDiscarded:
    """Nothing of this checkpoint is left in storage."""

    at_ms: int
    checkpoint_id: CheckpointId


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDiscardFailed:
    """Something of this checkpoint may be left in storage. `away_ms`: for how long its deletion has failed."""

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    away_ms: int = 0


@wire
@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A user cancels the job."""

    at_ms: int


@wire
@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that the machine has set is due. It is ignored if what it was set for is over."""

    at_ms: int
    timer: str


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
