"""`Timers`: the delayed actions of a thread, with deadlines by a monotonic clock.

Machines give the times of timers by the wall clock, as Flink does. Drivers of machines convert them to delays, relative
to the time of the event (`at_ms`). So a timer is neither delayed if the wall clock is set back, nor fired early if it
is set forward. When a timer fires, the wall clock may still be before the time of the timer.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from tidegate.storage.clock import monotonic_ms

WAIT_MS_MAX = 24 * 3_600_000
"""Limit of one wait in ms. A longer wait is divided, because a user's timer may exceed the limit of a queue's
timeout.
"""


class Timers:
    """The delayed actions of one thread, with their deadlines.

    An action with a name replaces the waiting action of that name, and can be cancelled. Cancelled actions stay in the
    heap until they are half of it, and are then removed together. So a cancellation costs no more than a timer.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], object], str | None]] = []
        self._ids = itertools.count(1)
        self._named: dict[str, int] = {}
        """Numbers of the named actions, by name. The number is negative if `pop` has returned the action and it
        has not run yet.
        """
        self._cancelled: set[int] = set()

    def __len__(self) -> int:
        """Returns the number of waiting actions."""
        return len(self._heap) - len(self._cancelled)

    def after(self, delay_ms: int, action: Callable[[], object], name: str | None = None) -> None:
        """Adds an action to run after a delay in ms."""
        number = next(self._ids)
        if name is not None:
            self.cancel(name)
            self._named[name] = number
        heapq.heappush(self._heap, (monotonic_ms() + max(0, delay_ms), number, action, name))

    def cancel(self, name: str) -> None:
        """Drops the waiting action with this name, if there is one."""
        number = self._named.pop(name, -1)
        if number < 0:
            return
        self._cancelled.add(number)
        if 2 * len(self._cancelled) > len(self._heap):
            self._heap = [each for each in self._heap if each[1] not in self._cancelled]
            heapq.heapify(self._heap)
            self._cancelled.clear()

    @property
    def due(self) -> bool:
        """Returns whether an action is due."""
        return self._first is not None and self._first <= monotonic_ms()

    def pop(self) -> Callable[[], object]:
        """Removes and returns the action with the earliest deadline. An action must be due (`due`)."""
        _, number, action, name = heapq.heappop(self._heap)
        if name is None:
            return action
        self._named[name] = -number

        def run() -> None:
            if self._named.get(name) == -number:
                del self._named[name]
                action()

        return run

    @property
    def wait_ms(self) -> int | None:
        """Returns the time in ms until the first action is due, at most `WAIT_MS_MAX`. None if no action waits."""
        return None if self._first is None else min(WAIT_MS_MAX, max(0, self._first - monotonic_ms()))

    @property
    def _first(self) -> int | None:
        while self._heap and self._heap[0][1] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._heap)[1])
        return self._heap[0][0] if self._heap else None
