"""`FiresLeft`: notices timers that register one another without end. `ProcessOperator` asks it for each that fires."""

from __future__ import annotations

from tidegate.actors.operators.state.timers import Timers

_CHAINED_TIMERS_MAX = 1000


class FiresLeft:
    """Notices timers that register one another without end: counts how many may still fire before that is certain."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._left = self._counted_to = _CHAINED_TIMERS_MAX
        self._all_counted = False

    def spend_one(self) -> None:
        """A timer fires. RuntimeError if that would never end."""
        if self._left == 0:
            if self._all_counted:
                raise RuntimeError(
                    f"each timer registered another one that was due at once, {_CHAINED_TIMERS_MAX} in a row; at the "
                    "end of the input every event-time timer is due: register none while context.current_watermark "
                    "is tg.MAX_WATERMARK_MS"
                )
            # Each timer that is left may be the first of a chain. Counting costs no more than what has fired already.
            rows = self._timers.count(self._counted_to)
            self._all_counted = rows < self._counted_to
            self._left, self._counted_to = _CHAINED_TIMERS_MAX * (rows + 1), _CHAINED_TIMERS_MAX * self._counted_to
        self._left -= 1
