"""`SourceSplits`: of which split of the task's source the rows are, and which splits hold event time back.

The task's source says so before each batch, and generators of watermarks in the same task ask. Rules (Flink's, for
watermarks of each split):

- A split holds event time back until it has ended, or until it has had nothing for as long as the source's idleness
  says. From its next row on it does again.
- When every split that goes on is idle, so is the task: those behind it wait for it no longer.
- Of splits that are read one after the other no more is known than the order of the rows: `current` is None.
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
    """The split that they are of, by its number in the task."""
    active: set[int] = field(default_factory=set)
    """Splits that hold event time back."""
    idle: set[int] = field(default_factory=set)
    """Splits that go on and have had nothing for long."""

    @property
    def all_idle(self) -> bool:
        """Whether nobody needs to wait for this task."""
        return bool(self.idle) and not self.active

    def begin(self, splits: Iterable[int]) -> None:
        """These splits go on, and are read in turn."""
        self.in_turn, self.active = True, set(splits)

    def has_rows(self, split: int) -> None:
        """The rows that come now are of this split."""
        self.current = split
        self.idle.discard(split)
        self.active.add(split)

    def has_nothing(self, split: int) -> None:
        """A split has had nothing for long."""
        self.active.discard(split)
        self.idle.add(split)

    def has_ended(self, split: int) -> None:
        """The rows that come now are the last ones of this split, if there are any."""
        self.active.discard(split)
        self.idle.discard(split)
