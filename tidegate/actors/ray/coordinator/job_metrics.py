"""Publishes the metrics of jobs through Ray's metrics agent: of one job, by its coordinator, about once a second.

What the values are is decided in `runtimes/metrics/job_values.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ray.util.metrics import Histogram

from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.ray.metrics import labels, publish_requests, set_gauge
from tidegate.actors.runtimes.metrics import registry as m
from tidegate.actors.runtimes.metrics.job_values import JobTimes, job_values, newly_completed, status_values
from tidegate.actors.runtimes.metrics.recovery_times import Recovery
from tidegate.actors.runtimes.metrics.registry import Metric
from tidegate.actors.runtimes.running_job import JobProgress

_Done = Callable[[BaseException | None], None]

_DURATION_BOUNDARIES_MS = [5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 10e3, 60e3]


@cache
def _histogram(metric: Metric) -> Histogram:
    return Histogram(metric.name, description=metric.meaning, boundaries=_DURATION_BOUNDARIES_MS, tag_keys=metric.tags)


class JobMetrics:
    """Metrics of one job under one coordinator."""

    def __init__(self, job: str, submitted_at_ms: int) -> None:
        self._tags = {"job": job}
        self._times = JobTimes(submitted_at_ms)
        self._completed = 0

    def begin(self, state: CoordinatorState) -> None:
        """The coordinator begins with this: checkpoints of a predecessor are not counted again."""
        self._completed = state.statistics.completed

    def observing(self, state: CoordinatorState, done: _Done) -> _Done:
        """What is to be called when an entry of the event log is written, with a look at what that has completed.

        Looking once a second would not do: several may complete in between, and the history may keep none of them.
        """

        def observed(error: BaseException | None) -> None:
            self.observe(state)
            done(error)

        return observed

    def observe(self, state: CoordinatorState) -> None:
        """Count each checkpoint that has completed since the last call."""
        if state.statistics.completed != self._completed:
            for record in newly_completed(state.statistics, self._completed):
                _histogram(m.CHECKPOINT_DURATION).observe(record.duration_ms, labels(self._tags))
            self._completed = state.statistics.completed

    def update(
        self, state: CoordinatorState, progress: JobProgress, now_ms: int, recovery: Recovery | None = None
    ) -> None:
        """Publish the values of now."""
        publish_requests(self._tags["job"])
        self._times = self._times.at(state, now_ms)
        for metric, value in job_values(state, progress, self._times, now_ms, recovery).items():
            set_gauge(metric, value, self._tags)
        for status, value in status_values(state).items():
            set_gauge(m.STATUS, value, self._tags | {"status": status})
