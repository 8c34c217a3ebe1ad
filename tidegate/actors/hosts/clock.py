"""The clocks of the runtimes that run in real time: the wall clock, and one that nobody sets."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Wall-clock time in ms."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Time since some moment in ms, which nobody sets."""
    return time.monotonic_ns() // 1_000_000
