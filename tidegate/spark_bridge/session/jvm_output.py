"""Filters what the JVM of Spark's driver prints: drops lines that nobody can act on.

PySpark starts that JVM with this process's standard output and error. No setting silences most of what it prints at
start-up. The launcher mentions `JDK_JAVA_OPTIONS`, RayDP a log4j file that never existed, and Ray's native code a
client without a cluster. So the session gives the JVM pipes, and threads pass on all lines but those listed here.
Rules:
* Only a line that matches the list as a whole is dropped. Everything else passes unchanged.
* The JVM never waits for a reader. Lines are read until the JVM closes its end, even if they cannot be printed any
  more.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import context as spark_context

_LINE_BYTES_MAX = 64 * 1024
_STDOUT, _STDERR = 1, 2

_STAMP = r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d "
_NATIVE_STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ I \d+ \d+\] "

_NOTICES = re.compile(
    "|".join(
        (
            # Our own doing: RayDP's JVMs need the options, and the launcher always mentions them.
            r"NOTE: Picked up JDK_JAVA_OPTIONS: .*",
            # On a machine whose name resolves to the loopback address. The session sets Spark's address itself.
            _STAMP + r"WARN Utils: Your hostname, .* resolves to a loopback address: .*",
            _STAMP + r"WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address",
            # Without its native library Hadoop uses slower Java classes.
            _STAMP + r"WARN NativeCodeLoader: Unable to load native-hadoop library for your platform\.\.\. .*",
            # RayDP names a log4j file that does not exist, so Spark uses its defaults and says so.
            r"ERROR StatusConsoleListener Reconfiguration failed: No configuration found for .*",
            r'Setting default log level to "WARN"\.',
            r"To adjust logging level use sc\.setLogLevel\(newLevel\)\. .*",
            # Ray's native code logs this at INFO, before it knows its log level.
            _NATIVE_STAMP + r"gcs_client\.cc:\d+: GcsClient has no Cluster ID set, and won't fetch from GCS\.",
        )
    )
)


def is_notice(line: str) -> bool:
    """Whether a line (without its end) is on the list of lines to drop."""
    return _NOTICES.fullmatch(line) is not None


@contextmanager
def filtered_jvm_output() -> Iterator[None]:
    """A JVM that PySpark starts within this context prints through the filter, for all its life."""
    launch: Callable[..., Any] = spark_context.launch_gateway  # type: ignore[attr-defined]

    def launch_filtered(conf: Any = None, popen_kwargs: dict[str, Any] | None = None) -> Any:
        pipes = {"stdout": _pipe_to(_STDOUT), "stderr": _pipe_to(_STDERR)}
        try:
            return launch(conf, {**(popen_kwargs or {}), **pipes})
        finally:
            # The JVM has its own copies. Once ours are closed, the pipes end when the JVM ends.
            for write_end in pipes.values():
                os.close(write_end)

    spark_context.launch_gateway = launch_filtered  # type: ignore[attr-defined]
    try:
        yield
    finally:
        spark_context.launch_gateway = launch  # type: ignore[attr-defined]


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
