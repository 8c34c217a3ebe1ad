"""`StreamingQuery`: the Spark side of a streaming DataFrame: one query that hands its micro-batches to a function.

`StreamFeed` starts and stops it. Rules:
* The query's checkpoint belongs to the log. So the query goes on where the log ends, whatever the job is restored from.
* A query that is stopped in the middle of a micro-batch ends with an error of ours, because a batch that is not in the
  log must not count as done. Neither Spark nor py4j prints that one.
* Every call into Spark is bounded. A thread waits for the query's end, and nobody waits for that thread.
* The query is over as well when Spark's driver has ended, or does not answer. It may be without executors as long as it
  has no rows; a micro-batch needs them (`spark_actions.py`).
* The reason of a failure is what our function raised, if it did. Otherwise it is what has become of Spark's driver, or
  the line of Spark's error that names the cause.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery as SparkQuery

from tidegate.protocol.failure_reasons import error_text
from tidegate.spark_bridge.bounded_calls import Outcome, call_bounded
from tidegate.spark_bridge.dataframes.staging import marked_reason, reason_of
from tidegate.spark_bridge.errors import SparkLostError, SparkTimeoutError
from tidegate.spark_bridge.quiet_loggers import without_logs_of
from tidegate.spark_bridge.spark_actions import cancel_jobs
from tidegate.spark_bridge.spark_watch import END_S, SparkWatch, driver_gone
from tidegate.spark_bridge.streams.log_ledger import WriterStopped

_logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 60.0

_IS_ALIVE = "Is Spark's driver alive?"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch from Spark: its rows, its number, its query, and the job group for work on it."""

    rows: DataFrame
    batch_id: int
    query_id: str
    job_group: str


class StreamingQuery:
    """One query. `write` gets each micro-batch."""

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
        """Start it. SparkTimeoutError, SparkLostError, and whatever Spark raises for a query that cannot run."""

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
        """Wait up to `timeout_s` for its end. True if it was stopped; raises Spark's error if it has failed.

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
        """Why it failed, in one line, with marks around Spark's own text. `error` is what Spark raised."""
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
        """Stop it and its jobs. If it does not stop in time, it is left behind, with a warning."""
        query, context = self._query, self._df.sparkSession.sparkContext
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
            # Its writer was told to stop, so nothing it still does is written.
            if driver_gone(context, END_S) is None:
                _logger.warning("a streaming query could not be stopped: %s", error)

    def _batch(self, rows: DataFrame, batch_id: int) -> None:
        """Spark calls this, in a thread of its own."""
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
    """Whether py4j is to log a record: not what a batch raises because its query is being stopped."""
    return record.exc_info is None or not isinstance(record.exc_info[1], WriterStopped)


_LOGGERS_OF_QUERIES = (
    "org.apache.spark.sql.execution.streaming.MicroBatchExecution",
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",  # Since Spark 4.1.
)
