"""The instructions of a task machine: what it asks its runtime to do. `TaskHost` carries them out."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pyarrow as pa

from tidegate.actors.task.incremental.changelog import Chain
from tidegate.actors.task.incremental.lineage import Lineage
from tidegate.actors.task.messages.events import TaskTimer
from tidegate.connectors.source import SourceSplit
from tidegate.operators.functions.async_map import Call
from tidegate.protocol.failure_reasons import CheckpointFailureReason
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.snapshot_metrics import SnapshotMetrics
from tidegate.protocol.state_origin import StateOrigin
from tidegate.protocol.stream_elements import Element, Watermark
from tidegate.storage.checkpoints.metadata import SnapshotKind, SubtaskState
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, OperatorUid
from tidegate.storage.state.snapshot import OperatorSnapshot


@wire
@dataclass(frozen=True, slots=True)
class SendFrame:
    """Deliver consecutive elements to the downstream task of a channel.

    Nobody needs to wait for an answer: the number of the next frame shows that one is missing. Not so with
    `exhausts_credit`: then no frame of data can follow before the receiver grants credit. A frame without elements asks
    the receiver to repeat its grant.
    """

    attempt: AttemptNumber
    channel: ChannelId
    first_sequence: int
    elements: tuple[Element, ...]
    exhausts_credit: bool = False


@wire
@dataclass(frozen=True, slots=True)
class GrantCredit:
    """Tell the upstream task of a channel how many bytes it may have sent in total, and the window from now on."""

    attempt: AttemptNumber
    channel: ChannelId
    total_bytes: int
    window_bytes: int


@wire
@dataclass(frozen=True, slots=True)
class ReadSource:
    """Read rows of a split; answered by one `SourceBatchRead` with the same `read` number.

    `others`: more splits, and the row to read each from. They are tried one after the other while those before them
    have nothing. Whoever reads may stop before any of them.

    `patience_ms`: while none of them has anything, whoever reads may pause and try them all again, for this long in
    all. So the task need not be woken up to hear that there is nothing. `pause_ms`: the first of these pauses. Each is
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
class RequestSplits:
    """Ask the coordinator for more splits of the source; answered by `SplitsAssigned` with the same `first`.

    Question and answer may get lost. The task asks again until it is answered.
    """

    attempt: AttemptNumber
    first: int


@dataclass(frozen=True, slots=True)
class PersistSnapshot:
    """Write frozen state, beside processing. Answered by `SnapshotPersisted` or `SnapshotFailed`.

    Holds references into the task's memory, so it never leaves the process. The positions say where the cut goes
    through each channel: how many rows of this attempt were taken from each input, and put on each output, before it.
    The simulator's oracle checks with them that the cuts of all tasks fit together.
    """

    checkpoint_id: CheckpointId
    snapshots: tuple[OperatorSnapshot, ...]
    input_positions: tuple[tuple[ChannelId, int], ...]
    output_positions: tuple[tuple[ChannelId, int], ...]
    base: Lineage | None = None
    """What the snapshot is built on; without it the layers and native files of `snapshots` are whole."""
    chain: Chain | None = None
    """The layers of the changelog that belong to it. They are written separately."""


@dataclass(frozen=True, slots=True)
class PersistSegment:
    """Write a segment of the changelog, or with `whole` a base, beside processing.

    Answered by `SegmentPersisted` or `SegmentFailed`. Holds references into the task's memory.
    """

    number: int
    whole: bool
    snapshots: tuple[OperatorSnapshot, ...]


class Direction(enum.Enum):
    """Which end of a channel holds an in-flight element."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class InFlight:
    """Rows of one channel that belong to a checkpoint, oldest first, and the watermarks between them.

    The first `recovered` elements came from a restore.
    """

    channel: ChannelId
    direction: Direction
    elements: tuple[pa.RecordBatch | Watermark, ...]
    recovered: int = 0


@dataclass(frozen=True, slots=True)
class PersistChannelState:
    """Write the in-flight elements of an unaligned snapshot, beside processing, in a file of their own.

    Comes at most once for each snapshot, when the barrier of every channel has arrived. Every entry of `channels` has
    rows. Answered by `ChannelStatePersisted` or `SnapshotFailed`.
    """

    checkpoint_id: CheckpointId
    channels: tuple[InFlight, ...]


@wire
@dataclass(frozen=True, slots=True)
class DiscardState:
    """Delete files of state that no checkpoint will refer to."""

    paths: tuple[str, ...]


@wire
@dataclass(frozen=True, slots=True)
class StageFile:
    """Write one data file of a sink; answered by `FileStaged` with the same `index`.

    `folder`: that of a partition, below the folder of the attempt; empty where the table has none. `prepare`: a sink of
    the user's says what is to be committed of all that it was given.
    """

    uid: OperatorUid
    index: int
    batches: tuple[pa.RecordBatch, ...]
    folder: str = ""
    prepare: bool = False


@dataclass(frozen=True, slots=True)
class MakeCalls:
    """Call the function of an operator for rows; answered by `CallsAnswered`, in any order."""

    uid: OperatorUid
    calls: tuple[Call, ...]


@wire
@dataclass(frozen=True, slots=True)
class SetTaskTimer:
    """Send a `TimerDue` at this time. Several timers of one kind may be set; none replaces another."""

    timer: TaskTimer
    due_at_ms: int


@wire
@dataclass(frozen=True, slots=True)
class ReportReady:
    """Tell the coordinator that the operators are open. `origin`: where their state comes from, if they have any.

    `splits`, `rows_read`: as in the coordinator's `TaskReady`.
    """

    attempt: AttemptNumber
    origin: StateOrigin | None = None
    splits: tuple[str, ...] | None = ()
    rows_read: int = 0


@wire
@dataclass(frozen=True, slots=True)
class AnswerTakeover:
    """Tell the coordinator that has taken over what the task is doing (see its event `TaskAnswered`)."""

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
    """Tell the coordinator how far the source is in event time (see its event `WatermarkReported`)."""

    attempt: AttemptNumber
    watermark_ms: int | None
    waits: bool


@wire
@dataclass(frozen=True, slots=True)
class ReportEndOfData:
    """Tell the coordinator that the operators have finished and only a final checkpoint is missing.

    `stop`: the savepoint that has ended the data, and after which the job ends; None if the data ran out.
    """

    attempt: AttemptNumber
    stop: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class ReportFinished:
    """Tell the coordinator that the task is over."""

    attempt: AttemptNumber


@wire
@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the coordinator that this task's part of a checkpoint is durable."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    state: SubtaskState
    metrics: SnapshotMetrics
    kind: SnapshotKind


@wire
@dataclass(frozen=True, slots=True)
class Decline:
    """Tell the coordinator that this task cannot take part in a checkpoint."""

    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    reason: CheckpointFailureReason
    message: str


TaskInstruction = (
    SendFrame
    | GrantCredit
    | ReadSource
    | RequestSplits
    | ReportWatermark
    | PersistSnapshot
    | PersistChannelState
    | PersistSegment
    | DiscardState
    | StageFile
    | MakeCalls
    | SetTaskTimer
    | ReportReady
    | AnswerTakeover
    | ReportEndOfData
    | ReportFinished
    | Acknowledge
    | Decline
)
