"""Sets how many rows a task processes in one turn.

A task takes in overtaking barriers, triggers and aborts between two turns, so a turn must be short. Where an operator
is slow, batches are cut. Where it is fast they are not, because whole batches cost least.

A call of a function may have a fixed cost that no cut saves (a model, a remote service). So the model of a turn is
`fixed + rows * slope`. Both are learned from turns of different size. The task machine asks `TaskPacers` in each turn.
Rules:

- A turn is longer than `TURN_MS_MAX` only where a shorter one would push the rows a second below `THROUGHPUT_SHARE` of
  what the largest batches give. Cutting a fixed cost only adds to it.
- No size is tried that is more than a factor of `REACH` away from those that were seen. Each cut has to show that it
  shortens the turn before the next one comes, so sizes cannot spiral down.
- While sizes matter, some turns are made small on purpose: turns of one size cannot tell the two costs apart.
- One turn that is out of line proves nothing: the process may have paused. After a second one, what was learned before
  is forgotten. So the sizes follow a change, up as well as down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.operators.batch_rows import BatchRows
from tidegate.operators.operator import StepPace

TURN_MS_MAX = 100
"""A turn should take no longer."""
THROUGHPUT_SHARE = 0.85
"""No cut may push the rows a second below this share of what the largest batches give."""
ROWS_AT_FIRST = 1_024
"""Rows of the first turn: its function may need a millisecond for each."""
ROWS_UNLIMITED = 1 << 24

REACH = 4
"""How far the next size may be from the sizes that were seen, and how much smaller a trial is."""
TURNS_REMEMBERED = 64
TRIALS_REMEMBERED_MIN = 4
"""So many of the remembered turns must be small."""
LEARNT_MS_MIN = 2
"""The fixed cost is not learnt from turns that are shorter."""
SURPRISE = 2.0
"""A turn is out of line if it took so many times longer, or shorter, than expected."""
SURPRISE_MS_MIN = 10

_ROWS_A_FIXED_COST = THROUGHPUT_SHARE / (1 - THROUGHPUT_SHARE)


@dataclass(frozen=True, slots=True)
class TurnCost:
    """What a turn costs: `fixed_ms + rows * slope_ms`."""

    fixed_ms: float
    slope_ms: float

    def of(self, rows: int) -> float:
        """Milliseconds of a turn of `rows` rows."""
        return self.fixed_ms + rows * self.slope_ms

    @property
    def best_rows(self) -> float:
        """The largest turn within the limit, or the smallest one whose throughput is good enough."""
        if self.slope_ms <= 0:
            return ROWS_UNLIMITED
        within_limit = (TURN_MS_MAX - self.fixed_ms) / self.slope_ms
        return min(ROWS_UNLIMITED, max(within_limit, _ROWS_A_FIXED_COST * self.fixed_ms / self.slope_ms))


Turn = tuple[int, float]
"""Rows of a turn, and its milliseconds."""


def fit(turns: Iterable[Turn]) -> TurnCost:
    """Fit the cost to turns: least squares of relative errors, no part negative. Times must be positive."""
    ones = rows_sum = rows_squares = times = rows_times = 0.0
    for rows, ms in turns:
        weight = 1 / (ms * ms)
        ones += weight
        rows_sum += weight * rows
        rows_squares += weight * rows * rows
        times += weight * ms
        rows_times += weight * rows * ms
    determinant = ones * rows_squares - rows_sum * rows_sum
    if determinant > 1e-9 * ones * rows_squares:
        fixed_ms = (rows_squares * times - rows_sum * rows_times) / determinant
        slope_ms = (ones * rows_times - rows_sum * times) / determinant
        if fixed_ms >= 0 and slope_ms >= 0:
            return TurnCost(fixed_ms, slope_ms)
        if slope_ms < 0:
            return TurnCost(times / ones, 0.0)
    return TurnCost(0.0, rows_times / rows_squares)


class TurnPacer:
    """Adapts the rows of a turn to how long turns take: from `rows_min` to `rows_max`.

    `learns`: somebody wants to know the fixed cost of a turn (`fixed_ms`), also while turns are short.
    """

    def __init__(self, rows_max: int = ROWS_UNLIMITED, rows_min: int = 1, learns: bool = False) -> None:
        assert 1 <= rows_min <= rows_max
        self._rows_min, self._limit, self._learns = rows_min, rows_max, learns
        self._sizes: deque[int] = deque(maxlen=TURNS_REMEMBERED)
        self._times: deque[float] = deque(maxlen=TURNS_REMEMBERED)
        """Milliseconds of the turns of these sizes. Apart, as their extremes are asked for in every turn."""
        self._suspect: Turn | None = None
        """The last turn, if it was out of line."""
        self._size = self._clamped(ROWS_AT_FIRST)
        """Rows of a turn that is not a trial."""
        self._next = self._size
        self.cost: TurnCost | None = None
        """What turns cost. None while turns are so short that it does not matter, or all of one size."""
        self.fixed_ms = 0.0
        """The fixed cost of a turn; while it is not known, the shortest turn that is remembered."""

    @property
    def rows_max(self) -> int:
        """Rows that the next turn may process."""
        return self._next

    def took(self, rows: int, turn_ms: int) -> None:
        """A turn of `rows` rows has taken `turn_ms` ms."""
        if not rows:
            return
        turn = rows, max(0.5, turn_ms)
        if self._out_of_line(turn):
            if self._suspect is None:
                self._suspect = turn
                if turn[1] > TURN_MS_MAX:
                    self._next = self._clamped(rows // REACH)
                return
            self._sizes.clear()
            self._times.clear()
            self._remember(self._suspect)
            self._suspect = self.cost = None
        elif self._suspect is not None and 2 * rows >= self._suspect[0]:
            # A small turn would not tell: if only the slope has changed, it takes about as long as before.
            self._suspect = None
        self._remember(turn)
        self._choose(rows, turn[1])

    def _remember(self, turn: Turn) -> None:
        self._sizes.append(turn[0])
        self._times.append(turn[1])

    def _choose(self, rows: int, ms: float) -> None:
        slow = 2 * max(self._times) > TURN_MS_MAX
        if not slow:
            self.cost = None
            if rows >= self._size:
                self._size = self._clamped(int(rows * min(REACH, TURN_MS_MAX / ms)))
            self._next = self._size
            if not self._learns:
                return
        self.fixed_ms = min(self._times)
        if not slow and ms < LEARNT_MS_MIN:
            return
        smallest, largest = min(self._sizes), max(self._sizes)
        known = largest >= 2 * smallest
        small = (largest + REACH) // REACH
        tries = rows > small and sum(size <= small for size in self._sizes) < TRIALS_REMEMBERED_MIN
        if not slow:
            if known:
                self.fixed_ms = min(self.fixed_ms, self._fitted().fixed_ms)
            if tries:
                self._next = self._clamped(largest // REACH)
            return
        if known:
            self.cost = self._fitted()
            self.fixed_ms = self.cost.fixed_ms
            best = int(self.cost.best_rows)
            self._size = self._clamped(max(smallest // REACH, min(best, largest * REACH)))
        trial = self._clamped(min(self._size, largest) // REACH)
        if not known and 2 * trial > largest:
            # Turns cannot get smaller, so they get larger: sizes must differ.
            self._size = trial = self._clamped(max(2 * largest, self._size))
        self._next = trial if tries else self._size

    def _fitted(self) -> TurnCost:
        return fit(zip(self._sizes, self._times, strict=True))

    def _out_of_line(self, turn: Turn) -> bool:
        if self.cost is None:
            return False
        rows, ms = turn
        expected_ms = max(0.5, self.cost.of(rows))
        return abs(ms - expected_ms) > SURPRISE_MS_MIN and not (expected_ms / SURPRISE <= ms <= expected_ms * SURPRISE)

    def _clamped(self, rows: int) -> int:
        return max(self._rows_min, min(rows, self._limit))


class TaskPacers:
    """The pacers of a task: one for turns of rows, one for turns of timers, which do not cost the same."""

    def __init__(self, rows: BatchRows, timers_max: int, learns: bool = False) -> None:
        self._rows = TurnPacer(rows.most, rows.least, learns)
        self.rows_min = rows.least
        """No turn is cut below so many rows."""
        self._timers = TurnPacer(timers_max)

    def rows_within(self, rows_max: int) -> int:
        """Rows that the next turn may process: no more than `rows_max`, unless `batch_rows` asks for more."""
        return max(self.rows_min, min(rows_max, self._rows.rows_max))

    @property
    def fixed_ms(self) -> float:
        """The fixed cost of a turn of rows, as far as it is known."""
        return self._rows.fixed_ms

    def next_turn(self, pace: StepPace, last_turn_ms: int) -> None:
        """A turn begins. The last one did what `pace` has counted; a timer that fired beside rows counts as a row."""
        if pace.rows:
            self._rows.took(pace.rows + pace.timers, last_turn_ms)
        else:
            self._timers.took(pace.timers, last_turn_ms)
        pace.begin_turn(self._timers.rows_max)
