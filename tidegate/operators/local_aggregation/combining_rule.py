"""`CombiningRule`: whether to combine the rows of a batch before they are sent; in mode `auto` as it pays.

`Combiner` asks it before each batch, and tells it how many groups the rows made. Pure, and in memory alone: a restored
task begins anew. Rules:

- It pays where many rows make few groups: what is measured is groups by rows. Small batches are sent as they are,
  unmeasured: there the call costs more than it saves.
- It goes on when `LOOKED_AT` measured batches together have made at most `ON_AT` groups a row, and off at `OFF_AT`. In
  between it stays what it is. After a switch as many batches are measured anew, so it cannot switch more often.
- While it is off, so many batches are only counted now and then: first after `PAUSE_MIN` batches, then less and less
  often as long as it does not pay, at last after `PAUSE_MAX`. The count is over at once if the first rows of a batch,
  one in `LOOKED_INTO`, make more groups than `OFF_AT` of all its rows: as after a count that came to nothing.
- What it measures does not depend on what it decides: a row has its key whether or not it was combined. So nothing can
  build up.
"""

from __future__ import annotations

from typing import Literal

CombiningMode = Literal["auto", "on", "off"]

ROWS_MIN = 16_384
"""Batches with fewer rows are not combined in mode `auto`."""
ON_AT, OFF_AT = 0.1, 0.2
"""Of `benchmarks/local_aggregation.py`: without the cost of messages a group for each ten rows just pays for itself."""
LOOKED_AT, LOOKED_INTO = 4, 4
PAUSE_MIN, PAUSE_MAX = 8, 256


def may_pay(mode: CombiningMode, rows: int) -> bool:
    """Whether to ask the rule at all about a batch of so many rows."""
    return rows >= ROWS_MIN if mode == "auto" else mode == "on" and rows > 1


class CombiningRule:
    """The rule of one sender on one edge."""

    def __init__(self, mode: CombiningMode) -> None:
        self._mode = mode
        self.combining = mode == "on"
        """Whether batches are combined now."""
        self._rows = self._groups = self._measured = 0
        self._pause = PAUSE_MIN
        self._left = 0
        """Batches that pass before the next one is counted."""

    def looks_at(self, rows: int) -> bool:
        """Whether a batch is grouped: to be combined, or to learn whether that would pay."""
        if not may_pay(self._mode, rows):
            return False
        if self._mode == "auto" and not self.combining and self._left:
            self._left -= 1
            return False
        return True

    def rows_first(self, rows: int) -> int:
        """How many rows of a batch to group first, to see whether it is worth while to group the others; 0: none."""
        return rows // LOOKED_INTO if self._mode == "auto" and not self.combining else 0

    def gives_up(self, rows: int, groups: int) -> bool:
        """Whether the first rows of a batch have more groups than all may have while it pays. Then a count is over."""
        if groups <= OFF_AT * rows:
            return False
        self._forget()
        self._rest()
        return True

    def combines(self, rows: int, groups: int) -> bool:
        """Whether a batch that was grouped is to be combined."""
        if self._mode == "auto":
            self._measure(rows, groups)
        return self.combining and groups < rows

    def _measure(self, rows: int, groups: int) -> None:
        self._rows += rows
        self._groups += groups
        self._measured += 1
        if self._measured < LOOKED_AT:
            return
        share = self._groups / self._rows
        self._forget()
        if self.combining:
            self.combining = share < OFF_AT
            self._pause = PAUSE_MIN
        else:
            self.combining = share <= ON_AT
        if not self.combining:
            self._rest()

    def _forget(self) -> None:
        self._rows = self._groups = self._measured = 0

    def _rest(self) -> None:
        """Let batches pass until the next count."""
        self._left = self._pause
        self._pause = min(2 * self._pause, PAUSE_MAX)
