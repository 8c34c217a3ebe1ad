"""Failover: decides which tasks stop after a failure, and wait for the next attempt (Flink's `FailoverStrategy`).

The machine calls it. A job consists of pipelined regions, and nothing is in flight between them. So a region can go
back to the newest checkpoint alone: what the others processed since then stays processed, once. Rules:

- The region of a failed task stops as a whole. Tasks of other regions keep their processes, their attempt and their
  state.
- The whole job stops where one region would not be enough. (For the loss of a coordinator see `adoption.py`.)
  - Too many checkpoints have failed, or a stop has.
  - A checkpoint is damaged. An older one is restored, and the tables are taken back to it.
  - A task fails while a savepoint that ends the job is pending. The other tasks have ended their data.
  - A task fails in a job with master hooks. They stand for something outside that all tasks may share.
- Union list state goes to every subtask of its vertex, so regions that share such a vertex stop together. Before the
  first checkpoint of a restored job nobody knows which vertices have union list state, so all are treated so.
- Every open checkpoint is given up, because the stopped region takes no part in it. The other tasks are told.
- The restart strategy is asked for each failure. What fails while something else waits for its restart waits with it.
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
from tidegate.protocol.failure_reasons import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import VertexId


class Failover:
    """Stops the tasks of one job that have to be deployed anew."""

    def __init__(self, context: CoordinatorContext, checkpoints: CheckpointKeeper, deployer: Deployer) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._deployer = deployer
        self._regions: dict[TaskId, tuple[TaskId, ...]] = {}
        """The region of each task, computed when it is first needed."""

    def stop_whole(self, reason: str, at_ms: int) -> None:
        """Stop all tasks. They wait for the next attempt."""
        state = self._context.state
        self._context.instruct(do.CancelAttempt(state.attempt))
        state.stop(self._context.spec.tasks)
        self._checkpoints.drop(Reason.JOB_FAILOVER, at_ms, reason)
        state.move(JobInput.RESTART)
        state.restart_due = False

    def stop_regions(self, tasks: Iterable[TaskId], reason: str, at_ms: int) -> None:
        """Stop the regions of these tasks, or all tasks where that is needed. They wait for the next attempt."""
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
        """All tasks that stop with these, in the order of the job, without those that are down already."""
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
        """Vertices whose subtasks stop together whatever joins them, because they may have union list state."""
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
