"""`SourceSplits` tracks which split of the task's source the current rows are from, and the event time of each split.

`SourceCursor` sets the split before each batch, and watermark generators in the same task read it. Rules (Flink's, for
watermarks of each split):

- A split holds event time back until it has ended, or has had no rows for the time of `idleness=`. From its next row on
  it holds event time back again.
- When all splits that have not ended are idle, the task is idle, and downstream tasks do not wait for it.
- A split that only discovers other splits and never has rows never holds event time back. A discovered split does from
  then on.
- If splits are read one after the other, only the order of the rows is known, and `current` is None.
- The event time of a split belongs to the position in the split. After a restore a row is therefore judged by the same
  earlier rows as without one.
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
"""Distinguishes rows by the watermark before them.

Takes the times of rows and the watermark at each row. Returns for each row the last watermark up to this one that makes
a difference to the row, for example the end of its window, or a later watermark if there is none. Accepts every time.
"""


def as_they_are(times: NDArray[np.int64], watermarks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distinguishes rows only by whether the watermark has reached their time."""
    return times


@dataclass(frozen=True, slots=True)
class DueByAge:
    """A `Due`: rows that are this far behind the watermark are too late."""

    age_ms: int

    def __call__(self, times: NDArray[np.int64], watermarks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The watermark has come to the time of a row, and so far beyond it."""
        return np.where(times <= watermarks - self.age_ms, times + self.age_ms, watermarks + 1)


@dataclass(slots=True)
class SourceSplits:
    """State of the source for the rows that are being processed."""

    in_turn: bool = False
    """True if the task has a source whose splits are read in turn."""
    current: int | None = None
    """The split that they are from, by its number in the task."""
    active: set[int] = field(default_factory=set)
    """Splits that hold event time back."""
    idle: set[int] = field(default_factory=set)
    """Splits that have not ended, and have had no rows for long, or never have any."""
    newest_ms: dict[OperatorUid, dict[int | None, int]] = field(default_factory=dict)
    """For each watermark generator the greatest timestamp of each split."""

    @property
    def all_idle(self) -> bool:
        """True if no other task needs to wait for the event time of this task."""
        return bool(self.idle) and not self.active

    def begin(self, splits: Iterable[int], without_rows: Iterable[int] = ()) -> None:
        """Called when the source begins with these splits, and reads them in turn. Some never have rows."""
        self.in_turn, self.active, self.idle = True, set(splits), set(without_rows)

    def restore(self, split: int | None, event_times: EventTimes) -> None:
        """Restores the event time of a split from a checkpoint."""
        for uid, newest_ms in event_times:
            newest = self.newest_ms.setdefault(uid, {})
            newest[split] = max(newest_ms, newest.get(split, newest_ms))

    def event_times(self, split: int | None) -> EventTimes:
        """Returns the event time of a split for each watermark generator."""
        return tuple((uid, newest[split]) for uid, newest in self.newest_ms.items() if split in newest)

    def joins(self, split: int, *, has_rows: bool) -> None:
        """Called when the source starts to read another split."""
        (self.active if has_rows else self.idle).add(split)

    def has_rows(self, split: int) -> None:
        """Called when the next rows are from this split."""
        self.current = split
        self.idle.discard(split)
        self.active.add(split)

    def has_nothing(self, split: int) -> None:
        """Called when a split has had no rows for the time of `idleness=`."""
        self.active.discard(split)
        self.idle.add(split)

    def has_ended(self, split: int) -> None:
        """Called when a split has ended, before its last rows are processed."""
        self.active.discard(split)
        self.idle.discard(split)
