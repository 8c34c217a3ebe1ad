"""`SnapshotMetrics`: what a task reports about one of its snapshots (Flink's `CheckpointMetrics`)."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class SnapshotMetrics:
    """Times in ms, sizes in bytes.

    `start_delay_ms`: from the trigger to the first barrier at this task. `alignment_ms`: from the first barrier to the
    last. `sync_ms`, `async_ms`: the two parts of the snapshot. `in_flight_bytes`: data that the barrier overtook.
    `state_bytes`: all state that the snapshot refers to. `incremental_bytes`: the part of it that this snapshot wrote.
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
"""For a task that has reported nothing."""
