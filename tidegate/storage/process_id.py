"""`ProcessId`: identifies a process, so that a later process can find out whether it is gone.

A process is identified by its place (host, boot and pid namespace), its pid, and its start time, because pids are
reused. Only a process in the same pid namespace can be checked.
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
"""Indices of the fields in `/proc/<pid>/stat` after the name of the program, which may contain blanks and brackets."""


@wire
@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies one process on one machine. `place` is empty if the system does not provide the data (not Linux)."""

    host: str
    place: str
    pid: int
    began: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> ProcessId:
    """Returns the id of this process."""
    pid = os.getpid()
    return ProcessId(socket.gethostname(), _place(), pid, (_stat(pid) or ("", ""))[1])


def is_there(process: ProcessId) -> bool | None:
    """Returns whether the process with this id is alive, or None if this machine cannot find out."""
    if not process.place or process.place != _place():
        return None
    stat = _stat(process.pid)
    return stat is not None and stat[0] not in _DEAD_STATES and stat[1] == process.began


@cache
def _place() -> str:
    """Returns a text that identifies this host, boot and pid namespace, or an empty text if it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str] | None:
    """Returns state and start time of the process `pid`, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[_STATE], fields[_BEGAN]
