"""`LocalJobs`: the jobs of this process, for the web server of a local runtime.

Rule: the state in a look is older than the answers in it. So a request that ended its job, such as a stop, has its
answer in the look that shows the end. Later the job gives no more answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from tidegate.actors.local.local_runtime import LocalJob, jobs_here
from tidegate.actors.runtimes.job_snapshot import About, JobSnapshot, Known, snapshot_of
from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.protocol.failures import error_text
from tidegate.recovery.deletion import delete
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import JobId
from tidegate.web.jobs import Look, NotReachedError, Question

log = logging.getLogger(__name__)

REQUEST_THREADS = 4
REQUEST_TIMEOUT_S = 600.0
END_WAIT_S = 10.0
"""How many seconds a look waits for an answer of a job that has ended, because its thread may not have delivered it
yet.
"""


class LocalJobs:
    """The jobs of this process (a `Jobs`)."""

    def __init__(self, ended: Callable[[], Sequence[LocalJob]] = lambda: ()) -> None:
        """Creates the object.

        `ended` returns jobs that have ended and must be shown even if no look has seen them running.
        """
        self._ended = ended
        self._known: dict[JobId, LocalJob] = {}
        """The jobs that a look has found, until a look has seen their end."""
        self._reported: set[JobId] = set()
        """The jobs whose end was part of a look."""
        self._answers: dict[str, tuple[JobId, Future[Answer]]] = {}
        self._requests = ThreadPoolExecutor(REQUEST_THREADS, "tidegate-web-request")

    def look(self, questions: Mapping[JobId, Question]) -> Look:
        # A short job may have ended before the first look. Its page exists as long as the environment.
        ended = {job.card.job_id: job for job in self._ended()}
        self._reported &= ended.keys()
        self._known |= {job_id: job for job_id, job in ended.items() if job_id not in self._reported}
        self._known |= {job.card.job_id: job for job in jobs_here()}
        snapshots = []
        for job_id, job in list(self._known.items()):
            over = job.over
            if over:
                del self._known[job_id]
                self._reported.add(job_id)
            snapshot = _snapshot(job, questions.get(job_id, Question()).known)
            over = over or snapshot.status.terminal
            snapshots.append(replace(snapshot, answers=self._answers_of(job_id, END_WAIT_S if over else 0.0)))
        return Look(tuple(snapshots))

    def request(self, job_id: JobId, request: str, wanted: SnapshotRequest) -> None:
        job = self._job(job_id)
        self._answers[request] = job_id, self._requests.submit(_request, job, wanted)

    def cancel(self, job_id: JobId) -> None:
        self._job(job_id).cancel()

    def delete_savepoint(self, path: str) -> None:
        delete(path)

    def close(self) -> None:
        self._requests.shutdown(wait=False, cancel_futures=True)

    def _job(self, job_id: JobId) -> LocalJob:
        job = self._known.get(job_id)
        if job is None:
            raise NotReachedError(f"job {job_id} no longer runs in this process; /jobs lists the jobs that run")
        return job

    def _answers_of(self, job_id: JobId, wait_s: float) -> dict[str, Answer]:
        pending = {request: future for request, (asked, future) in list(self._answers.items()) if asked == job_id}
        wait(pending.values(), wait_s)
        answers = {request: future.result() for request, future in pending.items() if future.done()}
        for request in answers:
            del self._answers[request]
        return answers


def _snapshot(job: LocalJob, known: Known) -> JobSnapshot:
    state = job.coordinator.machine.state
    vertices = job.vertices()
    return snapshot_of(
        job.card,
        None if state.spec is None else About.of(job.context, state.spec),
        state,
        job.coordinator.job_history,
        job.progress(),
        now_ms(),
        known=known,
        vertices=vertices,
        recovery_ends=job.recovery_ends,
    )


def _request(job: LocalJob, wanted: SnapshotRequest) -> Answer:
    try:
        return job.request(wanted, REQUEST_TIMEOUT_S)
    except TidegateError as error:
        return Answer(None, error_text(error))
