"""`Companion`: something in the driver that lives with a job; `AccompaniedJob`: the job with its companions.

Rules:

- Companions start once the job was submitted, and `wait` returns when job and companions are over.
- A companion that fails cancels the job, whose checkpoints stay; the job has failed then, for the companion's reason.
- Whoever cancels the job, or closes its environment, stops its companions. They leave within a bounded time. What has
  not been done then makes a job whose tasks have finished a cancelled one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from tidegate.actors.coordinator.state.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.runtimes.running_job import Answer, JobProgress, RunningJob, SnapshotRequest, TaskProcessInfo

_OVER = ("finished", "failed", "cancelled", "suspended")


class Companion(Protocol):
    """Something that lives with a job. Thread-safe."""

    def start(self, job: AccompaniedJob) -> None:
        """Begin, on threads of its own. `job.alone` is the job without companions; `job.fail` ends it."""
        ...

    def stop(self) -> None:
        """Leave soon, with what has not been done left undone. It may be called again, and before `start`."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it is over; waits for that. It must be soon after `stop`, whatever it is doing."""
        ...

    @property
    def complete(self) -> bool:
        """Whether it has left nothing undone, once it is over."""
        ...


class AccompaniedJob:
    """A running job, as its driver sees it, with what lives with it in the driver."""

    def __init__(self, alone: RunningJob, companions: Sequence[Companion]) -> None:
        self.alone = alone
        self._companions = tuple(companions)
        self._lock = threading.Lock()
        self._failure: str | None = None

    def start(self) -> None:
        """Start the companions. Where one cannot, the job is cancelled, and the error raised."""
        try:
            for companion in self._companions:
                companion.start(self)
        except BaseException:
            self.cancel()
            raise

    def fail(self, reason: str) -> None:
        """A companion cannot go on: so the job cannot. What failed first counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
        self.cancel()

    def progress(self) -> JobProgress:
        """The job now; it runs until its companions are over."""
        progress = self.alone.progress()
        if progress.status not in _OVER:
            return progress
        if not all(companion.wait(0.0) for companion in self._companions):
            return replace(progress, status="running", reason=None)
        return self._ended(progress)

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """Wait for the end of the job and of its companions; None when the time is over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        progress = self.alone.wait(timeout_s)
        if progress is None:
            return None
        for companion in self._companions:
            if not companion.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return None
        return self._ended(progress)

    def cancel(self) -> None:
        """Cancel the job, and let the companions go."""
        try:
            self.alone.cancel()
        finally:
            for companion in self._companions:
                companion.stop()

    def close(self) -> None:
        """The environment is closed, and has ended the job: let the companions go, and wait for them."""
        for companion in self._companions:
            companion.stop()
        for companion in self._companions:
            companion.wait(None)

    def tasks(self) -> tuple[TaskProcessInfo, ...]:
        """Those of the job."""
        return self.alone.tasks()

    def statistics(self) -> CheckpointStatistics:
        """Those of the job."""
        return self.alone.statistics()

    def request(self, wanted: SnapshotRequest, timeout_s: float) -> Answer:
        """Ask the job."""
        return self.alone.request(wanted, timeout_s)

    def _ended(self, progress: JobProgress) -> JobProgress:
        if self._failure is None:
            complete = progress.status == "failed" or all(companion.complete for companion in self._companions)
            return progress if complete else replace(progress, status="cancelled")
        reason = self._failure if progress.status != "failed" else f"{progress.reason}; and {self._failure}"
        return replace(progress, status="failed", reason=reason)
