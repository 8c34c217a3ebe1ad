"""`World`: virtual time and random choices, with one queue of actions and one random generator with a seed.

The trace is stored as tuples and becomes text only when it is read, because most runs succeed and their trace is never
read.
"""

from __future__ import annotations

import heapq
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from tidegate.testing.world.faults import FAULT_KINDS, Faults

START_MS = 1_700_000_000_000
TRACE_NOTES_MAX = 20_000


class Note(NamedTuple):
    """An event of the trace. With a `receiver` it is a message that leaves its sender at `at_ms`.

    `cause` is the number of the event in the coordinator's log that caused it, or None.
    """

    at_ms: int
    sender: object
    receiver: object
    what: tuple[object, ...]
    cause: int | None = None

    def __str__(self) -> str:
        lane = "" if self.sender is None else f"{self.sender} "
        if self.receiver is not None:
            lane += f"-> {self.receiver} "
        return f"{self.at_ms - START_MS:>8} {lane}{self.text}"

    @property
    def text(self) -> str:
        """Returns the event and its cause as text, without time, sender and receiver."""
        why = "" if self.cause is None else f" (from event {self.cause})"
        return " ".join(map(_text, self.what)) + why

    def portable(self) -> Note:
        """Returns a copy in which text replaces all objects that cannot be pickled, such as state that is not
        written yet.
        """
        return self._replace(what=tuple(part if _can_leave(part) else _text(part) for part in self.what))


class World:
    """Runs actions in the order of their virtual times. Actions with the same time run in random order."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed = seed
        self.faults = faults
        self.random = random.Random(seed)
        self.now_ms = START_MS
        self.steps = 0
        self.faults_happened = 0
        self.happened: Counter[str] = Counter()
        """Number of faults of each kind that have happened."""
        self.trace: deque[Note] = deque(maxlen=TRACE_NOTES_MAX)
        self._draw = self.random.random
        self._queue: list[tuple[int, float, int, Callable[[], object]]] = []
        self._number = 0
        self._fifo: dict[Hashable, int] = {}
        self._probability: dict[str, float] = {kind: getattr(faults, kind) for kind in FAULT_KINDS}
        self._delay_ms = faults.delay_ms
        self._slow_ms = faults.slow_ms
        self._copy_ms = faults.copy_ms
        self.silence_ms = faults.silence_ms
        """Time in ms after which a process that does not answer counts as hung; 0 if it never does."""
        self._clock_ms = faults.clock_ms
        self._faulty_until_ms = START_MS + faults.duration_ms
        self._away_from_ms, self._away_until_ms = (START_MS + at_ms for at_ms in faults.outage_ms)

    @property
    def wall_ms(self) -> int:
        """Returns the time of the wall clock in ms, which events use.

        Faults may set it back; `now_ms` never moves back.
        """
        set_back = self._clock_ms and self.faulty and (self.now_ms - START_MS) // 1_000 % 2
        return self.now_ms - self._clock_ms if set_back else self.now_ms

    @property
    def clock_is_set(self) -> bool:
        """Returns whether faults set the wall clock, so that it cannot measure durations."""
        return self._clock_ms > 0

    @property
    def faulty(self) -> bool:
        """Returns whether faults may happen at this time."""
        return self.now_ms < self._faulty_until_ms

    @property
    def storage_away(self) -> bool:
        """Returns whether there is an outage of storage at this time."""
        return self._away_from_ms <= self.now_ms < self._away_until_ms

    @property
    def faulty_until_ms(self) -> int:
        """Returns the virtual time of the last possible fault, in ms."""
        return max(self._faulty_until_ms, self._away_until_ms)

    @property
    def calm(self) -> bool:
        """Returns whether no more faults can happen."""
        return self.now_ms >= self.faulty_until_ms

    def faults_again(self) -> None:
        """Allows faults again from now on, for the same duration as at the start."""
        self._faulty_until_ms = self.now_ms + self.faults.duration_ms

    def chance(self, kind: str) -> bool:
        """Returns at random whether a fault of this kind happens now. `kind` is one of `FAULT_KINDS`."""
        probability = self._probability[kind]
        if probability <= 0.0 or self.now_ms >= self._faulty_until_ms or self._draw() >= probability:
            return False
        if self.faults.faults_max is not None and self.faults_happened >= self.faults.faults_max:
            return False
        self.faults_happened += 1
        self.happened[kind] += 1
        return True

    def between(self, low: int, high: int) -> int:
        """Returns a random whole number from `low` to `high`, both included."""
        return low + int(self._draw() * (high - low + 1))

    def delay_ms(self) -> int:
        """Returns a random delay for a message that is sent now, in ms."""
        low_ms, high_ms = self._delay_ms if self.now_ms < self._faulty_until_ms else (0, 5)
        return low_ms + int(self._draw() * (high_ms - low_ms + 1))

    def io_ms(self) -> int:
        """Returns a random duration for an I/O operation that starts now, in ms."""
        if self.chance("slow"):
            return self.between(0, self._slow_ms)
        return int(self._draw() * 21)

    def copy_ms(self) -> int:
        """Returns a random duration for copying a savepoint now, in ms."""
        return self.between(0, self._copy_ms) if self._copy_ms and self.faulty else self.io_ms()

    def reads_at_once(self) -> bool:
        """Returns at random whether copying a savepoint reads all files at its beginning and writes them at its end."""
        return bool(self._copy_ms) and self.random.random() < 0.5

    def after(self, delay_ms: int, action: Callable[[], object]) -> None:
        """Runs an action after a delay in ms."""
        self._number += 1
        heapq.heappush(self._queue, (self.now_ms + delay_ms, self._draw(), self._number, action))

    def after_in_order(self, line: Hashable, delay_ms: int, action: Callable[[], None]) -> None:
        """Runs an action after a delay in ms, but not before the earlier actions of the same line. `line` identifies a
        sequence of actions.
        """
        due_ms = max(self.now_ms + delay_ms, self._fifo.get(line, 0))
        self._number += 1
        self._fifo[line] = due_ms
        heapq.heappush(self._queue, (due_ms, 2.0 + self._number, self._number, action))

    def forget_lines(self) -> None:
        """Removes the data about lines (sequences of actions) whose last action has run, so that long runs need little
        memory.
        """
        self._fifo = {line: due_ms for line, due_ms in self._fifo.items() if due_ms >= self.now_ms}

    def step(self) -> bool:
        """Runs the next action in virtual time. Returns False if there is none."""
        if not self._queue:
            return False
        self.now_ms, _, _, action = heapq.heappop(self._queue)
        self.steps += 1
        action()
        return True

    def note(self, *what: object, cause: int | None = None) -> None:
        """Adds an event to the trace."""
        self.trace.append(Note(self.now_ms, None, None, what, cause))

    def message(self, sender: object, receiver: object, *what: object, cause: int | None = None) -> None:
        """Adds a message to the trace."""
        self.trace.append(Note(self.now_ms, sender, receiver, what, cause))


def _can_leave(part: object) -> bool:
    try:
        pickle.dumps(part)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _text(part: object) -> str:
    if isinstance(part, tuple):
        return ",".join(map(_text, part))
    return part if isinstance(part, str) else _name(part)


def _name(part: object) -> str:
    rows = getattr(part, "num_rows", None)
    if rows is not None:
        return f"Batch({rows})"
    checkpoint_id = getattr(part, "checkpoint_id", None)
    name = type(part).__name__
    if name in _PLAIN:
        return str(part)
    return name if checkpoint_id is None else f"{name}({checkpoint_id})"


_PLAIN = {"int", "float", "str", "NoneType", "TaskId", "ChannelId", "bool"}
