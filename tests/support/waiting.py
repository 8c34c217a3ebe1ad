"""The one place where a test pauses: waiting for something that no call of ours announces.

A test never waits for time to pass. It waits for an event, by a call that returns when the event has happened, or by
`until`, which looks again and again. The limit only ends a test that waits in vain; nothing may depend on it.

A wait ends at once, with the reason in its error, where the event cannot happen any more:

- a thread has died of an exception that nothing caught, which fails the test in any case;
- every job that the test has started is over, and one of them has failed. A failure that `Job.wait` has raised is known
  to the test and ends no wait, nor does a failed job beside one that runs;
- a part that a helper has put under watch (`watched.add`) has failed.

The condition is evaluated once more after such a failure was seen, and `until` raises only if it is still false. A test
that waits for something that follows later from a failure, which it has not been told of, passes `after_failure=True`.
Only waits of the test's own thread end like that. Waits of functions and fakes on other threads have the limit alone.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

LIMIT_S = 240.0
"""Far beyond what a busy machine needs, and within the time after which a hanging test is ended."""
PAUSE_S = 0.01
FIRST_PAUSE_S = 0.001
_PAUSES_A_LOOK = 2
_LONG_PAUSE_S = 0.25
"""A look that takes processor time is followed by a pause of twice that time, up to this, so that jobs of the test have
the processor.
"""
LOOK_EVERY_S = 0.1
"""How often a wait looks for failures of parts: a look at a job on Ray is a call."""

T = TypeVar("T")
Failure = Callable[[], str | None]
"""Returns why a part of the test has failed, or None."""


class Watched:
    """What the waits of the running test look at. Empty again when the next test begins."""

    def __init__(self) -> None:
        self._parts: list[Failure] = []
        self._deaths: list[tuple[str, BaseException | None]] = []

    def __reduce__(self) -> tuple[type[Watched], tuple[()]]:
        """Processes of jobs that are sent `until` by value have nothing under watch."""
        return Watched, ()

    def add(self, failure: Failure) -> None:
        """Put a part of the test under watch."""
        self._parts.append(failure)

    def remove(self, failure: Failure) -> None:
        """Take a part out again, because the test has been told of its failure."""
        self._parts = [each for each in self._parts if each != failure]

    def died(self, thread: str, error: BaseException | None) -> None:
        """Take down that a thread has died of an exception. From any thread."""
        self._deaths.append((thread, error))

    def clear(self) -> None:
        """Forget everything."""
        self._parts, self._deaths = [], []

    def death(self) -> str | None:
        """Return which thread has died and of what, or None. None as well on other threads than the test's own."""
        if not self._deaths or threading.current_thread() is not threading.main_thread():
            return None
        thread, error = self._deaths[0]
        lines = [] if error is None else traceback.format_exception(error)
        return f"thread {thread} has died\n{''.join(lines)}"

    def failure(self) -> str | None:
        """Return why a part has failed, or None. None as well on other threads than the test's own."""
        if threading.current_thread() is not threading.main_thread():
            return None
        found = (failure() for failure in list(self._parts))
        return next((why for why in found if why is not None), None)


watched = Watched()


def files_below(folder: Path, ending: str = "") -> list[Path]:
    """Returns the files of this ending below a folder, also while folders are deleted: Path.rglob may raise then."""
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names if name.endswith(ending)]


def until(
    what: str,
    happened: Callable[[], object],
    seen: Callable[[], object] = lambda: "nothing else is known",
    *,
    after_failure: bool = False,
) -> None:
    """Return when something has happened; where that is in vain, raise an error with the reason and what was seen.

    `after_failure`: whether it may still happen some time after a job or another part of the test has failed.
    """
    deadline_s = time.monotonic() + LIMIT_S
    look_at_s = 0.0
    pause_s, failure = FIRST_PAUSE_S, None
    began_s = time.thread_time()
    while not happened():
        used_s = time.thread_time() - began_s
        assert failure is None, f"waited in vain for {what}: {failure}\nseen: {seen()}"
        at_s = time.monotonic()
        assert at_s < deadline_s, f"waited in vain for {what}: {seen()}"
        pause(max(pause_s, min(_PAUSES_A_LOOK * used_s, _LONG_PAUSE_S)))
        pause_s = min(2 * pause_s, PAUSE_S)
        failure = watched.death()
        if failure is None and not after_failure and at_s >= look_at_s:
            look_at_s = at_s + LOOK_EVERY_S
            failure = watched.failure()
        began_s = time.thread_time()


def received(what: str, queue: SimpleQueue[T]) -> T:
    """Take the next item out of a queue, and wait for it as `until` does."""
    items: list[T] = []

    def happened() -> bool:
        try:
            items.append(queue.get(timeout=PAUSE_S))
        except Empty:
            return False
        return True

    until(what, happened)
    return items[0]


def pause(seconds: float) -> None:
    """Let others have the processor, or set the pace of something slow. Nothing may depend on how long this takes."""
    threading.Event().wait(seconds)
