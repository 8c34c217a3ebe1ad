"""The instructions of the coordinator machine: what it asks its runtime to do. `CoordinatorHost` carries them out.

What cannot be taken back carries a permit (`tidegate/storage/checkpoints/permits.py`), which only the decision about
it can
make. An instruction about a checkpoint raises InvariantError if the permit is for another one. These instructions are
no wire types: a permit holds only in the process that gave it, and is stored nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.coordinator.messages.splits import AssignSplits as AssignSplits
from tidegate.protocol.failure_reasons import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import ALIGNED_BARRIER, BarrierOptions
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, Committable, TableHead
from tidegate.storage.checkpoints.permits import CommitPermit, CompletionPermit, DeletePermit, ExportPermit
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId


@wire
@dataclass(frozen=True, slots=True)
class DeployAttempt:
    """Deploy tasks, restored from a checkpoint or fresh. Each answers with `TaskReady`.

    `tasks`: whole regions; the others go on as they are. None: every task of the job.
    """

    attempt: AttemptNumber
    restore: RestorePoint | None
    tasks: tuple[TaskId, ...] | None = None


@wire
@dataclass(frozen=True, slots=True)
class StartTasks:
    """Every task of the attempt is ready: tell them, so that sources read and in-flight input is processed."""

    attempt: AttemptNumber
    tasks: tuple[TaskId, ...]


@wire
@dataclass(frozen=True, slots=True)
class AskTasks:
    """Ask tasks what they are doing; from then on they obey no older generation. Each answers with `TaskAnswered`."""

    attempt: AttemptNumber
    tasks: tuple[TaskId, ...]
    generation: Generation


@wire
@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Stop tasks of this attempt and of older ones. What they still say is ignored, by its attempt number.

    `tasks`: None for every task of the job.
    """

    attempt: AttemptNumber
    tasks: tuple[TaskId, ...] | None = None


@wire
@dataclass(frozen=True, slots=True)
class TriggerCheckpoint:
    """Tell these tasks to start a checkpoint."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    triggered_at_ms: int
    tasks: tuple[TaskId, ...]
    options: BarrierOptions = ALIGNED_BARRIER
    base: CheckpointId | None = None
    """The completed checkpoint that it may be built on."""


@wire
@dataclass(frozen=True, slots=True)
class TriggerHooks:
    """Call every master hook of the job for this checkpoint, before a task hears of it.

    Answered by `HooksTriggered` or `HookFailed`.
    """

    checkpoint_id: CheckpointId
    triggered_at_ms: int


@wire
@dataclass(frozen=True, slots=True)
class RestoreHooks:
    """Give every master hook its state from this checkpoint, before a task is deployed.

    Answered by `HooksRestored`, `HookRestoreFailed` or `CheckpointDamaged`.
    """

    attempt: AttemptNumber
    restore: RestorePoint


@wire
@dataclass(frozen=True, slots=True)
class TakeTablesBack:
    """Claim every table of the job anew, back to an older checkpoint, because newer ones are damaged.

    What was committed after that checkpoint is processed again. `reason` says what was passed over, and why. `heads`:
    what the job knows to be in the log of each table. Answered by `TablesTakenBack` or `TablesNotTakenBack`.
    """

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    reason: str
    heads: tuple[TableHead, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteSavepoint:
    """Copy everything that a fully acknowledged savepoint refers to into a folder of its own under `target`.

    The folder's `_metadata` comes last. Answered by `SavepointWritten` or `SavepointWriteFailed`. `complete`: whether
    the checkpoint is complete, so that its own `_metadata` is what the savepoint gets. `contested`: whether a
    coordinator that was lost may be copying it as well.
    """

    target: str
    metadata: CheckpointMetadata
    complete: bool = False
    contested: bool = False
    permit: ExportPermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.metadata.checkpoint_id)


@wire
@dataclass(frozen=True, slots=True)
class StopCopy:
    """A savepoint was given up while it is being copied: stop, and delete what was written.

    The answer to its `WriteSavepoint` comes all the same. A copy that waits for its storage stops when that answers.
    """

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class DiscardSavepoint:
    """Delete the folder of a savepoint whose checkpoint was given up.

    `voided`: a coordinator that was replaced may still be copying it, so a tombstone is created there, and stays.
    Answered by `SavepointDiscarded` or `SavepointDiscardFailed`.
    """

    target: str
    job_id: JobId
    checkpoint_id: CheckpointId
    voided: bool = False
    permit: DeletePermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.checkpoint_id)


@wire
@dataclass(frozen=True, slots=True)
class NotifyCompleted:
    """Tell these tasks that a checkpoint is complete."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    tasks: tuple[TaskId, ...]


@wire
@dataclass(frozen=True, slots=True)
class NotifyAborted:
    """Tell these tasks that a checkpoint was given up."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Complete a checkpoint by one conditional create of its `_metadata`.

    Answered by `MetadataWritten` (also when the same metadata was there already), by `CheckpointVoided` (a tombstone
    was there) or by `MetadataWriteFailed`.
    """

    metadata: CheckpointMetadata
    permit: CompletionPermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.metadata.checkpoint_id)


@wire
@dataclass(frozen=True, slots=True)
class VoidCheckpoint:
    """Put a tombstone where `_metadata` would be, unless it is there. Answered like `WriteMetadata`."""

    tombstone: CheckpointMetadata


@dataclass(frozen=True, slots=True)
class CommitSinks:
    """Make the sink files of a completed checkpoint visible, once. Answered by `SinksCommitted` or `SinkCommitFailed`.

    `tables` are told of it even if it has no files for them: the commit may change what they show. `heads`: what the
    job knows to be in the log of each table; a log without it has lost entries.
    """

    checkpoint_id: CheckpointId
    committables: tuple[Committable, ...]
    tables: tuple[str, ...] = ()
    heads: tuple[TableHead, ...] = ()
    permit: CommitPermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.checkpoint_id)


@dataclass(frozen=True, slots=True)
class DiscardCheckpoint:
    """Delete everything of a checkpoint that nothing else refers to. If it was voided, its tombstone stays.

    `shared`: the shared files that go with it. None: all that were written for it, because it never completed. Answered
    by `CheckpointDiscarded` or `CheckpointDiscardFailed`.
    """

    checkpoint_id: CheckpointId
    voided: bool
    shared: tuple[str, ...] | None = None
    permit: DeletePermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.checkpoint_id)


@dataclass(frozen=True, slots=True)
class DiscardFiles:
    """Delete the files of an acknowledgement that was refused. Not answered."""

    checkpoint_id: CheckpointId
    paths: tuple[str, ...]
    permit: DeletePermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.checkpoint_id)


@wire
@dataclass(frozen=True, slots=True)
class KillProcess:
    """End a process that was given up, if it is still there."""

    process: str


@wire
@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send a `TimerFired` of this name at this time. A later timer of the same name replaces it."""

    timer: str
    due_at_ms: int


@wire
@dataclass(frozen=True, slots=True)
class CompleteRequest:
    """Answer a user's request: `checkpoint_id` (and `path`, for a savepoint), or why there is none.

    `error` is for people, `reason` that of the closed list.
    """

    request: str
    checkpoint_id: CheckpointId | None
    error: str | None
    path: str | None = None
    reason: CheckpointFailureReason | None = None


@wire
@dataclass(frozen=True, slots=True)
class EndJob:
    """The job has reached a terminal status; sweep what nobody refers to and tell whoever waits."""

    status: str
    reason: str | None


CoordinatorInstruction = (
    DeployAttempt
    | StartTasks
    | AskTasks
    | AssignSplits
    | CancelAttempt
    | KillProcess
    | TriggerHooks
    | RestoreHooks
    | TakeTablesBack
    | TriggerCheckpoint
    | WriteSavepoint
    | StopCopy
    | DiscardSavepoint
    | NotifyCompleted
    | NotifyAborted
    | WriteMetadata
    | VoidCheckpoint
    | CommitSinks
    | DiscardCheckpoint
    | DiscardFiles
    | SetTimer
    | CompleteRequest
    | EndJob
)
