"""`DriverService`: a service in the driver that runs as long as a job, for example a service that feeds a source.

Rules:

- It works on its own threads. After `stop` it ends soon, and drops unfinished work.
- A thread that does not end within a limited time is abandoned with a warning, so no caller waits forever.

`api/job_with_services.py` decides how the end of a service affects the job, and how the end of the job affects
services.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

log = logging.getLogger(__name__)


class DriverService(ABC):
    """A service in the driver that runs as long as a job. Thread-safe."""

    def __init__(self, text: str, leave_s: float) -> None:
        """Creates the service. `text` is its name in errors. `leave_s` is the time limit, in seconds, for its
        threads after `stop`.
        """
        self.text = text
        self._leave_s = leave_s
        self._leave_by: float | None = None
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._threads = 0
        self._left_behind = False

    @abstractmethod
    def start(self, fail: Callable[[str], None]) -> None:
        """Starts the service after the job was submitted. If the service cannot continue, it calls `fail` to end
        the job for a reason.
        """

    @abstractmethod
    def job_ended(self, status: str) -> None:
        """Notifies the service that the job has ended, with the job's status. The service ends now, or when its work is
        done.

        May be called several times.
        """

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Returns whether the service has done all of its work. Called after the service has ended."""

    def stop(self) -> None:
        """Makes the service end soon, and returns at once. May be called several times, and before `start`."""
        with self._changed:
            if self._leave_by is None:
                self._leave_by = time.monotonic() + self._leave_s
            self._stopping.set()
            self._changed.notify_all()

    @property
    def stopping(self) -> bool:
        """Returns whether `stop` was called."""
        return self._stopping.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until the service has ended or was abandoned. Returns False if `timeout_s` passes first. No
        timeout if None.
        """
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
            log.warning("%s has not ended within %g s and is abandoned", self.text, self._leave_s)
        return True

    def _begin(self, name: str, action: Callable[[], None]) -> None:
        """Starts a thread of the service that runs `action`."""

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
