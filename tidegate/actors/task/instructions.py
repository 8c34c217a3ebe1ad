"""The instructions of a task machine, which `TaskDriver` carries out."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pyarrow as pa

from tidegate.actors.task.events import TaskTimer
from tidegate.actors.task.incremental_base import Chain, IncrementalBase
from tidegate.connectors.source import SourceSplit
from tidegate.operators.functions.async_map import Call
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Element, Watermark
from tidegate.protocol.task_reports import SnapshotMetrics, StateOrigin
from tidegate.storage.checkpoints.metadata import PreparedRows, SnapshotKind, SubtaskState
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, OperatorUid
from tidegate.storage.state.snapshot import OperatorSnapshot


@wire
@dataclass(frozen=True, slots=True)
class SendFrame:
    """Sends consecutive elements to the downstream task of a channel. `first_sequence` is the number of the first
    element.

    No answer is needed, because the number of the next frame shows that one is missing. With `exhausts_credit` an
    answer is needed, because no frame of rows can follow before the receiver grants credit. A frame without elements
    requests that the receiver repeats its grant.
    """

    attempt: AttemptNumber
    channel: ChannelId
    first_sequence: int
    elements: tuple[Element, ...]
    exhausts_credit: bool = False


@wire
@dataclass(frozen=True, slots=True)
class GrantCredit:
    """Grants credit to the upstream task of a channel.

    `total_bytes` is the number of bytes that it may have sent in this attempt, `window_bytes` the number that may be in
    flight.
    """

    attempt: AttemptNumber
    channel: ChannelId
    total_bytes: int
    window_bytes: int


@wire
@dataclass(frozen=True, slots=True)
class ReadSource:
    """Reads rows of a split. Answered by one `SourceBatchRead` with the same `read` number.

    `others`: more splits, each with the row to read from. They are tried in order until one has rows. The reader need
    not try all of them. `patience_ms`: while no split has rows, the reader may pause and try all again, for up to this
    total time, so that the task is not woken up for an empty answer. `pause_ms`: the first of these pauses. Each is
    twice as long as the one before, up to `PAUSE_MAX_MS`.
    """

    read: int
    split: SourceSplit
    offset: int
    rows_max: int
    others: tuple[tuple[SourceSplit, int], ...] = ()
    patience_ms: int = 0
    pause_ms: int = 1


@wire
@dataclass(frozen=True, slots=True)
class NotifySource:
    """Notifies the source's reader that a checkpoint is complete. `splits` are the subtask's splits in the
    checkpoint.
    """

    checkpoint_id: CheckpointId
    splits: tuple[SourceSplit, ...]


@wire
@dataclass(frozen=True, slots=True)
class RequestSplits:
    """Requests more splits of the source from the coordinator. Answered by `SplitsAssigned` with the same `first`.

    `first` is the number of splits that the task has been assigned. Request and answer may be lost, so the task repeats
    the request until it is answered.
    """

    attempt: AttemptNumber
    first: int


@dataclass(frozen=True, slots=True)
class PersistSnapshot:
    """Writes frozen state, while processing continues. Answered by `SnapshotPersisted` or `SnapshotFailed`.

    Holds references into the task's memory, so it never leaves the process. The positions count the rows that this
    attempt took from each input, and put on each output, before the snapshot. The simulator compares the positions of
    all tasks, to check that their snapshots fit together.
    """

    checkpoint_id: CheckpointId
    snapshots: tuple[OperatorSnapshot, ...]
    input_positions: tuple[tuple[ChannelId, int], ...]
    output_positions: tuple[tuple[ChannelId, int], ...]
    base: IncrementalBase | None = None
    """The base of the snapshot. With None, the layers and native files of `snapshots` contain the whole state."""
    chain: Chain | None = None
    """The layers of the changelog to which the snapshot refers, or None. They are written separately."""


@dataclass(frozen=True, slots=True)
class PersistSegment:
    """Writes a segment of the changelog, or with `whole` a base, while processing continues.

    Answered by `SegmentPersisted` or `SegmentFailed`. Holds references into the task's memory.
    """

    number: int
    whole: bool
    snapshots: tuple[OperatorSnapshot, ...]


class Direction(enum.Enum):
    """The end of a channel at which an in-flight element waits: the receiver's input, or the sender's output."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class InFlight:
    """In-flight elements of one channel that belong to a checkpoint, oldest first: rows, and the watermarks between
    them.

    The first `recovered` elements were restored from the previous checkpoint.
    """

    channel: ChannelId
    direction: Direction
    elements: tuple[pa.RecordBatch | Watermark, ...]
    recovered: int = 0


@dataclass(frozen=True, slots=True)
class PersistChannelState:
    """Writes the in-flight elements of an unaligned snapshot to a separate file, while processing continues.

    Given at most once for each snapshot, when the barrier of every channel has arrived. Every entry of `channels` has
    rows. Answered by `ChannelStatePersisted` or `SnapshotFailed`.
    """

    checkpoint_id: CheckpointId
    channels: tuple[InFlight, ...]


@wire
@dataclass(frozen=True, slots=True)
class DiscardState:
    """Deletes state files to which no checkpoint will refer."""

    paths: tuple[str, ...]


@wire
@dataclass(frozen=True, slots=True)
class StageFile:
    """Writes rows of a sink as a data file, or by a call of a user's sink. Answered by `FileStaged` with the same
    `index`.

    `folder`: the folder of a table partition, below the folder of the attempt, or empty. `prepare`: the user's sink
    then prepares all rows since the previous prepare for a commit. `checkpoint_id`: the checkpoint for which it
    prepares.
    """

    uid: OperatorUid
    index: int
    batches: tuple[pa.RecordBatch, ...]
    folder: str = ""
    prepare: bool = False
    checkpoint_id: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """Commits prepared rows of a `CommittingSink`, and retries until it succeeds. Answered by `RowsCommitted`.

    `rows` is in the order of the checkpoints, oldest first, and is not empty.
    """

    uid: OperatorUid
    rows: tuple[PreparedRows, ...]


@dataclass(frozen=True, slots=True)
class MakeCalls:
    """Starts calls of an operator's `map_async` function. Answered by `CallsAnswered`, in any order."""

    uid: OperatorUid
    calls: tuple[Call, ...]


@wire
@dataclass(frozen=True, slots=True)
class SetTaskTimer:
    """Requests a `TimerDue` at `due_at_ms`. Several timers of one kind may be set, and none replaces another."""

    timer: TaskTimer
    due_at_ms: int


@wire
@dataclass(frozen=True, slots=True)
class ReportReady:
    """Reports to the coordinator that the operators are open.

    `origin`: the place from which their state was restored, or None. `splits`, `rows_read`: as in the coordinator's
    `TaskReady`.
    """

    attempt: AttemptNumber
    origin: StateOrigin | None = None
    splits: tuple[str, ...] | None = ()
    rows_read: int = 0


@wire
@dataclass(frozen=True, slots=True)
class AnswerTakeover:
    """Reports the status of the task to a new coordinator (see the coordinator's event `TaskAnswered`)."""

    attempt: AttemptNumber
    generation: Generation
    started: bool
    ended: bool
    finished: bool
    covered_by: CheckpointId | None
    snapshotted: CheckpointId
    collecting: CheckpointId | None


@wire
@dataclass(frozen=True, slots=True)
class ReportWatermark:
    """Reports the lowest watermark of the source to the coordinator (see the coordinator's event
    `WatermarkReported`).
    """

    attempt: AttemptNumber
    watermark_ms: int | None
    waits: bool


@wire
@dataclass(frozen=True, slots=True)
class ReportEndOfData:
    """Reports to the coordinator that the operators have finished and only a final checkpoint is missing.

    `stop`: the savepoint that has ended the data, and after which the job ends. None if the input has ended.
    """

    attempt: AttemptNumber
    stop: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class ReportFinished:
    """Reports to the coordinator that the task has finished."""

    attempt: AttemptNumber


@wire
@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Reports to the coordinator that this task's part of a checkpoint is durable."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    state: SubtaskState
    metrics: SnapshotMetrics
    kind: SnapshotKind


@wire
@dataclass(frozen=True, slots=True)
class Decline:
    """Reports to the coordinator that this task cannot take part in a checkpoint."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    reason: CheckpointFailureReason
    message: str


TaskInstruction = (
    SendFrame
    | GrantCredit
    | ReadSource
    | NotifySource
    | RequestSplits
    | ReportWatermark
    | PersistSnapshot
    | PersistChannelState
    | PersistSegment
    | DiscardState
    | StageFile
    | CommitPrepared
    | MakeCalls
    | SetTaskTimer
    | ReportReady
    | AnswerTakeover
    | ReportEndOfData
    | ReportFinished
    | Acknowledge
    | Decline
)
