"""The instructions of the coordinator machine, which `CoordinatorDriver` carries out.

An instruction that cannot be undone contains a permit (`tidegate/storage/checkpoints/permits.py`), which only the code
that made the decision can create. An instruction about a checkpoint raises InvariantError if the permit is for another
checkpoint. Such instructions cannot be encoded: a permit is valid only in the process that created it, and is never
stored.

An instruction that is answered is an *order*, and has a name (`order`). The events that may answer it have the same
name in `CoordinatorEvent.answers`.
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
    """Base class of the coordinator's instructions."""

    __slots__ = ()

    @property
    def order(self) -> OrderName | None:
        """Returns the name of the order, or None for an instruction that is not answered."""
        return None


@wire
@dataclass(frozen=True, slots=True)
class DeployAttempt(_Instruction):
    """Deploys tasks, restored from a checkpoint or without state. Each task answers with `TaskReady`.

    `tasks` are the tasks of whole regions, while other regions continue, or None for every task of the job.
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
    """Notifies tasks that the whole attempt is ready, so that they start to read sources and in-flight input."""

    attempt: AttemptNumber
    tasks: tuple[TaskId, ...]


@wire
@dataclass(frozen=True, slots=True)
class AskTasks(_Instruction):
    """Requests the status of tasks for a new coordinator generation. Each task answers with `TaskAnswered`.

    From then on these tasks obey no older generation.
    """

    attempt: AttemptNumber
    tasks: tuple[TaskId, ...]
    generation: Generation

    @property
    def order(self) -> OrderName:
        return "ask", self.generation


@wire
@dataclass(frozen=True, slots=True)
class CancelAttempt(_Instruction):
    """Stops tasks of this attempt and of older ones. Their later reports are ignored, because of their attempt number.

    `tasks` is None for all tasks of the job.
    """

    attempt: AttemptNumber
    tasks: tuple[TaskId, ...] | None = None


@wire
@dataclass(frozen=True, slots=True)
class TriggerCheckpoint(_Instruction):
    """Triggers a checkpoint in `tasks`, which emit its barriers."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    triggered_at_ms: int
    tasks: tuple[TaskId, ...]
    options: BarrierOptions = ALIGNED_BARRIER
    base: CheckpointId | None = None
    """The completed checkpoint on which incremental snapshots may be based. None for full snapshots."""

    @property
    def order(self) -> OrderName:
        return "trigger", self.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class TriggerHooks(_Instruction):
    """Calls every master hook of the job for a checkpoint, before any task is triggered.

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
    """Passes every master hook its state from a checkpoint, before tasks are deployed.

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
    """Resets every output table to an older checkpoint, because newer checkpoints are damaged.

    Rows that were committed after that checkpoint are processed again. `reason` names the skipped checkpoints and their
    damage. `heads` has the newest known entry in the log of each table. Answered by `TablesTakenBack` or
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
    """Copies all files of a savepoint into a new folder below the URL `target`, with `_metadata` as the last file.

    Every task must have acknowledged the savepoint. `complete`: the checkpoint is complete, and its own `_metadata` is
    copied. `contested`: a lost coordinator may still be copying the same savepoint. Answered by `SavepointWritten` or
    `SavepointWriteFailed`.
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
    """Stops the copy of a savepoint that was aborted, and deletes the files that were copied.

    Its `WriteSavepoint` is still answered. A copy that waits for storage stops when storage answers.
    """

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class DiscardSavepoint(_Instruction):
    """Deletes the folder of a savepoint that has failed.

    `voided`: a replaced coordinator may still be copying the savepoint, so a tombstone is created in the folder and is
    not deleted. Answered by `SavepointDiscarded` or `SavepointDiscardFailed`.
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
    """Notifies some tasks that a checkpoint is complete."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    tasks: tuple[TaskId, ...]

    @property
    def order(self) -> OrderName:
        return "complete", self.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class NotifyAborted(_Instruction):
    """Notifies some tasks that a checkpoint was aborted."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class WriteMetadata(_Instruction):
    """Completes a checkpoint by one conditional create of its `_metadata`.

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
    """Creates a tombstone under the name of `_metadata`, unless `_metadata` or a tombstone exists.

    Answered by `MetadataWritten`, `CheckpointVoided` or `MetadataWriteFailed`, like `WriteMetadata`.
    """

    tombstone: CheckpointMetadata

    @property
    def order(self) -> OrderName:
        return "metadata", self.tombstone.checkpoint_id


@dataclass(frozen=True, slots=True)
class CommitSinks(_Instruction):
    """Commits the sink files of a completed checkpoint, once. Answered by `SinksCommitted` or `SinkCommitFailed`.

    `tables`: URLs of tables that get a commit even without new files, because a commit may change which rows they show.
    `heads`: the newest entry of each table's log that the job has seen. A log that lacks this entry has lost entries.
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
    """Deletes the files of a checkpoint. `voided`: the checkpoint has a tombstone, which is not deleted.

    `shared`: the shared files to delete with it. None means all shared files that were written for the checkpoint,
    because it never completed. Answered by `CheckpointDiscarded` or `CheckpointDiscardFailed`.
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
    """Deletes the files of an acknowledgement that was refused. Not answered."""

    checkpoint_id: CheckpointId
    paths: tuple[str, ...]
    permit: DeletePermit = field(kw_only=True)

    def __post_init__(self) -> None:
        self.permit.check(self.checkpoint_id)


@wire
@dataclass(frozen=True, slots=True)
class KillProcess(_Instruction):
    """Kills a process that gets no more tasks, if it still exists."""

    process: str


@wire
@dataclass(frozen=True, slots=True)
class SetTimer(_Instruction):
    """Requests the event `TimerFired` with this name at `due_at_ms`. A later timer of the same name replaces it."""

    timer: str
    due_at_ms: int

    @property
    def order(self) -> OrderName:
        return "timer", self.timer


@wire
@dataclass(frozen=True, slots=True)
class CompleteRequest(_Instruction):
    """Answers a user's request with `checkpoint_id` (and `path` for a savepoint), or with the reason why it failed.

    `error` is a text for people, and `reason` the matching member of `Reason`. Both are None on success.
    """

    request: str
    checkpoint_id: CheckpointId | None
    error: str | None
    path: str | None = None
    reason: CheckpointFailureReason | None = None


@wire
@dataclass(frozen=True, slots=True)
class EndJob(_Instruction):
    """Ends the job in a terminal status: deletes unreferenced files, and notifies the waiting callers."""

    status: str
    reason: str | None


@wire
@dataclass(frozen=True, slots=True)
class AssignSplits(_Instruction):
    """Assigns splits to a subtask, which reads them in this order. An empty `splits` ends the source for this subtask.

    `first` is the number of splits that the subtask was given before, as in `SplitsRequested`.
    """

    attempt: AttemptNumber
    task: TaskId
    first: int
    splits: tuple[StoredSplit, ...]


@wire
@dataclass(frozen=True, slots=True)
class AnnounceWatermark(_Instruction):
    """Sends a source task the lowest watermark, in ms, of all tasks of its alignment group.

    The machine never gives this instruction. The driver sends it (`WatermarkAligner`), because no lasting decision
    follows from it.
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
