"""`CoordinatorFence`: a task obeys the newest coordinator that it has heard of, and ignores all before it.

A coordinator that was replaced may not know it, and may still give orders. `TaskHost` and `TaskMachine` ask the fence
before they take in an event. The rule itself is `may_obey` in `invariants.py`.

`answer_to` is what a task tells a coordinator that takes over.
"""

from __future__ import annotations

from typing import TypeGuard, get_args

from tidegate.actors.task.invariants import may_obey
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.task_status import TaskStatus
from tidegate.storage.ids import CheckpointId

_ORDERS: tuple[type, ...] = get_args(ev.CoordinatorOrder)


def is_order(event: ev.TaskEvent) -> TypeGuard[ev.CoordinatorOrder]:
    """Whether an event is an order: something that only a coordinator says."""
    return isinstance(event, _ORDERS)


class CoordinatorFence:
    """The newest generation that one task has heard of."""

    def __init__(self) -> None:
        self.generation = ev.UNFENCED

    def refuses(self, event: ev.TaskEvent) -> bool:
        """Whether to ignore an event: it is an order of a replaced coordinator. Remembers a newer generation."""
        if not is_order(event):
            return False
        generation = event.generation
        if not may_obey(generation, self.generation):
            return True
        self.generation = generation
        return False


def answer_to(
    event: ev.CoordinatorTookOver,
    status: TaskStatus,
    covered_by: CheckpointId | None,
    snapshotted: CheckpointId,
    collecting: CheckpointId | None,
) -> do.AnswerTakeover:
    """What the task is doing. `TaskAnswered` says what `covered_by`, `snapshotted` and `collecting` mean."""
    return do.AnswerTakeover(
        event.attempt,
        event.generation,
        started=status not in (TaskStatus.CREATED, TaskStatus.READY),
        ended=status in (TaskStatus.END_OF_DATA, TaskStatus.FINISHED),
        finished=status is TaskStatus.FINISHED,
        covered_by=covered_by,
        snapshotted=snapshotted,
        collecting=collecting,
    )
