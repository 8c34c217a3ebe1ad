"""Processes of workers that Ray has not started, of jobs that are gone: which ones are ended."""

from __future__ import annotations

import pytest
import ray
from waiting import until

from tidegate.actors.ray.actor_calls import NAMESPACE, find_actor
from tidegate.actors.ray.coordinator_liveness import ActorRow, end_orphans, orphans
from tidegate.actors.ray.worker_pool import worker_actor

WAITS = ActorRow("job/rows (1/2)#0", "WorkerProcess", "01", "PENDING_CREATION")


def coordinator(state: str = "ALIVE", ray_job: str = "01", name: str = "job") -> ActorRow:
    """One of a state."""
    return ActorRow(f"{name}/coordinator", "CoordinatorProcess", ray_job, state)


@pytest.mark.parametrize("state", ["ALIVE", "RESTARTING", "PENDING_CREATION", "DEPENDENCIES_UNREADY"])
def test_a_process_of_a_job_that_lives_waits_on(state: str) -> None:
    """Its coordinator may just be starting again."""
    assert orphans([WAITS, coordinator(state)]) == []


@pytest.mark.parametrize(
    "others", [[], [coordinator("DEAD")], [coordinator(ray_job="02")], [coordinator(name="jo"), coordinator(name="b")]]
)
def test_a_process_of_a_job_that_is_gone_is_ended(others: list[ActorRow]) -> None:
    """Also where another job has its name by now."""
    assert orphans([WAITS, *others]) == ["job/rows (1/2)#0"]


@pytest.mark.parametrize(
    "other",
    [
        ActorRow("job/rows (1/2)#0", "WorkerProcess", "01", "ALIVE"),
        ActorRow("job/rows (1/2)#0", "WorkerProcess", "01", "DEAD"),
        ActorRow("job-1/program", "ProgramHolder", "01", "PENDING_CREATION"),
        ActorRow("", "WorkerProcess", "01", "PENDING_CREATION"),
    ],
)
def test_nothing_else_is_ended(other: ActorRow) -> None:
    """A process that has started ends by itself, and other actors are not workers."""
    assert orphans([other]) == []


@pytest.mark.slow
def test_a_process_that_never_started_is_ended_on_ray(plain_ray: None) -> None:
    """It keeps neither its name nor its demand."""
    name = "gone/rows (1/1)#0"
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 1_000}
    worker_actor().options(**options).remote(None, None, None)
    assert find_actor(name, NAMESPACE) is not None
    until("the process to wait", lambda: [a for a in ray._private.state.actors().values() if a["Name"] == name] != [])
    end_orphans()
    until("its end", lambda: find_actor(name, NAMESPACE) is None)
