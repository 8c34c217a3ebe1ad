"""The events of a task machine: facts, in the past tense. `at_ms` is the time at which the runtime noticed the fact."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from tidegate.actors.task.incremental_base import IncrementalBase
from tidegate.connectors.source import SourceSplit
from tidegate.operators.functions.async_map import Answer
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import ALIGNED_BARRIER, BarrierOptions, Element, Watermark
from tidegate.protocol.task_reports import StateOrigin
from tidegate.state.common.backend import KeyedBackend
from tidegate.storage.checkpoints.metadata import DataFile, NativeState, PreparedPart, PreparedRows, StateHandle
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, OperatorUid
from tidegate.storage.state.snapshot import StateTable

UNFENCED = Generation(0)
"""A generation older than any coordinator's."""


@wire
@dataclass(frozen=True, slots=True)
class DamageFound:
    """The checkpoint from which the task starts is damaged. The machine ignores the event, and the task's driver
    reports it.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class TaskRestored:
    """The state of every operator was read (`tables` is empty on a fresh start); the task may open.

    `tables` releases each table once its operator has loaded it (`Handover`). The event never leaves its process.

    `finished`: the operators had finished in the checkpoint, and must not run again. `in_flight`: for input channels,
    the rows that an unaligned barrier had overtaken, oldest first, and the watermarks between them. They are processed
    before anything that comes in.
    """

    at_ms: int
    tables: tuple[tuple[OperatorUid, Sequence[StateTable]], ...]
    finished: bool = False
    in_flight: tuple[tuple[ChannelId, tuple[pa.RecordBatch | Watermark, ...]], ...] = ()
    lineage: IncrementalBase | None = None
    """The task's part of the checkpoint, if the next snapshots may be based on it, else None."""
    kept: Mapping[OperatorUid, KeyedBackend] = field(default_factory=dict)
    """Backends that the attempt before has left in this process. They are rewound to that checkpoint."""
    origin: StateOrigin | None = None
    """The checkpoint from which the state was restored, or None on a fresh start."""
    prepared: tuple[PreparedRows, ...] = ()
    """Prepared rows of the checkpoint in the buckets of this task, oldest first. They are committed first."""

    @property
    def checkpoint_id(self) -> CheckpointId | None:
        """Returns the checkpoint from which the task starts, if it belongs to this job and the task has a part in it,
        else None.
        """
        return None if self.lineage is None else self.lineage.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class TasksStarted:
    """Every task of the attempt is ready: sources may read, and in-flight input may be processed."""

    at_ms: int
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class CoordinatorTookOver:
    """A new generation of the coordinator is in charge, and requests the status of the task. Answered by
    `AnswerTakeover`.

    In this and all other orders, `generation` is the generation of the coordinator that gives the order.
    """

    at_ms: int
    attempt: AttemptNumber
    generation: Generation


@wire
@dataclass(frozen=True, slots=True)
class FrameArrived:
    """Consecutive elements of one channel have arrived. The first one has the number `first_sequence`."""

    at_ms: int
    attempt: AttemptNumber
    channel: ChannelId
    first_sequence: int
    elements: tuple[Element, ...]


@wire
@dataclass(frozen=True, slots=True)
class CreditGranted:
    """The receiver of an output channel has granted credit: `total_bytes` since the attempt began.

    The number is cumulative, so a grant that arrives twice or out of order does no harm. `window_bytes` is how much may
    be in flight from now on. As much again may wait in the output queue.
    """

    at_ms: int
    attempt: AttemptNumber
    channel: ChannelId
    total_bytes: int
    window_bytes: int


@wire
@dataclass(frozen=True, slots=True)
class TurnGranted:
    """The task may process one element. `last_turn_ms` is how long its last turn took, and `waited_ms` the time since
    then.
    """

    at_ms: int
    last_turn_ms: int = 0
    waited_ms: int = 0


@wire
@dataclass(frozen=True, slots=True)
class SourceBatchRead:
    """The answer to a `ReadSource`. `batch` is None if the split has no more rows, or none at the moment.

    `induces` is a checkpoint that the reader of an externally induced source requests right after the batch. `held` is
    True if the source was not read, because the job's sources are paused. `payload` is the payload of the split from
    `next_offset` on, or None if it does not change. `found` are new splits of this subtask. `bad` are dead letters
    among the rows up to `next_offset`. `lost` is the number of records that were skipped, because they were deleted.
    `behind` is the number of records of the split that exist after `next_offset`, or None if unknown. `empty` is the
    number of splits of the read that had no rows. The answer is about the split after them.
    """

    at_ms: int
    read: int
    batch: pa.RecordBatch | None
    next_offset: int
    at_end: bool
    induces: CheckpointId | None = None
    held: bool = False
    payload: bytes | None = None
    found: tuple[SourceSplit, ...] = ()
    empty: int = 0
    bad: pa.RecordBatch | None = None
    lost: int = 0
    behind: int | None = None


@wire
@dataclass(frozen=True, slots=True)
class CheckpointTriggered:
    """The coordinator triggers a checkpoint in this task, which is a source or has no running upstream tasks."""

    at_ms: int
    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    triggered_at_ms: int
    options: BarrierOptions = ALIGNED_BARRIER
    base: CheckpointId | None = None
    """The completed checkpoint on which this one may be based."""
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class CheckpointAborted:
    """The coordinator has aborted a checkpoint."""

    at_ms: int
    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """A checkpoint is complete. A task that had finished before it may end now."""

    at_ms: int
    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class SplitsAssigned:
    """The coordinator has assigned more splits of its source to this task, in answer to a `RequestSplits`.

    `first`: the number of splits assigned to the task in this attempt before. Empty `splits`: no more will follow.
    """

    at_ms: int
    attempt: AttemptNumber
    first: int
    splits: tuple[SourceSplit, ...]
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class WatermarkAnnounced:
    """The coordinator announces the lowest watermark among the splits that this source waits for."""

    at_ms: int
    attempt: AttemptNumber
    watermark_ms: int
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class SnapshotPersisted:
    """The state of a snapshot is durable. `handle` is None for a stateless task. `sync_ms`: its synchronous part.

    `layer`: the layer on top of the layers that the snapshot is built on, None if nothing had changed. `native`: all
    files of its backends, also files that it shares with its base.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    handle: StateHandle | None
    sync_ms: int = 0
    layer: StateHandle | None = None
    native: tuple[NativeState, ...] = ()


@wire
@dataclass(frozen=True, slots=True)
class ChannelStatePersisted:
    """The in-flight elements of a snapshot are durable. `handle` is None if there were none."""

    at_ms: int
    checkpoint_id: CheckpointId
    handle: StateHandle | None


@wire
@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """The state of a snapshot, or its in-flight elements (`channels`), could not be written.

    `away` is whether storage does not answer or has no space, which may pass.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    channels: bool = False
    away: bool = False


@wire
@dataclass(frozen=True, slots=True)
class SegmentPersisted:
    """A segment of the changelog, or a base for it (`whole`), is durable. `handle` is None if it was empty."""

    at_ms: int
    number: int
    whole: bool
    handle: StateHandle | None


@wire
@dataclass(frozen=True, slots=True)
class SegmentFailed:
    """A segment of the changelog, or a base (`whole`), could not be written. `away`: as in `SnapshotFailed`."""

    at_ms: int
    number: int
    whole: bool
    error: str
    away: bool = False


@wire
@dataclass(frozen=True, slots=True)
class FileStaged:
    """A file of a sink is durable, and not visible to readers yet. `parts` are the parts that a `CommittingSink` has
    prepared.
    """

    at_ms: int
    uid: OperatorUid
    index: int
    file: DataFile
    parts: tuple[PreparedPart, ...] = ()


@wire
@dataclass(frozen=True, slots=True)
class RowsCommitted:
    """Prepared rows of a `CommittingSink` are committed."""

    at_ms: int
    rows: PreparedRows


@dataclass(frozen=True, slots=True)
class CallsAnswered:
    """Calls of functions of operators (`map_async`) have returned, or have failed after all retries."""

    at_ms: int
    answers: tuple[tuple[OperatorUid, Answer], ...]


@wire
class TaskTimer(enum.Enum):
    """The purpose of a timer: send output that has lingered, request credit that has not come, end an alignment that
    takes too long, fire timers of operators, read a source again that had no rows, request splits again, or report the
    event time of the task.
    """

    FLUSH = "flush"
    CREDIT = "credit"
    ALIGNMENT = "alignment"
    PROCESSING_TIME = "processing_time"
    SOURCE = "source"
    SPLITS = "splits"
    WATERMARKS = "watermarks"


@wire
@dataclass(frozen=True, slots=True)
class TimerDue:
    """A timer that the task has set is due. It does no harm if nothing waits for it any more.

    `due_at_ms` is the time for which it was set. It may be later than `at_ms`, if the clock was set back since.
    """

    at_ms: int
    timer: TaskTimer
    due_at_ms: int = 0


TaskEvent = (
    DamageFound
    | TaskRestored
    | TasksStarted
    | CoordinatorTookOver
    | FrameArrived
    | CreditGranted
    | TurnGranted
    | SourceBatchRead
    | SplitsAssigned
    | WatermarkAnnounced
    | CheckpointTriggered
    | CheckpointAborted
    | CheckpointCompleted
    | SnapshotPersisted
    | ChannelStatePersisted
    | SnapshotFailed
    | SegmentPersisted
    | SegmentFailed
    | FileStaged
    | RowsCommitted
    | CallsAnswered
    | TimerDue
)
WriteAnswered = SnapshotPersisted | ChannelStatePersisted | SnapshotFailed | SegmentPersisted | SegmentFailed
"""Events that report the result of a write to storage: success, or final failure."""
CoordinatorOrder = (
    TasksStarted
    | CoordinatorTookOver
    | SplitsAssigned
    | WatermarkAnnounced
    | CheckpointTriggered
    | CheckpointAborted
    | CheckpointCompleted
)
"""Events that only a coordinator causes. The deploy fence of the process checks their generation."""
