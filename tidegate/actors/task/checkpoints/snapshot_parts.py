"""`SnapshotParts`: what a snapshot asks of its task, so that `SubtaskCheckpoints` knows no operators and no outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidegate.actors.task.incremental.lineage import ChangedRows
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot


@dataclass(frozen=True, slots=True)
class SnapshotParts:
    """What the task does for a snapshot, the first four in this order; the other two are questions."""

    prepare: Callable[[], None]
    """Let the operators emit what belongs before the barrier. Not called once they have finished."""
    send: Callable[[], None]
    """Let the barrier leave."""
    stage: Callable[[], None]
    """Have what the sinks hold written to files."""
    freeze: Callable[[Cut], tuple[OperatorSnapshot, ...]]
    """The synchronous part."""
    finished: Callable[[], bool]
    """Whether the operators have finished."""
    changed_rows: ChangedRows
    """How many rows of keyed state a snapshot on top of a checkpoint would hold, and how many a whole one."""
