"""The oracle of failover: what restarts is what has failed, and what is joined to it.

It knows nothing of how the coordinator finds regions: it walks over the channels of the graph. Rules:

- A deployment takes whole regions: no channel leads from a task that starts anew to one that goes on.
- A region starts anew because one of its tasks has failed since it was deployed, or for something that concerns the
  whole job. Else it keeps its attempt, and is told of checkpoints in that.
- Before a restored job has a checkpoint of its own nobody knows which vertices have union list state, so a failure is
  one of all tasks that may be joined by it. It stays so where the first checkpoint is complete before they start anew.
- What a replaced coordinator still deploys does not count as begun: its successor has read in the log that it was
  to be, and deploys it anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator.job_spec import FailoverStrategy, JobSpec
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.task import events as ev
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import VertexId
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.violation import InvariantViolated

_OF_THE_WHOLE_JOB = (
    co.CheckpointDeclined,
    co.CheckpointDamaged,
    co.CheckpointVoided,
    co.MetadataWriteFailed,
    co.SavepointWriteFailed,
    co.HookFailed,
    co.HookRestoreFailed,
    co.TablesNotTakenBack,
)
"""What may bring the whole job back: checkpoints that fail, what comes before the tasks."""
_TIMERS_OF_THE_WHOLE_JOB = ("timeout", "deploy", "deploy-delayed", "export", "void", "hooks", "tables")


class FailoverOracle:
    """Watches which tasks of one job start anew."""

    def __init__(self, spec: JobSpec, graph: JobGraph, coverage: Coverage) -> None:
        self._spec = spec
        self._coverage = coverage
        self._neighbours: dict[TaskId, set[TaskId]] = {task: set() for task in graph.tasks()}
        for edge in graph.edges:
            for channel in graph.channels(edge):
                sender, receiver = graph.sender(channel), graph.receiver(channel)
                self._neighbours[sender].add(receiver)
                self._neighbours[receiver].add(sender)
        self._attempts: dict[TaskId, int] = {}
        self._tied: set[VertexId] = set()
        """Vertices with union list state: their subtasks go back together."""
        self._failed: set[TaskId] = set()
        self._first_is_complete = False
        """Whether the coordinator in charge has heard that a checkpoint of this job is."""
        self._generation = 0
        """The newest coordinator."""
        self._whole = True
        """Whether something has happened that concerns the whole job, since it was deployed."""
        self._starting: set[TaskId] = set()
        """Tasks that were deployed, and not told to start."""
        self._unanswered: set[TaskId] = set()
        """Tasks that have not answered the newest coordinator."""
        self._stop_was_asked = False
        """From then on any failure may find tasks that have ended their data: a stop outlives its attempt."""

    def heard(self, event: co.CoordinatorEvent) -> None:
        """The coordinator is told something, and does not ignore it."""
        if isinstance(event, co.TaskFailed):
            if event.attempt == self._attempts.get(event.task):
                self._failed.add(event.task)
                if self._spec.restore is not None and not self._first_is_complete:
                    self._failed |= self._touched({task.vertex for task in self._neighbours})
        elif isinstance(event, co.MetadataWritten):
            self._first_is_complete = True
        elif isinstance(event, co.CheckpointAcknowledged):
            handle = event.state.handle
            if handle is not None and any(section.kind is StateKind.UNION for section in handle.sections):
                self._tied.add(event.task.vertex)
        elif isinstance(event, co.CoordinatorStarted):
            self._generation = int(event.generation)
            self._first_is_complete = False
            self._whole |= self._spec.adoption_timeout_ms is None
            # How far these have come nobody knows. All others go on.
            self._failed |= self._starting
            self._unanswered = set(self._neighbours)
        elif isinstance(event, co.TaskAnswered):
            self._unanswered.discard(event.task)
        elif isinstance(event, co.TimerFired):
            if event.timer.startswith("adopt:"):
                self._failed |= self._unanswered
            self._whole |= event.timer.partition(":")[0] in _TIMERS_OF_THE_WHOLE_JOB
        elif isinstance(event, co.CheckpointRequested):
            self._stop_was_asked |= event.kind.stops
        else:
            self._whole |= isinstance(event, _OF_THE_WHOLE_JOB)

    def told(self, task: TaskId, event: ev.TaskEvent) -> None:
        """The coordinator tells a task something: in its own attempt, or one that is long over."""
        if isinstance(event, ev.TasksStarted):
            self._starting.discard(task)
        attempt = getattr(event, "attempt", None)
        if attempt is not None and attempt > self._attempts.get(task, -1):
            raise InvariantViolated(7, f"{task} is told of attempt {attempt}, and goes on in {self._attempts[task]}")

    def deployed(self, attempt: int, tasks: Iterable[TaskId], completed: int, by: int) -> None:
        """Coordinator `by` starts these tasks anew. `completed`: how many checkpoints of this job are complete."""
        again = set(tasks)
        self._starting |= again
        self._attempts |= dict.fromkeys(again, attempt)
        for task in again:
            cut = self._neighbours[task] - again
            if cut:
                raise InvariantViolated(
                    1, f"attempt {attempt} is of {task}, and not of {min(cut)} that it is joined to"
                )
        whole = (
            self._whole
            or self._stop_was_asked
            or self._spec.failover is FailoverStrategy.FULL
            or bool(self._spec.hooks)
        )
        if not whole:
            unknown = not completed and self._spec.restore is not None
            untouched = again - self._touched({t.vertex for t in self._neighbours} if unknown else self._tied)
            if untouched:
                raise InvariantViolated(7, f"attempt {attempt} is of {min(untouched)}, where nothing had failed")
        if by < self._generation:
            self._failed |= again
            return
        if len(again) < len(self._neighbours):
            self._coverage.saw("region_restarted")
        else:
            self._whole = False
        self._failed -= again

    def _touched(self, tied: set[VertexId]) -> set[TaskId]:
        """All tasks that something joins to one that has failed: channels, or being of one of these vertices."""
        found, to_visit = set(self._failed), list(self._failed)
        while to_visit:
            task = to_visit.pop()
            joined = set(self._neighbours[task])
            if task.vertex in tied:
                joined |= {other for other in self._neighbours if other.vertex == task.vertex}
            to_visit += joined - found
            found |= joined
        return found
