"""`WorkTimes`: for how long a task has worked, was held up by its receivers, and had nothing to do.

Whole milliseconds of a clock that nobody sets: over many events the sums are right. Together they are all the time.
"""

from __future__ import annotations


class WorkTimes:
    """Those of one task, from `begin_ms` on."""

    __slots__ = ("back_pressured_ms", "busy_ms", "idle_ms", "until_ms")

    def __init__(self, begin_ms: int) -> None:
        self.busy_ms = self.back_pressured_ms = self.idle_ms = 0
        self.until_ms = begin_ms
        """The time up to which all is counted."""

    def waited(self, now_ms: int, held_up: bool) -> None:
        """Until now the task did nothing. `held_up`: it may not take input before its output has left."""
        passed_ms, self.until_ms = now_ms - self.until_ms, now_ms
        if held_up:
            self.back_pressured_ms += passed_ms
        else:
            self.idle_ms += passed_ms

    def worked(self, now_ms: int) -> None:
        """Until now it worked."""
        passed_ms, self.until_ms = now_ms - self.until_ms, now_ms
        self.busy_ms += passed_ms
