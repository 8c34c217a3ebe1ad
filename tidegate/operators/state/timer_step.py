"""`TimerStep`: the timers that fire in one step, and what they change among themselves.

`Timers` makes one for each step. Rules:

- The backend says what is due when the step begins. It learns at the end what was registered and deleted meanwhile.
- A timer that is registered within the step, and is due, fires in it if it comes before the last one that the backend
  has given, or if the backend has given all. Otherwise it comes with the next step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tidegate.operators.state.keys import Key, KeyCodec, sort_key
from tidegate.state.common.timers import DueTimers

_Entry = tuple[int, tuple[Any, ...], int]


class TimerStep:
    """The timers of a step. Its keys have numbers; none is added, because a timer registers others of its own key."""

    def __init__(self, domain: int, time_ms: int, due: DueTimers, codec: KeyCodec) -> None:
        self.domain = domain
        self._time_ms = time_ms
        encoded = codec.encode(due.keys)
        numbers = {key: number for number, key in enumerate(dict.fromkeys(encoded))}
        self.keys: Sequence[Key] = tuple(numbers)
        """The keys by number."""
        first_rows = {key: row for row, key in reversed(list(enumerate(encoded)))}
        self.columns: pa.RecordBatch = due.keys.take(pa.array([first_rows[key] for key in self.keys], pa.int64()))
        """The keys as stored key columns."""
        self._orders = [sort_key(key) for key in self.keys]
        self._waiting: list[_Entry] = [
            self._entry(moment, numbers[key]) for moment, key in zip(due.moments, encoded, strict=True)
        ]
        self._last = self._waiting[-1] if due.more else None
        self._registered = {(moment, number) for moment, _, number in self._waiting}

    def register(self, moment: int, number: int) -> bool:
        """A timer of a key was registered. Returns whether that changes the step."""
        entry = self._entry(moment, number)
        if moment > self._time_ms or (self._last is not None and entry > self._last):
            return False
        if (moment, number) in self._registered:
            return False
        self._registered.add((moment, number))
        heapq.heappush(self._waiting, entry)
        return True

    def delete(self, moment: int, number: int) -> bool:
        """A timer of a key was deleted. Returns whether that changes the step."""
        if (moment, number) not in self._registered:
            return False
        self._registered.remove((moment, number))
        return True

    def undo(self, registered: bool, moment: int, number: int) -> None:
        """Take back the last change: a timer that was registered or deleted, and has not fired."""
        if registered:
            self._registered.discard((moment, number))
        else:
            # Its entry waits still, because only `pop` removes entries.
            self._registered.add((moment, number))

    def pop(self) -> tuple[int, int] | None:
        """The timer that fires next: its moment, and the number of its key; it is not registered any more."""
        while self._waiting:
            moment, _, number = heapq.heappop(self._waiting)
            if (moment, number) in self._registered:
                self._registered.remove((moment, number))
                return moment, number
        return None

    def _entry(self, moment: int, number: int) -> _Entry:
        return moment, self._orders[number], number
