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
"""A generation lower than any coordinator's."""


@wire
@dataclass(frozen=True, slots=True)
class DamageFound:
    """A part of the checkpoint from which the task starts is damaged. The task's driver reports it, and the
    machine ignores it.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class TaskRestored:
    """The state of every operator was read, so that the task may open its operators. `tables` is empty on a fresh
    start.

    `tables` releases each table once its operator has loaded it (`Handover`). The event never leaves its process.
    `finished`: the operators had finished in the checkpoint, and must not run again. `in_flight`: for input channels,
    the rows that an unaligned barrier had overtaken, oldest first, and the watermarks between them. They are processed
    before all other input.
    """

    at_ms: int
    tables: tuple[tuple[OperatorUid, Sequence[StateTable]], ...]
    finished: bool = False
    in_flight: tuple[tuple[ChannelId, tuple[pa.RecordBatch | Watermark, ...]], ...] = ()
    lineage: IncrementalBase | None = None
    """The task's part of the checkpoint, if the next snapshots may be based on it, else None."""
    kept: Mapping[OperatorUid, KeyedBackend] = field(default_factory=dict)
    """Backends of the previous attempt in this process, by operator. They are rewound to the checkpoint."""
    origin: StateOrigin | None = None
    """The place from which the state was restored, or None on a fresh start."""
    prepared: tuple[PreparedRows, ...] = ()
    """Prepared sink rows of the checkpoint in the buckets of this task, oldest first, which the task commits
    first.
    """

    @property
    def checkpoint_id(self) -> CheckpointId | None:
        """Returns the checkpoint from which the task starts, if it belongs to this job and contains state of the task.
        Otherwise None.
        """
        return None if self.lineage is None else self.lineage.checkpoint_id


@wire
@dataclass(frozen=True, slots=True)
class TasksStarted:
    """The whole attempt is ready: sources may read, and in-flight input may be processed."""

    at_ms: int
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class CoordinatorTookOver:
    """A new generation of the coordinator has taken over, and requests the status of the task. Answered by
    `AnswerTakeover`.

    In all events from a coordinator, `generation` is the generation of that coordinator.
    """

    at_ms: int
    attempt: AttemptNumber
    generation: Generation


@wire
@dataclass(frozen=True, slots=True)
class FrameArrived:
    """Consecutive elements of one channel have arrived. `first_sequence` is the sequence number of the first one."""

    at_ms: int
    attempt: AttemptNumber
    channel: ChannelId
    first_sequence: int
    elements: tuple[Element, ...]


@wire
@dataclass(frozen=True, slots=True)
class CreditGranted:
    """The receiver of an output channel has granted credit.

    `total_bytes` is the credit since the attempt began, so a grant that arrives twice or out of order does no harm.
    `window_bytes` is the number of bytes that may be in flight from now on. It also limits the output queue.
    """

    at_ms: int
    attempt: AttemptNumber
    channel: ChannelId
    total_bytes: int
    window_bytes: int


@wire
@dataclass(frozen=True, slots=True)
class TurnGranted:
    """The runtime gives the task a turn, in which the task may process one element. `last_turn_ms` is the duration of
    its last turn, and `waited_ms` the time since then.
    """

    at_ms: int
    last_turn_ms: int = 0
    waited_ms: int = 0


@wire
@dataclass(frozen=True, slots=True)
class SourceBatchRead:
    """The answer to a `ReadSource` with the same `read` number. `batch` is None if the split has no rows, now or any
    more.

    - `empty`: the number of splits of the read that had no rows. The answer is about the split after them.
    - `induces`: a checkpoint that the reader of an externally induced source requests right after the batch.
    - `held`: the source was not read, because the job's sources are paused.
    - `payload`: the new payload of the split from `next_offset` on, or None if it does not change.
    - `found`: new splits of this subtask.
    - `bad`: dead letters among the rows up to `next_offset`.
    - `lost`: the number of records that were skipped, because they were deleted.
    - `behind`: the number of records of the split that exist after `next_offset`, or None if unknown.
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
    """The completed checkpoint on which this one may be based, or None for a full snapshot."""
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
    """A checkpoint is complete. A task that had finished before it may now end."""

    at_ms: int
    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class SplitsAssigned:
    """The coordinator has assigned more splits of the source to this task, in answer to a `RequestSplits`.

    `first`: the number of splits that were assigned to the task in this attempt before. Empty `splits`: no more will
    follow.
    """

    at_ms: int
    attempt: AttemptNumber
    first: int
    splits: tuple[SourceSplit, ...]
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class WatermarkAnnounced:
    """The coordinator announces the lowest watermark, in ms, of this source task's alignment group."""

    at_ms: int
    attempt: AttemptNumber
    watermark_ms: int
    generation: Generation = UNFENCED


@wire
@dataclass(frozen=True, slots=True)
class SnapshotPersisted:
    """The state of a snapshot is durable. `handle` is None for a task without state.

    `sync_ms`: the duration of the synchronous part. `layer`: the new layer on top of the base's layers, or None if
    nothing had changed. `native`: all files of the task's backends, with the files that the snapshot shares with its
    base.
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

    `away`: storage does not answer or is full, which may pass.
    """

    at_ms: int
    checkpoint_id: CheckpointId
    error: str
    channels: bool = False
    away: bool = False


@wire
@dataclass(frozen=True, slots=True)
class SegmentPersisted:
    """A segment of the changelog, or a new base of the changelog (`whole`), is durable. `handle` is None if the segment
    was empty.
    """

    at_ms: int
    number: int
    whole: bool
    handle: StateHandle | None


@wire
@dataclass(frozen=True, slots=True)
class SegmentFailed:
    """A segment of the changelog, or a base (`whole`), could not be written.

    `away`: storage does not answer or is full, which may pass.
    """

    at_ms: int
    number: int
    whole: bool
    error: str
    away: bool = False


@wire
@dataclass(frozen=True, slots=True)
class FileStaged:
    """A file of a sink is written durably, but not committed. `parts` has the prepared parts of a
    `CommittingSink`.
    """

    at_ms: int
    uid: OperatorUid
    index: int
    file: DataFile
    parts: tuple[PreparedPart, ...] = ()


@wire
@dataclass(frozen=True, slots=True)
class RowsCommitted:
    """The rows of a `CommitPrepared` are committed."""

    at_ms: int
    uid: OperatorUid
    rows: tuple[PreparedRows, ...]


@dataclass(frozen=True, slots=True)
class CallsAnswered:
    """Calls of `map_async` functions have returned, or have failed after all retries."""

    at_ms: int
    answers: tuple[tuple[OperatorUid, Answer], ...]


@wire
class TaskTimer(enum.Enum):
    """The purpose of a task's timer.

    FLUSH: send output that has lingered. CREDIT: request credit that has not come. ALIGNMENT: end an alignment that
    takes too long. PROCESSING_TIME: fire timers of operators. SOURCE: read a source again that had no rows. SPLITS:
    request splits again. WATERMARKS: report the watermark of the source.
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
    """A timer that the task has set is due. It has no effect if its purpose has ended.

    `due_at_ms` is the time for which the timer was set. It may be later than `at_ms`, if the clock was set back since.
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
"""Events that report the result of a write to storage: success, or failure."""
CoordinatorOrder = (
    TasksStarted
    | CoordinatorTookOver
    | SplitsAssigned
    | WatermarkAnnounced
    | CheckpointTriggered
    | CheckpointAborted
    | CheckpointCompleted
)
"""Events that only a coordinator causes. The fence of the task checks their generation."""
