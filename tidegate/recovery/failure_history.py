"""`FailureHistory`: what a restart strategy remembers of failures. It is stored with the coordinator's state."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class FailureHistory:
    """The failures that still count. The strategy decides which do, and for how long."""

    in_a_row: int = 0
    """How many failures count, the present one included."""
    times_ms: tuple[int, ...] = ()
    """When the newest of them happened, oldest first, for a strategy that needs times. Their number is limited."""

    def moved_before(self, at_ms: int) -> tuple[int, ...]:
        """The times, moved so that none is later than `at_ms`.

        If the wall clock was set back, old failures lie in the future, and would count until the clock gets there. So
        the newest one is moved to `at_ms`, and the others with it.
        """
        ahead_ms = max(0, self.times_ms[-1] - at_ms) if self.times_ms else 0
        return tuple(time_ms - ahead_ms for time_ms in self.times_ms)
