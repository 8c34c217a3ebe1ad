"""Puts jobs under watch: waits of a test (`waiting`) end where the jobs that it has started, or attached to, failed."""

from __future__ import annotations

import functools
import weakref
from datetime import timedelta

import waiting

from tidegate.actors.runtimes.running_job import RunningJob
from tidegate.api.submission.job import Job
from tidegate.storage.errors import JobFailedError

_OVER = {"finished", "failed", "cancelled", "suspended"}

_running: list[weakref.ref[RunningJob]] = []
"""The jobs of the running test. They are held weakly, because some tests count what is left of a job."""
_make, _wait = Job.__init__, Job.wait


def watch_jobs() -> None:
    """Put the jobs of the test that begins under watch."""
    _running.clear()
    waiting.watched.add(_failure)
    Job.__init__, Job.wait = _make_watched, _wait_and_know  # type: ignore[method-assign, assignment]


@functools.wraps(_make)
def _make_watched(job: Job, running: RunningJob, *arguments: object, **named: object) -> None:
    _make(job, running, *arguments, **named)  # type: ignore[arg-type]
    if type(running).__weakrefoffset__:  # Not so a bare namespace, in the place of a job.
        _running.append(weakref.ref(running))


@functools.wraps(_wait)
def _wait_and_know(job: Job, timeout: str | timedelta | int | None = None) -> str:
    try:
        return _wait(job, timeout)
    except JobFailedError:
        # The test knows now: whatever it waits for later either follows from the failure or does not need the job.
        _running[:] = [each for each in _running if each() is not job._running]
        raise


def _failure() -> str | None:
    """Return how a job has failed, or None while another one runs or none has failed."""
    failed: str | None = None
    for each in _running:
        if (job := each()) is not None:
            seen = job.progress()
            if seen.status not in _OVER:
                return None
            if seen.status == "failed" and failed is None:
                failed = f"a job has failed: {seen.reason}"
    return failed
