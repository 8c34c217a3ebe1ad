"""`DriverService`: a service in the driver that lives with a job, such as one that feeds a source of it.

Rules:

- It works on threads of its own. After `stop` it ends soon, and leaves unfinished work undone.
- A thread that does not end within a bounded time is left behind with a warning: nothing waits for ever.

`api/accompanied_job.py` decides what the end of a service means for the job, and the other way round.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

log = logging.getLogger(__name__)


class DriverService(ABC):
    """Something that lives with a job. Thread-safe."""

    def __init__(self, text: str, leave_s: float) -> None:
        """`text` is what it is called in errors; `leave_s`: how long its threads are waited for after `stop`."""
        self.text = text
        self._leave_s = leave_s
        self._leave_by: float | None = None
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._threads = 0
        self._left_behind = False

    @abstractmethod
    def start(self, fail: Callable[[str], None]) -> None:
        """The job was submitted: begin. `fail` ends the job, for a reason, where this cannot go on."""

    @abstractmethod
    def job_ended(self, status: str) -> None:
        """The job is over: leave, now or when everything is done. It may be told more than once."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether it has left nothing undone, once it is over."""

    def stop(self) -> None:
        """Leave soon; returns at once. It may be called again, and before `start`."""
        with self._changed:
            if self._leave_by is None:
                self._leave_by = time.monotonic() + self._leave_s
            self._stopping.set()
            self._changed.notify_all()

    @property
    def stopping(self) -> bool:
        """Whether it leaves soon, or has left."""
        return self._stopping.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it is over; waits for that."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: not self._threads or self._leave_by is not None, timeout_s):
                return False
            if not self._threads:
                return True
            assert self._leave_by is not None
            until = self._leave_by if deadline is None else min(deadline, self._leave_by)
            if self._changed.wait_for(lambda: not self._threads, max(0.0, until - time.monotonic())):
                return True
            if time.monotonic() < self._leave_by:
                return False
            told, self._left_behind = self._left_behind, True
        if not told:
            log.warning("%s has not come back within %g s: it is left behind", self.text, self._leave_s)
        return True

    def _begin(self, name: str, action: Callable[[], None]) -> None:
        """Start a thread."""

        def run() -> None:
            try:
                action()
            finally:
                with self._changed:
                    self._threads -= 1
                    self._changed.notify_all()

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._changed:
            thread.start()
            self._threads += 1
