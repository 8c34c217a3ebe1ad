"""`LogWindow`: the commits around the rows that a subtask reads now. It finds the file of a row.

Rules:
* The window is a run of consecutive commits. It grows at its end, one commit at a time, without listing the log. When
  it is too long, commits at its front go. A row before the window starts it anew, by bisection.
* After a commit was not there, nobody asks again before a pause is over. So an idle log costs a bounded number of
  requests, however often its lanes are read.
* A read of deleted rows is an error, never silence. But it is no error if a commit is deleted before this reader comes
  to it: all lanes may have been read beyond it, among them lanes without rows in it. Then the window starts anew, and
  its row numbers show whether any row is missing.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.spark_bridge.dataframes.manifest import StagedFile
from tidegate.spark_bridge.streams.batch_log import BatchLog, LogBatch
from tidegate.storage.errors import ConfigurationError, CorruptionError, NotFoundError

BATCHES_MAX = 1_024
SEEKS_MAX = 5
LOOKS_MAX = 16
"""After so many looks for a missing commit, check whether it was deleted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row of a lane is: in `file`, whose first row is row `start` of the lane.

    `end` is the lane's row number at which the batch ends; rows from there on are in later batches.
    """

    batch_id: int
    start: int
    file: StagedFile
    end: int


class LogWindow:
    """Finds rows. Called from one thread at a time."""

    def __init__(
        self,
        log: BatchLog,
        poll_s: float,
        clock: Callable[[], float] = time.monotonic,
        batches_max: int = BATCHES_MAX,
    ) -> None:
        self._log = log
        self._poll_s = poll_s
        self._clock = clock
        self._batches_max = batches_max
        self._batches: list[LogBatch] = []
        self._not_before_s = 0.0
        self._looks = 0

    @property
    def next_batch_id(self) -> int:
        """The number of the batch after the window."""
        return self._batches[-1].batch_id + 1 if self._batches else 0

    def find(self, lane: int, row: int) -> Place | None:
        """Where a row is. None while its batch is not in the log. ConfigurationError if it was deleted."""
        if (not self._batches or row < self._batches[0].start_of(lane)) and not self._seek(lane, row):
            return None
        while row >= self._batches[-1].ends[lane]:
            if not self._grow():
                return None if self._batches else self.find(lane, row)
        batch = self._batches[bisect_right(self._batches, row, key=lambda batch: batch.ends[lane])]
        for start, file in batch.in_lane(lane):
            if start <= row < start + file.rows:
                return Place(batch.batch_id, start, file, batch.ends[lane])
        raise CorruptionError(f"batch {batch.batch_id} of {self._log.url} has no file with row {row} of lane {lane}")

    def _grow(self) -> bool:
        """Add the next commit, if it is there. If it was deleted, empty the window."""
        if self._waits():
            return False
        try:
            batch = self._log.read(self.next_batch_id)
        except NotFoundError:
            self._looks += 1
            if self._looks >= LOOKS_MAX:
                self._looks = 0
                if self._was_deleted(self.next_batch_id):
                    self._batches.clear()
                    return False
            return self._not_there()
        self._looks = 0
        self._batches.append(batch)
        if len(self._batches) > self._batches_max:
            del self._batches[: len(self._batches) - self._batches_max]
        return True

    def _seek(self, lane: int, row: int) -> bool:
        """Start anew with the batch of a row, or with the newest one. False if the log has no batch.

        Only an empty log is subject to the pause: rows that are there must not wait because another lane found nothing.
        """
        if not self._batches and self._waits():
            return False
        for _ in range(SEEKS_MAX):
            ids = self._log.batch_ids()
            if not ids:
                if row > 0:
                    raise ConfigurationError(
                        f"row {row} of lane {lane} was read before, and {self._log.url} is empty: was the folder "
                        "exchanged? Start the job without restore"
                    )
                return self._not_there()
            try:
                found = self._bisect(ids, lane, row)
            except NotFoundError:
                continue  # Deleted since the listing: the log now begins with a later batch.
            if found.start_of(lane) > row:
                raise self._deleted(lane, row, found)
            self._batches = [found]
            return True
        raise CorruptionError(
            f"batches of {self._log.url} are listed and cannot be found: the folder is not one store's"
        )

    def _bisect(self, ids: list[int], lane: int, row: int) -> LogBatch:
        """The first batch whose end in this lane is after `row`, or the newest batch."""
        low, high = 0, len(ids) - 1
        newest = self._log.read(ids[high])
        if row >= newest.ends[lane]:
            return newest
        found = newest
        while low < high:
            middle = (low + high) // 2
            batch = self._log.read(ids[middle])
            if row < batch.ends[lane]:
                found, high = batch, middle
            else:
                low = middle + 1
        return found

    def _was_deleted(self, batch_id: int) -> bool:
        ids = self._log.batch_ids()
        return bool(ids) and ids[0] > batch_id

    def _deleted(self, lane: int, row: int, oldest: LogBatch) -> ConfigurationError:
        return ConfigurationError(
            f"rows {row} to {oldest.start_of(lane)} of lane {lane} are not in {self._log.url} any more, which begins "
            f"with batch {oldest.batch_id}: no retained checkpoint, and no savepoint beside the checkpoints, needed "
            "them. Restore a newer checkpoint or savepoint, or start the job without restore"
        )

    def _waits(self) -> bool:
        return self._clock() < self._not_before_s

    def _not_there(self) -> bool:
        self._not_before_s = self._clock() + self._poll_s
        return False
