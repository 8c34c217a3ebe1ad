"""`SnapshotMetrics`: what a task tells of one of its snapshots (Flink's `CheckpointMetrics`)."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class SnapshotMetrics:
    """Times in ms, sizes in bytes.

    `start_delay_ms`: from the trigger to the first barrier at this task. `alignment_ms`: from the first barrier to the
    last one. `sync_ms`, `async_ms`: the two parts of the snapshot. `in_flight_bytes`: what the barrier has overtaken.
    `state_bytes`: all state that the snapshot refers to, `incremental_bytes`: what of that was written for it.
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
"""Where a task has told nothing."""
