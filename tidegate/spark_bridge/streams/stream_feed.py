"""`StreamFeed`: feeds one source of a job. It runs the query, and deletes what no checkpoint needs any more.

It lives in the driver, beside the Spark session, from submission to the end of the job. Rules:
* One thread does everything but write batches, which Spark's thread does. If this thread fails, the job fails: a note
  in the log tells the source why (`log_source.py`), and so everybody who looks at the job. A feed that is stopped on
  purpose leaves no note.
* It ends with the job, however the job ends.
* Nothing is deleted before the job has completed a checkpoint of its own: it may have to begin again where it was
  restored.
* A deletion that fails is tried again in the next round. A job that can go on must not end because storage is away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pyspark.sql import DataFrame

from tidegate.actors.restore.positions_at_rest import PositionsAtRest
from tidegate.actors.runtimes.companions import Companion
from tidegate.actors.runtimes.running_job import FedJob
from tidegate.spark_bridge.dataframes.manifest import StagedFile
from tidegate.spark_bridge.dataframes.parquet_source import local_root
from tidegate.spark_bridge.dataframes.staging import stage_files
from tidegate.spark_bridge.errors import SparkBridgeError
from tidegate.spark_bridge.streams.batch_log import SPARK_FOLDER, BatchLog, LogHeader
from tidegate.spark_bridge.streams.batch_writer import BatchWriter
from tidegate.spark_bridge.streams.log_claims import HeldClaim, LogClaim, take_claim
from tidegate.spark_bridge.streams.log_ledger import LogLedger, needed_rows
from tidegate.spark_bridge.streams.log_place import remember_log
from tidegate.spark_bridge.streams.log_source import LogSource, failure_path, split_id
from tidegate.spark_bridge.streams.streaming_query import MicroBatch, StreamingQuery
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import AlreadyExistsError, StorageError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store
from tidegate.storage.user_values import logged_text

_logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How long one wait for the end of the query takes."""
ROUND_LOOKS = 4
"""After so many waits, look for what can be deleted."""
STAGE_TIMEOUT_S = 1_800.0
STOP_TIMEOUT_S = 90.0
NOTE_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of a streaming source.

    `spark_checkpoint`: the url under which Spark keeps its checkpoint; None: beside the log. `trigger_ms`: time between
    the starts of micro-batches; None: each starts when the one before is done. `log_bytes_max`: how much may wait to be
    covered by a checkpoint.
    """

    spark_checkpoint: str | None = None
    trigger_ms: int | None = None
    log_bytes_max: int = 2**30


class StreamFeed(Companion):
    """Feeds `source`, the source of a job, from a streaming DataFrame."""

    def __init__(self, df: DataFrame, source: LogSource, settings: StreamSettings, job: FedJob) -> None:
        super().__init__(f"the Spark query of source {job.uid!r}", STOP_TIMEOUT_S)
        self._df = df
        self._source = source
        self._settings = settings
        self._job = job

    def start(self, fail: Callable[[str], None]) -> None:
        """Start the thread. It reports a failure by the note, so that other readers of the log see it too."""
        self._begin(f"tidegate feed of {self._job.uid}", self._run)

    def job_ended(self, status: str) -> None:
        """Stop: nobody reads the log any more."""
        self.stop()

    @property
    def complete(self) -> bool:
        """Always: a job that has finished has read all that it was to read."""
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
                    raise SparkBridgeError("somebody has stopped it")
                looks += 1
                if looks % ROUND_LOOKS == 0:
                    let_go(log, header, ledger, claim, positions)
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
        """Leave the note for the source. Tries until it is there, or the feed is stopped."""
        text = (
            f"{self.text} has failed: {reason}. Mend the cause and execute the job "
            'again with restore="latest": the query goes on where it was'
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


def let_go(log: BatchLog, header: LogHeader, ledger: LogLedger, claim: HeldClaim, positions: PositionsAtRest) -> None:
    """One round: tell the ledger what the newest checkpoint covers, and delete what no checkpoint needs.

    SparkBridgeError if another job feeds the log. If storage does not answer, the next round tries again.
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
    assert root is not None, "a log that is no local folder has the place in its header"
    return f"file://{root.absolute()}/{SPARK_FOLDER}"
