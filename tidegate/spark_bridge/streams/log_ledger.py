"""`LogLedger`: what the one who writes a log knows of it: how much waits to be read, and what nobody needs any more.

Rules kept here:

* Nothing is deletable that a position needs: a batch is, when all its rows are before the positions of all lanes, and
  so are those of every batch before it.
* The newest batch always stays: the next one follows on it, also after a restart of the driver.
* A writer waits while more than a limit of bytes is not covered by the newest checkpoint. What only older checkpoints
  and savepoints hold does not count: their user has decided to keep it, and the stream goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from tidegate.spark_bridge.streams.batch_log import LogBatch
from tidegate.spark_bridge.streams.log_source import split_id

WAIT_STEP_S = 1.0


class WriterStopped(Exception):
    """Whoever waited is to stop, and not to write."""


def needed_rows(log_id: str, lanes: int, positions: Iterable[Mapping[str, int]]) -> tuple[int, ...]:
    """Of each lane the first row that any of several checkpoints needs; all rows where one does not know the lane."""
    known = list(positions)
    ids = [split_id(log_id, lane) for lane in range(lanes)]
    return tuple(min((each.get(name, 0) for each in known), default=0) for name in ids)


class LogLedger:
    """The batches of a log. Thread-safe."""

    def __init__(self, batches: Iterable[LogBatch], limit_bytes: int) -> None:
        self._batches = deque(batches)
        self._limit_bytes = limit_bytes
        self._covered: Sequence[int] | None = None
        self._stopped = False
        self._changed = threading.Condition()

    @property
    def newest(self) -> LogBatch | None:
        """The last batch; None for an empty log."""
        with self._changed:
            return self._batches[-1] if self._batches else None

    @property
    def batches(self) -> tuple[LogBatch, ...]:
        """All of them, oldest first."""
        with self._changed:
            return tuple(self._batches)

    @property
    def uncovered_bytes(self) -> int:
        """Bytes of files with rows that the newest checkpoint does not cover."""
        with self._changed:
            return self._uncovered_bytes()

    def append(self, batch: LogBatch) -> None:
        """A batch was committed."""
        with self._changed:
            assert not self._batches or batch.batch_id == self._batches[-1].batch_id + 1
            self._batches.append(batch)

    def cover(self, rows: Sequence[int]) -> None:
        """The newest checkpoint has processed so many rows of each lane."""
        with self._changed:
            self._covered = rows
            self._changed.notify_all()

    def deletable(self, needed: Sequence[int]) -> tuple[LogBatch, ...]:
        """The oldest batches, as far as nobody needs a row of them."""
        with self._changed:
            found = []
            for batch in list(self._batches)[:-1]:
                if any(end > row for end, row in zip(batch.ends, needed, strict=True)):
                    break
                found.append(batch)
            return tuple(found)

    def deleted(self, batch: LogBatch) -> None:
        """The oldest batch is gone."""
        with self._changed:
            assert self._batches[0] == batch
            self._batches.popleft()

    def await_room(self) -> None:
        """Return when no more than the limit waits to be covered. WriterStopped as soon as `stop` was called."""
        with self._changed:
            while not self._stopped and self._uncovered_bytes() > self._limit_bytes:
                self._changed.wait(WAIT_STEP_S)
            if self._stopped:
                raise WriterStopped

    def stop(self) -> None:
        """Nobody is to write any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _uncovered_bytes(self) -> int:
        covered, total = self._covered, 0
        for batch in reversed(self._batches):
            if covered is not None and all(end <= row for end, row in zip(batch.ends, covered, strict=True)):
                break
            total += batch.size_bytes
        return total
