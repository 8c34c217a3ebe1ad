"""`LogWindow`: the commits around the rows that a subtask reads now, so that a row finds its file.

Rules kept here:

* The window is a run of commits without a gap. It grows at its end, one commit at a time, which needs no listing of the
  log; commits in front go when there are too many. A row before the window makes it begin anew, found by bisection.
* A commit that is not there yet is asked for again after a pause, whoever asks. So an idle log costs a bounded number
  of requests, however often its lanes are read.
* Rows that were deleted are an error, never silence. A commit that was deleted before this reader came to it is none:
  it goes when all lanes have been read beyond it, also those that have no rows in it. So the window begins anew then,
  and the numbers of its rows say whether any are missing.
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
"""How often a commit is looked for before somebody asks whether it was deleted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row of a lane is: in this file, which begins with row `start` of the lane. `end`: rows up to the batch's.

    The rows of the lane from `end` on are in later batches.
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
        """The batch that comes after the window."""
        return self._batches[-1].batch_id + 1 if self._batches else 0

    def find(self, lane: int, row: int) -> Place | None:
        """Where a row is; None while its batch is not in the log. ConfigurationError for one that was deleted."""
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
        """Take in the next commit, if it is there. If it was deleted, nothing stays in the window."""
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
        """Begin anew with the batch of a row, or with the newest one; False for a log without a batch.

        Only an empty log is asked again after a pause: rows that are there wait for nothing, whatever other lanes lack.
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
                continue  # It was deleted in between: the log begins later now.
            if found.start_of(lane) > row:
                raise self._deleted(lane, row, found)
            self._batches = [found]
            return True
        raise CorruptionError(
            f"batches of {self._log.url} are listed and cannot be found: the folder is not one store's"
        )

    def _bisect(self, ids: list[int], lane: int, row: int) -> LogBatch:
        """The first batch with rows of the lane after `row`, or the newest one."""
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
