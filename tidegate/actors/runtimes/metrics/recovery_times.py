"""What the recoveries of a job take, and their parts; `RecoveryWatch` notes what the event log does not have.

Rules:
- Nobody knows when a process has died, only when that was noticed, and when the process was heard of last: noticing
  took no longer than the time between them. A task that tells its failure itself is noticed at once.
- Sources read ahead, and what they have read says nothing of the job. So a recovery ends with the first row that comes
  into a task behind the sources; where a restart has only sources, with theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tidegate.actors.coordinator.chronicle import RECOVERIES_MAX
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber


@dataclass(frozen=True, slots=True)
class Recovery:
    """Times in ms, which add up. `deployment_ms`: from the failure until the next attempt was given to processes.

    `restore_ms`: from then until the last of its tasks was ready.
    """

    deployment_ms: int
    restore_ms: int

    @property
    def total_ms(self) -> int:
        """From the failure until all tasks were ready."""
        return self.deployment_ms + self.restore_ms

    @staticmethod
    def between(failed_at_ms: int, deployed_at_ms: int, ready_at_ms: int) -> Recovery:
        """Of three moments by clocks of several processes, none of which may lie before the one that led to it."""
        deployed_at_ms = max(failed_at_ms, deployed_at_ms)
        return Recovery(deployed_at_ms - failed_at_ms, max(deployed_at_ms, ready_at_ms) - deployed_at_ms)


@dataclass(frozen=True, slots=True)
class RecoveryEnds:
    """Both ends of a recovery, as far as they are known.

    `unnoticed_ms`: for how long nobody had noticed the failure, at most; None where the task has told it itself.
    `first_row_at_ms`: when the first row came in, in ms since the epoch.
    """

    unnoticed_ms: int | None = None
    first_row_at_ms: int | None = None


class RecoveryWatch:
    """Follows the attempts of one job. All times in ms since the epoch; `row_came_in` may be called on any thread."""

    def __init__(self, graph: JobGraph) -> None:
        fed = {edge.downstream for edge in graph.edges}
        self._fed = frozenset(task for task in graph.tasks() if task.vertex in fed)
        self._attempt = AttemptNumber(-1)
        self._failed_at_ms: int | None = None
        self._unnoticed_ms: int | None = None
        self._since_ms: int | None = None
        """When the failure was that the newest deployment follows; None: it follows none."""
        self._deployed_at_ms = 0
        self._not_ready: set[TaskId] = set()
        self._over = False
        """Whether all tasks were ready since the failure."""
        self._awaited: frozenset[TaskId] = frozenset()
        """Tasks of the newest attempt, of which none has had a row."""
        self.newest: Recovery | None = None
        """What the last one took, so far. From any thread."""
        self.ends: Mapping[AttemptNumber, RecoveryEnds] = {}
        """Those of the newest attempts. From any thread."""

    def failed(self, at_ms: int, unnoticed_ms: int | None = None) -> None:
        """A task has failed. What follows before all tasks are ready again belongs to the same recovery."""
        if self._failed_at_ms is None or self._over:
            self._failed_at_ms, self._unnoticed_ms, self._over = at_ms, unnoticed_ms, False

    def deployed(self, attempt: AttemptNumber, tasks: Collection[TaskId], at_ms: int) -> None:
        """These tasks were given to processes."""
        self._attempt, self._deployed_at_ms, self._since_ms = attempt, at_ms, self._failed_at_ms
        self._not_ready, self._over = set(tasks), False
        if attempt > 0:
            unnoticed_ms = None if self._failed_at_ms is None else self._unnoticed_ms
            self.ends = dict([*self.ends.items(), (attempt, RecoveryEnds(unnoticed_ms))][-RECOVERIES_MAX:])
        self._awaited = frozenset(tasks) & self._fed or frozenset(tasks)

    def ready(self, attempt: AttemptNumber, task: TaskId, at_ms: int) -> None:
        """A task has its state."""
        if attempt == self._attempt:
            self._not_ready.discard(task)
            self._over = not self._not_ready
            if self._since_ms is not None:
                self.newest = Recovery.between(self._since_ms, self._deployed_at_ms, at_ms)

    def row_came_in(self, attempt: AttemptNumber, task: TaskId, at_ms: int) -> str | None:
        """Rows have come into a task. If they end the recovery, for how long it has lasted, in words."""
        if attempt != self._attempt or task not in self._awaited:
            return None
        self._awaited = frozenset()
        if attempt in self.ends:
            self.ends = {**self.ends, attempt: replace(self.ends[attempt], first_row_at_ms=at_ms)}
        words = f"{at_ms - self._deployed_at_ms} ms after its deployment{self.since_failure(at_ms)}"
        self._failed_at_ms = None
        return words

    def since_failure(self, at_ms: int) -> str:
        """How long ago the failure was, to be put behind something; empty if there was none."""
        return "" if self._failed_at_ms is None else f", {at_ms - self._failed_at_ms} ms after the failure"
