"""A process that the coordinator in charge does not know ends, and no other one does. Without Ray."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest
from ray.exceptions import ActorUnavailableError
from ray_fakes import (
    SINK,
    SINK_WORKER,
    SOURCE,
    SOURCE_WORKER,
    LaterMailbox,
    Method,
    Process,
    source_to_sink,
    task_processes,
)

from tidegate.actors.ray import coordinator_liveness as belonging
from tidegate.actors.ray.attempt_supervisor import AttemptSupervisor
from tidegate.actors.ray.coordinator_liveness import DenialCounter, Membership, MembershipCheck, Step
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.placement import PoolOptions
from tidegate.actors.ray.task_deployment import TaskDeployment
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, Generation

ONE, TWO = Generation(1), Generation(2)
SPARE = "spare"


def answered(denials: DenialCounter, *answers: bool | None, generation: Generation = TWO) -> list[Step]:
    """What follows from each of these answers."""
    return [denials.answered(Membership(generation, answer), newest=2) for answer in answers]


def test_a_process_that_is_known_asks_again_later() -> None:
    """For as long as it lives."""
    assert answered(DenialCounter(), True, True, True) == [Step.LATER] * 3


def test_a_process_leaves_when_it_was_denied_twice_in_a_row() -> None:
    """Once could be a mistake: it may just be put to work."""
    assert answered(DenialCounter(), False, False) == [Step.SOON, Step.LEAVE]
    assert answered(DenialCounter(), False, True, False) == [Step.SOON, Step.LATER, Step.SOON]


def test_who_cannot_tell_is_asked_again() -> None:
    """A coordinator that takes over does not know its processes yet; and one that was replaced knows other ones."""
    denials = DenialCounter()
    assert answered(denials, False, None, False, None) == [Step.SOON] * 4
    assert answered(denials, False, False, False, generation=ONE) == [Step.SOON] * 3
    assert denials.answered(None, newest=2) is Step.SOON
    assert answered(denials, False, False) == [Step.SOON, Step.LEAVE]


def test_a_late_process_ends_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two answers of the coordinator in charge, however long nobody could be reached."""
    timers: list[tuple[float, Callable[[], None]]] = []

    class Timer:
        daemon = False

        def __init__(self, delay_s: float, action: Callable[[], None]) -> None:
            self.start = lambda: timers.append((delay_s, action))

    monkeypatch.setattr(belonging.threading, "Timer", Timer)
    asks, left = Method(), []
    MembershipCheck(asks.remote, lambda: TWO, lambda: left.append("left")).hold()
    away = ActorUnavailableError("it is restarted", None)
    for answer in (
        away,
        Membership(TWO, None),
        Membership(TWO, True),
        Membership(ONE, False),
        Membership(TWO, False),
        Membership(TWO, False),
    ):
        assert not left
        call = asks.calls.get_nowait()[0]
        call.set_exception(answer) if isinstance(answer, Exception) else call.set_result(answer)
        for _, again in timers[-1:]:
            again()
    assert left == ["left"]
    later, soon = belonging.ASK_EVERY_S, belonging.ASK_AGAIN_S
    assert [delay_s for delay_s, _ in timers] == [soon, soon, later, soon, soon]


def member(name: str, actor_id: str | None, **known: bool) -> WorkerHandle:
    """A process; one without an id has not said yet which it is."""
    info = None if actor_id is None else ProcessInfo(1, "node", actor_id=actor_id)
    return WorkerHandle(name, None, None, Future(), info, **known)


def fleet() -> WorkerPool:
    """A task, a spare process that has just been started, and one that was given up."""
    options = PoolOptions("job", "namespace", None, 0, 0, open_store)
    some = WorkerPool(source_to_sink()[1], None, None, options, lambda action: action())
    some.members = {SOURCE_WORKER: member("source", "a"), SINK_WORKER: member("sink", "b", evicted=True)}
    some.standbys = [member(SPARE, None), member("gone", "c", dead=True)]
    return some


@pytest.mark.parametrize(
    ("name", "actor_id", "known"),
    [
        ("source", "a", True),
        (SPARE, "d", True),
        ("sink", "b", False),
        ("gone", "c", False),
        ("source", "late", False),
        ("unheard of", "e", False),
    ],
)
def test_a_fleet_has_those_that_it_may_give_a_task(name: str, actor_id: str, known: bool) -> None:
    """By the id, or by the name as long as it has not said its id. Who was given up, or has died, is none of them."""
    assert fleet().has(name, actor_id) is known


def test_only_who_is_in_charge_can_tell() -> None:
    """Who is taking over may not have found all processes yet, or find another one in charge."""
    deployment = AttemptSupervisor(fleet(), lambda event: None, LaterMailbox())  # type: ignore[arg-type]
    deployment.generation = TWO
    assert deployment.membership("source", "a", in_charge=False) == Membership(TWO, None)
    assert deployment.membership("source", "a", in_charge=True) == Membership(TWO, True)
    assert deployment.membership("unheard of", "e", in_charge=True) == Membership(TWO, False)


def test_a_process_asks_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name and id; and it remembers which coordinator was the newest that it has obeyed."""
    newest: list[Callable[[], int]] = []
    hold = MembershipCheck.hold
    monkeypatch.setattr(MembershipCheck, "hold", lambda self: newest.append(self._newest) or hold(self))
    with task_processes(monkeypatch) as make:
        process: Process = make(SINK)
        assert process.coordinator.membership.calls.get_nowait()[1] == ("", process.actor.info().actor_id)
        order = TaskDeployment((SINK,), AttemptNumber(1), None, {SOURCE: process.as_peer}, TWO)
        process.actor.deploy(order)
        process.settle()
        assert [ask() for ask in newest] == [TWO]
