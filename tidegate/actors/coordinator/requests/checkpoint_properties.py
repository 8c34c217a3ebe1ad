"""What follows from the kind of a checkpoint: how it is taken, and who keeps it (Flink's `CheckpointProperties`).

- A savepoint belongs to the user. It is never unaligned, no newer checkpoint subsumes it, its failure does not count,
  and it is copied to a folder of its own. Nothing waits for the copy, but for a stop.
- The savepoint of `stop` is forced: it starts at once, whatever else is pending.
- How a job ends decides whether it keeps its checkpoints. Savepoints do not need them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.job.job_spec import CheckpointSettings, Retention
from tidegate.actors.coordinator.job.phases import JobStatus
from tidegate.protocol.stream_elements import Alignment, BarrierOptions
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class CheckpointProperties:
    """The kind of a checkpoint. Of a savepoint also where it goes, and its format.

    `target`: the url under which a savepoint's own folder is made; None for a checkpoint, which ignores the format.
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
    def copied_afterwards(self) -> bool:
        """Whether it is copied once its checkpoint is complete. The savepoint of a stop is copied before."""
        return self.kind is SnapshotKind.SAVEPOINT

    @property
    def canonical(self) -> bool:
        """Whether all state is written as sorted rows. It is built on nothing then, and nothing on it."""
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
    """Whether a job that ends in this status keeps its completed checkpoints.

    Finished and suspended jobs do: from the last one a restored job learns that nothing is left to do, or where to go
    on.
    """
    if end is JobStatus.FAILED:
        return retention is not Retention.NEVER_RETAIN
    if end is JobStatus.CANCELLED:
        return retention is Retention.RETAIN_ON_CANCELLATION
    return True
