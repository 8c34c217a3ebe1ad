"""`SourceSplits` tracks which split of the task's source the current rows are from, and the event time of each split.

`SourceCursor` sets the split before each batch, and watermark generators in the same task read it. Rules (Flink's, for
watermarks of each split):

- A split holds event time back until it has ended, or has had no rows for the time of `idleness=`. From its next row on
  it holds event time back again.
- When all splits that have not ended are idle, the task is idle, and downstream tasks do not wait for it.
- A split that only discovers other splits and never has rows never holds event time back. A discovered split does from
  then on.
- If splits are read one after the other, only the order of the rows is known, and `current` is None.
- A source with two parts (`TwoPartSource`) reads its first part one split after the other, and then its second part in
  turn. A subtask that waits for the second part keeps its event time, because the rows that follow may be as old. It is
  idle after the time of `idleness=`.
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


WAITING = -1
"""Stands in `idle` for the second part of a source that a task waits for."""


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
    in_first_part: bool = False
    """True while the first part of a source with two parts is read, one split after the other."""
    waits: bool = False
    """True while the task waits for the second part of its source, or for more splits of the first."""
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

    def begin_first(self) -> None:
        """Called when the source begins with the first part of two."""
        self.in_turn = True
        self.in_first_part = True

    def begin_second(self, splits: Iterable[int], without_rows: Iterable[int]) -> None:
        """Called when all rows of the first part were processed, and the source begins with its second part."""
        self.in_first_part = False
        self.waits = False
        self.begin(splits, without_rows)

    def begins_waiting(self) -> None:
        """Called when the source has processed all of its first part."""
        self.waits = True

    def waits_too_long(self) -> None:
        """Called when the source has waited for the time of `idleness=`."""
        self.idle.add(WAITING)

    def stops_waiting(self) -> None:
        """Called when the source gets more splits of the first part."""
        self.waits = False
        self.idle.discard(WAITING)

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
