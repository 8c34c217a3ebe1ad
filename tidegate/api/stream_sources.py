"""`StreamSources`: what an environment begins streams with: data in memory, DataFrames, and sources of your own.

`StreamEnvironment` adds what becomes of the streams.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.actors.sources.memory_source import InMemory, MemorySource
from tidegate.actors.sources.source import Source
from tidegate.api.program import Program
from tidegate.api.stream import Stream, timed
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MEMORY_SPLITS = 16
"""Parts of a stream over data in memory; not the parallelism, which may change when a job is restored."""
LANES_A_SUBTASK = 2
"""Parts of the log of a streaming DataFrame for each subtask that its source has when the log is made."""
IDLENESS = "1min"
"""How long a lane of a streaming DataFrame may have no rows and hold event time back."""
LOG_LIMIT = "1gb"
"""How much of a streaming DataFrame may wait for a checkpoint."""


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

        It is read in `splits` parts, dealt out to the subtasks. A restored job needs the same data and splits. With
        `timestamp`, event time is that of this column, as with `Stream.assign_timestamps`.
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

        Of a bounded one Spark writes the rows down once, distributed, when the job is executed; the job reads that
        copy, so that what is replayed after a failure is exactly what was read before it. With `timestamp`, event time
        is that of this column, as with `Stream.assign_timestamps`.

        Of a streaming one (`spark.readStream...`) a Spark query runs as long as the job, in this driver, and each of
        its micro-batches lands exactly once in a log, which the job follows. `idleness` and the last three are for it
        alone. Event time is that of the lane of the log that is furthest behind; a lane without rows for as long as
        `idleness`, a minute by default, does not hold it back any more. `trigger` is how far apart micro-batches begin
        (Spark's `processingTime`), at once if there is none; the query waits while more than `log_limit` bytes of rows,
        1 GB by default, are not covered by a checkpoint; `spark_checkpoint` is a folder for Spark's own checkpoint,
        needed where the job's checkpoints lie in a bucket. See `docs/streaming-dataframes.md`.
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
