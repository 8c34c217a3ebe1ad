"""Handles the failure of a task, and the loss of the coordinator.

- `Failover` stops the tasks that have to be deployed again.
- `Restarts` requests the delay of the next attempt from the restart strategy.
- `Takeover` keeps running tasks when a new generation of the coordinator starts.

The coordinator machine calls them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from tidegate.actors.coordinator.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.coordinator_state import NEVER_MS
from tidegate.actors.coordinator.deployment import Deployer
from tidegate.actors.coordinator.invariants import check_answer
from tidegate.actors.coordinator.job_spec import FailoverStrategy, draw_fraction
from tidegate.actors.coordinator.phases import JobInput, JobStatus, PendingPhase
from tidegate.actors.graph.regions import pipelined_regions
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import CheckpointId, VertexId


class Failover:
    """Decides which tasks stop after a failure, and wait for the next attempt (Flink's `FailoverStrategy`).

    A job consists of pipelined regions, and no data is in flight between regions. A region can therefore go back to the
    newest checkpoint alone: what the other regions have processed since then is not processed again. Rules:

    - The region of a failed task stops as a whole. Tasks of other regions keep their processes, their attempt and their
      state.
    - The whole job stops where one region would not be enough. (For the loss of a coordinator see `Takeover`.)
      - Too many checkpoints have failed, or a stop has.
      - A checkpoint is damaged. An older one is restored, and the tables are set back to it.
      - A task fails while a savepoint that ends the job is pending. The other tasks have ended their data.
      - A task fails in a job with master hooks, because all tasks may share the external system of a hook.
    - Union list state goes to every subtask of its vertex, so regions that share such a vertex stop together. Before
      the first checkpoint of a restored job it is unknown which vertices have union list state, so all are treated as
      if they had.
    - Every open checkpoint is aborted, because the stopped region takes no part in it. The other tasks are notified.
    - The restart strategy is consulted for each failure. A region that fails while another one waits for its restart
      waits with it.
    """

    def __init__(self, context: CoordinatorContext, checkpoints: CheckpointCoordinator, deployer: Deployer) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._deployer = deployer
        self._regions: dict[TaskId, tuple[TaskId, ...]] = {}
        """The region of each task. It is computed at the first failure."""

    def stop_whole(self, reason: str, at_ms: int) -> None:
        """Stops all tasks until the next attempt."""
        state = self._context.state
        self._context.instruct(do.CancelAttempt(state.attempt))
        state.stop(self._context.spec.tasks)
        self._checkpoints.drop(Reason.JOB_FAILOVER, at_ms, reason)
        state.move(JobInput.RESTART)
        state.restart_due = False

    def stop_regions(self, tasks: Iterable[TaskId], reason: str, at_ms: int) -> None:
        """Stops the regions of the failed tasks until the next attempt, or all tasks if one region is not enough."""
        state = self._context.state
        again = self.going_back(tasks)
        if len(again) + len(state.down) == len(self._context.spec.tasks):
            self.stop_whole(reason, at_ms)
            return
        for attempt, group in state.by_attempt(again):
            self._context.instruct(do.CancelAttempt(attempt, group))
        state.stop(again)
        self._checkpoints.drop(Reason.JOB_FAILOVER, at_ms, reason)
        state.restart_due = False
        if state.status is JobStatus.DEPLOYING:
            self._deployer.settle()
        else:
            state.move(JobInput.RESTART)

    def stop_rest_if_over(self) -> None:
        """Stops the running tasks if the last checkpoint of the job is complete and only its rows have to be committed.

        All tasks then start from that checkpoint and commit its rows.
        """
        state = self._context.state
        if state.ends_as is None:
            return
        rest = tuple(task for task in self._context.spec.tasks if task not in state.down)
        for attempt, group in state.by_attempt(rest):
            self._context.instruct(do.CancelAttempt(attempt, group))
        state.stop(rest)

    def going_back(self, tasks: Iterable[TaskId]) -> tuple[TaskId, ...]:
        """Returns all tasks that have to restart because of these failed tasks, in the order of the job.

        Tasks that are stopped already are omitted.
        """
        state = self._context.state
        spec = self._context.spec
        if spec.failover is FailoverStrategy.FULL or spec.hooks or self._stops():
            return tuple(task for task in spec.tasks if task not in state.down)
        back = {other for task in tasks for other in self._region(task)}
        tied = self._tied_vertices()
        while True:
            vertices = {task.vertex for task in back} & tied
            more = {other for task in spec.tasks if task.vertex in vertices for other in self._region(task)}
            if more <= back:
                return tuple(task for task in spec.tasks if task in back and task not in state.down)
            back |= more

    def _stops(self) -> bool:
        """Returns whether the job is about to end: the savepoint of a stop has been triggered, or tasks only have to
        commit.
        """
        state = self._context.state
        if state.ends_as is not None:
            return True
        return state.stopping is not None and state.pending[state.stopping].phase is not PendingPhase.HOOKS

    def _tied_vertices(self) -> set[VertexId]:
        """Returns the vertices whose subtasks must stop together, because they may have union list state."""
        state = self._context.state
        spec = self._context.spec
        if not state.completed and spec.restore is not None:
            return {task.vertex for task in spec.tasks}
        return {info.vertex for info in spec.operators if info.uid in state.union_operators}

    def _region(self, task: TaskId) -> tuple[TaskId, ...]:
        if not self._regions:
            spec = self._context.spec
            edges = ((edge.upstream, edge.downstream, edge.pointwise) for edge in spec.edges)
            self._regions = {t: region for region in pipelined_regions(spec.tasks, edges) for t in region}
        return self._regions[task]


_JITTER = 1
"""Purpose of the random draw for jitter (`draw_fraction`)."""


class Restarts:
    """Consults the job's restart strategy after a failure, and stores the failures that the strategy counts.

    Rules:

    - The strategy is consulted once for each failure. When a region has stopped, later reports of its tasks belong to
      the same failure.
    - An error of the program itself ends the job without consulting the strategy, because no restart can help.
    - Only failures count. A lost coordinator, a damaged checkpoint that was skipped, and a stop that could not be
      carried out do not count.
    - The decision depends only on the log: times come from events, randomness from the job's seed and the number of the
      attempt.
    """

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def runs(self, at_ms: int) -> None:
        """Records the time from which all tasks of the attempt are running, for the restart strategy."""
        self._context.state.running_since_ms = at_ms

    @property
    def keeps_failing(self) -> bool:
        """Returns whether the same error has occurred at the same row as often as the restart strategy allows
        (`same_errors_max`).
        """
        most = self._context.spec.restart.same_errors_max
        return most is not None and self._context.state.same_failures >= most

    def failed(self, at_ms: int, permanent: bool, fingerprint: str = "") -> int | None:
        """Counts a failure. Returns the delay in ms before the next attempt, or None if the job has to end.

        `permanent`: no restart can help. `fingerprint`: identifies the error and its row, or is empty.
        """
        state = self._context.state
        spec = self._context.spec
        since_ms = state.running_since_ms
        state.running_since_ms = None
        ran_ms = None if since_ms is None else max(0, at_ms - since_ms)
        state.failures = spec.restart.count(state.failures, at_ms, ran_ms)
        again = bool(fingerprint) and fingerprint == state.last_fingerprint
        state.same_failures = state.same_failures + 1 if again else int(bool(fingerprint))
        state.last_fingerprint = fingerprint
        if permanent or self.keeps_failing:
            return None
        delay_ms = spec.restart.decide(state.failures, draw_fraction(spec.seed, _JITTER, state.attempt))
        if delay_ms is not None:
            invariants.check_wait(spec.restart, delay_ms)
        return delay_ms

    def left(self) -> None:
        """Records that the attempt ended without a failure. The restart strategy then ignores how long the
        attempt ran.
        """
        self._context.state.running_since_ms = None


QUESTIONS = 5
"""The number of times that a task's status is requested within the time limit for its answer."""


class Takeover:
    """Takes over running tasks for a new generation of the coordinator.

    The machine calls it when a new generation of the coordinator starts, and when tasks answer it. Rules:

    - A task that runs according to the log is requested to report its status. It keeps its attempt and its state, and
      continues to process rows meanwhile.
    - A task that was being deployed, or waited for its restart, is deployed again at once, because its progress is
      unknown.
    - Open checkpoints are aborted, and the tasks are notified. No new checkpoint starts before every task has answered.
    - A task that does not answer in time has failed, like any other: its region restarts if the restart strategy allows
      it. Requests and answers may get lost, so the request is repeated until then.
    - If tasks were triggered for a savepoint that ends the job, they have ended their data. Then all tasks start again,
      and the stop is tried again.
    - With `adoption_timeout_ms` None, all tasks start again.
    """

    def __init__(self, context: CoordinatorContext, checkpoints: CheckpointCoordinator, restarts: Restarts) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._restarts = restarts

    def take_over(self, at_ms: int) -> None:
        """Begins the takeover of a running job: requests the status of running tasks, and restarts the tasks that were
        not running.
        """
        state = self._context.state
        tasks = self._context.spec.tasks
        state.last_failure = f"the coordinator was lost; generation {state.generation} has taken over"
        lost = self._lost()
        if len(lost) == len(tasks):
            self._context.instruct(do.CancelAttempt(state.attempt))
            state.stop(tasks)
            self._restarts.left()
        else:
            state.adopting = {task: None for task in tasks if task not in lost}
            for attempt, group in state.by_attempt(lost):
                self._context.instruct(do.CancelAttempt(attempt, group))
            state.stop(lost)
            state.final_not_before_ms = NEVER_MS
            limit_ms = self._context.spec.adoption_timeout_ms
            assert limit_ms is not None
            self._context.instruct(do.SetTimer(f"adopt:{state.generation}", at_ms + limit_ms))
            self.ask(at_ms)
        if lost:
            state.move(JobInput.RESTART)
            state.restart_due = True
        self._checkpoints.take_over(at_ms)

    def ask(self, at_ms: int) -> None:
        """Requests the status of all tasks that have not answered yet, and sets the timer of the next request."""
        state = self._context.state
        limit_ms = self._context.spec.adoption_timeout_ms
        assert limit_ms is not None
        for attempt, tasks in state.by_attempt(state.adopting):
            self._context.instruct(do.AskTasks(attempt, tasks, state.generation))
        pause_ms = max(1, limit_ms // QUESTIONS)
        self._context.instruct(do.SetTimer(f"ask:{state.generation}", at_ms + pause_ms))

    def answered(self, event: ev.TaskAnswered) -> None:
        """Adopts a running task that has reported its status.

        Sends it again the messages that may not have reached it, and records its reports that may not be in the log.
        """
        state = self._context.state
        instruct = self._context.instruct
        check_answer(state, event)
        del state.adopting[event.task]
        if not event.started:
            instruct(do.StartTasks(event.attempt, (event.task,)))
        newest = state.completed[-1].checkpoint_id if state.completed else CheckpointId(0)
        # It may hold a snapshot for a checkpoint that was given up, or still collect the barriers of one.
        for number in sorted({event.snapshotted, event.collecting or event.snapshotted}):
            if number > newest and number not in state.pending:
                instruct(do.NotifyAborted(event.attempt, number, (event.task,)))
        if newest and self._context.spec.committing:
            # The notification may be lost, and the task waits for it before it commits.
            instruct(do.NotifyCompleted(event.attempt, newest, (event.task,)))
        if event.ended:
            state.ended[event.task] = None
        if not state.adopting:
            state.adoptions += 1
            if state.status is JobStatus.RUNNING and state.due_since_ms is None:
                self._checkpoints.start_periodic(event.at_ms)

    def missing(self) -> tuple[tuple[TaskId, ...], str]:
        """Returns the tasks that have not answered in time, and the reason to report for their failure."""
        state = self._context.state
        limit_ms = self._context.spec.adoption_timeout_ms
        tasks = tuple(state.adopting)
        text = f"{tasks[0]}: it has not answered within {limit_ms} ms (jobmanager.adoption-timeout)"
        return tasks, f"{text}, after the coordinator was lost"

    def _lost(self) -> tuple[TaskId, ...]:
        """Returns the tasks that a new coordinator has to deploy again, because the log has them as not running."""
        state = self._context.state
        tasks = self._context.spec.tasks
        if self._context.spec.adoption_timeout_ms is None:
            return tasks
        if state.status is JobStatus.RUNNING:
            return ()
        if state.status is JobStatus.DEPLOYING:
            return tuple(task for task in tasks if task in state.down or task not in state.older_attempts)
        # Before the first attempt no task was stopped.
        return tuple(task for task in tasks if task in state.down) or tasks
