"""Copies completed savepoints into the folders of users, while the job takes further checkpoints.

`CheckpointFinalizer` passes each savepoint to it whose `_metadata` exists. Rules:

- The folder may be in any storage, also one that does not answer. No checkpoint, commit or attempt therefore waits for
  a copy.
- The copy contains the checkpoint with the metadata of its completion, and no later commits. The checkpoint stays until
  the copy is over, retained or not (invariant 5).
- A savepoint counts as completed, and its user is answered, when its own folder is complete.
- A copy that storage does not answer is tried again for `SAVEPOINT_OUTAGE_MS`. Every copy is given up after the timeout
  of checkpoints, counted from the completion of its checkpoint. `COPIES_MAX` limits the number of copies.
- The end of the job ends all copies. `CheckpointFinalizer` copies the savepoint of a stop before the job ends.
- A new coordinator repeats the copies. The lost coordinator may still be copying: both write the same files, and one of
  them creates `_metadata`.
"""

from __future__ import annotations

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoints.checkpoint_aborter import CheckpointAborter, describe, record_of
from tidegate.actors.coordinator.checkpoints.checkpoint_cleaner import SAVEPOINT_OUTAGE_MS, CheckpointCleaner
from tidegate.actors.coordinator.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.coordinator_state import PendingCheckpoint
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.storage.ids import CheckpointId


def has_failed_for_good(
    pending: PendingCheckpoint, event: ev.SavepointWriteFailed, storage_outage_ms: int
) -> str | None:
    """Returns the reason why the failed copy of a savepoint is not retried, or None if a retry may succeed."""
    if event.permanent:
        return event.error
    if event.away_ms < min(SAVEPOINT_OUTAGE_MS, storage_outage_ms):
        return None
    return f"{event.error} ({pending.failures} attempts in {event.away_ms / 1000:g} s)"


class SavepointCopies:
    """Copies the savepoints of one job to the users' folders. `CheckpointFinalizer` copies the savepoint of a stop."""

    def __init__(self, context: CoordinatorContext, aborter: CheckpointAborter, cleaner: CheckpointCleaner) -> None:
        self._context = context
        self._aborter = aborter
        self._cleaner = cleaner

    def begin(self, savepoint: PendingCheckpoint, at_ms: int) -> None:
        """Starts the copy of a savepoint whose checkpoint is complete, unless the job has begun to end."""
        state = self._context.state
        savepoint.failures = 0
        state.copies[savepoint.checkpoint_id] = savepoint
        if state.status is JobStatus.ENDING:
            assert state.ending_status is not None
            self.drop(at_ms, state.ending_reason or state.ending_status.value)
        else:
            self._copy(savepoint)
            self._set_limit(savepoint, at_ms)

    def take_over(self, at_ms: int) -> None:
        """Repeats the copies that the lost coordinator was making."""
        state = self._context.state
        for savepoint in state.copies.values():
            if savepoint.export_asked:
                state.lost_exports[savepoint.checkpoint_id] = None
                savepoint.export_asked = False
            self._copy(savepoint)
            self._set_limit(savepoint, at_ms)

    def written(self, event: ev.SavepointWritten) -> bool:
        """Answers the users who requested a savepoint, because its copy is complete.

        Returns False if no copy of this savepoint was under way.
        """
        savepoint = self._context.state.copies.pop(event.checkpoint_id, None)
        if savepoint is None:
            return False
        self._context.state.lost_exports.pop(event.checkpoint_id, None)
        savepoint.export_asked = False
        savepoint.path = event.path
        self.succeeded(savepoint, event.at_ms)
        self._cleaner.copy_is_over(event.checkpoint_id)
        return True

    def succeeded(self, pending: PendingCheckpoint, at_ms: int) -> None:
        """Records a completed checkpoint or savepoint in the statistics, and answers its requests."""
        state = self._context.state
        state.completed_checkpoints += 1
        record = record_of(pending, at_ms)
        history_max = self._context.settings.history_max
        state.statistics.has_completed(record, pending.subtasks, history_max)
        for request in pending.requests:
            self._context.instruct(do.CompleteRequest(request, pending.checkpoint_id, None, pending.path))

    def failed(self, event: ev.SavepointWriteFailed) -> bool:
        """Schedules a retry of a failed copy, or gives it up. Returns False if this savepoint was not being
        copied.
        """
        savepoint = self._context.state.copies.get(event.checkpoint_id)
        if savepoint is None:
            return False
        savepoint.export_asked = False
        savepoint.failures += 1
        detail = has_failed_for_good(savepoint, event, self._context.spec.storage_outage_ms)
        if detail is not None:
            self._give_up(savepoint, Reason.SAVEPOINT_NOT_WRITTEN, event.at_ms, detail)
        else:
            self._context.retry_later(f"export:{event.checkpoint_id}", event.at_ms, savepoint.failures)
        return True

    def repeat(self, checkpoint_id: CheckpointId) -> bool:
        """Repeats the copy of a savepoint, because its retry timer has fired. Returns False if no copy of it is under
        way.
        """
        savepoint = self._context.state.copies.get(checkpoint_id)
        if savepoint is not None and not savepoint.export_asked:
            self._copy(savepoint)
        return savepoint is not None

    def expire(self, checkpoint_id: CheckpointId, at_ms: int) -> None:
        """Gives up the copy of a savepoint that has exceeded the checkpoint timeout."""
        savepoint = self._context.state.copies.get(checkpoint_id)
        if savepoint is not None:
            limit_s = self._context.settings.timeout_ms / 1000
            detail = f"its copy to {savepoint.properties.target} is not whole after {limit_s:g} s (checkpoint timeout)"
            self._give_up(savepoint, Reason.SAVEPOINT_NOT_WRITTEN, at_ms, detail)

    def drop(self, at_ms: int, detail: str) -> None:
        """Gives up all copies of savepoints, because the job ends and does not wait for them."""
        for savepoint in list(self._context.state.copies.values()):
            target = savepoint.properties.target
            text = f"{detail}; the savepoint was still being copied to {target}, and is not whole"
            self._give_up(savepoint, Reason.JOB_ENDING, at_ms, text)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _copy(self, savepoint: PendingCheckpoint) -> None:
        permit = invariants.permit_copy(self._context.state, savepoint)
        assert savepoint.metadata is not None and savepoint.properties.target is not None
        savepoint.export_asked = True
        contested = savepoint.checkpoint_id in self._context.state.lost_exports
        order = do.WriteSavepoint(
            savepoint.properties.target, savepoint.metadata, complete=True, contested=contested, permit=permit
        )
        self._context.instruct(order)

    def _set_limit(self, savepoint: PendingCheckpoint, at_ms: int) -> None:
        due_ms = at_ms + self._context.settings.timeout_ms
        self._context.instruct(do.SetTimer(f"copy:{savepoint.checkpoint_id}", due_ms))

    def _give_up(self, savepoint: PendingCheckpoint, reason: Reason, at_ms: int, detail: str) -> None:
        """Records that the copy of a savepoint failed, and answers its requests. Its completed checkpoint can still be
        restored.
        """
        number = savepoint.checkpoint_id
        del self._context.state.copies[number]
        self._aborter.leave_copy(savepoint)
        text = describe(reason, detail)
        self._aborter.record(savepoint, reason, at_ms, text)
        for request in savepoint.requests:
            self._context.instruct(do.CompleteRequest(request, None, text, reason=reason))
        self._cleaner.copy_is_over(number)
