"""A job and its services: they start, end and fail together, whoever ends what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import cast

import pytest
from local_jobs import WAIT_S
from waiting import until

from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.runtimes.driver_services import DriverService
from tidegate.actors.runtimes.running_job import JobProgress, RunningJob, progress_of
from tidegate.api.job_with_services import JobWithServices
from tidegate.storage.errors import JobFailedError


class Alone:
    """A job that ends when it is cancelled, or as a test says."""

    def __init__(self) -> None:
        self.end: Future[JobProgress] = Future()

    def ends(self, status: str) -> None:
        """The job is over."""
        self.end.set_result(replace(progress_of(CoordinatorState(), {}), status=status))

    def progress(self) -> JobProgress:
        """Now."""
        return self.end.result() if self.end.done() else replace(progress_of(CoordinatorState(), {}), status="running")

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """For the end."""
        try:
            return self.end.result(timeout_s)
        except TimeoutError:
            return None

    def cancel(self) -> None:
        """At once."""
        if not self.end.done():
            self.ends("cancelled")


class Worker(DriverService):
    """Works until it is told to stop, and leaves when `go` is set. One that is `patient` outlives its job."""

    def __init__(self, *, patient: bool = False, leave_s: float = WAIT_S) -> None:
        super().__init__("the worker", leave_s)
        self.go = threading.Event()
        self.told = threading.Event()
        self._patient = patient

    def start(self, fail: Callable[[str], None]) -> None:
        """Begin."""
        self.fail = fail
        self._begin("worker", self._work)

    def job_ended(self, status: str) -> None:
        """Leave, or not yet."""
        self.told.set()
        if not self._patient:
            self.stop()

    @property
    def complete(self) -> bool:
        """It had nothing to do."""
        return True

    def wait(self, timeout_s: float | None) -> bool:
        """Whoever waits without an end lets it go."""
        if timeout_s is None and self.stopping:
            self.go.set()
        return super().wait(timeout_s)

    def _work(self) -> None:
        self.go.wait(WAIT_S)


class Broken(Worker):
    """Cannot start."""

    def start(self, fail: Callable[[str], None]) -> None:
        """Raises."""
        raise OSError("no log")


class Follower(Worker):
    """Looks, when it starts, whether others are over."""

    def __init__(self, *others: DriverService) -> None:
        super().__init__()
        self.others_over: list[bool] = []
        self._others = others

    def start(self, fail: Callable[[str], None]) -> None:
        """Look, and begin."""
        self.others_over = [other.wait(0.0) for other in self._others]
        super().start(fail)


def with_services(*services: DriverService) -> tuple[Alone, JobWithServices]:
    """A job with services that were not started."""
    alone = Alone()
    return alone, JobWithServices(cast(RunningJob, alone), services)


def test_companions_hear_of_an_end_that_nobody_asks_for() -> None:
    """However the job ends."""
    worker = Worker()
    alone, job = with_services(worker)
    job.start()
    alone.ends("suspended")
    until("the end to be told", worker.told.is_set)
    worker.go.set()
    assert job.wait(WAIT_S) == alone.progress()
    assert job.over


def test_a_job_runs_until_its_companions_are_over() -> None:
    """For whoever waits and for whoever looks."""
    worker = Worker(patient=True)
    alone, job = with_services(worker)
    job.start()
    alone.ends("finished")
    until("the end to be told", worker.told.is_set)
    assert job.progress().status == "running"
    assert job.wait(0.0) is None
    assert not job.over
    worker.go.set()
    end = job.wait(WAIT_S)
    assert end is not None
    assert end.status == job.progress().status == "finished"


def test_a_companion_that_cannot_start_cancels_the_job() -> None:
    """And those that have started leave; the error is raised."""
    worker = Worker()
    alone, job = with_services(worker, Broken())
    with pytest.raises(OSError, match="no log"):
        job.start()
    assert alone.progress().status == "cancelled"
    assert worker.stopping
    job.close()
    assert job.over


def test_what_has_failed_first_is_the_reason() -> None:
    """The job is cancelled for it, and has failed."""
    worker = Worker()
    alone, job = with_services(worker)
    job.start()
    worker.fail("the first")
    worker.fail("the second")
    worker.go.set()
    end = job.wait(WAIT_S)
    assert end is not None
    assert (end.status, end.reason) == ("failed", "the first")
    assert alone.progress().status == "cancelled"


@pytest.mark.parametrize("status", ["cancelled", "suspended", "failed"])
def test_the_next_job_starts_when_those_that_leave_have_left(status: str) -> None:
    """Also where nobody has waited for the end of the one before it; what works on is not waited for."""
    leaving, patient = Worker(), Worker(patient=True)
    alone, job = with_services(leaving, patient)
    job.start()
    alone.ends(status)
    follower = Follower(leaving, patient)
    _, following = with_services(follower)
    following.start((job,))
    assert follower.others_over == [True, False]
    patient.go.set()
    following.cancel()
    following.close()


def test_the_next_job_does_not_wait_for_one_that_runs() -> None:
    """Nor for its services."""
    worker = Worker()
    _, job = with_services(worker)
    job.start()
    follower = Follower(worker)
    _, following = with_services(follower)
    following.start((job,))
    assert follower.others_over == [False]
    for each in (job, following):
        each.cancel()
        each.close()


def test_a_companion_that_does_not_come_back_is_left_behind() -> None:
    """After a bounded time; the job is over then."""
    worker = Worker(leave_s=0.01)
    _, job = with_services(worker)
    job.start()
    job.cancel()
    end = job.wait(WAIT_S)
    assert end is not None
    assert end.status == "cancelled"
    worker.go.set()


def test_companions_of_a_job_of_which_nothing_is_known_leave() -> None:
    """Its coordinator has been silent for long: nobody else would stop them."""
    worker = Worker()
    alone, job = with_services(worker)
    job.start()
    alone.end.set_exception(JobFailedError("the coordinator is silent"))
    worker.go.set()
    assert worker.wait(WAIT_S)
    until("the worker to be stopped", lambda: worker.stopping)
    with pytest.raises(JobFailedError, match="silent"):
        job.wait(WAIT_S)
