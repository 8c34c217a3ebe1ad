"""Aborts checkpoints: notifies the tasks, deletes the written files, and answers requests with the reason.

`CheckpointAborter` is called wherever a checkpoint cannot continue: after a decline, a timeout, a failed write, or the
end of an attempt. Rules:

- Every failure has one reason from a fixed list (`CheckpointFailureReason`), and may have a text with details.
- If the savepoint of a `stop` fails after its trigger, the tasks have already ended their data. The attempt is
  therefore started again. The restart strategy does not count this as a failure.
- The folder of a savepoint is deleted once no process writes to it any more. A running copy is stopped, and the folder
  is deleted after the answer of the copy. If the coordinator was lost, the answer is lost too and the copy may
  continue. The savepoint is then voided with a tombstone.
- A failed final checkpoint is tried again. It waits for a pause, unless the reason cannot come again.
- If a checkpoint fails because a task was just leaving, its requests go back into the queue, so that users need not
  repeat them. The same holds if its coordinator was lost while the tasks continue.
- A stop outlives its attempt and waits for the next attempt. It is refused once the job is over, or after `RETRIES_MAX`
  attempts that ended before its savepoint was complete.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoint_requests import RETRIES_MAX, CheckpointRequest, enqueue
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointRecord, vertex_statistics
from tidegate.actors.coordinator.checkpoints.checkpoint_cleaner import CheckpointCleaner
from tidegate.actors.coordinator.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.coordinator_state import CoordinatorState, PendingCheckpoint
from tidegate.actors.coordinator.phases import JobStatus, PendingInput, PendingPhase
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.storage.ids import CheckpointId

_ATTEMPT_IS_OVER = frozenset({Reason.JOB_FAILOVER, Reason.COORDINATOR_LOST})
TASK_LEAVES = (Reason.TASK_FINISHED, Reason.TASK_CLOSING)
_MAY_COME_AGAIN = frozenset(
    {
        Reason.TASK_NOT_READY,
        Reason.TASK_CLOSING,
        Reason.UNION_STATE_PARTLY_FINISHED,
        Reason.CANCEL_BARRIER,
        Reason.STORAGE_AWAY,
    }
)


class CheckpointAborter:
    """Aborts the checkpoints of one job."""

    def __init__(self, context: CoordinatorContext, cleaner: CheckpointCleaner) -> None:
        self._context = context
        self._cleaner = cleaner

    def give_up(
        self, pending: PendingCheckpoint, reason: Reason, at_ms: int, detail: str = "", voided: bool = False
    ) -> None:
        """Aborts a pending checkpoint.

        `voided`: True if storage has a tombstone under the name of the checkpoint's `_metadata`, so that it can never
        complete.
        """
        state = self._context.state
        instruct = self._context.instruct
        triggered = pending.phase is not PendingPhase.HOOKS
        pending.advance(PendingInput.TOMBSTONE_FOUND if voided else PendingInput.GIVEN_UP)
        del state.pending[pending.checkpoint_id]
        text = describe(reason, detail)
        current = pending.attempt == state.attempt
        runs = current and state.status is JobStatus.RUNNING
        if self._may_be_asked_again(pending, reason, runs):
            self._ask_again(pending)
        self.record(pending, reason, at_ms, text)
        if pending.properties.kind.stops:
            self.leave_copy(pending)
        if triggered:
            self._cleaner.given_up(pending.checkpoint_id, voided)
        self._cleaner.pending_is_over()
        if triggered and (runs or (current and state.status is JobStatus.RESTARTING)):
            for attempt, tasks in state.listening:
                instruct(do.NotifyAborted(attempt, pending.checkpoint_id, tasks))
        if runs and not self._is_over(reason):
            self._judge(pending, reason, at_ms, detail, triggered)
        if state.stopping == pending.checkpoint_id:
            state.stopping = None
        for request in pending.requests:
            instruct(do.CompleteRequest(request, None, text, reason=reason))

    def give_up_open(self, reason: Reason, at_ms: int, detail: str = "", before: CheckpointId | None = None) -> None:
        """Aborts all pending checkpoints whose `_metadata` is not being written yet. `before`: only checkpoints with a
        smaller id.
        """
        for pending in list(self._context.state.pending.values()):
            if pending.phase.open and (before is None or pending.checkpoint_id < before):
                self.give_up(pending, reason, at_ms, detail)

    def _may_be_asked_again(self, pending: PendingCheckpoint, reason: Reason, runs: bool) -> bool:
        """Returns whether the user requests of the failed checkpoint are queued again, instead of being refused."""
        if pending.retries >= RETRIES_MAX:
            return False
        if runs and (reason in TASK_LEAVES or self._is_adopted(reason)):
            return True
        restarts = reason in _ATTEMPT_IS_OVER or self._context.state.status is JobStatus.RESTARTING
        return restarts and pending.properties.kind.stops

    def _is_adopted(self, reason: Reason) -> bool:
        """Returns whether the reason is the loss of the coordinator while the tasks of the attempt continue to run."""
        return reason is Reason.COORDINATOR_LOST and self._context.state.status is JobStatus.RUNNING

    def _is_over(self, reason: Reason) -> bool:
        """Returns whether the reason is the end of the checkpoint's attempt."""
        return reason in _ATTEMPT_IS_OVER and not self._is_adopted(reason)

    def _ask_again(self, pending: PendingCheckpoint) -> None:
        """Puts the user requests of a failed checkpoint back into the queue."""
        state = self._context.state
        for name in pending.requests:
            request = CheckpointRequest(name, pending.triggered_at_ms, pending.properties, pending.retries + 1)
            state.requests, refused = enqueue(state.requests, request)
            if refused is not None:
                self.refuse((refused.request,), Reason.TOO_MANY_REQUESTS, f"{len(state.requests)} wait already")
        pending.requests = ()

    def refuse(self, requests: Iterable[str], reason: Reason, detail: str = "") -> None:
        """Answers requests with an error: the reason why no checkpoint was taken, and its detail."""
        for request in requests:
            self._context.instruct(do.CompleteRequest(request, None, describe(reason, detail), reason=reason))

    def refuse_queued(self, reason: Reason, detail: str = "") -> None:
        """Refuses all queued requests. If only the attempt has ended, requests for a stop stay in the queue."""
        state = self._context.state
        kept = tuple(r for r in state.requests if r.properties.kind.stops) if reason in _ATTEMPT_IS_OVER else ()
        queue = state.requests
        state.requests = kept
        self.refuse((r.request for r in queue if r not in kept), reason, detail)

    def leave_copy(self, savepoint: PendingCheckpoint) -> None:
        """Deletes the user's folder of a failed savepoint. If a copy is still running, stops that first and deletes
        after its answer.
        """
        number = savepoint.checkpoint_id
        target = savepoint.properties.target
        assert target is not None
        if savepoint.export_asked:
            self._context.state.exports[number] = target
            self._context.instruct(do.StopCopy(number))
        elif savepoint.path is not None or savepoint.failures:
            self._cleaner.savepoint(number, target)

    def export_answered(self, checkpoint_id: CheckpointId) -> None:
        """Deletes the user's folder of an aborted savepoint, because the copy to it has ended."""
        target = self._context.state.exports.pop(checkpoint_id, None)
        self._cleaner.savepoint(checkpoint_id, target)

    def take_over(self) -> None:
        """Takes over savepoint copies that the lost coordinator was stopping: deletes their folders and writes
        tombstones.

        Such a copy may still be running, so a tombstone keeps it from completing.
        """
        state = self._context.state
        state.lost_exports |= dict.fromkeys(state.exports)
        for checkpoint_id in list(state.exports):
            self.export_answered(checkpoint_id)

    def give_up_deciding(self, detail: str) -> None:
        """Refuses the requests of all pending checkpoints, because the coordinator stops looking up whether their
        `_metadata` exists.
        """
        for pending in self._context.state.pending.values():
            if pending.path is not None:
                self._cleaner.savepoint(pending.checkpoint_id, pending.properties.target)
            requests = pending.requests
            pending.requests = ()
            self.refuse(requests, Reason.METADATA_NOT_WRITTEN, detail)

    def _judge(self, pending: PendingCheckpoint, reason: Reason, at_ms: int, detail: str, triggered: bool) -> None:
        """Decides whether the failure of a checkpoint makes the running attempt fail. Schedules another try of a final
        checkpoint.
        """
        state = self._context.state
        context = self._context
        if reason is Reason.JOB_ENDING:
            return
        if pending.properties.kind.stops:
            if triggered:
                text = describe(reason, detail)
                context.stop_failure = f"the savepoint {pending.checkpoint_id} that was to end the job failed: {text}"
            return
        is_final = len(state.ended) == len(context.spec.tasks)
        if is_final and (reason.counted or reason in _MAY_COME_AGAIN):
            state.final_not_before_ms = at_ms + context.spec.storage_retry_ms
            context.instruct(do.SetTimer(f"final:{state.attempt}", state.final_not_before_ms))
        failure = count_failure(state, pending, reason, detail)
        if failure is not None and context.attempt_failure is None:
            context.attempt_failure = failure

    def record(self, pending: PendingCheckpoint, reason: Reason, at_ms: int, text: str) -> None:
        """Adds a failed checkpoint to the statistics."""
        state = self._context.state
        state.failed_checkpoints += 1
        state.statistics.has_failed(record_of(pending, at_ms, reason, text), self._context.settings.history_max)


def record_of(
    pending: PendingCheckpoint, at_ms: int, reason: Reason | None = None, text: str | None = None
) -> CheckpointRecord:
    """Returns the statistics record of a checkpoint that has ended."""
    vertices = vertex_statistics(pending.subtasks)
    in_flight_bytes = sum(v.in_flight_bytes.total for v in vertices)
    state_bytes = sum(v.state_bytes.total for v in vertices)
    return CheckpointRecord(
        checkpoint_id=pending.checkpoint_id,
        kind=pending.properties.kind,
        triggered_at_ms=pending.triggered_at_ms,
        # Clocks differ: the event that ended it may bear an earlier time than its trigger.
        ended_at_ms=max(at_ms, pending.triggered_at_ms),
        tasks=len(pending.waiting) + len(pending.acknowledged) + len(pending.finished),
        acknowledged=len(pending.acknowledged),
        state_bytes=state_bytes,
        incremental_bytes=sum(v.incremental_bytes.total for v in vertices),
        in_flight_bytes=in_flight_bytes,
        vertices=vertices,
        reason=reason,
        message=text,
        path=pending.path,
        requests=pending.requests,
    )


def describe(reason: CheckpointFailureReason, detail: str = "") -> str:
    """Returns the text of a failure reason, followed by the detail if there is one."""
    return f"{reason.value}: {detail}" if detail else reason.value


def count_failure(
    state: CoordinatorState, pending: PendingCheckpoint, reason: CheckpointFailureReason, detail: str
) -> str | None:
    """Counts a failed checkpoint (Flink's `CheckpointFailureManager`). Returns why the attempt has to fail, or None.

    Rules:

    - A failed checkpoint counts if its reason has `counted` set, if it is not a savepoint, and if it belongs to the
      current attempt.
    - Only consecutive failures count: a completed checkpoint, or a new attempt, resets the count.
    - With `tolerable_failures` 0 the first failure fails the attempt.
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
    """Resets the number of consecutive failed checkpoints, after a completed checkpoint or at the start of an
    attempt.
    """
    state.consecutive_failures = 0
