"""The coordinator machine: it deploys one job, takes its checkpoints, restarts it after failures, and ends it.

`CoordinatorDriver` passes events to the machine, writes each event to the log, and only then carries out the machine's
instructions. A replay of the log gives the same state. Rules:

- A checkpoint is complete when, and only when, one conditional create has made its `_metadata` (invariant 4).
- An attempt begins when it is known of every checkpoint whether it completed. It starts from the newest undamaged
  completed checkpoint (invariant 7).
- Sink files are committed checkpoint by checkpoint, in order. A completed checkpoint is deleted only after its sink
  files were committed and newer checkpoints are complete (invariants 5 and 6).
- No checkpoint id is used twice, even if its checkpoint failed.
- A stop ends the job after its savepoint. If the savepoint fails, the job continues. If the attempt fails first, the
  next attempt takes the savepoint. The user is answered when the outcome is certain.

`invariants.py` has these rules as predicates, each with its reason. They are checked after every event, and before
every action that cannot be undone. `phases.py` has the transition tables, `checkpoints/` takes checkpoints. The cost of
an event does not grow with the number of tasks, unless a checkpoint or an attempt starts or ends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatchmethod

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoint_requests import keeps_checkpoints
from tidegate.actors.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from tidegate.actors.coordinator.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.coordinator_state import CoordinatorState, SharedStateRegistry
from tidegate.actors.coordinator.deployment import Deployer, pass_over
from tidegate.actors.coordinator.failover import Failover, Restarts, Takeover
from tidegate.actors.coordinator.job_spec import (
    COPIES_TIMEOUT_MS,
    ENDING_TIMEOUT_MS,
    REMINDER_MS,
    REMINDERS_MAX,
    pause_ms,
)
from tidegate.actors.coordinator.phases import OVER_BY, JobInput, JobStatus, PendingPhase
from tidegate.actors.coordinator.source_coordinator import assign, still_waits
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, CheckpointId


class CoordinatorMachine:
    """The state machine of one job's coordinator, which turns events into instructions.

    `state` may be a stored state. Then only the newer events of the log have to be replayed.
    """

    def __init__(self, state: CoordinatorState | None = None) -> None:
        self.state = state if state is not None else CoordinatorState()
        self._instructions: list[do.CoordinatorInstruction] = []
        self._context = CoordinatorContext(self.state, self._instructions.append)
        self._checkpoints = CheckpointCoordinator(self._context)
        self.deployer = Deployer(self._context)
        self._restarts = Restarts(self._context)
        self._failover = Failover(self._context, self._checkpoints, self.deployer)
        self._takeover = Takeover(self._context, self._checkpoints, self._restarts)

    def handle(self, event: ev.CoordinatorEvent) -> list[do.CoordinatorInstruction]:
        """Handles one event. Returns the instructions to carry out, in this order, once the event is in the log."""
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
        """Returns whether an event has no effect. Such an event is not logged."""
        return is_noop(event, self.state)

    # --- life of the job ------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: ev.CoordinatorEvent) -> None:
        raise ProtocolError(
            f"a coordinator does not take events of type {type(event).__name__}, which is not a coordinator event; "
            "this is a bug in tidegate, please report it"
        )

    @_on.register
    def _on_submitted(self, event: ev.JobSubmitted) -> None:
        if self.state.spec is not None:
            raise ProtocolError(
                f"job {self.state.spec.job_id} was submitted twice; this is a bug in tidegate, please report it"
            )
        self.state.spec = event.spec
        self.state.know_tables(event.spec.table_heads)
        final = event.spec.restore is not None and event.spec.restore.final
        if final and not event.spec.committing:
            self._end(JobStatus.FINISHED, None, event.at_ms)
        else:
            self.state.ends_as = JobStatus.FINISHED if final else None
            self.deployer.deploy(event.at_ms)

    @_on.register
    def _on_started(self, event: ev.CoordinatorStarted) -> None:
        if not invariants.is_newer(self.state, event.generation):
            raise ProtocolError(
                f"coordinator generation {event.generation} follows {self.state.generation}: it must be higher; this "
                "is a bug in tidegate, please report it"
            )
        self.state.generation = event.generation
        self.state.storage_away = False
        if self.state.spec is None:
            return
        if self.state.status.terminal:
            self._checkpoints.cleaner.take_over()
            self._instructions.append(do.EndJob(self.state.status.value, self.state.ending_reason))
            return
        if self.state.status is JobStatus.ENDING:
            self._instructions.append(do.CancelAttempt(self.state.attempt))
            self.state.stop(self._context.spec.tasks)
            self._checkpoints.take_over(event.at_ms)
            self._forget_tasks()
            self.state.waits_for_copies = False
        else:
            self._takeover.take_over(event.at_ms)

    @_on.register
    def _on_answered(self, event: ev.TaskAnswered) -> None:
        self._takeover.answered(event)
        if event.finished:
            self._finished(event.task, event.at_ms)

    @_on.register
    def _on_ready(self, event: ev.TaskReady) -> None:
        deploys = self.state.status
        runs = self.deployer.ready(event)
        if self.state.status is not deploys:
            self._restarts.runs(event.at_ms)
        if runs and self.state.ends_as is not None:
            # A task is ready when it has committed what its checkpoint holds. There is nothing else left to do.
            self._end(self.state.ends_as, None, event.at_ms, waits=False)
        elif runs:
            self._checkpoints.start_periodic(event.at_ms)

    @_on.register
    def _on_restore_delayed(self, event: ev.RestoreDelayed) -> None:
        self.deployer.delayed(event)

    @_on.register
    def _on_hooks_restored(self, event: ev.HooksRestored) -> None:
        self.deployer.hooks_restored(event)

    @_on.register
    def _on_hooks_not_restored(self, event: ev.HookRestoreFailed) -> None:
        self.deployer.hooks_not_restored(event)

    @_on.register
    def _on_tables_taken_back(self, event: ev.TablesTakenBack) -> None:
        self.deployer.tables_taken_back(event)

    @_on.register
    def _on_tables_not_taken_back(self, event: ev.TablesNotTakenBack) -> None:
        self.deployer.tables_not_taken_back(event)

    @_on.register
    def _on_damaged(self, event: ev.CheckpointDamaged) -> None:
        pass_over(self._context, self.deployer.restore_point(), event)

    @_on.register
    def _on_task_failed(self, event: ev.TaskFailed) -> None:
        if self.state.is_current(event.task, event.attempt):
            reason = f"{event.task}: {event.reason}"
            self.fail_tasks((event.task,), reason, event.at_ms, event.permanent, event.fingerprint)

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
        answer = assign(self.state, event, self._context.untaken)
        if answer is not None:
            self._instructions.append(answer)

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
            self.deployer.expire()
        elif name == "hooks":
            self.deployer.repeat_hooks(int(argument))
        elif name == "tables":
            self.deployer.repeat_tables(int(argument))
        elif name == "leave":
            self._repeat_completion(event.at_ms)
        elif name == "ending":
            self._forget_tasks()
        elif name == "copies":
            self.state.left_copies = True
        elif name == "ask":
            self._takeover.ask(event.at_ms)
        elif name == "adopt":
            self.fail_tasks(*self._takeover.missing(), event.at_ms)
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
            self._checkpoints.finalizer.exported(event)

    @_on.register
    def _on_export_failed(self, event: ev.SavepointWriteFailed) -> None:
        if not self._checkpoints.copies.failed(event):
            self._checkpoints.finalizer.export_failed(event)

    @_on.register
    def _on_savepoint_discarded(self, event: ev.SavepointDiscarded) -> None:
        self._checkpoints.cleaner.savepoint_done(event.checkpoint_id)

    @_on.register
    def _on_savepoint_discard_failed(self, event: ev.SavepointDiscardFailed) -> None:
        self._checkpoints.cleaner.savepoint_failed(event)

    @_on.register
    def _on_metadata_written(self, event: ev.MetadataWritten) -> None:
        self._checkpoints.finalizer.written(event)

    @_on.register
    def _on_voided(self, event: ev.CheckpointVoided) -> None:
        self._checkpoints.finalizer.voided(event)

    @_on.register
    def _on_metadata_failed(self, event: ev.MetadataWriteFailed) -> None:
        self._checkpoints.finalizer.write_failed(event)

    @_on.register
    def _on_committed(self, event: ev.SinksCommitted) -> None:
        self._checkpoints.commits.committed(event)

    @_on.register
    def _on_commit_failed(self, event: ev.SinkCommitFailed) -> None:
        self._checkpoints.commits.failed(event)

    @_on.register
    def _on_discarded(self, event: ev.CheckpointDiscarded) -> None:
        self._checkpoints.cleaner.done(event.checkpoint_id)

    @_on.register
    def _on_discard_failed(self, event: ev.CheckpointDiscardFailed) -> None:
        self._checkpoints.cleaner.failed(event)

    # The handler that `self._on(event)` would find. `self._on` makes a new function for every call.
    _handler_of = staticmethod(_on.dispatcher.dispatch)

    # --- transitions ----------------------------------------------------------------------------------------------

    def _finished(self, task: TaskId, at_ms: int) -> None:
        self.state.ended[task] = None
        self.state.finished[task] = None
        self._checkpoints.task_finished(task, at_ms)
        if self.state.status is JobStatus.RUNNING and len(self.state.finished) == len(self._context.spec.tasks):
            # A task leaves only when a checkpoint covers its end, so all its rows are in.
            self._end(self.state.ends_as or JobStatus.FINISHED, None, at_ms)

    def fail_tasks(
        self,
        tasks: tuple[TaskId, ...] | None,
        reason: str,
        at_ms: int,
        permanent: bool = False,
        fingerprint: str = "",
    ) -> None:
        """Restarts the regions of the failed tasks, or the whole job if `tasks` is None. Ends the job if the restart
        strategy gives up.
        """
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

    def _end(self, status: JobStatus, reason: str | None, at_ms: int, waits: bool = True) -> None:
        """Begins the end of the job. `waits`: if the job ends successfully, wait until the running tasks have finished,
        instead of stopping them.
        """
        state = self.state
        succeeds = status in (JobStatus.FINISHED, JobStatus.SUSPENDED)
        waits_for_tasks = waits and succeeds and state.status is JobStatus.RUNNING
        state.ending_status = status
        state.ending_reason = reason
        if waits_for_tasks:
            # Before the status changes: running tasks are notified which checkpoints are given up.
            self._checkpoints.drop(Reason.JOB_ENDING, at_ms, reason or status.value)
            state.move(JobInput.END)
            self._instructions.append(do.SetTimer("ending", at_ms + ENDING_TIMEOUT_MS))
        else:
            state.move(JobInput.END)
            self._checkpoints.drop(Reason.JOB_ENDING, at_ms, reason or status.value)
            self._instructions.append(do.CancelAttempt(state.attempt))
            self._forget_tasks()
        self._checkpoints.copies.drop(at_ms, reason or status.value)

    def _begin_to_leave(self, at_ms: int) -> None:
        """Starts the timer for `_repeat_completion`, once the last checkpoint of the job is complete.

        The timer is started once for each attempt and coordinator.
        """
        state = self.state
        if state.ends_as is not None and state.leaving != (state.generation, state.attempt):
            state.leaving = (state.generation, state.attempt)
            state.notified = 0
            self._repeat_later(at_ms)

    def _repeat_completion(self, at_ms: int) -> None:
        """Notifies the tasks again that the last checkpoint is complete, because the message may have been lost.
        Without the message they would not commit and end.

        A task may also wait for the end of an input that was lost on its way. After `REMINDERS_MAX` repetitions all
        tasks therefore start again from that checkpoint and commit its sink files. The job ends when they are ready.
        """
        if self.state.notified >= REMINDERS_MAX:
            self._start_anew("its tasks have not ended after the last checkpoint", at_ms)
            return
        newest = self.state.completed[-1].checkpoint_id
        for attempt, tasks in self.state.listening:
            self._instructions.append(do.NotifyCompleted(attempt, newest, tasks))
        self.state.notified += 1
        self._repeat_later(at_ms)

    def _repeat_later(self, at_ms: int) -> None:
        due_at_ms = at_ms + pause_ms(REMINDER_MS, self.state.notified + 1)
        self._instructions.append(do.SetTimer(f"leave:{self.state.attempt}", due_at_ms))

    def _forget_tasks(self) -> None:
        """Marks all tasks as finished, so that the end of the job no longer waits for them."""
        self.state.finished = dict.fromkeys(self._context.spec.tasks)

    def _proceed(self, at_ms: int) -> None:
        """Carries out the verdicts of the handled event, then takes all steps that are possible now, such as a due
        checkpoint.
        """
        state = self.state
        if state.spec is None:
            return
        if state.status is JobStatus.RUNNING:
            self._checkpoints.finalizer.proceed(at_ms)
        self._judge(at_ms)
        if state.status is JobStatus.RESTARTING and state.restart_due and invariants.is_fate_known(state):
            self._failover.stop_rest_if_over()
            self.deployer.deploy(at_ms)
        elif state.status is JobStatus.RUNNING:
            self._checkpoints.trigger_if_due(at_ms)
            self._begin_to_leave(at_ms)
        elif state.status is JobStatus.ENDING:
            self.end_if_over(at_ms)

    def _judge(self, at_ms: int) -> None:
        """Carries out the verdicts of the handled event: fails or restarts the attempt, or ends the job."""
        state = self.state
        context = self._context
        end = context.end
        context.end = None
        if end is not None and state.status is not JobStatus.ENDING:
            self._end(end, None, at_ms)
        restore_failure = context.restore_failure
        context.restore_failure = None
        if restore_failure is not None:
            self._end(JobStatus.FAILED, restore_failure, at_ms)
        passed_over = context.passed_over
        context.passed_over = None
        if passed_over is not None:
            # No task of the attempt has started. Checkpoints run out, so this ends.
            self._start_anew(passed_over, at_ms)
        stop_failure = context.stop_failure
        context.stop_failure = None
        if stop_failure is not None and state.status is JobStatus.RUNNING:
            self._start_anew(stop_failure, at_ms)
        failure = context.attempt_failure
        context.attempt_failure = None
        if failure is not None and state.status is not JobStatus.RESTARTING:
            tasks = self.deployer.being_deployed() if state.status is JobStatus.DEPLOYING else None
            self.fail_tasks(tasks, failure, at_ms)
        if (failure := context.storage_failure) is not None and not state.gave_up:
            state.gave_up = True
            self._checkpoints.aborter.give_up_deciding(failure)
            if state.status is not JobStatus.ENDING:
                self._end(JobStatus.FAILED, failure, at_ms)
            else:
                state.ending_status = JobStatus.FAILED
                state.ending_reason = failure

    def _start_anew(self, reason: str, at_ms: int) -> None:
        """Stops all tasks and starts the next attempt at once, without consulting the restart strategy, as no failure
        occurred.
        """
        self.state.last_failure = reason
        self._restarts.left()
        self._failover.stop_whole(reason, at_ms)
        self.state.restart_due = True

    def end_if_over(self, at_ms: int) -> None:
        """Ends the job, unless a pending checkpoint, an outstanding commit, a running task or a savepoint copy has to
        be awaited.
        """
        state = self.state
        busy = state.pending or state.commits or len(state.finished) < len(self._context.spec.tasks)
        if busy and not state.gave_up:
            return
        if (state.exports or state.savepoint_discards) and not (state.left_copies or state.gave_up):
            # What failed savepoints leave is deleted. Their folders may be unreachable, so the wait is short.
            if not state.waits_for_copies:
                state.waits_for_copies = True
                self._checkpoints.cleaner.repeat_savepoints()
                self._instructions.append(do.SetTimer("copies", at_ms + COPIES_TIMEOUT_MS))
            return
        if state.left_copies:
            self._checkpoints.cleaner.repeat_savepoints()
        assert state.ending_status is not None
        state.move(OVER_BY[state.ending_status])
        if not state.gave_up and not keeps_checkpoints(self._context.settings.retention, state.status):
            # The sweep deletes them with the rest. A job that gave up keeps them: a restore needs them.
            state.completed = ()
            state.damaged = ()
            state.shared = SharedStateRegistry()
        self._instructions.append(do.EndJob(state.status.value, state.ending_reason))

    def _on_after_end(self, event: ev.CoordinatorEvent) -> None:
        """Handles an event after the end of the job: deletions continue, and requests are refused."""
        if isinstance(event, ev.CheckpointRequested):
            detail = f"the job is {self.state.status.value}"
            self._checkpoints.aborter.refuse((event.request,), Reason.NOT_ALL_REQUIRED_TASKS_RUNNING, detail)
        elif isinstance(event, ev.CheckpointDiscarded):
            self._checkpoints.cleaner.done(event.checkpoint_id)
        elif isinstance(event, ev.SavepointDiscarded):
            self._checkpoints.cleaner.savepoint_done(event.checkpoint_id)
        elif isinstance(event, ev.SavepointWritten | ev.SavepointWriteFailed):
            self._checkpoints.aborter.export_answered(event.checkpoint_id)


_AFTER_THE_END = (
    ev.CoordinatorStarted,
    ev.CheckpointRequested,
    ev.CheckpointDiscarded,
    ev.SavepointDiscarded,
    ev.SavepointWritten,
    ev.SavepointWriteFailed,
)


def is_noop(event: ev.CoordinatorEvent, state: CoordinatorState) -> bool:
    """Returns whether an event has no effect, so that the driver neither logs it nor passes it to the machine.

    The result depends only on state and event. Every event of the log therefore has the same effect in a replay.
    """
    if state.status.terminal:
        return not isinstance(event, _AFTER_THE_END)
    match event:
        case ev.TimerFired(timer=timer):
            return has_passed(timer, state)
        case ev.TaskReady(attempt=attempt, task=task) | ev.RestoreDelayed(attempt=attempt, task=task):
            return not _is_being_deployed(task, attempt, state)
        case ev.CheckpointDamaged(attempt=attempt):
            return attempt != state.attempt or state.status is not JobStatus.DEPLOYING
        case ev.TablesTakenBack(attempt=attempt) | ev.TablesNotTakenBack(attempt=attempt):
            return attempt != state.attempt or state.fallback is None
        case ev.TaskFailed(attempt=attempt, task=task):
            return not state.is_current(task, attempt)
        case ev.TaskAnswered(attempt=attempt, task=task, generation=generation):
            asked = generation == state.generation and task in state.adopting
            return not asked or not state.is_current(task, attempt)
        case ev.TaskReachedEndOfData(attempt=attempt, task=task) | ev.TaskFinished(attempt=attempt, task=task):
            return not state.is_current(task, attempt)
        case ev.SplitsRequested(attempt=attempt, task=task):
            return not state.is_current(task, attempt) or still_waits(state, event)
        case ev.WatermarkReported():
            return True  # Answered outside the machine: it changes nothing that lasts.
        case ev.StorageWentAway():
            return state.spec is None or state.storage_away
        case ev.StorageCameBack():
            return not state.storage_away
    return False


def _is_being_deployed(task: TaskId, attempt: int, state: CoordinatorState) -> bool:
    """Returns whether a task belongs to the attempt that is being deployed, which is always the newest attempt."""
    deploys = state.status is JobStatus.DEPLOYING
    return deploys and attempt == state.attempt and state.is_current(task, AttemptNumber(attempt))


def _waits_for_restart(state: CoordinatorState) -> bool:
    """Returns whether any task waits for its restart, also during a deployment."""
    return state.status is JobStatus.RESTARTING or (state.status is JobStatus.DEPLOYING and bool(state.down))


def has_passed(timer: str, state: CoordinatorState) -> bool:
    """Returns whether a timer is outdated and has no effect, because its purpose has ended or was postponed."""
    name, _, argument = timer.partition(":")
    if name in ("ending", "copies"):
        return state.status is not JobStatus.ENDING
    number = int(argument)
    pending = state.pending.get(CheckpointId(number))
    deploys = state.status is JobStatus.DEPLOYING
    still: dict[str, Callable[[], bool]] = {
        "restart": lambda: _waits_for_restart(state) and number == state.attempt + 1,
        "deploy": lambda: deploys and number == state.attempt and not state.deploy_delayed,
        "deploy-delayed": lambda: deploys and number == state.deploy_delays and state.deploy_delayed,
        "hooks": lambda: state.restoring_hooks and number == state.attempt,
        "tables": lambda: state.fallback is not None and number == state.attempt,
        "ask": lambda: bool(state.adopting) and number == state.generation,
        "adopt": lambda: bool(state.adopting) and number == state.generation,
        "periodic": lambda: state.status is JobStatus.RUNNING and number == state.attempt,
        "leave": lambda: state.status is JobStatus.RUNNING and state.ends_as is not None and number == state.attempt,
        "final": lambda: state.status is JobStatus.RUNNING and number == state.attempt,
        "timeout": lambda: pending is not None and pending.phase.open,
        "export": lambda: number in state.copies or (pending is not None and pending.phase is PendingPhase.EXPORTING),
        "copy": lambda: number in state.copies,
        "void": lambda: pending is not None and pending.phase is PendingPhase.VOIDING,
        "commit": lambda: bool(state.commits) and state.commits[0].checkpoint_id == number,
        "discard": lambda: number in state.discards,
        "discard-savepoint": lambda: number in state.savepoint_discards,
    }
    return name not in still or not still[name]()
