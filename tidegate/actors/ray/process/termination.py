"""Ends the process of an actor at SIGTERM, instead of leaving it half alive.

Ray's own handler raises SystemExit in the main thread, and Ray then waits for every thread of the actor's concurrency
groups. Calls that stay pending on purpose (`live`, `run`) never return, so such a process would take no more calls and
would never end. Nothing is saved before the end: what a checkpoint does not hold is processed again, as after SIGKILL.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType

LAST_LINE = b"SIGTERM: the process ends, as it was told\n"
"""What the process prints last. Kernels before Linux 6.15 do not tell how a process ended."""


def end_at_sigterm() -> None:
    """Have SIGTERM end this process. Does nothing off the main thread, where no handler can be set."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):  # The standard error may be closed.
        os.write(2, LAST_LINE)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
