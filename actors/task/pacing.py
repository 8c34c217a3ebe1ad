"""How many rows a task processes in one turn.

A barrier that overtakes, a trigger and an abort are taken in between turns, so a turn must not take long: where an
operator is slow, batches are cut. Where it is fast they are not, because whole batches cost least.
"""

from __future__ import annotations

TURN_MS_MAX = 100
"""A turn that took longer makes the next ones smaller."""
ROWS_MIN = 16
ROWS_UNLIMITED = 1 << 24


class TurnPacer:
    """Rows a turn, adapted to how long turns take."""

    def __init__(self, rows_max: int = ROWS_UNLIMITED) -> None:
        self._limit = rows_max
        self._rows_max = rows_max

    @property
    def rows_max(self) -> int:
        """Rows that the next turn may process."""
        return self._rows_max

    def took(self, rows: int, turn_ms: int) -> None:
        """A turn of `rows` rows has taken `turn_ms` ms."""
        if not rows:
            return
        if turn_ms > TURN_MS_MAX:
            self._rows_max = max(min(ROWS_MIN, self._limit), min(rows, self._rows_max) * TURN_MS_MAX // turn_ms)
        elif turn_ms * 2 < TURN_MS_MAX and rows >= self._rows_max:
            self._rows_max = min(self._rows_max * 2, self._limit)
