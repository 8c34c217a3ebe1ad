"""What a deployment on Ray tells the coordinator when processes die and messages are lost; without Ray."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import cast

import pytest
from deployments import AWAY, FIRST, SECOND, Deployed, Handle, failed_tasks, started
from ray.exceptions import ActorDiedError
from ray.util.placement_group import PlacementGroup
from ray_fakes import SINK, SOURCE, TIMEOUT_S
from waiting import until

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.protocol.errors import OperatorError
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.runtimes.ray.coordinator import attempt_supervisor
from tidegate.actors.runtimes.ray.fleet import lost_nodes
from tidegate.actors.runtimes.ray.fleet.member import Member
from tidegate.actors.runtimes.ray.fleet.reconnections import FAILURES_MAX
from tidegate.actors.runtimes.ray.fleet_options import SlotPlacement
from tidegate.actors.runtimes.ray.process.outcomes import Outcome
from tidegate.storage.errors import ConfigurationError


def test_a_lost_message_fails_its_task() -> None:
    """The task would wait for it for ever."""
    deployed = Deployed()
    deployed.lose_a_message(SINK, FIRST)
    assert [(type(e), e.task) for e in deployed.told if isinstance(e, co.TaskFailed)] == [(co.TaskFailed, SINK)]


def test_the_pending_call_of_a_process_names_its_task() -> None:
    """Ray's dashboard shows it, also of a process whose actor is called after something else."""
    deployed = Deployed()
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None, tasks=(SINK,)))
    names = {task: handle.run.names for task, handle in deployed.staff.handles.items()}
    assert names == {
        SOURCE: ["job: source (1/1), attempt 0"],
        SINK: ["job: sink (1/1), attempt 0", "job: sink (1/1), attempt 1"],
    }


def test_a_task_that_has_finished_needs_no_message() -> None:
    """Its process may have died meanwhile, and the attempt goes on."""
    deployed = Deployed()
    deployed.run_of(SINK).set_result(Outcome("finished"))
    deployed.lose_a_message(SINK, FIRST)
    assert deployed.told == []


def test_no_task_fails_when_the_job_is_over() -> None:
    """Its processes are killed then: one may not have said yet that its task is through, or have a message to come."""
    deployed = Deployed()
    deployed.deployment.close()
    deployed.run_of(SINK).set_exception(ActorDiedError())
    deployed.lose_a_message(SOURCE, FIRST)
    assert deployed.told == []


def test_what_has_finished_in_one_attempt_is_needed_in_the_next() -> None:
    """A new attempt knows nothing of the ends of the one before, also not of those that are told late."""
    deployed = Deployed()
    deployed.run_of(SOURCE).set_result(Outcome("finished"))
    first = deployed.run_of(SINK)
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    first.set_result(Outcome("finished"))
    for task in (SOURCE, SINK):
        deployed.lose_a_message(task, SECOND)
    assert [e.task for e in deployed.told if isinstance(e, co.TaskFailed)] == [SOURCE, SINK]


def test_a_region_is_deployed_and_cancelled_on_its_own() -> None:
    """The process of a task that goes on hears nothing of it, and is told of checkpoints in its own attempt."""
    deployed = Deployed()
    deployed.deployment.cancel(do.CancelAttempt(FIRST, (SINK,)))
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None, (SINK,)))
    source, sink = (deployed.staff.handles[task] for task in (SOURCE, SINK))
    assert (source.deploy.calls.qsize(), sink.deploy.calls.qsize()) == (1, 2)
    assert (source.drop.calls.qsize(), sink.drop.calls.qsize()) == (0, 1)
    deployed.lose_a_message(SOURCE, FIRST)
    deployed.lose_a_message(SINK, SECOND)
    lost = [(e.task, e.attempt) for e in deployed.told if isinstance(e, co.TaskFailed)]
    assert lost == [(SOURCE, FIRST), (SINK, SECOND)]


def test_a_region_that_waits_is_deployed_though_another_one_is_cancelled() -> None:
    """It waits for its own processes, and for those that are told to let go meanwhile."""
    deployed = Deployed()
    started(deployed)
    deployed.deployment.cancel(do.CancelAttempt(FIRST, (SINK,)))
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None, (SINK,)))
    deployed.deployment.cancel(do.CancelAttempt(FIRST, (SOURCE,)))
    drops = [deployed.staff.handles[task].drop.calls.get_nowait()[0] for task in (SOURCE, SINK)]
    drops[1].set_result(None)
    assert _orders(deployed) == 1
    drops[0].set_result(None)
    assert _orders(deployed) == 2
    assert deployed.staff.handles[SOURCE].deploy.calls.qsize() == 1


def test_what_cannot_get_better_is_told_as_such() -> None:
    """A configuration error, also one that an operator met, comes to the coordinator as a permanent failure."""
    wrapped = OperatorError("operator 'x' failed")
    wrapped.__cause__ = ConfigurationError("no such column")
    for error, permanent in ((ConfigurationError("no"), True), (wrapped, True), (OperatorError("boom"), False)):
        deployed = Deployed()
        deployed.run_of(SINK).set_result(Outcome.failed(error))
        deployed.pass_time()
        (told,) = (event for event in deployed.told if isinstance(event, co.TaskFailed))
        assert told.permanent is permanent
        assert str(error) in told.reason


def _orders(deployed: Deployed) -> int:
    return deployed.staff.handles[SINK].deploy.calls.qsize()


def test_an_attempt_waits_until_all_have_let_go_of_the_one_before() -> None:
    """A task is not given to a process that may be stuck."""
    deployed = Deployed()
    started(deployed)
    deployed.deployment.cancel(do.CancelAttempt(FIRST))
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    drops = [deployed.staff.handles[task].drop.calls.get_nowait()[0] for task in (SOURCE, SINK)]
    drops[0].set_result(None)
    assert _orders(deployed) == 1
    drops[1].set_result(None)
    assert _orders(deployed) == 2


def test_an_attempt_does_not_wait_for_who_counts_as_hung_or_is_still_starting() -> None:
    """The first is about to be killed; what the second is told waits for its start anyway."""
    deployed = Deployed()
    source, sink = started(deployed)
    sink.info = None
    deployed.deployment.cancel(do.CancelAttempt(FIRST))
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    assert _orders(deployed) == 1
    source.given_up = True
    deployed.deployment.found_hung(source)
    assert _orders(deployed) == 2


def test_what_is_cancelled_while_it_waits_is_not_deployed() -> None:
    """The job may have ended meanwhile."""
    deployed = Deployed()
    started(deployed)
    deployed.deployment.cancel(do.CancelAttempt(FIRST))
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    deployed.deployment.cancel(do.CancelAttempt(SECOND))
    for task in (SOURCE, SINK):
        while not deployed.staff.handles[task].drop.calls.empty():
            deployed.staff.handles[task].drop.calls.get_nowait()[0].set_result(None)
    assert _orders(deployed) == 1


def test_a_hung_process_fails_the_task_of_the_attempt_in_which_it_was_found() -> None:
    """The failure is told when it is known what it was doing: by then there may be another attempt."""
    deployed = Deployed()
    _, sink = started(deployed)
    tell = deployed.deployment.found_hung(sink)
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    tell("it hangs")
    (failed,) = [event for event in deployed.told if isinstance(event, co.TaskFailed)]
    assert (failed.attempt, failed.task, failed.reason) == (FIRST, SINK, "it hangs")


def test_a_hung_process_that_nobody_needs_fails_nothing() -> None:
    """A spare one, or that of a task that has finished."""
    deployed = Deployed()
    _, sink = started(deployed)
    deployed.run_of(SINK).set_result(Outcome("finished"))
    deployed.deployment.found_hung(sink)("it hangs")
    deployed.deployment.found_hung(Member("standby", None, None, Future()))("it hangs")
    assert deployed.told == []


def _lose_the_node_of(deployed: Deployed, task: TaskId) -> Handle:
    """The connection to a process breaks, and it cannot be asked; Ray does not say why."""
    handle = deployed.staff.handles[task]
    deployed.run_of(task).set_exception(AWAY)
    for _ in range(FAILURES_MAX):
        handle.pulse.calls.get_nowait()[0].set_exception(AWAY)
        deployed.pass_time()
    return handle


def test_an_attempt_waits_until_ray_knows_whether_a_node_is_lost() -> None:
    """Ray would start processes there, and they would be lost with the node: two restarts for one loss."""
    deployed = Deployed()
    started(deployed)
    lost = _lose_the_node_of(deployed, SINK)
    assert failed_tasks(deployed) == [SINK]
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    assert _orders(deployed) == 1
    lost.pulse.calls.get_nowait()[0].set_exception(ActorDiedError())
    assert (_orders(deployed), deployed.staff.avoided) == (2, frozenset())


def test_an_attempt_begins_when_it_is_known_where_slots_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says that within milliseconds, and whether a node is lost within many seconds."""
    said, where = threading.Event(), {0: "node", 1: "far"}
    monkeypatch.setattr(attempt_supervisor, "nodes_of", lambda placement: said.wait(TIMEOUT_S) and where)
    deployed = Deployed(SlotPlacement(cast(PlacementGroup, None), (0, 1)))
    started(deployed)
    _lose_the_node_of(deployed, SINK)
    deployed.staff.spare = 1
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    assert _orders(deployed) == 1
    said.set()
    until("the second attempt", lambda: _orders(deployed) == 2)
    assert (deployed.staff.avoided, deployed.staff.nodes) == ({"node"}, where)
    deployed.deployment.close()


def test_an_attempt_that_starts_processes_asks_first_where_slots_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray knows that a node is lost: the bundles there have none, and nothing is in doubt."""
    said, where = threading.Event(), {1: "far"}
    monkeypatch.setattr(attempt_supervisor, "nodes_of", lambda placement: said.wait(TIMEOUT_S) and where)
    deployed = Deployed(SlotPlacement(cast(PlacementGroup, None), (0, 1)))
    for member in started(deployed):
        member.dead = True
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    assert _orders(deployed) == 1
    said.set()
    until("the second attempt", lambda: _orders(deployed) == 2)
    assert (deployed.staff.avoided, deployed.staff.nodes) == (frozenset(), where)
    deployed.deployment.close()


def test_an_attempt_starts_nothing_on_a_node_from_which_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was started there waited for the link, and failed with the node: two restarts for one cut."""
    probe: Future[None] = Future()
    monkeypatch.setattr(lost_nodes, "start_there", lambda node: probe)
    deployed = Deployed()
    for member in started(deployed):
        member.given_up = True
        deployed.deployment.silent("node", [])
        deployed.deployment.found_hung(member)("it hangs")
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    waits_for = deployed.deployment.waits_for()
    assert (_orders(deployed), deployed.deployment.suspect_nodes) == (1, 1)
    assert waits_for is not None
    assert "word of node" in waits_for
    probe.set_exception(ActorDiedError())
    assert (_orders(deployed), deployed.staff.avoided, deployed.deployment.waits_for()) == (2, frozenset(), None)


def test_an_attempt_does_not_wait_where_spare_processes_take_over() -> None:
    """They are elsewhere: that is what they are for."""
    deployed = Deployed()
    started(deployed)
    _lose_the_node_of(deployed, SINK)
    deployed.staff.spare = 2
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    assert (_orders(deployed), deployed.staff.avoided) == (2, {"node"})
