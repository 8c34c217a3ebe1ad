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
    """Actions and when they are due. For one thread."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._ids = itertools.count()

    def after(self, delay_ms: int, action: Callable[[], object]) -> None:
        """Have an action run after a while."""
        heapq.heappush(self._heap, (monotonic_ms() + max(0, delay_ms), next(self._ids), action))

    @property
    def due(self) -> bool:
        """Whether the time of the first one has come."""
        return bool(self._heap) and self._heap[0][0] <= monotonic_ms()

    def pop(self) -> Callable[[], object]:
        """The action that is due first."""
        return heapq.heappop(self._heap)[2]

    @property
    def wait_ms(self) -> int | None:
        """How long to wait for the first one, at most. None: there is none."""
        return min(WAIT_MS_MAX, max(0, self._heap[0][0] - monotonic_ms())) if self._heap else None
