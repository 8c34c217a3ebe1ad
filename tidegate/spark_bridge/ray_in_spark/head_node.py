"""How `ray.util.spark` starts Ray's head node beside Spark's driver, where its own way does not do.

Rules:
* Ray gives the head 20 s, always all of them, and then it must answer. Here the head is waited for until it answers,
  has ended, or the time of the caller is over: sooner on a quiet machine, in time on a busy one.
* Nodes may take their time too: so long that none of them appears is what the caller allows.
* What the head prints goes to a file in its folder, not to the driver's output. If it ends, the last lines are in the
  error.
* The dashboard listens where the driver does, not on all addresses.

These are no settings of Ray, so names in its module are replaced while a cluster starts: none that the tasks use in
which the nodes run, because Spark sends those along. Where a version of Ray has no such name, it goes its own way.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ray._private import ray_constants
from ray.util.spark import cluster_init, utils

_POLL_S = 0.1
_LINES_MAX = 100
_FOLDER = "--temp-dir="
_LOGGERS = ("ray.util.spark", "ray._private.worker")


@contextmanager
def head_waited_for(dashboard_host: str, timeout_s: float) -> Iterator[None]:
    """Within this context `setup_ray_cluster` starts the head by these rules, and says nothing but errors."""
    start = _HeadStart(timeout_s, utils.is_port_in_use)
    with ExitStack() as stack:
        for owner, name, value in (
            (cluster_init, "_RAY_HEAD_STARTUP_TIMEOUT", 0),
            (cluster_init, "_RAY_CONNECT_CLUSTER_POLL_PROGRESS_TIMEOUT", timeout_s),
            (cluster_init, "_start_ray_head_node", start.begin),
            (cluster_init, "is_port_in_use", start.is_port_in_use),
            (cluster_init, "get_all_interfaces_ip", lambda: dashboard_host),
            (ray_constants, "RAY_LOG_TO_DRIVER", False),
        ):
            stack.enter_context(_replaced(owner, name, value))
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


class _HeadStart:
    """One start: the process of the head, and the file with what it prints."""

    def __init__(self, timeout_s: float, answers: Callable[[str, int], bool]) -> None:
        self._answers = answers
        self._deadline = time.monotonic() + timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def begin(
        self, command: Sequence[str], synchronous: bool, extra_env: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], _Tail]:
        """In place of Ray's own: start the process, which prints into a file. Ctrl-C does not reach it."""
        assert not synchronous, "Ray does not wait for the end of its head"
        folder = next(word.removeprefix(_FOLDER) for word in command if word.startswith(_FOLDER))
        printed = Path(folder) / "head.out"
        with printed.open("wb") as output:
            self._process = subprocess.Popen(
                command, env={**os.environ, **extra_env}, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        return self._process, _Tail(printed)

    def is_port_in_use(self, host: str, port: int) -> bool:
        """In place of Ray's own. Once the head was started, waits for it."""
        while not self._answers(host, port):
            if self._process is None or self._process.poll() is not None or time.monotonic() > self._deadline:
                return False
            time.sleep(_POLL_S)
        return True


class _Tail:
    """The last lines of a file, for Ray's error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[str]:
        if self._path.exists():
            yield from self._path.read_text(errors="replace").splitlines(keepends=True)[-_LINES_MAX:]


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
