"""Deletes checkpoints, shared files and savepoint folders that are no longer needed, and retries failed deletions.

The other modules of this folder call `CheckpointCleaner` when a checkpoint is aborted or subsumed. Rules:

- A checkpoint stays while it is retained, has outstanding sink commits, or is the base of a pending checkpoint
  (invariant 5).
- A shared file is deleted with the last completed checkpoint that refers to it.
- Files whose deletion fails for too long are left to the sweep at the end of the job.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.coordinator_state import CheckpointDiscard, SavepointDiscard
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SubtaskState
from tidegate.storage.ids import CheckpointId

SAVEPOINT_OUTAGE_MS = 60_000
"""Time in ms for which the copy of a savepoint, or the deletion of its folder, is retried while storage does not
answer.

The folder may be in a storage that the job does not use otherwise, and that never answers.
"""
DISCARDS_MAX = 1_000
"""Limit of failed checkpoint deletions that are retried at a time. Savepoints have a separate limit of the same size.

Beyond the limit, the sweep at the end of the job deletes a checkpoint, and the folder of a savepoint is left to the
user.
"""


class CheckpointCleaner:
    """Deletes the checkpoints and savepoints of one job."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def given_up(self, checkpoint_id: CheckpointId, voided: bool) -> None:
        """Deletes the files of an aborted checkpoint. `voided`: the checkpoint has a tombstone, which is not
        deleted.
        """
        self._start(checkpoint_id, CheckpointDiscard(voided, shared=None))

    def subsumed(self, checkpoint_id: CheckpointId) -> None:
        """Deletes a completed checkpoint that is no longer retained, unless a pending one is based on it or it is being
        copied.

        The shared files to which only this checkpoint refers are deleted after it, so that a checkpoint that can be
        found never lacks a file.
        """
        state = self._context.state
        needed = invariants.is_built_on(state, checkpoint_id) or checkpoint_id in state.copies
        if not needed and checkpoint_id not in state.discards:
            self._start(checkpoint_id, CheckpointDiscard(False, shared=()))

    def copy_is_over(self, checkpoint_id: CheckpointId) -> None:
        """Deletes a checkpoint whose copy to a savepoint has ended, unless the checkpoint is needed for another
        reason.
        """
        if not invariants.is_needed(self._context.state, checkpoint_id):
            self.subsumed(checkpoint_id)

    def pending_is_over(self) -> None:
        """Deletes completed checkpoints that are no longer retained and that no pending checkpoint is based on any
        more.

        Called when a pending checkpoint has ended.
        """
        state = self._context.state
        retained = set(state.kept)
        for checkpoint_id in state.shared.not_retained(retained):
            self.subsumed(checkpoint_id)

    def has_completed(self, checkpoint_id: CheckpointId) -> bool:
        """Returns whether a checkpoint is known to have completed, retained or not."""
        state = self._context.state
        discard = state.discards.get(checkpoint_id)
        return (
            (discard is not None and discard.shared is not None)
            or checkpoint_id in state.shared.references
            or checkpoint_id in state.kept
        )

    def state_of(self, checkpoint_id: CheckpointId, subtask: SubtaskState) -> None:
        """Deletes the state files of one subtask whose acknowledgement was refused.

        Shared files to which other checkpoints refer are kept.
        """
        exclusive = tuple(h.path for h in (subtask.handle, subtask.in_flight) if h is not None and h.path is not None)
        shared = self._context.state.shared.not_needed(checkpoint_id, self._context.spec.job_id, subtask.shared_paths)
        if exclusive or shared:
            task = TaskId(subtask.vertex, subtask.subtask)
            permit = invariants.permit_refused_deletion(self._context.state, checkpoint_id, task, shared)
            self._context.instruct(do.DiscardFiles(checkpoint_id, (*exclusive, *shared), permit=permit))

    def savepoint(self, checkpoint_id: CheckpointId, target: str | None) -> None:
        """Deletes the user's folder of a failed savepoint. Does nothing if `target` is None."""
        if target is not None:
            self._context.state.savepoint_discards[checkpoint_id] = SavepointDiscard(target)
            self.repeat_savepoint(checkpoint_id)

    def repeat_savepoint(self, checkpoint_id: CheckpointId) -> None:
        """Orders the deletion of a failed savepoint's folder, unless a deletion is already running."""
        discard = self._context.state.savepoint_discards.get(checkpoint_id)
        if discard is not None and not discard.asked:
            discard.asked = True
            state = self._context.state
            job_id = self._context.spec.job_id
            voided = checkpoint_id in state.lost_exports
            permit = invariants.permit_savepoint_deletion(state, checkpoint_id, voided)
            self._context.instruct(do.DiscardSavepoint(discard.target, job_id, checkpoint_id, voided, permit=permit))

    def repeat_savepoints(self) -> None:
        """Orders the deletion of every failed savepoint's folder for which no deletion is running."""
        for checkpoint_id in self._context.state.savepoint_discards:
            self.repeat_savepoint(checkpoint_id)

    def savepoint_done(self, checkpoint_id: CheckpointId) -> None:
        """Records that the folder of a savepoint is deleted."""
        self._context.state.savepoint_discards.pop(checkpoint_id, None)
        self._context.state.lost_exports.pop(checkpoint_id, None)

    def savepoint_failed(self, event: ev.SavepointDiscardFailed) -> None:
        """Schedules a retry after the deletion of a savepoint's folder failed.

        Gives up after an outage of `SAVEPOINT_OUTAGE_MS`, or if too many deletions wait. The user then has to delete
        the folder.
        """
        if (discard := self._context.state.savepoint_discards.get(event.checkpoint_id)) is not None:
            discard.asked = False
        limit_ms = min(SAVEPOINT_OUTAGE_MS, self._context.spec.storage_outage_ms)
        if self._gives_up(self._context.state.savepoint_discards, event, "discard-savepoint", limit_ms):
            self.savepoint_done(event.checkpoint_id)

    def repeat(self, checkpoint_id: CheckpointId) -> None:
        """Instructs the driver to delete a checkpoint whose deletion is pending."""
        discard = self._context.state.discards.get(checkpoint_id)
        if discard is not None:
            permit = invariants.permit_deletion(self._context.state, checkpoint_id, discard.shared)
            self._context.instruct(do.DiscardCheckpoint(checkpoint_id, discard.voided, discard.shared, permit=permit))

    def take_over(self) -> None:
        """Repeats the deletions that the lost coordinator had ordered."""
        for checkpoint_id in self._context.state.discards:
            self.repeat(checkpoint_id)
        for discard in self._context.state.savepoint_discards.values():
            discard.asked = False
        self.repeat_savepoints()

    def done(self, checkpoint_id: CheckpointId) -> None:
        """Records that a checkpoint is deleted, and deletes the shared files that only it referred to."""
        state = self._context.state
        discard = state.discards.pop(checkpoint_id, None)
        if discard is not None and discard.shared is not None:
            paths = state.shared.release(checkpoint_id)
            if paths:
                self._start(checkpoint_id, CheckpointDiscard(False, paths))

    def failed(self, event: ev.CheckpointDiscardFailed) -> None:
        """Schedules a retry after the deletion of a checkpoint failed.

        Gives up after a long outage, or if too many deletions wait. The sweep of unreferenced files then deletes the
        checkpoint.
        """
        state = self._context.state
        if self._gives_up(state.discards, event, "discard", self._context.spec.storage_outage_ms):
            del state.discards[event.checkpoint_id]
            state.shared.leave(event.checkpoint_id)

    def _gives_up(
        self,
        waiting: Mapping[CheckpointId, CheckpointDiscard] | Mapping[CheckpointId, SavepointDiscard],
        event: ev.CheckpointDiscardFailed | ev.SavepointDiscardFailed,
        timer: str,
        limit_ms: int,
    ) -> bool:
        """Returns whether a failed deletion is given up. Otherwise sets the timer of its retry.

        A deletion is given up after `limit_ms` without an answer of storage, or if more than `DISCARDS_MAX` deletions
        wait.
        """
        discard = waiting.get(event.checkpoint_id)
        if discard is None:
            return False
        discard.failures += 1
        if event.away_ms >= limit_ms or len(waiting) > DISCARDS_MAX:
            return True
        self._context.retry_later(f"{timer}:{event.checkpoint_id}", event.at_ms, discard.failures)
        return False

    def _start(self, checkpoint_id: CheckpointId, discard: CheckpointDiscard) -> None:
        self._context.state.discards[checkpoint_id] = discard
        self.repeat(checkpoint_id)
