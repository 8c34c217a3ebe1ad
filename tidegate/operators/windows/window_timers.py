"""`WindowTimers`: event-time timers of keys and windows. `WindowLife`: how long a window is there.

Rules:

- A timer of a window is one of its key, for the same moment, and an entry in a map of the key that says which windows
  wait for which moments. So timers are stored, restored and fired as those of other functions.
- A window is there until the watermark passes its last moment, plus the allowed lateness. A timer for later is dropped,
  as in Flink, where it would find no window. So a window that goes has no timers.
- Timers of a key for one moment fire in the order in which their windows end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidegate.operators.state.keyed_state import MapState
from tidegate.operators.state.keyed_state_store import KeyedStates
from tidegate.operators.state.timers import TimeDomain, moment_of
from tidegate.operators.windows.assigned_windows import starts_of
from tidegate.operators.windows.slices import Window
from tidegate.operators.windows.window_specs import Cumulating, Sliding, Times, Tumbling
from tidegate.storage.schemas.reserved_names import own_name

TIMERS_OF_WINDOWS = own_name("window_timers")
_LATENESS_MS_MAX = 1 << 58
"""So long that a window is never over, and the sum with its end fits into 64 bits."""


def last_moments(ends: Times, lateness_ms: int) -> Times:
    """The last moments of windows with these ends: they are over when the watermark has come to it."""
    return ends - 1 + min(lateness_ms, _LATENESS_MS_MAX)


@dataclass(frozen=True, slots=True)
class WindowLife:
    """Windows that are known from the time alone, and the lateness that is allowed for them."""

    spec: Tumbling | Sliding | Cumulating
    lateness_ms: int = 0

    def window(self, end_ms: int) -> Window:
        """The window with this end."""
        return Window(int(starts_of(self.spec, np.array([end_ms], dtype=np.int64))[0]), end_ms)

    def last_ms(self, ends: Times) -> Times:
        """The last moment of windows with these ends: they are over when the watermark has come to it."""
        return last_moments(ends, self.lateness_ms)


class WindowTimers:
    """The timers of one operator. It binds their state, before those of the function."""

    def __init__(self, states: KeyedStates, life: WindowLife) -> None:
        self._timers, self._life = states.timers, life
        self._moments = states.bind_own(MapState(TIMERS_OF_WINDOWS, pa.int64(), pa.list_(pa.int64())))

    def register(self, end_ms: int, moment_ms: int) -> None:
        """Register a timer of the current key, for the window with this end."""
        if moment_ms > int(self._life.last_ms(np.array([end_ms], dtype=np.int64))[0]):
            return
        known = self._moments.get(end_ms) or []
        if moment_ms not in known:
            self._moments.put(end_ms, [*known, moment_ms])
            self._timers.change(TimeDomain.EVENT_TIME, moment_ms, registered=True)

    def delete(self, end_ms: int, moment_ms: int) -> None:
        """Delete it, if it is there."""
        if self._taken(end_ms, moment_ms) and not self.windows_at(moment_ms):
            self._timers.change(TimeDomain.EVENT_TIME, moment_ms, registered=False)

    def windows_at(self, moment_ms: int) -> list[int]:
        """The ends of the windows of the current key that wait for a moment, in order."""
        return sorted(end_ms for end_ms, moments in self._moments.items() if moment_ms in moments)

    def fires(self, end_ms: int, moment_ms: int) -> bool:
        """A timer fires, if it was not deleted meanwhile: then it is not registered any more."""
        return self._taken(end_ms, moment_ms)

    def _taken(self, end_ms: int, moment_ms: int) -> bool:
        known = self._moments.get(end_ms) or []
        if moment_ms not in known:
            return False
        left = [each for each in known if each != moment_ms]
        self._moments.put(end_ms, left or None)
        return True


class WindowTimerService:
    """Registers timers of the key and window of a call. Moments are milliseconds since 1970."""

    def __init__(
        self,
        timers: WindowTimers,
        end_ms: Callable[[], int],
        now_ms: Callable[[], int],
        watermark_ms: Callable[[], int],
    ) -> None:
        self._timers, self._end_ms = timers, end_ms
        self._now_ms, self._watermark_ms = now_ms, watermark_ms

    def current_processing_time(self) -> int:
        """Processing time of what is being processed."""
        return self._now_ms()

    def current_watermark(self) -> int:
        """The newest watermark; `MIN_WATERMARK_MS` before the first one, also after a restore."""
        return self._watermark_ms()

    def register_event_time_timer(self, timestamp_ms: int) -> None:
        """Call `on_timer` for this key and window when the watermark reaches the moment; if it has, with the next step.

        A timer for a moment at which the window is over is dropped.
        """
        self._timers.register(self._end_ms(), moment_of(timestamp_ms))

    def delete_event_time_timer(self, timestamp_ms: int) -> None:
        """Delete a timer of this key and window, if it is registered."""
        self._timers.delete(self._end_ms(), moment_of(timestamp_ms))
