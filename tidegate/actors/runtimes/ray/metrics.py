"""Publishes the metrics of the registry through Ray's metrics agent. Written about once a second, never per batch.

What a job's values are is decided in `runtimes/metrics/job_values.py`. Rows are counted over all attempts of a process;
a counter only ever grows. One of Ray's is not there before it is counted up, so what alerts need are gauges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache

from ray.util.metrics import Counter, Gauge, Histogram

from tidegate.actors.coordinator.messages.events import CheckpointAcknowledged, CoordinatorEvent, TaskReady
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.runtimes.metrics import registry as m
from tidegate.actors.runtimes.metrics.job_values import JobTimes, job_values, newly_completed, status_values
from tidegate.actors.runtimes.metrics.recovery_times import Recovery
from tidegate.actors.runtimes.metrics.registry import Metric
from tidegate.actors.runtimes.metrics.task_values import (
    gauges_at_rest,
    gauges_of,
    request_values,
    snapshot_gauges,
    state_values,
    totals_of,
    user_values,
)
from tidegate.actors.runtimes.running_job import JobProgress
from tidegate.actors.runtimes.vertex_metrics import SubtaskMetrics
from tidegate.storage.files.request_counts import OF_THIS_PROCESS
from tidegate.storage.ids import CheckpointId

_Done = Callable[[BaseException | None], None]

USER_NAMES_MAX = 1_000
"""Names of metrics of functions that a process keeps at hand, whatever names its attempts think of."""
_DURATION_BOUNDARIES_MS = [5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 10e3, 60e3]


@cache
def _counter(metric: Metric) -> Counter:
    return Counter(metric.name, description=metric.meaning, tag_keys=metric.tags)


@cache
def _gauge(metric: Metric) -> Gauge:
    return Gauge(metric.name, description=metric.meaning, tag_keys=metric.tags)


@lru_cache(maxsize=USER_NAMES_MAX)
def _user_gauge(name: str) -> Gauge:
    return Gauge(name, description="Of a function of the user", tag_keys=m.OPERATOR_TAGS)


@cache
def _histogram(metric: Metric) -> Histogram:
    return Histogram(metric.name, description=metric.meaning, boundaries=_DURATION_BOUNDARIES_MS, tag_keys=metric.tags)


class TaskMetrics:
    """Metrics of one task of one attempt; `update` takes what is counted in that attempt."""

    def __init__(self, tags: dict[str, str]) -> None:
        self._tags = tags
        self._seen: Mapping[Metric, int] = {}

    def told(self, event: CoordinatorEvent) -> None:
        """The task reports something."""
        if isinstance(event, TaskReady) and event.origin is not None:
            _add(_counter(m.RESTORES), 1, self._tags | {"origin": event.origin.value})
        elif isinstance(event, CheckpointAcknowledged):
            self._set(snapshot_gauges(event.metrics))

    def update(self, told: SubtaskMetrics, final: bool = False) -> None:
        """Publish what the task is doing. `final`: it does nothing any more in this process."""
        seen, self._seen = self._seen, totals_of(told)
        for metric, total in self._seen.items():
            _add(_counter(metric), total - seen.get(metric, 0), self._tags)
        self._set(gauges_at_rest(told) if final else gauges_of(told))
        for operator, size in told.states:
            for metric, value in state_values(size).items():
                _gauge(metric).set(value, self._tags | {"operator": operator})
        _publish_requests(self._tags["job"])
        for counted in told.user:
            tags = self._tags | {"operator": counted.operator, "operator_id": str(counted.uid)}
            for name, quantile, value in user_values(counted):
                _user_gauge(name).set(value, tags | {"quantile": quantile})

    def _set(self, gauges: Mapping[Metric, float]) -> None:
        for metric, value in gauges.items():
            _gauge(metric).set(value, self._tags)


class StandbyMetrics:
    """Metrics of a spare process that follows a task."""

    def __init__(self, tags: dict[str, str]) -> None:
        self._tags = tags

    def holds(self, checkpoint_id: CheckpointId | None) -> None:
        """The process holds the state of a checkpoint, or of none."""
        _gauge(m.STANDBY_CHECKPOINT).set(checkpoint_id or 0, self._tags)


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
                _histogram(m.CHECKPOINT_DURATION).observe(record.duration_ms, self._tags)
            self._completed = state.statistics.completed

    def update(
        self, state: CoordinatorState, progress: JobProgress, now_ms: int, recovery: Recovery | None = None
    ) -> None:
        """Publish the values of now."""
        _publish_requests(self._tags["job"])
        self._times = self._times.at(state, now_ms)
        for metric, value in job_values(state, progress, self._times, now_ms, recovery).items():
            _gauge(metric).set(value, self._tags)
        for status, value in status_values(state).items():
            _gauge(m.STATUS).set(value, self._tags | {"status": status})


def _publish_requests(job: str) -> None:
    for metric, value in request_values(OF_THIS_PROCESS).items():
        _gauge(metric).set(value, {"job": job})


def _add(counter: Counter, increment: int, tags: dict[str, str]) -> None:
    if increment > 0:
        counter.inc(increment, tags)
