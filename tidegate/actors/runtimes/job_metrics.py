"""Values of the metrics of a job, and how long its recoveries take.

Rules:

- Values come from the coordinator's memory and from a clock that the caller passes. Totals are gauges, as with Flink:
  they start with 0, and continue when another coordinator takes over. Wall clocks may be set back; no duration is below
  0 for that.
- When a process has died is unknown. Known are when that was noticed, and when the process last answered: noticing took
  at most the time between them. A task that reports its failure itself is noticed at once.
- Sources read ahead, so their rows prove nothing. A recovery ends with the first row that comes into a task behind the
  sources, or into a source where a restart has only sources.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tidegate.actors.coordinator.checkpoint_statistics import CheckpointRecord, CheckpointStatistics
from tidegate.actors.coordinator.coordinator_state import CoordinatorState, JobStatus
from tidegate.actors.coordinator.job_history import RECOVERIES_MAX
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes import metric_registry as m
from tidegate.actors.runtimes.metric_registry import Metric
from tidegate.actors.runtimes.running_job import RUNNING_STATUSES, JobProgress
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber

STATUSES = tuple(dict.fromkeys(RUNNING_STATUSES.values()))
"""What a job is called, in the order in which it gets there."""

NONE = -1
"""Where there is nothing to tell of: Flink's value."""


@dataclass(frozen=True, slots=True)
class JobTimes:
    """What the values need besides the coordinator's memory: times in ms since the epoch.

    `down_since_ms`: since when the job does not run, None while it does.
    """

    submitted_at_ms: int
    down_since_ms: int | None = None

    def at(self, state: CoordinatorState, now_ms: int) -> JobTimes:
        """The times now: an outage begins when it is first seen. The first deployment, and the end, are none."""
        again = state.status is JobStatus.DEPLOYING and state.attempt > 0
        if not again and state.status is not JobStatus.RESTARTING:
            return JobTimes(self.submitted_at_ms)
        return self if self.down_since_ms is not None else JobTimes(self.submitted_at_ms, now_ms)


def job_values(
    state: CoordinatorState, progress: JobProgress, times: JobTimes, now_ms: int, recovery: Recovery | None = None
) -> dict[Metric, float]:
    """The value of each of `JOB_VALUES`. `times` are those of `now_ms`; `recovery`: the last one, if there was one."""
    statistics = state.statistics
    newest, restored = statistics.latest_completed, statistics.latest_restored
    over = state.status.terminal
    completed_at_ms = times.submitted_at_ms if newest is None else newest.ended_at_ms
    interval_ms = None if state.spec is None else state.spec.checkpoints.interval_ms
    return {
        m.UPTIME: NONE if over else _since(state.running_since_ms, now_ms),
        m.DOWNTIME: NONE if over else _since(times.down_since_ms, now_ms),
        m.NUM_RESTARTS: progress.restarts,
        m.CHECKPOINT_AGE: NONE if over else _since(completed_at_ms, now_ms) / 1_000,
        m.CHECKPOINT_INTERVAL: (interval_ms or 0) / 1_000,
        m.LAST_DURATION: NONE if newest is None else newest.duration_ms,
        m.LAST_SIZE: NONE if newest is None else newest.incremental_bytes + newest.in_flight_bytes,
        m.LAST_FULL_SIZE: NONE if newest is None else newest.state_bytes + newest.in_flight_bytes,
        m.LAST_IN_FLIGHT: NONE if newest is None else newest.in_flight_bytes,
        m.LAST_COMPLETED_ID: NONE if newest is None else newest.checkpoint_id,
        m.LAST_RESTORE: NONE if restored is None else restored.at_ms,
        m.IN_PROGRESS: statistics.in_progress,
        m.COMPLETED: statistics.completed,
        m.FAILED: statistics.failed,
        m.COORDINATOR_LOSSES: progress.coordinator_losses,
        m.ADOPTIONS: progress.adoptions,
        m.LAST_RECOVERY: NONE if recovery is None else recovery.total_ms,
        m.LAST_RECOVERY_DEPLOYMENT: NONE if recovery is None else recovery.deployment_ms,
        m.LAST_RECOVERY_RESTORE: NONE if recovery is None else recovery.restore_ms,
        m.STANDBYS_READY: progress.standbys_ready,
        m.STANDBYS_STARTING: progress.standbys_starting,
        m.SUSPECT_NODES: progress.suspect_nodes,
    }


def status_values(state: CoordinatorState) -> dict[str, int]:
    """1 for the status that the job is in, 0 for every other one."""
    return {status: int(status == RUNNING_STATUSES[state.status]) for status in STATUSES}


def newly_completed(statistics: CheckpointStatistics, seen: int) -> tuple[CheckpointRecord, ...]:
    """Checkpoints that completed after the first `seen`, as far as the history reaches back; the newest one always."""
    count = statistics.completed - seen
    newest = statistics.latest_completed
    if count <= 0 or newest is None:
        return ()
    # A savepoint that is copied for long completes after newer checkpoints.
    completed = [record for record in statistics.history if record.reason is None]
    if all(record is not newest for record in completed):
        completed.append(newest)
    return tuple(completed[-count:])


def _since(at_ms: int | None, now_ms: int) -> int:
    return 0 if at_ms is None else max(0, now_ms - at_ms)


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
