"""`WindowEnd`: event time that is read from the end of a window, for what follows a window.

The end of a window is no part of it. So the event time of a result is the last millisecond before, as in Flink: it lies
in the window, no watermark that was sent before the result has reached it, and the next window takes it in.
"""

from __future__ import annotations


class WindowEnd(str):
    """The name of a column of ends. As event time each stands for the millisecond before it.

    It is a name like any other for all that only pass it on, and equal to it. `event_times_ms` reads it, and
    `same_time` tells it from a plain column of that name.
    """

    __slots__ = ()


def same_time(one: str | None, other: str | None) -> bool:
    """Whether two streams have their event time in the same column, and read it in the same way."""
    return one == other and isinstance(one, WindowEnd) == isinstance(other, WindowEnd)
