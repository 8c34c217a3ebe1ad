"""Passes over a damaged checkpoint for the one before it, down to the oldest one that is retained.

The machine calls `pass_over` when a task or a master hook has found damage. Rules:

- Only damage counts: something of the checkpoint was read and is wrong, or is not there. If storage does not answer,
  the same checkpoint is tried again.
- A checkpoint that was passed over is not tried again. It stays until a newer one is complete or the job is over:
  somebody may repair it, or find out what happened.
- Rows that were committed after the older checkpoint are processed again. So tables are taken back before any task is
  deployed, and after all waiting commits are done.
- When none is left, the job fails with all reasons. It never starts afresh, nor from another job's checkpoint: its own
  rows would come twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.coordinator.job.phases import JobStatus
from tidegate.actors.coordinator.messages.events import CheckpointDamaged
from tidegate.actors.coordinator.state.checkpoint_statistics import PassedOverCheckpoint
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.state.coordinator_state import DamagedCheckpoint


def pass_over(context: CoordinatorContext, restore: RestorePoint | None, event: CheckpointDamaged) -> None:
    """The attempt cannot be restored from its checkpoint. Each of its tasks may say so: the first one counts."""
    state = context.state
    stale = state.status is not JobStatus.DEPLOYING or event.attempt != state.attempt
    if stale or restore is None or restore.checkpoint_id != event.checkpoint_id:
        return
    state.statistics.was_passed_over(PassedOverCheckpoint(event.checkpoint_id, event.at_ms, event.reason))
    if not state.completed:
        context.restore_failure = f"{restore.pointer}, from which the job starts, cannot be restored: {event.reason}"
        return
    state.completed = state.completed[:-1]
    state.damaged = (*state.damaged, DamagedCheckpoint(event.checkpoint_id, event.reason))
    if not state.completed:
        context.restore_failure = f"no checkpoint is left to restart from: {passed_over_text(state.damaged)}"
        return
    state.fallback = state.completed[-1].checkpoint_id
    context.passed_over = passed_over_text(state.damaged[-1:])


def passed_over_text(damaged: Iterable[DamagedCheckpoint]) -> str:
    """Which checkpoints are damaged, and how, for people."""
    return "; ".join(f"checkpoint {one.checkpoint_id} is damaged ({one.reason})" for one in damaged)
