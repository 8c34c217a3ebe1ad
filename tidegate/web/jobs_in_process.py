"""`LocalJobs`: the jobs of this process, for the web server of a local runtime."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.runtimes.job_snapshot import About, JobSnapshot, Known, snapshot_of
from tidegate.actors.runtimes.local.local_job import LocalJob, jobs_here
from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import JobId
from tidegate.web.jobs import Look, NotReachedError, Question

log = logging.getLogger(__name__)

REQUEST_THREADS = 4
REQUEST_TIMEOUT_S = 600.0


class LocalJobs:
    """All jobs of this process (a `Jobs`)."""

    def __init__(self) -> None:
        self._known: dict[JobId, LocalJob] = {}
        """Those that a look has found, until one has seen their end."""
        self._answers: dict[str, Future[Answer]] = {}
        self._requests = ThreadPoolExecutor(REQUEST_THREADS, "tidegate-web-request")

    def look(self, questions: Mapping[JobId, Question]) -> Look:
        """See `Jobs`."""
        self._known |= {job.card.job_id: job for job in jobs_here()}
        snapshots = []
        for job_id, job in list(self._known.items()):
            if job.over:
                del self._known[job_id]
            question = questions.get(job_id, Question())
            answers = {request: answer for request in question.requests if (answer := self._answer(request))}
            snapshots.append(replace(_snapshot(job, question.known), answers=answers))
        return Look(tuple(snapshots))

    def request(self, job_id: JobId, request: str, wanted: SnapshotRequest) -> None:
        """See `Jobs`."""
        job = self._job(job_id)
        self._answers[request] = self._requests.submit(_taken, job, wanted)

    def cancel(self, job_id: JobId) -> None:
        """See `Jobs`."""
        self._job(job_id).cancel()

    def close(self) -> None:
        """See `Jobs`."""
        self._requests.shutdown(wait=False, cancel_futures=True)

    def _job(self, job_id: JobId) -> LocalJob:
        job = self._known.get(job_id)
        if job is None:
            raise NotReachedError(f"job {job_id} does not run in this process any more")
        return job

    def _answer(self, request: str) -> Answer | None:
        future = self._answers.get(request)
        if future is None or not future.done():
            return None
        del self._answers[request]
        return future.result()


def _snapshot(job: LocalJob, known: Known) -> JobSnapshot:
    state, vertices = job.coordinator.machine.state, job.vertices()
    return snapshot_of(
        job.card,
        None if state.spec is None else About.of(job.context, state.spec),
        state,
        job.coordinator.chronicle,
        job.progress(),
        now_ms(),
        known=known,
        vertices=vertices,
        recovery_ends=job.recovery_ends,
    )


def _taken(job: LocalJob, wanted: SnapshotRequest) -> Answer:
    try:
        return job.request(wanted, REQUEST_TIMEOUT_S)
    except TidegateError as error:
        return Answer(None, error_text(error))
