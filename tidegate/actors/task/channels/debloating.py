"""Buffer debloating, as in Flink: bounds what is in flight to a task by the time that the task needs for it.

An aligned barrier waits for all that is in flight before it. A bound in bytes alone means milliseconds for a fast
receiver, and many seconds for a slow one. So a receiver measures how many bytes a second it processes, and gives each
sender a window. As much again may wait in the sender's queue.

`InputWindows` uses `Debloater` for the receiver, `OutputGate` uses `SenderPace` for the sender. Rules:

- The fixed cost of a batch (a call of a model) must stay a small part of its time. So a batch is half a window, and no
  window is so small that the rate falls below `THROUGHPUT_SHARE` of what the largest batches give. Otherwise small
  batches would lower the rate, and a lower rate would make the next batches smaller still.
- The rate counts all the time in which input was there, even if the task waited for its turn or for room in its own
  output. That is how fast its queues empty.
- A window starts small. It doubles at most, and only after half of it was processed. It halves at most, and only after
  it was measured for a while. So neither a burst nor a pause moves it far, and the fixed cost is known before batches
  get small.
"""

from __future__ import annotations

from tidegate.actors.task.channels.turn_pacer import ROWS_UNLIMITED, THROUGHPUT_SHARE

MEMORY_MS = 500
"""After this time a measurement counts half as much."""
MEASURED_MS_MIN = 100
"""A window shrinks only after so much time was measured since its last change."""
CHANGE_MIN = 0.25
"""A window does not change by a smaller share than this, as in Flink."""
BATCHES_A_WINDOW = 2
"""One batch is processed while the next one comes."""
WINDOWS = 2
"""What is in flight: the receiver's window, and the sender's queue, which is as large."""


class Debloater:
    """The window of each input channel of a task. Told bytes and durations; it has no clock."""

    def __init__(self, target_ms: int, bytes_first: int, bytes_min: int, bytes_max: int) -> None:
        assert target_ms > 0 and 1 <= bytes_min <= bytes_first <= bytes_max
        self._target_ms, self._bytes_min, self._bytes_max = target_ms, bytes_min, bytes_max
        self.window_bytes = bytes_first
        self._bytes = self._rows = self._ms = 0.0
        """What was processed, and in which time. Older parts count less."""
        self._bytes_since = self._ms_since = 0
        """Since the window was changed."""

    def took(self, size_bytes: int, rows: int, ms: int) -> None:
        """So much was processed in `ms`, a time in which input was there."""
        keep = 0.5 ** (ms / MEMORY_MS)
        self._bytes = self._bytes * keep + size_bytes
        self._rows = self._rows * keep + rows
        self._ms = self._ms * keep + ms
        if self._ms > MEMORY_MS:
            # A turn is forgotten as soon as others, however long it took.
            part = MEMORY_MS / self._ms
            self._bytes, self._rows, self._ms = self._bytes * part, self._rows * part, float(MEMORY_MS)
        self._bytes_since += size_bytes
        self._ms_since += ms

    def resize(self, channels: int, fixed_ms: float, rows_min: int = 1) -> bool:
        """Adapt the window. Returns whether it has changed.

        `channels`: how many share the time. `fixed_ms`: the fixed cost of a batch. `rows_min`: rows that must fit into
        a batch.
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
    """How many rows a sender's turn takes, so that it emits one batch for the receiver: half of its window."""

    def __init__(self) -> None:
        self.rows_max = ROWS_UNLIMITED

    def took(self, rows: int, filled: float) -> None:
        """A turn of `rows` rows is over. It has `filled` this part of the fullest narrow window; 0: none is narrow."""
        if not rows:
            return
        rows_max = min(ROWS_UNLIMITED, 2 * self.rows_max)
        if filled > 0:
            rows_max = min(rows_max, int(rows / (filled * BATCHES_A_WINDOW)))
        self.rows_max = max(1, rows_max)
