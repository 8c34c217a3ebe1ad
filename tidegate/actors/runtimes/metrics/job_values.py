"""What the metrics of a job are: from the coordinator's memory and the clock, which is handed in.

Totals are gauges, as with Flink: they come from what the coordinator remembers, so they start with 0, and go on where
they were when another coordinator takes over. Wall clocks may be set back; no time is below 0 for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.state.checkpoint_statistics import CheckpointRecord, CheckpointStatistics
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState, JobStatus
from tidegate.actors.runtimes.metrics import registry as m
from tidegate.actors.runtimes.metrics.recovery_times import Recovery
from tidegate.actors.runtimes.metrics.registry import Metric
from tidegate.actors.runtimes.running_job import RUNNING_STATUSES, JobProgress

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
