"""What follows from the kind of a checkpoint: how it is taken, and who keeps it (Flink's `CheckpointProperties`).

- Savepoints are the user's: aligned whatever the job's settings are, never subsumed by a newer checkpoint, not counted
  when they fail, and copied to a folder of their own.
- The savepoints of `stop` are forced: they start at once, whatever else is pending.
- What is kept when a job ends depends on how it ends. A checkpoint never is needed by a savepoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.job.job_spec import CheckpointSettings, Retention
from tidegate.actors.coordinator.job.phases import JobStatus
from tidegate.actors.protocol.stream_elements import Alignment, BarrierOptions
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class CheckpointProperties:
    """`target`: the url under which a savepoint's own folder is made; None for a checkpoint. `savepoint_format`
    counts for savepoints alone.
    """

    kind: SnapshotKind = SnapshotKind.CHECKPOINT
    target: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL

    def __post_init__(self) -> None:
        assert self.kind.is_savepoint == (self.target is not None), "savepoints, and only they, have a target"

    @property
    def forced(self) -> bool:
        """Whether it starts at once."""
        return self.kind.stops

    @property
    def canonical(self) -> bool:
        """Whether it is written whole as sorted rows, so that it is built on nothing, and nothing on it."""
        return self.kind.is_savepoint and self.savepoint_format is SavepointFormat.CANONICAL

    @property
    def subsumable(self) -> bool:
        """Whether a newer completed checkpoint makes it superfluous."""
        return not self.kind.is_savepoint


CHECKPOINT = CheckpointProperties()


def barrier_options(settings: CheckpointSettings, properties: CheckpointProperties) -> BarrierOptions:
    """How the barriers of such a checkpoint travel."""
    kind, savepoint_format = properties.kind, properties.savepoint_format
    if not settings.exactly_once:
        return BarrierOptions(Alignment.AT_LEAST_ONCE, None, kind, savepoint_format)
    if kind.is_savepoint or not settings.unaligned:
        return BarrierOptions(Alignment.ALIGNED, None, kind, savepoint_format)
    if not settings.aligned_timeout_ms:
        return BarrierOptions(Alignment.UNALIGNED, None, kind)
    return BarrierOptions(Alignment.ALIGNED, settings.aligned_timeout_ms, kind)


def keeps_checkpoints(retention: Retention, end: JobStatus) -> bool:
    """Whether the completed checkpoints of a job that ends so stay.

    Finished and suspended jobs keep theirs: the last one tells a restored job that there is nothing left to do, or
    where to go on.
    """
    if end is JobStatus.FAILED:
        return retention is not Retention.NEVER_RETAIN
    if end is JobStatus.CANCELLED:
        return retention is Retention.RETAIN_ON_CANCELLATION
    return True
