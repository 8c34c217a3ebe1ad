"""`Obedience`: which orders of coordinators a worker's process carries out. Pure; `WorkerProcess` asks it.

What a broken connection may have lost is sent again, and Ray may bring a call late: orders come twice, and in another
order than they were given. Rules:

- A subtask begins an attempt once. It does not begin one after the process was told to let go of that or of a later
  one, nor after it was given a later one: the numbers of attempts only grow, so numbers are all there is to remember.
- A coordinator that was replaced is not obeyed (`may_obey`). A new one may give the attempt that runs once more.
- To let go of an attempt is no order for a later one.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.task.invariants import may_obey
from tidegate.actors.task.messages.events import UNFENCED
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, Generation

NONE = AttemptNumber(-1)


class Obedience:
    """What one process was told. The generation of coordinators is one fence for the process and all its subtasks."""

    def __init__(self) -> None:
        self.newest = UNFENCED
        """The newest coordinator that has given an order."""
        self.given: dict[TaskId, AttemptNumber] = {}
        """Of each subtask the newest attempt that the process was given, whatever has become of it."""
        self._given_by: dict[TaskId, Generation] = {}
        self._let_go: dict[TaskId, AttemptNumber] = {}
        """Of each subtask the newest attempt that the process was told to let go of."""

    @property
    def holds(self) -> dict[TaskId, AttemptNumber]:
        """Of each subtask the attempt that it was given and was not told to let go of."""
        return {task: given for task, given in self.given.items() if given > self._let_go.get(task, NONE)}

    def is_replaced(self, generation: Generation) -> bool:
        """Whether a newer coordinator than this one has given an order. Remembers a newer one."""
        replaced = not may_obey(generation, self.newest)
        self.newest = max(generation, self.newest)
        return replaced

    def begins(self, tasks: Iterable[TaskId], attempt: AttemptNumber, generation: Generation) -> tuple[TaskId, ...]:
        """Return which of these subtasks begin this attempt here. They are the process's own from then on."""
        if self.is_replaced(generation):
            return ()
        begun = tuple(task for task in tasks if self._begins(task, attempt, generation))
        self.given |= dict.fromkeys(begun, attempt)
        self._given_by |= dict.fromkeys(begun, generation)
        return begun

    def _begins(self, task: TaskId, attempt: AttemptNumber, generation: Generation) -> bool:
        given = self.given.get(task, NONE), self._given_by.get(task, UNFENCED)
        return attempt > self._let_go.get(task, NONE) and (attempt, generation) > given

    def lets_go(self, tasks: Iterable[TaskId], attempt: AttemptNumber, generation: Generation) -> tuple[TaskId, ...]:
        """Return which of these subtasks let go of what they run, if that is this attempt or an earlier one."""
        if self.is_replaced(generation):
            return ()
        left = tuple(tasks)
        for task in left:
            self._let_go[task] = max(self._let_go.get(task, NONE), attempt)
        return left
