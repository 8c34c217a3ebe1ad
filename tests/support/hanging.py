"""Ends tests that hang, each of them alone: by a limit of time, and soon after a thread has died.

A test that takes longer than `LIMIT_S` fails with the stacks of all threads in its error, wherever it waits. The tests
after it run as usual. A thread that dies of an exception fails its test in any case; so that the test does not wait for
that thread until the limit, it is ended `AFTER_DEATH_S` later.

The main thread is interrupted by a signal, and again every `AGAIN_S`, because what cleans up after a test may hang as
well. A test that no signal can interrupt (it is in native code) ends the run, by `faulthandler_timeout` in
pyproject.toml.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import waiting

LIMIT_S = 1200.0
AGAIN_S = 30.0
AFTER_DEATH_S = 5.0
_FRAMES_MAX = 40
"""How many of the newest frames of a thread are shown."""
_PYTEST = {"_pytest", "pluggy"}
"""Packages whose frames are left out."""
_phase = ""
"""The phase of the running test that may be interrupted, empty between phases."""


def stacks(interrupted: FrameType | None) -> str:
    """Return the stack of each thread under its name; last that of the main thread, from where it was interrupted."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames: dict[int | None, FrameType | None] = {**sys._current_frames()}
    main = threading.main_thread().ident
    del frames[main]
    texts = []
    for ident, frame in [*frames.items(), (main, interrupted)]:
        shown = [each for each in traceback.extract_stack(frame) if not _PYTEST & set(Path(each.filename).parts)]
        lines = "".join(traceback.format_list(shown[-_FRAMES_MAX:]))
        texts.append(f"--- thread {names.get(ident, ident)} ---\n{lines}")
    return "\n".join(texts)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if _phase:
        why = waiting.watched.death() or f"it is in its {_phase} after {LIMIT_S:g} s"
        pytest.fail(f"ended because it hangs: {why}\n{stacks(frame)}", pytrace=False)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Take down which threads die, beside pytest, which fails their test and has set its hook when this is called."""
    before = threading.excepthook

    def died(args: threading.ExceptHookArgs) -> None:
        before(args)
        waiting.watched.died("of which nothing is left" if args.thread is None else args.thread.name, args.exc_value)
        if _phase == "call" and signal.getsignal(signal.SIGALRM) is _interrupt:
            signal.setitimer(signal.ITIMER_REAL, AFTER_DEATH_S, AGAIN_S)

    threading.excepthook = died
    session.config.add_cleanup(lambda: setattr(threading, "excepthook", before))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Set the limit for a test. A debugger may take its time."""
    waiting.watched.clear()
    if item.config.getoption("usepdb") or threading.current_thread() is not threading.main_thread():
        return (yield)
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, AGAIN_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interruptible(phase: str) -> Iterator[None]:
    global _phase
    _phase = phase
    try:
        return (yield)
    finally:
        _phase = ""


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup() -> Iterator[None]:
    """The set-up may be interrupted."""
    return (yield from _interruptible("set-up"))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Iterator[None]:
    """The test may be interrupted."""
    return (yield from _interruptible("call"))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """What cleans up after the test may be interrupted."""
    return (yield from _interruptible("teardown"))


@pytest.hookimpl(tryfirst=True)
def pytest_enter_pdb() -> None:
    """A debugger may take its time."""
    signal.setitimer(signal.ITIMER_REAL, 0)
