"""`CoordinatorFence`: which coordinator a task obeys: the newest that it has heard of, and none before that.

Beside it what a task tells a coordinator that takes over.
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
    """Whether only a coordinator says this."""
    return isinstance(event, _ORDERS)


class CoordinatorFence:
    """Of one task."""

    def __init__(self) -> None:
        self.generation = ev.UNFENCED

    def refuses(self, event: ev.TaskEvent) -> bool:
        """Whether an event is an order of a coordinator that was replaced. Remembers the newest one."""
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
    """What a task is doing; `covered_by`, `snapshotted` and `collecting` as in the event `TaskAnswered`."""
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
