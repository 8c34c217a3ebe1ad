"""`WatchedEffects`: the effects of a simulated task, under the eyes of the oracle of local copies."""

from __future__ import annotations

from typing import Any

from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as do
from tidegate.storage.ids import CheckpointId
from tidegate.testing.oracle.files.node_copies import NodeCopiesOracle


class WatchedEffects(TaskEffects):
    """As every task's. What was kept is looked at after each deletion."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """As `TaskEffects`."""
        super().__init__(*args, **named)
        self.copies_oracle: NodeCopiesOracle | None = None
        self._bases: dict[CheckpointId, frozenset[str]] = {}
        self._completed: CheckpointId | None = None
        """The newest complete checkpoint that the task was told of. Older news may come after, and changes nothing."""

    def persist(self, instruction: do.PersistSnapshot, sync_ms: int) -> ev.SnapshotPersisted | ev.SnapshotFailed | None:
        """Remember on which files a checkpoint builds that this task has written its part of."""
        event = super().persist(instruction, sync_ms)
        if isinstance(event, ev.SnapshotPersisted):
            self._bases[event.checkpoint_id] = frozenset() if instruction.base is None else instruction.base.paths
        return event

    def checkpoint_over(self, event: ev.CheckpointCompleted | ev.CheckpointAborted) -> None:
        """Copies go, and then the oracle looks."""
        super().checkpoint_over(event)
        if self.copies_oracle is None or self._copies is None:
            return
        task, number = self._descriptor.task, event.checkpoint_id
        if isinstance(event, ev.CheckpointAborted):
            self.copies_oracle.aborted(self._copies, task, number)
            return
        base = self._bases.pop(number, None)
        if self._completed is not None and number < self._completed:
            return  # What the newer one needs has stayed.
        self._completed = number
        if base is not None:
            self.copies_oracle.completed(self._copies, task, number, base)
