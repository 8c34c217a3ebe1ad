"""`DataFrameSource`: a bounded DataFrame as a source. Submission decides how it is read.

A DataFrame that does nothing but read Parquet files is read from them, where that surely gives the same rows. Any other
one is staged: tasks read the files that Spark has written then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from tidegate.connectors.source import Source, SourceReader, SourceSplit
from tidegate.spark_bridge.dataframes.in_place.files_in_place import FilesInPlace, place_files, placed_files
from tidegate.spark_bridge.dataframes.in_place.plan import NeedsSparkError, files_of
from tidegate.spark_bridge.dataframes.parquet_source import ParquetSource
from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of, readable_schema
from tidegate.spark_bridge.dataframes.staging import reason_of, stage_dataframe
from tidegate.spark_bridge.errors import SparkBridgeError
from tidegate.spark_bridge.spark_actions import run_spark_action
from tidegate.spark_bridge.worker_python import refuse_connect
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store

log = logging.getLogger(__name__)
_PLAN_S = 300.0
"""Spark lists the files of a DataFrame when it is made, so it has its plan soon."""


class DataFrameSource:
    """Stands for the input until it is staged, or its files are known. ConfigurationError for a streaming DataFrame."""

    def __init__(self, df: DataFrame, stage: bool | None = None) -> None:
        """`stage` True: always; False: never, it is an error if Spark is needed; None: if Spark is needed."""
        refuse_connect(df, "from_dataframe")
        if df.isStreaming:
            raise ConfigurationError("from_dataframe: a streaming DataFrame has no end; give a bounded one")
        self._df = df
        self._stage = stage
        self._schema = arrow_schema_of(readable_schema(df))

    @property
    def schema(self) -> pa.Schema:
        """Columns of the DataFrame."""
        return self._schema

    def stage(self, url: str) -> Source:
        """What reads the rows: files in place, or those that Spark's executors write under `url`."""
        if self._stage:
            return stage_dataframe(self._df, url)
        try:
            return self._in_place(url)
        except NeedsSparkError as error:
            if self._stage is False:
                raise ConfigurationError(
                    f"from_dataframe(stage=False): only Spark can read this DataFrame: {error}; leave stage= out"
                ) from error
            log.info("the DataFrame is staged, because %s", error)
        return stage_dataframe(self._df, url)

    def reopen(self, url: str) -> Source:
        """What an earlier job reads whose rows or files are under `url`. NotFoundError if there is nothing."""
        return placed_files(open_store(url)) or ParquetSource.open(url)

    def splits(self) -> Sequence[SourceSplit]:
        """Raises: only the staged source has splits."""
        raise SparkBridgeError("a DataFrame is read only after it was staged")

    def reader(self) -> SourceReader:
        """Raises: only the staged source can be read."""
        raise SparkBridgeError("a DataFrame is read only after it was staged")

    def _in_place(self, url: str) -> FilesInPlace:
        what = "asking for the plan of a DataFrame"
        try:
            plan = run_spark_action(self._df.sparkSession, lambda: files_of(self._df), timeout_s=_PLAN_S, what=what)
        except (PySparkException, Py4JError) as error:
            raise NeedsSparkError(f"its plan cannot be read: {reason_of(error)}") from error
        source = place_files(plan, url)
        log.info("the DataFrame is read from its %d files, without staging", len(plan.files))
        return source
