"""Jobs whose coordinators do not answer are listed: those that are silent, and those that Ray does not restart."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import cloudpickle
from waiting import until

from tidegate.actors.ray.ray_runtime import (
    DIED,
    find,
    jobs_on_ray,
    left_behind,
    without_coordinator,
)
from tidegate.actors.runtimes.running_job import SilentJob
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import JobId

NAMESPACE = "test-listing"

_remote: Any = ray.remote

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ACTORS = [
    "orders/coordinator",
    "orders/rows (1/2)#0",
    "orders-1a2b/program",
    "orders-eu/rows (1/2)#0",
    "bills-3c4d/program copy",
    "by id-5e6f/coordinator",
    "by id-5e6f/program",
    "mine",
]


def test_what_belongs_to_no_living_job_is_left_behind() -> None:
    """A program belongs to a job by its id, which a job that does not answer has not told."""
    left = ["orders-eu/rows (1/2)#0", "bills-3c4d/program copy", "mine"]
    assert left_behind(ACTORS, ["orders", "by id-5e6f"], []) == left
    assert left_behind(ACTORS, ["orders", "by id-5e6f"], [JobId("by id-5e6f")]) == left


def test_a_job_is_listed_while_something_of_it_is_left() -> None:
    """One that ended in order leaves nothing, and an actor of the program is no job."""
    died_ms = {"orders-eu": 7, "bills": 8, "over": 9, "orders": 1, "mine": 2}
    left = ["orders-eu/rows (1/2)#0", "bills-3c4d/program copy", "mine"]
    assert without_coordinator(left, died_ms) == {"orders-eu": 7, "bills": 8}


class Stuck:
    """A coordinator that does not answer."""

    def here(self) -> None:
        """It has started."""

    def overview(self) -> None:
        """Pending for ever."""
        threading.Event().wait()


@pytest.fixture
def stuck(plain_ray: None) -> Iterator[Any]:
    """A coordinator that does not answer, and a process of its job."""
    actor = _remote(num_cpus=0, max_concurrency=2)(Stuck)
    coordinator = actor.options(name="orders/coordinator", namespace=NAMESPACE).remote()
    task = actor.options(name="orders/rows (1/1)#0", namespace=NAMESPACE).remote()
    ray.get([coordinator.here.remote(), task.here.remote()])
    yield coordinator
    for each in (coordinator, task):
        ray.kill(each)


@pytest.mark.slow
def test_a_silent_job_and_a_dead_one_are_listed_on_ray(stuck: Any) -> None:
    """With why, and since when; `find` says what to do."""
    (job,) = jobs_on_ray(NAMESPACE, timeout_s=0.5)
    assert (job.actor, isinstance(job.overview, SilentJob)) == ("orders", True)
    assert isinstance(job.overview, SilentJob)
    assert job.overview.why == "its coordinator has not answered for 0.5 s"
    silent_since_ms = job.overview.since_ms
    ray.kill(stuck, no_restart=True)

    def died() -> bool:
        jobs = jobs_on_ray(NAMESPACE, timeout_s=0.5)
        return [each.overview.why for each in jobs if isinstance(each.overview, SilentJob)] == [DIED]

    until("the death of the coordinator", died)
    (job,) = jobs_on_ray(NAMESPACE, timeout_s=0.5)
    assert isinstance(job.overview, SilentJob)
    assert job.overview.since_ms >= silent_since_ms
    with pytest.raises(ConfigurationError, match="does not restart it; start the job again"):
        find("orders", NAMESPACE)
