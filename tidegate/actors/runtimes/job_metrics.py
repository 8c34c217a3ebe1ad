"""Computes the values of a job's metrics, and the durations of its recoveries.

Rules:

- Values come from the coordinator's state and from a clock that the caller passes. Totals are gauges, as in Flink: they
  start with 0, and continue under a new coordinator. Wall clocks may be set back, so negative durations become 0.
- The exact time at which a process died is unknown. Only the time when its death was noticed and the time of its last
  answer are available, so the death was noticed after at most the time between them. A failure that a task reports
  itself is noticed at once.
- Sources read ahead, so rows at a source do not show that the job has recovered. A recovery ends with the first row
  that arrives at a task behind the sources, or at a source if a restart has only sources.
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
"""The statuses of a job that metrics show, in the order of its life."""

NONE = -1
"""Flink's value for a metric that has no value yet."""


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Times, in ms since the epoch, that the metrics need in addition to the coordinator's state.

    `down_since_ms` is the start of the current outage, or None while the job runs.
    """

    submitted_at_ms: int
    down_since_ms: int | None = None

    def at(self, state: CoordinatorState, now_ms: int) -> JobTimes:
        """Returns the times after an update at `now_ms`. An outage begins when this method first sees it.

        The first deployment and the end of the job do not count as outages.
        """
        again = state.status is JobStatus.DEPLOYING and state.attempt > 0
        if not again and state.status is not JobStatus.RESTARTING:
            return JobTimes(self.submitted_at_ms)
        return self if self.down_since_ms is not None else JobTimes(self.submitted_at_ms, now_ms)


def job_values(
    state: CoordinatorState, progress: JobProgress, times: JobTimes, now_ms: int, recovery: Recovery | None = None
) -> dict[Metric, float]:
    """Returns the value of each metric in `JOB_VALUES`. `times`: as of `now_ms`. `recovery`: the last recovery,
    or None.
    """
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
    """Returns, by status, 1 for the current status of the job and 0 for every other status."""
    return {status: int(status == RUNNING_STATUSES[state.status]) for status in STATUSES}


def newly_completed(statistics: CheckpointStatistics, seen: int) -> tuple[CheckpointRecord, ...]:
    """Returns the records of the checkpoints that completed since `seen` checkpoints had completed.

    The newest record is always included. Older ones are missing if the history has dropped them.
    """
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
    """The duration of a recovery in two parts, in ms.

    `deployment_ms` is the time from the failure until the deployment of the next attempt. `restore_ms` is the time from
    then until the last of its tasks was ready.
    """

    deployment_ms: int
    restore_ms: int

    @property
    def total_ms(self) -> int:
        """Returns the time, in ms, from the failure until all tasks were ready."""
        return self.deployment_ms + self.restore_ms

    @staticmethod
    def between(failed_at_ms: int, deployed_at_ms: int, ready_at_ms: int) -> Recovery:
        """Returns the recovery with these three times. Their clocks may differ, so negative parts become 0."""
        deployed_at_ms = max(failed_at_ms, deployed_at_ms)
        return Recovery(deployed_at_ms - failed_at_ms, max(deployed_at_ms, ready_at_ms) - deployed_at_ms)


@dataclass(frozen=True, slots=True)
class RecoveryEnds:
    """How long a failure remained unnoticed before a recovery, and when the first row arrived after it, as far as
    known.

    `unnoticed_ms` is an upper limit, or None if the task has reported the failure itself. `first_row_at_ms` is the time
    of the first row, in ms since the epoch.
    """

    unnoticed_ms: int | None = None
    first_row_at_ms: int | None = None


class RecoveryWatch:
    """Measures the recoveries of one job. Times are in ms since the epoch. `row_came_in` may be called on any
    thread.
    """

    def __init__(self, graph: JobGraph) -> None:
        fed = {edge.downstream for edge in graph.edges}
        self._fed = frozenset(task for task in graph.tasks() if task.vertex in fed)
        self._attempt = AttemptNumber(-1)
        self._failed_at_ms: int | None = None
        self._unnoticed_ms: int | None = None
        self._since_ms: int | None = None
        """Time, in ms, of the failure that caused the newest deployment, or None."""
        self._deployed_at_ms = 0
        self._not_ready: set[TaskId] = set()
        self._over = False
        """True if all tasks were ready after the last failure."""
        self._awaited: frozenset[TaskId] = frozenset()
        """Tasks whose first row ends the recovery. Empty after the first row."""
        self.newest: Recovery | None = None
        """The last recovery, with the tasks that are ready so far, or None. May be read from any thread."""
        self.ends: Mapping[AttemptNumber, RecoveryEnds] = {}
        """The `RecoveryEnds` of the newest recoveries, by attempt. May be read from any thread."""

    def failed(self, at_ms: int, unnoticed_ms: int | None = None) -> None:
        """Records the failure of a task. Failures before all tasks are ready again belong to the same recovery.

        `unnoticed_ms`: the longest possible time before the failure was noticed, or None.
        """
        if self._failed_at_ms is None or self._over:
            self._failed_at_ms, self._unnoticed_ms, self._over = at_ms, unnoticed_ms, False

    def deployed(self, attempt: AttemptNumber, tasks: Collection[TaskId], at_ms: int) -> None:
        """Records the deployment of these tasks."""
        self._attempt, self._deployed_at_ms, self._since_ms = attempt, at_ms, self._failed_at_ms
        self._not_ready, self._over = set(tasks), False
        if attempt > 0:
            unnoticed_ms = None if self._failed_at_ms is None else self._unnoticed_ms
            self.ends = dict([*self.ends.items(), (attempt, RecoveryEnds(unnoticed_ms))][-RECOVERIES_MAX:])
        self._awaited = frozenset(tasks) & self._fed or frozenset(tasks)

    def ready(self, attempt: AttemptNumber, task: TaskId, at_ms: int) -> None:
        """Records that a task has restored its state."""
        if attempt == self._attempt:
            self._not_ready.discard(task)
            self._over = not self._not_ready
            if self._since_ms is not None:
                self.newest = Recovery.between(self._since_ms, self._deployed_at_ms, at_ms)

    def row_came_in(self, attempt: AttemptNumber, task: TaskId, at_ms: int) -> str | None:
        """Records that rows have arrived at a task. Returns text with the duration of the recovery if these rows end
        the recovery, else None.
        """
        if attempt != self._attempt or task not in self._awaited:
            return None
        self._awaited = frozenset()
        if attempt in self.ends:
            self.ends = {**self.ends, attempt: replace(self.ends[attempt], first_row_at_ms=at_ms)}
        words = f"{at_ms - self._deployed_at_ms} ms after its deployment{self.since_failure(at_ms)}"
        self._failed_at_ms = None
        return words

    def since_failure(self, at_ms: int) -> str:
        """Returns the time since the failure as text that begins with a comma, or "" without a failure."""
        return "" if self._failed_at_ms is None else f", {at_ms - self._failed_at_ms} ms after the failure"
