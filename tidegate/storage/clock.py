"""The clocks of real time, for every room: the wall clock, and one that nobody sets. Machines never look at either."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Now, in ms since the epoch."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Time since some moment in ms, which nobody sets."""
    return time.monotonic_ns() // 1_000_000
