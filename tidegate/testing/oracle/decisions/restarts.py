"""Watches from outside whether restarts follow the strategy of the job: when the next attempt comes, if one does.

It has arithmetic of its own. What it counts it has seen happen, so it looks only as long as no coordinator was lost:
such a one may take a decision along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.recovery.restart_strategy import ExponentialDelay, FailureRate, FixedDelay, RestartStrategy
from tidegate.testing.oracle.violation import InvariantViolated


class RestartWatch:
    """The restarts of one job. `put_off` is told of each wait that is longer than the one before it."""

    def __init__(self, strategy: RestartStrategy, put_off: Callable[[], None]) -> None:
        self._strategy = strategy
        self._put_off = put_off
        self._runs_since_ms: int | None = None
        self._in_a_row = 0
        self._times_ms: list[int] = []
        self._last_wait_ms: int | None = None

    def done(
        self,
        instruction: do.CoordinatorInstruction,
        event: co.CoordinatorEvent,
        instructions: Sequence[do.CoordinatorInstruction],
    ) -> None:
        """An instruction is carried out, which followed from an event together with others."""
        match instruction:
            case do.StartTasks():
                self._runs_since_ms = event.at_ms
            case do.SetTimer(timer, due_at_ms) if timer.startswith("restart:"):
                self._fails(event.at_ms)
                self._check_wait(due_at_ms - event.at_ms)
            case do.CancelAttempt() if isinstance(event, co.TaskFailed) and not event.permanent:
                if not any(isinstance(i, do.SetTimer) and i.timer.startswith("restart:") for i in instructions):
                    self._fails(event.at_ms)
                    self._check_end(event.reason)

    def _fails(self, at_ms: int) -> None:
        strategy = self._strategy
        since_ms, self._runs_since_ms = self._runs_since_ms, None
        ran_ms = -1 if since_ms is None else at_ms - since_ms
        if isinstance(strategy, ExponentialDelay) and ran_ms >= strategy.reset_after_ms:
            self._in_a_row = 0
        self._in_a_row += 1
        self._times_ms.append(at_ms)

    def _recent(self, interval_ms: int) -> int:
        now_ms = self._times_ms[-1]
        return sum(1 for time_ms in self._times_ms if now_ms - time_ms <= interval_ms)

    def _check_wait(self, wait_ms: int) -> None:
        match self._strategy:
            case FixedDelay(delay_ms=delay_ms):
                right = wait_ms == delay_ms
            case FailureRate(failures=failures, interval_ms=interval_ms, delay_ms=delay_ms):
                right = wait_ms == delay_ms and self._recent(interval_ms) <= failures
            case ExponentialDelay() as strategy:
                backoff: float = strategy.initial_ms
                for _ in range(self._in_a_row - 1):
                    backoff = min(strategy.maximum_ms, backoff * strategy.multiplier)
                right = abs(wait_ms - backoff) <= backoff * strategy.jitter + 1 and wait_ms <= strategy.maximum_ms
                right = right and (strategy.attempts is None or self._in_a_row <= strategy.attempts)
            case _:
                right = False
        if not right:
            raise InvariantViolated(
                7, f"failure {self._in_a_row} in a row is followed by a wait of {wait_ms} ms, against {self._strategy}"
            )
        if self._last_wait_ms is not None and wait_ms > self._last_wait_ms:
            self._put_off()
        self._last_wait_ms = wait_ms

    def _check_end(self, reason: str) -> None:
        match self._strategy:
            case FailureRate(failures=failures, interval_ms=interval_ms):
                right = self._recent(interval_ms) > failures
            case ExponentialDelay(attempts=attempts):
                right = attempts is not None and self._in_a_row > attempts
            case _:
                right = True
        if not right:
            raise InvariantViolated(7, f"the job gives up, and {self._strategy} allows another attempt: {reason}")
