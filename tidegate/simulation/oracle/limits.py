"""The oracle of limits: how many checkpoints are pending side by side, seen from the barriers that start them (10).

- A checkpoint waits while so many are pending as may be at a time; savepoints count, too.
- A savepoint waits for other savepoints alone, or, where checkpoints are unaligned, for whatever is pending.
- The savepoint of a stop waits for nothing: it has given up whatever was pending.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.actors.coordinator.job.job_spec import CheckpointSettings
from tidegate.simulation.oracle.violation import InvariantViolated
from tidegate.storage.checkpoints.metadata import SnapshotKind


def check_limits(
    settings: CheckpointSettings, number: int, kind: SnapshotKind, pending: Sequence[SnapshotKind]
) -> bool:
    """Look at a checkpoint that starts beside pending ones. Whether it has gone ahead of one. InvariantViolated."""
    if kind.stops:
        return False
    goes_ahead = kind.is_savepoint and not settings.unaligned
    counted = [each for each in pending if each.is_savepoint or not goes_ahead]
    if len(counted) >= settings.max_concurrent:
        raise InvariantViolated(
            10,
            f"{kind.value} {number} starts while {len(counted)} are pending that it has to wait for; "
            f"{settings.max_concurrent} at a time was asked for",
        )
    return len(pending) >= settings.max_concurrent
