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

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.ray import attempt_supervisor, lost_nodes
from tidegate.actors.ray.actor_calls import Ended, Outcome
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.lost_nodes import FAILURES_MAX
from tidegate.actors.ray.placement import SlotPlacement
from tidegate.actors.ray.worker_pool import WorkerHandle
from tidegate.actors.task import events as ev
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.identity import TaskId
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId


def test_a_lost_message_fails_its_task() -> None:
    """The task would wait for it for ever."""
    deployed = Deployed()
    deployed.lose_a_message(SINK, FIRST)
    assert [(type(e), e.task) for e in deployed.told if isinstance(e, co.TaskFailed)] == [(co.TaskFailed, SINK)]


def test_a_task_that_has_finished_needs_no_message() -> None:
    """Its process may have died meanwhile, and the attempt goes on."""
    deployed = Deployed()
    deployed.finish(SINK)
    deployed.lose_a_message(SINK, FIRST)
    assert deployed.told == []


def test_no_task_fails_when_the_job_is_over() -> None:
    """Its processes are killed then: one may not have said yet that its task is through, or have a message to come."""
    deployed = Deployed()
    deployed.deployment.close()
    deployed.lose(SINK, ActorDiedError())
    deployed.lose_a_message(SOURCE, FIRST)
    assert deployed.told == []


def test_what_has_finished_in_one_attempt_is_needed_in_the_next() -> None:
    """A new attempt knows nothing of the ends of the one before, also not of those that are told late."""
    deployed = Deployed()
    deployed.finish(SOURCE)
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    deployed.finish(SINK, FIRST)
    for task in (SOURCE, SINK):
        deployed.lose_a_message(task, SECOND)
    assert [e.task for e in deployed.told if isinstance(e, co.TaskFailed)] == [SOURCE, SINK]


def test_a_region_is_deployed_and_cancelled_on_its_own() -> None:
    """The process of a task that goes on hears nothing of it, and is told of checkpoints in its own attempt."""
    deployed = Deployed()
    source, sink = (deployed.staff.handles[task] for task in (SOURCE, SINK))
    deployed.deployment.cancel(do.CancelAttempt(FIRST, (SINK,)))
    assert source.drop.calls.empty()
    sink.drop.received()[0].set_result(None)
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None, (SINK,)))
    assert (source.deploy.calls.qsize(), sink.deploy.calls.qsize()) == (1, 2)
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
        deployed.deployment.ended(Ended(FIRST, SINK, Outcome.failed(error)))
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
    """The first is about to be killed; the second has nothing to let go of, and gets its order when it has started."""
    deployed = Deployed()
    source, sink = started(deployed)
    sink.info = None
    deployed.deployment.cancel(do.CancelAttempt(FIRST))
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    assert _orders(deployed) == 1
    source.evicted = True
    deployed.deployment.found_hung(source)
    sink.info = ProcessInfo(1, "node")
    deployed.staff.identified(sink)
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
    deployed.finish(SINK)
    deployed.deployment.found_hung(sink)("it hangs")
    deployed.deployment.found_hung(WorkerHandle("standby", None, None, Future()))("it hangs")
    assert deployed.told == []


def _lose_the_node_of(deployed: Deployed, task: TaskId) -> Handle:
    """The connection to a process breaks, and it cannot be asked; Ray does not say why."""
    handle = deployed.staff.handles[task]
    deployed.lose(task, AWAY)
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
        member.evicted = True
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


# --- one process with several subtasks --------------------------------------------------------------------------------


BOTH = (SOURCE, SINK)


@pytest.fixture
def shared() -> Deployed:
    """The first attempt of a job whose subtasks run in one process."""
    deployed = Deployed(slot_sharing=True)
    started(deployed)
    return deployed


def _failures(deployed: Deployed) -> list[tuple[TaskId, int, str]]:
    failed = [event for event in deployed.told if isinstance(event, co.TaskFailed)]
    return [(event.task, event.attempt, event.reason) for event in failed]


def test_a_process_gets_one_order_for_all_its_subtasks(shared: Deployed) -> None:
    """Which names no neighbour that is among them; another process has the handles of those that are not."""
    _, (order,) = shared.staff.handles[SINK].deploy.calls.get_nowait()
    assert (order.tasks, order.attempt, order.peers, order.slot) == (BOTH, FIRST, {}, "slot 1 of 1")
    assert shared.staff.handles[SINK].deploy.calls.empty()
    shared.deployment.deploy(do.DeployAttempt(SECOND, None, (SINK,)))
    _, (order,) = shared.staff.handles[SINK].deploy.calls.get_nowait()
    assert (order.tasks, order.attempt, list(order.peers)) == ((SINK,), SECOND, [SOURCE])
    alone = Deployed().staff.handles
    orders = {task: alone[task].deploy.calls.get_nowait()[1][0] for task in BOTH}
    assert {task: peer.handle for task, peer in orders[SOURCE].peers.items()} == {SINK: alone[SINK]}
    assert {task: peer.handle for task, peer in orders[SINK].peers.items()} == {SOURCE: alone[SOURCE]}


def test_what_a_process_is_told_in_one_round_goes_in_one_message(shared: Deployed) -> None:
    """In its order, each event with the attempt of its subtask. Nothing goes before the round is over."""
    shared.deployment.deploy(do.DeployAttempt(SECOND, None, (SINK,)))
    events = [ev.CheckpointCompleted(0, FIRST, CheckpointId(number)) for number in range(3)]
    tell = shared.staff.handles[SINK].deliver
    for task, event in zip((SINK, SOURCE, SINK), events, strict=True):
        shared.deployment.send(task, event)
    assert tell.calls.empty()
    for _ in range(2):
        shared.deployment.flush()
    assert tell.calls.get_nowait()[1] == (
        ((SINK, SECOND, events[0]), (SOURCE, FIRST, events[1]), (SINK, SECOND, events[2])),
    )
    assert tell.calls.empty()


def test_a_message_that_is_lost_fails_all_subtasks_that_it_was_for(shared: Deployed) -> None:
    """Each once, and none that has finished meanwhile."""
    for finished, failed in (([], list(BOTH)), ([SOURCE], [SINK])):
        shared.told.clear()
        for task in (SOURCE, SINK, SOURCE):
            shared.deployment.send(task, ev.CheckpointCompleted(0, FIRST, CheckpointId(1)))
        shared.deployment.flush()
        call, _ = shared.staff.handles[SINK].deliver.calls.get_nowait()
        for task in finished:
            shared.finish(task)
        call.set_exception(ConnectionError("gone"))
        shared.pass_time()
        assert failed_tasks(shared) == failed


def test_a_message_of_the_attempt_before_is_no_failure_of_the_next() -> None:
    """It goes out with the deployment, at the latest, and counts for the attempt that it was meant for."""
    deployed = Deployed()
    started(deployed)
    deployed.deployment.send(SINK, ev.CheckpointCompleted(0, FIRST, CheckpointId(1)))
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    call, ((told,),) = deployed.staff.handles[SINK].deliver.calls.get_nowait()
    assert told[:2] == (SINK, FIRST)
    call.set_exception(ConnectionError("gone"))
    deployed.pass_time()
    assert failed_tasks(deployed) == []


def test_a_process_that_dies_fails_all_its_subtasks_that_have_not_finished(shared: Deployed) -> None:
    """At once, each in its attempt, with what is known of the end of the process."""
    shared.deployment.deploy(do.DeployAttempt(SECOND, None, (SINK,)))
    shared.lose(SINK, OSError("killed"))
    reason = "OSError: killed"
    assert _failures(shared) == [(SOURCE, FIRST, reason), (SINK, SECOND, reason)]

    one_left = Deployed(slot_sharing=True)
    one_left.finish(SOURCE)
    one_left.lose(SOURCE, OSError("killed"))
    assert _failures(one_left) == [(SINK, FIRST, reason)]
    one_left = Deployed(slot_sharing=True)
    for task in BOTH:
        one_left.finish(task)
    one_left.lose(SOURCE, OSError("killed"))
    assert _failures(one_left) == []


def test_a_hung_process_fails_the_subtask_that_acts_first(shared: Deployed) -> None:
    """The failure of the attempt names the first one. The others fail as well: they do not get on either."""
    (member,) = set(shared.staff.staff().values())
    for acting, order in ((SINK, [SINK, SOURCE]), (SOURCE, [SOURCE, SINK]), (None, [SOURCE, SINK])):
        shared.told.clear()
        member.acting = acting
        shared.deployment.found_hung(member)("it hangs")
        assert _failures(shared) == [(task, FIRST, "it hangs") for task in order]


def test_a_subtask_that_fails_is_the_only_one(shared: Deployed) -> None:
    """Its process is told to let go of its region, and goes on with the others."""
    shared.deployment.ended(Ended(FIRST, SINK, Outcome("failed", "boom")))
    assert _failures(shared) == [(SINK, FIRST, "boom")]
    shared.deployment.cancel(do.CancelAttempt(FIRST, (SINK,)))
    shared.deployment.deploy(do.DeployAttempt(SECOND, None, (SINK,)))
    call, (tasks, attempt, _) = shared.staff.handles[SINK].drop.calls.get_nowait()
    assert (tasks, attempt) == ((SINK,), FIRST)
    assert _orders(shared) == 1
    call.set_result(None)
    assert _orders(shared) == 2
    shared.deployment.cancel(do.CancelAttempt(SECOND))
    assert shared.staff.handles[SINK].drop.calls.get_nowait()[1][:2] == (BOTH, SECOND), "one message for both"
    assert shared.staff.handles[SINK].drop.calls.empty()


def test_an_end_in_another_attempt_counts_for_nothing(shared: Deployed) -> None:
    """It may be reported twice, and late."""
    shared.deployment.deploy(do.DeployAttempt(SECOND, None, (SINK,)))
    shared.deployment.ended(Ended(FIRST, SINK, Outcome("failed", "late")))
    shared.finish(SINK, FIRST)
    assert shared.told == []
    shared.lose(SINK, OSError("killed"))
    assert failed_tasks(shared) == [SOURCE, SINK]


def test_a_process_that_can_start_no_thread_any_more_is_given_up(shared: Deployed) -> None:
    """Before the failure is known to the coordinator, so that no attempt is given to it."""
    (member,) = set(shared.staff.staff().values())
    shared.deployment.ended(Ended(FIRST, SINK, Outcome("failed", "can't start new thread", unfit=True)))
    assert not member.usable
    assert [type(event) for event in shared.told] == [co.ProcessGivenUp, co.TaskFailed]
