"""`SourceSplits`: which split of the task's source the current rows are from, and which splits hold event time back.

`SourceCursor` says so before each batch, and generators of watermarks in the same task ask. Rules (Flink's, for
watermarks of each split):

- A split holds event time back until it has ended, or has had no rows for the time that `idleness=` says. From its next
  row on it holds event time back again.
- When all splits that have not ended are idle, so is the task: nobody downstream waits for it.
- A split that never has rows, and only finds others, never holds event time back. A split that was found does, from
  then on.
- If splits are read one after the other, only the order of the rows is known: `current` is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class SourceSplits:
    """What is known of the rows that are processed now."""

    in_turn: bool = False
    """Whether the task has a source whose splits are read in turn."""
    current: int | None = None
    """The split that they are from, by its number in the task."""
    active: set[int] = field(default_factory=set)
    """Splits that hold event time back."""
    idle: set[int] = field(default_factory=set)
    """Splits that have not ended, and have had no rows for long, or never have any."""

    @property
    def all_idle(self) -> bool:
        """Whether nobody needs to wait for the event time of this task."""
        return bool(self.idle) and not self.active

    def begin(self, splits: Iterable[int], without_rows: Iterable[int] = ()) -> None:
        """The source begins with these splits, and reads them in turn; some of them never have rows."""
        self.in_turn, self.active, self.idle = True, set(splits), set(without_rows)

    def joins(self, split: int, *, has_rows: bool) -> None:
        """The source reads this split as well from now on."""
        (self.active if has_rows else self.idle).add(split)

    def has_rows(self, split: int) -> None:
        """The rows that come now are from this split."""
        self.current = split
        self.idle.discard(split)
        self.active.add(split)

    def has_nothing(self, split: int) -> None:
        """A split has had no rows for long."""
        self.active.discard(split)
        self.idle.add(split)

    def has_ended(self, split: int) -> None:
        """The rows that come now are the last ones of this split, if there are any."""
        self.active.discard(split)
        self.idle.discard(split)
