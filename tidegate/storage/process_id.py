"""`ProcessId`: names a process, so that a later one can tell whether it is gone.

Rules: a process is known by where its number counts (host, boot and pid namespace), its number, and the moment when it
began: numbers are used again. Only of a process of the same place can anything be known; of any other, nothing is.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tidegate.storage.codec import wire

_DEAD_STATES = ("Z", "X", "x")
_STATE, _BEGAN = 0, 19
"""Fields of `/proc/<pid>/stat` behind the name of the program, which may hold blanks and brackets."""


@wire
@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of one machine. `place` is empty where the system does not say what it takes to know it again."""

    host: str
    place: str
    pid: int
    began: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> ProcessId:
    """The process that asks."""
    pid = os.getpid()
    return ProcessId(socket.gethostname(), _place(), pid, (_stat(pid) or ("", ""))[1])


def is_there(process: ProcessId) -> bool | None:
    """Whether a process is alive; None where that cannot be known from here."""
    if not process.place or process.place != _place():
        return None
    stat = _stat(process.pid)
    return stat is not None and stat[0] not in _DEAD_STATES and stat[1] == process.began


@cache
def _place() -> str:
    """What the processes have in common that share their numbers; empty where nobody knows."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str] | None:
    """State and beginning of a process; None if there is none of this number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[_STATE], fields[_BEGAN]
