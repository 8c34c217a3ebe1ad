"""Facts that the coordinator is told. Each is logged before anything that follows from it is done."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.spec import JobSpec
from tidegate.actors.identity import TaskId
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation
from tidegate.storage.metadata import SubtaskState


@wire
@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """The job exists from now on."""

    at_ms: int
    spec: JobSpec


@wire
@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """A coordinator incarnation has taken over and replayed the log. What ran before is lost to it."""

    at_ms: int
    generation: Generation


@wire
@dataclass(frozen=True, slots=True)
class TaskReady:
    """A task has restored its state and opened its operators."""

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


@wire
@dataclass(frozen=True, slots=True)
class TaskReachedEndOfData:
    """A task's operators have finished."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId


@wire
@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A task is over."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId


@wire
@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """A user asks for a checkpoint."""

    at_ms: int
    request: str


@wire
@dataclass(frozen=True, slots=True)
class CheckpointAcknowledged:
    """A task's part of a checkpoint is durable. Durations in ms."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    checkpoint_id: CheckpointId
    state: SubtaskState
    start_delay_ms: int = 0
    alignment_ms: int = 0
    async_ms: int = 0


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDeclined:
    """A task cannot take part in a checkpoint."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    checkpoint_id: CheckpointId
    reason: str


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
    """It is not known whether `_metadata` (or the tombstone) was written."""

    at_ms: int
    checkpoint_id: CheckpointId
    error: str


@wire
@dataclass(frozen=True, slots=True)
class SinksCommitted:
    """The sink files of a completed checkpoint are visible."""

    at_ms: int
    checkpoint_id: CheckpointId


@wire
@dataclass(frozen=True, slots=True)
class SinkCommitFailed:
    """It is not known whether the sink files of a completed checkpoint are visible.

    `fenced`: they are not, because another job has claimed the table.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    fenced: bool = False


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDiscarded:
    """Nothing of this checkpoint is left in storage."""

    at_ms: int
    checkpoint_id: CheckpointId


@wire
@dataclass(frozen=True, slots=True)
class CheckpointDiscardFailed:
    """Something of this checkpoint may be left in storage."""

    at_ms: int
    checkpoint_id: CheckpointId
    error: str


@wire
@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A user cancels the job."""

    at_ms: int


@wire
@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that the machine has set is due. A timer whose time has passed it by is ignored."""

    at_ms: int
    timer: str


CoordinatorEvent = (
    JobSubmitted
    | CoordinatorStarted
    | TaskReady
    | TaskFailed
    | TaskReachedEndOfData
    | TaskFinished
    | CheckpointRequested
    | CheckpointAcknowledged
    | CheckpointDeclined
    | MetadataWritten
    | CheckpointVoided
    | MetadataWriteFailed
    | SinksCommitted
    | SinkCommitFailed
    | CheckpointDiscarded
    | CheckpointDiscardFailed
    | CancelRequested
    | TimerFired
)
