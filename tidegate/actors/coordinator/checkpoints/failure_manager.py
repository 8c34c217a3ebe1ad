"""Counts failed checkpoints, and says when there are too many for the attempt (Flink's `CheckpointFailureManager`).

`abandonment.py` reports failures, `completion.py` and `deployment.py` end the count. Rules:

- A failed checkpoint counts if its reason counts (`CheckpointFailureReason.counted`), it is no savepoint, and it
  belongs to the newest attempt.
- Failures count in a row: a completed checkpoint, or a new attempt, forgives all before it.
"""

from __future__ import annotations

from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState, PendingCheckpoint
from tidegate.protocol.failure_reasons import CheckpointFailureReason


def describe(reason: CheckpointFailureReason, detail: str = "") -> str:
    """The reason and its detail, for people."""
    return f"{reason.value}: {detail}" if detail else reason.value


def count_failure(
    state: CoordinatorState, pending: PendingCheckpoint, reason: CheckpointFailureReason, detail: str
) -> str | None:
    """Count the failure. Returns why the attempt has to fail, or None.

    `<=` and not `<`: with `tolerable_failures` 0 the first failure is one too many.
    """
    assert state.spec is not None
    if not reason.counted or pending.properties.kind.is_savepoint or pending.attempt != state.attempt:
        return None
    state.consecutive_failures += 1
    tolerable = state.spec.checkpoints.tolerable_failures
    if state.consecutive_failures <= tolerable:
        return None
    return (
        f"checkpoint {pending.checkpoint_id} failed ({describe(reason, detail)}); {state.consecutive_failures} in a "
        f"row, {tolerable} tolerated"
    )


def forgive(state: CoordinatorState) -> None:
    """A checkpoint has completed, or a new attempt begins."""
    state.consecutive_failures = 0
