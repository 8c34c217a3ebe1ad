"""Calls to processes that break on their way although the processes live; without Ray."""

from __future__ import annotations

from deployments import AWAY, FIRST, SECOND, Deployed, failed_tasks, started
from ray.exceptions import ActorDiedError
from ray_fakes import SINK, SOURCE

from tidegate.actors.coordinator import instructions as do
from tidegate.actors.task import events as ev
from tidegate.storage.ids import AttemptNumber, CheckpointId


def test_a_task_whose_process_answers_after_its_connection_broke_goes_on() -> None:
    """A link was cut: nothing has failed. Its life is watched again, and its end is a failure once it is known."""
    deployed = Deployed()
    started(deployed)
    deployed.lose(SINK, AWAY)
    assert deployed.watched_again == []
    deployed.staff.handles[SINK].pulse.calls.get_nowait()[0].set_result(None)
    assert deployed.watched_again == [SINK]
    assert failed_tasks(deployed) == []
    assert deployed.staff.staff()[SINK].fit
    deployed.lose(SINK, ActorDiedError())
    assert failed_tasks(deployed) == [SINK]


def test_a_task_whose_process_does_not_answer_after_its_connection_broke_has_failed() -> None:
    """Once, and with what Ray says in the end: its node was lost, say."""
    deployed = Deployed()
    started(deployed)
    deployed.lose(SINK, AWAY)
    assert failed_tasks(deployed) == []
    deployed.staff.handles[SINK].pulse.calls.get_nowait()[0].set_exception(ActorDiedError())
    assert failed_tasks(deployed) == [SINK]
    assert deployed.staff.staff()[SINK].dead


def test_what_a_broken_connection_has_lost_is_said_again() -> None:
    """Until the process answers nobody knows whether it has arrived. In another attempt it is not said any more."""
    for attempt, times in ((FIRST, 1), (SECOND, 0)):
        deployed = Deployed()
        started(deployed)
        event = ev.CheckpointCompleted(0, FIRST, CheckpointId(1))
        deployed.deployment.send(SINK, event)
        deployed.deployment.flush()
        sink = deployed.staff.handles[SINK]
        sink.deliver.calls.get_nowait()[0].set_exception(AWAY)
        deployed.pass_time()
        assert sink.deliver.calls.empty()
        if attempt == SECOND:
            deployed.staff.spare = 2
            deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
        sink.pulse.calls.get_nowait()[0].set_result(None)
        assert [sink.deliver.calls.get_nowait()[1] for _ in range(sink.deliver.calls.qsize())] == [
            (((SINK, FIRST, event),),)
        ] * times
        deployed.pass_time()
        assert failed_tasks(deployed) == []


def test_an_order_to_begin_is_not_given_again_once_its_attempt_is_cancelled() -> None:
    """It would come after the one to let go, and the process would run what nobody wants any more."""
    deployed = Deployed()
    started(deployed)
    sink = deployed.staff.handles[SINK]
    sink.deploy.calls.get_nowait()
    sink.deploy.answers = False
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    sink.deploy.calls.get_nowait()[0].set_exception(AWAY)
    deployed.deployment.cancel(do.CancelAttempt(SECOND))
    sink.drop.calls.get_nowait()[0].set_result(None)
    sink.pulse.calls.get_nowait()[0].set_result(None)
    assert sink.deploy.calls.empty()


def test_a_message_to_a_process_that_does_not_answer_fails_its_task() -> None:
    """As any that does not arrive."""
    deployed = Deployed()
    started(deployed)
    deployed.deployment.send(SINK, ev.CheckpointCompleted(0, FIRST, CheckpointId(1)))
    deployed.deployment.flush()
    sink = deployed.staff.handles[SINK]
    sink.deliver.calls.get_nowait()[0].set_exception(AWAY)
    sink.pulse.calls.get_nowait()[0].set_exception(ActorDiedError())
    assert failed_tasks(deployed) == []
    deployed.pass_time()
    assert failed_tasks(deployed) == [SINK]


def test_an_order_that_a_broken_connection_has_lost_is_given_again() -> None:
    """To begin, and to let go: the next attempt is not given to a process that may not have heard it."""
    deployed = Deployed()
    started(deployed)
    sink = deployed.staff.handles[SINK]
    order = sink.deploy.calls.get_nowait()[1]
    sink.deploy.answers = False
    deployed.deployment.deploy(do.DeployAttempt(SECOND, None))
    lost, (order,) = sink.deploy.calls.get_nowait()
    lost.set_exception(AWAY)
    sink.pulse.calls.get_nowait()[0].set_result(None)
    assert sink.deploy.calls.get_nowait()[1] == (order,)

    deployed.deployment.cancel(do.CancelAttempt(SECOND))
    deployed.staff.handles[SOURCE].drop.calls.get_nowait()[0].set_result(None)
    sink.drop.calls.get_nowait()[0].set_exception(AWAY)
    deployed.deployment.deploy(do.DeployAttempt(AttemptNumber(2), None))
    assert sink.deploy.calls.empty()
    sink.pulse.calls.get_nowait()[0].set_result(None)
    assert sink.deploy.calls.empty(), "it is told again to let go"
    sink.drop.calls.get_nowait()[0].set_result(None)
    assert sink.deploy.calls.qsize() == 1
