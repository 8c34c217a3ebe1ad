"""Virtual time and chance: one queue of actions, one generator of random numbers, one seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Hashable

from tidegate.actors.simulation.faults import Faults

START_MS = 1_700_000_000_000
TRACE_LINES_MAX = 20_000


class World:
    """Runs actions in the order of their virtual times; actions of one time in random order."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.faults = faults
        self.random = random.Random(seed)
        self.now_ms = START_MS
        self.steps = 0
        self.trace: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self._queue: list[tuple[int, float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._fifo: dict[Hashable, int] = {}
        self._delay_ms = faults.delay_ms
        self._duration_ms = faults.duration_ms

    @property
    def faulty(self) -> bool:
        """Whether faults still happen."""
        return self.now_ms - START_MS < self._duration_ms

    def chance(self, probability: float) -> bool:
        """Whether a fault of this probability happens now."""
        return probability > 0.0 and self.faulty and self.random.random() < probability

    def delay_ms(self) -> int:
        """How long a message takes now."""
        low_ms, high_ms = self._delay_ms if self.faulty else (0, 5)
        return self.random.randint(low_ms, high_ms)

    def io_ms(self) -> int:
        """How long an I/O operation takes now."""
        if self.chance(self.faults.slow):
            return self.random.randint(0, self.faults.slow_ms)
        return self.random.randint(0, 20)

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Run an action later."""
        entry = (self.now_ms + delay_ms, self.random.random(), next(self._numbers), action)
        heapq.heappush(self._queue, entry)

    def after_in_order(self, line: Hashable, delay_ms: int, action: Callable[[], None]) -> None:
        """Run an action later, after every earlier action of the same line."""
        due_ms = max(self.now_ms + delay_ms, self._fifo.get(line, 0))
        number = next(self._numbers)
        self._fifo[line] = due_ms
        heapq.heappush(self._queue, (due_ms, 2.0 + number, number, action))

    def step(self) -> bool:
        """Run the next action. False when nothing is left to do."""
        if not self._queue:
            return False
        self.now_ms, _, _, action = heapq.heappop(self._queue)
        self.steps += 1
        action()
        return True

    def note(self, line: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now_ms - START_MS:>8} {line}")
