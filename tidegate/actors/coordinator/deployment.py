"""Deploys an attempt of a job: takes tables back, restores master hooks, restores tasks, starts the sources.

The machine calls `Deployer` for the first attempt and for each restart. An attempt is the whole job, or the regions
that were stopped; the tasks of others go on meanwhile. Tables are taken back only where the attempt starts from an
older checkpoint, because the newest one was damaged; then, as with master hooks, it is the whole job.

Rules: one deployment is under way at a time; a region that fails meanwhile waits for its turn. An attempt starts from
the newest completed checkpoint of the job that is not known to be damaged, or from what the user named before there is
one (invariant 7). Hooks are restored before any task is deployed, a bounded number of times; an attempt that is not
ready in time has failed.
"""

from __future__ import annotations

from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoints.failure_manager import forgive
from tidegate.actors.coordinator.checkpoints.fallback import passed_over_text
from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.coordinator.job.outages import pause_ms
from tidegate.actors.coordinator.job.phases import JobInput, JobStatus
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.state.checkpoint_statistics import RestoredCheckpoint
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.state.coordinator_state import NEVER_MS
from tidegate.actors.protocol.identity import TaskId


class Deployer:
    """Deploys the attempts of one job."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def deploy(self, at_ms: int) -> None:
        """Begin the next attempt, of what is down."""
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
        """Now the hooks, or the tasks."""
        if self._waits_for_tables(event.attempt):
            self._context.state.fallback = None
            self._begin(None)
            self._set_limit(event.at_ms)

    def tables_not_taken_back(self, event: ev.TablesNotTakenBack) -> None:
        """Try again, as long as an outage may last, or a bounded number of times: else rows would come twice."""
        state, spec = self._context.state, self._context.spec
        if not self._waits_for_tables(event.attempt):
            return
        if event.fenced:
            # Whoever has it may have gone on from a checkpoint of this job: nothing of it is deleted.
            state.superseded = True
            self._context.storage_failure = f"a newer job is in charge of a table of this one ({event.error})"
            return
        state.table_failures += 1
        if self._gives_up(event.at_ms, event.away_ms, state.table_failures):
            self._context.attempt_failure = (
                f"the tables could not be taken back to checkpoint {state.fallback} in {state.table_failures} "
                f"attempts: {event.error}"
            )
            return
        due_at_ms = event.at_ms + pause_ms(spec.storage_retry_ms, state.table_failures)
        self._context.instruct(do.SetTimer(f"tables:{state.attempt}", due_at_ms))

    def repeat_tables(self, attempt: int) -> None:
        """The time for another attempt has come."""
        if self._waits_for_tables(attempt):
            self._take_tables_back()

    def hooks_restored(self, event: ev.HooksRestored) -> None:
        """Now the tasks."""
        state = self._context.state
        if self._waits_for_hooks(event.attempt):
            state.restoring_hooks = False
            self._start(self.restore_point(), None)
            self._set_limit(event.at_ms)

    def hooks_not_restored(self, event: ev.HookRestoreFailed) -> None:
        """Try again, as long as an outage may last, or a bounded number of times."""
        state, spec = self._context.state, self._context.spec
        if not self._waits_for_hooks(event.attempt):
            return
        state.hook_failures += 1
        if self._gives_up(event.at_ms, event.away_ms, state.hook_failures):
            self._context.attempt_failure = (
                f"the master hooks could not be restored in {state.hook_failures} attempts: {event.error}"
            )
            return
        due_at_ms = event.at_ms + pause_ms(spec.storage_retry_ms, state.hook_failures)
        self._context.instruct(do.SetTimer(f"hooks:{state.attempt}", due_at_ms))

    def _gives_up(self, at_ms: int, away_ms: int | None, failures: int) -> bool:
        """Whether what comes before the tasks has failed for too long.

        An outage of storage bounds itself: the time for the deployment begins anew.
        """
        spec = self._context.spec
        if away_ms is None:
            return failures >= spec.storage_attempts_max
        if away_ms < spec.storage_outage_ms:
            self._set_limit(at_ms)
        return away_ms >= spec.storage_outage_ms

    def repeat_hooks(self, attempt: int) -> None:
        """The time for another attempt has come."""
        restore = self.restore_point()
        if self._waits_for_hooks(attempt) and restore is not None:
            self._context.instruct(do.RestoreHooks(self._context.state.attempt, restore))

    def ready(self, event: ev.TaskReady) -> bool:
        """A task is ready; returns whether the whole job runs since then."""
        state = self._context.state
        if not state.is_current(event.task, event.attempt) or state.status is not JobStatus.DEPLOYING:
            return False
        state.ready[event.task] = None
        return self.settle()

    def settle(self) -> bool:
        """The attempt starts when all of its tasks are ready, but for those that were stopped again meanwhile.

        Returns whether the whole job runs since then.
        """
        state, spec = self._context.state, self._context.spec
        if state.status is not JobStatus.DEPLOYING or len(state.ready) + len(state.down) < len(spec.tasks):
            return False
        tasks = tuple(task for task in spec.tasks if task in state.ready and task not in state.older_attempts)
        state.move(JobInput.RESTART if state.down else JobInput.ALL_READY)
        if tasks:
            self._context.instruct(do.StartTasks(state.attempt, tasks))
        return not state.down

    def being_deployed(self) -> tuple[TaskId, ...]:
        """Tasks of the attempt that is being deployed, but for those that were stopped again meanwhile."""
        state = self._context.state
        return tuple(
            task for task in self._context.spec.tasks if task not in state.older_attempts and task not in state.down
        )

    def delayed(self, event: ev.RestoreDelayed) -> None:
        """A task waits for storage, and bounds that itself: the time for the deployment begins anew."""
        state = self._context.state
        state.deploy_delays += 1
        state.deploy_delayed = True
        due_at_ms = event.at_ms + self._context.spec.deploy_timeout_ms
        self._context.instruct(do.SetTimer(f"deploy-delayed:{state.deploy_delays}", due_at_ms))

    def expire(self) -> None:
        """The time for the deployment is over."""
        state, spec = self._context.state, self._context.spec
        limit_ms = spec.deploy_timeout_ms
        if state.fallback is not None:
            self._context.attempt_failure = f"the tables were not taken back within {limit_ms} ms"
        elif state.restoring_hooks:
            self._context.attempt_failure = f"the master hooks were not restored within {limit_ms} ms"
        else:
            missing = next(task for task in self.being_deployed() if task not in state.ready)
            self._context.attempt_failure = f"{missing} was not ready within {limit_ms} ms"

    def restore_point(self) -> RestorePoint | None:
        """What the attempt starts from."""
        state, spec = self._context.state, self._context.spec
        restore = spec.restore
        if state.completed:
            # `ignore_in_flight_of` names a checkpoint of the job before, never one of this job that has its number.
            newest = state.completed[-1]
            restore = RestorePoint(spec.root, spec.job_id, newest.checkpoint_id, newest.final)
        return restore

    def _begin(self, tasks: tuple[TaskId, ...] | None) -> None:
        """The hooks, or else the tasks (None: all)."""
        state, restore = self._context.state, self.restore_point()
        state.restoring_hooks = restore is not None and bool(self._context.spec.hooks)
        if state.restoring_hooks and restore is not None:
            self._context.instruct(do.RestoreHooks(state.attempt, restore))
        else:
            self._start(restore, tasks)

    def _start(self, restore: RestorePoint | None, tasks: tuple[TaskId, ...] | None) -> None:
        """The tasks."""
        state = self._context.state
        invariants.check_start(state, None if restore is None else restore.checkpoint_id)
        self._context.instruct(do.DeployAttempt(state.attempt, restore, tasks))

    def _take_tables_back(self) -> None:
        state = self._context.state
        assert state.fallback is not None
        reason = passed_over_text(state.damaged)
        self._context.instruct(do.TakeTablesBack(state.attempt, state.fallback, reason))

    def _waits_for_tables(self, attempt: int) -> bool:
        state = self._context.state
        return state.status is JobStatus.DEPLOYING and state.fallback is not None and attempt == state.attempt

    def _waits_for_hooks(self, attempt: int) -> bool:
        state = self._context.state
        return state.status is JobStatus.DEPLOYING and state.restoring_hooks and attempt == state.attempt

    def _set_limit(self, at_ms: int) -> None:
        due_at_ms = at_ms + self._context.spec.deploy_timeout_ms
        self._context.instruct(do.SetTimer(f"deploy:{self._context.state.attempt}", due_at_ms))
