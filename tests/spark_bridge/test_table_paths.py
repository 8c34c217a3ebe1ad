"""Which files of a table are given to Spark's own reader, which takes some paths for patterns. Needs no Spark."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.spark_bridge.dataframes.tables import _spark_can_read

_SCHEMA = pa.schema([("x", pa.int64())])


@pytest.mark.parametrize("name", ["out[1]", "out*", "o?t", "{a,b}", "a\\b"])
@pytest.mark.parametrize(
    "where", ["file:///tables/{}/data/job-1/000000/out-0-000000.parquet", "file:///t/data/{}.parquet"]
)
def test_a_path_that_is_a_pattern_is_not_given_to_spark(where: str, name: str) -> None:
    """Not in the folder of the table, and not in the name of a file, which begins with the uid of a sink."""
    plain = "file:///tables/out/data/job-1/000000/out-0-000000.parquet"

    assert _spark_can_read([plain], _SCHEMA)
    assert not _spark_can_read([plain, where.replace("{}", name)], _SCHEMA)
