"""The watch asks each job rarely, however many clients there are, and remembers what it was told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from fixture_jobs import JOB_ID, NOW_MS, ended, failed_job, running_job
from turns import turn

from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.runtimes.job_snapshot import JobSnapshot, Known
from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.web.jobs import Look, NotReachedError, Question, seen
from tidegate.web.model import checkpoints, job_details, job_state
from tidegate.web.watch import OVER_MAX, JobWatch

REQUEST = SnapshotRequest(SnapshotKind.CHECKPOINT)


class FakeJobs:
    """Tells of these snapshots. `gate`: a look waits for it; `asked`: the questions of each look."""

    def __init__(self, *snapshots: JobSnapshot) -> None:
        self.snapshots = snapshots
        self.asked: list[Mapping[JobId, Question]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.requested: list[str] = []
        self.nameless = False

    def look(self, questions: Mapping[JobId, Question]) -> Look:
        self.asked.append(questions)
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return Look(self.snapshots, self.nameless)

    def request(self, job_id: JobId, request: str, wanted: SnapshotRequest) -> None:
        if self.error is not None:
            raise self.error
        self.requested.append(request)

    def cancel(self, job_id: JobId) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def watched(jobs: FakeJobs, test: Callable[[JobWatch], Awaitable[Any]], **options: float) -> Any:
    """What `test` returns of a watch that looks all the time."""

    async def run() -> Any:
        watch = JobWatch(jobs, **{"refresh_s": 0.001, "idle_s": 0.001, **options}, clock_ms=lambda: NOW_MS)
        async with watch.running():
            return await test(watch)

    return asyncio.run(run())


def test_many_clients_are_one_question() -> None:
    """A hundred clients at once cause one look."""
    jobs = FakeJobs(running_job().snapshot)

    async def test(watch: JobWatch) -> list[Any]:
        return await asyncio.gather(*(watch.view() for _ in range(100)))

    views = watched(jobs, test, refresh_s=60.0)
    assert len(jobs.asked) == 1
    assert all(view is views[0] for view in views)


def test_what_is_known_is_not_asked_again() -> None:
    """The second question says what the first answer had; that answer is kept where the second leaves it out."""
    first = running_job().snapshot
    jobs = FakeJobs(first)

    async def test(watch: JobWatch) -> Any:
        await watch.view()
        jobs.snapshots = (replace(first, about=None, past=None, ended=(ended(22),), known=Known(1, 21, 9)),)
        while (job := (await watch.view()).jobs[JOB_ID]).ended[-1].record.checkpoint_id != 22:
            await turn()
        return job

    job = watched(jobs, test)
    assert jobs.asked[0] == {}
    assert jobs.asked[1][JOB_ID].known == Known(1, 20, 9)
    assert len(checkpoints(job)["history"]) == 22
    assert job_details(job)["vertices"][0]["name"] == "flights"


def test_the_watch_keeps_what_a_silent_coordinator_sent_last() -> None:
    """What was known last is told, with its age; nobody waits for the job."""
    jobs = FakeJobs(running_job().snapshot)

    async def test(watch: JobWatch) -> Any:
        await watch.view()
        jobs.snapshots = ()
        while (job := (await watch.view()).jobs[JOB_ID]).reachable:
            await turn()
        return job

    assert job_state(watched(jobs, test)) == "RECONCILING"


def test_a_look_that_fails_is_made_again() -> None:
    """An error of a look is logged, and the next one works."""
    jobs = FakeJobs(running_job().snapshot)
    jobs.error = RuntimeError("Ray is away")

    async def test(watch: JobWatch) -> int:
        while len(jobs.asked) < 3:
            await turn()
        jobs.error = None
        return len((await watch.view()).jobs)

    assert watched(jobs, test) == 1


def test_jobs_that_are_over_are_remembered() -> None:
    """They are not asked any more; the newest are kept."""
    over = failed_job().snapshot
    card = over.card
    many = tuple(replace(over, card=replace(card, job_id=JobId(f"job-{n}")), at_ms=n) for n in range(OVER_MAX + 5))
    jobs = FakeJobs(*many)

    async def test(watch: JobWatch) -> Any:
        await watch.view()
        jobs.snapshots = ()
        while len(jobs.asked) < 3:
            await turn()
        return await watch.view()

    view = watched(jobs, test)
    assert len(view.jobs) == OVER_MAX
    assert jobs.asked[-1] == {}
    assert all(job_state(job) == "FAILED" for job in view.jobs.values())


def test_the_watch_fetches_answers_to_requests() -> None:
    """Open ones are asked about with the next question; an end answers what nobody has."""
    running = running_job().snapshot
    jobs = FakeJobs(running)

    async def test(watch: JobWatch) -> list[Answer | None]:
        await watch.view()
        for name in ("one", "two"):
            await watch.request(JOB_ID, name, REQUEST)
        jobs.snapshots = (replace(running, answers={"one": Answer(CheckpointId(22), None)}),)
        while (first := watch.triggers.get("one")) is None or first.answer is None:
            await turn()
        jobs.snapshots = (replace(running, status=JobStatus.CANCELLED),)
        while (second := watch.triggers.get("two")) is None or second.answer is None:
            await turn()
        return [first.answer, second.answer]

    first, second = watched(jobs, test)
    assert jobs.requested == ["one", "two"]
    assert first == Answer(CheckpointId(22), None)
    assert "the job is" in second.error


def test_a_request_that_does_not_reach_its_job_is_forgotten() -> None:
    """The same id can be used again."""
    jobs = FakeJobs(running_job().snapshot)

    async def test(watch: JobWatch) -> bool:
        await watch.view()
        jobs.error = NotReachedError("restarting")
        try:
            await watch.request(JOB_ID, "one", REQUEST)
        except NotReachedError:
            return watch.triggers.get("one") is None
        return False

    assert watched(jobs, test)


def test_a_job_that_has_just_begun() -> None:
    """Whoever asks for it waits for the next look, and does not hear that there is none."""
    jobs = FakeJobs()

    async def test(watch: JobWatch) -> Any:
        await watch.view()
        jobs.snapshots = (running_job().snapshot,)
        return await watch.job(JOB_ID)

    assert watched(jobs, test, refresh_s=0.05) is not None


def test_a_job_that_has_not_answered_yet_is_not_missing() -> None:
    """It is 404 only where no job may be it."""
    jobs = FakeJobs()

    async def test(watch: JobWatch) -> list[object]:
        found: list[object] = [await watch.job(JOB_ID)]
        jobs.nameless = True
        await watch.view()
        try:
            found.append(await watch.job(JOB_ID))
        except NotReachedError as error:
            found.append("has not answered yet" in str(error))
        return found

    assert watched(jobs, test) == [None, True]


def test_a_successor_knows_less_of_subtasks() -> None:
    """What its predecessor has told of a checkpoint stays."""
    before = running_job()
    told = replace(before.snapshot, ended=(ended(20, subtasks_kept=False),), known=Known(2, 1, 1))
    after = seen(before, told)
    assert after is not None
    assert after.ended[-1].subtasks == before.ended[-1].subtasks
    assert len(after.ended) == len(before.ended)


def test_a_request_on_its_way_is_not_asked_about() -> None:
    """A coordinator that has not got it yet would say that it is lost."""
    jobs = FakeJobs(running_job().snapshot)
    on_its_way, arrived = threading.Event(), threading.Event()

    def slow(job_id: JobId, request: str, wanted: SnapshotRequest) -> None:
        on_its_way.set()
        assert arrived.wait(240)

    jobs.request = slow  # type: ignore[method-assign]

    async def look_meanwhile(watch: JobWatch) -> None:
        await watch.view()
        asking = asyncio.create_task(watch.request(JOB_ID, "r", REQUEST))
        await asyncio.get_running_loop().run_in_executor(None, on_its_way.wait)
        looks = len(jobs.asked)
        while len(jobs.asked) < looks + 2:
            await watch.next_view()
        assert all(question.requests == () for asked in jobs.asked[looks:] for question in asked.values())
        arrived.set()
        await asking
        looks = len(jobs.asked)
        while len(jobs.asked) < looks + 2:
            await watch.next_view()
        assert jobs.asked[-1][JOB_ID].requests == ("r",)

    watched(jobs, look_meanwhile)
