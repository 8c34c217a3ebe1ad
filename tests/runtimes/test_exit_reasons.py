"""How processes end, and what is said about it: the facts first, and no guess."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError

from tidegate.actors.ray import exit_probe as exit_reasons
from tidegate.actors.ray.exit_probe import ExitProbe, end_text, last_lines
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.worker_pool import WorkerHandle, reason_of

SEGFAULT = """\
:job_id:01000000
:actor_name:WorkerProcess
loading the model
*** SIGSEGV received at time=1795345533 on cpu 1 ***
PC: @     0x7f4401974219  (unknown)  (unknown)
    @     0x7f440185a050  (unknown)  (unknown)
[2026-11-22 11:05:33,658 E 21595 21894] logging.cc:474: *** SIGSEGV received at time=1795345533 on cpu 1 ***
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "ctypes/__init__.py", line 519 in string_at
  File "job.py", line 17 in score

Extension modules: msgpack._cmsgpack, google._upb._message (total: 2)
"""


class Known(ExitProbe):
    """Has seen the end."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def end(self, wait_ms: int) -> str | None:
        return self.text


def member(log: Path, exit_probe: ExitProbe | None) -> WorkerHandle:
    """A process that has ended."""
    return WorkerHandle(
        "job/map (1/2)#0", None, None, Future(), ProcessInfo(7, "node", str(log)), dead=True, exit_probe=exit_probe
    )


def died() -> ActorDiedError:
    """What Ray says of every end."""
    error = ActorDiedError()
    error.error_msg = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerProcess\nThe actor is dead "
        "because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly "
        "exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed by "
        "the OOM killer due to high memory usage, (2) ray stop --force was called."
    )
    return error


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
    ],
)
def test_a_witness_knows_how_a_process_has_ended(ends: Callable[[], None], text: str) -> None:
    """Also when somebody else has been told. Where Linux is older than 6.15 it knows that it does not know."""
    go, let_go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        ends()
    exit_probe = ExitProbe(child)
    os.write(let_go, b"x")
    os.waitpid(child, 0)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert exit_probe.end(10_000) in ({text} if release >= (6, 15) else {text, None})
    exit_probe.close()
    exit_probe.close()
    assert exit_probe.end(0) is None
    for descriptor in (go, let_go):
        os.close(descriptor)


def test_a_process_that_is_gone_has_no_witness() -> None:
    """It came too late."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert ExitProbe(child).end(0) is None


def test_signals_have_names() -> None:
    """Those that have."""
    assert end_text(-11) == "killed by SIGSEGV"
    assert end_text(-63) == "killed by signal 63"


def test_the_end_comes_first_and_then_the_last_words(tmp_path: Path) -> None:
    """Of what Ray guesses nothing."""
    log = tmp_path / "worker.err"
    log.write_text(":job_id:01000000\nfirst\nsecond\n\nthird\nno room\n")
    reason = reason_of(member(log, Known("killed by SIGKILL")), died())
    assert reason == (
        "killed by SIGKILL: the process job/map (1/2)#0, pid 7, has ended; the last lines of its stderr: second | "
        "third | no room"
    )


def test_a_crash_is_told_by_what_python_says_of_it(tmp_path: Path) -> None:
    """And where it was, also where nobody saw the exit code."""
    log = tmp_path / "worker.err"
    log.write_text(SEGFAULT)
    reason = reason_of(member(log, None), died())
    assert reason == (
        "the process job/map (1/2)#0, pid 7, has ended; the last lines of its stderr: Fatal Python error: Segmentation "
        'fault | File "ctypes/__init__.py", line 519 in string_at | File "job.py", line 17 in score'
    )


def test_what_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    """Where the log is, is said; a long one is read from its end."""
    reason = reason_of(member(tmp_path / "not here", Known(None)), died())
    assert reason == (
        "the process job/map (1/2)#0, pid 7, has ended, and how is unknown here: Worker unexpectedly exits with a "
        f"connection error code 2. End of file. Its log on node node: {tmp_path / 'not here'}"
    )
    log = tmp_path / "long"
    log.write_text("x" * 100_000 + "\n" + "y" * 100_000)
    assert last_lines(str(log)) == "y" * exit_reasons.LINE_CHARACTERS_MAX


def test_a_forked_child_does_not_hide_the_end_of_its_parent() -> None:
    """It closes the connections by which that is noticed."""
    here, there = socket.socketpair()
    go, let_go = os.pipe()
    worker = os.fork()
    if worker == 0:
        here.close()
        exit_reasons.close_sockets_in_children()
        if os.fork() == 0:
            os.close(let_go)
            os.read(go, 1)  # Lives as long as the test.
        os._exit(0)
    there.close()
    here.settimeout(240)
    assert here.recv(1) == b"", "the worker is gone"
    os.waitpid(worker, 0)
    here.close()
    os.close(let_go)
    os.close(go)
