"""Where the log of a streaming DataFrame can be. What needs a whole job is tested with one (`tests/api`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from tidegate.spark_bridge.streams.stream_feed import StreamingDataFrameSource, StreamSettings
from tidegate.storage.errors import ConfigurationError


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("memory://log", "executors are other processes and do not see this one's memory"),
        ("sharedmemory://log", "Spark's own checkpoint cannot be stored with the log"),
    ],
)
def test_a_log_that_spark_cannot_reach_is_refused(url: str, problem: str) -> None:
    """With the reason that is true: a file system is not in memory because its name says something like it."""
    session = SimpleNamespace(sparkContext=SimpleNamespace(master="yarn"))
    stream: Any = SimpleNamespace(schema=StructType([StructField("x", LongType())]), sparkSession=session)
    source = StreamingDataFrameSource(stream, 1, StreamSettings())
    with pytest.raises(ConfigurationError, match=problem):
        source.stage(url)
