"""`Timers`: what a thread has to do later, with deadlines by a clock that nobody sets.

Machines name moments by the wall clock, as Flink does. The hosts of machines make delays of them, by the time that
the machine was told (`at_ms`). So a wall clock that is set back meanwhile holds nothing up, and one that is set forward
brings nothing about; when something fires, the wall clock may say less than the moment that it was for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from tidegate.storage.clock import monotonic_ms

WAIT_MS_MAX = 24 * 3_600_000
"""A longer wait goes on when it is over: a user's timer may be for the end of time, for which no queue can wait."""


class Timers:
    """Actions and when they are due. For one thread.

    An action with a name replaces the one of that name, and can be cancelled. What was cancelled is taken out of the
    heap in bulk, when it is half of it: so a cancellation costs no more than a timer.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], object], str | None]] = []
        self._ids = itertools.count(1)
        self._named: dict[str, int] = {}
        """The numbers of the named ones that wait; less than 0 for one that was popped and has not run yet."""
        self._cancelled: set[int] = set()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._heap) - len(self._cancelled)

    def after(self, delay_ms: int, action: Callable[[], object], name: str | None = None) -> None:
        """Have an action run after a while."""
        number = next(self._ids)
        if name is not None:
            self.cancel(name)
            self._named[name] = number
        heapq.heappush(self._heap, (monotonic_ms() + max(0, delay_ms), number, action, name))

    def cancel(self, name: str) -> None:
        """Drop the action of this name, if one waits."""
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
        """Whether the time of the first one has come."""
        return self._first is not None and self._first <= monotonic_ms()

    def pop(self) -> Callable[[], object]:
        """The action that is due first. Call it when one is `due`."""
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
        """How long to wait for the first one, at most. None: there is none."""
        return None if self._first is None else min(WAIT_MS_MAX, max(0, self._first - monotonic_ms()))

    @property
    def _first(self) -> int | None:
        while self._heap and self._heap[0][1] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._heap)[1])
        return self._heap[0][0] if self._heap else None
