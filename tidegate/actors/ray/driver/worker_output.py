"""Filters the output of Ray's processes in the driver's terminal: drops lines that nobody can act on.

Ray prints there all that its processes print: the output of users' functions, and errors, but also notices of Java and
of Ray itself, and each line of a coordinator's log. Every process that connects to Ray by tidegate filters it. Rules:

- Only whole lines are dropped: the notices below, and lines of tidegate's own log below WARNING unless the program has
  asked for them. All of them are in Ray's log files.
- Two of Ray's warnings are dropped as well. One reports a frame or credit that Ray sends again after a connection
  broke. Frames are numbered, and the coordinator reports the failure. The other counts worker processes against the
  CPUs of the node. A job has a process for each task, whatever the CPUs, and its submission checks the memory.
- Ray itself prints the remaining lines, after the filter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ray._private import worker as ray_worker

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
_NAME = "tidegate_filter"
_QUIET = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO) tidegate\..*")
_WARNINGS_OF_RAY = re.compile(
    r"Task (\S*\b)?WorkerProcess\.(frame|credit)\b.* failed\. There are infinite retries remaining, .*"
    r"|WARNING: \d+ \w+ worker processes have been started on node: .*",
    re.DOTALL,
)


def is_notice(line: str) -> bool:
    """Whether a line (without its end) is on the list of lines to drop."""
    return _NOTICES.fullmatch(line) is not None


def is_dropped(line: str, show_log: bool) -> bool:
    """Whether a line of a process is not shown. `show_log`: the program has asked for tidegate's own lines."""
    return (
        is_notice(line)
        or _WARNINGS_OF_RAY.fullmatch(line) is not None
        or (not show_log and _QUIET.fullmatch(line) is not None)
    )


def filter_worker_output(show_log: bool) -> None:
    """Filter what Ray prints in this process from now on. A second call replaces the first.

    `show_log`: print the lines of tidegate's processes, whatever their level.
    """
    # Ray has no public word for it.
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def drop(batch: dict[str, Any]) -> None:
        batch["lines"] = [line for line in batch["lines"] if not is_dropped(line, show_log)]

    dispatcher.remove_handler(_NAME)
    first: tuple[str, Callable[[dict[str, Any]], None]] = (_NAME, drop)
    with dispatcher._lock:
        dispatcher.handlers = [first, *dispatcher.handlers]
    _filter_errors(drop)


def _filter_errors(drop: Callable[[dict[str, Any]], None]) -> None:
    """Filter what Ray's thread for errors prints, which goes past the handlers."""
    ray: Any = ray_worker
    show = getattr(ray.print_to_stdstream, "unfiltered", ray.print_to_stdstream)

    def show_filtered(batch: dict[str, Any], ignore_prefix: bool) -> None:
        drop(batch)
        if batch["lines"]:
            show(batch, ignore_prefix)

    show_filtered.unfiltered = show  # type: ignore[attr-defined]
    ray.print_to_stdstream = show_filtered
