"""Processes that were told to let go of an attempt: who the next one waits for, and who is given up. Without Ray."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest
from ray_fakes import SINK, SOURCE, LaterMailbox, Method

from tidegate.actors.ray.attempt_supervisor import AttemptDrain
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.worker_pool import WorkerHandle
from tidegate.storage.ids import AttemptNumber, Generation

ATTEMPT, GENERATION = AttemptNumber(3), Generation(2)
TASKS = (SOURCE, SINK)


class Handle:
    """A process that answers when the test says so."""

    def __init__(self) -> None:
        self.drop = Method()


class Letting:
    """Processes, what was given up, and how often somebody was to look."""

    def __init__(self) -> None:
        self.mailbox, self.looks = LaterMailbox(), 0
        self.evicted: list[str] = []
        self.again: list[Callable[[], object]] = []
        self.subject = AttemptDrain(cast(Mailbox, self.mailbox), self._broke, self._give_up, self._look)

    def _broke(
        self, member: WorkerHandle, error: BaseException | None, dead: object, again: Callable[[], object]
    ) -> bool:
        if error is not None:
            self.again.append(again)
        return error is not None

    def _give_up(self, member: WorkerHandle, why: str) -> None:
        member.evicted = True
        self.evicted.append(why)

    def _look(self) -> None:
        self.looks += 1

    def tell(self, name: str, started: bool = True) -> tuple[WorkerHandle, Future[Any]]:
        """Have a process let go, and its answer."""
        info = ProcessInfo(7, "node", actor_id=f"id of {name}") if started else None
        handle = Handle()
        member = WorkerHandle(name, handle, None, Future(), info)
        self.subject.stop(member, TASKS, ATTEMPT, GENERATION)
        call, arguments = handle.drop.calls.get_nowait()
        assert arguments == (TASKS, ATTEMPT, GENERATION)
        return member, call


@pytest.fixture
def letting() -> Letting:
    """Nobody was told anything."""
    return Letting()


def test_all_that_live_are_waited_for(letting: Letting) -> None:
    """Until each has answered, or is dead: then somebody looks whether the next attempt may begin."""
    assert letting.subject.is_over
    (_, first), (second, _) = letting.tell("one"), letting.tell("two")
    first.set_result(None)
    assert (letting.looks, letting.subject.is_over) == (1, False)
    second.dead = True
    assert letting.subject.is_over
    letting.mailbox.pass_time()
    assert letting.evicted == []


def test_one_that_is_stuck_is_given_up(letting: Letting) -> None:
    """After a while, and nobody waits for it any more."""
    letting.tell("stuck")
    letting.mailbox.pass_time()
    assert letting.evicted == ["stuck has not stopped attempt 3 within 10000 ms"]
    assert (letting.looks, letting.subject.is_over) == (1, True)


def test_one_that_is_starting_is_neither_waited_for_nor_given_up(letting: Letting) -> None:
    """Its time begins when it has started."""
    member, _ = letting.tell("young", started=False)
    assert letting.subject.is_over
    letting.mailbox.pass_time()
    member.info = ProcessInfo(7, "node", actor_id="id")
    assert (letting.evicted, letting.subject.is_over) == ([], False)
    letting.mailbox.pass_time()
    assert len(letting.evicted) == 1


def test_a_connection_that_broke_is_no_answer(letting: Letting) -> None:
    """It is told again once it is known to live; what it was told before counts no more."""
    member, call = letting.tell("cut off")
    call.set_exception(OSError("broken"))
    (again,) = letting.again
    again()
    again_call, arguments = cast(Handle, member.handle).drop.calls.get_nowait()
    assert arguments == (TASKS, ATTEMPT, GENERATION)
    assert not letting.subject.is_over
    again_call.set_result(None)
    assert letting.subject.is_over
