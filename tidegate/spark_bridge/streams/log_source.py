"""`LogSource`: a batch log as an unbounded source. A lane is a split, and an offset is a row number in it.

Rules:

- A row never changes its place. So `(split, offset, rows_max)` determines the rows of a read; only whether they exist
  already depends on the time.
- A subtask reads its lanes in the order of batches: it does not read a lane while another lane has rows of an older
  batch. Otherwise a subtask that catches up would mix old and new rows, and watermarks would make the old ones late.
- If a query fails, a note with Spark's error is stored for the run of the job that it writes for. A reader that has
  read the whole log finds the note, and fails with this error. The failure is permanent, because the query does not
  start again in this run.
- `LogWindow` has a sequence of consecutive commits in memory, around the rows that are read now. It grows at its end,
  one commit at a time, without listing the log, and shrinks at its front. For a row before the window it starts again,
  by bisection.
- After a missing commit, the next request waits for a pause. An idle log therefore causes a limited number of requests,
  however often its lanes are read.
- A read of deleted rows is an error. It is no error if a commit is deleted before this reader reaches it: all lanes may
  have been read beyond it, also lanes without rows in it. Then the window starts again, and its row numbers show
  whether a row is missing.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.connectors.staged_parquet import ParquetReader, StagedFile, local_root
from tidegate.spark_bridge.errors import QueryFailedError
from tidegate.spark_bridge.streams.batch_log import BatchLog, LogBatch
from tidegate.storage.codec import encode
from tidegate.storage.errors import ConfigurationError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import open_store

LOCAL_POLL_S = 0.02
REMOTE_POLL_S = 0.5
"""Seconds after which a reader requests a missing batch again."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """A source over the log at `url`. `run` is the run of the job, under which the note of a failed query is stored."""

    url: str
    log_id: str
    lanes: int
    schema: pa.Schema
    run: str | None = None

    unbounded = True

    @classmethod
    def open(cls, url: str, run: str | None = None) -> LogSource:
        """Opens an existing log. Raises NotFoundError, CorruptionError."""
        header = BatchLog(open_store(url)).header()
        return cls(url, header.log_id, header.lanes, header.schema, run)

    def splits(self) -> Sequence[SourceSplit]:
        """Returns one split for each lane. The number of lanes never changes."""
        return tuple(SourceSplit(split_id(self.log_id, lane), b"%d" % lane) for lane in range(self.lanes))

    def reader(self) -> SourceReader:
        """Returns a reader of the log's lanes (splits) for one subtask."""
        return LogReader(self)


def split_id(log_id: str, lane: int) -> str:
    """Returns the split id of a lane. It contains the id of the log."""
    return f"{log_id}-lane-{lane:03d}"


def failure_path(run: str) -> str:
    """Returns the path of the note about a failed query, relative to the folder of the log."""
    return f"failures/{run}"


@dataclass(slots=True)
class _Lane:
    """The position of a reader in a lane (split) of the log: the number of the next row, and the first batch that may
    have more rows of the lane.
    """

    parquet: ParquetReader
    row: int = -1
    batch_id: int = 0


class LogReader:
    """Reads the lanes of one subtask. Only one thread may call it at a time."""

    def __init__(self, source: LogSource, clock: Callable[[], float] = time.monotonic) -> None:
        """Creates the reader. It opens no file yet."""
        self._source = source
        self._store = open_store(source.url)
        poll_s = REMOTE_POLL_S if local_root(source.url) is None else LOCAL_POLL_S
        self._window = LogWindow(BatchLog(self._store), poll_s, clock)
        self._clock = clock
        self._poll_s = poll_s
        self._note_not_before_s = 0.0
        self._lanes: dict[int, _Lane] = {}
        self._put_off = 0

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns rows from `offset` on, up to the end of a row group, or no rows if they do not exist yet.

        Raises ConfigurationError for deleted rows and for a split of another log, QueryFailedError if no more rows will
        follow, NotFoundError or CorruptionError for a missing or damaged file.
        """
        number = self._lane_of(split)
        if offset < 0 or rows_max < 1:
            raise ConfigurationError(
                f"cannot read {rows_max} rows from row {offset} of {split.split_id}: give an offset of 0 or more, and "
                "1 row or more"
            )
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(ParquetReader(self._source.url, self._source.schema))
        if lane.row != offset:
            lane.row = offset
            lane.batch_id = 0
        if self._is_ahead(lane):
            return ReadResult(None, offset, at_end=False)
        place = self._window.find(number, offset)
        if place is None:
            lane.batch_id = self._window.next_batch_id
            self._check_query()
            return ReadResult(None, offset, at_end=False)
        lane.batch_id = place.batch_id
        if self._is_ahead(lane):
            return ReadResult(None, offset, at_end=False)
        self._put_off = 0
        file = SourceSplit(place.file.path, encode(place.file), place.file.rows)
        result = lane.parquet.read(file, offset - place.start, rows_max)
        lane.row = place.start + result.next_offset
        if lane.row == place.end:
            lane.batch_id += 1
        return ReadResult(result.batch, lane.row, at_end=False)

    def close(self) -> None:
        """Releases files and decoded row groups. A later read opens them again."""
        for lane in self._lanes.values():
            lane.parquet.close()
        self._lanes.clear()

    def _lane_of(self, split: SourceSplit) -> int:
        lane = int(split.payload)
        if split.split_id != split_id(self._source.log_id, lane):
            raise ConfigurationError(
                f"{split.split_id} is not a lane of the log at {self._source.url}: its lanes are "
                f"{split_id(self._source.log_id, 0)} and so on. "
                "Restore with the source of the checkpoint, or start without restore"
            )
        return lane

    def _is_ahead(self, lane: _Lane) -> bool:
        """Returns whether a lane must wait because another lane still has rows of older batches.

        A lane that is no longer read delays other lanes only briefly.
        """
        if all(lane.batch_id <= other.batch_id for other in self._lanes.values()):
            return False
        self._put_off += 1
        if self._put_off <= 2 * len(self._lanes):
            return True
        self._put_off = 0
        for other in self._lanes.values():
            other.batch_id = max(other.batch_id, lane.batch_id)
        return False

    def _check_query(self) -> None:
        """Raises QueryFailedError if the query that writes the log has failed."""
        if self._source.run is None or self._clock() < self._note_not_before_s:
            return
        self._note_not_before_s = self._clock() + self._poll_s
        try:
            note = self._store.read(failure_path(self._source.run))
        except NotFoundError:
            return
        raise QueryFailedError(bytes(note).decode("utf-8", "replace"))


BATCHES_MAX = 1_024
SEEKS_MAX = 5
LOOKS_MAX = 16
"""After this many requests for a missing commit, the window checks whether it was deleted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Locates a row of a lane (split) of the log: its file, and the micro-batch that contains it.

    - `batch_id`: the number of the micro-batch.
    - `start`: the number of the first row of `file` in the lane.
    - `end`: the number after the last row of the micro-batch in the lane.
    """

    batch_id: int
    start: int
    file: StagedFile
    end: int


class LogWindow:
    """A sequence of consecutive commits in memory, in which rows are looked up.

    Only one thread may call it at a time.
    """

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
        """Returns the number of the first batch after the commits in memory."""
        return self._batches[-1].batch_id + 1 if self._batches else 0

    def find(self, lane: int, row: int) -> Place | None:
        """Returns where a row of a lane is, or None if its batch is not in the log yet. Raises ConfigurationError if
        the row was deleted.
        """
        if (not self._batches or row < self._batches[0].start_of(lane)) and not self._seek(lane, row):
            return None
        while row >= self._batches[-1].ends[lane]:
            if not self._grow():
                return None if self._batches else self.find(lane, row)
        batch = self._batches[bisect_right(self._batches, row, key=lambda batch: batch.ends[lane])]
        for start, file in batch.in_lane(lane):
            if start <= row < start + file.rows:
                return Place(batch.batch_id, start, file, batch.ends[lane])
        raise CorruptionError(
            f"batch {batch.batch_id} of {self._log.url} has no file with row {row} of lane {lane}"
            "; restore its files from a copy, or start the job without restore"
        )

    def _grow(self) -> bool:
        """Reads the next commit into memory. Returns False if it does not exist yet.

        If the commit was deleted, removes all commits from memory.
        """
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
        """Makes the commits in memory start again, at the batch of a row, or at the newest batch. Returns False if the
        log has no batch.

        The pause applies only to an empty log: existing rows must not wait because another lane found nothing.
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
            f"batches of {self._log.url} are listed and cannot be found: another program has changed the folder. "
            "Start the job without restore"
        )

    def _bisect(self, ids: list[int], lane: int, row: int) -> LogBatch:
        """Returns the first batch that ends after `row` in this lane, or the newest batch."""
        low = 0
        high = len(ids) - 1
        newest = self._log.read(ids[high])
        if row >= newest.ends[lane]:
            return newest
        found = newest
        while low < high:
            middle = (low + high) // 2
            batch = self._log.read(ids[middle])
            if row < batch.ends[lane]:
                found = batch
                high = middle
            else:
                low = middle + 1
        return found

    def _was_deleted(self, batch_id: int) -> bool:
        ids = self._log.batch_ids()
        return bool(ids) and ids[0] > batch_id

    def _deleted(self, lane: int, row: int, oldest: LogBatch) -> ConfigurationError:
        return ConfigurationError(
            f"rows {row} to {oldest.start_of(lane)} of lane {lane} are no longer in {self._log.url}, which begins "
            f"with batch {oldest.batch_id}: no retained checkpoint, and no savepoint next to the checkpoints, needed "
            "them. Restore a newer checkpoint or savepoint, or start the job without restore"
        )

    def _waits(self) -> bool:
        return self._clock() < self._not_before_s

    def _not_there(self) -> bool:
        self._not_before_s = self._clock() + self._poll_s
        return False
