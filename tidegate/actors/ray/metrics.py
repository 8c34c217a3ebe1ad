"""Publishes the metrics of tasks through Ray's metrics agent, about once a second and never per batch.

Metrics of jobs are in `runtimes/job_metrics.py`, so that tasks import no code of coordinators. Rows are counted over
all attempts of a process, because a counter only grows. Ray creates a counter only when it is first incremented, so
alerts need gauges. A gauge is set each time, even unchanged, because Ray drops a gauge that was not set between two
collections.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache

from ray.util.metrics import Counter, Gauge

from tidegate.actors.coordinator.events import CheckpointAcknowledged, CoordinatorEvent, TaskReady
from tidegate.actors.runtimes import metric_registry as m
from tidegate.actors.runtimes.metric_registry import Metric
from tidegate.actors.runtimes.task_metrics import (
    SubtaskMetrics,
    gauges_at_rest,
    gauges_of,
    request_values,
    snapshot_gauges,
    state_values,
    totals_of,
    user_values,
)
from tidegate.storage.files.file_system import OF_THIS_PROCESS
from tidegate.storage.ids import CheckpointId

USER_NAMES_MAX = 1_000
"""Limit of metrics of users' functions that a process caches."""


@cache
def _counter(metric: Metric) -> Counter:
    return Counter(metric.name, description=metric.meaning, tag_keys=metric.tags)


@cache
def _gauge(metric: Metric) -> Gauge:
    return Gauge(metric.name, description=metric.meaning, tag_keys=metric.tags)


@lru_cache(maxsize=USER_NAMES_MAX)
def _user_gauge(name: str) -> Gauge:
    return Gauge(name, description="Of a function of the user", tag_keys=m.OPERATOR_TAGS)


def labels(tags: Mapping[str, str]) -> dict[str, str]:
    """Returns tags in ASCII, as Ray requires. Other characters are escaped as in Python.

    Ray would raise UnicodeEncodeError, and a task would fail because of the name of its step.
    """
    return {key: value.encode("ascii", "backslashreplace").decode("ascii") for key, value in tags.items()}


def set_gauge(metric: Metric, value: float, tags: Mapping[str, str]) -> None:
    """Publishes the value of a gauge."""
    _gauge(metric).set(value, labels(tags))


class TaskMetrics:
    """Publishes the metrics of one attempt of a task through Ray."""

    def __init__(self, tags: dict[str, str]) -> None:
        self._tags = tags
        self._seen: Mapping[Metric, int] = {}

    def reported(self, event: CoordinatorEvent) -> None:
        """Counts a restore or publishes snapshot measurements, if the task reports such an event."""
        if isinstance(event, TaskReady) and event.origin is not None:
            _add(_counter(m.RESTORES), 1, self._tags | {"origin": event.origin.value})
        elif isinstance(event, CheckpointAcknowledged):
            self._set(snapshot_gauges(event.metrics))

    def update(self, metrics: SubtaskMetrics, final: bool = False) -> None:
        """Publishes the metrics of the task. `final`: the task has ended in this process."""
        seen, self._seen = self._seen, totals_of(metrics)
        for metric, total in self._seen.items():
            _add(_counter(metric), total - seen.get(metric, 0), self._tags)
        self._set(gauges_at_rest(metrics) if final else gauges_of(metrics))
        for operator, size in metrics.states:
            for metric, value in state_values(size).items():
                set_gauge(metric, value, self._tags | {"operator": operator})
        publish_requests(self._tags["job"])
        for counted in metrics.user:
            tags = self._tags | {"operator": counted.operator, "operator_id": str(counted.uid)}
            for name, quantile, value in user_values(counted):
                _user_gauge(name).set(value, labels(tags | {"quantile": quantile}))

    def _set(self, gauges: Mapping[Metric, float]) -> None:
        for metric, value in gauges.items():
            set_gauge(metric, value, self._tags)


class StandbyMetrics:
    """Publishes the metrics of a spare process that follows the state of a task."""

    def __init__(self, tags: dict[str, str]) -> None:
        self._tags = tags

    def holds(self, checkpoint_id: CheckpointId | None) -> None:
        """Publishes the id of the checkpoint whose state the spare process has copied, or 0 for None."""
        set_gauge(m.STANDBY_CHECKPOINT, checkpoint_id or 0, self._tags)


def publish_requests(job: str) -> None:
    """Publishes the number of requests that this process has made to object stores, for its job."""
    for metric, value in request_values(OF_THIS_PROCESS).items():
        set_gauge(metric, value, {"job": job})


def _add(counter: Counter, increment: int, tags: Mapping[str, str]) -> None:
    if increment > 0:
        counter.inc(increment, labels(tags))
