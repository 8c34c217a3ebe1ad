"""`Restarts`: asks the restart strategy of the job, and keeps what it remembers.

Rules:

- The strategy is asked once for each failure of an attempt: by then its other tasks fail as well, and that is one.
- What is wrong with the program itself is no matter of luck: then the strategy is not asked, and the job fails.
- What was not a failure (a coordinator that was lost, a checkpoint that was passed over, a stop that could not be
  carried out) is not counted.
- Everything comes from the log: times from events, chance from the job's seed and the number of the attempt.
"""

from __future__ import annotations

from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.job.chance import drawn_fraction
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext

_JITTER = 1
"""What the draw is for."""


class Restarts:
    """The restarts of one job."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def runs(self, at_ms: int) -> None:
        """All tasks of the attempt are running."""
        self._context.state.running_since_ms = at_ms

    def failed(self, at_ms: int, permanent: bool) -> int | None:
        """The attempt has failed: milliseconds until the next one, None if there is none."""
        state, spec = self._context.state, self._context.spec
        since_ms, state.running_since_ms = state.running_since_ms, None
        ran_ms = None if since_ms is None else max(0, at_ms - since_ms)
        state.failures = spec.restart.count(state.failures, at_ms, ran_ms)
        if permanent:
            return None
        delay_ms = spec.restart.decide(state.failures, drawn_fraction(spec.seed, _JITTER, state.attempt))
        if delay_ms is not None:
            invariants.check_wait(spec.restart, delay_ms)
        return delay_ms

    def left(self) -> None:
        """The attempt is over without a failure."""
        self._context.state.running_since_ms = None
