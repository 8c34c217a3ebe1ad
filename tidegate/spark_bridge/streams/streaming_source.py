"""`StreamingDataFrameSource`: a streaming DataFrame as a source.

Submission creates its log. A `StreamFeed` writes the log while the job runs, and tasks read it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pyarrow as pa
from fsspec.utils import get_protocol
from pyspark.sql import DataFrame

from tidegate.actors.runtimes.companions import Companion
from tidegate.actors.runtimes.running_job import FedJob
from tidegate.connectors.source import Source, SourceReader, SourceSplit
from tidegate.spark_bridge.dataframes.parquet_source import local_root
from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of, readable_schema
from tidegate.spark_bridge.errors import SparkBridgeError
from tidegate.spark_bridge.streams.batch_log import BatchLog, LogHeader
from tidegate.spark_bridge.streams.log_claims import check_free
from tidegate.spark_bridge.streams.log_place import log_at
from tidegate.spark_bridge.streams.log_source import LogSource
from tidegate.spark_bridge.streams.stream_feed import StreamFeed, StreamSettings
from tidegate.spark_bridge.worker_python import refuse_connect, refuse_unfit_workers
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.schemas.columns_text import columns_text


class StreamingDataFrameSource:
    """Stands for the input until it has a log, with `lanes` lanes. ConfigurationError for unsupported types."""

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
        """Columns of the DataFrame."""
        return self._schema

    def stage(self, url: str) -> LogSource:
        """Create an empty log at `url`. ConfigurationError if the log or Spark's checkpoint cannot be there."""
        if get_protocol(url) == "memory":
            raise ConfigurationError(
                f"the rows of a streaming DataFrame cannot go to {url}: Spark's executors are other processes and do "
                "not see this one's memory. Give the checkpoints a folder or a bucket (CheckpointConfig(storage=...))"
            )
        log_id, checkpoint = uuid.uuid4().hex, self._settings.spark_checkpoint
        if checkpoint is None and local_root(url) is None:
            raise ConfigurationError(
                f"Spark's own checkpoint cannot be kept beside the log at {url}, because Spark opens buckets by other "
                'means than tidegate: name a place that Spark can write to, from_dataframe(df, spark_checkpoint="s3a://...")'
            )
        place = None if checkpoint is None else join_url(checkpoint, log_id)
        BatchLog(open_store(url)).create(LogHeader(log_id, self._schema, self._lanes, place))
        return LogSource(url, log_id, self._lanes, self._schema, _new_run())

    def reopen(self, url: str) -> LogSource:
        """The log that the job with this folder has read. NotFoundError if there is none."""
        source = LogSource.open(log_at(url).url, _new_run())
        if not source.schema.equals(self._schema):
            raise ConfigurationError(
                f"the streaming DataFrame has columns {columns_text(self._schema)}, and the rows in its log "
                f"{source.url} have {columns_text(source.schema)}: give it those columns, or start without restore"
            )
        return source

    def feed(self, staged: Source, job: FedJob) -> Companion:
        """The companion that writes the log while the job runs. ConfigurationError if another job feeds it."""
        assert isinstance(staged, LogSource)
        check_free(open_store(staged.url), job.name, job.open_store, now_ms())
        return StreamFeed(self._df, staged, self._settings, job)

    def splits(self) -> Sequence[SourceSplit]:
        """Raises: only the log has splits."""
        raise SparkBridgeError("a streaming DataFrame is read only through its log")

    def reader(self) -> SourceReader:
        """Raises: only the log can be read."""
        raise SparkBridgeError("a streaming DataFrame is read only through its log")


def _new_run() -> str:
    return uuid.uuid4().hex
