"""The batch log: stores the micro-batches of a streaming query, each exactly once.

    <log>/_log                            the header: columns, number of lanes, place of Spark's checkpoint
    <log>/batches/000000000017            the commit of batch 17: its files, and how many rows each lane has after it
    <log>/data/000000000017-3f9a…/part…   files of batch 17, written by one attempt
    <log>/claims/00000003                 the claim of the third job, or run of a job, that writes the log
    <log>/spark/…                         Spark's own checkpoint, if the log is a local folder

`StreamFeed` writes it and deletes batches, `LogSource` reads it. Rules:

* A batch is in the log when its commit exists. The commit is one conditional create, after all files are complete. So
  only one of several attempts to write a batch counts.
* Commits have consecutive numbers. They are deleted oldest first, and the newest is never deleted.
* File i of batch n is in lane (n + i) % lanes. So the commits alone determine the order of a lane's rows. A lane is a
  split; its offsets are row numbers in the lane.
* A commit is deleted before its files, so that no reader finds an incomplete batch.
* A log has one writer, even if jobs were restored from one another. The newest claim counts. It is created by a
  conditional create, and only if the job of the previous claim is dead. Before a writer writes or deletes, it checks
  that its claim is still the newest. So a writer that was considered dead stops when it continues. If it writes between
  two checks, the conditional create of the commit accepts only one of the two.
* The log is in the folder of the first job that read the stream. Later jobs have a note with its URL in their own
  folder, because the checkpoints that contain it will be deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from tidegate.connectors.staged_parquet import StagedFile
from tidegate.spark_bridge.errors import SparkBridgeError
from tidegate.storage.checkpoints.lease import may_live, why_alive
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, CorruptionError, NotFoundError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import JobId

HEADER_PATH = "_log"
BATCHES_FOLDER = "batches"
DATA_FOLDER = "data"
SPARK_FOLDER = "spark"
LOG_VERSION = 1

_MAGIC = b"TGBATCH"
_ID_DIGITS = 12

T = TypeVar("T")


@wire
@dataclass(frozen=True, slots=True)
class LogHeader:
    """The settings of a batch log that never change. `spark_checkpoint` is None if Spark's checkpoint is in the folder
    of the log.
    """

    log_id: str
    schema: pa.Schema
    lanes: int
    spark_checkpoint: str | None = None


@wire
@dataclass(frozen=True, slots=True)
class LogBatch:
    """The commit of a micro-batch: its files, in order.

    `ends` has, for each lane (split) of the log, the number of rows up to and including this batch.

    `query_id` is the id of the query that wrote it. Spark's checkpoint stores this id, so it is the same after a
    restart of the query.
    """

    batch_id: int
    query_id: str
    files: tuple[StagedFile, ...]
    ends: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the total size of the batch's files in bytes."""
        return sum(file.size_bytes for file in self.files)

    def in_lane(self, lane: int) -> Iterator[tuple[int, StagedFile]]:
        """Yields the files of this batch in a lane (split), each with the number of its first row in the lane."""
        files = self.files[(lane - self.batch_id) % len(self.ends) :: len(self.ends)]
        start = self.ends[lane] - sum(file.rows for file in files)
        for file in files:
            yield start, file
            start += file.rows

    def start_of(self, lane: int) -> int:
        """Returns the number of the first row of this batch in a lane (split) of the log."""
        return self.ends[lane] - sum(file.rows for _, file in self.in_lane(lane))


def batch_after(
    previous: LogBatch | None, batch_id: int, query_id: str, files: tuple[StagedFile, ...], lanes: int
) -> LogBatch:
    """Returns the commit after `previous`, which is None for the first batch."""
    ends = [0] * lanes if previous is None else list(previous.ends)
    for index, file in enumerate(files):
        ends[(batch_id + index) % lanes] += file.rows
    return LogBatch(batch_id, query_id, files, tuple(ends))


def data_folder(batch_id: int, attempt: str) -> str:
    """Returns the folder for the files of one attempt to write a batch."""
    return f"{DATA_FOLDER}/{_padded(batch_id)}-{attempt}"


class BatchLog:
    """A log of micro-batches in a store, which Spark writes and tasks read.

    Any method may raise StorageError, or CorruptionError and CodecError for damaged data.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """Returns the URL of the log."""
        return self._store.url

    @property
    def store(self) -> Store:
        """Returns the store of the log. Paths of files are relative to it."""
        return self._store

    def create(self, header: LogHeader) -> None:
        """Creates the log. Raises AlreadyExistsError if it exists."""
        self._store.create(HEADER_PATH, seal(_MAGIC, LOG_VERSION, encode(header)))

    def header(self) -> LogHeader:
        """Returns the header. Raises NotFoundError if there is no log."""
        try:
            return self._read(HEADER_PATH, LogHeader)
        except NotFoundError as error:
            raise NotFoundError(
                f"no log of a streaming DataFrame exists at {self.url}"
                "; correct the folder, or start the job without restore"
            ) from error

    def batch_ids(self) -> list[int]:
        """Returns the numbers of the batches in the log, oldest first."""
        names = self._store.list(BATCHES_FOLDER)
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def read(self, batch_id: int) -> LogBatch:
        """Returns the commit of a batch. Raises NotFoundError if it does not exist yet, or was deleted."""
        return self._read(_path(batch_id), LogBatch)

    def commit(self, batch: LogBatch) -> None:
        """Adds a batch to the log. Raises AlreadyExistsError if another writer has added one with this number."""
        self._store.create(_path(batch.batch_id), seal(_MAGIC, LOG_VERSION, encode(batch)))

    def delete(self, batches: Iterable[LogBatch]) -> None:
        """Deletes these batches in their order. They must be the oldest ones."""
        for batch in batches:
            self._store.delete(_path(batch.batch_id))
            for folder in sorted({file.path.rpartition("/")[0] for file in batch.files}):
                self._store.delete_tree(folder)

    def delete_leftovers(self, batches: Iterable[LogBatch]) -> int:
        """Deletes data folders that no batch uses, if they are not newer than the newest batch. Returns how many.

        `batches` must be all batches of the log. Such folders remain if writing or deleting a batch was interrupted.
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
            raise CorruptionError(
                f"{where} holds a {type(value).__name__}, and not a {kind.__name__}; start the job without restore"
            )
        return value


def _is_over(folder: str, newest: LogBatch) -> bool:
    digits = folder.partition("-")[0]
    return digits.isascii() and digits.isdigit() and int(digits) <= newest.batch_id


def _padded(batch_id: int) -> str:
    return f"{batch_id:0{_ID_DIGITS}d}"


def _path(batch_id: int) -> str:
    return f"{BATCHES_FOLDER}/{_padded(batch_id)}"


CLAIMS_FOLDER = "claims"
_CLAIM_MAGIC = b"TGCLAIM"
_CLAIM_VERSION = 1


@wire
@dataclass(frozen=True, slots=True)
class LogClaim:
    """The claim of one run of a job that allows it to write a log. `root` is the checkpoint root of the job, which has
    the job's lease.
    """

    root: str
    job_id: JobId
    job_name: str


class HeldClaim:
    """A claim that this process has created."""

    def __init__(self, store: Store, number: int) -> None:
        self._store = store
        self._number = number

    def check(self) -> None:
        """Raises SparkBridgeError if another job has claimed the log since then."""
        if self._store.exists(_claim_path(self._number + 1)):
            newer = newest_claim(self._store)[1]
            who = "another job" if newer is None else f"job {newer.job_name!r} ({newer.job_id})"
            raise SparkBridgeError(
                f"{who} feeds the log {self._store.url} now, so this job has to stop. If that job replaces this one, "
                "nothing is to be done; if not, stop it and execute this one again"
            )


def newest_claim(store: Store) -> tuple[int, LogClaim | None]:
    """Returns the number of the newest claim and the claim, or (0, None). Raises StorageError, CorruptionError."""
    numbers = [int(name) for name in store.list(CLAIMS_FOLDER) if name.isascii() and name.isdigit()]
    if not numbers:
        return 0, None
    newest = max(numbers)
    where = f"{store.url}/{_claim_path(newest)}"
    claim = decode(unseal(_CLAIM_MAGIC, _CLAIM_VERSION, store.read(_claim_path(newest)), where))
    if not isinstance(claim, LogClaim):
        raise CorruptionError(
            f"{where} holds a {type(claim).__name__}, and not a claim; delete this file if no job feeds the log"
        )
    return newest, claim


def check_free(store: Store, job_name: str, open_store: OpenStore, now_ms: int) -> int:
    """Returns the number of the newest claim. Raises ConfigurationError if its job may still run.

    An earlier job with the same name is certainly dead: a job checks that before it uses a name.
    """
    number, claim = newest_claim(store)
    if claim is None or claim.job_name == job_name:
        return number
    root = open_store(claim.root)
    if may_live(root, claim.job_id, now_ms):
        raise ConfigurationError(
            f"job {claim.job_name!r} ({claim.job_id}) feeds the log {store.url} and may be running, "
            f"{why_alive(root, claim.job_id)}. Only one job can continue a streaming DataFrame: stop or cancel that "
            "one first, or start this one without restore"
        )
    return number


def take_claim(store: Store, claim: LogClaim, open_store: OpenStore, now_ms: int) -> HeldClaim:
    """Claims the log.

    Raises ConfigurationError if the job of the newest claim may run, or if another job was faster.
    """
    number = check_free(store, claim.job_name, open_store, now_ms) + 1
    try:
        store.create(_claim_path(number), seal(_CLAIM_MAGIC, _CLAIM_VERSION, encode(claim)))
    except AlreadyExistsError as error:
        raise ConfigurationError(
            f"another job has begun to feed the log {store.url} at the same moment: execute this one again when that "
            "one is over"
        ) from error
    return HeldClaim(store, number)


def _claim_path(number: int) -> str:
    return f"{CLAIMS_FOLDER}/{number:08d}"


PLACE_PATH = "_log_at"


def remember_log(folder: str, url: str) -> None:
    """Stores the URL of the log in the folder of a job's source, unless the log itself is there."""
    store = open_store(folder)
    if store.url == url:
        return
    try:
        store.create(PLACE_PATH, url.encode())
    except AlreadyExistsError:
        return


def log_at(folder: str) -> Store:
    """Returns the store of the log for a job with this source folder. The log may not exist."""
    store = open_store(folder)
    try:
        return open_store(store.read(PLACE_PATH).decode())
    except NotFoundError:
        return store
