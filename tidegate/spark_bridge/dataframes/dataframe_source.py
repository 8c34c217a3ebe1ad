"""`DataFrameSource`: a bounded DataFrame as a source. Submission stages it; tasks read the staged files."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import DataFrame

from tidegate.actors.sources.source import SourceReader, SourceSplit
from tidegate.spark_bridge.dataframes.parquet_source import ParquetSource
from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of
from tidegate.spark_bridge.dataframes.staging import stage_dataframe
from tidegate.spark_bridge.errors import SparkBridgeError
from tidegate.storage.errors import ConfigurationError


class DataFrameSource:
    """Stands for the input until it is staged. ConfigurationError for a streaming DataFrame."""

    def __init__(self, df: DataFrame) -> None:
        if df.isStreaming:
            raise ConfigurationError("from_dataframe: a streaming DataFrame has no end; give a bounded one")
        self._df = df
        self._schema = arrow_schema_of(df.schema)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the DataFrame."""
        return self._schema

    def stage(self, url: str) -> ParquetSource:
        """Let Spark's executors write the rows under `url`."""
        return stage_dataframe(self._df, url)

    def reopen(self, url: str) -> ParquetSource:
        """The source that was staged under `url` before. NotFoundError if there is none."""
        return ParquetSource.open(url)

    def splits(self) -> Sequence[SourceSplit]:
        """Raises: only the staged source has splits."""
        raise SparkBridgeError("a DataFrame is read only after it was staged")

    def reader(self) -> SourceReader:
        """Raises: only the staged source can be read."""
        raise SparkBridgeError("a DataFrame is read only after it was staged")
