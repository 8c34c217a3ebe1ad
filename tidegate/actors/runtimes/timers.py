"""`Timers`: the delayed actions of a thread, with deadlines by a monotonic clock.

Machines name moments by the wall clock, as Flink does. Drivers of machines turn them into delays, by the time that the
machine was given (`at_ms`). So a wall clock that is set back delays nothing, and one that is set forward triggers
nothing. When a timer fires, the wall clock may still be before the moment of the timer.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from tidegate.storage.clock import monotonic_ms

WAIT_MS_MAX = 24 * 3_600_000
"""Limit of one wait in ms. A longer wait is divided: a user's timer may be at the end of time, beyond the limit of
queues.
"""


class Timers:
    """The delayed actions of one thread, with their deadlines.

    An action with a name replaces the waiting action of that name, and can be cancelled. Cancelled actions are removed
    from the heap in bulk, when they are half of it. So a cancellation costs no more than a timer.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], object], str | None]] = []
        self._ids = itertools.count(1)
        self._named: dict[str, int] = {}
        """Numbers of the waiting named actions. A number is negative if the action was removed and has not run yet."""
        self._cancelled: set[int] = set()

    def __len__(self) -> int:
        """Returns the number of waiting actions."""
        return len(self._heap) - len(self._cancelled)

    def after(self, delay_ms: int, action: Callable[[], object], name: str | None = None) -> None:
        """Adds an action to run after a delay."""
        number = next(self._ids)
        if name is not None:
            self.cancel(name)
            self._named[name] = number
        heapq.heappush(self._heap, (monotonic_ms() + max(0, delay_ms), number, action, name))

    def cancel(self, name: str) -> None:
        """Drops the waiting action of this name, if there is one."""
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
        """Removes and returns the action with the earliest deadline. Requires `due`."""
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
        """Returns how long to wait for the first action, at most `WAIT_MS_MAX`. None if no action waits."""
        return None if self._first is None else min(WAIT_MS_MAX, max(0, self._first - monotonic_ms()))

    @property
    def _first(self) -> int | None:
        while self._heap and self._heap[0][1] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._heap)[1])
        return self._heap[0][0] if self._heap else None
