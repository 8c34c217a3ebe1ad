"""The clocks of real time: the wall clock, and a monotonic clock.

State machines get the time as an argument instead.
"""

from __future__ import annotations

import time


def now_ms() -> int:
    """Returns the wall clock time in ms since the epoch. The time can jump when the clock is set."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Returns the time of a monotonic clock in ms since an arbitrary moment. It never jumps."""
    return time.monotonic_ns() // 1_000_000
