"""Metrics of a job for Ray's metrics agent (Prometheus). Written about once a second, never per batch.

Rows are counted over all attempts of a process; a counter only ever grows.
"""

from __future__ import annotations

from functools import cache

from ray.util.metrics import Counter, Gauge, Histogram

from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.protocol.state_origin import StateOrigin
from tidegate.actors.runtimes.running_job import JobProgress
from tidegate.storage.ids import CheckpointId

_TASK_TAGS = ("job", "vertex", "subtask")
_RESTORE_TAGS = (*_TASK_TAGS, "origin")
_JOB_TAGS = ("job",)
_DURATION_BOUNDARIES_MS = [5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 10e3, 60e3]


@cache
def _counter(name: str, description: str, tags: tuple[str, ...]) -> Counter:
    return Counter(name, description=description, tag_keys=tags)


@cache
def _gauge(name: str, description: str, tags: tuple[str, ...]) -> Gauge:
    return Gauge(name, description=description, tag_keys=tags)


@cache
def _histogram(name: str, description: str, tags: tuple[str, ...]) -> Histogram:
    return Histogram(name, description=description, boundaries=_DURATION_BOUNDARIES_MS, tag_keys=tags)


class TaskMetrics:
    """Metrics of one task of one attempt; `update` takes totals of that attempt."""

    def __init__(self, job: str, vertex: str, task: TaskId) -> None:
        self._tags = {"job": job, "vertex": vertex, "subtask": str(task.subtask)}
        self._rows_in = _counter("tidegate_rows_in", "Rows that came into a task", _TASK_TAGS)
        self._rows_out = _counter("tidegate_rows_out", "Rows that a task sent", _TASK_TAGS)
        self._queued = _gauge("tidegate_queued_bytes", "Bytes that wait in a task for credit", _TASK_TAGS)
        self._pressed = _gauge("tidegate_backpressured", "1 while a task may not take input", _TASK_TAGS)
        self._restores = _counter("tidegate_restores", "Restores of a task, by where its state was", _RESTORE_TAGS)
        self._seen = (0, 0)

    def restored(self, origin: StateOrigin) -> None:
        """The task has its state."""
        _add(self._restores, 1, self._tags | {"origin": origin.value})

    def update(self, rows_in: int, rows_out: int, queued_bytes: int, backpressured: bool) -> None:
        """Publish the totals."""
        _add(self._rows_in, rows_in - self._seen[0], self._tags)
        _add(self._rows_out, rows_out - self._seen[1], self._tags)
        self._seen = (rows_in, rows_out)
        self._queued.set(queued_bytes, self._tags)
        self._pressed.set(int(backpressured), self._tags)


class StandbyMetrics:
    """Metrics of a spare process that follows a task."""

    def __init__(self, job: str, vertex: str, task: TaskId) -> None:
        self._tags = {"job": job, "vertex": vertex, "subtask": str(task.subtask)}
        description = "Number of the checkpoint whose state a spare process holds, 0 for none"
        self._checkpoint = _gauge("tidegate_standby_checkpoint", description, _TASK_TAGS)

    def holds(self, checkpoint_id: CheckpointId | None) -> None:
        """The process holds the state of a checkpoint, or of none."""
        self._checkpoint.set(checkpoint_id or 0, self._tags)


class JobMetrics:
    """Metrics of one job; `update` takes its progress."""

    def __init__(self, job: str, progress: JobProgress) -> None:
        self._tags = {"job": job}
        self._last = _gauge("tidegate_last_checkpoint", "Number of the newest checkpoint", _JOB_TAGS)
        self._duration = _histogram("tidegate_checkpoint_ms", "Trigger to completion of checkpoints", _JOB_TAGS)
        self._failed = _counter("tidegate_failed_checkpoints", "Checkpoints that were given up", _JOB_TAGS)
        self._restarts = _counter("tidegate_restarts", "Restarts of a job", _JOB_TAGS)
        self._losses = _counter("tidegate_coordinator_losses", "Coordinators of a job that were lost", _JOB_TAGS)
        self._adoptions = _counter("tidegate_adoptions", "Takeovers after which all tasks have gone on", _JOB_TAGS)
        self._ready = _gauge("tidegate_standbys_ready", "Spare processes of a job that wait", _JOB_TAGS)
        self._starting = _gauge("tidegate_standbys_starting", "Spare processes of a job that start", _JOB_TAGS)
        self._suspect = _gauge("tidegate_suspect_nodes", "Nodes of a job that may be lost", _JOB_TAGS)
        self._seen = progress
        # Each process counts for itself, and this one has replaced another.
        _add(self._losses, int(progress.coordinator_losses > 0), self._tags)

    def update(self, progress: JobProgress) -> None:
        """Publish what has changed since the last time."""
        seen, self._seen = self._seen, progress
        self._ready.set(progress.standbys_ready, self._tags)
        self._starting.set(progress.standbys_starting, self._tags)
        self._suspect.set(progress.suspect_nodes, self._tags)
        _add(self._failed, progress.failed_checkpoints - seen.failed_checkpoints, self._tags)
        _add(self._restarts, progress.restarts - seen.restarts, self._tags)
        _add(self._losses, progress.coordinator_losses - seen.coordinator_losses, self._tags)
        _add(self._adoptions, progress.adoptions - seen.adoptions, self._tags)
        if progress.last_checkpoint is not None and progress.last_checkpoint != seen.last_checkpoint:
            assert progress.last_checkpoint_ms is not None
            self._last.set(progress.last_checkpoint, self._tags)
            self._duration.observe(progress.last_checkpoint_ms, self._tags)


def _add(counter: Counter, increment: int, tags: dict[str, str]) -> None:
    if increment > 0:
        counter.inc(increment, tags)
