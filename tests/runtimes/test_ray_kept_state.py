"""The process of a task on Ray, without Ray: what a task that was stopped leaves there, the next attempt gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from ray_fakes import FIRST, SINK, SOURCE, Process, task_processes

from tidegate.actors.coordinator import events as co
from tidegate.actors.drivers.task_driver import TaskDriver
from tidegate.actors.ray import worker_actor
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber

_SECOND = AttemptNumber(FIRST + 1)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TaskId], Process]]:
    """Makes the process of a task of source -> sink."""
    with task_processes(monkeypatch) as make:
        yield make


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the tasks that begin are given; each leaves the number of its attempt."""
    given: list[object] = []

    def effects(*arguments: Any, **named: Any) -> Any:
        given.append(arguments[-2])
        return make_effects(*arguments[:-2], **named)

    module: Any = worker_actor
    make_effects = module.TaskEffects
    monkeypatch.setattr(module, "TaskEffects", effects)
    monkeypatch.setattr(
        TaskDriver, "hand_over", lambda host: {"left by": host.machine.descriptor.task, "in": host.machine.attempt}
    )
    return given


@pytest.mark.parametrize("dropped", [False, True])
def test_the_next_attempt_gets_what_was_left(
    process: Callable[[TaskId], Process], given: list[object], dropped: bool
) -> None:
    """Whether the task was told to stop before, or is just replaced. Only once."""
    sink = process(SINK).start()
    if dropped:
        sink.drop(FIRST)
    sink.actor.deploy(replace(sink.order, attempt=_SECOND))
    sink.await_report(co.TaskReady)

    assert given == [{}, {"left by": SINK, "in": FIRST}]


def test_another_task_gets_nothing(process: Callable[..., Process], given: list[object]) -> None:
    """Each subtask of a worker gets what its own last attempt has left, whichever begins first."""
    both = process(SOURCE, SINK).start()
    both.drop(FIRST)
    both.actor.deploy(replace(both.order, tasks=(SINK,), attempt=_SECOND, peers={SOURCE: both.as_peer}))
    both.await_report(co.TaskReady)
    third = AttemptNumber(_SECOND + 1)
    both.actor.deploy(replace(both.order, attempt=third))
    for _ in both.tasks:
        both.await_report(co.TaskReady)

    left = {"left by": SINK, "in": FIRST}
    assert given == [{}, {}, left, {"left by": SOURCE, "in": FIRST}, {"left by": SINK, "in": _SECOND}]


def test_a_task_that_has_failed_leaves_nothing(process: Callable[[TaskId], Process], given: list[object]) -> None:
    """Nobody knows in the middle of what it has stopped."""
    sink = process(SINK).start()
    sink.actor.thread_died(RuntimeError("as told"))
    sink.settle()
    sink.actor.deploy(replace(sink.order, attempt=_SECOND))
    sink.await_report(co.TaskReady)

    assert given == [{}, {}]
