"""`UserMetrics` has the counters, gauges and histograms that a function of a user defines.

Rules:

- Metrics are numbers in the memory of one operator in one subtask. The task does not depend on them, and checkpoints do
  not contain them. Each attempt starts with 0, as in Flink.
- A name identifies one metric of an operator. Requesting the name again returns the same metric, or raises an error if
  another kind of metric is requested.
- The number of metrics is bounded. A histogram keeps a bounded number of its newest values.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, TypeVar

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid

METRICS_MAX = 100
"""Greatest number of metrics of one operator. Each is a separate time series for every subtask."""
NAME_CHARACTERS_MAX = 80
HISTOGRAM_VALUES_MAX = 1_000
QUANTILES = (0.5, 0.75, 0.95, 0.98, 0.99, 0.999)
"""Quantiles of a histogram, the same as in Flink's Prometheus reporter."""

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class UserMetric:
    """Current value of one metric. The `value` of a histogram is the number of values that were added to it.

    The `quantiles` of a histogram are pairs of a share (from 0 to 1) and the value that this share of the newest values
    does not exceed.
    """

    operator: str
    uid: OperatorUid
    name: str
    kind: str
    value: float
    quantiles: tuple[tuple[float, float], ...] = ()


class Counter:
    """A metric that counts up and down, from 0."""

    kind: ClassVar[str] = "counter"
    quantiles: ClassVar[tuple[tuple[float, float], ...]] = ()

    def __init__(self, where: str) -> None:
        self._where = where
        self.value: float = 0

    def inc(self, by: float = 1) -> None:
        """Adds `by`. Raises ConfigurationError if it is not a number."""
        self.value += _number(by, self._where)

    def dec(self, by: float = 1) -> None:
        """Subtracts `by`. Raises ConfigurationError if it is not a number."""
        self.value -= _number(by, self._where)


class Gauge:
    """A metric with a value that can be set. 0 until it is set."""

    kind: ClassVar[str] = "gauge"
    quantiles: ClassVar[tuple[tuple[float, float], ...]] = ()

    def __init__(self, where: str) -> None:
        self._where = where
        self.value: float = 0

    def set(self, value: float) -> None:
        """Sets the value. Raises ConfigurationError if it is not a number."""
        self.value = _number(value, self._where)


class Histogram:
    """A metric for a distribution of values. Its quantiles cover the newest values."""

    kind: ClassVar[str] = "histogram"

    def __init__(self, where: str) -> None:
        self._where = where
        self.value: float = 0
        """Number of values added so far."""
        self._newest: deque[float] = deque(maxlen=HISTOGRAM_VALUES_MAX)
        self._cached: tuple[float, tuple[tuple[float, float], ...]] = (0, ())

    def update(self, value: float) -> None:
        """Adds a value. Raises ConfigurationError if it is not a number."""
        self._newest.append(_number(value, self._where))
        self.value += 1

    @property
    def quantiles(self) -> tuple[tuple[float, float], ...]:
        """Pairs of a share (from 0 to 1) and the value that this share of the newest values does not exceed.

        Empty before the first value.
        """
        if self._cached[0] != self.value:
            ordered = sorted(self._newest)
            last = len(ordered) - 1
            self._cached = (self.value, tuple((share, ordered[math.ceil(share * last)]) for share in QUANTILES))
        return self._cached[1]


M = TypeVar("M", Counter, Gauge, Histogram)


class UserMetrics:
    """The metrics of one operator in one subtask, which its function gets as `context.metrics`."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str) -> Counter:
        """Returns the counter with this name, created on the first call.

        Call this method in `open`, and keep the counter.

        Raises ConfigurationError for a name that Prometheus would refuse, for the name of a metric of another kind, and
        when the operator already has the largest number of metrics. Example:

            self.late = context.metrics.counter("late")
            self.late.inc()
        """
        return self._made(Counter, name)

    def gauge(self, name: str) -> Gauge:
        """Returns the gauge with this name, created on the first call: `context.metrics.gauge("models").set(3)`.

        Raises ConfigurationError as `counter` does.
        """
        return self._made(Gauge, name)

    def histogram(self, name: str) -> Histogram:
        """Returns the histogram with this name, created on the first call:
        `context.metrics.histogram("score").update(0.7)`.

        Raises ConfigurationError as `counter` does.
        """
        return self._made(Histogram, name)

    def read(self, uid: OperatorUid) -> tuple[UserMetric, ...]:
        """Returns the current values of all metrics, in the order in which they were created."""
        return tuple(
            UserMetric(self._operator, uid, name, metric.kind, metric.value, metric.quantiles)
            for name, metric in self._metrics.items()
        )

    def _made(self, kind: type[M], name: str) -> M:
        where = f"metric {str(name)[:NAME_CHARACTERS_MAX]!r} of operator {self._operator!r}"
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > NAME_CHARACTERS_MAX:
            raise ConfigurationError(
                f"{where}: a name consists of letters, digits and underscores, begins with a letter, and has at most "
                f"{NAME_CHARACTERS_MAX} characters. Choose another name"
            )
        found = self._metrics.get(name)
        if found is None:
            if len(self._metrics) >= METRICS_MAX:
                raise ConfigurationError(
                    f"{where}: the operator already has {METRICS_MAX} metrics, which is the most. Create metrics in "
                    "open, and do not build their names from data"
                )
            self._metrics[name] = made = kind(where)
            return made
        if not isinstance(found, kind):
            raise ConfigurationError(
                f"{where} is already a {found.kind}, not a {kind.kind}. Choose another name for the {kind.kind}"
            )
        return found


def _number(value: object, where: str) -> float:
    # Called for each row. Nearly all values have these types, and testing for a union of types takes twice as long.
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, int | float):
        return value
    if isinstance(value, Real):  # such as numpy's
        return float(value)
    raise ConfigurationError(
        f"{where} was given {repr(value)[:NAME_CHARACTERS_MAX]}, which is not a number; give an int or a float"
    )
