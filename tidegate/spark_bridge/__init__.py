"""Spark together with Ray: sessions, DataFrames as replayable sources, and tables as DataFrames.

`RayDPSession` starts Ray and Spark, and reserves executors and task slots together. `RayOnSparkSession` starts Ray in
the executors of an existing Spark. `stage_dataframe` turns a DataFrame into a `ParquetSource`. `table_to_dataframe`
returns a tidegate table as a DataFrame. Names are imported on first use, because a task actor that only reads staged
files should not spend a second on importing RayDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.connectors.staged_parquet import ParquetReader, ParquetSource, StagedFile
    from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of, spark_schema_of
    from tidegate.spark_bridge.dataframes.staging import DataFrameSource, stage_dataframe
    from tidegate.spark_bridge.dataframes.tables import files_to_dataframe, table_to_dataframe
    from tidegate.spark_bridge.errors import QueryFailedError, SparkBridgeError, SparkLostError, SparkTimeoutError
    from tidegate.spark_bridge.java import ensure_java
    from tidegate.spark_bridge.program_session import spark_session
    from tidegate.spark_bridge.ray_on_spark import RayOnSparkSession
    from tidegate.spark_bridge.session import RayDPSession
    from tidegate.spark_bridge.streams.stream_feed import StreamingDataFrameSource, StreamSettings
else:
    from tidegate.lazy_names import lazy_names

    _HOME_OF = {
        "DataFrameSource": "dataframes.staging",
        "ParquetReader": "tidegate.connectors.staged_parquet",
        "ParquetSource": "tidegate.connectors.staged_parquet",
        "QueryFailedError": "errors",
        "RayDPSession": "session",
        "RayOnSparkSession": "ray_on_spark",
        "SparkBridgeError": "errors",
        "SparkLostError": "errors",
        "SparkTimeoutError": "errors",
        "StagedFile": "tidegate.connectors.staged_parquet",
        "StreamSettings": "streams.stream_feed",
        "StreamingDataFrameSource": "streams.stream_feed",
        "arrow_schema_of": "dataframes.spark_types",
        "ensure_java": "java",
        "files_to_dataframe": "dataframes.tables",
        "spark_schema_of": "dataframes.spark_types",
        "spark_session": "program_session",
        "stage_dataframe": "dataframes.staging",
        "table_to_dataframe": "dataframes.tables",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOME_OF)

__all__ = [
    "DataFrameSource",
    "ParquetReader",
    "ParquetSource",
    "QueryFailedError",
    "RayDPSession",
    "RayOnSparkSession",
    "SparkBridgeError",
    "SparkLostError",
    "SparkTimeoutError",
    "StagedFile",
    "StreamSettings",
    "StreamingDataFrameSource",
    "arrow_schema_of",
    "ensure_java",
    "files_to_dataframe",
    "spark_schema_of",
    "spark_session",
    "stage_dataframe",
    "table_to_dataframe",
]
