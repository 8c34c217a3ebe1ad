"""`HealthEndpoint`: answers the heartbeats of a worker's process with its current call and, on request, its Python
stack.

Rules:

- A separate thread handles these calls: a living process answers them, however long a function of the user takes.
- Until its subtasks are ready, a process reports no call, because deployment has its own time limit.
- A process whose mailbox is blocked reports its own stack, which another thread reads.
- A process that does not answer gets a signal from another process on its node. The handler is faulthandler's. It needs
  no lock of Python, so it works while a native call holds that lock. It writes into a file in memory.
- A stopped process cannot do that, and a process that waits for a device does not get the signal. Then the answer is
  the process state that Linux reports.
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
"""Prefix of the names of the threads that do a task's I/O."""


class Pulse(NamedTuple):
    """The answer to a heartbeat. Both call numbers are unique within the process."""

    call: int | None = None
    """Number of the call in which the mailbox is. None if it is idle, or if the call may take any time."""
    oldest_call: int | None = None
    """Number of the longest-running call of a function of `map_async`, or None."""
    task: TaskId | None = None
    """The subtask that is active, or was active last."""


class HealthEndpoint:
    """The methods of a worker's actor that answer heartbeats."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.starting: set[TaskId] = set()
        """Subtasks that were deployed to this process and are not ready yet. May be read from any thread."""
        self.address = b""
        """Address of this process for socket connections, empty if it does not listen."""
        self.__mailbox = mailbox
        self.__descriptor = offer_stack()

    def info(self) -> ProcessInfo:
        """Returns the node, process id and addresses of this process, for callers in the process itself."""
        return process_info(self.__descriptor, self.__mailbox.thread, self.address)

    @ray.method(concurrency_group="control")
    def identify(self) -> ProcessInfo:
        """Returns the node, process id and addresses of this process."""
        return self.info()

    @ray.method(concurrency_group="pulse", enable_task_events=False)
    def pulse(self) -> Pulse:
        """Returns a heartbeat answer with the current calls of this process."""
        if self.starting:
            return Pulse(task=self.acting())
        return Pulse(self.__mailbox.call, self.oldest_call(), self.acting())

    def acting(self) -> TaskId | None:
        """Returns the subtask that is active, or was active last. May be called from any thread."""
        return None

    def oldest_call(self) -> int | None:
        """Returns the number of the longest-running call of `map_async`, or None. From any thread."""
        return None

    @ray.method(concurrency_group="pulse")
    def stack(self) -> str:
        """Returns the stack of the mailbox's thread as one line of text."""
        return f"{self.__task()}it is in {own_stack(self.__mailbox.thread)}"

    @ray.method(concurrency_group="pulse")
    def doing(self) -> str:
        """Returns the stacks of the mailbox's thread and of the I/O threads as one line of text."""
        waits = self.__mailbox.call is None
        return f"{'' if waits else self.__task()}{own_threads(self.__mailbox.thread, waits, IO_THREAD_NAMES)}"

    def __task(self) -> str:
        return "" if (task := self.acting()) is None else f"{task}: "

    @ray.method(concurrency_group="pulse")
    def peer_stack(self, info: ProcessInfo) -> str:
        """Returns the stack of the mailbox's thread of another process on this node as one line of text."""
        return stack_of(info.pid, info.stack_descriptor, info.mailbox_thread)

    @ray.method(concurrency_group="pulse")
    def kill_peer(self, info: ProcessInfo) -> None:
        """Kills another process on this node that does not answer Ray's calls."""
        kill_process(info.pid, info.stack_descriptor)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The node, process id, addresses and identity of an actor's process."""

    pid: int
    node_id: str
    stderr_path: str = ""
    stack_descriptor: int = -1
    """Number of the file descriptor to which the process writes its stacks (`offer_stack`), or -1."""
    mailbox_thread: int = 0
    """Identifier of the thread that runs its tasks."""
    actor_id: str = ""
    """Ray's id of the actor, which is never reused."""
    name: str = ""
    """Name of the actor, which no other living actor has."""
    address: bytes = b""
    """Address for connections from other processes of the job on this node. Empty if the process does not listen."""


def process_info(stack_descriptor: int = -1, mailbox_thread: int = 0, address: bytes = b"") -> ProcessInfo:
    """Returns the `ProcessInfo` of this process. The arguments are its fields of the same names."""
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
    "T": "it is stopped, by a signal (SIGSTOP) or a debugger, so its stack is not available",
    "t": "it is stopped by a debugger, so its stack is not available",
    "D": "it waits for a device, a disk or a network file system, so its stack is not available",
    "Z": "it has ended",
}
UNKNOWN = "its stack is not available: no process on its node could read it"


def _signal() -> int | None:
    # A signal that libraries do not use, unlike SIGUSR1 and SIGUSR2.
    return signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else None


@functools.cache
def offer_stack() -> int:
    """Makes this process write the stacks of its threads into a memory file when it gets the signal of `stack_of`.

    Returns the descriptor of the file, or -1 if the system does not support this.
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
    """Returns the stack of a thread of this process as one line of text. The innermost call comes first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "nothing"
    found = traceback.extract_stack(frame)
    return _in_line([(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(found)])


def own_threads(mailbox: int, waits: bool, prefix: str) -> str:
    """Returns the stacks of the mailbox's thread, and of the threads with names that begin with `prefix`, as one line.

    `waits`: the mailbox is idle.
    """
    found = ["its mailbox waits for messages" if waits else f"its mailbox is in {own_stack(mailbox)}"]
    others = [t for t in threading.enumerate() if t.ident not in (None, mailbox) and t.name.startswith(prefix)]
    found += [f"{thread.name} is in {own_stack(thread.ident or 0)}" for thread in others]
    return "; ".join(found[:THREADS_MAX])


def state_of(pid: int) -> str:
    """Returns the state letter that Linux reports for a process on this node (`R`, `S`, `T`, ...), or "" if there
    is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def stack_of(pid: int, descriptor: int, thread: int) -> str:
    """Returns as one line of text what a thread of another process on this node is doing. Waits for up to two seconds.

    `descriptor` and `thread` are the `stack_descriptor` and `mailbox_thread` of the process.
    """
    state = state_of(pid)
    if not state:
        return "its process is gone"
    if state in _STATES:
        return _STATES[state]
    text = _dumped(pid, descriptor)
    for ident, frames in _SECTION.findall(text):
        if int(ident, 16) == thread:
            return "it was in " + _in_line([(path, int(line), name) for path, line, name in _FRAME.findall(frames)])
    return "it did not write its stack"


def kill_process(pid: int, descriptor: int) -> None:
    """Kills a process on this node, if `descriptor` shows that the pid still belongs to that process.

    The process must have called `offer_stack`, which returns the descriptor.
    """
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
    """Returns the text that is written to a file from position `start` on, once the file no longer grows."""
    pause, deadline_s, size = threading.Event(), time.monotonic() + WAIT_S, start
    while time.monotonic() < deadline_s:
        pause.wait(STEP_S)
        grown = os.fstat(descriptor).st_size
        if grown == size and grown > start:
            break
        size = grown
    return os.pread(descriptor, DUMP_BYTES_MAX, start).decode(errors="backslashreplace")


def _in_line(frames: list[tuple[str, int, str]]) -> str:
    shown = [f"{name} ({'/'.join(path.split('/')[-2:])}:{line})" for path, line, name in frames[:FRAMES_MAX]]
    return " < ".join(shown) + (" < ..." if len(frames) > FRAMES_MAX else "") if shown else "no Python function"
