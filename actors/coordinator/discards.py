"""Deletes what nobody needs any more, with a bounded number of attempts; the rest is swept when the job ends."""

from __future__ import annotations

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.context import CoordinatorContext
from tidegate.actors.coordinator.state import SavepointDiscard
from tidegate.storage.ids import CheckpointId
from tidegate.storage.metadata import SubtaskState


class Discarder:
    """Deletions of one job."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def checkpoint(self, checkpoint_id: CheckpointId, voided: bool) -> None:
        """Delete a checkpoint that is not retained; of a voided one the tombstone stays."""
        state = self._context.state
        needed = {*(c.checkpoint_id for c in state.completed), *(c.checkpoint_id for c in state.commits)}
        assert checkpoint_id not in needed, "what is retained, or not committed, is never deleted (invariant 5)"
        state.discards[checkpoint_id] = voided
        self._context.instruct(do.DiscardCheckpoint(checkpoint_id, voided))

    def state_of(self, subtask: SubtaskState) -> None:
        """Delete the files of an acknowledgement that was refused."""
        for handle in (subtask.handle, subtask.in_flight):
            if handle is not None and handle.path is not None:
                self._context.instruct(do.DiscardHandle(handle))

    def savepoint(self, checkpoint_id: CheckpointId, target: str | None) -> None:
        """Delete the folder of a savepoint that counts for nothing, where it has one."""
        if target is not None:
            self._context.state.savepoint_discards[checkpoint_id] = SavepointDiscard(target)
            self.repeat_savepoint(checkpoint_id)

    def repeat_savepoint(self, checkpoint_id: CheckpointId) -> None:
        """The time for another attempt has come."""
        discard = self._context.state.savepoint_discards.get(checkpoint_id)
        if discard is not None:
            self._context.instruct(do.DiscardSavepoint(discard.target, self._context.spec.job_id, checkpoint_id))

    def savepoint_done(self, checkpoint_id: CheckpointId) -> None:
        """Nothing of a savepoint is left."""
        self._context.state.savepoint_discards.pop(checkpoint_id, None)

    def savepoint_failed(self, event: ev.SavepointDiscardFailed) -> None:
        """Try again later, or leave it to the user."""
        state, spec = self._context.state, self._context.spec
        discard = state.savepoint_discards.get(event.checkpoint_id)
        if discard is None:
            return
        discard.failures += 1
        if discard.failures >= spec.storage_attempts_max:
            self.savepoint_done(event.checkpoint_id)
            return
        due_at_ms = event.at_ms + spec.storage_retry_ms * discard.failures
        self._context.instruct(do.SetTimer(f"discard-savepoint:{event.checkpoint_id}", due_at_ms))

    def repeat(self, checkpoint_id: CheckpointId) -> None:
        """The time for another attempt has come."""
        discards = self._context.state.discards
        if checkpoint_id in discards:
            self._context.instruct(do.DiscardCheckpoint(checkpoint_id, discards[checkpoint_id]))

    def take_over(self) -> None:
        """A new generation asks again."""
        for checkpoint_id in self._context.state.discards:
            self.repeat(checkpoint_id)
        for checkpoint_id in self._context.state.savepoint_discards:
            self.repeat_savepoint(checkpoint_id)

    def done(self, checkpoint_id: CheckpointId) -> None:
        """Nothing of a checkpoint is left."""
        self._context.state.discards.pop(checkpoint_id, None)
        self._context.state.discard_failures.pop(checkpoint_id, None)

    def failed(self, event: ev.CheckpointDiscardFailed) -> None:
        """Try again later, or leave it to the sweep."""
        state, spec = self._context.state, self._context.spec
        if event.checkpoint_id not in state.discards:
            return
        failures = state.discard_failures.get(event.checkpoint_id, 0) + 1
        if failures >= spec.storage_attempts_max:
            self.done(event.checkpoint_id)
            return
        state.discard_failures[event.checkpoint_id] = failures
        due_at_ms = event.at_ms + spec.storage_retry_ms * failures
        self._context.instruct(do.SetTimer(f"discard:{event.checkpoint_id}", due_at_ms))
