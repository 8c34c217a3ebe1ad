"""`TimerChains`: notices timers that register one another without end. Operators report each timer that fires to it.

Rules:

- A timer that is later than all before it is progress. While event time goes up to a watermark, or the clock to now,
  timers that register later ones end by themselves, however many they are. So a heartbeat catches up with any pause.
- Timers that register one another for the same moment, or for earlier ones, never end. They fail after
  `_CHAINED_TIMERS_MAX` for each timer that is left.
- At the end of event time every moment is due, so later timers are no progress there. Timers that end are: the chain
  fails where as many timers are left as before after a long run (`_fires_in_a_run`).
"""

from __future__ import annotations

from tidegate.operators.state.timers import Timers
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS

_CHAINED_TIMERS_MAX = 1_000
"""Timers that may fire one after the other for each timer that is left, without one that is later than all before."""
_FIRES_AT_END = 250_000
_FIRES_AT_END_A_TIMER = 10_000
"""Timers that may fire at the end of event time before there must be fewer of them."""
_COUNTED_MAX = 1_000_000


class TimerChains:
    """Watches the timers that fire up to one watermark, or up to one moment of the clock.

    `at_end`: whether that watermark is the end of event time.
    """

    def __init__(self, timers: Timers, at_end: bool) -> None:
        self._timers = timers
        self._newest_ms = MIN_WATERMARK_MS
        self._fires_left = self._counted_to = _CHAINED_TIMERS_MAX
        self._all_counted = False
        self._at_end = at_end
        self._fires_left_at_end = 0
        self._timers_before: int | None = None

    def begin_step(self) -> None:
        """Reports that a step of timers begins. Raises RuntimeError if the steps would never end."""
        if self._at_end and self._fires_left_at_end <= 0:
            timers = self._timers.count(_COUNTED_MAX)
            if self._timers_before is not None and timers >= self._timers_before:
                raise RuntimeError(
                    f"the input has ended, where every event-time timer is due, and timers still register others: "
                    f"{timers} are left, no fewer than {_fires_in_a_run(timers)} timers ago; register none while "
                    "context.current_watermark is tg.MAX_WATERMARK_MS"
                )
            self._timers_before = timers
            self._fires_left_at_end = _fires_in_a_run(timers)

    def fires(self, moment_ms: int) -> None:
        """Reports a timer that fires. Raises RuntimeError if that would never end."""
        if moment_ms > self._newest_ms:
            self._newest_ms = moment_ms
            self._fires_left = self._counted_to = _CHAINED_TIMERS_MAX
            self._all_counted = False
        else:
            self._fires_without_progress(moment_ms)
        self._fires_left_at_end -= 1

    def _fires_without_progress(self, moment_ms: int) -> None:
        if self._fires_left == 0:
            if self._all_counted:
                raise RuntimeError(
                    f"timers register one another for {moment_ms} or earlier, without end: more than "
                    f"{_CHAINED_TIMERS_MAX} for each timer that is left; a timer that sets itself again must be for a "
                    "later moment"
                )
            # Each timer that is left may be the first of a chain. Counting costs no more than what has fired already.
            timers = self._timers.count(self._counted_to)
            self._all_counted = timers < self._counted_to
            self._fires_left = _CHAINED_TIMERS_MAX * (timers + 1)
            self._counted_to *= _CHAINED_TIMERS_MAX
        self._fires_left -= 1


def _fires_in_a_run(timers: int) -> int:
    return _FIRES_AT_END + _FIRES_AT_END_A_TIMER * timers
