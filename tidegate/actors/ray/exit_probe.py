"""Finds out how a process has ended: its exit code, its last lines of output, and Ray's report in plain words.

Rules:

- Linux reports the exit code of a process to its parent, which is Ray. Since Linux 6.15 another process may read it
  too, through a pidfd that it opened before the end. On older kernels a crash is recognized by its output, and any
  other end is reported as unknown.
- Ray's texts are shortened to the actor and the cause, without ids of owners and without guesses.
- No function here raises.
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

from ray.exceptions import ActorUnavailableError, GetTimeoutError

from tidegate.protocol.failures import bounded_text, error_text

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
"""Matches lines of the output that Ray and Python print for their own purposes."""
_CRASH = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)


class ExitProbe:
    """Holds a pidfd of a process on this node, through which its exit code can be read after its end."""

    def __init__(self, pid: int) -> None:
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.pidfd_open(pid)

    def end(self, wait_ms: int) -> str | None:
        """Returns `exit code 3` or `killed by SIGKILL`, or None if unknown. Waits up to `wait_ms` for the end of
        the process.
        """
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
        """Closes the file descriptor of the process. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def end_text(code: int) -> str:
    """Returns a text for an exit code. A negative one is the number of a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def stderr_path() -> str:
    """Returns the path of the file to which this process writes standard error, or "" if it is not a file."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isabs(path) and os.path.isfile(path) else ""


def last_lines(path: str) -> str:
    """Returns the end of a log file, joined in one line: Python's report of a crash, else the last lines. May be
    empty.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="backslashreplace")
    except OSError:
        return ""
    crashes = list(_CRASH.finditer(text))
    lines = (
        _relevant_lines(text[crashes[-1].start() :])[: LINES_MAX + 1] if crashes else _relevant_lines(text)[-LINES_MAX:]
    )
    return " | ".join(line[:LINE_CHARACTERS_MAX] for line in lines)


def _relevant_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.match(line)]


def close_sockets_in_children() -> None:
    """Makes processes that are forked from this one close the sockets that it has now.

    Other processes notice the end of this process by its connections, which a forked child would keep open.
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


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NODE_DIED = re.compile(r"because its node has died\. Node Id: (\w+)(.*)", re.DOTALL)
_NEVER_RAN = "The actor never ran"
_INIT = "raised in its creation task"
_OWNER = "because its owner has died"
_NODE_MEMORY = re.compile(r"Memory on the node \(IP: [^,)]*, ID: (\w+)\)[^/]* was ([\d.]+ ?GB)[^/]*/ ([\d.]+ ?GB)")
_LIMIT = re.compile(r"exceeded threshold of \d+B \(([\d.]+)%")
_KILLED = re.compile(
    r"Selected to kill: \(Actor[^\n]*task name=([^\n]*?):\w+\.__init__[^\n]*actual memory used=([\d.]+)GB"
)
NODE_CHARACTERS = 8
_GUESSES = (" Some common causes include", " There are some potential root causes")


def death_of(error: BaseException) -> str:
    """Returns one line about how an actor has ended, according to the error that Ray raised."""
    return bounded_text(_death_of(error))


def memory_death(text: str) -> str | None:
    """Returns a line about a process that Ray's memory monitor has killed, or None for a text of Ray about any other
    end.

    The line contains the memory use of the node, and the largest of the killed processes.
    """
    node = _NODE_MEMORY.search(text)
    if node is None:
        return None
    limit = _LIMIT.search(text)
    above = f", above the threshold of {float(limit[1]):g} %" if limit is not None else ""
    killed = [(float(used_gb), name) for name, used_gb in _KILLED.findall(text)]
    largest = max(killed, default=None)
    which = "" if largest is None else f"; the largest process that it killed was {largest[1]} with {largest[0]:g} GB"
    return (
        f"killed by Ray's memory monitor, because node {node[1][:NODE_CHARACTERS]} had {node[2]} of {node[3]} of "
        f"memory in use{above}{which} (lower the parallelism or the memory of the functions, add memory or nodes, or "
        "raise RAY_memory_usage_threshold)"
    )


def _death_of(error: BaseException) -> str:
    text = _COLOUR.sub("", str(error))
    if (memory := memory_death(text)) is not None:
        return memory
    if (node := _NODE_DIED.search(text)) is not None:
        why = " ".join(node[2].partition(_NEVER_RAN)[0].split())
        return f"its node {node[1]} was lost" + (f" ({why})" if why else "")
    if isinstance(error, GetTimeoutError):
        return "Ray does not report that its process has ended, and it answers no call: it hangs or is stopped"
    if isinstance(error, ActorUnavailableError):
        return "the connection to it broke, as it does when its node is lost"
    if _INIT in text:
        lines = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
        return f"it could not start: {lines[-1]}"
    if _OWNER in text:
        return "the process that it belonged to has ended"
    line = " ".join(error_text(error).split())
    line = line.partition("Worker exit detail: ")[2] or line
    for guesses in _GUESSES:
        line = line.partition(guesses)[0]
    return line.rstrip(".")


def went_with_its_node(error: BaseException | None) -> bool:
    """Returns whether an actor may have ended because its node was lost, which is not a failure of the actor."""
    return isinstance(error, ActorUnavailableError) or (error is not None and "its node has died" in str(error))
