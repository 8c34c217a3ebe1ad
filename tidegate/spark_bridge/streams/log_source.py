"""`LogSource`: a batch log as an unbounded source. A lane is a split, and an offset is a row number in it.

Rules:
* A row never changes its place. So `(split, offset, rows_max)` decides which rows a read returns. Only whether they are
  there yet depends on the moment.
* A subtask reads its lanes in the order of batches: no lane runs ahead of one that has rows of an older batch.
  Otherwise a subtask that catches up would mix old with new rows, and watermarks would make the old ones late.
* A failed query leaves a note for the run of the job that it fed. A reader that has read the whole log finds the note,
  and fails with Spark's cause. The failure is permanent, because the query does not come back in this run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.spark_bridge.dataframes.parquet_source import ParquetReader, local_root
from tidegate.spark_bridge.errors import QueryFailedError
from tidegate.spark_bridge.streams.batch_log import BatchLog
from tidegate.spark_bridge.streams.log_window import LogWindow
from tidegate.storage.codec import encode
from tidegate.storage.errors import ConfigurationError, NotFoundError
from tidegate.storage.files.file_system_store import open_store

LOCAL_POLL_S, REMOTE_POLL_S = 0.02, 0.5
"""How long a reader waits before it looks again for a batch that was not there."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """A source over the log at `url`. `run` is the run of the job; a failed query leaves its note under it."""

    url: str
    log_id: str
    lanes: int
    schema: pa.Schema
    run: str | None = None

    unbounded = True

    @classmethod
    def open(cls, url: str, run: str | None = None) -> LogSource:
        """The source of an existing log. NotFoundError, CorruptionError."""
        header = BatchLog(open_store(url)).header()
        return cls(url, header.log_id, header.lanes, header.schema, run)

    def splits(self) -> Sequence[SourceSplit]:
        """One split for each lane. The number of lanes never changes."""
        return tuple(SourceSplit(split_id(self.log_id, lane), b"%d" % lane) for lane in range(self.lanes))

    def reader(self) -> SourceReader:
        """A reader for one subtask."""
        return LogReader(self)


def split_id(log_id: str, lane: int) -> str:
    """Name of a lane in checkpoints. It contains the id of the log."""
    return f"{log_id}-lane-{lane:03d}"


def failure_path(run: str) -> str:
    """Where the note about a failed query is, in the log's folder."""
    return f"failures/{run}"


@dataclass(slots=True)
class _Lane:
    """What a reader knows of a lane: the next row, and a batch before which the lane has no more rows."""

    parquet: ParquetReader
    row: int = -1
    batch_id: int = 0


class LogReader:
    """Reads the lanes of one subtask. Called from one thread at a time."""

    def __init__(self, source: LogSource, clock: Callable[[], float] = time.monotonic) -> None:
        """Opens nothing yet."""
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
        """Rows from `offset` on, to the end of a row group at most. No rows if they are not there yet.

        Raises ConfigurationError for deleted rows and for a split of another log, QueryFailedError if no more rows will
        come, NotFoundError or CorruptionError for a missing or damaged file.
        """
        number = self._lane_of(split)
        if offset < 0 or rows_max < 1:
            raise ConfigurationError(f"cannot read {rows_max} rows from row {offset} of {split.split_id}")
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(ParquetReader(self._source.url, self._source.schema))
        if lane.row != offset:
            lane.row, lane.batch_id = offset, 0
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
        """Release files and decoded row groups. A later read opens them again."""
        for lane in self._lanes.values():
            lane.parquet.close()
        self._lanes.clear()

    def _lane_of(self, split: SourceSplit) -> int:
        lane = int(split.payload)
        if split.split_id != split_id(self._source.log_id, lane):
            raise ConfigurationError(
                f"{split.split_id} is no lane of the log at {self._source.url}, whose lanes are called "
                f"{split_id(self._source.log_id, 0)} and so on. Was the job restored with another source?"
            )
        return lane

    def _is_ahead(self, lane: _Lane) -> bool:
        """Whether another lane has rows of older batches.

        A lane that nobody reads any more holds others up only briefly.
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
        """Raise QueryFailedError if the query that writes the log has failed."""
        if self._source.run is None or self._clock() < self._note_not_before_s:
            return
        self._note_not_before_s = self._clock() + self._poll_s
        try:
            note = self._store.read(failure_path(self._source.run))
        except NotFoundError:
            return
        raise QueryFailedError(bytes(note).decode("utf-8", "replace"))
