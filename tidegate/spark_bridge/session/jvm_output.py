"""Filters what the JVM of Spark's driver prints: drops notices that nobody can act on (`worker_output.py` lists them).

PySpark starts that JVM with this process's standard output and error. No setting silences most of what it prints at
start-up. The launcher mentions `JDK_JAVA_OPTIONS`, RayDP a log4j file that never existed, Hadoop its native library,
and Ray's native code a client without a cluster. So PySpark gives the JVM pipes, and threads pass on all other lines.
Rules:
* Only a line that matches the list as a whole is dropped. Everything else passes unchanged.
* The JVM never waits for a reader. Lines are read until the JVM closes its end, even if they cannot be printed any
  more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from pyspark import context as spark_context

from tidegate.actors.ray.driver.worker_output import is_notice

_LINE_BYTES_MAX = 64 * 1024
_STDOUT, _STDERR = 1, 2


def filter_jvm_output() -> None:
    """Let each JVM that PySpark starts from now on print through the filter, for all its life. Idempotent."""
    launch: Callable[..., Any] = spark_context.launch_gateway  # type: ignore[attr-defined]
    if hasattr(launch, "unfiltered"):
        return

    def launch_filtered(conf: Any = None, popen_kwargs: dict[str, Any] | None = None) -> Any:
        pipes = {"stdout": _pipe_to(_STDOUT), "stderr": _pipe_to(_STDERR)}
        try:
            return launch(conf, {**pipes, **(popen_kwargs or {})})
        finally:
            # The JVM has its own copies. Once ours are closed, the pipes end when the JVM ends.
            for write_end in pipes.values():
                os.close(write_end)

    launch_filtered.unfiltered = launch  # type: ignore[attr-defined]
    spark_context.launch_gateway = launch_filtered  # type: ignore[attr-defined]


def _pipe_to(target: int) -> int:
    """The write end of a new pipe. A thread passes its lines on to a file descriptor."""
    read_end, write_end = os.pipe()
    threading.Thread(target=hand_on, args=(read_end, target), name="tidegate-jvm-output", daemon=True).start()
    return write_end


def hand_on(read_end: int, target: int) -> None:
    """Pass on the lines of a pipe, without notices, until it is closed. Then close our end."""
    open_target = True
    with os.fdopen(read_end, "rb") as pipe:
        while line := pipe.readline(_LINE_BYTES_MAX):
            if open_target and not is_notice(line.decode(errors="replace").rstrip("\r\n")):
                open_target = _written(target, line)


def _written(target: int, line: bytes) -> bool:
    """Print a line. False if nobody reads it any more."""
    try:
        while line:
            line = line[os.write(target, line) :]
    except OSError:
        return False
    return True
