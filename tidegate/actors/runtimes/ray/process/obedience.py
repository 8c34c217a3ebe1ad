"""`Obedience`: which orders of coordinators a task's process carries out. Pure; `TaskProcess` asks it.

What a broken connection may have lost is said again, and Ray may bring a call late: orders come twice, and in another
order than they were given. Rules:

- An attempt is begun once. It is not begun after the process was told to let go of it, or of a later one, nor after
  it was given a later one: attempts have numbers that only grow, so numbers are all there is to remember.
- A coordinator that was replaced is not obeyed (`may_obey`). A new one may give the attempt that runs once more.
- To let go of an attempt is no order for a later one.
"""

from __future__ import annotations

from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.task.invariants import may_obey
from tidegate.actors.task.messages.events import UNFENCED
from tidegate.storage.ids import AttemptNumber, Generation

NONE = AttemptNumber(-1)


class Obedience:
    """What one process was told."""

    def __init__(self) -> None:
        self.newest = UNFENCED
        """The newest coordinator that has said something."""
        self.given: tuple[TaskId | None, AttemptNumber] = (None, NONE)
        """The task of an attempt that the process was given last, whatever has become of it."""
        self._given_by = UNFENCED
        self._let_go = NONE
        """The newest attempt that it was told to let go of."""

    def is_replaced(self, generation: Generation) -> bool:
        """Whether another coordinator has said something since this one was in charge. Remembers a newer one."""
        replaced = not may_obey(generation, self.newest)
        self.newest = max(generation, self.newest)
        return replaced

    def begins(self, task: TaskId, attempt: AttemptNumber, generation: Generation) -> bool:
        """Whether the process is to begin this attempt. It is its own from then on."""
        if self.is_replaced(generation) or attempt <= self._let_go:
            return False
        if (attempt, generation) <= (self.given[1], self._given_by):
            return False
        self.given, self._given_by = (task, attempt), generation
        return True

    def lets_go(self, attempt: AttemptNumber, generation: Generation) -> bool:
        """Whether the process is to let go of what it runs, if that is this attempt or an earlier one."""
        if self.is_replaced(generation):
            return False
        self._let_go = max(self._let_go, attempt)
        return True
