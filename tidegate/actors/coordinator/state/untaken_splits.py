"""`UntakenSplits`: what nobody has of the splits of a source, so that an answer costs what it gives, not all splits.

It follows from what the subtasks have taken (`TakenSplits`), and is no part of the coordinator's memory. Whoever uses
it asks first whether it still follows from that, and makes another one if not: after a subtask was restored, say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from tidegate.actors.coordinator.job.job_spec import AssignedSource
from tidegate.actors.coordinator.state.taken_splits import TakenSplits
from tidegate.protocol.identity import TaskId


class UntakenSplits:
    """Of one source. `subtasks` are those that have taken splits, or were told that there are none."""

    def __init__(self, source: AssignedSource, subtasks: Mapping[TaskId, TakenSplits]) -> None:
        self._source = source
        self._seen = {task: (taken, len(taken.given)) for task, taken in subtasks.items()}
        self._last = {task: taken.last for task, taken in subtasks.items()}
        self.taken = {number for taken in subtasks.values() for number in taken.all}
        """What somebody has."""
        self.left = [number for number in source.unread if number not in self.taken]
        """What nobody has, ascending."""

    def follows_from(self, source: AssignedSource, subtasks: Mapping[TaskId, TakenSplits]) -> bool:
        """Whether the subtasks have taken what they had when it was made, and what was given through it since."""
        if source is not self._source or len(subtasks) != len(self._seen):
            return False
        seen = ((taken, self._seen.get(task, (None, 0))) for task, taken in subtasks.items())
        return all(taken is before and len(taken.given) == given for taken, (before, given) in seen)

    def last(self, task: TaskId) -> int:
        """As `TakenSplits.last`."""
        return self._last.get(task, -1)

    def after(self, number: int) -> int:
        """How many of those that are left come up to a split, itself included."""
        return bisect_right(self.left, number)

    def give(self, task: TaskId, taken: TakenSplits, begin: int, splits: Sequence[int]) -> None:
        """A subtask gets those from `begin` on of what is left."""
        del self.left[begin : begin + len(splits)]
        self.taken.update(splits)
        taken.given += tuple(splits)
        self._seen[task] = taken, len(taken.given)
        self._last[task] = max(self._last[task], *splits)
