"""`RestartStrategy`: whether and when a job that failed starts again.

A strategy is a value that travels with the job and a pure function of the times of the failures, the present
one included; who asks has the clock. `None` means: give up, and report the failure to the user.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from tidegate.storage.codec import wire
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms


class RestartStrategy:
    """Base of all strategies; make one with `none` or `fixed_delay`."""

    __slots__ = ()

    @staticmethod
    def none() -> RestartStrategy:
        """Never restart: the first failure fails the job."""
        return NoRestart()

    @staticmethod
    def fixed_delay(attempts: int, delay: str | timedelta | int) -> RestartStrategy:
        """Restart up to `attempts` times in a row, `delay` (`"1s"`, a timedelta, or ms) after each failure.

        A completed checkpoint begins a new row: a job that fails now and then, and gets on in between, goes on for
        ever. Raises ConfigurationError for a negative or unreadable value.
        """
        if attempts < 0:
            raise ConfigurationError(f"fixed_delay(attempts={attempts}): attempts must be 0 or more")
        return FixedDelay(attempts, parse_duration_ms(delay, setting="fixed_delay(delay)"))

    def decide(self, failure_times_ms: tuple[int, ...], now_ms: int) -> int | None:
        """Milliseconds to wait from `now_ms` on before the restart, or None to give up.

        `failure_times_ms` are the times of all failures since the newest completed checkpoint, oldest first, the
        present one last.
        """
        raise NotImplementedError


@wire
@dataclass(frozen=True, slots=True)
class NoRestart(RestartStrategy):
    """See `RestartStrategy.none`."""

    def decide(self, failure_times_ms: tuple[int, ...], now_ms: int) -> int | None:
        return None


@wire
@dataclass(frozen=True, slots=True)
class FixedDelay(RestartStrategy):
    """See `RestartStrategy.fixed_delay`."""

    attempts: int
    delay_ms: int

    def decide(self, failure_times_ms: tuple[int, ...], now_ms: int) -> int | None:
        return self.delay_ms if len(failure_times_ms) <= self.attempts else None
