"""Sets up the process of each Ray actor: its log, and its end at SIGTERM.

Rules:

- The log is standard error, which Ray writes to a file and shows in the driver. It is written through a duplicated
  descriptor, because code of users may close `sys.stderr`.
- SIGTERM ends the process at once. Ray's own handler raises SystemExit in the main thread, and Ray then waits for every
  thread of the actor's concurrency groups. Calls that stay pending on purpose (`live`) never return, so such a process
  would neither accept calls nor end. Nothing is saved: rows after the last checkpoint are processed again.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

import ray
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME

from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.log_lines import log_to, set_levels


class WorkerLog:
    """Sets up the log of a worker's process: warnings and errors, unless the job's settings set another level."""

    def __init__(self, context: JobContext) -> None:
        _log(context, "WARNING", {"process": "worker", "job": context.job_name, "job_id": context.job_id})
        self._outputs = (_own(1), _own(2))

    def is_shown_as(self, name: str) -> None:
        """Makes Ray show `name` in the driver before each line that this process prints from now on.

        Ray reads the name from a marked line in its log files. Ray itself writes such a line when an actor has started.
        """
        for output in self._outputs:
            output.write(f"{LOG_PREFIX_ACTOR_NAME}{name}\n")


def log_of_coordinator(context: JobContext) -> None:
    """Sets up the log of a coordinator's process. Successful checkpoints are logged only if the job's settings
    request it.
    """
    # Imported here, because workers must not load the modules of coordinators.
    from tidegate.actors.drivers.coordinator_driver import checkpoints_log

    _log(context, "INFO", {"process": "coordinator", "job": context.job_name, "job_id": context.job_id})
    if context.log.level is None and checkpoints_log.name not in context.log.levels:
        checkpoints_log.setLevel(logging.WARNING)


def _log(context: JobContext, level: str, known: Mapping[str, object]) -> None:
    if _ray_logs_lines():
        set_levels(context.log, level)
    else:
        log_to(_own(2), context.log, level, known)


def _ray_logs_lines() -> bool:
    """Returns whether the driver has given `ray.init` a `logging_config`. Ray then writes the lines of all
    loggers itself.
    """
    worker: Any = ray._private.worker.global_worker
    return worker.job_logging_config is not None


@functools.cache
def _own(descriptor: int) -> TextIO:
    return os.fdopen(os.dup(descriptor), "w", buffering=1, encoding="utf-8", errors="backslashreplace")


LAST_LINE = b"SIGTERM: the process ends as requested\n"
"""The last line that the process prints at SIGTERM. It shows why the process ended, which Linux before 6.15 does
not report.
"""


def end_at_sigterm() -> None:
    """Makes SIGTERM end this process. Does nothing outside the main thread, where no handler can be set."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):  # The standard error may be closed.
        os.write(2, LAST_LINE)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
