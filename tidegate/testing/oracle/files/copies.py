"""The oracle of copies: savepoints that a coordinator copies into folders of their own.

It counts from the order to copy until the answer has come; a savepoint that was given up meanwhile is still copied.
Rules:

- One copy of a savepoint is under way at a time: the answer of the first would be taken for that of the second (4).
- A folder is not deleted while somebody writes to it: half of it would be there again afterwards (5).
- No more copies are under way than there may be, and one of a stop: each may hold a thread for as long as its folder is
  away (10).
- What is copied, but for a stop, is a checkpoint that has completed before (4). It stays until its copy has ended, or
  was told to stop (5).

A coordinator knows of its own copies alone, so each has an oracle of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Container

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.invariants import COPIES_MAX
from tidegate.testing.oracle.violation import InvariantViolated


class CopiesOracle:
    """Watches one coordinator. `completed`: the numbers of the checkpoints that have completed, as they do."""

    def __init__(self, completed: Container[int]) -> None:
        self._completed = completed
        self._under_way: set[int] = set()
        self._stopped: set[int] = set()
        """Of these, the ones that were told to stop."""

    @property
    def under_way(self) -> Collection[int]:
        """Savepoints whose copy has been ordered, and has not been answered."""
        return self._under_way

    def ordered(self, instruction: do.CoordinatorInstruction) -> None:
        """The coordinator does something."""
        if isinstance(instruction, do.WriteSavepoint):
            number = int(instruction.metadata.checkpoint_id)
            if number in self._under_way:
                raise InvariantViolated(4, f"savepoint {number} is copied while it is being copied")
            self._under_way.add(number)
            self._stopped.discard(number)
            if len(self._under_way) > COPIES_MAX + 1:
                raise InvariantViolated(
                    10, f"{len(self._under_way)} savepoints are being copied side by side, {COPIES_MAX + 1} may be"
                )
            if number not in self._completed and not instruction.metadata.kind.stops:
                raise InvariantViolated(4, f"savepoint {number} is copied before its checkpoint is complete")
        elif isinstance(instruction, do.StopCopy):
            self._stopped.add(int(instruction.checkpoint_id))
        elif isinstance(instruction, do.DiscardCheckpoint):
            if instruction.checkpoint_id in self._under_way - self._stopped:
                raise InvariantViolated(
                    5, f"checkpoint {instruction.checkpoint_id} is deleted while its savepoint is being copied"
                )
        elif isinstance(instruction, do.DiscardSavepoint) and instruction.checkpoint_id in self._under_way:
            raise InvariantViolated(5, f"savepoint {instruction.checkpoint_id} is deleted while it is being copied")

    def heard(self, event: co.CoordinatorEvent) -> None:
        """The coordinator is told something."""
        if isinstance(event, co.SavepointWritten | co.SavepointWriteFailed):
            self._under_way.discard(int(event.checkpoint_id))
