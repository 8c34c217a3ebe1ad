"""Checks which tasks restart, when they restart, and which coordinator they obey."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.job_spec import FailoverStrategy, JobSpec
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.task import events as ev
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import ExponentialDelay, FailureRate, FixedDelay, RestartStrategy
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import VertexId
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.coverage import Coverage

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
"""Events that may restart the whole job: failures of checkpoints, and failures before tasks start."""
_TIMERS_OF_THE_WHOLE_JOB = ("timeout", "deploy", "deploy-delayed", "export", "void", "hooks", "tables")


class FailoverOracle:
    """Checks that a failure restarts exactly the failed tasks and the tasks connected to them.

    It does not use the regions of the coordinator, but follows the channels of the graph. Rules:

    - A deployment consists of complete regions. No channel leads from a task that restarts to a task that continues.
    - A region restarts because one of its tasks has failed since it was deployed, or because of an event that concerns
      the whole job. Otherwise it stays in its attempt and receives the events of checkpoints in that attempt.
    - Until a restored job has a checkpoint of its own, it is unknown which vertices have union list state. A failure
      then counts for all tasks that union list state may connect to it. This still applies if the first checkpoint
      completes before they restart.
    - A deployment by a replaced coordinator does not count as started. Its successor finds in the log that the
      deployment was due, and repeats it.
    """

    def __init__(self, spec: JobSpec, graph: JobGraph, coverage: Coverage) -> None:
        self._spec = spec
        self._coverage = coverage
        self._neighbours: dict[TaskId, set[TaskId]] = {task: set() for task in graph.tasks()}
        for edge in graph.edges:
            for channel in graph.channels(edge):
                sender = graph.sender(channel)
                receiver = graph.receiver(channel)
                self._neighbours[sender].add(receiver)
                self._neighbours[receiver].add(sender)
        self._attempts: dict[TaskId, int] = {}
        self._tied: set[VertexId] = set()
        """Vertices with union list state. All their subtasks restart together."""
        self._failed: set[TaskId] = set()
        self._first_is_complete = False
        """True once the coordinator that controls the job was notified that a checkpoint of this job is complete."""
        self._generation = 0
        """Generation of the newest coordinator."""
        self._whole = True
        """True if an event since the last deployment has concerned the whole job."""
        self._starting: set[TaskId] = set()
        """Tasks that were deployed and have not received the order to start."""
        self._unanswered: set[TaskId] = set()
        """Tasks that have not answered the newest coordinator."""
        self._stop_was_asked = False
        """True after a stop was requested. Later failures may happen in tasks that have ended their data, because a
        stop continues in the next attempt.
        """

    def heard(self, event: co.CoordinatorEvent) -> None:
        """Records an event that the coordinator receives and does not ignore."""
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
            # It is unknown how far these tasks have come. The other tasks continue.
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
        """Checks an event that is sent to a task.

        It must belong to the current attempt of the task or to an earlier one.
        """
        if isinstance(event, ev.TasksStarted):
            self._starting.discard(task)
        attempt = getattr(event, "attempt", None)
        if attempt is not None and attempt > self._attempts.get(task, -1):
            raise InvariantViolated(
                7, f"{task} runs in attempt {self._attempts[task]}, but receives an event of attempt {attempt}"
            )

    def deployed(self, attempt: int, tasks: Iterable[TaskId], completed: int, by: int) -> None:
        """Checks that coordinator `by` restarts exactly the tasks that must restart.

        `completed` is the number of completed checkpoints of this job.
        """
        again = set(tasks)
        self._starting |= again
        self._attempts |= dict.fromkeys(again, attempt)
        for task in again:
            cut = self._neighbours[task] - again
            if cut:
                raise InvariantViolated(
                    1, f"attempt {attempt} restarts {task}, but not {min(cut)}, which is connected to it"
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
                raise InvariantViolated(
                    7, f"attempt {attempt} restarts {min(untouched)}, although no task connected to it has failed"
                )
        if by < self._generation:
            self._failed |= again
            return
        if len(again) < len(self._neighbours):
            self._coverage.saw("region_restarted")
        else:
            self._whole = False
        self._failed -= again

    def _touched(self, tied: set[VertexId]) -> set[TaskId]:
        """Returns the failed tasks and all tasks connected to them by channels.

        All tasks of a vertex in `tied` are treated as connected.
        """
        found = set(self._failed)
        to_visit = list(self._failed)
        while to_visit:
            task = to_visit.pop()
            joined = set(self._neighbours[task])
            if task.vertex in tied:
                joined |= {other for other in self._neighbours if other.vertex == task.vertex}
            to_visit += joined - found
            found |= joined
        return found


NUMBERS_MAX = 1_000
"""For how many checkpoints the coordinator that triggered them is stored."""


class TakeoverOracle:
    """Checks that tasks obey only the newest coordinator that has adopted them.

    It uses the generations of coordinators and the numbers of checkpoints. Rules:

    - A task that has received an order from a coordinator ignores orders from older ones.
    - A coordinator does not end a process that obeys a newer one.
    - A checkpoint number belongs to one checkpoint, triggered by one coordinator.
    - A coordinator that has requested the state of the tasks triggers no checkpoint until each of them has answered or
      was deployed again.
    """

    def __init__(self, spec: JobSpec, coverage: Coverage) -> None:
        self._tasks = frozenset(spec.tasks)
        self._coverage = coverage
        self._asked: dict[int, set[TaskId]] = {}
        """The tasks that have not answered yet, by the generation of the coordinator that sent the request."""
        self._deployed_since = False
        """True if tasks were deployed since the newest coordinator started."""
        self._numbers: dict[int, int] = {}
        """The generation of the coordinator that triggered each checkpoint."""

    def heard(self, event: co.CoordinatorEvent) -> None:
        """Records an event that a coordinator receives and does not ignore."""
        if isinstance(event, co.CoordinatorStarted):
            self._deployed_since = False
        elif isinstance(event, co.TaskAnswered):
            asked = self._asked.get(event.generation, set())
            asked.discard(event.task)
            if not asked and not self._deployed_since:
                self._coverage.saw("tasks_adopted")

    def deployed(self, tasks: Iterable[TaskId], by: int) -> None:
        """Records a deployment. Coordinator `by` and older ones no longer wait for answers from these tasks."""
        again = set(tasks)
        self._deployed_since = True
        for generation, asked in self._asked.items():
            if generation <= by:
                asked -= again

    def told(self, event: ev.TaskEvent) -> None:
        """Checks an event that a coordinator sends to a task."""
        if isinstance(event, ev.CoordinatorTookOver):
            self._asked.setdefault(int(event.generation), set(self._tasks))
        elif isinstance(event, ev.CheckpointTriggered):
            self._triggered(int(event.checkpoint_id), int(event.generation))

    def _triggered(self, number: int, generation: int) -> None:
        by = self._numbers.setdefault(number, generation)
        if by != generation:
            raise InvariantViolated(
                4, f"checkpoint {number} is triggered by two coordinators, of generations {by} and {generation}"
            )
        if any(other > number and theirs < generation for other, theirs in self._numbers.items()):
            raise InvariantViolated(
                4,
                f"coordinator generation {generation} triggers checkpoint {number} after an earlier generation has "
                "triggered a newer one",
            )
        self._numbers = {n: theirs for n, theirs in self._numbers.items() if n > number - NUMBERS_MAX}
        unanswered = self._asked.get(generation)
        if unanswered:
            raise InvariantViolated(
                8,
                f"coordinator generation {generation} triggers checkpoint {number} before {min(unanswered)} has "
                "answered its takeover",
            )

    def killed(self, process: str, generation: int, newest: int) -> None:
        """Checks that a coordinator may end a process. `newest` is the generation that the process obeys."""
        if generation < newest:
            raise InvariantViolated(
                8, f"coordinator generation {generation} ends the process {process}, which already follows {newest}"
            )

    def obeyed(self, task: TaskId, what: str, generation: int, newest: int) -> None:
        """Checks an order that a task has obeyed.

        `newest` is the newest generation from which the task has received orders.
        """
        if generation < newest:
            raise InvariantViolated(
                8,
                f"{task} executes {what} of coordinator generation {generation} after an order of generation {newest}",
            )


class RestartWatch:
    """Checks that restarts follow the restart strategy of a job: whether there is a next attempt, and when it starts.

    It counts failures itself. A decision may be lost together with a coordinator, so it checks only until the first
    coordinator is lost. `put_off` is called for each wait that is longer than the previous one.
    """

    def __init__(self, strategy: RestartStrategy, put_off: Callable[[], None]) -> None:
        self._strategy = strategy
        self._put_off = put_off
        self._runs_since_ms: int | None = None
        self._in_a_row = 0
        self._times_ms: list[int] = []
        self._last_wait_ms: int | None = None

    def done(
        self,
        instruction: do.CoordinatorInstruction,
        event: co.CoordinatorEvent,
        instructions: Sequence[do.CoordinatorInstruction],
    ) -> None:
        """Checks an instruction that is executed. `instructions` are all instructions that followed from `event`."""
        match instruction:
            case do.StartTasks():
                self._runs_since_ms = event.at_ms
            case do.SetTimer(timer, due_at_ms) if timer.startswith("restart:"):
                self._fails(event.at_ms)
                self._check_wait(due_at_ms - event.at_ms)
            case do.CancelAttempt() if isinstance(event, co.TaskFailed) and not event.permanent:
                if not any(isinstance(i, do.SetTimer) and i.timer.startswith("restart:") for i in instructions):
                    self._fails(event.at_ms)
                    self._check_end(event.reason)

    def _fails(self, at_ms: int) -> None:
        strategy = self._strategy
        since_ms = self._runs_since_ms
        self._runs_since_ms = None
        ran_ms = -1 if since_ms is None else at_ms - since_ms
        if isinstance(strategy, ExponentialDelay) and ran_ms >= strategy.reset_after_ms:
            self._in_a_row = 0
        self._in_a_row += 1
        self._times_ms.append(at_ms)

    def _recent(self, interval_ms: int) -> int:
        now_ms = self._times_ms[-1]
        return sum(1 for time_ms in self._times_ms if now_ms - time_ms <= interval_ms)

    def _check_wait(self, wait_ms: int) -> None:
        match self._strategy:
            case FixedDelay(delay_ms=delay_ms):
                right = wait_ms == delay_ms
            case FailureRate(failures=failures, interval_ms=interval_ms, delay_ms=delay_ms):
                right = wait_ms == delay_ms and self._recent(interval_ms) <= failures
            case ExponentialDelay() as strategy:
                backoff: float = strategy.initial_ms
                for _ in range(self._in_a_row - 1):
                    backoff = min(strategy.maximum_ms, backoff * strategy.multiplier)
                right = abs(wait_ms - backoff) <= backoff * strategy.jitter + 1 and wait_ms <= strategy.maximum_ms
                right = right and (strategy.attempts is None or self._in_a_row <= strategy.attempts)
            case _:
                right = False
        if not right:
            raise InvariantViolated(
                7,
                f"the restart after consecutive failure {self._in_a_row} waits {wait_ms} ms, which {self._strategy} "
                "does not allow",
            )
        if self._last_wait_ms is not None and wait_ms > self._last_wait_ms:
            self._put_off()
        self._last_wait_ms = wait_ms

    def _check_end(self, reason: str) -> None:
        match self._strategy:
            case FailureRate(failures=failures, interval_ms=interval_ms):
                right = self._recent(interval_ms) > failures
            case ExponentialDelay(attempts=attempts):
                right = attempts is not None and self._in_a_row > attempts
            case _:
                right = True
        if not right:
            raise InvariantViolated(7, f"the job fails, although {self._strategy} allows another attempt: {reason}")
