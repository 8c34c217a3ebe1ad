"""`StreamSources`: begins streams: from data in memory, Spark DataFrames, a rate, and sources of your own.

`StreamEnvironment` inherits these methods, and adds those that run the streams.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.actors.sources.memory_source import InMemory, MemorySource
from tidegate.actors.sources.rate_source import RateSource
from tidegate.actors.sources.source import Source
from tidegate.api.program import Program
from tidegate.api.stream import Stream, timed
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MEMORY_SPLITS = 16
"""Splits of data in memory. Fixed, because the parallelism may change when a job is restored."""
RATE_SPLITS = 8
"""Splits of a rate."""
LANES_A_SUBTASK = 2
"""Lanes (splits) in the log of a streaming DataFrame, for each subtask that its source has when the log is made."""
IDLENESS = "1min"
"""A lane of a streaming DataFrame without rows for this long does not hold event time back any more."""
LOG_LIMIT = "1gb"
"""Bytes of rows of a streaming DataFrame that may wait for a checkpoint to cover them."""


class StreamSources:
    """Begins streams of one program."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def from_batches(
        self,
        data: InMemory,
        *,
        splits: int | None = None,
        timestamp: str | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        name: str = "from_batches",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """A stream over data in memory: Arrow, or a polars frame. The data travels with the job: keep it small.

        It is read in `splits` parts (16 by default), dealt out to the subtasks. A restored job needs the same data and
        splits. With `timestamp`, event time comes from this column, as with `Stream.assign_timestamps`.
        """
        source = MemorySource.of(data, splits if splits is not None else MEMORY_SPLITS)
        stream = self.from_source(source, name=name, uid=uid, parallelism=parallelism)
        return timed(stream, timestamp, max_out_of_orderness, uid)

    def from_dataframe(
        self,
        df: DataFrame,
        *,
        timestamp: str | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        idleness: str | timedelta | int | None = None,
        name: str = "from_dataframe",
        uid: str | None = None,
        parallelism: int | None = None,
        spark_checkpoint: str | None = None,
        trigger: str | timedelta | int | None = None,
        log_limit: str | int | None = None,
    ) -> Stream:
        """A stream over a Spark DataFrame, bounded or streaming.

        With `timestamp`, event time comes from this column, as with `Stream.assign_timestamps`.

        Bounded: when the job is executed, Spark's executors write the rows to files, once. The job reads these files,
        so what it replays after a failure is exactly what it read before.

        Streaming (`spark.readStream...`): a Spark query runs in this driver, as long as the job. Each micro-batch lands
        exactly once in a log, which the job follows. The log has lanes, and the slowest lane decides event time. See
        `docs/streaming-dataframes.md`. These settings raise ConfigurationError with a bounded DataFrame:

        - `idleness`: a lane without rows for so long, a minute by default, does not hold event time back any more.
        - `trigger`: how far apart micro-batches begin (Spark's `processingTime`); without it, one follows the other.
        - `log_limit`: the query waits while more bytes of rows, 1 GB by default, are not covered by a checkpoint.
        - `spark_checkpoint`: a folder for Spark's own checkpoint, needed if the job's checkpoints are in a bucket.
        """
        from tidegate.spark_bridge import DataFrameSource, StreamingDataFrameSource, StreamSettings

        source: Source
        if df.isStreaming:
            lanes = LANES_A_SUBTASK * (parallelism if parallelism is not None else self._program.parallelism)
            trigger_ms = None if trigger is None else parse_duration_ms(trigger, setting="from_dataframe(trigger)")
            limit = LOG_LIMIT if log_limit is None else log_limit
            limit_bytes = parse_size_bytes(limit, setting="from_dataframe(log_limit)")
            source = StreamingDataFrameSource(df, lanes, StreamSettings(spark_checkpoint, trigger_ms, limit_bytes))
            idleness = IDLENESS if idleness is None else idleness
        else:
            _refuse_for_bounded(
                idleness=idleness, trigger=trigger, log_limit=log_limit, spark_checkpoint=spark_checkpoint
            )
            source = DataFrameSource(df)
        stream = self.from_source(source, name=name, uid=uid, parallelism=parallelism)
        return timed(stream, timestamp, max_out_of_orderness, uid, idleness)

    def from_rate(
        self,
        rows_per_second: float | None,
        *,
        rows: int | None = None,
        splits: int | None = None,
        timestamp: str | None = None,
        max_out_of_orderness: str | timedelta | int = 0,
        name: str = "from_rate",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """A stream of numbered rows, so many a second, for demos and benchmarks (Spark's `rate`, Flink's `datagen`).

        Its columns are `timestamp`, when the row was due, and `value`, the number of the row; make others of them with
        `select`. It ends after `rows` rows, or never. No row comes early, and none is left out: what is overdue after a
        restore comes at once. Without a rate (None) rows come as fast as they are taken, and are dated 1 ms apart.

        With `timestamp="timestamp"` that is event time. A restored job needs the same rate, rows and splits.
        """
        source = RateSource(rows_per_second, rows, RATE_SPLITS if splits is None else splits)
        stream = self.from_source(source, name=name, uid=uid, parallelism=parallelism)
        return timed(stream, timestamp, max_out_of_orderness, uid)

    def from_source(
        self, source: Source, *, name: str = "source", uid: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """A stream over a source of your own (see `tg.Source`)."""
        if self._program.given_up:
            self._program.clear()
        node = StreamNode(
            uid=self._program.new_uid(name, uid),
            name=name,
            parallelism=parallelism if parallelism is not None else self._program.parallelism,
            schema=source.schema,
            source=source,
        )
        self._program.add_node(node)
        return Stream(self._program, ((node, None),))


def _refuse_for_bounded(**settings: object) -> None:
    """Raise ConfigurationError where a bounded DataFrame was given settings of streaming ones."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"from_dataframe: {', '.join(settings)} are for streaming DataFrames, and this one is bounded: leave "
            f"{' and '.join(given)} out"
        )
