"""`JobWatch`: asks the jobs now and then, and answers all clients from what it was told.

Rules:
- However many clients there are, a job is asked once a `refresh_s` at most, and not again before it has answered.
- While nobody looks, jobs are asked rarely: often enough to know how one has ended that is gone.
- A client waits for news for a short time, and then gets what is known, which says how old it is.
- Jobs that are over are remembered, the newest of them.

All methods but those of `Jobs` run on the event loop of the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.protocol.failure_reasons import log_failure
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.ids import JobId
from tidegate.web.jobs import Jobs, Look, NotReachedError, Question
from tidegate.web.model.states import ended_at_ms
from tidegate.web.seen_job import SeenJob, View, known_of, seen
from tidegate.web.triggers import Triggers

log = logging.getLogger(__name__)

REFRESH_S, IDLE_S = 1.0, 10.0
ACTIVE_MS = 15_000
"""For so long after the last client has asked, jobs are asked often."""
PATIENCE_S = 2.0
OVER_MAX = 20
CALL_THREADS = 4


class JobWatch:
    """What a server knows of all jobs."""

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
        """When the last look was over, and when the last client asked, by the clock that nobody sets."""
        self._nameless = False
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()
        self._looks = ThreadPoolExecutor(1, "tidegate-web-look")
        self._calls = ThreadPoolExecutor(CALL_THREADS, "tidegate-web-call")
        # Of its own: storage that does not answer must not keep a job from being cancelled.
        self._deletions = ThreadPoolExecutor(1, "tidegate-web-delete")

    async def view(self) -> View:
        """All jobs as of about now. Raises NotReachedError as long as nobody has told anything."""
        self._asked_ms = monotonic_ms()
        view = self._view
        if view is None or monotonic_ms() - self._looked_ms > 1_500 * self.refresh_s:
            news = await self._next_view()
            view = news if news is not None or view is None else self._unheard(view)
        if view is None:
            raise NotReachedError("nobody has told of the jobs yet; ask again")
        return view

    async def job(self, job_id: str) -> SeenJob | None:
        """The job of this id. One that is not known may just have begun: then it is waited for, for a short time.

        Raises NotReachedError if it may be one that has not answered yet.
        """
        if (job := (await self.view()).job(job_id)) is not None:
            return job
        for _ in range(2):  # The first look may have begun before the job did.
            view = await self._next_view()
            if view is None:
                raise NotReachedError("the jobs have not been looked at in time; ask again")
            if (job := view.job(job_id)) is not None:
                return job
        if self._nameless:
            raise NotReachedError("a job that may be this one has not answered yet; ask again")
        return None

    async def _next_view(self) -> View | None:
        """What the next look finds; None if that takes too long."""
        news = self._news
        self._wanted.set()
        try:
            await asyncio.wait_for(news.wait(), PATIENCE_S)
        except TimeoutError:
            return None
        return self._view

    @property
    def runs_jobs(self) -> bool:
        """Whether a job runs, as far as is known. From any thread."""
        view = self._view
        return view is not None and any(not job.over for job in view.jobs.values())

    async def request(self, job_id: JobId, trigger_id: str, wanted: SnapshotRequest) -> None:
        """Ask a job for a checkpoint or savepoint, under a new id. Raises as `Jobs.request` does."""
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
        """Ask a job to be cancelled. Raises as `Jobs.cancel` does."""
        await self._call(lambda: self._jobs.cancel(job_id))
        self._wanted.set()

    async def delete_savepoint(self, path: str) -> None:
        """Delete a savepoint, beside what is asked of jobs. Raises as `Jobs.delete_savepoint` does."""
        await asyncio.get_running_loop().run_in_executor(self._deletions, lambda: self._jobs.delete_savepoint(path))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look as long as the block runs."""
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
            except Exception as error:  # noqa: BLE001 (whatever it is: the next look may work)
                log_failure(log, "the jobs could not be looked at", error)
            else:
                self._take_in(look)
            await self._pause()

    async def _pause(self) -> None:
        """Until it is time for the next look: soon if somebody wants to know, and never too soon."""
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
        """The open requests that a job has got. One that is on its way is not known there, and so not lost yet."""
        return tuple(name for name in self.triggers.open_of(job_id) if name not in self._on_the_way)

    def _take_in(self, look: Look) -> None:
        now, self._nameless = self._clock_ms(), look.nameless
        before = {} if self._view is None else dict(self._view.jobs)
        jobs = dict(before)
        for snapshot in look.snapshots:
            job_id = snapshot.card.job_id
            job = seen(before.get(job_id), snapshot)
            if job is not None:
                jobs[job_id] = job
            for request, answer in snapshot.answers.items():
                self.triggers.answer(request, answer)
        told = {snapshot.card.job_id for snapshot in look.snapshots}
        for job_id, job in before.items():
            if job_id not in told and not job.over:
                jobs[job_id] = replace(job, reachable=False)
        self._answer_for_ended(jobs)
        self._view = View(_newest(jobs), now).at(now)
        self._looked_ms = monotonic_ms()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _answer_for_ended(self, jobs: dict[JobId, SeenJob]) -> None:
        """Nobody answers any more for a job that is over."""
        for job_id, job in jobs.items():
            for request in self._asked_of(job_id) if job.over else ():
                self.triggers.answer(request, Answer(None, f"the job is {job.snapshot.progress.status}"))

    def _unheard(self, view: View) -> View:
        """What is known, where nobody has told anything new in time."""
        jobs = {name: job if job.over else replace(job, reachable=False) for name, job in view.jobs.items()}
        return View(jobs).at(self._clock_ms())


def _newest(jobs: dict[JobId, SeenJob]) -> dict[JobId, SeenJob]:
    """Those that run, and the newest of those that are over."""
    over = sorted((job for job in jobs.values() if job.over), key=ended_at_ms)
    dropped = {job.job_id for job in over[: max(0, len(over) - OVER_MAX)]}
    return {job_id: job for job_id, job in jobs.items() if job_id not in dropped}
