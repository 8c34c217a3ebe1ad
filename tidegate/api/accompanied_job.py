"""`AccompaniedJob`: a job as its driver sees it, with its companions.

Rules:

- Companions start once the job was submitted, and `wait` returns when job and companions are over. One that cannot
  start cancels the job.
- They hear of the end of the job, however that ends and whoever asks, or nobody does.
- A companion that fails cancels the job, whose checkpoints stay; the job has failed then, for the companion's reason.
- Whoever cancels the job, or closes its environment, stops its companions. They leave within a bounded time. What has
  not been done then makes a job whose tasks have finished a cancelled one.
- The next job of the environment may go on with what this one had. So one that was cancelled here is over before the
  next one is submitted, and companions that are leaving have left before those of the next one start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tidegate.actors.coordinator.state.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.runtimes.companions import Companion
from tidegate.actors.runtimes.running_job import Answer, JobProgress, RunningJob, SnapshotRequest, TaskProcessInfo
from tidegate.storage.errors import JobFailedError, TidegateError

log = logging.getLogger(__name__)

CANCELLED_WAIT_S = 60.0
"""How long the next job of an environment waits for one that was cancelled."""
WATCHER_WAIT_S = 10.0
"""How long whoever closes the environment waits until this has heard that the job is over."""
_OVER = ("finished", "failed", "cancelled", "suspended")


class AccompaniedJob:
    """A running job, as its driver sees it, with what lives with it in the driver."""

    def __init__(self, alone: RunningJob, companions: Sequence[Companion]) -> None:
        self._alone = alone
        self._companions = tuple(companions)
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._cancelled = False
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._await_end, name="tidegate-companions", daemon=True)

    def start(self, before: Iterable[AccompaniedJob] = ()) -> None:
        """Start the companions after those of the jobs `before`. Where one cannot, cancel the job, and raise."""
        try:
            self._watcher.start()
            for job in before:
                job.make_way()
            for companion in self._companions:
                companion.start(self.fail)
        except BaseException:
            self.cancel()
            raise

    def await_cancelled(self) -> None:
        """Another job is asked for: if this one was cancelled, return when it is over, or after a bounded time."""
        if not self._cancelled:
            return
        if not self.over:
            log.info("a job that was cancelled is waited for, for %g s at most", CANCELLED_WAIT_S)
        try:
            if self.wait(CANCELLED_WAIT_S) is None:
                log.warning("a job that was cancelled is not over after %g s", CANCELLED_WAIT_S)
        except JobFailedError as error:
            log.warning("nobody knows whether a job that was cancelled is over: %s", error)

    def make_way(self) -> None:
        """Another job is to start: if this one is over, return when the companions that are leaving have left."""
        end = self._alone.wait(0.0)
        if end is not None:
            self._tell(end.status)
        for companion in self._companions:
            if companion.stopping:
                companion.wait(None)

    @property
    def over(self) -> bool:
        """Whether job and companions are over, as far as is known without asking."""
        return self._ended.is_set() and all(companion.wait(0.0) for companion in self._companions)

    def fail(self, reason: str) -> None:
        """A companion cannot go on: so the job cannot. What failed first counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
        try:
            self.cancel()
        except TidegateError as error:
            log.warning("the job goes on without what has failed beside it (%s): %s", reason, error)

    def progress(self) -> JobProgress:
        """The job now; it runs until its companions are over."""
        progress = self._alone.progress()
        if progress.status not in _OVER:
            return progress
        if not all(companion.wait(0.0) for companion in self._companions):
            return replace(progress, status="running", reason=None)
        return self._as_a_whole(progress)

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """Wait for the end of the job and of its companions; None when the time is over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        progress = self._alone.wait(timeout_s)
        if progress is None:
            return None
        for companion in self._companions:
            if not companion.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return None
        return self._as_a_whole(progress)

    def cancel(self) -> None:
        """Cancel the job, and let the companions go."""
        self._cancelled = True
        try:
            self._alone.cancel()
        finally:
            for companion in self._companions:
                companion.stop()

    def close(self) -> None:
        """The environment is closed, and has ended the job: let the companions go, and wait for them."""
        for companion in self._companions:
            companion.stop()
        for companion in self._companions:
            companion.wait(None)
        if self._watcher.ident is not None:
            self._watcher.join(WATCHER_WAIT_S)

    def tasks(self) -> tuple[TaskProcessInfo, ...]:
        """Those of the job."""
        return self._alone.tasks()

    def statistics(self) -> CheckpointStatistics:
        """Those of the job."""
        return self._alone.statistics()

    def request(self, wanted: SnapshotRequest, timeout_s: float) -> Answer:
        """Ask the job."""
        return self._alone.request(wanted, timeout_s)

    def _await_end(self) -> None:
        try:
            end = self._alone.wait(None)
        except BaseException as error:  # noqa: BLE001 (companions of a job of which nothing is known may not go on)
            if not all(companion.stopping for companion in self._companions):
                self.fail(f"nothing is known of the job: {error_text(error)}")
        else:
            assert end is not None, "the wait has no end of its own"
            self._tell(end.status)

    def _tell(self, status: str) -> None:
        self._ended.set()
        for companion in self._companions:
            companion.job_ended(status)

    def _as_a_whole(self, progress: JobProgress) -> JobProgress:
        if self._failure is None:
            complete = progress.status == "failed" or all(companion.complete for companion in self._companions)
            return progress if complete else replace(progress, status="cancelled")
        reason = self._failure if progress.status != "failed" else f"{progress.reason}; and {self._failure}"
        return replace(progress, status="failed", reason=reason)
