"""Ends a driver on Ray cleanly at SIGTERM: its `with` blocks are left, and the exit code is 143.

While a process connects, Ray replaces the handler of SIGTERM by its own. That one prints a stack of addresses, and
aborts the process (SIGABRT, and a core file) if it has not ended 3 s later. Jobs may take longer to be cancelled.
Rules:

- A handler that the program had set before it connected is put back.
- Where the program had none, SIGTERM raises SystemExit in the main thread, as `sys.exit(143)` does. So environments
  are closed, and cancel what runs.
- Ray turns a SystemExit that reaches it in a call into one of its own, with exit code 1. So the last exit function sets
  the code. It ends the process at once, before Ray's native code is unloaded, which may crash.
- Handlers can be set on the main thread alone. A process that connects on another one keeps what Ray has set.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM
_OF_RAY = "ray._private.worker"


@contextmanager
def clean_end_at_sigterm() -> Iterator[None]:
    """Connect to Ray in this block, or find that this process is connected: afterwards SIGTERM ends it cleanly."""
    before: Any = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before if _is_of_the_program(before) else _end)


def _is_of_the_program(handler: Any) -> bool:
    if handler is signal.SIG_IGN:
        return True
    return callable(handler) and getattr(handler, "__module__", None) != _OF_RAY


class _LastExitFunction:
    """An exit function that runs the other exit functions, and then ends the process with `EXIT_CODE`.

    Exit functions run in the reverse order of their registration, so this one runs first.
    """

    def __init__(self) -> None:
        self._runs = False

    def __call__(self) -> None:
        if self._runs:
            return  # As one of the other exit functions.
        self._runs = True
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # It may be closed.
                stream.flush()
        os._exit(EXIT_CODE)


_leave = _LastExitFunction()


def _end(number: int, frame: FrameType | None) -> None:
    atexit.unregister(_leave)
    atexit.register(_leave)
    sys.exit(EXIT_CODE)
