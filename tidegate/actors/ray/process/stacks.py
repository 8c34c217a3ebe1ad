"""Finds out what a process that hangs is doing: its Python stack, from itself or from a neighbour on its node.

- A process whose mailbox is stuck says it itself: another thread of it looks.
- One that does not answer is sent a signal by a process beside it. The handler is faulthandler's: it needs no lock of
  Python's, so it works while a native call holds that. It writes into a file that exists in memory only.
- One that is stopped cannot do that either, and one that waits for a device does not get the signal: that is said.
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
