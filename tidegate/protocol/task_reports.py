"""Values that a task reports to the coordinator: measurements of a snapshot, and the origin of its restored
state.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class SnapshotMetrics:
    """Measurements of one snapshot of a task (Flink's `CheckpointMetrics`). Times are in ms, sizes in bytes.

    `start_delay_ms`: from the trigger to the first barrier at this task. `alignment_ms`: from the first barrier to the
    last. `sync_ms`, `async_ms`: the synchronous and the asynchronous part of the snapshot. `in_flight_bytes`: data that
    unaligned barriers overtook. `state_bytes`: all state to which the snapshot refers. `incremental_bytes`: state that
    this snapshot wrote itself.
    """

    start_delay_ms: int = 0
    alignment_ms: int = 0
    sync_ms: int = 0
    async_ms: int = 0
    state_bytes: int = 0
    incremental_bytes: int = 0
    in_flight_bytes: int = 0
    unaligned: bool = False


NO_METRICS = SnapshotMetrics()
"""The measurements of a task that has not reported any: all zero."""


@wire
class StateOrigin(enum.Enum):
    """The most expensive place from which a task read state at its start.

    A restore reads each part of the state from the cheapest place that has it. Small parts may come from storage in any
    case.
    """

    MEMORY = "memory"
    """Memory of the process, where the previous task left it."""
    LOCAL_COPY = "local copy"
    """Files on the disk of the node."""
    STORAGE = "checkpoint storage"
    """The primary copy in checkpoint storage, or the checkpoint's metadata."""
