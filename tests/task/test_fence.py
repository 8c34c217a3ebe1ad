"""Which coordinator a task obeys, and what it tells one that takes over."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.actors.task.task_machine import CoordinatorFence, answer_to, is_order
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation

FIRST = AttemptNumber(0)
ORDERS = (
    ev.TasksStarted(0),
    ev.CoordinatorTookOver(0, FIRST, Generation(0)),
    ev.SplitsAssigned(0, FIRST, 0, ()),
    ev.WatermarkAnnounced(0, FIRST, 0),
    ev.CheckpointTriggered(0, FIRST, CheckpointId(1), 0),
    ev.CheckpointAborted(0, FIRST, CheckpointId(1)),
    ev.CheckpointCompleted(0, FIRST, CheckpointId(1)),
)


def test_these_are_all_orders() -> None:
    """Each has the generation of the coordinator that gives it."""
    assert {type(order) for order in ORDERS} == set(get_args(ev.CoordinatorOrder))
    assert all(is_order(order) for order in ORDERS)
    assert not is_order(ev.TurnGranted(0))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_older_coordinator_is_refused_and_the_same_one_is_obeyed(order: ev.CoordinatorOrder) -> None:
    """Whatever it says, from the first word of its successor on."""
    fence = CoordinatorFence()
    second, third = replace(order, generation=Generation(2)), replace(order, generation=Generation(3))
    assert not fence.refuses(second)
    assert not fence.refuses(second)
    assert not fence.refuses(ev.CoordinatorTookOver(0, FIRST, Generation(3)))
    assert fence.refuses(second)
    assert not fence.refuses(third)


@pytest.mark.parametrize(
    ("status", "known"),
    [
        (TaskStatus.CREATED, (False, False, False)),
        (TaskStatus.READY, (False, False, False)),
        (TaskStatus.RUNNING, (True, False, False)),
        (TaskStatus.FINISHING, (True, False, False)),
        (TaskStatus.END_OF_DATA, (True, True, False)),
        (TaskStatus.FINISHED, (True, True, True)),
    ],
)
def test_a_task_says_how_far_it_is(status: TaskStatus, known: tuple[bool, bool, bool]) -> None:
    """Started, ended, finished: what it has told, or would have been told."""
    asked = ev.CoordinatorTookOver(0, FIRST, Generation(2))
    assert answer_to(asked, status, None, CheckpointId(4), CheckpointId(5)) == do.AnswerTakeover(
        FIRST, Generation(2), *known, None, CheckpointId(4), CheckpointId(5)
    )
