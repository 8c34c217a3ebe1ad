"""The oracle of takeovers: tasks that a new coordinator adopts are its own, and no older one's.

It keeps numbers of its own: those with which coordinators speak, and those of checkpoints. Rules:

- A task that has heard of a coordinator does nothing that an older one says.
- No coordinator ends a process that obeys a newer one.
- A number is given to one checkpoint, by one coordinator.
- A coordinator that has asked the tasks what they are doing starts no checkpoint before all of them have answered, or
  are deployed anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.actors.task import events as ev
from tidegate.protocol.identity import TaskId
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.violation import InvariantViolated

NUMBERS_MAX = 1_000
"""Checkpoints whose coordinator is remembered."""


class TakeoverOracle:
    """Watches the coordinators of one job."""

    def __init__(self, spec: JobSpec, coverage: Coverage) -> None:
        self._tasks = frozenset(spec.tasks)
        self._coverage = coverage
        self._asked: dict[int, set[TaskId]] = {}
        """Tasks that have not answered, by the generation that has asked them."""
        self._deployed_since = False
        """Whether something was deployed since the newest coordinator began."""
        self._numbers: dict[int, int] = {}
        """The coordinator that has triggered a checkpoint, by its number."""

    def heard(self, event: co.CoordinatorEvent) -> None:
        """A coordinator is told something, and does not ignore it."""
        if isinstance(event, co.CoordinatorStarted):
            self._deployed_since = False
        elif isinstance(event, co.TaskAnswered):
            asked = self._asked.get(event.generation, set())
            asked.discard(event.task)
            if not asked and not self._deployed_since:
                self._coverage.saw("tasks_adopted")

    def deployed(self, tasks: Iterable[TaskId], by: int) -> None:
        """Coordinator `by` starts tasks anew: neither it nor those before wait for an answer of theirs."""
        again = set(tasks)
        self._deployed_since = True
        for generation, asked in self._asked.items():
            if generation <= by:
                asked -= again

    def told(self, event: ev.TaskEvent) -> None:
        """A coordinator says something to a task."""
        if isinstance(event, ev.CoordinatorTookOver):
            self._asked.setdefault(int(event.generation), set(self._tasks))
        elif isinstance(event, ev.CheckpointTriggered):
            self._triggered(int(event.checkpoint_id), int(event.generation))

    def _triggered(self, number: int, generation: int) -> None:
        by = self._numbers.setdefault(number, generation)
        if by != generation:
            raise InvariantViolated(4, f"checkpoint {number} is triggered by coordinators {by} and {generation}")
        if any(other > number and theirs < generation for other, theirs in self._numbers.items()):
            raise InvariantViolated(4, f"coordinator {generation} triggers {number}, and another one newer ones before")
        self._numbers = {n: theirs for n, theirs in self._numbers.items() if n > number - NUMBERS_MAX}
        unanswered = self._asked.get(generation)
        if unanswered:
            raise InvariantViolated(
                8, f"coordinator {generation} triggers {number}, and {min(unanswered)} has not answered it"
            )

    def killed(self, process: str, generation: int, newest: int) -> None:
        """A coordinator ends a process; `newest`: the newest coordinator that the process has heard of."""
        if generation < newest:
            raise InvariantViolated(8, f"coordinator {generation} ends the process {process}, which obeys {newest}")

    def obeyed(self, task: TaskId, what: str, generation: int, newest: int) -> None:
        """A task has done what a coordinator says; `newest`: the newest coordinator that it had heard of."""
        if generation < newest:
            raise InvariantViolated(
                8, f"{task} does what coordinator {generation} says ({what}), and knows of {newest}"
            )
