"""Finds out how a process of this node has ended, and what it said last: the facts, and no guess.

Rules: Linux tells the exit code of a process to its parent, which is Ray. Who has held on to the process since before
its end (by a file descriptor) may ask for it too, since Linux 6.15; elsewhere a crash is known by what it printed, and
the end of any other is said to be unknown. Nothing here raises.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import stat
import struct
from contextlib import suppress

_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 8
_INFO_BYTES = 64
_EXIT_CODE_AT = 60

TAIL_BYTES = 16 * 1024
LINES_MAX = 3
LINE_CHARACTERS_MAX = 300

_NOISE = re.compile(
    r":(job_id|actor_name|task_name):|Extension modules:|\s+@ |PC: @|\[[^]]*\] logging\.cc|\*\*\* SIG|Stack \("
)
"""Lines that Ray and Python print for themselves."""
_CRASH = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)


class Witness:
    """Holds on to a process of this node, so that its end can be read when it is gone."""

    def __init__(self, pid: int) -> None:
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.pidfd_open(pid)

    def end(self, wait_ms: int) -> str | None:
        """`exit code 3` or `killed by SIGKILL`; None if that cannot be known. Waits so long for the end."""
        if self._descriptor < 0:
            return None
        info = bytearray(_INFO_BYTES)
        struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            poll.poll(wait_ms)
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, info, True)
        except OSError:
            return None
        (found,) = struct.unpack_from("Q", info)
        if not found & _PIDFD_INFO_EXIT:
            return None
        (status,) = struct.unpack_from("i", info, _EXIT_CODE_AT)
        return end_text(os.waitstatus_to_exitcode(status))

    def close(self) -> None:
        """Let go. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def end_text(code: int) -> str:
    """What an exit code says; a negative one is that of a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def stderr_path() -> str:
    """The file that this process writes its errors to; empty if it is none."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isabs(path) and os.path.isfile(path) else ""


def last_lines(path: str) -> str:
    """The last lines of a log, in one: of a crash what Python says of it, else what was printed last. May be empty."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="backslashreplace")
    except OSError:
        return ""
    crashes = list(_CRASH.finditer(text))
    lines = _told(text[crashes[-1].start() :])[: LINES_MAX + 1] if crashes else _told(text)[-LINES_MAX:]
    return " | ".join(line[:LINE_CHARACTERS_MAX] for line in lines)


def _told(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.match(line)]


def close_sockets_in_children() -> None:
    """Have processes that user code forks close the sockets that this one has now.

    The end of a process is noticed by its connections. A child that lives on would hold them open.
    """
    sockets: list[tuple[int, int]] = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # It may be closed by now.
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                sockets.append((int(name), found.st_ino))

    def close() -> None:
        for descriptor, inode in sockets:
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)

    os.register_at_fork(after_in_child=close)
