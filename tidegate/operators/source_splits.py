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
"""The greatest timestamp, in ms, that each watermark generator has seen in a split."""
Due: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
"""A rule by which an operator treats a row differently, depending on the watermark before it.

Takes the times of rows and the watermark at each row. Returns for each row the last watermark up to this one that makes
a difference to the row, for example the end of its window, or a later watermark if there is none. Accepts every time.
"""


def as_they_are(times: NDArray[np.int64], watermarks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns a `Due` for operators that only distinguish whether the watermark has reached the time of a row."""
    return times


@dataclass(frozen=True, slots=True)
class DueByAge:
    """A `Due` for operators that drop rows which are at least this far behind the watermark."""

    age_ms: int

    def __call__(self, times: NDArray[np.int64], watermarks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns, for each row, the last watermark that makes a difference: its own time, or the time at which it is
        too old.
        """
        return np.where(times <= watermarks - self.age_ms, times + self.age_ms, watermarks + 1)


@dataclass(slots=True)
class SourceSplits:
    """Tracks the split of the rows that the task is processing, and which splits hold event time back."""

    in_turn: bool = False
    """True if the task has a source that alternates between its splits."""
    current: int | None = None
    """Number of the split, within the task, to which the rows being processed belong. None if unknown."""
    active: set[int] = field(default_factory=set)
    """Numbers of the splits that hold event time back."""
    idle: set[int] = field(default_factory=set)
    """Numbers of the splits that have not ended, and have been without rows for `idleness`, or never have rows."""
    newest_ms: dict[OperatorUid, dict[int | None, int]] = field(default_factory=dict)
    """For each watermark generator, the greatest timestamp of each split, in ms."""

    @property
    def all_idle(self) -> bool:
        """Returns True if no other task needs to wait for the event time of this task."""
        return bool(self.idle) and not self.active

    def begin(self, splits: Iterable[int], without_rows: Iterable[int] = ()) -> None:
        """Called when the source starts with these splits, and alternates between them. Some of them never have
        rows.
        """
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
        """Called when the source starts to read one more split."""
        (self.active if has_rows else self.idle).add(split)

    def has_rows(self, split: int) -> None:
        """Called when the next rows belong to this split."""
        self.current = split
        self.idle.discard(split)
        self.active.add(split)

    def has_nothing(self, split: int) -> None:
        """Called when a split has had no rows for the duration `idleness`."""
        self.active.discard(split)
        self.idle.add(split)

    def has_ended(self, split: int) -> None:
        """Called when a split has ended, before its last rows are processed."""
        self.active.discard(split)
        self.idle.discard(split)
