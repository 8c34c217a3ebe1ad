"""`UserMetrics`: what a function of the user counts and measures of itself, under names of its own.

Rules:

- They are numbers in the memory of one operator in one subtask. Nothing that a task does depends on them, and no
  checkpoint has them: each attempt begins with 0, as with Flink.
- A name has one meaning in an operator. Whoever asks for it again gets the same metric, and an error for another kind.
- Their number is bounded, and so is what a histogram keeps: its newest values.
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
"""Of one operator; each is a series of every subtask."""
NAME_CHARACTERS_MAX = 80
HISTOGRAM_VALUES_MAX = 1_000
QUANTILES = (0.5, 0.75, 0.95, 0.98, 0.99, 0.999)
"""Those that Flink's reporter for Prometheus gives."""

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class UserMetric:
    """One metric as it stands. `value`: of a histogram, how many values it was given.

    `quantiles`: of a histogram, pairs of a share and the value that this share of the newest values does not exceed.
    """

    operator: str
    uid: OperatorUid
    name: str
    kind: str
    value: float
    quantiles: tuple[tuple[float, float], ...] = ()


class Counter:
    """A number that goes up and down, from 0."""

    kind: ClassVar[str] = "counter"
    quantiles: ClassVar[tuple[tuple[float, float], ...]] = ()

    def __init__(self, where: str) -> None:
        self._where = where
        self.value: float = 0

    def inc(self, by: float = 1) -> None:
        """Add `by`. ConfigurationError for what is no number."""
        self.value += _number(by, self._where)

    def dec(self, by: float = 1) -> None:
        """Take `by` off. ConfigurationError for what is no number."""
        self.value -= _number(by, self._where)


class Gauge:
    """A number that is what it was set to last, and 0 before."""

    kind: ClassVar[str] = "gauge"
    quantiles: ClassVar[tuple[tuple[float, float], ...]] = ()

    def __init__(self, where: str) -> None:
        self._where = where
        self.value: float = 0

    def set(self, value: float) -> None:
        """It is this from now on. ConfigurationError for what is no number."""
        self.value = _number(value, self._where)


class Histogram:
    """How values are distributed: of the newest ones it tells which value what share does not exceed."""

    kind: ClassVar[str] = "histogram"

    def __init__(self, where: str) -> None:
        self._where = where
        self.value: float = 0
        """How many values it was given."""
        self._newest: deque[float] = deque(maxlen=HISTOGRAM_VALUES_MAX)
        self._told: tuple[float, tuple[tuple[float, float], ...]] = 0, ()

    def update(self, value: float) -> None:
        """One more value. ConfigurationError for what is no number."""
        self._newest.append(_number(value, self._where))
        self.value += 1

    @property
    def quantiles(self) -> tuple[tuple[float, float], ...]:
        """Of the newest values; none before the first."""
        if self._told[0] != self.value:
            ordered = sorted(self._newest)
            last = len(ordered) - 1
            self._told = self.value, tuple((share, ordered[math.ceil(share * last)]) for share in QUANTILES)
        return self._told[1]


M = TypeVar("M", Counter, Gauge, Histogram)


class UserMetrics:
    """Those of one operator in one subtask: `context.metrics` of its function."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str) -> Counter:
        """A number to count with: `context.metrics.counter("late").inc()`. Make it in `open`, and keep it.

        ConfigurationError for a name that Prometheus would refuse, for one that a metric of another kind has, and for
        one too many.
        """
        return self._made(Counter, name)

    def gauge(self, name: str) -> Gauge:
        """A number to set: `context.metrics.gauge("models").set(3)`. Raises as `counter`."""
        return self._made(Gauge, name)

    def histogram(self, name: str) -> Histogram:
        """A distribution: `context.metrics.histogram("score").update(0.7)`. Raises as `counter`."""
        return self._made(Histogram, name)

    def read(self, uid: OperatorUid) -> tuple[UserMetric, ...]:
        """All of them as they stand, in the order in which they were made."""
        return tuple(
            UserMetric(self._operator, uid, name, metric.kind, metric.value, metric.quantiles)
            for name, metric in self._metrics.items()
        )

    def _made(self, kind: type[M], name: str) -> M:
        where = f"metric {str(name)[:NAME_CHARACTERS_MAX]!r} of operator {self._operator!r}"
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > NAME_CHARACTERS_MAX:
            raise ConfigurationError(
                f"{where}: a name is made of letters, digits and underscores, begins with a letter, and has at most "
                f"{NAME_CHARACTERS_MAX} characters"
            )
        found = self._metrics.get(name)
        if found is None:
            if len(self._metrics) >= METRICS_MAX:
                raise ConfigurationError(
                    f"{where}: an operator may have {METRICS_MAX} metrics, and has them; make few of them, in open, "
                    "and make no names of data"
                )
            self._metrics[name] = made = kind(where)
            return made
        if not isinstance(found, kind):
            raise ConfigurationError(f"{where} is a {found.kind} already, and no {kind.kind}")
        return found


def _number(value: object, where: str) -> float:
    # Called for each row. Nearly all are of these types, and to ask for a union of types takes twice as long.
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, int | float):
        return value
    if isinstance(value, Real):  # such as numpy's
        return float(value)
    raise ConfigurationError(f"{where} was given {repr(value)[:NAME_CHARACTERS_MAX]}, which is no number")
