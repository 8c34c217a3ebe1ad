"""Failover: what stops when a task has failed, and waits for the next attempt (Flink's `FailoverStrategy`).

A job consists of pipelined regions, between which nothing is in flight. So what a failed region does again from the
newest checkpoint is no matter of the others: their rows after that checkpoint stay processed, once. Rules:

- The region of a failed task stops, whole; the tasks of other regions keep their processes, their attempt and state.
- What concerns the job stops all of it: too many failed checkpoints, a failed stop, a damaged checkpoint (an older one
  has to be restored, and the tables are taken back). So does a failure while a savepoint that ends the job is pending,
  since the others have ended their data; and any in a job with master hooks, which stand for something outside that all
  tasks may share. What the loss of a coordinator stops is in `adoption.py`.
- Union list state goes to every subtask of its vertex, so regions that share such a vertex go together. Of a checkpoint
  of another job it is not known which vertices have some: all of them might.
- Every checkpoint that is still open is given up: the stopped region will have no part in it. The others are told.
- The restart strategy is asked for each failure. What has failed while something else waits for its restart waits
  with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator.checkpoints.checkpoint_keeper import CheckpointKeeper
from tidegate.actors.coordinator.deployment import Deployer
from tidegate.actors.coordinator.job.job_spec import FailoverStrategy
from tidegate.actors.coordinator.job.phases import JobInput, JobStatus, PendingPhase
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext
from tidegate.actors.graph.regions import pipelined_regions
from tidegate.actors.protocol.failure_reasons import CheckpointFailureReason as Reason
from tidegate.actors.protocol.identity import TaskId
from tidegate.storage.ids import VertexId


class Failover:
    """Stops what has to be deployed anew, of one job."""

    def __init__(self, context: CoordinatorContext, checkpoints: CheckpointKeeper, deployer: Deployer) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._deployer = deployer
        self._regions: dict[TaskId, tuple[TaskId, ...]] = {}
        """The region of each task; made when it is asked for first."""

    def stop_whole(self, reason: str, at_ms: int) -> None:
        """All tasks stop, and the next attempt is waited for."""
        state = self._context.state
        self._context.instruct(do.CancelAttempt(state.attempt))
        state.stop(self._context.spec.tasks)
        self._checkpoints.drop(Reason.JOB_FAILOVER, at_ms, reason)
        state.move(JobInput.RESTART)
        state.restart_due = False

    def stop_regions(self, tasks: Iterable[TaskId], reason: str, at_ms: int) -> None:
        """The regions of these tasks stop, and wait for the next attempt; all, where that is asked for."""
        state = self._context.state
        again = self._going_back(tasks)
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

    def _going_back(self, tasks: Iterable[TaskId]) -> tuple[TaskId, ...]:
        """All tasks that go back with these, in the order of the job, without those that are down already."""
        state, spec = self._context.state, self._context.spec
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
        """Whether tasks were told of a savepoint that ends the job."""
        state = self._context.state
        return state.stopping is not None and state.pending[state.stopping].phase is not PendingPhase.HOOKS

    def _tied_vertices(self) -> set[VertexId]:
        """Vertices whose subtasks go back together, whatever joins them: they may have union list state."""
        state, spec = self._context.state, self._context.spec
        if not state.completed and spec.restore is not None:
            return {task.vertex for task in spec.tasks}
        return {info.vertex for info in spec.operators if info.uid in state.union_operators}

    def _region(self, task: TaskId) -> tuple[TaskId, ...]:
        if not self._regions:
            spec = self._context.spec
            edges = ((edge.upstream, edge.downstream, edge.pointwise) for edge in spec.edges)
            self._regions = {t: region for region in pipelined_regions(spec.tasks, edges) for t in region}
        return self._regions[task]
