"""The checkpoints of one job: trigger, collect, complete or give up, commit, subsume.

Works on the coordinator's state and appends instructions; the machine decides what a failed checkpoint means for the
job. Methods that return `str | None` return the reason for which the attempt has to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.plan import CheckpointPlan, make_plan
from tidegate.actors.coordinator.spec import JobSpec
from tidegate.actors.coordinator.state import (
    AcknowledgeResult,
    CompletedCheckpoint,
    CoordinatorState,
    JobStatus,
    PendingCheckpoint,
    PendingPhase,
    SinkCommit,
)
from tidegate.actors.identity import TaskId
from tidegate.storage.ids import CheckpointId
from tidegate.storage.metadata import METADATA_VERSION, CheckpointMetadata, Committable, SubtaskState

REQUESTS_MAX = 1_000
COMMITS_WAITING_MAX = 4
"""Completed checkpoints whose sink files are not visible yet, before the next one has to wait."""


class CheckpointKeeper:
    """Everything about checkpoints that the coordinator decides."""

    def __init__(self, state: CoordinatorState, instruct: Callable[[do.CoordinatorInstruction], None]) -> None:
        self._state = state
        self._instruct = instruct
        self.storage_failure: str | None = None
        """Set when storage did not answer within the allowed attempts."""

    @property
    def _spec(self) -> JobSpec:
        assert self._state.spec is not None
        return self._state.spec

    # --- trigger --------------------------------------------------------------------------------------------------

    def start_periodic(self, at_ms: int) -> None:
        """The attempt runs: schedule the first checkpoint, after a random delay in [min pause, interval] (C1)."""
        settings = self._spec.checkpoints
        if settings.interval_ms is None:
            return
        low_ms = min(settings.min_pause_ms, settings.interval_ms)
        mixed = (self._spec.seed * 0x9E3779B97F4A7C15 + self._state.attempt * 0xBF58476D1CE4E5B9) % 2**64
        delay_ms = low_ms + mixed % (settings.interval_ms - low_ms + 1)
        self._instruct(do.SetTimer(f"periodic:{self._state.attempt}", at_ms + delay_ms))

    def request(self, request: str) -> None:
        """A user asks for a checkpoint; refused when it cannot be taken or too many wait."""
        if self._state.status is not JobStatus.RUNNING:
            error = f"the job is {self._state.status.value}: not all required tasks are running"
        elif len(self._state.requests) >= REQUESTS_MAX:
            error = f"{REQUESTS_MAX} requests wait already: too many checkpoint requests"
        else:
            self._state.requests = (*self._state.requests, request)
            return
        self._instruct(do.CompleteRequest(request, None, error))

    def timer(self, name: str, argument: str, at_ms: int) -> str | None:
        """A timer of ours is due."""
        state = self._state
        number = int(argument)
        if name == "periodic" and number == state.attempt and state.status is JobStatus.RUNNING:
            assert self._spec.checkpoints.interval_ms is not None
            state.due = True
            self._instruct(do.SetTimer(f"periodic:{number}", at_ms + self._spec.checkpoints.interval_ms))
        elif name == "timeout":
            pending = state.pending.get(CheckpointId(number))
            if pending is not None and pending.phase is PendingPhase.COLLECTING:
                first = next(iter(pending.waiting))
                return self._fail(pending, f"expired; {len(pending.waiting)} tasks missing, {first} among them")
        elif name == "void":
            pending = state.pending.get(CheckpointId(number))
            if pending is not None:
                self._void(pending)
        elif name == "commit" and state.commits and state.commits[0].checkpoint_id == number:
            self._commit_next()
        elif name == "discard" and number in state.discards:
            self._instruct(do.DiscardCheckpoint(CheckpointId(number), state.discards[CheckpointId(number)]))
        return None

    def trigger_if_due(self, at_ms: int) -> None:
        """Start a checkpoint if one is wanted, none is pending (one at a time), and sinks keep up with committing."""
        state = self._state
        if state.pending or len(state.commits) >= COMMITS_WAITING_MAX:
            return
        all_ended = len(state.ended) == len(self._spec.tasks)
        if not (all_ended or state.requests):
            if not state.due:
                return
            wait_ms = state.last_completed_at_ms + self._spec.checkpoints.min_pause_ms - at_ms
            if wait_ms > 0:
                state.due = False
                self._instruct(do.SetTimer(f"periodic:{state.attempt}", at_ms + wait_ms))
                return
        plan = make_plan(self._spec, state.ready, state.finished)
        assert isinstance(plan, CheckpointPlan), "every task is ready in a job that runs"
        checkpoint_id = state.next_checkpoint_id
        state.next_checkpoint_id = CheckpointId(checkpoint_id + 1)
        state.due = False
        state.pending[checkpoint_id] = PendingCheckpoint(
            checkpoint_id, state.attempt, at_ms, dict.fromkeys(plan.wait), plan.finished, requests=state.requests
        )
        state.requests = ()
        self._instruct(do.TriggerCheckpoint(state.attempt, checkpoint_id, at_ms, plan.trigger))
        self._instruct(do.SetTimer(f"timeout:{checkpoint_id}", at_ms + self._spec.checkpoints.timeout_ms))

    # --- collect --------------------------------------------------------------------------------------------------

    def acknowledged(self, event: ev.CheckpointAcknowledged) -> AcknowledgeResult:
        """A task's part is durable. State of an acknowledgement that is refused is deleted (C4)."""
        state = self._state
        pending = state.pending.get(event.checkpoint_id)
        if pending is None or event.attempt != pending.attempt:
            known = any(c.checkpoint_id == event.checkpoint_id for c in state.completed)
            result = AcknowledgeResult.DUPLICATE if known else AcknowledgeResult.DISCARDED
        else:
            result = pending.acknowledge(event.task, event.state)
        handle = event.state.handle
        if (
            result in (AcknowledgeResult.DISCARDED, AcknowledgeResult.UNKNOWN)
            and handle is not None
            and handle.path is not None
        ):
            self._instruct(do.DiscardHandle(handle))
        if result is AcknowledgeResult.SUCCESS and pending is not None and pending.fully_acknowledged:
            pending.phase = PendingPhase.WRITING
            pending.metadata = self._metadata(pending)
            self._instruct(do.WriteMetadata(pending.metadata))
        return result

    def declined(self, event: ev.CheckpointDeclined) -> str | None:
        """A task cannot take part."""
        pending = self._state.pending.get(event.checkpoint_id)
        if pending is None or event.attempt != pending.attempt or pending.phase is not PendingPhase.COLLECTING:
            return None
        return self._fail(pending, f"declined by {event.task}: {event.message}")

    def task_finished(self, task: TaskId) -> None:
        """A checkpoint that was triggered before it was known that the task leaves waits for it in vain."""
        for pending in list(self._state.pending.values()):
            if pending.attempt == self._state.attempt and task in pending.waiting:
                self._remove(pending, f"{task} finished while the checkpoint was being triggered")

    def drop_collecting(self, reason: str) -> None:
        """The attempt is over: checkpoints that are still collecting end with it, which no tolerance counts."""
        for pending in list(self._state.pending.values()):
            if pending.phase is PendingPhase.COLLECTING:
                self._remove(pending, reason)
        for request in self._state.requests:
            self._instruct(do.CompleteRequest(request, None, reason))
        self._state.requests = ()

    def take_over(self) -> None:
        """A new generation asks again for everything whose answer the old one may have taken with it."""
        for pending in self._state.pending.values():
            self._void(pending)
        if self._state.commits:
            self._commit_next()
        for checkpoint_id, voided in self._state.discards.items():
            self._instruct(do.DiscardCheckpoint(checkpoint_id, voided))

    # --- complete -------------------------------------------------------------------------------------------------

    def metadata_written(self, checkpoint_id: CheckpointId, at_ms: int) -> CompletedCheckpoint | None:
        """The checkpoint is complete (C7). None when that was known."""
        state = self._state
        pending = state.pending.get(checkpoint_id)
        if pending is None or pending.phase is PendingPhase.COLLECTING:
            return None
        metadata = pending.metadata
        assert metadata is not None and pending.fully_acknowledged, "invariant 4"
        del state.pending[checkpoint_id]
        completed = CompletedCheckpoint(
            checkpoint_id, pending.triggered_at_ms, at_ms, metadata.size_bytes, metadata.final
        )
        state.completed = tuple(sorted((*state.completed, completed), key=lambda c: c.checkpoint_id))
        state.completed_checkpoints += 1
        state.consecutive_failures = 0
        state.last_completed_at_ms = at_ms
        committables = tuple(c for subtask in metadata.subtasks for c in subtask.committables)
        for task, subtask in pending.acknowledged.items():
            for c in subtask.committables:
                key = (task, c.uid)
                end = c.first_index + len(c.files)
                if pending.attempt == state.attempt:
                    state.committed_files[key] = max(state.committed_files.get(key, 0), end)
        state.commits = (*state.commits, SinkCommit(checkpoint_id, committables))
        if len(state.commits) == 1:
            self._commit_next()
        if pending.attempt == state.attempt:
            self._instruct(do.NotifyCompleted(state.attempt, checkpoint_id, self._unfinished()))
        for request in pending.requests:
            self._instruct(do.CompleteRequest(request, checkpoint_id, None))
        return completed

    def metadata_failed(self, event: ev.MetadataWriteFailed) -> None:
        """It is not known whether the metadata is there: find out by trying to void it, a bounded number of times."""
        pending = self._state.pending.get(event.checkpoint_id)
        if pending is None or pending.phase is PendingPhase.COLLECTING:
            return
        pending.phase = PendingPhase.VOIDING
        pending.failures += 1
        if pending.failures >= self._spec.storage_attempts_max:
            self.storage_failure = (
                f"checkpoint storage does not answer: the fate of checkpoint {event.checkpoint_id} is unknown "
                f"after {pending.failures} attempts ({event.error}); restore with restore='latest' once it does"
            )
            return
        due_at_ms = event.at_ms + self._spec.storage_retry_ms * pending.failures
        self._instruct(do.SetTimer(f"void:{event.checkpoint_id}", due_at_ms))

    def voided(self, checkpoint_id: CheckpointId) -> str | None:
        """The checkpoint can never complete."""
        pending = self._state.pending.get(checkpoint_id)
        if pending is None or pending.phase is PendingPhase.COLLECTING:
            return None
        return self._fail(pending, "its metadata could not be written", voided=True)

    def sinks_committed(self, checkpoint_id: CheckpointId) -> None:
        """The sink files of the first waiting checkpoint are visible."""
        state = self._state
        if not state.commits or state.commits[0].checkpoint_id != checkpoint_id:
            return
        state.commits = state.commits[1:]
        if state.commits:
            self._commit_next()
        else:
            self._subsume()

    def commit_failed(self, event: ev.SinkCommitFailed) -> None:
        """Try again: a commit is idempotent. After too many attempts the job fails, and a restore commits."""
        state = self._state
        if not state.commits or state.commits[0].checkpoint_id != event.checkpoint_id:
            return
        commit = state.commits[0]
        commit.failures += 1
        if event.fenced or commit.failures >= self._spec.storage_attempts_max:
            self.storage_failure = (
                f"the sink files of checkpoint {event.checkpoint_id} could not be committed in "
                f"{commit.failures} attempts ({event.error}); a job restored from it commits them"
            )
            return
        due_at_ms = event.at_ms + self._spec.storage_retry_ms * commit.failures
        self._instruct(do.SetTimer(f"commit:{event.checkpoint_id}", due_at_ms))

    def discarded(self, checkpoint_id: CheckpointId) -> None:
        """Nothing of a checkpoint is left."""
        self._state.discards.pop(checkpoint_id, None)
        self._state.discard_failures.pop(checkpoint_id, None)

    def discard_failed(self, event: ev.CheckpointDiscardFailed) -> None:
        """Try again, a bounded number of times; what is left then is swept when the job ends."""
        state = self._state
        if event.checkpoint_id not in state.discards:
            return
        failures = state.discard_failures.get(event.checkpoint_id, 0) + 1
        if failures >= self._spec.storage_attempts_max:
            self.discarded(event.checkpoint_id)
            return
        state.discard_failures[event.checkpoint_id] = failures
        due_at_ms = event.at_ms + self._spec.storage_retry_ms * failures
        self._instruct(do.SetTimer(f"discard:{event.checkpoint_id}", due_at_ms))

    # --- steps ----------------------------------------------------------------------------------------------------

    def _fail(self, pending: PendingCheckpoint, reason: str, voided: bool = False) -> str | None:
        state = self._state
        self._remove(pending, reason, voided)
        if pending.attempt != state.attempt or state.status is not JobStatus.RUNNING:
            return None
        state.consecutive_failures += 1
        if state.consecutive_failures <= self._spec.checkpoints.tolerable_failures:
            return None
        return (
            f"checkpoint {pending.checkpoint_id} failed ({reason}); {state.consecutive_failures} in a row, "
            f"{self._spec.checkpoints.tolerable_failures} tolerated"
        )

    def _remove(self, pending: PendingCheckpoint, reason: str, voided: bool = False) -> None:
        state = self._state
        del state.pending[pending.checkpoint_id]
        state.failed_checkpoints += 1
        self._discard(pending.checkpoint_id, voided)
        if pending.attempt == state.attempt and state.status is JobStatus.RUNNING:
            self._instruct(do.NotifyAborted(state.attempt, pending.checkpoint_id, self._unfinished()))
        for request in pending.requests:
            self._instruct(do.CompleteRequest(request, None, reason))

    def _unfinished(self) -> tuple[TaskId, ...]:
        finished = self._state.finished
        return tuple(t for t in self._spec.tasks if t not in finished) if finished else self._spec.tasks

    def _discard(self, checkpoint_id: CheckpointId, voided: bool) -> None:
        self._state.discards[checkpoint_id] = voided
        self._instruct(do.DiscardCheckpoint(checkpoint_id, voided))

    def _void(self, pending: PendingCheckpoint) -> None:
        assert pending.metadata is not None and pending.phase is not PendingPhase.COLLECTING
        pending.phase = PendingPhase.VOIDING
        self._instruct(do.VoidCheckpoint(replace(pending.metadata, operators=(), subtasks=(), void=True, final=False)))

    def _commit_next(self) -> None:
        commit = self._state.commits[0]
        if commit.committables:
            self._instruct(do.CommitSinks(commit.checkpoint_id, commit.committables))
        else:
            self.sinks_committed(commit.checkpoint_id)

    def _subsume(self) -> None:
        """Everything completed is committed: keep the newest ones, delete the rest."""
        state = self._state
        retained = self._spec.checkpoints.retained
        subsumed, state.completed = state.completed[:-retained], state.completed[-retained:]
        for checkpoint in subsumed:
            self._discard(checkpoint.checkpoint_id, voided=False)

    def _metadata(self, pending: PendingCheckpoint) -> CheckpointMetadata:
        spec = self._spec
        subtasks = []
        for task in spec.tasks:
            subtask = pending.acknowledged.get(task)
            if subtask is None:
                # It had finished: its state is over, and its sink files are covered by an earlier checkpoint.
                subtasks.append(SubtaskState(task.vertex, task.subtask, None, finished=True))
                continue
            trimmed = (
                self._uncommitted(c, self._state.committed_files.get((task, c.uid), 0)) for c in subtask.committables
            )
            subtasks.append(replace(subtask, committables=tuple(c for c in trimmed if c.files)))
        return CheckpointMetadata(
            version=METADATA_VERSION,
            job_id=spec.job_id,
            job_name=spec.job_name,
            checkpoint_id=pending.checkpoint_id,
            attempt=pending.attempt,
            triggered_at_ms=pending.triggered_at_ms,
            operators=spec.operators,
            subtasks=tuple(subtasks),
            final=all(s.finished for s in subtasks),
            restored_from=None if spec.restore is None else spec.restore.pointer,
        )

    @staticmethod
    def _uncommitted(committable: Committable, committed: int) -> Committable:
        """Drop files that an earlier completed checkpoint has covered: their task had not heard of it yet."""
        skip = min(max(0, committed - committable.first_index), len(committable.files))
        return replace(committable, first_index=committable.first_index + skip, files=committable.files[skip:])
