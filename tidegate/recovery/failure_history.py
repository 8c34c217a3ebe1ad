"""`FailureHistory`: what a restart strategy remembers of failures; it is stored with the coordinator's state."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class FailureHistory:
    """The failures that still count. What counts, and for how long, is the strategy's to say."""

    in_a_row: int = 0
    """How many failures are counted together, the present one included."""
    times_ms: tuple[int, ...] = ()
    """When the newest of them happened, oldest first, for a strategy that asks for times; never many."""

    def moved_before(self, at_ms: int) -> tuple[int, ...]:
        """The times, none of them later than `at_ms`.

        A wall clock that was set back would make old failures lie ahead, and count until the clock has come there
        again. So the newest one counts as if it had happened now, and the others as long before it as they were.
        """
        ahead_ms = max(0, self.times_ms[-1] - at_ms) if self.times_ms else 0
        return tuple(time_ms - ahead_ms for time_ms in self.times_ms)
