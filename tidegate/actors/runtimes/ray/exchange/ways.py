"""`Ways`: which way goes what a task says to each of its neighbours: by calls of Ray, or over a connection. Pure.

Rules:

- It begins with calls. A connection is worth its price after a few of them: then it is offered, once in an attempt.
- It is used from when both ends have shown their tokens. Numbers put in order what goes both ways (`frame_order.py`).
- What the connection refuses goes by a call: what is large, or finds no room because the other end does not read.
- One that has ended is not used any more, and none follows it in this attempt.
"""

from __future__ import annotations

import enum

from tidegate.actors.protocol.identity import TaskId

OFFER_AFTER_CALLS = 4
OFFER_AFTER_BYTES = 64 * 1024


class Way(enum.Enum):
    """How a neighbour is reached."""

    CALLS = "calls"
    OFFERED = "calls, and a connection was offered"
    CONNECTION = "connection"
    ENDED = "calls, and a connection has ended or was refused"


class Ways:
    """Of one task of one attempt. `wanted`: whether the job wants connections."""

    def __init__(self, wanted: bool) -> None:
        self._first = Way.CALLS if wanted else Way.ENDED
        self._ways: dict[TaskId, Way] = {}
        self._calls: dict[TaskId, tuple[int, int]] = {}
        """Calls and bytes of rows in them, to those to whom nothing was offered."""

    def of(self, neighbour: TaskId) -> Way:
        """How it is reached now."""
        return self._ways.get(neighbour, self._first)

    def called(self, neighbour: TaskId, size_bytes: int) -> bool:
        """A frame goes by a call. Whether a connection is to be offered now."""
        if self.of(neighbour) is not Way.CALLS:
            return False
        calls, called_bytes = self._calls.get(neighbour, (0, 0))
        self._calls[neighbour] = calls, called_bytes = calls + 1, called_bytes + size_bytes
        if calls < OFFER_AFTER_CALLS and called_bytes < OFFER_AFTER_BYTES:
            return False
        self._ways[neighbour] = Way.OFFERED
        del self._calls[neighbour]
        return True

    def opened(self, neighbour: TaskId) -> None:
        """Both ends of a connection have shown their tokens."""
        if self.of(neighbour) is not Way.ENDED:
            self._ways[neighbour] = Way.CONNECTION

    def ended(self, neighbour: TaskId) -> None:
        """The connection has ended, or there will be none."""
        self._ways[neighbour] = Way.ENDED
        self._calls.pop(neighbour, None)
