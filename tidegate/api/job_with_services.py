"""`JobWithServices` combines a job and its services in the driver, so that the driver can use them as one job.

A service runs in the driver as long as the job does. Examples are the feed of a streaming DataFrame and the calls of
`for_each_checkpoint`. `StreamEnvironment.execute` makes a `JobWithServices` if a job has any services. Rules:

- Services start once the job is submitted. If one cannot start, the job is cancelled.
- `wait` returns when the job and its services are over.
- Services are notified when the job has ended, for whatever reason, even if no caller waits for the job.
- If a service fails, the job is cancelled. Its checkpoints are kept, and the job counts as failed with the service's
  reason.
- Cancelling the job or closing its environment stops the services. They end within a bounded time. If they have not
  completed their work, a job whose tasks have finished counts as cancelled.
- The next job of the environment may continue from the state and tables of this job. A cancelled job is therefore over
  before the next job is submitted, and its services have ended before the services of the next job start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.runtimes.driver_services import DriverService
from tidegate.actors.runtimes.running_job import Answer, JobProgress, RunningJob, SnapshotRequest, TaskProcessInfo
from tidegate.actors.runtimes.task_metrics import VertexMetrics
from tidegate.protocol.failures import error_text
from tidegate.storage.errors import JobFailedError, TidegateError

log = logging.getLogger(__name__)

CANCELLED_WAIT_S = 60.0
"""How many seconds the next job of an environment waits for a job that was cancelled."""
WATCHER_WAIT_S = 10.0
"""How many seconds `close` waits for the thread that watches for the end of the job."""
_OVER = ("finished", "failed", "cancelled", "suspended")


class JobWithServices:
    """A running job with its services. Has the methods of a `RunningJob`."""

    def __init__(self, alone: RunningJob, services: Sequence[DriverService]) -> None:
        self._alone = alone
        self.services = tuple(services)
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._cancelled = False
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._await_end, name="tidegate-driver-services", daemon=True)

    def start(self, before: Iterable[JobWithServices] = ()) -> None:
        """Starts the services of the job, after the services of the earlier jobs `before` have ended.

        If a service cannot start, the job is cancelled and the error is raised.
        """
        try:
            self._watcher.start()
            for job in before:
                job.make_way()
            for service in self.services:
                service.start(self.fail)
        except BaseException:
            self.cancel()
            raise

    def await_cancelled(self) -> None:
        """Waits up to `CANCELLED_WAIT_S` for the end of this job, if it was cancelled.

        Called before the next job starts.
        """
        if not self._cancelled:
            return
        if not self.over:
            log.info("waiting up to %g s for the end of a cancelled job", CANCELLED_WAIT_S)
        try:
            if self.wait(CANCELLED_WAIT_S) is None:
                log.warning("a cancelled job is not over after %g s", CANCELLED_WAIT_S)
        except JobFailedError as error:
            log.warning("cannot determine whether a cancelled job is over: %s", error)

    def make_way(self) -> None:
        """Waits for services of this job that are stopping, and notifies them if the job is over. Called before the
        next job of the environment starts.
        """
        end = self._alone.wait(0.0)
        if end is not None:
            self._notify(end.status)
        for service in self.services:
            if service.stopping:
                service.wait(None)

    @property
    def over(self) -> bool:
        """Returns True if the job and its services have ended, as far as this process has been notified."""
        return self._ended.is_set() and all(service.wait(0.0) for service in self.services)

    def fail(self, reason: str) -> None:
        """Cancels the job because a service has failed for the `reason`. Only the first failure is reported."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
        try:
            self.cancel()
        except TidegateError as error:
            log.warning(
                "the job continues without its failed service (%s), because it cannot be cancelled: %s", reason, error
            )

    def progress(self) -> JobProgress:
        """Returns the current progress of the job. Its status is running until its services have ended."""
        progress = self._alone.progress()
        if progress.status not in _OVER:
            return progress
        if not all(service.wait(0.0) for service in self.services):
            return replace(progress, status="running", reason=None)
        return self._as_a_whole(progress)

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """Waits for the end of the job and of its services, and returns the final progress.

        None if the timeout passes first.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        progress = self._alone.wait(timeout_s)
        if progress is None:
            return None
        for service in self.services:
            if not service.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return None
        return self._as_a_whole(progress)

    def cancel(self) -> None:
        """Cancels the job, and stops the services."""
        self._cancelled = True
        try:
            self._alone.cancel()
        finally:
            for service in self.services:
                service.stop()

    def close(self) -> None:
        """Stops the services and waits for their end. The environment has ended the job before."""
        for service in self.services:
            service.stop()
        for service in self.services:
            service.wait(None)
        if self._watcher.ident is not None:
            self._watcher.join(WATCHER_WAIT_S)

    def tasks(self) -> tuple[TaskProcessInfo, ...]:
        """Returns the process of each task of the job."""
        return self._alone.tasks()

    def vertices(self) -> tuple[VertexMetrics, ...]:
        """Returns the metrics of each vertex of the job."""
        return self._alone.vertices()

    def statistics(self) -> CheckpointStatistics:
        """Returns the checkpoint statistics of the job."""
        return self._alone.statistics()

    def request(self, wanted: SnapshotRequest, timeout_s: float) -> Answer:
        """Requests a checkpoint or savepoint from the job."""
        return self._alone.request(wanted, timeout_s)

    def _await_end(self) -> None:
        try:
            end = self._alone.wait(None)
        except BaseException as error:  # noqa: BLE001 (services must not continue if the job cannot be observed)
            if not all(service.stopping for service in self.services):
                self.fail(f"the job cannot be observed: {error_text(error)}")
        else:
            assert end is not None, "the wait has no end of its own"
            self._notify(end.status)

    def _notify(self, status: str) -> None:
        self._ended.set()
        for service in self.services:
            service.job_ended(status)

    def _as_a_whole(self, progress: JobProgress) -> JobProgress:
        if self._failure is None:
            complete = progress.status == "failed" or all(service.complete for service in self.services)
            return progress if complete else replace(progress, status="cancelled")
        reason = self._failure if progress.status != "failed" else f"{progress.reason}; and {self._failure}"
        whole = progress.reason_with_values and f"{progress.reason_with_values}; and {self._failure}"
        return replace(progress, status="failed", reason=reason, reason_with_values=whole)
