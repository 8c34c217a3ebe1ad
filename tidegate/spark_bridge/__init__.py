"""Spark beside Ray: sessions, DataFrames as replayable sources, and tables as DataFrames.

`RayDPSession` starts Ray and Spark, and reserves executors and task slots together. `RayOnSparkSession` starts Ray in
the executors of a Spark that exists. `stage_dataframe` turns a DataFrame into a `ParquetSource`. `table_to_dataframe`
shows a tidegate table. Names are imported on first use, because a task actor that only reads staged files should not
spend a second on importing RayDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.spark_bridge.dataframes.dataframe_source import DataFrameSource
    from tidegate.spark_bridge.dataframes.manifest import StagedFile
    from tidegate.spark_bridge.dataframes.parquet_source import ParquetReader, ParquetSource
    from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of, spark_schema_of
    from tidegate.spark_bridge.dataframes.staging import stage_dataframe
    from tidegate.spark_bridge.dataframes.tables import files_to_dataframe, table_to_dataframe
    from tidegate.spark_bridge.errors import QueryFailedError, SparkBridgeError, SparkLostError, SparkTimeoutError
    from tidegate.spark_bridge.ray_in_spark.ray_session import RayOnSparkSession
    from tidegate.spark_bridge.session.java import ensure_java
    from tidegate.spark_bridge.session.made_session import spark_session
    from tidegate.spark_bridge.session.session import RayDPSession
    from tidegate.spark_bridge.streams.stream_feed import StreamSettings
    from tidegate.spark_bridge.streams.streaming_source import StreamingDataFrameSource
else:
    from tidegate.lazy_names import lazy_names

    _HOME_OF = {
        "DataFrameSource": "dataframes.dataframe_source",
        "ParquetReader": "dataframes.parquet_source",
        "ParquetSource": "dataframes.parquet_source",
        "QueryFailedError": "errors",
        "RayDPSession": "session.session",
        "RayOnSparkSession": "ray_in_spark.ray_session",
        "SparkBridgeError": "errors",
        "SparkLostError": "errors",
        "SparkTimeoutError": "errors",
        "StagedFile": "dataframes.manifest",
        "StreamSettings": "streams.stream_feed",
        "StreamingDataFrameSource": "streams.streaming_source",
        "arrow_schema_of": "dataframes.spark_types",
        "ensure_java": "session.java",
        "files_to_dataframe": "dataframes.tables",
        "spark_schema_of": "dataframes.spark_types",
        "spark_session": "session.made_session",
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
