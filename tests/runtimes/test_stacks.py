"""What a process that hangs is doing: asked by itself, and by a process beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
from waiting import until

from tidegate.actors.ray.health_endpoint import kill_process, offer_stack, own_stack, stack_of, state_of

PROGRAM = """
import ctypes, threading
from tidegate.actors.ray.health_endpoint import offer_stack
def never_comes_back():
    {how}
def work():
    print(offer_stack(), threading.get_ident(), flush=True)
    never_comes_back()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
WAYS = {
    "waits for a lock": "threading.Lock().__enter__(); lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a native call with Python's lock": "ctypes.PyDLL(None).sleep(600)",
    "a loop": "\n    while True: pass",
}


class Child:
    """A process whose thread hangs."""

    def __init__(self, how: str) -> None:
        program = PROGRAM.format(how=how)
        self._process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.descriptor, self.thread = map(int, self._process.stdout.readline().split())

    def wait(self) -> int:
        return self._process.wait(240)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(240)


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_a_neighbour_sees_the_function_that_hangs(how: str) -> None:
    """Also where no thread of that process gets to run any Python; and then ends it."""
    child = Child(WAYS[how])
    try:
        look = partial(stack_of, child.pid, child.descriptor, child.thread)
        until("the function in the stack", lambda: "never_comes_back (<string>:" in look(), look)
        kill_process(child.pid, child.descriptor)
        assert child.wait() == -signal.SIGKILL
    finally:
        child.kill()


@pytest.mark.slow
def test_a_stopped_process_cannot_say_it_and_can_be_ended() -> None:
    """Its state is said instead."""
    child = Child(WAYS["a loop"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        until("it is stopped", lambda: state_of(child.pid) == "T", lambda: state_of(child.pid))
        assert "is stopped, by a signal (SIGSTOP)" in stack_of(child.pid, child.descriptor, child.thread)
        kill_process(child.pid, child.descriptor)
        assert child.wait() == -signal.SIGKILL
    finally:
        child.kill()


def test_a_process_that_has_offered_nothing_is_left_alone() -> None:
    """A number may belong to another process by now."""
    # It ends with its standard input, so it does not outlive a check that fails; what it says shows that it is loaded.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        assert process.stdout.read(1) == b"x"
        assert stack_of(process.pid, 3, 1) == "it did not write its stack"
        kill_process(process.pid, 3)
        assert process.poll() is None
        process.kill()
    assert stack_of(process.pid, 3, 1) == "its process is gone"


def test_a_process_knows_its_own_threads() -> None:
    """Innermost first, with file and line."""
    begun, over = threading.Event(), threading.Event()

    def waits_here() -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    begun.wait()
    assert thread.ident is not None
    text = own_stack(thread.ident)
    over.set()
    thread.join()
    assert text.index("wait (") < text.index("waits_here (runtimes/test_stacks.py:")
    assert own_stack(thread.ident) in ("nothing", text) or "waits_here" not in own_stack(thread.ident)


def test_offering_twice_is_fine() -> None:
    """A process does it once."""
    assert offer_stack() == offer_stack() >= 0
