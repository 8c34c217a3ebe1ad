"""SIGTERM of a driver that connects to Ray: the program's own handler stays, and Ray's is replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import pytest

from tidegate.actors.ray.connection import EXIT_CODE, clean_end_at_sigterm


@pytest.fixture(autouse=True)
def _handler_stays() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def of_the_program(number: int, frame: FrameType | None) -> None:
    """A handler that a program has set."""


def of_ray(number: int, frame: FrameType | None) -> None:
    """A handler as Ray sets one."""


of_ray.__module__ = "ray._private.worker"


@pytest.mark.parametrize("handler", [of_the_program, signal.SIG_IGN])
def test_a_handler_of_the_program_is_put_back(handler: signal.Handlers) -> None:
    """Ray has replaced it while it connected."""
    signal.signal(signal.SIGTERM, handler)
    with clean_end_at_sigterm():
        signal.signal(signal.SIGTERM, of_ray)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("handler", [signal.SIG_DFL, of_ray])
def test_where_there_is_none_the_program_exits(handler: signal.Handlers) -> None:
    """Also where the program had connected to Ray itself, and where the connection fails."""
    signal.signal(signal.SIGTERM, handler)
    with suppress(ConnectionError), clean_end_at_sigterm():
        signal.signal(signal.SIGTERM, of_ray)
        raise ConnectionError
    assert signal.getsignal(signal.SIGTERM) not in (of_ray, signal.SIG_DFL)


_PROGRAM = """
import atexit, os, signal, sys
from tidegate.actors.ray.connection import clean_end_at_sigterm
atexit.register(print, "an exit function")
with clean_end_at_sigterm():
    pass
try:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
except SystemExit:
    print("a block is left")
    sys.exit(1)  # As Ray does.
"""


def test_the_exit_code_is_that_of_sigterm() -> None:
    """Although something has raised another SystemExit; exit functions run, once."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_CODE, "a block is left\nan exit function\n", "")
