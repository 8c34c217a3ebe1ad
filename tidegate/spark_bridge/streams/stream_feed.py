"""`StreamingDataFrameSource`: a streaming DataFrame as a source. `StreamFeed` runs its query during the job.

The submission creates a batch log. A feed in the driver writes it while the job runs, and tasks read it
(`log_source.py`). Rules of a feed:

* One thread does everything except writing batches, which Spark's thread does. If this thread fails, the job fails: a
  note in the log contains the reason for the source. A feed that is stopped intentionally writes no note.
* It ends with the job, however the job ends.
* It deletes nothing before the job has completed a checkpoint of its own, because the job may have to start again from
  where it was restored. It can delete a batch if all its rows, and all older batches, are before the positions of all
  lanes.
* A deletion that fails is tried again in the next round: a job must not end because storage is unavailable.
* The writer waits while the newest checkpoint does not cover more than a limit of bytes. Batches that only older
  checkpoints and savepoints need do not count, because the user decided to keep these.

Rules of the writer, which Spark calls by `foreachBatch`. Spark numbers micro-batches from 0. Its checkpoint records
the input of a batch before the batch starts, and its end afterwards. After a crash Spark runs the last batch again.

* A batch that is already in the log is skipped: it was written before the crash.
* Only the batch after the newest one is written. Any other number, or another query, means that Spark's checkpoint and
  the log do not belong together. Writing it would lose or repeat rows, so it is an error.
* If two writers write the same batch, the first one counts, and the other deletes its files.

Rules of the query (`StreamingQuery`):

* Its checkpoint belongs to the log. So it continues where the log ends, independent of the checkpoint from which the
  job is restored.
* A query that is stopped in the middle of a micro-batch ends with `WriterStopped`, because a batch that is not in the
  log must not count as done. Neither Spark nor py4j prints that error.
* Every call to Spark has a time limit. A thread waits for the end of the query; no caller waits for that thread.
* It also ends when Spark's driver has ended or does not answer. It may be without executors as long as it has no
  rows; a micro-batch needs them.
* The reason of a failure is the error of our function, if it raised one. Otherwise it is the reason why Spark's driver
  is lost, or the line of Spark's error that names the cause.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import pyarrow as pa
from fsspec.utils import get_protocol
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery as SparkQuery

from tidegate.actors.restore.positions_at_rest import PositionsAtRest
from tidegate.actors.runtimes.driver_services import DriverService
from tidegate.actors.runtimes.running_job import FedJob
from tidegate.connectors.source import Source, SourceReader, SourceSplit
from tidegate.connectors.staged_parquet import StagedFile, local_root
from tidegate.protocol.failures import error_text
from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of, readable_schema
from tidegate.spark_bridge.dataframes.staging import marked_reason, reason_of, stage_files
from tidegate.spark_bridge.errors import SparkBridgeError, SparkLostError, SparkTimeoutError
from tidegate.spark_bridge.spark_calls import (
    END_S,
    Outcome,
    SparkWatch,
    call_bounded,
    cancel_jobs,
    driver_gone,
    without_logs_of,
)
from tidegate.spark_bridge.streams.batch_log import (
    SPARK_FOLDER,
    BatchLog,
    HeldClaim,
    LogBatch,
    LogClaim,
    LogHeader,
    batch_after,
    check_free,
    data_folder,
    log_at,
    remember_log,
    take_claim,
)
from tidegate.spark_bridge.streams.log_source import LogSource, failure_path, split_id
from tidegate.spark_bridge.worker_python import refuse_connect, refuse_unfit_workers
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, NotFoundError, StorageError
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.files.store import Store
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.user_values import logged_text


class StreamingDataFrameSource:
    """A streaming DataFrame as a source. It can be read after `stage` has created its log, with `lanes` lanes.

    Raises ConfigurationError for unsupported types.
    """

    unbounded = True

    def __init__(self, df: DataFrame, lanes: int, settings: StreamSettings) -> None:
        refuse_connect(df, "from_dataframe")
        refuse_unfit_workers(df.sparkSession, "from_dataframe")
        self._df = df
        self._schema = arrow_schema_of(readable_schema(df))
        self._lanes = lanes
        self._settings = settings

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of the DataFrame."""
        return self._schema

    def stage(self, url: str) -> LogSource:
        """Creates an empty log at `url` and returns its source.

        Raises ConfigurationError if the log or Spark's checkpoint cannot be stored there.
        """
        if get_protocol(url) == "memory":
            raise ConfigurationError(
                f"the rows of a streaming DataFrame cannot go to {url}: Spark's executors are other processes and do "
                "not see this one's memory. Give the checkpoints a folder or a bucket (CheckpointConfig(storage=...))"
            )
        log_id = uuid.uuid4().hex
        checkpoint = self._settings.spark_checkpoint
        if checkpoint is None and local_root(url) is None:
            raise ConfigurationError(
                f"Spark's own checkpoint cannot be stored with the log at {url}, because Spark opens buckets by other "
                'means than tidegate: name a place that Spark can write to, from_dataframe(df, spark_checkpoint="s3a://...")'
            )
        place = None if checkpoint is None else join_url(checkpoint, log_id)
        BatchLog(open_store(url)).create(LogHeader(log_id, self._schema, self._lanes, place))
        return LogSource(url, log_id, self._lanes, self._schema, _new_run())

    def reopen(self, url: str) -> LogSource:
        """Returns the log that the earlier job with this folder has read. Raises NotFoundError if there is none."""
        source = LogSource.open(log_at(url).url, _new_run())
        if not source.schema.equals(self._schema):
            raise ConfigurationError(
                f"the streaming DataFrame has columns {columns_text(self._schema)}, and the rows in its log "
                f"{source.url} have {columns_text(source.schema)}: give it those columns, or start without restore"
            )
        return source

    def feed(self, staged: Source, job: FedJob) -> DriverService:
        """Returns the driver service that writes the log while the job runs.

        Raises ConfigurationError if another job feeds it.
        """
        assert isinstance(staged, LogSource)
        check_free(open_store(staged.url), job.name, job.open_store, now_ms())
        return StreamFeed(self._df, staged, self._settings, job)

    def splits(self) -> Sequence[SourceSplit]:
        """Raises SparkBridgeError, because only the log has splits."""
        raise SparkBridgeError(
            "a streaming DataFrame cannot be read by tasks before Spark has written its rows to a log: use "
            "env.from_dataframe(df)"
        )

    def reader(self) -> SourceReader:
        """Raises SparkBridgeError, because only the log can be read."""
        raise SparkBridgeError(
            "a streaming DataFrame cannot be read by tasks before Spark has written its rows to a log: use "
            "env.from_dataframe(df)"
        )


def _new_run() -> str:
    return uuid.uuid4().hex


_logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds of one wait for the end of the query."""
ROUND_LOOKS = 4
"""Number of such waits after which the feed checks whether batches can be deleted."""
STAGE_TIMEOUT_S = 1_800.0
STOP_TIMEOUT_S = 90.0
NOTE_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The settings of a streaming source.

    - `spark_checkpoint`: the URL for Spark's checkpoint. None: in the folder of the log.
    - `trigger_ms`: the time between the starts of micro-batches. None: each starts when the previous one has ended.
    - `log_bytes_max`: the largest total size of the batches that no checkpoint covers yet.
    """

    spark_checkpoint: str | None = None
    trigger_ms: int | None = None
    log_bytes_max: int = 2**30


class StreamFeed(DriverService):
    """The driver service that writes the log of `source`, the source of a job, from a streaming DataFrame."""

    def __init__(self, df: DataFrame, source: LogSource, settings: StreamSettings, job: FedJob) -> None:
        super().__init__(f"the Spark query of source {job.uid!r}", STOP_TIMEOUT_S)
        self._df = df
        self._source = source
        self._settings = settings
        self._job = job

    def start(self, fail: Callable[[str], None]) -> None:
        """Starts the thread of the feed. If it fails, a note in the log reports the failure to all readers."""
        self._begin(f"tidegate feed of {self._job.uid}", self._run)

    def job_ended(self, status: str) -> None:
        """Stops the feed, because the log is no longer read."""
        self.stop()

    @property
    def complete(self) -> bool:
        """Always True, because a finished job has read all of its input."""
        return True

    def _run(self) -> None:
        store = open_store(self._source.url)
        query: StreamingQuery | None = None
        try:
            log = BatchLog(store)
            header = log.header()
            remember_log(self._job.folder, store.url)
            held = LogClaim(self._job.root, self._job.job_id, self._job.name)
            claim = take_claim(store, held, self._job.open_store, now_ms())
            batches = [log.read(batch_id) for batch_id in log.batch_ids()]
            log.delete_leftovers(batches)
            ledger = LogLedger(batches, self._settings.log_bytes_max)
            writer = BatchWriter(log, header.lanes, ledger, claim, partial(self._stage, store))
            query = StreamingQuery(self._df, lambda batch: writer.write(batch, batch.batch_id, batch.query_id))
            self._feed(query, log, header, ledger, claim)
        except BaseException as error:  # noqa: BLE001 (whatever ends the feed ends the job)
            if not self._stopping.is_set():
                reason = f"{type(error).__name__}: {error}" if query is None else query.reason(error)
                self._leave_note(store, reason)

    def _feed(
        self, query: StreamingQuery, log: BatchLog, header: LogHeader, ledger: LogLedger, claim: HeldClaim
    ) -> None:
        positions = PositionsAtRest(
            self._job.open_store, self._job.root, self._job.job_id, self._job.uid, self._job.savepoints
        )
        run = (self._source.run or "")[:8]
        try:
            query.start(
                f"{self._job.name}/{self._job.uid} {run}", _checkpoint_of(header, log.url), self._settings.trigger_ms
            )
            looks = 0
            while not self._stopping.is_set():
                if query.ended(LOOK_S):
                    raise SparkBridgeError(
                        "the feed of the streaming DataFrame was stopped from outside of tidegate; execute the job "
                        "again with restore='latest'"
                    )
                looks += 1
                if looks % ROUND_LOOKS == 0:
                    free_batches(log, header, ledger, claim, positions)
        finally:
            ledger.stop()
            query.stop()

    def _stage(self, store: Store, batch: MicroBatch, folder: str) -> tuple[StagedFile, ...]:
        return stage_files(
            batch.rows,
            store,
            folder,
            self._source.schema,
            timeout_s=STAGE_TIMEOUT_S,
            job_group=batch.job_group,
            marks=True,
        )

    def _leave_note(self, store: Store, reason: str) -> None:
        """Stores the note about a failure for the source. Retries until the note exists, or the feed is stopped."""
        text = (
            f"{self.text} has failed: {reason}. Mend the cause and execute the job "
            'again with restore="latest": the query continues where it was'
        )
        _logger.warning("job %r: %s", self._job.name, logged_text(text))
        assert self._source.run is not None
        while not self._stopping.is_set():
            try:
                store.create(failure_path(self._source.run), text.encode("utf-8", "backslashreplace"))
            except AlreadyExistsError:
                return
            except StorageError as error:
                _logger.warning("job %r cannot be told yet that its query has failed: %s", self._job.name, error)
                self._stopping.wait(NOTE_STEP_S)
            else:
                return


def free_batches(
    log: BatchLog, header: LogHeader, ledger: LogLedger, claim: HeldClaim, positions: PositionsAtRest
) -> None:
    """Runs one round of cleaning: updates the ledger with the newest checkpoint, and deletes batches that no checkpoint
    needs.

    Raises SparkBridgeError if another job writes the log. If storage does not answer, the next round tries again.
    """
    try:
        resting = positions.look()
        if not resting.checkpoints:
            return
        ledger.cover(needed_rows(header.log_id, header.lanes, resting.checkpoints[-1:]))
        if not resting.whole:
            return
        lanes = {split_id(header.log_id, lane) for lane in range(header.lanes)}
        savepoints = [each for each in resting.savepoints if not lanes.isdisjoint(each)]
        deletable = ledger.deletable(needed_rows(header.log_id, header.lanes, (*resting.checkpoints, *savepoints)))
        if deletable:
            claim.check()
        for batch in deletable:
            log.delete((batch,))
            ledger.deleted(batch)
    except StorageError as error:
        _logger.warning("%s is not tidied up now: %s", log.url, error)


def _checkpoint_of(header: LogHeader, url: str) -> str:
    if header.spark_checkpoint is not None:
        return header.spark_checkpoint
    root = local_root(url)
    assert root is not None, "a log outside of a local folder has the place in its header"
    return f"file://{root.absolute()}/{SPARK_FOLDER}"


R = TypeVar("R")


class BatchWriter(Generic[R]):
    """Writes one batch at a time. `stage(rows, folder)` writes the rows of a batch as files in a folder."""

    def __init__(
        self,
        log: BatchLog,
        lanes: int,
        ledger: LogLedger,
        claim: HeldClaim,
        stage: Callable[[R, str], tuple[StagedFile, ...]],
    ) -> None:
        self._log = log
        self._lanes = lanes
        self._ledger = ledger
        self._claim = claim
        self._stage = stage

    def write(self, rows: R, batch_id: int, query_id: str) -> None:
        """Waits until the log has space, and adds a batch, unless the log has it already.

        Raises SparkBridgeError if the batch is not the next one or another job writes the log, StorageError,
        WriterStopped, and errors of `stage`.
        """
        self._claim.check()
        newest = self._newest_before(batch_id)
        self._check_follows(newest, batch_id, query_id)
        if newest is not None and newest.batch_id == batch_id:
            return
        self._ledger.await_room()
        folder = data_folder(batch_id, uuid.uuid4().hex[:8])
        batch = batch_after(newest, batch_id, query_id, self._stage(rows, folder), self._lanes)
        self._ledger.append(self._committed(batch, folder))

    def _newest_before(self, batch_id: int) -> LogBatch | None:
        """Returns the newest batch before this one.

        First reads batches that an earlier writer, which was considered dead, may have added since.
        """
        newest = self._ledger.newest
        while batch_id > (expected := 0 if newest is None else newest.batch_id + 1):
            try:
                newest = self._log.read(expected)
            except NotFoundError:
                break
            self._ledger.append(newest)
        return newest

    def _committed(self, batch: LogBatch, folder: str) -> LogBatch:
        try:
            self._log.commit(batch)
        except AlreadyExistsError:
            there = self._log.read(batch.batch_id)
            if there == batch:
                return batch  # An earlier try of this create had worked, but its answer was lost.
            self._drop(folder)
            if there.query_id != batch.query_id:
                raise self._other_query(there, batch.query_id) from None
            _logger.info("batch %d of %s was written by another attempt", batch.batch_id, self._log.url)
            return there
        return batch

    def _check_follows(self, newest: LogBatch | None, batch_id: int, query_id: str) -> None:
        expected = 0 if newest is None else newest.batch_id + 1
        if newest is not None and newest.query_id != query_id:
            raise self._other_query(newest, query_id)
        if batch_id not in (expected, expected - 1):
            raise SparkBridgeError(
                f"Spark sends batch {batch_id}, and the log {self._log.url} continues with batch {expected}: "
                f"Spark's checkpoint and the log do not belong together. {_ADVICE}"
            )

    def _other_query(self, newest: LogBatch, query_id: str) -> SparkBridgeError:
        return SparkBridgeError(
            f"query {query_id} is not the one that has written the log {self._log.url} up to batch {newest.batch_id} "
            f"({newest.query_id}): Spark's checkpoint was deleted or exchanged, so it is unknown which rows the log "
            f"has. {_ADVICE}"
        )

    def _drop(self, folder: str) -> None:
        try:
            self._log.store.delete_tree(folder)
        except StorageError as error:
            _logger.warning("could not delete %s/%s, which is not needed: %s", self._log.url, folder, error)


_ADVICE = (
    "Put the checkpoint folder back that belongs to the log, or start the job without restore: it then has a new log, "
    "and the query starts again"
)


WAIT_STEP_S = 1.0


class WriterStopped(Exception):
    """Raised in a batch function when the feed stops, so that Spark does not record the batch as written."""


def needed_rows(log_id: str, lanes: int, positions: Iterable[Mapping[str, int]]) -> tuple[int, ...]:
    """Returns the number of the first row of each lane that a checkpoint needs.

    0 if a checkpoint does not contain the lane.
    """
    known = list(positions)
    ids = [split_id(log_id, lane) for lane in range(lanes)]
    return tuple(min((each.get(name, 0) for each in known), default=0) for name in ids)


class LogLedger:
    """The batches of a log, and how many of their rows checkpoints cover. Thread-safe."""

    def __init__(self, batches: Iterable[LogBatch], limit_bytes: int) -> None:
        self._batches = deque(batches)
        self._limit_bytes = limit_bytes
        self._covered: Sequence[int] | None = None
        self._stopped = False
        self._changed = threading.Condition()

    @property
    def newest(self) -> LogBatch | None:
        """Returns the newest batch, or None if the log is empty."""
        with self._changed:
            return self._batches[-1] if self._batches else None

    @property
    def batches(self) -> tuple[LogBatch, ...]:
        """Returns the batches of the log, oldest first."""
        with self._changed:
            return tuple(self._batches)

    @property
    def uncovered_bytes(self) -> int:
        """Returns the size in bytes of the batches that the newest checkpoint does not cover."""
        with self._changed:
            covered = self._covered
            total = 0
            for batch in reversed(self._batches):
                if covered is not None and all(end <= row for end, row in zip(batch.ends, covered, strict=True)):
                    break
                total += batch.size_bytes
            return total

    def append(self, batch: LogBatch) -> None:
        """Records that a batch was committed."""
        with self._changed:
            assert not self._batches or batch.batch_id == self._batches[-1].batch_id + 1
            self._batches.append(batch)

    def cover(self, rows: Sequence[int]) -> None:
        """Records how many rows of each lane the newest checkpoint covers."""
        with self._changed:
            self._covered = rows
            self._changed.notify_all()

    def deletable(self, needed: Sequence[int]) -> tuple[LogBatch, ...]:
        """Returns the oldest batches that can be deleted: all before the first batch with a needed row.

        `needed` has the number of the first needed row of each lane.
        """
        with self._changed:
            found = []
            for batch in list(self._batches)[:-1]:
                if any(end > row for end, row in zip(batch.ends, needed, strict=True)):
                    break
                found.append(batch)
            return tuple(found)

    def deleted(self, batch: LogBatch) -> None:
        """Records that the oldest batch was deleted."""
        with self._changed:
            assert self._batches[0] == batch
            self._batches.popleft()

    def await_room(self) -> None:
        """Waits while the batches in the log that no completed checkpoint covers are larger than the limit.

        Raises WriterStopped after `stop` was called.
        """
        with self._changed:
            while not self._stopped and self.uncovered_bytes > self._limit_bytes:
                self._changed.wait(WAIT_STEP_S)
            if self._stopped:
                raise WriterStopped

    def stop(self) -> None:
        """Makes `await_room` raise WriterStopped from now on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 60.0

_IS_ALIVE = "Is Spark's driver alive?"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of Spark: its rows, its number, the id of its query, and the job group for processing it."""

    rows: DataFrame
    batch_id: int
    query_id: str
    job_group: str


class StreamingQuery:
    """A running streaming query. It calls `write` with each micro-batch."""

    def __init__(self, df: DataFrame, write: Callable[[MicroBatch], None]) -> None:
        self._df = df
        self._write = write
        self._job_group = f"tidegate-{uuid.uuid4().hex[:12]}"
        self._query_id: Future[str] = Future()
        self._query: SparkQuery | None = None
        self._end: Outcome[object] | None = None
        self._watch = SparkWatch(df.sparkSession.sparkContext, needs_executors=False)
        self._raised: Exception | None = None
        self._stopped = False

    def start(self, name: str, checkpoint: str, trigger_ms: int | None) -> None:
        """Starts the query.

        Raises SparkTimeoutError, SparkLostError, and Spark's errors for a query that cannot run.
        """

        def begin() -> SparkQuery:
            writer = self._df.writeStream.foreachBatch(self._batch).queryName(name)
            writer = writer.option("checkpointLocation", checkpoint)
            if trigger_ms is not None:
                writer = writer.trigger(processingTime=f"{trigger_ms} milliseconds")
            return writer.start()

        logging.getLogger("py4j.clientserver").addFilter(_is_not_a_stop)
        self._watch.begin()
        self._query = query = call_bounded(
            begin,
            timeout_s=START_TIMEOUT_S,
            what=f"starting the query {name}",
            advice=_IS_ALIVE,
        )
        self._query_id.set_result(query.id)
        self._end = Outcome(query.awaitTermination)
        threading.Thread(target=self._end.run, name=f"tidegate waits for query {name}", daemon=True).start()

    def ended(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds for the end of the query.

        Returns True if it was stopped, False if it still runs. Raises Spark's error if it has failed, and
        SparkLostError if Spark's driver is lost.
        """
        assert self._end is not None, "it was started"
        if self._end.wait(timeout_s):
            self._end.result()
            return True
        if reason := self._watch.over():
            raise SparkLostError(reason)
        return False

    def reason(self, error: BaseException) -> str:
        """Returns why the query failed, in one line, with text from Spark marked. `error` is Spark's error."""
        cause = self._raised
        if cause is not None and not isinstance(cause, PySparkException | Py4JError):
            return error_text(cause)
        if isinstance(error, SparkLostError):
            return str(error)
        if gone := driver_gone(self._df.sparkSession.sparkContext, END_S):
            return gone
        of_spark = cause or error
        if isinstance(of_spark, PySparkException | Py4JError):
            return marked_reason(reason_of(of_spark))
        return error_text(of_spark)

    def stop(self) -> None:
        """Stops the query and its jobs. If it does not stop in time, it continues, and a warning is logged."""
        query = self._query
        context = self._df.sparkSession.sparkContext
        self._watch.close()
        if query is None or driver_gone(context):
            return
        self._stopped = True

        def stop() -> None:
            with without_logs_of(context, _LOGGERS_OF_QUERIES):
                cancel_jobs(context, self._job_group)
                query.stop()

        try:
            call_bounded(stop, timeout_s=CALL_TIMEOUT_S, what="stopping a streaming query", advice=_IS_ALIVE)
        except (PySparkException, Py4JError, SparkTimeoutError, OSError) as error:
            # Its writer is marked as stopped, so later batches are not written.
            if driver_gone(context, END_S) is None:
                _logger.warning("a streaming query could not be stopped: %s", error)

    def _batch(self, rows: DataFrame, batch_id: int) -> None:
        """Writes one micro-batch. Spark calls this in its own thread."""
        try:
            query_id = self._query_id.result(START_TIMEOUT_S)
            self._write(MicroBatch(rows, batch_id, query_id, self._job_group))
        except WriterStopped:
            raise
        except Exception as error:
            if self._stopped:
                raise WriterStopped from error  # Its jobs were cancelled.
            self._raised = error
            raise


def _is_not_a_stop(record: logging.LogRecord) -> bool:
    """Filter for the log of py4j. Returns False for the error of a batch whose query is being stopped."""
    return record.exc_info is None or not isinstance(record.exc_info[1], WriterStopped)


_LOGGERS_OF_QUERIES = (
    "org.apache.spark.sql.execution.streaming.MicroBatchExecution",
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",  # Since Spark 4.1.
)
