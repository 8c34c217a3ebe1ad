"""Sets how many rows a task processes in one turn, and how many bytes may be in flight to it.

- `TurnPacer` sets how many rows a turn processes. `TaskPacers` has one for turns with rows and one for turns with
  timers.
- `Debloater` sets the window of the senders, as Flink's buffer debloating does. `SenderPace` sets how many rows a
  sender's turn processes for a receiver with a narrow window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.operators.batch_rows import BatchRows
from tidegate.operators.operator import StepPace

TURN_MS_MAX = 100
"""The time in ms that a turn should not exceed."""
THROUGHPUT_SHARE = 0.85
"""The share of the best rate (rows per second with the largest batches) that smaller batches must reach."""
ROWS_AT_FIRST = 1_024
"""The number of rows of the first turn. It is small because a function may need a millisecond for each row."""
ROWS_UNLIMITED = 1 << 24
REACH = 4
"""The greatest factor between the next size of a turn and the measured sizes, and between the normal size and a
trial.
"""
TURNS_REMEMBERED = 64
TRIALS_REMEMBERED_MIN = 4
"""The smallest number of small turns among the remembered turns."""
LEARNT_MS_MIN = 2
"""The smallest duration, in ms, of turns from which the fixed cost is computed."""
SURPRISE = 2.0
"""A turn is an outlier if its duration differs by more than this factor from the expected one."""
SURPRISE_MS_MIN = 10
_ROWS_A_FIXED_COST = THROUGHPUT_SHARE / (1 - THROUGHPUT_SHARE)


@dataclass(frozen=True, slots=True)
class TurnCost:
    """The duration of a turn in ms, as a formula: `fixed_ms + rows * slope_ms`."""

    fixed_ms: float
    slope_ms: float

    def of(self, rows: int) -> float:
        """Returns the expected duration, in ms, of a turn of `rows` rows."""
        return self.fixed_ms + rows * self.slope_ms

    @property
    def best_rows(self) -> float:
        """Returns the number of rows of the best turn: the longest within the time limit, or a longer one if the
        rate needs it.
        """
        if self.slope_ms <= 0:
            return ROWS_UNLIMITED
        within_limit = (TURN_MS_MAX - self.fixed_ms) / self.slope_ms
        return min(ROWS_UNLIMITED, max(within_limit, _ROWS_A_FIXED_COST * self.fixed_ms / self.slope_ms))


Turn = tuple[int, float]
"""The number of rows of a turn, and its duration in ms."""


def fit(turns: Iterable[Turn]) -> TurnCost:
    """Fits a cost formula to pairs of rows and duration in ms, and returns it. Durations must be positive.

    Minimizes the squares of the relative errors. Neither parameter is negative.
    """
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
    """Sets how many rows a task processes in one turn, from `rows_min` to `rows_max`, by the duration of turns.

    A task handles overtaking barriers, triggers and aborts between two turns, so a turn must be short. Batches are cut
    where an operator is slow, and stay whole where it is fast, because whole batches cost least. A call of a function
    may have a fixed cost (a model, a remote service). So the model of a turn is `fixed + rows * slope`. Both are
    learned from turns of different sizes. The task machine calls `TaskPacers` in each turn. Rules:

    - A turn is longer than `TURN_MS_MAX` only where a shorter one would reduce the rows per second below
      `THROUGHPUT_SHARE` of the rate of the largest batches. Smaller batches only add to a fixed cost.
    - The next size is at most a factor of `REACH` away from the measured sizes. Each cut has to show that it shortens
      the turn before the next one, so sizes cannot spiral down.
    - While sizes matter, some turns are made small on purpose, because turns of one size cannot separate the two costs.
    - A single outlier is ignored, because the process may have paused. After a second one, the earlier measurements are
      dropped. So the sizes follow a change, up as well as down.

    `learns`: whether to measure the fixed cost of a turn (`fixed_ms`) also while turns are short.
    """

    def __init__(self, rows_max: int = ROWS_UNLIMITED, rows_min: int = 1, learns: bool = False) -> None:
        assert 1 <= rows_min <= rows_max
        self._rows_min = rows_min
        self._limit = rows_max
        self._learns = learns
        self._sizes: deque[int] = deque(maxlen=TURNS_REMEMBERED)
        self._times: deque[float] = deque(maxlen=TURNS_REMEMBERED)
        """Durations of the turns in `_sizes`, in ms. Separate, because each turn needs the smallest and the
        largest of them.
        """
        self._suspect: Turn | None = None
        """The last turn if it was an outlier, else None."""
        self._size = self._clamped(ROWS_AT_FIRST)
        """The number of rows of a turn that is not a trial."""
        self._next = self._size
        self.cost: TurnCost | None = None
        """The cost of turns. None while turns are too short for the cost to matter, or while all have the same
        size.
        """
        self.fixed_ms = 0.0
        """The fixed cost of a turn in ms or, if it is unknown, the duration of the shortest remembered turn."""

    @property
    def rows_max(self) -> int:
        """Returns how many rows the next turn may process."""
        return self._next

    def took(self, rows: int, turn_ms: int) -> None:
        """Records that a turn of `rows` rows took `turn_ms` ms."""
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
            # A small turn proves nothing: if only the slope has changed, it takes about as long as before.
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
        smallest = min(self._sizes)
        largest = max(self._sizes)
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
    """The two pacers of a task, which limit the rows of a turn and the timers of a turn. Rows and timers have different
    costs.
    """

    def __init__(self, rows: BatchRows, timers_max: int, learns: bool = False) -> None:
        self._rows = TurnPacer(rows.most, rows.least, learns)
        self.rows_min = rows.least
        """The smallest number of rows to which a turn is cut."""
        self._timers = TurnPacer(timers_max)

    def rows_within(self, rows_max: int) -> int:
        """Returns how many rows the next turn may process: at most `rows_max`, unless `batch_rows` requires more."""
        return max(self.rows_min, min(rows_max, self._rows.rows_max))

    @property
    def fixed_ms(self) -> float:
        """Returns the fixed cost of a turn of rows in ms, as far as it is known."""
        return self._rows.fixed_ms

    def next_turn(self, pace: StepPace, last_turn_ms: int) -> None:
        """Begins a turn, and records the duration of the last turn for the rows and timers that `pace` has counted.

        If a turn had rows and timers, the timers are counted as rows.
        """
        if pace.rows:
            self._rows.took(pace.rows + pace.timers, last_turn_ms)
        else:
            self._timers.took(pace.timers, last_turn_ms)
        pace.begin_turn(self._timers.rows_max)


MEMORY_MS = 500
"""Time in ms after which a measurement has half its weight."""
MEASURED_MS_MIN = 100
"""Time in ms that must be measured after a change of a window before the window may shrink."""
CHANGE_MIN = 0.25
"""The smallest relative change of a window, as in Flink."""
BATCHES_A_WINDOW = 2
"""Number of batches in a window: one is processed while the next one arrives."""
WINDOWS = 2
"""The number of windows in flight: one at the receiver, and one in the sender's queue."""


DEBLOAT_TARGET_MS = 1_000
"""Default time in ms that a receiver should need for the bytes in flight."""


class Debloater:
    """Buffer debloating, as in Flink: limits the bytes in flight to a task by the time that the task needs for them.

    It computes the window of each input channel of a task. Callers pass bytes and durations, so it has no clock. An
    aligned barrier waits for all bytes in flight before it. A limit in bytes alone means milliseconds for a fast
    receiver, and many seconds for a slow one. So a receiver measures how many bytes per second it processes, and gives
    each sender a window. As many bytes again may wait in the sender's queue. `InputWindows` uses `Debloater` for the
    receiver, `OutputGate` uses `SenderPace` for the sender. Rules:

    - The fixed cost of a batch (a call of a model) must stay a small part of its time. So a batch is half a window, and
      no window is so small that the rate falls below `THROUGHPUT_SHARE` of the rate of the largest batches. Otherwise
      small batches would lower the rate, and a lower rate would make the next batches smaller still.
    - The rate counts all the time in which input was queued, even if the task waited for its turn or for room in its
      own output. That is how fast its queues empty.
    - A window starts small. It doubles at most, and only after half of it was processed. It halves at most, and only
      after it was measured for a while. So neither a burst nor a pause moves it far, and the fixed cost is known before
      batches get small.
    """

    def __init__(self, target_ms: int, bytes_first: int, bytes_min: int, bytes_max: int) -> None:
        assert target_ms > 0 and 1 <= bytes_min <= bytes_first <= bytes_max
        self._target_ms = target_ms
        self._bytes_min = bytes_min
        self._bytes_max = bytes_max
        self.window_bytes = bytes_first
        self._bytes = self._rows = self._ms = 0.0
        """Bytes and rows that were processed, and the time in ms for it. Older measurements have less weight."""
        self._bytes_since = self._ms_since = 0
        """Bytes that were processed since the last change of the window, and the time in ms for it."""

    def took(self, size_bytes: int, rows: int, ms: int) -> None:
        """Records that the task has processed this many bytes and rows in `ms` milliseconds, while input was
        queued.
        """
        keep = 0.5 ** (ms / MEMORY_MS)
        self._bytes = self._bytes * keep + size_bytes
        self._rows = self._rows * keep + rows
        self._ms = self._ms * keep + ms
        if self._ms > MEMORY_MS:
            # A turn is forgotten as soon as others, however long it took.
            part = MEMORY_MS / self._ms
            self._bytes = self._bytes * part
            self._rows = self._rows * part
            self._ms = float(MEMORY_MS)
        self._bytes_since += size_bytes
        self._ms_since += ms

    def resize(self, channels: int, fixed_ms: float, rows_min: int = 1) -> bool:
        """Adapts the window to the measured rate. Returns whether it has changed.

        `channels`: number of channels that share the task's time. `fixed_ms`: the fixed cost of a batch. `rows_min`:
        number of rows that must fit into a batch.
        """
        wanted_bytes = self._wanted_bytes(channels, fixed_ms, rows_min)
        if wanted_bytes > self.window_bytes:
            size_bytes = min(wanted_bytes, 2 * self.window_bytes)
            changes = 2 * self._bytes_since >= self.window_bytes
            changes &= size_bytes == self._bytes_max or size_bytes >= (1 + CHANGE_MIN) * self.window_bytes
        else:
            size_bytes = max(wanted_bytes, self.window_bytes // 2)
            changes = self._ms_since >= MEASURED_MS_MIN and size_bytes <= (1 - CHANGE_MIN) * self.window_bytes
        if changes and size_bytes != self.window_bytes:
            self.window_bytes = size_bytes
            self._bytes_since = self._ms_since = 0
            return True
        return False

    def _wanted_bytes(self, channels: int, fixed_ms: float, rows_min: int) -> int:
        if not self._bytes:
            return self.window_bytes
        batch_ms = max(self._target_ms / (WINDOWS * BATCHES_A_WINDOW * channels), fixed_ms / (1 - THROUGHPUT_SHARE))
        # A time below one millisecond is measured as 0.
        batch_bytes = self._bytes / max(0.5, self._ms) * batch_ms
        if self._rows:
            batch_bytes = max(batch_bytes, rows_min * self._bytes / self._rows)
        return int(max(self._bytes_min, min(BATCHES_A_WINDOW * batch_bytes, self._bytes_max)))


class SenderPace:
    """Sets how many rows a sender's turn processes, so that it emits one batch for the receiver: half of its
    window.
    """

    def __init__(self) -> None:
        self.rows_max = ROWS_UNLIMITED

    def took(self, rows: int, filled: float) -> None:
        """Records a turn of `rows` rows.

        `filled`: the fraction of a receiver's narrow window that the turn's output fills, for the fullest one. 0 if no
        window is narrow.
        """
        if not rows:
            return
        rows_max = min(ROWS_UNLIMITED, 2 * self.rows_max)
        if filled > 0:
            rows_max = min(rows_max, int(rows / (filled * BATCHES_A_WINDOW)))
        self.rows_max = max(1, rows_max)
