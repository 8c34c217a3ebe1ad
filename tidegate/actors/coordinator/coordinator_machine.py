"""The coordinator machine: it deploys one job, takes its checkpoints, restarts it after failures, and ends it.

`CoordinatorHost` hands it events, logs them, and only then carries out the instructions that follow. Replaying the log
without carrying anything out gives the same state. Rules:

- A checkpoint is complete when, and only when, one conditional create has made its `_metadata` (invariant 4).
- An attempt begins when the fate of every checkpoint is known. It starts from the newest completed one that is whole
  (invariant 7).
- Sink files are committed checkpoint by checkpoint, in order. A completed checkpoint is deleted only after its sink
  files were committed and newer checkpoints are complete (invariants 5 and 6).
- No checkpoint id is used twice, even if its checkpoint failed.
- A stop ends the job after its savepoint. If that fails, the job goes on; if the attempt fails first, the next one
  takes the savepoint. The user is answered when the outcome is certain.

`invariants.py` has these rules as predicates and says why each is so. They are checked after every event, and before
anything that cannot be taken back. `job/phases.py` has the transition tables, `checkpoints/` takes checkpoints. The
cost of an event does not grow with the number of tasks, unless a checkpoint or an attempt starts or ends with it.
"""

from __future__ import annotations

from functools import singledispatchmethod

from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.adoption import Adoption
from tidegate.actors.coordinator.checkpoints.checkpoint_keeper import CheckpointKeeper
from tidegate.actors.coordinator.checkpoints.fallback import pass_over
from tidegate.actors.coordinator.deployment import Deployer
from tidegate.actors.coordinator.failover import Failover
from tidegate.actors.coordinator.job.job_spec import COPIES_TIMEOUT_MS, ENDING_TIMEOUT_MS
from tidegate.actors.coordinator.job.phases import OVER_BY, JobInput, JobStatus
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.requests.checkpoint_properties import keeps_checkpoints
from tidegate.actors.coordinator.restarts import Restarts
from tidegate.actors.coordinator.split_enumerator import assign
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.state.relevance import changes_nothing
from tidegate.actors.coordinator.state.shared_state_registry import SharedStateRegistry
from tidegate.protocol.failure_reasons import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.storage.errors import ProtocolError


class CoordinatorMachine:
    """One job's coordinator. `state` may be a stored fold, to replay only the rest of the log."""

    def __init__(self, state: CoordinatorState | None = None) -> None:
        self.state = state if state is not None else CoordinatorState()
        self._instructions: list[do.CoordinatorInstruction] = []
        self._context = CoordinatorContext(self.state, self._instructions.append)
        self._checkpoints = CheckpointKeeper(self._context)
        self._deployer = Deployer(self._context)
        self._restarts = Restarts(self._context)
        self._failover = Failover(self._context, self._checkpoints, self._deployer)
        self._adoption = Adoption(self._context, self._checkpoints, self._restarts)

    def handle(self, event: ev.CoordinatorEvent) -> list[do.CoordinatorInstruction]:
        """Take in one event. Returns what has to be done, in order, once the event is logged."""
        assert not self._instructions
        if self.ignores(event):
            return []
        if self.state.status.terminal and not isinstance(event, ev.CoordinatorStarted):
            self._on_after_end(event)
        else:
            self._handler_of(type(event))(self, event)
            if not self._context.nothing_follows:
                self._proceed(event.at_ms)
        self._context.nothing_follows = False
        invariants.check_state(self.state)
        instructions = list(self._instructions)
        self._instructions.clear()
        return instructions

    def ignores(self, event: ev.CoordinatorEvent) -> bool:
        """Whether nothing follows from this event, now or later. Then it is not logged."""
        return changes_nothing(event, self.state)

    # --- life of the job ------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: ev.CoordinatorEvent) -> None:
        raise ProtocolError(f"a coordinator is not told {type(event).__name__}")

    @_on.register
    def _on_submitted(self, event: ev.JobSubmitted) -> None:
        if self.state.spec is not None:
            raise ProtocolError(f"job {self.state.spec.job_id} was submitted twice")
        self.state.spec = event.spec
        self.state.know_tables(event.spec.table_heads)
        if event.spec.restore is not None and event.spec.restore.final:
            self._end(JobStatus.FINISHED, None, event.at_ms)
        else:
            self._deployer.deploy(event.at_ms)

    @_on.register
    def _on_started(self, event: ev.CoordinatorStarted) -> None:
        if not invariants.is_newer(self.state, event.generation):
            raise ProtocolError(f"generation {event.generation} follows {self.state.generation}")
        self.state.generation = event.generation
        self.state.storage_away = False
        if self.state.spec is None:
            return
        if self.state.status.terminal:
            self._checkpoints.discards.take_over()
            self._instructions.append(do.EndJob(self.state.status.value, self.state.ending_reason))
            return
        if self.state.status is JobStatus.ENDING:
            self._instructions.append(do.CancelAttempt(self.state.attempt))
            self.state.stop(self._context.spec.tasks)
            self._checkpoints.take_over(event.at_ms)
            self._forget_tasks()
            self.state.waits_for_copies = False
        else:
            self._adoption.take_over(event.at_ms)

    @_on.register
    def _on_answered(self, event: ev.TaskAnswered) -> None:
        self._adoption.answered(event)
        if event.finished:
            self._finished(event.task, event.at_ms)

    @_on.register
    def _on_ready(self, event: ev.TaskReady) -> None:
        deploys = self.state.status
        runs = self._deployer.ready(event)
        if self.state.status is not deploys:
            self._restarts.runs(event.at_ms)
        if runs:
            self._checkpoints.start_periodic(event.at_ms)

    @_on.register
    def _on_restore_delayed(self, event: ev.RestoreDelayed) -> None:
        self._deployer.delayed(event)

    @_on.register
    def _on_hooks_restored(self, event: ev.HooksRestored) -> None:
        self._deployer.hooks_restored(event)

    @_on.register
    def _on_hooks_not_restored(self, event: ev.HookRestoreFailed) -> None:
        self._deployer.hooks_not_restored(event)

    @_on.register
    def _on_tables_taken_back(self, event: ev.TablesTakenBack) -> None:
        self._deployer.tables_taken_back(event)

    @_on.register
    def _on_tables_not_taken_back(self, event: ev.TablesNotTakenBack) -> None:
        self._deployer.tables_not_taken_back(event)

    @_on.register
    def _on_damaged(self, event: ev.CheckpointDamaged) -> None:
        pass_over(self._context, self._deployer.restore_point(), event)

    @_on.register
    def _on_task_failed(self, event: ev.TaskFailed) -> None:
        if self.state.is_current(event.task, event.attempt):
            self._fail((event.task,), f"{event.task}: {event.reason}", event.at_ms, event.permanent, event.fingerprint)

    @_on.register
    def _on_process_given_up(self, event: ev.ProcessGivenUp) -> None:
        self.state.give_up(event.process)
        self._instructions.append(do.KillProcess(event.process))

    @_on.register
    def _on_end_of_data(self, event: ev.TaskReachedEndOfData) -> None:
        if self.state.is_current(event.task, event.attempt):
            self.state.ended[event.task] = None

    @_on.register
    def _on_finished(self, event: ev.TaskFinished) -> None:
        if self.state.is_current(event.task, event.attempt):
            self._finished(event.task, event.at_ms)

    @_on.register
    def _on_splits_requested(self, event: ev.SplitsRequested) -> None:
        self._context.nothing_follows = True
        self._instructions.append(assign(self.state, event, self._context.untaken))

    @_on.register
    def _on_storage_went_away(self, event: ev.StorageWentAway) -> None:
        self._checkpoints.storage_went_away(event)

    @_on.register
    def _on_storage_came_back(self, event: ev.StorageCameBack) -> None:
        self._checkpoints.storage_came_back(event.at_ms)

    @_on.register
    def _on_cancel(self, event: ev.CancelRequested) -> None:
        if self.state.status is not JobStatus.ENDING:
            self._end(JobStatus.CANCELLED, "cancelled by the user", event.at_ms)

    @_on.register
    def _on_timer(self, event: ev.TimerFired) -> None:
        name, _, argument = event.timer.partition(":")
        if name == "restart":
            self.state.restart_due = int(argument) == self.state.attempt + 1
        elif name in ("deploy", "deploy-delayed"):
            self._deployer.expire()
        elif name == "hooks":
            self._deployer.repeat_hooks(int(argument))
        elif name == "tables":
            self._deployer.repeat_tables(int(argument))
        elif name == "ending":
            self._forget_tasks()
        elif name == "copies":
            self.state.left_copies = True
        elif name == "ask":
            self._adoption.ask(event.at_ms)
        elif name == "adopt":
            self._fail(*self._adoption.missing(), event.at_ms)
        else:
            self._checkpoints.timer(name, argument, event.at_ms)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    @_on.register
    def _on_requested(self, event: ev.CheckpointRequested) -> None:
        self._checkpoints.request(event)

    @_on.register
    def _on_acknowledged(self, event: ev.CheckpointAcknowledged) -> None:
        self._checkpoints.acknowledged(event)

    @_on.register
    def _on_declined(self, event: ev.CheckpointDeclined) -> None:
        self._checkpoints.declined(event)

    @_on.register
    def _on_hooks_triggered(self, event: ev.HooksTriggered) -> None:
        self._checkpoints.hooks_triggered(event)

    @_on.register
    def _on_hook_failed(self, event: ev.HookFailed) -> None:
        self._checkpoints.hook_failed(event)

    @_on.register
    def _on_exported(self, event: ev.SavepointWritten) -> None:
        if not self._checkpoints.copies.written(event):
            self._checkpoints.writer.exported(event)

    @_on.register
    def _on_export_failed(self, event: ev.SavepointWriteFailed) -> None:
        if not self._checkpoints.copies.failed(event):
            self._checkpoints.writer.export_failed(event)

    @_on.register
    def _on_savepoint_discarded(self, event: ev.SavepointDiscarded) -> None:
        self._checkpoints.discards.savepoint_done(event.checkpoint_id)

    @_on.register
    def _on_savepoint_discard_failed(self, event: ev.SavepointDiscardFailed) -> None:
        self._checkpoints.discards.savepoint_failed(event)

    @_on.register
    def _on_metadata_written(self, event: ev.MetadataWritten) -> None:
        self._checkpoints.writer.written(event)

    @_on.register
    def _on_voided(self, event: ev.CheckpointVoided) -> None:
        self._checkpoints.writer.voided(event)

    @_on.register
    def _on_metadata_failed(self, event: ev.MetadataWriteFailed) -> None:
        self._checkpoints.writer.write_failed(event)

    @_on.register
    def _on_committed(self, event: ev.SinksCommitted) -> None:
        self._checkpoints.commits.committed(event)

    @_on.register
    def _on_commit_failed(self, event: ev.SinkCommitFailed) -> None:
        self._checkpoints.commits.failed(event)

    @_on.register
    def _on_discarded(self, event: ev.CheckpointDiscarded) -> None:
        self._checkpoints.discards.done(event.checkpoint_id)

    @_on.register
    def _on_discard_failed(self, event: ev.CheckpointDiscardFailed) -> None:
        self._checkpoints.discards.failed(event)

    # The handler that `self._on(event)` would find. `self._on` makes a new function for every call.
    _handler_of = staticmethod(_on.dispatcher.dispatch)

    # --- transitions ----------------------------------------------------------------------------------------------

    def _finished(self, task: TaskId, at_ms: int) -> None:
        self.state.ended[task] = None
        self.state.finished[task] = None
        self._checkpoints.task_finished(task, at_ms)
        if self.state.status is JobStatus.RUNNING and len(self.state.finished) == len(self._context.spec.tasks):
            # A task leaves only when a checkpoint covers its end, so no row is missing.
            self._end(JobStatus.FINISHED, None, at_ms)

    def _fail(
        self,
        tasks: tuple[TaskId, ...] | None,
        reason: str,
        at_ms: int,
        permanent: bool = False,
        fingerprint: str = "",
    ) -> None:
        """Restart the regions of these tasks, or (None) the whole job. End it if the restart strategy gives up."""
        state = self.state
        if state.status is JobStatus.ENDING:
            self._forget_tasks()
            return
        delay_ms = self._restarts.failed(at_ms, permanent, fingerprint)
        state.last_failure = reason
        if delay_ms is None and self._restarts.keeps_failing:
            said, *frames = reason.split("\n")
            times = (
                f"; the same error came back {state.same_failures} times at the same row, so it is not restarted again"
            )
            advice = " (RestartStrategy.exponential_delay(same_errors=None) restarts it without end)"
            reason = "\n".join([said + times + advice, *frames])
        if delay_ms is None:
            self._end(JobStatus.FAILED, reason, at_ms)
            return
        if tasks is None:
            self._failover.stop_whole(reason, at_ms)
        else:
            self._failover.stop_regions(tasks, reason, at_ms)
        self._instructions.append(do.SetTimer(f"restart:{state.attempt + 1}", at_ms + delay_ms))

    def _end(self, status: JobStatus, reason: str | None, at_ms: int) -> None:
        state = self.state
        waits_for_tasks = status in (JobStatus.FINISHED, JobStatus.SUSPENDED) and state.status is JobStatus.RUNNING
        state.ending_status, state.ending_reason = status, reason
        if waits_for_tasks:
            # Before the status changes: tasks that go on are told which checkpoints are given up.
            self._checkpoints.drop(Reason.JOB_ENDING, at_ms, reason or status.value)
            state.move(JobInput.END)
            self._instructions.append(do.SetTimer("ending", at_ms + ENDING_TIMEOUT_MS))
        else:
            state.move(JobInput.END)
            self._checkpoints.drop(Reason.JOB_ENDING, at_ms, reason or status.value)
            self._instructions.append(do.CancelAttempt(state.attempt))
            self._forget_tasks()
        self._checkpoints.copies.drop(at_ms, reason or status.value)

    def _forget_tasks(self) -> None:
        """The end of the job waits for no task any more."""
        self.state.finished = dict.fromkeys(self._context.spec.tasks)

    def _proceed(self, at_ms: int) -> None:
        """Carry out the verdicts, then take the steps that have become possible."""
        state = self.state
        if state.spec is None:
            return
        if state.status is JobStatus.RUNNING:
            self._checkpoints.writer.proceed(at_ms)
        self._judge(at_ms)
        if state.status is JobStatus.RESTARTING and state.restart_due and invariants.is_fate_known(state):
            self._deployer.deploy(at_ms)
        elif state.status is JobStatus.RUNNING:
            self._checkpoints.trigger_if_due(at_ms)
        elif state.status is JobStatus.ENDING:
            self._end_if_over(at_ms)

    def _judge(self, at_ms: int) -> None:
        """Carry out the verdicts: what the event means for the job as a whole."""
        state, context = self.state, self._context
        end, context.end = context.end, None
        if end is not None and state.status is not JobStatus.ENDING:
            self._end(end, None, at_ms)
        restore_failure, context.restore_failure = context.restore_failure, None
        if restore_failure is not None:
            self._end(JobStatus.FAILED, restore_failure, at_ms)
        passed_over, context.passed_over = context.passed_over, None
        if passed_over is not None:
            # No task of the attempt has started. Checkpoints run out, so this ends.
            self._start_anew(passed_over, at_ms)
        stop_failure, context.stop_failure = context.stop_failure, None
        if stop_failure is not None and state.status is JobStatus.RUNNING:
            self._start_anew(stop_failure, at_ms)
        failure, context.attempt_failure = context.attempt_failure, None
        if failure is not None and state.status is not JobStatus.RESTARTING:
            tasks = self._deployer.being_deployed() if state.status is JobStatus.DEPLOYING else None
            self._fail(tasks, failure, at_ms)
        if (failure := context.storage_failure) is not None and not state.gave_up:
            state.gave_up = True
            self._checkpoints.abandoner.give_up_deciding(failure)
            if state.status is not JobStatus.ENDING:
                self._end(JobStatus.FAILED, failure, at_ms)
            else:
                state.ending_status, state.ending_reason = JobStatus.FAILED, failure

    def _start_anew(self, reason: str, at_ms: int) -> None:
        """Begin the next attempt at once. This one has not failed, so the restart strategy is not asked."""
        self.state.last_failure = reason
        self._restarts.left()
        self._failover.stop_whole(reason, at_ms)
        self.state.restart_due = True

    def _end_if_over(self, at_ms: int) -> None:
        state = self.state
        busy = state.pending or state.commits or len(state.finished) < len(self._context.spec.tasks)
        if busy and not state.gave_up:
            return
        if (state.exports or state.savepoint_discards) and not (state.left_copies or state.gave_up):
            # What failed savepoints leave is deleted. Their folders may be unreachable, so the wait is short.
            if not state.waits_for_copies:
                state.waits_for_copies = True
                self._checkpoints.discards.repeat_savepoints()
                self._instructions.append(do.SetTimer("copies", at_ms + COPIES_TIMEOUT_MS))
            return
        if state.left_copies:
            self._checkpoints.discards.repeat_savepoints()
        assert state.ending_status is not None
        state.move(OVER_BY[state.ending_status])
        if not state.gave_up and not keeps_checkpoints(self._context.settings.retention, state.status):
            # The sweep deletes them with the rest. A job that gave up keeps them: a restore needs them.
            state.completed, state.damaged, state.shared = (), (), SharedStateRegistry()
        self._instructions.append(do.EndJob(state.status.value, state.ending_reason))

    def _on_after_end(self, event: ev.CoordinatorEvent) -> None:
        """After the end only deletions go on. Requests are refused."""
        if isinstance(event, ev.CheckpointRequested):
            detail = f"the job is {self.state.status.value}"
            self._checkpoints.abandoner.refuse((event.request,), Reason.NOT_ALL_REQUIRED_TASKS_RUNNING, detail)
        elif isinstance(event, ev.CheckpointDiscarded):
            self._checkpoints.discards.done(event.checkpoint_id)
        elif isinstance(event, ev.SavepointDiscarded):
            self._checkpoints.discards.savepoint_done(event.checkpoint_id)
        elif isinstance(event, ev.SavepointWritten | ev.SavepointWriteFailed):
            self._checkpoints.abandoner.export_answered(event.checkpoint_id)
