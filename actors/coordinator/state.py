"""Everything the coordinator remembers: the fold over its event log, encodable so that the fold can be stored."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tidegate.actors.coordinator.spec import JobSpec
from tidegate.actors.identity import TaskId
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, OperatorUid
from tidegate.storage.metadata import CheckpointMetadata, Committable, SubtaskState

TaskSet = dict[TaskId, None]
"""Tasks in the order in which they came: a set that the codec knows and that grows in place."""


@wire
class JobStatus(enum.Enum):
    """Where a job is in its life. The last three are terminal."""

    CREATED = "created"
    DEPLOYING = "deploying"
    RUNNING = "running"
    RESTARTING = "restarting"
    ENDING = "ending"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether nothing follows."""
        return self in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELLED)


@wire
class PendingPhase(enum.Enum):
    """COLLECTING acknowledgements, then WRITING `_metadata`; VOIDING when it is not known whether that happened."""

    COLLECTING = "collecting"
    WRITING = "writing"
    VOIDING = "voiding"


@wire
class AcknowledgeResult(enum.Enum):
    """What became of an acknowledgement (C4)."""

    SUCCESS = "success"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    DISCARDED = "discarded"


@wire
@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that was started and is neither complete nor given up."""

    checkpoint_id: CheckpointId
    attempt: AttemptNumber
    triggered_at_ms: int
    waiting: TaskSet
    """Tasks of the plan that have not acknowledged yet."""
    finished: tuple[TaskId, ...] = ()
    """Tasks that had finished when it was triggered: covered, with nothing to acknowledge."""
    acknowledged: dict[TaskId, SubtaskState] = field(default_factory=dict)
    phase: PendingPhase = PendingPhase.COLLECTING
    metadata: CheckpointMetadata | None = None
    failures: int = 0
    requests: tuple[str, ...] = ()

    def acknowledge(self, task: TaskId, state: SubtaskState) -> AcknowledgeResult:
        """Take in one task's part."""
        if task in self.acknowledged:
            return AcknowledgeResult.DUPLICATE
        if task not in self.waiting:
            return AcknowledgeResult.UNKNOWN
        del self.waiting[task]
        self.acknowledged[task] = state
        return AcknowledgeResult.SUCCESS

    @property
    def fully_acknowledged(self) -> bool:
        """Whether every task of the plan has acknowledged (invariant 4)."""
        return not self.waiting


@wire
@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A checkpoint whose `_metadata` is written. Its state handles are in there, not here."""

    checkpoint_id: CheckpointId
    triggered_at_ms: int
    completed_at_ms: int
    size_bytes: int
    final: bool


@wire
@dataclass(slots=True)
class SinkCommit:
    """Sink files of a completed checkpoint that are not known to be visible yet."""

    checkpoint_id: CheckpointId
    committables: tuple[Committable, ...]
    failures: int = 0


@wire
@dataclass(slots=True)
class CoordinatorState:
    """The whole memory of a coordinator."""

    spec: JobSpec | None = None
    status: JobStatus = JobStatus.CREATED
    generation: Generation = Generation(0)
    attempt: AttemptNumber = AttemptNumber(-1)
    ready: TaskSet = field(default_factory=dict)
    ended: TaskSet = field(default_factory=dict)
    """Tasks whose operators have finished."""
    finished: TaskSet = field(default_factory=dict)
    """Tasks that are over."""
    next_checkpoint_id: CheckpointId = CheckpointId(1)
    pending: dict[CheckpointId, PendingCheckpoint] = field(default_factory=dict)
    completed: tuple[CompletedCheckpoint, ...] = ()
    commits: tuple[SinkCommit, ...] = ()
    committed_files: dict[tuple[TaskId, OperatorUid], int] = field(default_factory=dict)
    """How many files of each sink subtask of this attempt belong to completed checkpoints."""
    discards: dict[CheckpointId, bool] = field(default_factory=dict)
    """Checkpoints to delete, and whether each was voided (its tombstone stays)."""
    discard_failures: dict[CheckpointId, int] = field(default_factory=dict)
    requests: tuple[str, ...] = ()
    """Requests for a checkpoint that has not been started."""
    due: bool = False
    """A periodic checkpoint was due while another one was pending."""
    restart_due: bool = False
    failure_times_ms: tuple[int, ...] = ()
    consecutive_failures: int = 0
    """Checkpoints that failed since the last one completed."""
    failed_checkpoints: int = 0
    completed_checkpoints: int = 0
    last_completed_at_ms: int = -(2**62)
    last_failure: str | None = None
    ending_status: JobStatus | None = None
    ending_reason: str | None = None
    gave_up: bool = False
    """Storage did not answer within the allowed attempts: the job ends without waiting for it."""
