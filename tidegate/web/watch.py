"""`JobWatch`: requests the state of the jobs at intervals, and answers all clients from it.

Rules:

- A job is requested at most once in `refresh_s`, for any number of clients, and not again before it has answered.
- Without clients, jobs are requested rarely, but often enough to see how a job ended before its coordinator disappears.
- A client waits for a short time for a new view. Then it gets the last view, which contains its age.
- The newest `OVER_MAX` jobs that have ended are kept.

All methods except the methods of `Jobs` run in the event loop of the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.protocol.failures import log_failure
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.ids import JobId
from tidegate.web.jobs import Jobs, Look, NotReachedError, Question, SeenJob, View, known_of, seen
from tidegate.web.model.states import ended_at_ms

log = logging.getLogger(__name__)
KEPT_MAX = 200

OPEN_MAX = 10
"""How many open requests one job may have."""

REFRESH_S = 1.0
IDLE_S = 10.0

ACTIVE_MS = 15_000
"""For this many ms after the last request of a client, jobs are requested often."""

PATIENCE_S = 2.0
OVER_MAX = 20
CALL_THREADS = 4


class JobWatch:
    """Watches all jobs for a web server, and stores their newest state."""

    def __init__(
        self, jobs: Jobs, refresh_s: float = REFRESH_S, idle_s: float = IDLE_S, clock_ms: Callable[[], int] = now_ms
    ) -> None:
        self.refresh_s = refresh_s
        self.triggers = Triggers()
        self._on_the_way: set[str] = set()
        self._jobs = jobs
        self._idle_s = idle_s
        self._clock_ms = clock_ms
        self._view: View | None = None
        self._looked_ms = self._asked_ms = 0
        """The end of the last look, and the time of the last client's request, by the monotonic clock."""
        self._nameless = False
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()
        self._looks = ThreadPoolExecutor(1, "tidegate-web-look")
        self._calls = ThreadPoolExecutor(CALL_THREADS, "tidegate-web-call")
        # A pool for deletions alone: storage that hangs must not delay the cancellation of a job.
        self._deletions = ThreadPoolExecutor(1, "tidegate-web-delete")

    async def view(self) -> View:
        """Returns the current state of all jobs. Raises NotReachedError before the first answer."""
        self._asked_ms = monotonic_ms()
        view = self._view
        if view is None or monotonic_ms() - self._looked_ms > 1_500 * self.refresh_s:
            news = await self.next_view()
            view = news if news is not None or view is None else self._unreachable(view)
        if view is None:
            raise NotReachedError("the jobs have not answered yet; try again")
        return view

    async def job(self, job_id: str) -> SeenJob | None:
        """Returns the job with this id, or None. Waits a short time for a job that may have just started.

        Raises NotReachedError if a job has not answered yet, because it may be this one.
        """
        if (job := (await self.view()).job(job_id)) is not None:
            return job
        for _ in range(2):  # The first look may have begun before the job did.
            view = await self.next_view()
            if view is None:
                raise NotReachedError(f"job {job_id}: the jobs of the cluster did not answer in time; try again")
            if (job := view.job(job_id)) is not None:
                return job
        if self._nameless:
            raise NotReachedError(f"job {job_id}: a job that may be this one has not answered yet; try again")
        return None

    async def next_view(self) -> View | None:
        """Waits for the next update of all jobs and returns it, or None if that takes too long."""
        news = self._news
        self._wanted.set()
        try:
            await asyncio.wait_for(news.wait(), PATIENCE_S)
        except TimeoutError:
            return None
        return self._view

    @property
    def runs_jobs(self) -> bool:
        """Returns whether a job runs, according to the last view. Any thread may call it."""
        view = self._view
        return view is not None and any(not job.over for job in view.jobs.values())

    async def request(self, job_id: JobId, trigger_id: str, wanted: SnapshotRequest) -> None:
        """Requests a checkpoint or savepoint under a new id. Raises the errors of `Jobs.request`."""
        self.triggers.add(trigger_id, job_id, wanted.kind)
        self._on_the_way.add(trigger_id)
        try:
            await self._call(lambda: self._jobs.request(job_id, trigger_id, wanted))
        except BaseException:
            self.triggers.drop(trigger_id)
            raise
        finally:
            self._on_the_way.discard(trigger_id)
        self._wanted.set()

    async def cancel(self, job_id: JobId) -> None:
        """Requests the cancellation of a job. Raises the errors of `Jobs.cancel`."""
        await self._call(lambda: self._jobs.cancel(job_id))
        self._wanted.set()

    async def delete_savepoint(self, path: str) -> None:
        """Deletes a savepoint. Raises the errors of `Jobs.delete_savepoint`."""
        await asyncio.get_running_loop().run_in_executor(self._deletions, lambda: self._jobs.delete_savepoint(path))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Returns a context in which the state of all jobs is updated repeatedly."""
        task = asyncio.create_task(self._run(), name="tidegate-web-watch")
        try:
            yield
        finally:
            task.cancel()
            self._jobs.close()
            for pool in (self._looks, self._calls, self._deletions):
                pool.shutdown(wait=False, cancel_futures=True)

    async def _call(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._calls, call)

    async def _run(self) -> None:
        while True:
            self._wanted.clear()
            questions = self._questions()
            try:
                look = await asyncio.get_running_loop().run_in_executor(
                    self._looks,
                    lambda questions=questions: self._jobs.look(questions),  # type: ignore[misc]
                )
            except Exception as error:  # noqa: BLE001 (the next look may work)
                log_failure(log, "the jobs could not be looked at", error)
            else:
                self._update(look)
            await self._pause()

    async def _pause(self) -> None:
        """Waits `refresh_s` before jobs are queried again, and without active clients up to `idle_s` more."""
        await asyncio.sleep(self.refresh_s)
        if monotonic_ms() - self._asked_ms > ACTIVE_MS and not self._wanted.is_set():
            try:
                await asyncio.wait_for(self._wanted.wait(), self._idle_s)
            except TimeoutError:
                return

    def _questions(self) -> dict[JobId, Question]:
        jobs = {} if self._view is None else self._view.jobs
        return {job_id: Question(known_of(job), self._asked_of(job_id)) for job_id, job in jobs.items() if not job.over}

    def _asked_of(self, job_id: JobId) -> tuple[str, ...]:
        """Returns the open requests that a job has received. A request that is still being sent is not included."""
        return tuple(name for name in self.triggers.open_of(job_id) if name not in self._on_the_way)

    def _update(self, look: Look) -> None:
        now = self._clock_ms()
        self._nameless = look.nameless
        before = {} if self._view is None else dict(self._view.jobs)
        jobs = dict(before)
        for snapshot in look.snapshots:
            job_id = snapshot.card.job_id
            job = seen(before.get(job_id), snapshot)
            if job is not None:
                jobs[job_id] = job
            for request, answer in snapshot.answers.items():
                self.triggers.answer(request, answer)
        answered = {snapshot.card.job_id for snapshot in look.snapshots}
        for job_id, job in before.items():
            if job_id not in answered and not job.over:
                jobs[job_id] = replace(job, reachable=False)
        self._answer_for_ended(jobs)
        self._view = View(_newest(jobs), now).at(now)
        self._looked_ms = monotonic_ms()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _answer_for_ended(self, jobs: dict[JobId, SeenJob]) -> None:
        """Stores an answer for the open requests of jobs that have ended, because such jobs no longer answer."""
        for job_id, job in jobs.items():
            for request in self._asked_of(job_id) if job.over else ():
                self.triggers.answer(request, Answer(None, f"the job is {job.snapshot.progress.status}"))

    def _unreachable(self, view: View) -> View:
        """Returns the last view, with all running jobs as unreachable."""
        jobs = {name: job if job.over else replace(job, reachable=False) for name, job in view.jobs.items()}
        return View(jobs).at(self._clock_ms())


def _newest(jobs: dict[JobId, SeenJob]) -> dict[JobId, SeenJob]:
    """Returns the running jobs, and the newest jobs that have ended."""
    over = sorted((job for job in jobs.values() if job.over), key=ended_at_ms)
    dropped = {job.job_id for job in over[: max(0, len(over) - OVER_MAX)]}
    return {job_id: job for job_id, job in jobs.items() if job_id not in dropped}


@dataclass(frozen=True, slots=True)
class Trigger:
    """A request of a client that changes a job, such as a savepoint. `answer` is None until the job has answered."""

    job_id: JobId
    kind: SnapshotKind
    answer: Answer | None = None


class Triggers:
    """The requests of clients to one server, until the answer is fetched. Not thread-safe.

    An id belongs to one request, so a client that repeats a request gets the same one. The newest answered requests are
    kept.
    """

    def __init__(self) -> None:
        self._all: dict[str, Trigger] = {}

    def __len__(self) -> int:
        return len(self._all)

    def get(self, trigger_id: str) -> Trigger | None:
        """Returns the request with this id, or None if it is unknown or no longer kept."""
        return self._all.get(trigger_id)

    def open_of(self, job_id: JobId) -> tuple[str, ...]:
        """Returns the open requests of a job."""
        return tuple(name for name, t in self._all.items() if t.job_id == job_id and t.answer is None)

    def add(self, trigger_id: str, job_id: JobId, kind: SnapshotKind) -> None:
        """Adds a request. The caller has checked that the job may have one more."""
        assert trigger_id not in self._all, "an id stands for one request"
        assert len(self.open_of(job_id)) < OPEN_MAX, "the number of open requests has a limit"
        self._all[trigger_id] = Trigger(job_id, kind)
        answered = [name for name, trigger in self._all.items() if trigger.answer is not None]
        for name in answered[: max(0, len(self._all) - KEPT_MAX)]:
            del self._all[name]

    def drop(self, trigger_id: str) -> None:
        """Removes a request that was not sent to its job."""
        self._all.pop(trigger_id, None)

    def answer(self, trigger_id: str, answer: Answer) -> None:
        """Stores the answer of the job. Only the first answer is stored."""
        trigger = self._all.get(trigger_id)
        if trigger is not None and trigger.answer is None:
            self._all[trigger_id] = replace(trigger, answer=answer)
