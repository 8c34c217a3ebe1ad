"""Master hooks: what a system outside the job is told about its checkpoints (Flink's `MasterTriggerRestoreHook`).

A source that decides itself when a checkpoint starts needs one: the hook tells the system outside which checkpoint is
wanted, and that system puts a mark into the data, at which the source takes its part of the checkpoint.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tidegate.storage.ids import CheckpointId


@runtime_checkable
class MasterHook(Protocol):
    """Called by the coordinator's process, one call at a time for each checkpoint. Travels with the job by cloudpickle.

    A call may be repeated, and a checkpoint that was triggered may fail: what is outside must be able to bear both.
    """

    @property
    def identifier(self) -> str:
        """Name that finds the hook's data in a checkpoint again: the same in every run of the job, unique within it."""
        ...

    def trigger(self, checkpoint_id: CheckpointId, timestamp_ms: int) -> bytes | None:
        """A checkpoint starts; no task has been told yet. Returns what is to be kept with it.

        Whatever it raises fails the checkpoint.
        """
        ...

    def restore(self, checkpoint_id: CheckpointId, data: bytes | None) -> None:
        """An attempt is about to start from this checkpoint; `data` is what was kept with it.

        Called again a bounded number of times when it raises; then the attempt has failed.
        """
        ...
