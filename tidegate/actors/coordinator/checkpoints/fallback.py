"""Passes over a damaged checkpoint for the one before it, down to the oldest one that is retained.

Rules:

- Only damage counts: something of the checkpoint was read and is wrong, or is not there. A storage that does not answer
  fails the attempt, and the same checkpoint is tried again.
- What was passed over is not tried again. It stays until a newer checkpoint is complete, or the job is over: somebody
  may be able to mend it, and what is found there tells more than a log line.
- Rows that were committed after the older checkpoint are processed again, so the tables are taken back before any task
  is deployed, and after everything is committed that was going to be.
- When none is left the job fails, with all reasons. It never starts afresh, nor from what another job has left: rows of
  its own would come twice.
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
    """What the attempt starts from cannot be restored. Each of its tasks may say so: the first one counts."""
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
