"""The elements that a channel carries in one sequence: record batches, and control elements such as barriers.

Batches and control elements share one order. In an aligned checkpoint a barrier therefore never overtakes a batch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId

MIN_WATERMARK_MS = -(2**63)
"""The event time before the first watermark, in ms."""
MAX_WATERMARK_MS = 2**63 - 1
"""The watermark that ends event time: no element with a timestamp follows."""


@wire
@dataclass(frozen=True, slots=True)
class Watermark:
    """Promises that no element with a timestamp at or below `timestamp_ms` follows on this channel."""

    timestamp_ms: int


@wire
@dataclass(frozen=True, slots=True)
class WatermarkStatus:
    """Marks a channel as idle or active. An idle channel does not hold the watermark back."""

    idle: bool


@wire
class Alignment(enum.Enum):
    """The effect of a barrier on the data around it (Flink's `AlignmentType`).

    AT_LEAST_ONCE blocks nothing. ALIGNED blocks each channel from its barrier on. UNALIGNED overtakes queued data,
    which is stored with the checkpoint. FORCED_ALIGNED is what UNALIGNED becomes on an edge that does not support it.
    """

    AT_LEAST_ONCE = "at_least_once"
    ALIGNED = "aligned"
    UNALIGNED = "unaligned"
    FORCED_ALIGNED = "forced_aligned"


@wire
@dataclass(frozen=True, slots=True)
class BarrierOptions:
    """Options of a checkpoint, which travel with its barrier.

    `aligned_timeout_ms`: an ALIGNED barrier that still waits this long after the trigger becomes UNALIGNED. With None
    it never does. Savepoints are never UNALIGNED. `savepoint_format` applies to savepoints only.
    """

    alignment: Alignment = Alignment.ALIGNED
    aligned_timeout_ms: int | None = None
    kind: SnapshotKind = SnapshotKind.CHECKPOINT
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL

    @property
    def canonical(self) -> bool:
        """Returns whether state is written as a full snapshot of sorted rows: a savepoint in canonical format."""
        return self.kind.is_savepoint and self.savepoint_format is SavepointFormat.CANONICAL

    @property
    def timeoutable(self) -> bool:
        """Returns whether the barrier may become unaligned on its way."""
        return self.alignment is Alignment.ALIGNED and self.aligned_timeout_ms is not None


ALIGNED_BARRIER = BarrierOptions()
"""The default options of a checkpoint."""


@wire
@dataclass(frozen=True, slots=True)
class Barrier:
    """Separates the elements that belong to checkpoint `checkpoint_id` from the later elements of a channel.

    `base`: a completed checkpoint on which an incremental snapshot may build. The coordinator keeps its files until
    this checkpoint ends. With None the snapshot is full.
    """

    checkpoint_id: CheckpointId
    triggered_at_ms: int
    options: BarrierOptions = ALIGNED_BARRIER
    base: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class CancelBarrier:
    """Announces that the barrier of an aborted checkpoint will not come, so that receivers stop waiting for it."""

    checkpoint_id: CheckpointId


@wire
@dataclass(frozen=True, slots=True)
class EndOfData:
    """Announces that the upstream operators have emitted their last rows.

    With `drain` the downstream operators finish as well. Without it they suspend, and a restored job continues. `stop`:
    id of the savepoint of a stop that ended the data, or None if the source reached its end.
    """

    drain: bool
    stop: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class EndOfPartition:
    """Announces that a channel is closed: no element follows."""


Control: TypeAlias = Watermark | WatermarkStatus | Barrier | CancelBarrier | EndOfData | EndOfPartition
Element: TypeAlias = pa.RecordBatch | Control


def element_size_bytes(element: Element) -> int:
    """Returns the bytes of credit that an element uses. Control elements are free: another limit bounds their number.

    Both ends of a channel must count the same number, or credit leaks. `nbytes` does not work: a batch that went
    through pickle may lack a validity bitmap that the original has. The size in Arrow's IPC format depends only on the
    content.
    """
    return pa.ipc.get_record_batch_size(element) if isinstance(element, pa.RecordBatch) else 0


def ends_in_flight(element: Element, checkpoint_id: CheckpointId) -> bool:
    """Returns whether the in-flight data of a channel ends with this element, which is the checkpoint's barrier or
    EndOfPartition.
    """
    return isinstance(element, EndOfPartition) or (
        isinstance(element, Barrier) and element.checkpoint_id == checkpoint_id
    )
