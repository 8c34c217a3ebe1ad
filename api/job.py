"""A job that was executed, as the driver script sees it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Any

from tidegate.actors.runtimes.context import OpenStore
from tidegate.actors.runtimes.job import JobProgress, RunningJob, TaskProcessInfo
from tidegate.recovery import CheckpointSummary, list_checkpoints
from tidegate.storage.errors import JobFailedError
from tidegate.storage.event_log import EventLog
from tidegate.storage.filesystem import open_store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.units import parse_duration_ms


class Job:
    """Handle of a job. It goes on running when the handle is dropped, until its environment is closed."""

    def __init__(
        self, running: RunningJob, job_id: JobId, name: str, root: str, open_store: OpenStore = open_store
    ) -> None:
        self._running = running
        self._open_store = open_store
        self.job_id = job_id
        self.name = name
        self.root = root
        """Where its checkpoints rest."""

    def status(self) -> str:
        """running, restarting, finished, failed or cancelled."""
        return self.progress().status

    def progress(self) -> JobProgress:
        """Status, attempts, checkpoints and rows, at a glance."""
        return self._running.progress()

    def wait(self, timeout: str | timedelta | int | None = None) -> str:
        """Wait until the job is over; returns finished or cancelled.

        Raises JobFailedError with the reason if the job failed, TimeoutError if `timeout` passes first.
        """
        timeout_s = None if timeout is None else parse_duration_ms(timeout, setting="wait(timeout)") / 1000
        progress = self._running.wait(timeout_s)
        if progress is None:
            raise TimeoutError(f"job {self.name!r} is still {self.status()} after {timeout}")
        if progress.status == "failed":
            raise JobFailedError(
                f"job {self.name!r} failed: {progress.reason}. Its checkpoints are under {self.root}; execute it again "
                'with restore="latest" to go on from the newest one'
            )
        return progress.status

    def cancel(self) -> None:
        """Cancel the job: its tasks stop, what is committed stays, its newest checkpoint is retained."""
        self._running.cancel()

    def trigger_checkpoint(self, timeout: str | timedelta | int = "10min") -> str:
        """Take a checkpoint now; returns its path. CheckpointError if it fails, TimeoutError if it takes longer."""
        timeout_s = parse_duration_ms(timeout, setting="trigger_checkpoint(timeout)") / 1000
        checkpoint_id: CheckpointId = self._running.trigger_checkpoint(timeout_s)
        return f"{self.root}/{self.job_id}/chk-{checkpoint_id}"

    def checkpoints(self) -> list[CheckpointSummary]:
        """Completed, retained checkpoints of this job, oldest first."""
        return [
            c for c in list_checkpoints(self.root, self.name, open_store=self._open_store) if c.job_id == self.job_id
        ]

    def processes(self) -> tuple[TaskProcessInfo, ...]:
        """Which process runs each task: actor name, pid, node. Empty where all tasks run in the driver's process."""
        return self._running.tasks()

    def metrics(self) -> dict[str, Any]:
        """The progress as a dict."""
        return asdict(self.progress())

    def events(self) -> list[Any]:
        """Every event that the coordinator has decided by, oldest first, as far as the log reaches back."""
        log = EventLog(self._open_store(self.root), self.job_id)
        indices = log.indices()
        return [event for entry in log.entries(indices[0] if indices else 0) for event in entry.events]

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.job_id!r})"
