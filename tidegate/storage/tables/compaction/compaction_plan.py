"""Which entries of a table are to be put together while its job runs; pure.

A table that grows is a row of *units*, the entries that show, in the order of the table. A commit is a unit of level 0.
Rules:

- As soon as `fan_in` units of one level are next to each other they become one of the next level: their small files
  become large ones, and large ones are only named again. So a row is written about as many times as there are levels,
  and a table of n commits has at most `fan_in - 1` units for each of its log(n) levels, whatever their size.
- Of units that wait, more may be taken at once, so that who has fallen behind catches up. What is read at once has a
  limit all the same.
- Levels never rise along the row: a unit of a lower level before one of a higher, as a restored job may leave it,
  counts as one of that.
- A unit of very many files is not touched any more. Naming them again would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAN_IN = 10
FILES_A_UNIT_MAX = 5_000
READ_FACTOR = 8
"""What one compaction reads, in times the size that files are to have."""
_SEALED = 1_000_000


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """How large files are to become, in bytes as they are stored, and after how many units of a level."""

    file_bytes: int
    fan_in: int = FAN_IN


@dataclass(frozen=True, slots=True)
class Unit:
    """An entry that shows: its number, how many compactions its rows went through, its files, bytes of small ones."""

    seq: int
    level: int
    files: int
    small_bytes: int


def next_compaction(units: Sequence[Unit], settings: CompactionSettings) -> tuple[int, tuple[Unit, ...]]:
    """The level that comes of putting units together now, and these, next to each other; none: nothing is due."""
    levels = [_SEALED if unit.files >= FILES_A_UNIT_MAX else unit.level for unit in units]
    for at in range(len(levels) - 2, -1, -1):
        levels[at] = max(levels[at], levels[at + 1])
    end = len(units)
    while end > 0 and levels[end - 1] < _SEALED:
        # Lower levels come last, and first in turn.
        start = levels.index(levels[end - 1])
        if end - start >= settings.fan_in:
            return levels[start] + 1, _bounded(units[start:end], settings)
        end = start
    return 0, ()


def _bounded(units: Sequence[Unit], settings: CompactionSettings) -> tuple[Unit, ...]:
    """The first units, at least as many as are needed, with so many bytes to read."""
    taken = sum_bytes = 0
    bytes_max = settings.file_bytes * READ_FACTOR
    for unit in units:
        sum_bytes += unit.small_bytes
        if taken >= settings.fan_in and sum_bytes > bytes_max:
            break
        taken += 1
    return tuple(units[:taken])
