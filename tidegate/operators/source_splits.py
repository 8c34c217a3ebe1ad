"""`SourceSplits`: which split of the task's source the current rows are from, and how far event time is in each.

`SourceCursor` says so before each batch, and generators of watermarks in the same task ask. Rules (Flink's, for
watermarks of each split):

- A split holds event time back until it has ended, or has had no rows for the time that `idleness=` says. From its next
  row on it holds event time back again.
- When all splits that have not ended are idle, so is the task: nobody downstream waits for it.
- A split that never has rows, and only finds others, never holds event time back. A split that was found does, from
  then on.
- If splits are read one after the other, only the order of the rows is known: `current` is None.
- How far event time is in a split belongs to the position in the split. So after a restore a row is judged by the same
  rows before it as without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.storage.ids import OperatorUid

EventTimes: TypeAlias = tuple[tuple[OperatorUid, int], ...]
"""The greatest timestamp that each generator of watermarks has seen in a split, in milliseconds."""
Due: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
"""How somebody tells rows apart by the watermark before them.

For the times of rows, and the watermark that each of them lies behind: the last watermark up to this one that makes a
difference to the row, as the one that ends its window; a later one if none does. It fails for no time.
"""


def as_they_are(times: NDArray[np.int64], watermarks: NDArray[np.int64]) -> NDArray[np.int64]:
    """What makes a difference is whether the watermark has reached the time of a row."""
    return times


@dataclass(frozen=True, slots=True)
class DueByAge:
    """A `Due`: rows that are so far behind the watermark are too late."""

    age_ms: int

    def __call__(self, times: NDArray[np.int64], watermarks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The watermark has come to the time of a row, and so far beyond it."""
        return np.where(times <= watermarks - self.age_ms, times + self.age_ms, watermarks + 1)


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
    newest_ms: dict[OperatorUid, dict[int | None, int]] = field(default_factory=dict)
    """For each generator of watermarks the greatest timestamp of each split."""

    @property
    def all_idle(self) -> bool:
        """Whether nobody needs to wait for the event time of this task."""
        return bool(self.idle) and not self.active

    def begin(self, splits: Iterable[int], without_rows: Iterable[int] = ()) -> None:
        """The source begins with these splits, and reads them in turn; some of them never have rows."""
        self.in_turn, self.active, self.idle = True, set(splits), set(without_rows)

    def restore(self, split: int | None, event_times: EventTimes) -> None:
        """So far event time was in a split, in the checkpoint."""
        for uid, newest_ms in event_times:
            newest = self.newest_ms.setdefault(uid, {})
            newest[split] = max(newest_ms, newest.get(split, newest_ms))

    def event_times(self, split: int | None) -> EventTimes:
        """So far event time is in a split."""
        return tuple((uid, newest[split]) for uid, newest in self.newest_ms.items() if split in newest)

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
