"""The oracle of copies: savepoints that a coordinator copies into folders of their own.

It counts from the order to copy until the answer has come; a savepoint that was given up meanwhile is still copied.
Rules:

- One copy of a savepoint is under way at a time: the answer of the first would be taken for that of the second (4).
- A folder is not deleted while somebody writes to it: half of it would be there again afterwards (5).
- No more copies are under way than there may be: each may hold a thread for as long as its folder is away (10). A
  savepoint is refused where it would be one too many, but one that was triggered before is still copied.

A coordinator knows of its own copies alone, so each has an oracle of its own.
"""

from __future__ import annotations

from tidegate.actors.coordinator.invariants import COPIES_MAX
from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.simulation.oracle.violation import InvariantViolated


class CopiesOracle:
    """Watches one coordinator. `savepoints_max`: how many savepoints may be pending at a time."""

    def __init__(self, savepoints_max: int) -> None:
        self._copies_max = COPIES_MAX - 1 + savepoints_max
        self._under_way: set[int] = set()

    def ordered(self, instruction: do.CoordinatorInstruction) -> None:
        """The coordinator does something."""
        if isinstance(instruction, do.WriteSavepoint):
            number = int(instruction.metadata.checkpoint_id)
            if number in self._under_way:
                raise InvariantViolated(4, f"savepoint {number} is copied while it is being copied")
            self._under_way.add(number)
            if len(self._under_way) > self._copies_max:
                raise InvariantViolated(
                    10,
                    f"{len(self._under_way)} savepoints are being copied side by side, {self._copies_max} may be",
                )
        elif isinstance(instruction, do.DiscardSavepoint) and instruction.checkpoint_id in self._under_way:
            raise InvariantViolated(5, f"savepoint {instruction.checkpoint_id} is deleted while it is being copied")

    def heard(self, event: co.CoordinatorEvent) -> None:
        """The coordinator is told something."""
        if isinstance(event, co.SavepointWritten | co.SavepointWriteFailed):
            self._under_way.discard(int(event.checkpoint_id))
