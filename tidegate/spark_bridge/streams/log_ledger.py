"""`LogLedger`: what the writer of a log knows about it: how much waits to be read, and what can be deleted.

`StreamFeed` and `BatchWriter` share it. Rules:
* A batch can be deleted if all its rows are before the positions of all lanes, and so are those of every older batch.
* The newest batch always stays: the next one continues from it, even after a restart of the driver.
* The writer waits while more than a limit of bytes is not covered by the newest checkpoint. Batches that only older
  checkpoints and savepoints need do not count: the user chose to keep those, and the stream goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from tidegate.spark_bridge.streams.batch_log import LogBatch
from tidegate.spark_bridge.streams.log_source import split_id

WAIT_STEP_S = 1.0


class WriterStopped(Exception):
    """The feed stops, so the batch must not be written."""


def needed_rows(log_id: str, lanes: int, positions: Iterable[Mapping[str, int]]) -> tuple[int, ...]:
    """For each lane, the first row that any of these checkpoints needs. 0 if one does not know the lane."""
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
        """The newest batch; None for an empty log."""
        with self._changed:
            return self._batches[-1] if self._batches else None

    @property
    def batches(self) -> tuple[LogBatch, ...]:
        """All batches, oldest first."""
        with self._changed:
            return tuple(self._batches)

    @property
    def uncovered_bytes(self) -> int:
        """Size of the batches that the newest checkpoint does not cover."""
        with self._changed:
            covered, total = self._covered, 0
            for batch in reversed(self._batches):
                if covered is not None and all(end <= row for end, row in zip(batch.ends, covered, strict=True)):
                    break
                total += batch.size_bytes
            return total

    def append(self, batch: LogBatch) -> None:
        """A batch was committed."""
        with self._changed:
            assert not self._batches or batch.batch_id == self._batches[-1].batch_id + 1
            self._batches.append(batch)

    def cover(self, rows: Sequence[int]) -> None:
        """The newest checkpoint covers this many rows of each lane."""
        with self._changed:
            self._covered = rows
            self._changed.notify_all()

    def deletable(self, needed: Sequence[int]) -> tuple[LogBatch, ...]:
        """The oldest batches, up to the first with a row that somebody needs. `needed` is by lane."""
        with self._changed:
            found = []
            for batch in list(self._batches)[:-1]:
                if any(end > row for end, row in zip(batch.ends, needed, strict=True)):
                    break
                found.append(batch)
            return tuple(found)

    def deleted(self, batch: LogBatch) -> None:
        """The oldest batch was deleted."""
        with self._changed:
            assert self._batches[0] == batch
            self._batches.popleft()

    def await_room(self) -> None:
        """Wait until at most the limit is uncovered. WriterStopped once `stop` was called."""
        with self._changed:
            while not self._stopped and self.uncovered_bytes > self._limit_bytes:
                self._changed.wait(WAIT_STEP_S)
            if self._stopped:
                raise WriterStopped

    def stop(self) -> None:
        """Nothing may be written any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
