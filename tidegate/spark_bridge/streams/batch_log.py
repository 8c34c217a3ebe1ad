"""The batch log: holds the micro-batches of a streaming query, each exactly once.

    <log>/_log                            the header: columns, number of lanes, place of Spark's checkpoint
    <log>/batches/000000000017            the commit of batch 17: its files, and how many rows each lane has after it
    <log>/data/000000000017-3f9a…/part…   files of batch 17, staged by one attempt to write it
    <log>/spark/…                         Spark's own checkpoint, if the log is a local folder

`BatchWriter` writes it, `LogSource` reads it, and `StreamFeed` deletes what no checkpoint needs. Rules:
* A batch is in the log when its commit is there. The commit is one conditional create, after all files are complete. So
  of several attempts to write a batch, one counts.
* Commits have consecutive numbers. They are deleted oldest first, and the newest always stays.
* File i of batch n is in lane (n + i) % lanes. So the commits alone decide the order of a lane's rows. A lane is a
  split; its offsets are row numbers in the lane.
* A commit is deleted before its files, so that nobody sees half a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from tidegate.spark_bridge.dataframes.manifest import StagedFile
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import CorruptionError, NotFoundError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.store import Store

HEADER_PATH = "_log"
BATCHES_FOLDER, DATA_FOLDER, SPARK_FOLDER = "batches", "data", "spark"
LOG_VERSION = 1

_MAGIC = b"TGBATCH"
_ID_DIGITS = 12

T = TypeVar("T")


@wire
@dataclass(frozen=True, slots=True)
class LogHeader:
    """What never changes in a log. `spark_checkpoint` None: Spark's checkpoint is in the log's own folder."""

    log_id: str
    schema: pa.Schema
    lanes: int
    spark_checkpoint: str | None = None


@wire
@dataclass(frozen=True, slots=True)
class LogBatch:
    """A commit: the files of a micro-batch, in order. `ends` is how many rows each lane has up to and with it.

    `query_id` is that of the query that wrote it. Spark's checkpoint stores it, so a restarted query keeps it.
    """

    batch_id: int
    query_id: str
    files: tuple[StagedFile, ...]
    ends: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)

    def in_lane(self, lane: int) -> Iterator[tuple[int, StagedFile]]:
        """The files in a lane, each with its first row number in the lane."""
        files = self.files[(lane - self.batch_id) % len(self.ends) :: len(self.ends)]
        start = self.ends[lane] - sum(file.rows for file in files)
        for file in files:
            yield start, file
            start += file.rows

    def start_of(self, lane: int) -> int:
        """The lane's row number at which this batch begins."""
        return self.ends[lane] - sum(file.rows for _, file in self.in_lane(lane))


def batch_after(
    previous: LogBatch | None, batch_id: int, query_id: str, files: tuple[StagedFile, ...], lanes: int
) -> LogBatch:
    """The commit that follows `previous`, which is None for the first batch."""
    ends = [0] * lanes if previous is None else list(previous.ends)
    for index, file in enumerate(files):
        ends[(batch_id + index) % lanes] += file.rows
    return LogBatch(batch_id, query_id, files, tuple(ends))


def data_folder(batch_id: int, attempt: str) -> str:
    """The folder for the files of one attempt to write a batch."""
    return f"{DATA_FOLDER}/{_padded(batch_id)}-{attempt}"


class BatchLog:
    """A log in a store. Any method may raise StorageError, or CorruptionError and CodecError for unreadable data."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """Where the log is."""
        return self._store.url

    @property
    def store(self) -> Store:
        """The store of the log. Paths of files are relative to it."""
        return self._store

    def create(self, header: LogHeader) -> None:
        """Create the log. AlreadyExistsError if there is one."""
        self._store.create(HEADER_PATH, seal(_MAGIC, LOG_VERSION, encode(header)))

    def header(self) -> LogHeader:
        """The header. NotFoundError if there is no log."""
        try:
            return self._read(HEADER_PATH, LogHeader)
        except NotFoundError as error:
            raise NotFoundError(f"there is no log of a streaming DataFrame at {self.url}") from error

    def batch_ids(self) -> list[int]:
        """The numbers of the batches in the log, oldest first."""
        names = self._store.list(BATCHES_FOLDER)
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def read(self, batch_id: int) -> LogBatch:
        """A commit. NotFoundError if it is not there yet, or was deleted."""
        return self._read(_path(batch_id), LogBatch)

    def commit(self, batch: LogBatch) -> None:
        """Add a batch to the log. AlreadyExistsError if somebody else has."""
        self._store.create(_path(batch.batch_id), seal(_MAGIC, LOG_VERSION, encode(batch)))

    def delete(self, batches: Iterable[LogBatch]) -> None:
        """Delete these batches in their order. They must be the oldest ones."""
        for batch in batches:
            self._store.delete(_path(batch.batch_id))
            for folder in sorted({file.path.rpartition("/")[0] for file in batch.files}):
                self._store.delete_tree(folder)

    def delete_leftovers(self, batches: Iterable[LogBatch]) -> int:
        """Delete data folders up to the newest batch that no batch uses. Returns how many.

        `batches` must be all batches of the log. An attempt to write or delete a batch may have been cut short.
        """
        known = list(batches)
        if not known:
            return 0
        used = {file.path.split("/")[1] for batch in known for file in batch.files}
        left = [name for name in self._store.list(DATA_FOLDER) if name not in used and _is_over(name, known[-1])]
        for name in left:
            self._store.delete_tree(f"{DATA_FOLDER}/{name}")
        return len(left)

    def _read(self, path: str, kind: type[T]) -> T:
        where = f"{self._store.url}/{path}"
        value = decode(unseal(_MAGIC, LOG_VERSION, self._store.read(path), where))
        if not isinstance(value, kind):
            raise CorruptionError(f"{where} holds a {type(value).__name__}, and not a {kind.__name__}")
        return value


def _is_over(folder: str, newest: LogBatch) -> bool:
    digits = folder.partition("-")[0]
    return digits.isascii() and digits.isdigit() and int(digits) <= newest.batch_id


def _padded(batch_id: int) -> str:
    return f"{batch_id:0{_ID_DIGITS}d}"


def _path(batch_id: int) -> str:
    return f"{BATCHES_FOLDER}/{_padded(batch_id)}"
