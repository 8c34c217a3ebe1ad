"""Orders are given once it is known how the processes that get them reach each other."""

from __future__ import annotations

import pytest
from deployments import FIRST, SECOND, Deployed, failed_tasks, started
from ray_fakes import SINK, SOURCE

from tidegate.actors.coordinator import instructions as do
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.task_deployment import Peer, TaskDeployment
from tidegate.actors.ray.worker_pool import WorkerHandle
from tidegate.protocol.identity import TaskId

TASKS = (SOURCE, SINK)


def orders(deployed: Deployed, task: TaskId) -> list[TaskDeployment]:
    """The orders that the process of a task has got since somebody has looked."""
    calls = deployed.staff.handles[task].deploy.calls
    return [calls.get_nowait()[1][0] for _ in range(calls.qsize())]


@pytest.fixture
def deployed() -> Deployed:
    """A job whose processes have not started when its second attempt is due; the first one is over."""
    made = Deployed()
    for member in started(made):
        member.info = None
    for task in TASKS:
        assert [order.attempt for order in orders(made, task)] == [FIRST]
    made.deployment.deploy(do.DeployAttempt(SECOND, None))
    return made


def identify(deployed: Deployed, task: TaskId) -> WorkerHandle:
    """The process of a task has started."""
    member = deployed.staff.staff()[task]
    member.info = ProcessInfo(1, "node", actor_id=f"process of {task}", address=b"\0" + str(task).encode())
    deployed.staff.identified(member)
    return member


def test_an_order_waits_for_the_process_and_for_its_neighbours(deployed: Deployed) -> None:
    """It says how each neighbour is reached."""
    identify(deployed, SOURCE)
    assert orders(deployed, SOURCE) == orders(deployed, SINK) == []
    identify(deployed, SINK)
    for task, neighbour in (TASKS, TASKS[::-1]):
        [order] = orders(deployed, task)
        handle = deployed.staff.handles[neighbour]
        there = Peer(handle, f"process of {neighbour}", "node", b"\0" + str(neighbour).encode())
        assert (order.tasks, order.attempt, order.peers) == ((task,), SECOND, {neighbour: there})
    identify(deployed, SINK)
    assert orders(deployed, SINK) == [], "an order is given once"


def test_an_order_that_was_cancelled_meanwhile_is_not_given(deployed: Deployed) -> None:
    """Nor is one of an attempt before the newest one."""
    deployed.deployment.cancel(do.CancelAttempt(SECOND, None))
    for task in TASKS:
        identify(deployed, task)
    assert [orders(deployed, task) for task in TASKS] == [[], []]


def test_a_part_that_was_cancelled_leaves_the_rest(deployed: Deployed) -> None:
    """Regions restart on their own."""
    deployed.deployment.cancel(do.CancelAttempt(SECOND, (SOURCE,)))
    for task in TASKS:
        identify(deployed, task)
    assert orders(deployed, SOURCE) == []
    assert [order.tasks for order in orders(deployed, SINK)] == [(SINK,)]


def test_an_order_does_not_wait_for_neighbours_of_tasks_that_were_cancelled(deployed: Deployed) -> None:
    """They may be in a process that has died before it has started, and that another region gets anew."""
    deployed.deployment._neighbours = {task: set() for task in TASKS}
    identify(deployed, SOURCE)
    assert [(order.tasks, order.peers) for order in orders(deployed, SOURCE)] == [((SOURCE,), {})]


def test_a_process_that_was_replaced_is_given_up_with_what_it_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would ask it for signs of life, or end it with the job."""
    deployed = Deployed()
    source, sink = started(deployed)
    monkeypatch.setattr(deployed.staff, "is_kept", lambda member: member is not sink)
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None, (SOURCE,)))
    assert (source.evicted, sink.evicted) == (False, True)


def test_a_process_that_dies_before_it_has_its_order_fails_its_tasks(deployed: Deployed) -> None:
    """As at any other time. The others wait until that is dealt with."""
    deployed.lose(SOURCE, RuntimeError("it is gone"))
    assert failed_tasks(deployed) == [SOURCE]
    identify(deployed, SINK)
    assert orders(deployed, SINK) == []


def test_who_identifies_itself_is_connected_first() -> None:
    """So its first order goes over the connection as well."""
    joined: list[WorkerHandle] = []
    deployed = Deployed(join=joined.append)
    assert [identify(deployed, task) for task in TASKS] == joined
