"""`MomentsOracle`: how far event time has come in an operator is what it was, after each restore.

Windows, joins and rows that are forgotten in time keep this moment for each key group. Were it further back, a row that
is late would be taken in. No rows show that for certain: which row is late, where several channels meet, is a matter of
who is first. So the oracle notes the moments when a snapshot is taken, and looks at them when a task is restored.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.actors.task import events as ev
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.operators.watermarks.group_moments import GroupMoments
from tidegate.storage.ids import OperatorUid
from tidegate.testing.oracle.violation import InvariantViolated

_CHECKPOINTS_MAX = 200

Moments = dict[tuple[OperatorUid, int], int]
"""By operator and key group."""


class MomentsOracle:
    """The moments of the newest checkpoints of one job."""

    def __init__(self) -> None:
        self._of: dict[int, Moments] = {}

    def snapshot_taken(self, checkpoint_id: int, machine: TaskMachine) -> None:
        """A task's synchronous part is done."""
        if machine._operators_finished:
            return
        self._of.setdefault(checkpoint_id, {}).update(_moments(machine))
        while len(self._of) > _CHECKPOINTS_MAX:
            del self._of[min(self._of)]

    def after_event(self, machine: TaskMachine, event: ev.TaskEvent) -> None:
        """A task may have been restored, from a checkpoint of this job."""
        if not isinstance(event, ev.TaskRestored) or event.finished or event.checkpoint_id is None:
            return
        then = self._of.get(event.checkpoint_id, {})
        for (uid, group), moment_ms in _moments(machine):
            if moment_ms != then.get((uid, group), moment_ms):
                raise InvariantViolated(
                    9,
                    f"{machine.descriptor.task} is restored from checkpoint {event.checkpoint_id} with event time at "
                    f"{moment_ms} in key group {group} of {uid!r}, which was at {then[uid, group]}",
                )


def _moments(machine: TaskMachine) -> Iterator[tuple[tuple[OperatorUid, int], int]]:
    for link in machine._chain._links:
        operator = link.operator
        if not getattr(operator, "drops_late_rows", True):
            continue  # A join that asks nobody how late it is keeps no moment.
        for found in vars(operator).values():
            if isinstance(found, GroupMoments):
                for groups, moment_ms in found.runs():
                    yield from (((operator.context.uid, group), moment_ms) for group in groups)
