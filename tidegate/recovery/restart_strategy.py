"""`RestartStrategy`: decides whether and when a failed job starts again.

A strategy is a value that is stored with the job. The coordinator calls it after each failure. Rules:

- It has no clock and no random generator: times are from events, and the random number is derived from the log. A
  coordinator that replays its log therefore makes the same decisions.
- It stores a `FailureHistory`, whose size is limited however long the job runs. The history is part of the
  coordinator's state.
- The answer None means: do not restart, and report the failure to the user.

Names, defaults and calculations follow Flink 2, with two exceptions. With `fixed_delay` a completed checkpoint resets
the number of failures; in Flink the attempts are for the whole life of the job. And the back-off of `exponential_delay`
is reset by the time for which all tasks have run. Flink counts from the restart on, so an attempt that takes long to
deploy and never runs may reset it there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from tidegate.storage.codec import wire
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

FAILURES_MAX = 10_000
"""Largest allowed `failures` of `failure_rate`. It is limited, because the strategy stores the time of each failure."""
WAIT_MS_MAX = 366 * 24 * 3_600_000
"""Longest allowed duration in ms: a year. A longer one is probably a mistake."""

Duration = str | timedelta | int
"""A duration: a text such as `"10s"`, a timedelta, or a number of milliseconds."""


class RestartStrategy:
    """Base of the restart strategies. Create one with `none`, `fixed_delay`, `exponential_delay` or `failure_rate`."""

    __slots__ = ()

    @staticmethod
    def none() -> RestartStrategy:
        """Returns a strategy that never restarts: the first failure fails the job."""
        return NoRestart()

    @staticmethod
    def fixed_delay(attempts: int, delay: Duration) -> RestartStrategy:
        """Returns a strategy that restarts up to `attempts` times in a row, each time after `delay` (`"1s"`, a
        timedelta, or ms).

        Only failures since the newest completed checkpoint count. A job that fails from time to time, and completes
        checkpoints in between, therefore runs forever. Raises ConfigurationError for a negative or invalid value.
        """
        at_least = _whole("fixed_delay(attempts)", attempts, 0)
        return FixedDelay(at_least, _duration_ms("fixed_delay(delay)", delay, 0))

    @staticmethod
    def exponential_delay(
        initial: Duration = "1s",
        maximum: Duration = "1min",
        multiplier: float = 1.5,
        jitter: float = 0.1,
        reset_after: Duration = "1h",
        attempts: int | None = None,
        same_errors: int | None = 4,
    ) -> RestartStrategy:
        """Returns a strategy that waits for `initial`, and for each further failure `multiplier` times as long, up to
        `maximum`.

        - After a job has run for `reset_after` without a failure, the next wait is `initial` again.
        - It is restarted after at most `attempts` failures in a row; None means no limit.
        - Each wait is longer or shorter by a random part of up to `jitter` (0 to 1), so that jobs that failed together
          do not restart together. No wait is longer than `maximum`.
        - If a function fails `same_errors` times in a row with the same error at the same row, the job fails, because
          another restart would not help. Errors of connections and timeouts do not count; None means no limit.

        Durations are `"1s"`, a timedelta, or ms. Raises ConfigurationError for invalid values.
        """
        name = "exponential_delay"
        strategy = ExponentialDelay(
            initial_ms=_duration_ms(f"{name}(initial)", initial, 1),
            maximum_ms=_duration_ms(f"{name}(maximum)", maximum, 1),
            multiplier=_number(f"{name}(multiplier)", multiplier),
            jitter=_number(f"{name}(jitter)", jitter),
            reset_after_ms=_duration_ms(f"{name}(reset_after)", reset_after, 1),
            attempts=None if attempts is None else _whole(f"{name}(attempts)", attempts, 0),
            same_errors=None if same_errors is None else _whole(f"{name}(same_errors)", same_errors, 1),
        )
        if strategy.initial_ms > strategy.maximum_ms:
            raise ConfigurationError(
                f"{name}(initial={initial!r}, maximum={maximum!r}): initial is longer than maximum; make it shorter"
            )
        if not 1 < strategy.multiplier < math.inf:
            raise ConfigurationError(
                f"{name}(multiplier={multiplier!r}): give a number above 1; fixed_delay always waits as long"
            )
        if not 0 <= strategy.jitter <= 1:
            raise ConfigurationError(f"{name}(jitter={jitter!r}): it is a part of the wait; give a number from 0 to 1")
        return strategy

    @staticmethod
    def failure_rate(failures: int = 1, interval: Duration = "1min", delay: Duration = "1s") -> RestartStrategy:
        """Returns a strategy that restarts `delay` after each failure, unless there were more than `failures` of them
        in `interval`.

        The interval ends with the newest failure, which is included. Durations are `"1s"`, a timedelta, or ms.
        `failures` is at most 10,000. Raises ConfigurationError for invalid values.
        """
        count = _whole("failure_rate(failures)", failures, 1)
        if count > FAILURES_MAX:
            raise ConfigurationError(f"failure_rate(failures={failures}): give at most {FAILURES_MAX}")
        interval_ms = _duration_ms("failure_rate(interval)", interval, 1)
        return FailureRate(count, interval_ms, _duration_ms("failure_rate(delay)", delay, 0))

    @property
    def wait_ms_max(self) -> int:
        """Returns the longest wait before a restart, in milliseconds."""
        return 0

    def count(self, before: FailureHistory, at_ms: int, ran_ms: int | None) -> FailureHistory:
        """Returns the failures that the strategy still considers, after a new failure at `at_ms` was added to `before`.

        `ran_ms` is for how long all tasks had been running, or None if this attempt never had all tasks running.
        """
        return FailureHistory(before.in_a_row + 1)

    @property
    def same_errors_max(self) -> int | None:
        """Returns how often the same error may occur at the same row before the job fails, or None for no limit."""
        return None

    def after_checkpoint(self, before: FailureHistory) -> FailureHistory:
        """Returns the failures that the strategy still considers after a checkpoint has completed."""
        return before

    def decide(self, failures: FailureHistory, chance: float) -> int | None:
        """Returns how many ms to wait before the restart, or None if the job must not restart.

        `failures` is the result of `count`, including the current failure. `chance` is a number in [0, 1) that is
        derived from the log and differs for each failure.
        """
        raise NotImplementedError


@wire
@dataclass(frozen=True, slots=True)
class NoRestart(RestartStrategy):
    """The strategy of `RestartStrategy.none`."""

    def decide(self, failures: FailureHistory, chance: float) -> int | None:
        return None


@wire
@dataclass(frozen=True, slots=True)
class FixedDelay(RestartStrategy):
    """The strategy of `RestartStrategy.fixed_delay`."""

    attempts: int
    delay_ms: int

    @property
    def wait_ms_max(self) -> int:
        return self.delay_ms

    def after_checkpoint(self, before: FailureHistory) -> FailureHistory:
        return FailureHistory()

    def decide(self, failures: FailureHistory, chance: float) -> int | None:
        return self.delay_ms if failures.in_a_row <= self.attempts else None


@wire
@dataclass(frozen=True, slots=True)
class ExponentialDelay(RestartStrategy):
    """The strategy of `RestartStrategy.exponential_delay`."""

    initial_ms: int
    maximum_ms: int
    multiplier: float
    jitter: float
    reset_after_ms: int
    attempts: int | None = None
    same_errors: int | None = 4

    @property
    def wait_ms_max(self) -> int:
        return self.maximum_ms

    @property
    def same_errors_max(self) -> int | None:
        return self.same_errors

    def count(self, before: FailureHistory, at_ms: int, ran_ms: int | None) -> FailureHistory:
        reset = ran_ms is not None and ran_ms >= self.reset_after_ms
        return FailureHistory(1 if reset else before.in_a_row + 1)

    def backoff_ms(self, in_a_row: int) -> int:
        """Returns the milliseconds to wait after this many failures in a row, without jitter."""
        # Compare logarithms, because after days of failures the power would be too large for a float.
        growth = (in_a_row - 1) * math.log(self.multiplier)
        if growth >= math.log(self.maximum_ms / self.initial_ms):
            return self.maximum_ms
        return min(self.maximum_ms, int(self.initial_ms * self.multiplier ** (in_a_row - 1)))

    def decide(self, failures: FailureHistory, chance: float) -> int | None:
        if self.attempts is not None and failures.in_a_row > self.attempts:
            return None
        backoff_ms = self.backoff_ms(failures.in_a_row)
        reach_ms = int(backoff_ms * self.jitter)
        offset_ms = int(chance * (2 * reach_ms + 1)) - reach_ms
        return min(self.maximum_ms, backoff_ms + offset_ms)


@wire
@dataclass(frozen=True, slots=True)
class FailureRate(RestartStrategy):
    """The strategy of `RestartStrategy.failure_rate`."""

    failures: int
    interval_ms: int
    delay_ms: int

    @property
    def wait_ms_max(self) -> int:
        return self.delay_ms

    def count(self, before: FailureHistory, at_ms: int, ran_ms: int | None) -> FailureHistory:
        recent = [time_ms for time_ms in before.moved_before(at_ms) if at_ms - time_ms <= self.interval_ms]
        times_ms = (*recent, at_ms)[-self.failures - 1 :]
        return FailureHistory(len(times_ms), times_ms)

    def decide(self, failures: FailureHistory, chance: float) -> int | None:
        return self.delay_ms if failures.in_a_row <= self.failures else None


def default_strategy(*, periodic_checkpoints: bool) -> RestartStrategy:
    """Returns the strategy of a job for which none was chosen, as in Flink 2.

    A job with checkpoints is restarted without limit. A job without checkpoints would start from the beginning each
    time, so it is never restarted.
    """
    return RestartStrategy.exponential_delay() if periodic_checkpoints else RestartStrategy.none()


def _duration_ms(setting: str, value: Duration, at_least: int) -> int:
    duration_ms = parse_duration_ms(value, setting=setting)
    if not at_least <= duration_ms <= WAIT_MS_MAX:
        raise ConfigurationError(f"{setting}: {value!r} is out of range; give {at_least} ms or more, at most a year")
    return duration_ms


def _whole(setting: str, value: object, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigurationError(f"{setting}={value!r}: give a whole number from {at_least} up")
    return value


def _number(setting: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise ConfigurationError(f"{setting}={value!r}: give a number")
    return float(value)


@wire
@dataclass(frozen=True, slots=True)
class FailureHistory:
    """The failures that a restart strategy still considers. The strategy decides which failures these are."""

    in_a_row: int = 0
    """How many failures still count, including the current one."""
    times_ms: tuple[int, ...] = ()
    """The times in ms of the newest of these failures, oldest first, for a strategy that needs them.

    Their number is limited.
    """

    def moved_before(self, at_ms: int) -> tuple[int, ...]:
        """Returns the times, moved so that none is later than `at_ms`.

        If the wall clock was set back, old failures are in the future, and would count until the clock reaches them.
        The newest one is therefore moved to `at_ms`, and the earlier ones by the same difference.
        """
        ahead_ms = max(0, self.times_ms[-1] - at_ms) if self.times_ms else 0
        return tuple(time_ms - ahead_ms for time_ms in self.times_ms)
