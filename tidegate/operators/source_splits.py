"""`SourceSplits` tracks which split of the task's source the current rows are from, and the event time of each split.

`SourceCursor` sets the split before each batch, and watermark generators in the same task read it. Rules, which follow
Flink's watermarks for each split:

- A split holds event time back until it has ended, or has had no rows for the time of `idleness=`. From its next row on
  it holds event time back again.
- When all splits that have not ended are idle, the task is idle, and downstream tasks do not wait for it.
- A split that only discovers other splits, and has no rows itself, never holds event time back. A discovered split
  holds event time back from its discovery on.
- If a source reads its splits one after the other, the split of a row is not tracked, and `current` is None.
- A source with two parts (`TwoPartSource`) reads its first part one split after the other, and then its second part in
  turn. A subtask that waits for the second part does not advance its event time, because the rows of that part may be
  as old. After the time of `idleness=` it is idle.
- A checkpoint stores the event time of each split with the position in the split. After a restore the lateness of a row
  is therefore decided by the same earlier rows as without a restore.
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
"""A rule for an operator that treats a row differently depending on the watermark before it, for example drops it when
late.

Takes the times of rows and the watermark at each row. Returns, for each row, the greatest watermark up to the given one
at which the treatment of the row changes, for example the end of its window. Returns a later watermark than the given
one if there is none. Accepts all int64 times.
"""


WAITING = -1
"""Entry of `SourceSplits.idle` that represents the second part of a source, while a task has waited for it for the time
of `idleness=`.
"""


def as_they_are(times: NDArray[np.int64], watermarks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The `Due` rule of operators that treat a row differently once the watermark has reached the time of the row.

    Returns the times of the rows.
    """
    return times


@dataclass(frozen=True, slots=True)
class DueByAge:
    """The `Due` rule of operators that drop rows which are at least `age_ms` ms older than the watermark."""

    age_ms: int

    def __call__(self, times: NDArray[np.int64], watermarks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns, for each row, the watermark at which it becomes too old, its time plus `age_ms`.

        If the row is not too old at its watermark in `watermarks`, that time is later than the watermark.
        """
        return np.where(times <= watermarks - self.age_ms, times + self.age_ms, watermarks + 1)


@dataclass(slots=True)
class SourceSplits:
    """Tracks the split of the rows that the task is processing, and which splits hold event time back."""

    in_turn: bool = False
    """True if the source of the task reads several splits alternately."""
    in_first_part: bool = False
    """True while the first part of a source with two parts is read, split after split."""
    waits: bool = False
    """True while the task waits for the second part of its source, or for more splits of the first part."""
    current: int | None = None
    """Number of the split, within the task, from which the current rows were read. None if unknown."""
    active: set[int] = field(default_factory=set)
    """Numbers of the splits that hold event time back: event time does not advance beyond the times of their rows."""
    idle: set[int] = field(default_factory=set)
    """Numbers of the splits that have not ended and do not hold event time back: they had no rows for the time
    `idleness`, or never have rows.
    """
    newest_ms: dict[OperatorUid, dict[int | None, int]] = field(default_factory=dict)
    """For each watermark generator, the greatest event time seen in each split, in ms."""

    @property
    def all_idle(self) -> bool:
        """Returns True if no other task needs to wait for the event time of this task."""
        return bool(self.idle) and not self.active

    def begin(self, splits: Iterable[int], without_rows: Iterable[int] = ()) -> None:
        """Records that the source starts to read these splits alternately.

        `without_rows` are splits that never have rows.
        """
        self.in_turn, self.active, self.idle = True, set(splits), set(without_rows)

    def begin_first(self) -> None:
        """Records that a source with two parts starts to read its first part."""
        self.in_turn = True
        self.in_first_part = True

    def begin_second(self, splits: Iterable[int], without_rows: Iterable[int]) -> None:
        """Records that all rows of the first part were processed, and that the source starts to read the splits of its
        second part alternately.
        """
        self.in_first_part = False
        self.waits = False
        self.begin(splits, without_rows)

    def begins_waiting(self) -> None:
        """Records that the task has read all its splits of the first part of a two-part source, and waits for the
        second part or for more splits.
        """
        self.waits = True

    def waits_too_long(self) -> None:
        """Records that the task has waited for the time of `idleness=`, so that the task is idle in event time."""
        self.idle.add(WAITING)

    def stops_waiting(self) -> None:
        """Records that the task got more splits of the first part of a two-part source, and no longer waits."""
        self.waits = False
        self.idle.discard(WAITING)

    def restore(self, split: int | None, event_times: EventTimes) -> None:
        """Restores the event times of a split from a checkpoint.

        `split` is None for a source whose splits are not tracked.
        """
        for uid, newest_ms in event_times:
            newest = self.newest_ms.setdefault(uid, {})
            newest[split] = max(newest_ms, newest.get(split, newest_ms))

    def event_times(self, split: int | None) -> EventTimes:
        """Returns the greatest event time of a split for each watermark generator."""
        return tuple((uid, newest[split]) for uid, newest in self.newest_ms.items() if split in newest)

    def joins(self, split: int, *, has_rows: bool) -> None:
        """Records that the source starts to read one more split.

        `has_rows` is False for a split that never has rows.
        """
        (self.active if has_rows else self.idle).add(split)

    def has_rows(self, split: int) -> None:
        """Records that the next rows are from this split."""
        self.current = split
        self.idle.discard(split)
        self.active.add(split)

    def has_nothing(self, split: int) -> None:
        """Records that a split has had no rows for the time `idleness`, so that it is idle."""
        self.active.discard(split)
        self.idle.add(split)

    def has_ended(self, split: int) -> None:
        """Records that a split has ended. Called before its last rows are processed."""
        self.active.discard(split)
        self.idle.discard(split)
