"""The one place where a test pauses: waiting for something that no call of ours announces.

A test never waits for time to pass. It waits for an event, by a call that returns when the event has happened, or by
`until`, which looks again and again. The limit only ends a test that waits in vain; nothing may depend on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LIMIT_S = 240.0
"""Far beyond what a busy machine needs, and within the time after which a hanging test ends the run."""
PAUSE_S = 0.01


def until(
    what: str, happened: Callable[[], object], seen: Callable[[], object] = lambda: "nothing else is known"
) -> None:
    """Return when something has happened; after a long time in vain say so, and what was seen instead."""
    deadline_s = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}: {seen()}"
        pause(PAUSE_S)


def pause(seconds: float) -> None:
    """Let others have the processor, or set the pace of something slow. Nothing may depend on how long this takes."""
    threading.Event().wait(seconds)
