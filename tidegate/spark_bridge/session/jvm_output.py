"""Filters what the JVM of Spark's driver prints: lines that nobody can act on are left out.

PySpark starts that JVM with the standard output and error of this process. Most of what it prints while it starts is
switched off by no setting: the launcher tells of `JDK_JAVA_OPTIONS`, RayDP of a log4j file that it never had, Ray's
native code of a client without a cluster. So the JVM gets pipes, and threads hand on the lines that are not listed.

Rules kept here:

* A line is left out only if it is one of those listed, whole. Whatever else the JVM says goes through unchanged.
* The JVM never waits for a reader: lines are read as they come, until the JVM has closed its end, also when there is
  nobody left to print them for.
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
            # Ours: RayDP's JVMs need the options, and the launcher always tells of them.
            r"NOTE: Picked up JDK_JAVA_OPTIONS: .*",
            # A machine whose name means the loopback address; the session gives Spark its address.
            _STAMP + r"WARN Utils: Your hostname, .* resolves to a loopback address: .*",
            _STAMP + r"WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address",
            # Hadoop has a slower Java class for whatever its native library does.
            _STAMP + r"WARN NativeCodeLoader: Unable to load native-hadoop library for your platform\.\.\. .*",
            # RayDP names a log4j file that does not exist. Spark's own defaults hold then, and Spark says so.
            r"ERROR StatusConsoleListener Reconfiguration failed: No configuration found for .*",
            r'Setting default log level to "WARN"\.',
            r"To adjust logging level use sc\.setLogLevel\(newLevel\)\. .*",
            # Ray's native code, at INFO, before it knows its log level.
            _NATIVE_STAMP + r"gcs_client\.cc:\d+: GcsClient has no Cluster ID set, and won't fetch from GCS\.",
        )
    )
)


def is_notice(line: str) -> bool:
    """Whether a line, without its end, is one that nobody can act on."""
    return _NOTICES.fullmatch(line) is not None


@contextmanager
def filtered_jvm_output() -> Iterator[None]:
    """A JVM that PySpark starts meanwhile prints through the filter, for as long as it lives."""
    launch: Callable[..., Any] = spark_context.launch_gateway  # type: ignore[attr-defined]

    def launch_filtered(conf: Any = None, popen_kwargs: dict[str, Any] | None = None) -> Any:
        pipes = {"stdout": _pipe_to(_STDOUT), "stderr": _pipe_to(_STDERR)}
        try:
            return launch(conf, {**(popen_kwargs or {}), **pipes})
        finally:
            # The JVM has its own copies. With ours gone, its end is the end of the pipes.
            for write_end in pipes.values():
                os.close(write_end)

    spark_context.launch_gateway = launch_filtered  # type: ignore[attr-defined]
    try:
        yield
    finally:
        spark_context.launch_gateway = launch  # type: ignore[attr-defined]


def _pipe_to(target: int) -> int:
    """The end to write to of a pipe whose lines come out at a file descriptor."""
    read_end, write_end = os.pipe()
    threading.Thread(target=hand_on, args=(read_end, target), name="tidegate-jvm-output", daemon=True).start()
    return write_end


def hand_on(read_end: int, target: int) -> None:
    """Print what comes out of a pipe, but for notices, until the pipe is closed. Closes it."""
    open_target = True
    with os.fdopen(read_end, "rb") as pipe:
        while line := pipe.readline(_LINE_BYTES_MAX):
            if open_target and not is_notice(line.decode(errors="replace").rstrip("\r\n")):
                open_target = _written(target, line)


def _written(target: int, line: bytes) -> bool:
    """Print a line; False if nobody reads it any more."""
    try:
        while line:
            line = line[os.write(target, line) :]
    except OSError:
        return False
    return True
