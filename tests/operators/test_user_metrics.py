"""Counters, gauges and histograms of a user's functions: what they tell, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.actors.runtimes.task_metrics import user_values
from tidegate.operators.user_metrics import HISTOGRAM_VALUES_MAX, METRICS_MAX, QUANTILES, UserMetric, UserMetrics
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid

UID = OperatorUid("score-1")


def read(metrics: UserMetrics) -> dict[str, UserMetric]:
    """What they tell, by name."""
    return {metric.name: metric for metric in metrics.read(UID)}


def test_counters_count_and_gauges_are_what_they_were_set_to() -> None:
    """Both are there with 0 from the start: an alert needs a series to look at."""
    metrics = UserMetrics("score")
    late, depth = metrics.counter("late"), metrics.gauge("depth")
    assert metrics.read(UID) == (
        UserMetric("score", UID, "late", "counter", 0),
        UserMetric("score", UID, "depth", "gauge", 0),
    )
    late.inc()
    late.inc(3)
    late.dec()
    depth.set(2.5)
    depth.set(np.int64(7))
    assert (read(metrics)["late"].value, read(metrics)["depth"].value) == (3, 7)
    assert type(read(metrics)["depth"].value) is float


def test_who_asks_for_a_name_again_gets_the_same_metric() -> None:
    """Functions that ask in each call count on."""
    metrics = UserMetrics("score")
    for _ in range(3):
        metrics.counter("late").inc()
    assert [metric.value for metric in metrics.read(UID)] == [3]


def test_a_histogram_tells_of_its_newest_values() -> None:
    """The share of a quantile is no greater than it; what is old is forgotten, and still counted."""
    metrics = UserMetrics("score")
    histogram = metrics.histogram("ms")
    assert read(metrics)["ms"] == UserMetric("score", UID, "ms", "histogram", 0)
    for value in range(1_000_000, 1_000_000 + HISTOGRAM_VALUES_MAX):
        histogram.update(value)
    for value in reversed(range(HISTOGRAM_VALUES_MAX)):
        histogram.update(value)
    told = read(metrics)["ms"]
    assert told.value == 2 * HISTOGRAM_VALUES_MAX
    assert told.quantiles == tuple(zip(QUANTILES, (500, 750, 950, 980, 990, 999), strict=True))
    histogram.update(5_000)
    assert read(metrics)["ms"].quantiles[-1] == (0.999, 5_000)


def test_a_histogram_of_one_value_has_that_value() -> None:
    """All quantiles of it."""
    metrics = UserMetrics("score")
    metrics.histogram("ms").update(4)
    assert {value for _, value in read(metrics)["ms"].quantiles} == {4}


def test_what_prometheus_sees_of_each_kind() -> None:
    """One series, but for a histogram, which has one for each quantile and the number of its values."""
    metrics = UserMetrics("score")
    metrics.counter("late").inc(2)
    metrics.histogram("ms").update(4)
    late, ms = metrics.read(UID)
    assert user_values(late) == [("tidegate_operator_late", "", 2)]
    assert user_values(ms)[0] == ("tidegate_operator_ms_count", "", 1)
    assert user_values(ms)[1:] == [("tidegate_operator_ms", str(share), 4) for share in QUANTILES]


@pytest.mark.parametrize("name", ["", "per cent", "1st", "a-b", "é", "x" * 81, "ray_\n", None, 3])
def test_names_that_prometheus_would_refuse_are_refused(name: object) -> None:
    """At once, with the operator: Ray would drop them without a word to the user."""
    with pytest.raises(ConfigurationError, match=r"operator 'score': a name consists of letters"):
        UserMetrics("score").counter(name)  # type: ignore[arg-type]


def test_a_name_has_one_kind() -> None:
    """Two meanings under one name would be one series."""
    metrics = UserMetrics("score")
    metrics.counter("late")
    with pytest.raises(ConfigurationError, match="'late' of operator 'score' is already a counter, not a gauge"):
        metrics.gauge("late")


def test_there_are_only_so_many() -> None:
    """Names made of data would be series without end; those that are there go on."""
    metrics = UserMetrics("score")
    for number in range(METRICS_MAX):
        metrics.counter(f"n{number}")
    with pytest.raises(ConfigurationError, match=f"already has {METRICS_MAX} metrics"):
        metrics.histogram("one_more")
    metrics.counter("n0").inc()
    assert len(metrics.read(UID)) == METRICS_MAX


@pytest.mark.parametrize("value", ["1", None, 1j, [1]])
def test_only_numbers_are_taken(value: object) -> None:
    """And the error names the metric."""
    metrics = UserMetrics("score")
    count = metrics.counter("a")
    for give in (count.inc, count.dec, metrics.gauge("b").set, metrics.histogram("c").update):
        with pytest.raises(ConfigurationError, match=r"'[abc]' of operator 'score' was given .*, which is not"):
            give(value)  # type: ignore[arg-type]
