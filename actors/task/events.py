"""Facts that a task machine is told. `at_ms` is the time at which the runtime learned of the fact."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tidegate.actors.elements import Element
from tidegate.actors.identity import ChannelId
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid
from tidegate.storage.metadata import DataFile, StateHandle
from tidegate.storage.state import StateTable


@wire
@dataclass(frozen=True, slots=True)
class TaskRestored:
    """The state of every operator was read (`tables` is empty on a fresh start); the task may open.

    `finished` tells that the checkpoint holds this task's operators as finished: they must not run again.
    """

    at_ms: int
    tables: tuple[tuple[OperatorUid, tuple[StateTable, ...]], ...]
    finished: bool = False


@wire
@dataclass(frozen=True, slots=True)
class SourcesStarted:
    """Every task of the attempt is ready: sources may read."""

    at_ms: int


@wire
@dataclass(frozen=True, slots=True)
class FrameArrived:
    """Consecutive elements of one channel came in; the first has number `first_sequence`."""

    at_ms: int
    attempt: AttemptNumber
    channel: ChannelId
    first_sequence: int
    elements: tuple[Element, ...]


@wire
@dataclass(frozen=True, slots=True)
class CreditGranted:
    """The receiver of an output channel has room for `total_bytes` in total since the attempt began.

    Cumulative, so that a grant that comes twice or out of order does no harm.
    """

    at_ms: int
    attempt: AttemptNumber
    channel: ChannelId
    total_bytes: int


@wire
@dataclass(frozen=True, slots=True)
class TurnGranted:
    """The task may process one element."""

    at_ms: int


@wire
@dataclass(frozen=True, slots=True)
class SourceBatchRead:
    """The answer to a `ReadSource`. `batch` is None when the split had nothing left."""

    at_ms: int
    read: int
    batch: pa.RecordBatch | None
    next_offset: int
    at_end: bool


@wire
@dataclass(frozen=True, slots=True)
class CheckpointTriggered:
    """The coordinator asks this source to start a checkpoint."""

    at_ms: int
    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    triggered_at_ms: int


@wire
@dataclass(frozen=True, slots=True)
class CheckpointAborted:
    """The coordinator has given this checkpoint up."""

    at_ms: int
    attempt: AttemptNumber
    checkpoint_id: CheckpointId


@wire
@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """This checkpoint is complete. `final`: every task had reached the end of its data before it."""

    at_ms: int
    attempt: AttemptNumber
    checkpoint_id: CheckpointId
    final: bool


@wire
@dataclass(frozen=True, slots=True)
class SnapshotPersisted:
    """The asynchronous part of a snapshot is durable. `handle` is None for a stateless task."""

    at_ms: int
    checkpoint_id: CheckpointId
    handle: StateHandle | None


@wire
@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """The asynchronous part of a snapshot failed."""

    at_ms: int
    checkpoint_id: CheckpointId
    error: str


@wire
@dataclass(frozen=True, slots=True)
class FileStaged:
    """A sink file is durable, and not visible to readers yet."""

    at_ms: int
    uid: OperatorUid
    index: int
    file: DataFile


@wire
@dataclass(frozen=True, slots=True)
class FlushDue:
    """The linger time of queued output is over."""

    at_ms: int


TaskEvent = (
    TaskRestored
    | SourcesStarted
    | FrameArrived
    | CreditGranted
    | TurnGranted
    | SourceBatchRead
    | CheckpointTriggered
    | CheckpointAborted
    | CheckpointCompleted
    | SnapshotPersisted
    | SnapshotFailed
    | FileStaged
    | FlushDue
)
