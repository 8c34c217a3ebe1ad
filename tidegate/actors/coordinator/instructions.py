"""The instructions of the coordinator machine: what it orders its runtime to do. `CoordinatorDriver` carries them out.

What cannot be taken back carries a permit (`tidegate/storage/checkpoints/permits.py`), which only the decision about it
can make. An instruction about a checkpoint raises InvariantError if the permit is for another one. These instructions
are no wire types: a permit holds only in the process that gave it, and is stored nowhere.

An instruction that is answered is an *order*, and has a name (`order`). The events that may answer it name it as well
(`CoordinatorEvent.answers`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.actors.coordinator.events import OrderName
from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import ALIGNED_BARRIER, BarrierOptions
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, Committable, StoredSplit, TableHead
from tidegate.storage.checkpoints.permits import CommitPermit, CompletionPermit, DeletePermit, ExportPermit
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId


class _Instruction:
    """The base of all instructions."""

    __slots__ = ()

    @property
    def order(self) -> OrderName | None:
        """The name of the order; None for an instruction that is not answered."""
        return None


@wire
@dataclass(frozen=True, slots=True)
class DeployAttempt(_Instruction):
    """Deploy tasks, restored from a checkpoint or fresh. Each answers with `TaskReady`.

    `tasks`: whole regions, while other regions continue. None: every task of the job.
    """

    attempt: AttemptNumber
    restore: RestorePoint | None
    tasks: tuple[TaskId, ...] | None = None

    @property
    def order(self) -> OrderName:
        return "deploy", self.attempt


@wire
@dataclass(frozen=True, slots=True)
class StartTasks(_Instruction):
    """Notify tasks that every task of the attempt is ready, so that sources read and in-flight input is processed."""

    attempt: AttemptNumber
    tasks: tuple[TaskId, ...]


@wire
@dataclass(frozen=True, slots=True)
class AskTasks(_Instruction):
    """Request the status of tasks, which then obey no older generation. Each answers with `TaskAnswered`."""

    attempt: AttemptNumber
    tasks: tuple[TaskId, ...]
    generation: Generation

    @property
    def order(self) -> OrderName:
        return "ask", self.generation


@wire
@dataclass(frozen=True, slots=True)
class CancelAttempt(_Instruction):
    """Stop tasks of this attempt and of older ones. What they still report is ignored, by its attempt number.

    `tasks`: None for every task of the job.
    """

    attempt: AttemptNumber
    tasks: tuple[TaskId, ...] | None = None


@wire
@dataclass(frozen=True, slots=True)
class TriggerCheckpoint(_Instruction):
    """Trigger a checkpoint in these tasks."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    triggered_at_ms: int
    tasks: tuple[TaskId, ...]
    options: BarrierOptions = ALIGNED_BARRIER
    base: CheckpointId | None = None
    """The completed checkpoint that it may be built on."""

    @property
    def order(self) -> OrderName:
        return "trigger", self.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class TriggerHooks(_Instruction):
    """Call every master hook of the job for this checkpoint, before any task is triggered.

    Answered by `HooksTriggered` or `HookFailed`.
    """

    checkpoint_id: CheckpointId
    triggered_at_ms: int

    @property
    def order(self) -> OrderName:
        return "hooks", self.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class RestoreHooks(_Instruction):
    """Give every master hook its state from this checkpoint, before a task is deployed.

    Answered by `HooksRestored`, `HookRestoreFailed` or `CheckpointDamaged`.
    """

    attempt: AttemptNumber
    restore: RestorePoint

    @property
    def order(self) -> OrderName:
        return "restore-hooks", self.attempt


@wire
@dataclass(frozen=True, slots=True)
class TakeTablesBack(_Instruction):
    """Claim every table of the job anew, back to an older checkpoint, because newer ones are damaged.

    What was committed after that checkpoint is processed again. `reason`: what was passed over, and why. `heads`: how
    far the log of each table has got, as far as the job has seen. Answered by `TablesTakenBack` or
    `TablesNotTakenBack`.
    """

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    reason: str
    heads: tuple[TableHead, ...] = ()

    @property
    def order(self) -> OrderName:
        return "tables", self.attempt


@dataclass(frozen=True, slots=True)
class WriteSavepoint(_Instruction):
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

    @property
    def order(self) -> OrderName:
        return "savepoint", self.metadata.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class StopCopy(_Instruction):
    """A savepoint was given up while it is being copied: stop, and delete what was written.

    The answer to its `WriteSavepoint` comes all the same. A copy that waits for its storage stops when that answers.
    """

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class DiscardSavepoint(_Instruction):
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

    @property
    def order(self) -> OrderName:
        return "discard-savepoint", self.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class NotifyCompleted(_Instruction):
    """Notify these tasks that a checkpoint is complete."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    tasks: tuple[TaskId, ...]

    @property
    def order(self) -> OrderName:
        return "complete", self.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class NotifyAborted(_Instruction):
    """Notify these tasks that a checkpoint was given up."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class WriteMetadata(_Instruction):
    """Complete a checkpoint by one conditional create of its `_metadata`.

    Answered by `MetadataWritten` (also when the same metadata was there already), by `CheckpointVoided` (a tombstone
    was there) or by `MetadataWriteFailed`.
    """

    metadata: CheckpointMetadata
    permit: CompletionPermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.metadata.checkpoint_id)

    @property
    def order(self) -> OrderName:
        return "metadata", self.metadata.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class VoidCheckpoint(_Instruction):
    """Put a tombstone where `_metadata` would be, unless it is there. Answered like `WriteMetadata`."""

    tombstone: CheckpointMetadata

    @property
    def order(self) -> OrderName:
        return "metadata", self.tombstone.checkpoint_id


@dataclass(frozen=True, slots=True)
class CommitSinks(_Instruction):
    """Make the sink files of a completed checkpoint visible, once. Answered by `SinksCommitted` or `SinkCommitFailed`.

    `tables`: the tables that get a commit even without new files, because a commit may change which rows they show.
    `heads`: the newest entry of each table's log that the job has seen. A log that lacks it has lost entries.
    """

    checkpoint_id: CheckpointId
    committables: tuple[Committable, ...]
    tables: tuple[str, ...] = ()
    heads: tuple[TableHead, ...] = ()
    permit: CommitPermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.checkpoint_id)

    @property
    def order(self) -> OrderName:
        return "commit", self.checkpoint_id


@dataclass(frozen=True, slots=True)
class DiscardCheckpoint(_Instruction):
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

    @property
    def order(self) -> OrderName:
        return "discard", self.checkpoint_id


@dataclass(frozen=True, slots=True)
class DiscardFiles(_Instruction):
    """Delete the files of an acknowledgement that was refused. Not answered."""

    checkpoint_id: CheckpointId
    paths: tuple[str, ...]
    permit: DeletePermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.checkpoint_id)


@wire
@dataclass(frozen=True, slots=True)
class KillProcess(_Instruction):
    """End a process that was given up, if it is still there."""

    process: str


@wire
@dataclass(frozen=True, slots=True)
class SetTimer(_Instruction):
    """Send a `TimerFired` of this name at this time. A later timer of the same name replaces it."""

    timer: str
    due_at_ms: int

    @property
    def order(self) -> OrderName:
        return "timer", self.timer


@wire
@dataclass(frozen=True, slots=True)
class CompleteRequest(_Instruction):
    """Answer a user's request: `checkpoint_id` (and `path`, for a savepoint), or why there is none.

    `error` is for people, `reason` is from the closed list.
    """

    request: str
    checkpoint_id: CheckpointId | None
    error: str | None
    path: str | None = None
    reason: CheckpointFailureReason | None = None


@wire
@dataclass(frozen=True, slots=True)
class EndJob(_Instruction):
    """The job has reached a terminal status: sweep unreferenced files, and notify the waiting callers."""

    status: str
    reason: str | None


@wire
@dataclass(frozen=True, slots=True)
class AssignSplits(_Instruction):
    """Give a subtask these splits, to be read in this order. An empty `splits` ends the source for it.

    `first` is the number of the first split, as in `SplitsRequested`.
    """

    attempt: AttemptNumber
    task: TaskId
    first: int
    splits: tuple[StoredSplit, ...]


@wire
@dataclass(frozen=True, slots=True)
class AnnounceWatermark(_Instruction):
    """Send a source task the lowest watermark of its group. The machine never gives this instruction.

    The driver sends it (`WatermarkAligner`): no decision that lasts follows from it.
    """

    attempt: AttemptNumber
    task: TaskId
    watermark_ms: int


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
