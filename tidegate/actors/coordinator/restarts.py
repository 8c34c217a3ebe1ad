"""`Restarts`: asks the job's restart strategy after a failure, and keeps what the strategy remembers.

The machine calls it. Rules:

- The strategy is asked once for each failure. When a region has stopped, what its other tasks report belongs to that
  failure.
- An error of the program itself ends the job, and the strategy is not asked: no restart can help.
- Only failures count. A lost coordinator, a checkpoint that was passed over, and a stop that could not be carried out
  are none.
- Everything comes from the log: times from events, randomness from the job's seed and the number of the attempt.
"""

from __future__ import annotations

from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.job.chance import drawn_fraction
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext

_JITTER = 1
"""The purpose of the draw (`drawn_fraction`)."""


class Restarts:
    """The restarts of one job."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def runs(self, at_ms: int) -> None:
        """All tasks of the attempt are running."""
        self._context.state.running_since_ms = at_ms

    @property
    def keeps_failing(self) -> bool:
        """Whether the same error has come back at the same row as often as the strategy bears."""
        most = self._context.spec.restart.same_errors_max
        return most is not None and self._context.state.same_failures >= most

    def failed(self, at_ms: int, permanent: bool, fingerprint: str = "") -> int | None:
        """Count a failure. Returns the delay in ms before the next attempt; None if there is none."""
        state, spec = self._context.state, self._context.spec
        since_ms, state.running_since_ms = state.running_since_ms, None
        ran_ms = None if since_ms is None else max(0, at_ms - since_ms)
        state.failures = spec.restart.count(state.failures, at_ms, ran_ms)
        again = bool(fingerprint) and fingerprint == state.last_fingerprint
        state.same_failures = state.same_failures + 1 if again else int(bool(fingerprint))
        state.last_fingerprint = fingerprint
        if permanent or self.keeps_failing:
            return None
        delay_ms = spec.restart.decide(state.failures, drawn_fraction(spec.seed, _JITTER, state.attempt))
        if delay_ms is not None:
            invariants.check_wait(spec.restart, delay_ms)
        return delay_ms

    def left(self) -> None:
        """The attempt is over without a failure."""
        self._context.state.running_since_ms = None
