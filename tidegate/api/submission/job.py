"""`Job`: the handle of a job, which `StreamEnvironment.execute` and `attach` return."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from typing import Any, Literal

from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.runtimes.running_job import JobProgress, RunningJob, SnapshotRequest, TaskProcessInfo
from tidegate.actors.runtimes.task_metrics import VertexMetrics
from tidegate.api.name_checks import location
from tidegate.api.submission.temporary_jobs import TemporaryJob, keep
from tidegate.api.tables.shown_rows import html_facts
from tidegate.api.web_access import WebAccess
from tidegate.operators.user_metrics import UserMetric
from tidegate.recovery.checkpoints import CheckpointSummary, list_checkpoints
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.errors import ConfigurationError, FailureCause, JobFailedError, JobTimeoutError
from tidegate.storage.files.file_system_store import check_savepoint_target, open_store
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId
from tidegate.storage.units import parse_duration_ms

VERTICES_SHOWN = 20
"""Greatest number of vertices whose numbers of rows a notebook shows."""


class Job:
    """Handle of a job. It can be used from several threads.

    The job continues if this object is deleted. It ends when its environment closes, unless it is detached or was found
    with `attach`.

    Timeouts are strings such as "10s", timedeltas, or numbers of milliseconds.
    """

    def __init__(
        self,
        running: RunningJob,
        job_id: JobId,
        name: str,
        root: str,
        open_store: OpenStore = open_store,
        savepoints: str | None = None,
        web: WebAccess | None = None,
        temporary: TemporaryJob | None = None,
    ) -> None:
        self._running = running
        self._temporary = temporary
        """The temporary folder of a job without storage, or None. It is kept while this object exists."""
        self._web = web
        self._open_store = open_store
        self.job_id = job_id
        self.name = name
        self.root = root
        """URL of the folder that contains the job's folder of checkpoints."""
        self._savepoints = savepoints

    @property
    def web_url(self) -> str | None:
        """Address of the page of this job, or None if its environment does not serve it
        (`StreamEnvironment.serve_web`)."""
        return None if self._web is None else self._web.page_of(self.job_id)

    def status(self) -> str:
        """Returns created, deploying, running, restarting, finished, failed, cancelled or suspended.

        A job is created until its coordinator has started. It is deploying until all of its tasks are ready, also after
        a restart. The call does not wait: while the coordinator does not answer, it returns the status of the last
        answer.
        """
        return self.progress().status

    def progress(self) -> JobProgress:
        """Returns status, attempts, checkpoints and rows of the job."""
        return self._running.progress()

    def wait(self, timeout: str | timedelta | int | None = None) -> str:
        """Waits until the job is over, and returns finished, cancelled or suspended.

        - `timeout`: how long to wait. None waits without a limit.

        Raises JobFailedError with the reason if the job failed, JobTimeoutError if `timeout` passes first.
        """
        timeout_s = None if timeout is None else parse_duration_ms(timeout, setting="wait(timeout)") / 1000
        progress = self._running.wait(timeout_s)
        if progress is None:
            raise JobTimeoutError(
                f"job {self.name!r} is still {self.status()} after {timeout_s or 0:g} s"
                "; wait for longer, or end the job with job.stop() or job.cancel()"
            )
        if progress.status == "failed" and progress.superseded:
            # Do not suggest a restore: it would evict the job that has taken over from this one.
            raise JobFailedError(
                f"job {self.name!r} ({self.job_id}) failed: {_reason(progress)}. If the newer job replaces this one, "
                f"nothing is to be done; `tidegate checkpoints list {self.root}` shows what each of them has completed"
            )
        if progress.status == "failed":
            raise JobFailedError(self._failure(progress)) from FailureCause(_reason(progress))
        return progress.status

    def _failure_reason(self) -> str:
        """Returns the reason why the job has failed."""
        return _reason(self.progress())

    def _wait_over(self) -> None:
        """Waits until the job is over, in whatever status."""
        self._running.wait(None)

    def _failure(self, progress: JobProgress) -> str:
        reason, *frames = _reason(progress).splitlines()
        way_back = "It has completed no checkpoint: execute it again as before"
        if progress.last_checkpoint is not None:
            way_back = (
                f'Its checkpoints are under {self.root}; execute it again with restore="latest" to continue from the '
                "newest one"
            )
        return "\n".join([f"job {self.name!r} failed: {reason}. {way_back}", *frames])

    def cancel(self) -> None:
        """Cancels the job.

        Its tasks stop, and committed rows stay. Its checkpoints stay or are deleted, depending on the setting
        `retention`.
        """
        self._running.cancel()

    def trigger_checkpoint(self, timeout: str | timedelta | int = "10min") -> str:
        """Takes a checkpoint now, and returns its path.

        Raises CheckpointError if the checkpoint fails, and JobTimeoutError if it takes longer than `timeout`.
        """
        timeout_s = parse_duration_ms(timeout, setting="trigger_checkpoint(timeout)") / 1000
        answer = self._running.request(SnapshotRequest(SnapshotKind.CHECKPOINT), timeout_s)
        keep(self.root, self.job_id)
        return f"{self.root}/{self.job_id}/chk-{answer.checkpoint_id}"

    def savepoint(
        self,
        target: str | os.PathLike[str] | None = None,
        timeout: str | timedelta | int = "10min",
        format: Literal["canonical", "native"] = "canonical",
    ) -> str:
        """Takes a savepoint now, and returns the path of its folder, which the job never deletes.

        The job and its checkpoints continue while the savepoint is copied into its folder. The savepoint fails if the
        job ends before the copy is complete.

        - `target`: the folder in which the folder of the savepoint is created. The default is the setting
          `state.savepoints.dir`.
        - `format`: "canonical" writes keyed state as sorted rows, the same bytes for every backend. "native" writes it
          in the form of checkpoints, which is faster.

        Raises CheckpointError if it fails, JobTimeoutError if it takes longer than `timeout`, and ConfigurationError
        without a folder or for another format.
        """
        timeout_s = parse_duration_ms(timeout, setting="savepoint(timeout)") / 1000
        chosen = _savepoint_format("savepoint", format)
        wanted = SnapshotRequest(SnapshotKind.SAVEPOINT, self._target("savepoint", target), chosen)
        return self._savepoint(wanted, timeout_s)

    def stop(
        self,
        drain: bool = False,
        savepoint: str | os.PathLike[str] | None = None,
        timeout: str | timedelta | int = "10min",
        format: Literal["canonical", "native"] = "canonical",
    ) -> str:
        """Ends the job with a savepoint, waits for both, and returns the path of the savepoint.

        - `drain`: with False the job is suspended. No operator finishes, and a job that is restored from the savepoint
          continues where this one stopped. With True the sources end for good: event time reaches its end, timers fire,
          operators finish, and then the savepoint is taken. A job that is restored from such a savepoint has no rows
          left to process.
        - `savepoint`, `format`: the parameters `target` and `format` of the method `savepoint`.

        Raises CheckpointError with the reason if the savepoint fails. The job then continues, from its newest
        checkpoint if its tasks had stopped already. Raises JobTimeoutError if it takes longer than `timeout`. The job
        may then still stop later.
        """
        limit_s = parse_duration_ms(timeout, setting="stop(timeout)") / 1000
        deadline = time.monotonic() + limit_s
        kind = SnapshotKind.TERMINATE if drain else SnapshotKind.SUSPEND
        chosen = _savepoint_format("stop", format)
        path = self._savepoint(SnapshotRequest(kind, self._target("stop", savepoint), chosen), limit_s)
        if self._running.wait(max(0.0, deadline - time.monotonic())) is None:
            raise JobTimeoutError(
                f"job {self.name!r} has written its savepoint {path}, but has not ended within {limit_s:g} s"
                "; call job.wait() to wait for its end, or job.cancel()"
            )
        return path

    def _savepoint(self, wanted: SnapshotRequest, timeout_s: float) -> str:
        answer = self._running.request(wanted, timeout_s)
        assert answer.path is not None, "a savepoint has a path"
        return answer.path

    def _target(self, call: str, target: str | os.PathLike[str] | None) -> str:
        folder = target if target is not None else self._savepoints
        if folder is None:
            raise ConfigurationError(
                f"{call}: no folder is given for the savepoint. Name a folder in the call, or set "
                "state.savepoints.dir (CheckpointConfig(savepoints=...))"
            )
        url = self._open_store(location(folder, call)).url
        check_savepoint_target(url, f"{call}: the savepoint")
        return url

    def statistics(self) -> CheckpointStatistics:
        """Returns statistics of the job's checkpoints over all of its attempts: counts, history, summary, and the
        newest checkpoint.
        """
        return self._running.statistics()

    def checkpoints(self) -> list[CheckpointSummary]:
        """Returns the completed checkpoints of this job that are retained, oldest first."""
        return [
            c for c in list_checkpoints(self.root, self.name, open_store=self._open_store) if c.job_id == self.job_id
        ]

    def processes(self) -> tuple[TaskProcessInfo, ...]:
        """Returns the process and the attempt of each task. Empty if all tasks run in the driver's process."""
        return self._running.tasks()

    def user_metrics(self) -> dict[str, list[UserMetric]]:
        """Returns the metrics that functions of the user define (`context.metrics`), by name: counters, gauges and
        histograms.

        A name has one metric for each operator and subtask. Metrics begin with 0 in each attempt. Tasks on Ray report
        about once a second, and the last report stays after the end of the job.
        """
        found: dict[str, list[UserMetric]] = {}
        for vertex in self.vertices():
            for subtask in vertex.subtasks:
                for metric in subtask.user:
                    found.setdefault(metric.name, []).append(metric)
        return found

    def vertices(self) -> tuple[VertexMetrics, ...]:
        """Returns rows, bytes, busy time and watermarks of each vertex and its subtasks, as last reported by the
        tasks.

        Tasks on Ray report about once a second. The last reports stay after the end of the job.
        """
        return self._running.vertices()

    def metrics(self) -> dict[str, Any]:
        """Returns the progress of the job and the key figures of its checkpoints, as one dict.

        Times are in ms, sizes in bytes.

        `checkpoint.duration`, `.size` and `.alignment_time` belong to the newest completed checkpoint, and are None if
        none is completed yet. `checkpoint.alignment_time` is the longest alignment time of a task.
        """
        statistics = self.statistics()
        newest = statistics.latest_completed
        alignments = () if newest is None else tuple(v.alignment_ms.max for v in newest.vertices)
        return asdict(self.progress()) | {
            "checkpoint.count": statistics.completed,
            "checkpoint.failed_count": statistics.failed,
            "checkpoint.in_progress_count": statistics.in_progress,
            "checkpoint.restored_count": statistics.restored,
            "checkpoint.duration": None if newest is None else newest.duration_ms,
            "checkpoint.size": None if newest is None else newest.state_bytes + newest.in_flight_bytes,
            "checkpoint.alignment_time": None if newest is None else max(alignments, default=0),
        }

    def events(self) -> list[Any]:
        """Returns the events that the coordinator received, oldest first, as far back as its event log has them."""
        log = EventLog(self._open_store(self.root), self.job_id)
        return [event for entry in log.history() for event in entry.events]

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.job_id!r})"

    def _repr_html_(self) -> str:
        """Returns the name, the state and the progress of the job as HTML, for notebooks."""
        progress = self.progress()
        facts: list[tuple[str, object]] = [
            ("id", self.job_id),
            ("state", progress.status),
            ("restarts", progress.restarts),
            ("completed checkpoints", progress.completed_checkpoints),
        ]
        counts = islice(progress.rows_in.items(), VERTICES_SHOWN)
        facts += [(f"rows into {vertex}", f"{rows:,}") for vertex, rows in counts]
        facts += [("last failure", progress.last_failure)] if progress.last_failure else []
        facts += [("page", self.web_url)] if self.web_url else []
        return html_facts(f"Job {self.name}", facts)


def _savepoint_format(call: str, given: str) -> SavepointFormat:
    try:
        return SavepointFormat(given)
    except ValueError:
        known = " or ".join(repr(each.value) for each in SavepointFormat)
        raise ConfigurationError(f"{call}: format={given!r} is not a format of savepoints; use {known}") from None


def _reason(progress: JobProgress) -> str:
    """Returns why the job failed, for its driver.

    If the driver has the values of rows that logs withhold, the text includes them.
    """
    return progress.reason_with_values or progress.reason or "the reason is unknown"
