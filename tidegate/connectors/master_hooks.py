"""Master hooks: tell a system outside the job about its checkpoints (Flink's `MasterTriggerRestoreHook`).

An externally induced source needs one. The hook tells the outside system that a checkpoint is wanted. The system puts a
mark into the data, and the source begins the checkpoint at that mark.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tidegate.storage.ids import CheckpointId


@runtime_checkable
class MasterHook(Protocol):
    """The coordinator calls it, for one checkpoint at a time. It travels with the job by cloudpickle.

    A call may be repeated, and a checkpoint may fail after its trigger. The outside system must cope with both.
    """

    @property
    def identifier(self) -> str:
        """The key of the hook's data in a checkpoint: unique in the job, and the same in every run."""
        ...

    def trigger(self, checkpoint_id: CheckpointId, timestamp_ms: int) -> bytes | None:
        """A checkpoint begins; no task has been told yet. Returns the data to store with it.

        Any error fails the checkpoint.
        """
        ...

    def restore(self, checkpoint_id: CheckpointId, data: bytes | None) -> None:
        """An attempt is about to start from this checkpoint. `data` is what `trigger` returned for it.

        If it raises it is called again, a bounded number of times. Then the attempt fails.
        """
        ...
