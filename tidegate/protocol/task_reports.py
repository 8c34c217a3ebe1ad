"""Values that a task reports to the coordinator: figures of a snapshot, and where its state was restored from."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class SnapshotMetrics:
    """Figures of one snapshot of a task (Flink's `CheckpointMetrics`). Times are in ms, sizes in bytes.

    `start_delay_ms`: from the trigger to the first barrier at this task. `alignment_ms`: from the first barrier to the
    last. `sync_ms`, `async_ms`: the two parts of the snapshot. `in_flight_bytes`: data that the barrier overtook.
    `state_bytes`: all state that the snapshot refers to. `incremental_bytes`: the part of it that the snapshot wrote.
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
"""The figures of a task that has not reported any."""


@wire
class StateOrigin(enum.Enum):
    """The place from which a task of an attempt got its state: the most expensive place that it needed.

    A restore reads each piece of state from the cheapest place that has it. Small parts may come from storage in any
    case.
    """

    MEMORY = "memory"
    """Memory of the process, where the previous task left it."""
    LOCAL_COPY = "local copy"
    """Files on the disk of the node."""
    STORAGE = "checkpoint storage"
    """The primary copy in checkpoint storage, or the checkpoint's metadata."""
