"""The coordinator machine: deployment, checkpoints, failover and the end of one job, as a fold over its events.

Every event is logged before the instructions that follow from it are carried out, and replaying the log (dropping the
instructions) gives the same state. Rules that it keeps:

- A checkpoint is complete when, and only when, its `_metadata` was created by one conditional create (invariant 4).
  Where it is not known whether that happened, a tombstone is created in its place: whichever is there first decides,
  also against a coordinator that was thought dead.
- An attempt is restored only after the fate of every checkpoint is known, from the newest completed one (invariant 7).
- Sink files are committed checkpoint by checkpoint, in order, and a checkpoint is deleted only after its sink files
  were committed and newer ones are complete (invariants 5 and 6).
- Checkpoint ids are never used twice, failed or not.
"""

from __future__ import annotations

from functools import singledispatchmethod

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoints import CheckpointKeeper
from tidegate.actors.coordinator.spec import JobSpec, RestorePoint
from tidegate.actors.coordinator.state import CoordinatorState, JobStatus, PendingPhase
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber

FAILURES_REMEMBERED_MAX = 100_000


class CoordinatorMachine:
    """One job's coordinator. `state` may be a stored fold, to replay only the rest of the log."""

    def __init__(self, state: CoordinatorState | None = None) -> None:
        self.state = state if state is not None else CoordinatorState()
        self._instructions: list[do.CoordinatorInstruction] = []
        self._checkpoints = CheckpointKeeper(self.state, self._instructions.append)

    def handle(self, event: ev.CoordinatorEvent) -> list[do.CoordinatorInstruction]:
        """Take in one fact; returns what has to be done about it, in order, once the fact is logged."""
        assert not self._instructions
        if self.state.status.terminal and not isinstance(event, ev.CoordinatorStarted):
            self._on_after_end(event)
        else:
            self._on(event)
            self._proceed(event.at_ms)
        self._validate()
        instructions = list(self._instructions)
        self._instructions.clear()
        return instructions

    # --- life of the job ------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: ev.CoordinatorEvent) -> None:
        raise ProtocolError(f"a coordinator is not told {type(event).__name__}")

    @_on.register
    def _on_submitted(self, event: ev.JobSubmitted) -> None:
        if self.state.spec is not None:
            raise ProtocolError(f"job {self.state.spec.job_id} was submitted twice")
        self.state.spec = event.spec
        if event.spec.restore is not None and event.spec.restore.final:
            self._end(JobStatus.FINISHED, None, event.at_ms)
        else:
            self._deploy(event.at_ms)

    @_on.register
    def _on_started(self, event: ev.CoordinatorStarted) -> None:
        if event.generation <= self.state.generation:
            raise ProtocolError(f"generation {event.generation} follows {self.state.generation}")
        self.state.generation = event.generation
        if self.state.spec is None:
            return
        if self.state.status.terminal:
            self._instructions.append(do.EndJob(self.state.status.value, self.state.ending_reason))
            return
        self._instructions.append(do.CancelAttempt(self.state.attempt))
        self._checkpoints.drop_collecting("the coordinator was lost")
        self._checkpoints.take_over()
        if self.state.status is JobStatus.ENDING:
            self.state.finished = dict.fromkeys(self._spec.tasks)
        else:
            self.state.status = JobStatus.RESTARTING
            self.state.restart_due = True

    @_on.register
    def _on_ready(self, event: ev.TaskReady) -> None:
        if event.attempt != self.state.attempt or self.state.status is not JobStatus.DEPLOYING:
            return
        self.state.ready[event.task] = None
        if len(self.state.ready) == len(self._spec.tasks):
            self.state.status = JobStatus.RUNNING
            self._instructions.append(do.StartSources(self.state.attempt, self._spec.sources))
            self._checkpoints.start_periodic(event.at_ms)

    @_on.register
    def _on_task_failed(self, event: ev.TaskFailed) -> None:
        if event.attempt == self.state.attempt:
            self._fail_attempt(f"{event.task}: {event.reason}", event.at_ms)

    @_on.register
    def _on_end_of_data(self, event: ev.TaskReachedEndOfData) -> None:
        if event.attempt == self.state.attempt:
            self.state.ended[event.task] = None

    @_on.register
    def _on_finished(self, event: ev.TaskFinished) -> None:
        if event.attempt == self.state.attempt:
            self.state.ended[event.task] = None
            self.state.finished[event.task] = None
            self._checkpoints.task_finished(event.task)
            if self.state.status is JobStatus.RUNNING and len(self.state.finished) == len(self._spec.tasks):
                # Each was covered by a checkpoint when it left, so nothing is missing.
                self._end(JobStatus.FINISHED, None, event.at_ms)

    @_on.register
    def _on_cancel(self, event: ev.CancelRequested) -> None:
        if self.state.status is not JobStatus.ENDING:
            self._end(JobStatus.CANCELLED, "cancelled by the user", event.at_ms)

    @_on.register
    def _on_timer(self, event: ev.TimerFired) -> None:
        name, _, argument = event.timer.partition(":")
        if name == "restart":
            if self.state.status is JobStatus.RESTARTING and int(argument) == self.state.attempt + 1:
                self.state.restart_due = True
        elif name == "deploy":
            if self.state.status is JobStatus.DEPLOYING and int(argument) == self.state.attempt:
                missing = next(t for t in self._spec.tasks if t not in self.state.ready)
                limit_ms = self._spec.deploy_timeout_ms
                self._fail_attempt(f"{missing} was not ready within {limit_ms} ms", event.at_ms)
        elif name == "ending":
            self.state.finished = dict.fromkeys(self._spec.tasks)
        elif (failure := self._checkpoints.timer(name, argument, event.at_ms)) is not None:
            self._fail_attempt(failure, event.at_ms)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    @_on.register
    def _on_requested(self, event: ev.CheckpointRequested) -> None:
        self._checkpoints.request(event.request)

    @_on.register
    def _on_acknowledged(self, event: ev.CheckpointAcknowledged) -> None:
        self._checkpoints.acknowledged(event)

    @_on.register
    def _on_declined(self, event: ev.CheckpointDeclined) -> None:
        failure = self._checkpoints.declined(event)
        if failure is not None:
            self._fail_attempt(failure, event.at_ms)

    @_on.register
    def _on_metadata_written(self, event: ev.MetadataWritten) -> None:
        completed = self._checkpoints.metadata_written(event.checkpoint_id, event.at_ms)
        if completed is not None and completed.final and self.state.status is not JobStatus.ENDING:
            self._end(JobStatus.FINISHED, None, event.at_ms)

    @_on.register
    def _on_voided(self, event: ev.CheckpointVoided) -> None:
        failure = self._checkpoints.voided(event.checkpoint_id)
        if failure is not None:
            self._fail_attempt(failure, event.at_ms)

    @_on.register
    def _on_metadata_failed(self, event: ev.MetadataWriteFailed) -> None:
        self._checkpoints.metadata_failed(event)

    @_on.register
    def _on_committed(self, event: ev.SinksCommitted) -> None:
        self._checkpoints.sinks_committed(event.checkpoint_id)

    @_on.register
    def _on_commit_failed(self, event: ev.SinkCommitFailed) -> None:
        self._checkpoints.commit_failed(event)

    @_on.register
    def _on_discarded(self, event: ev.CheckpointDiscarded) -> None:
        self._checkpoints.discarded(event.checkpoint_id)

    @_on.register
    def _on_discard_failed(self, event: ev.CheckpointDiscardFailed) -> None:
        self._checkpoints.discard_failed(event)

    # --- transitions ----------------------------------------------------------------------------------------------

    @property
    def _spec(self) -> JobSpec:
        if self.state.spec is None:
            raise ProtocolError("no job was submitted")
        return self.state.spec

    def _deploy(self, at_ms: int) -> None:
        state = self.state
        state.status = JobStatus.DEPLOYING
        state.attempt = AttemptNumber(state.attempt + 1)
        state.ready, state.ended, state.finished = {}, {}, {}
        state.committed_files = {}
        state.restart_due = state.due = False
        state.consecutive_failures = 0
        restore = self._spec.restore
        if state.completed:
            newest = state.completed[-1]
            restore = RestorePoint(self._spec.root, self._spec.job_id, newest.checkpoint_id, newest.final)
        self._instructions.append(do.DeployAttempt(state.attempt, restore))
        self._instructions.append(do.SetTimer(f"deploy:{state.attempt}", at_ms + self._spec.deploy_timeout_ms))

    def _fail_attempt(self, reason: str, at_ms: int) -> None:
        state = self.state
        if state.status is JobStatus.ENDING:
            state.finished = dict.fromkeys(self._spec.tasks)
            return
        if state.status is JobStatus.RESTARTING:
            return
        state.failure_times_ms = (*state.failure_times_ms, at_ms)[-FAILURES_REMEMBERED_MAX:]
        delay_ms = self._spec.restart.decide(state.failure_times_ms, at_ms)
        state.last_failure = reason
        if delay_ms is None:
            self._end(JobStatus.FAILED, reason, at_ms)
            return
        self._instructions.append(do.CancelAttempt(state.attempt))
        self._checkpoints.drop_collecting(f"the attempt failed: {reason}")
        state.status = JobStatus.RESTARTING
        state.restart_due = False
        self._instructions.append(do.SetTimer(f"restart:{state.attempt + 1}", at_ms + delay_ms))

    def _end(self, status: JobStatus, reason: str | None, at_ms: int) -> None:
        state = self.state
        waits_for_tasks = status is JobStatus.FINISHED and state.status is JobStatus.RUNNING
        state.status = JobStatus.ENDING
        state.ending_status, state.ending_reason = status, reason
        self._checkpoints.drop_collecting(f"the job is ending: {reason or status.value}")
        if waits_for_tasks:
            self._instructions.append(do.SetTimer("ending", at_ms + self._spec.deploy_timeout_ms))
        else:
            self._instructions.append(do.CancelAttempt(state.attempt))
            state.finished = dict.fromkeys(self._spec.tasks)

    def _proceed(self, at_ms: int) -> None:
        """Take the steps that were waiting for something, if it has happened."""
        state = self.state
        if state.spec is None:
            return
        if (failure := self._checkpoints.storage_failure) is not None and not state.gave_up:
            state.gave_up = True
            if state.status is not JobStatus.ENDING:
                self._end(JobStatus.FAILED, failure, at_ms)
            else:
                state.ending_status, state.ending_reason = JobStatus.FAILED, failure
        if state.status is JobStatus.RESTARTING and state.restart_due and not state.pending:
            self._deploy(at_ms)
        elif state.status is JobStatus.RUNNING:
            self._checkpoints.trigger_if_due(at_ms)
        elif state.status is JobStatus.ENDING:
            self._end_if_over()

    def _end_if_over(self) -> None:
        state = self.state
        waits = state.pending or state.commits or len(state.finished) < len(self._spec.tasks)
        if waits and not state.gave_up:
            return
        assert state.ending_status is not None
        state.status = state.ending_status
        self._instructions.append(do.EndJob(state.status.value, state.ending_reason))

    def _on_after_end(self, event: ev.CoordinatorEvent) -> None:
        """Nothing changes after the end, but for deletions that were under way; requests are refused."""
        if isinstance(event, ev.CheckpointRequested):
            error = f"the job is {self.state.status.value}"
            self._instructions.append(do.CompleteRequest(event.request, None, error))
        elif isinstance(event, ev.CheckpointDiscarded):
            self._checkpoints.discarded(event.checkpoint_id)

    def _validate(self) -> None:
        """Invariants that hold after every event; cheap, always on."""
        state = self.state
        writing = [p for p in state.pending.values() if p.phase is not PendingPhase.COLLECTING]
        assert all(p.fully_acknowledged for p in writing), "only a fully acknowledged checkpoint is written"
        assert state.status is JobStatus.RUNNING or len(writing) == len(state.pending), (
            "acknowledgements are collected only while the job runs"
        )
        ids = [c.checkpoint_id for c in state.completed]
        assert ids == sorted(set(ids)), "completed checkpoints are ordered and unique"
        assert all(n < state.next_checkpoint_id for n in (*ids, *state.pending)), "ids are never used twice"
        assert not (set(ids) & set(state.discards)), "what is retained is never deleted (invariant 5)"
