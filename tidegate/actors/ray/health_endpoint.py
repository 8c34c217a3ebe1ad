"""`HealthEndpoint`: reports that a worker's process lives, which call it is in, and its Python stack.

Rules:

- Its calls have a thread to themselves: a living process answers them, however long a function of the user takes.
- Until its subtasks are ready, a process reports no call: deployment has a time limit of its own.
- A process whose mailbox is stuck reports its own stack, read by another thread.
- A process that does not answer is sent a signal by another process on its node. The handler is faulthandler's. It
  needs no lock of Python, so it works while a native call holds that lock. It writes into a file in memory.
- A process that is stopped cannot do that either, and one that waits for a device does not get the signal. Then the
  state that Linux reports is the answer.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import ray

from tidegate.actors.ray.exit_probe import stderr_path
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.protocol.identity import TaskId

IO_THREAD_NAMES = "tidegate-io"
"""What the names of the threads begin with that do a task's I/O."""


class Pulse(NamedTuple):
    """A sign of life. Both numbers are unique in the process."""

    call: int | None = None
    """The call that the mailbox is in. None if it has nothing to do, or may take long."""
    oldest_call: int | None = None
    """The call of a function of `map_async` that has been under way for longest, or None."""
    task: TaskId | None = None
    """The subtask that acts, or acted last."""


class HealthEndpoint:
    """A part of the class of an actor, which notes its subtasks that are starting."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.starting: set[TaskId] = set()
        """Subtasks that begin here, and are not ready. Read from any thread."""
        self.address = b""
        """Where this process listens for connections; empty if it does not."""
        self.__mailbox = mailbox
        self.__descriptor = offer_stack()

    def info(self) -> ProcessInfo:
        """Where this is, for the process itself."""
        return process_info(self.__descriptor, self.__mailbox.thread, self.address)

    @ray.method(concurrency_group="control")
    def identify(self) -> ProcessInfo:
        """Where this is."""
        return self.info()

    @ray.method(concurrency_group="pulse", enable_task_events=False)
    def pulse(self) -> Pulse:
        """Return a sign of life, with the calls that this process is in."""
        if self.starting:
            return Pulse(task=self.acting())
        return Pulse(self.__mailbox.call, self.oldest_call(), self.acting())

    def acting(self) -> TaskId | None:
        """Return the subtask that acts now, or acted last. From any thread."""
        return None

    def oldest_call(self) -> int | None:
        """Return the number of the oldest call of `map_async` under way, or None. From any thread."""
        return None

    @ray.method(concurrency_group="pulse")
    def stack(self) -> str:
        """What the mailbox is doing."""
        return f"{self.__task()}it is in {own_stack(self.__mailbox.thread)}"

    @ray.method(concurrency_group="pulse")
    def doing(self) -> str:
        """What the mailbox is doing, and the threads that read and write for it."""
        waits = self.__mailbox.call is None
        return f"{'' if waits else self.__task()}{own_threads(self.__mailbox.thread, waits, IO_THREAD_NAMES)}"

    def __task(self) -> str:
        return "" if (task := self.acting()) is None else f"{task}: "

    @ray.method(concurrency_group="pulse")
    def peer_stack(self, info: ProcessInfo) -> str:
        """What another process of this node is doing."""
        return stack_of(info.pid, info.stack_descriptor, info.mailbox_thread)

    @ray.method(concurrency_group="pulse")
    def kill_peer(self, info: ProcessInfo) -> None:
        """End another process of this node."""
        kill_process(info.pid, info.stack_descriptor)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Where an actor runs."""

    pid: int
    node_id: str
    stderr_path: str = ""
    stack_descriptor: int = -1
    """Where it writes its stacks to when it is asked to (see `stacks`)."""
    mailbox_thread: int = 0
    """The thread that runs its task."""
    actor_id: str = ""
    """How Ray calls it: no other process has this id, or will have it."""
    name: str = ""
    """How people call it: no other process that lives has this name."""
    address: bytes = b""
    """Where it listens for connections of processes of its job on its node; empty if it does not."""


def process_info(stack_descriptor: int = -1, mailbox_thread: int = 0, address: bytes = b"") -> ProcessInfo:
    """Where this process is."""
    context = ray.get_runtime_context()
    actor_id, name = context.get_actor_id() or "", context.get_actor_name() or ""
    place = os.getpid(), context.get_node_id(), stderr_path()
    return ProcessInfo(*place, stack_descriptor, mailbox_thread, actor_id, name, address)


FRAMES_MAX, THREADS_MAX = 8, 6
WAIT_S = 1.5
STEP_S = 0.02
DUMP_BYTES_MAX = 256 * 1024
_NAME = "tidegate-stack"
_SECTION = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  File [^\n]*\n?|  \.\.\.\n?)*)", re.MULTILINE
)
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')

_STATES = {
    "T": "it is stopped, by a signal (SIGSTOP) or a debugger, so it cannot say what it was doing",
    "t": "it is stopped by a debugger, so it cannot say what it was doing",
    "D": "it waits for a device, a disk or a network file system, so it cannot say what it was doing",
    "Z": "it has ended",
}
UNKNOWN = "what it was doing is not known: nobody on its node could look"


def _signal() -> int | None:
    # One that no library takes for itself, unlike SIGUSR1 and SIGUSR2.
    return signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else None


@functools.cache
def offer_stack() -> int:
    """Have this process write down the stacks of its threads when it is asked to by `stack_of`.

    Returns the descriptor that they are written to, -1 where that cannot be had.
    """
    number = _signal()
    if number is None or not hasattr(os, "memfd_create"):
        return -1
    try:
        descriptor = os.memfd_create(_NAME)
    except OSError:
        return -1
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    return descriptor


def own_stack(thread: int) -> str:
    """What a thread of this process is doing, innermost first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "nothing"
    found = traceback.extract_stack(frame)
    return _in_line([(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(found)])


def own_threads(mailbox: int, waits: bool, prefix: str) -> str:
    """What this process is doing: its mailbox, and its other threads whose names begin so.

    `waits`: the mailbox has nothing to do.
    """
    found = ["its mailbox waits for messages" if waits else f"its mailbox is in {own_stack(mailbox)}"]
    others = [t for t in threading.enumerate() if t.ident not in (None, mailbox) and t.name.startswith(prefix)]
    found += [f"{thread.name} is in {own_stack(thread.ident or 0)}" for thread in others]
    return "; ".join(found[:THREADS_MAX])


def state_of(pid: int) -> str:
    """The state of a process of this node, as Linux names it (`R`, `S`, `T`, ...); empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def stack_of(pid: int, descriptor: int, thread: int) -> str:
    """What a thread of another process of this node is doing, in words. Waits for at most some two seconds."""
    state = state_of(pid)
    if not state:
        return "its process is gone"
    if state in _STATES:
        return _STATES[state]
    text = _dumped(pid, descriptor)
    for ident, frames in _SECTION.findall(text):
        if int(ident, 16) == thread:
            return "it was in " + _in_line([(path, int(line), name) for path, line, name in _FRAME.findall(frames)])
    return "it did not say what it was doing"


def kill_process(pid: int, descriptor: int) -> None:
    """End a process of this node that has called `offer_stack`; nothing happens to any other that has its number."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _is_ours(pid, descriptor):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _is_ours(pid: int, descriptor: int) -> bool:
    try:
        return _NAME in os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return False


def _dumped(pid: int, descriptor: int) -> str:
    number = _signal()
    if number is None or not _is_ours(pid, descriptor):
        return ""
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            file.seek(0, os.SEEK_END)
            start = file.tell()
            os.kill(pid, number)
            return _read_until_quiet(file.fileno(), start)
    except OSError:
        return ""


def _read_until_quiet(descriptor: int, start: int) -> str:
    """What is written from `start` on, once nothing more comes."""
    pause, deadline_s, size = threading.Event(), time.monotonic() + WAIT_S, start
    while time.monotonic() < deadline_s:
        pause.wait(STEP_S)
        grown = os.fstat(descriptor).st_size
        if grown == size and grown > start:
            break
        size = grown
    return os.pread(descriptor, DUMP_BYTES_MAX, start).decode(errors="backslashreplace")


def _in_line(frames: list[tuple[str, int, str]]) -> str:
    told = [f"{name} ({'/'.join(path.split('/')[-2:])}:{line})" for path, line, name in frames[:FRAMES_MAX]]
    return " < ".join(told) + (" < ..." if len(frames) > FRAMES_MAX else "") if told else "no Python function"
