"""Deploys an attempt: sets tables back, restores master hooks, deploys tasks, and starts them when all are ready.

The machine calls `Deployer` for the first attempt and for each restart. An attempt has all tasks of the job, or the
tasks of the stopped regions while other regions continue. Tables are set back only if the newest checkpoint is damaged
and an older one is restored. With tables to set back, or with master hooks, the attempt has all tasks. Rules:

- One deployment runs at a time. A region that fails meanwhile waits.
- An attempt starts from the job's newest completed checkpoint that is not known to be damaged. Before the job has one,
  it starts from the checkpoint that the user named (invariant 7).
- Tables are set back first, then hooks are restored, then tasks are deployed. Retries are limited by number or, in an
  outage of storage, by time.
- An attempt that is not ready within the deploy timeout fails.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoint_statistics import PassedOverCheckpoint, RestoredCheckpoint
from tidegate.actors.coordinator.checkpoints.checkpoint_aborter import forgive
from tidegate.actors.coordinator.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.coordinator_state import NEVER_MS, CoordinatorState, DamagedCheckpoint
from tidegate.actors.coordinator.events import CheckpointDamaged
from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.coordinator.phases import JobInput, JobStatus
from tidegate.actors.coordinator.source_coordinator import took_up
from tidegate.protocol.identity import TaskId

NAMED_MAX = 4
"""Limit of the task names that an error message lists."""


def not_ready(state: CoordinatorState) -> tuple[TaskId, ...]:
    """Returns the tasks of the attempt being deployed that are not ready yet. Empty before the tasks were deployed."""
    if state.status is not JobStatus.DEPLOYING or state.fallback is not None or state.restoring_hooks:
        return ()
    return tuple(task for task in _being_deployed(state) if task not in state.ready)


def _being_deployed(state: CoordinatorState) -> tuple[TaskId, ...]:
    assert state.spec is not None
    return tuple(task for task in state.spec.tasks if task not in state.older_attempts and task not in state.down)


class Deployer:
    """Deploys the attempts of one job."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def deploy(self, at_ms: int) -> None:
        """Begins the next attempt, with the stopped tasks or with all tasks."""
        state = self._context.state
        invariants.check_deploy(state)
        state.move(JobInput.DEPLOY)
        tasks = state.begin_attempt()
        invariants.check_deployed(state, tasks)
        state.restart_due = False
        state.due_since_ms = None
        state.final_not_before_ms = NEVER_MS
        state.hook_failures = state.table_failures = 0
        state.restoring_hooks = False
        state.deploy_delayed = False
        forgive(state)
        restore = self.restore_point()
        if restore is not None:
            state.statistics.was_restored(RestoredCheckpoint(restore.checkpoint_id, at_ms, restore.pointer))
        if state.fallback is not None:
            self._take_tables_back()
        else:
            self._begin(tasks)
        self._set_limit(at_ms)

    def tables_taken_back(self, event: ev.TablesTakenBack) -> None:
        """Continues the deployment after the output tables were reset to the checkpoint: restores the master hooks or,
        if there are none, deploys the tasks.
        """
        self._context.state.know_tables(event.heads)
        if self._waits_for_tables(event.attempt):
            self._context.state.fallback = None
            self._begin(None)
            self._set_limit(event.at_ms)

    def tables_not_taken_back(self, event: ev.TablesNotTakenBack) -> None:
        """Schedules a retry after resetting the output tables failed, or gives up.

        The tasks must not start before, because their rows would be committed a second time.
        """
        state = self._context.state
        if not self._waits_for_tables(event.attempt):
            return
        if event.fenced:
            # The newer job may have started from a checkpoint of this one, so nothing is deleted.
            state.superseded = True
            self._context.storage_failure = f"a newer job is in charge of a table of this one ({event.error})"
            return
        if event.permanent:
            self._context.storage_failure = (
                f"the tables cannot be taken back to checkpoint {state.fallback}: {event.error}"
            )
            return
        state.table_failures += 1
        what = f"the tables could not be taken back to checkpoint {state.fallback}"
        self._retry("tables", event, state.table_failures, what)

    def repeat_tables(self, attempt: int) -> None:
        """Repeats the order to reset the output tables to the checkpoint, because its retry timer has fired."""
        if self._waits_for_tables(attempt):
            self._take_tables_back()

    def hooks_restored(self, event: ev.HooksRestored) -> None:
        """Deploys the tasks, because the master hooks are restored."""
        state = self._context.state
        if self._waits_for_hooks(event.attempt):
            state.restoring_hooks = False
            self._start(self.restore_point(), None)
            self._set_limit(event.at_ms)

    def hooks_not_restored(self, event: ev.HookRestoreFailed) -> None:
        """Schedules another try to restore the master hooks, or fails the attempt."""
        state = self._context.state
        if self._waits_for_hooks(event.attempt):
            state.hook_failures += 1
            self._retry("hooks", event, state.hook_failures, "the master hooks could not be restored")

    def _retry(self, timer: str, event: ev.TablesNotTakenBack | ev.HookRestoreFailed, failures: int, what: str) -> None:
        """Sets the timer of the next try or, after too many failures, fails the attempt. `what`: the text of the
        failure for the error.
        """
        if self._gives_up(event.at_ms, event.away_ms, failures):
            self._context.attempt_failure = f"{what} in {failures} attempts: {event.error}"
        else:
            self._context.retry_later(f"{timer}:{self._context.state.attempt}", event.at_ms, failures)

    def _gives_up(self, at_ms: int, away_ms: int | None, failures: int) -> bool:
        """Returns whether resetting output tables, or restoring hooks, has failed too often or for too long.

        `away_ms`: how long storage has not answered, or None if it answers. During an outage of storage the number of
        failures is not limited, and the deployment timer starts again.
        """
        spec = self._context.spec
        if away_ms is None:
            return failures >= spec.storage_attempts_max
        if away_ms < spec.storage_outage_ms:
            self._set_limit(at_ms)
        return away_ms >= spec.storage_outage_ms

    def repeat_hooks(self, attempt: int) -> None:
        """Repeats the order to restore the master hooks, because its retry timer has fired."""
        restore = self.restore_point()
        if self._waits_for_hooks(attempt) and restore is not None:
            self._context.instruct(do.RestoreHooks(self._context.state.attempt, restore))

    def ready(self, event: ev.TaskReady) -> bool:
        """Records that a task is ready. Returns whether the whole job now runs."""
        state = self._context.state
        if not state.is_current(event.task, event.attempt) or state.status is not JobStatus.DEPLOYING:
            return False
        state.ready[event.task] = None
        took_up(state, event)
        state.rows_before[event.task] = event.rows_read
        return self.settle()

    def settle(self) -> bool:
        """Starts the tasks of the attempt if all of them are ready. Returns whether the whole job now runs.

        Tasks that were stopped during the deployment are not waited for.
        """
        state = self._context.state
        spec = self._context.spec
        if state.status is not JobStatus.DEPLOYING or len(state.ready) + len(state.down) < len(spec.tasks):
            return False
        tasks = tuple(task for task in spec.tasks if task in state.ready and task not in state.older_attempts)
        state.move(JobInput.RESTART if state.down else JobInput.ALL_READY)
        if tasks and state.ends_as is None:
            self._context.instruct(do.StartTasks(state.attempt, tasks))
        return not state.down

    def being_deployed(self) -> tuple[TaskId, ...]:
        """Returns the tasks of the attempt that is being deployed, without tasks that were stopped meanwhile."""
        return _being_deployed(self._context.state)

    def delayed(self, event: ev.RestoreDelayed) -> None:
        """Restarts the deployment timer, because a task waits for storage. An outage has its own time limit."""
        state = self._context.state
        state.deploy_delays += 1
        state.deploy_delayed = True
        due_at_ms = event.at_ms + self._context.spec.deploy_timeout_ms
        self._context.instruct(do.SetTimer(f"deploy-delayed:{state.deploy_delays}", due_at_ms))

    def expire(self) -> None:
        """Fails the attempt, because its deployment has exceeded the deploy timeout."""
        state = self._context.state
        spec = self._context.spec
        limit = f"within {spec.deploy_timeout_ms} ms (jobmanager.deploy-timeout)"
        if state.fallback is not None:
            self._context.attempt_failure = f"the tables were not taken back {limit}"
        elif state.restoring_hooks:
            self._context.attempt_failure = f"the master hooks were not restored {limit}"
        else:
            missing = not_ready(state)
            named = ", ".join(map(str, missing[:NAMED_MAX]))
            more = f" and {len(missing) - NAMED_MAX} more tasks" if len(missing) > NAMED_MAX else ""
            verb = "was" if len(missing) == 1 else "were"
            self._context.attempt_failure = f"{named}{more} {verb} not ready {limit}"

    def restore_point(self) -> RestorePoint | None:
        """Returns the checkpoint from which the attempt starts, or None for a start without state."""
        state = self._context.state
        spec = self._context.spec
        restore = spec.restore
        if state.completed:
            # `ignore_in_flight` stays False: the user named a checkpoint of another job, which may have this number.
            newest = state.completed[-1]
            restore = RestorePoint(spec.root, spec.job_id, newest.checkpoint_id, newest.final)
        return restore

    def _begin(self, tasks: tuple[TaskId, ...] | None) -> None:
        """Restores the master hooks or, if there are none, deploys `tasks` (None for all tasks)."""
        state = self._context.state
        restore = self.restore_point()
        state.restoring_hooks = restore is not None and bool(self._context.spec.hooks)
        if state.restoring_hooks and restore is not None:
            self._context.instruct(do.RestoreHooks(state.attempt, restore))
        else:
            self._start(restore, tasks)

    def _start(self, restore: RestorePoint | None, tasks: tuple[TaskId, ...] | None) -> None:
        """Deploys `tasks` (None for all tasks) from `restore`, or without state if that is None."""
        state = self._context.state
        invariants.check_start(state, None if restore is None else restore.checkpoint_id)
        self._context.instruct(do.DeployAttempt(state.attempt, restore, tasks))

    def _take_tables_back(self) -> None:
        state = self._context.state
        assert state.fallback is not None
        reason = passed_over_text(state.damaged)
        self._context.instruct(do.TakeTablesBack(state.attempt, state.fallback, reason, state.known_tables))

    def _waits_for_tables(self, attempt: int) -> bool:
        state = self._context.state
        return state.status is JobStatus.DEPLOYING and state.fallback is not None and attempt == state.attempt

    def _waits_for_hooks(self, attempt: int) -> bool:
        state = self._context.state
        return state.status is JobStatus.DEPLOYING and state.restoring_hooks and attempt == state.attempt

    def _set_limit(self, at_ms: int) -> None:
        due_at_ms = at_ms + self._context.spec.deploy_timeout_ms
        self._context.instruct(do.SetTimer(f"deploy:{self._context.state.attempt}", due_at_ms))


def pass_over(context: CoordinatorContext, restore: RestorePoint | None, event: CheckpointDamaged) -> None:
    """Skips a damaged checkpoint and selects the one before it, down to the oldest retained one.

    The machine calls it when a task or a master hook has found that the attempt's checkpoint is damaged. Each task may
    report that, and the first report counts. Rules:

    - Only damage counts: a part of the checkpoint was read and is wrong, or is missing. If storage does not answer, the
      same checkpoint is tried again.
    - A skipped checkpoint is not tried again. It stays until a newer one is complete or the job is over, so that an
      administrator can repair or examine it.
    - Rows that were committed after the older checkpoint are processed again. The tables are therefore set back before
      any task is deployed, and after all outstanding commits are done.
    - When no checkpoint is left, the job fails with all reasons. It never starts without state, nor from another job's
      checkpoint, because its rows would be written twice.
    """
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
    state.ends_as = None  # The rows after the older checkpoint are processed again.
    context.passed_over = passed_over_text(state.damaged[-1:])


def passed_over_text(damaged: Iterable[DamagedCheckpoint]) -> str:
    """Returns an error text that names each skipped checkpoint and its damage."""
    return "; ".join(f"checkpoint {one.checkpoint_id} is damaged ({one.reason})" for one in damaged)
