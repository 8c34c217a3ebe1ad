"""Types of Spark in Arrow, without Spark: with every version of PySpark that the tests run with."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import types as T

from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of


def test_timestamps_are_in_utc_wherever_they_stand() -> None:
    """Those with a zone; also in lists and structs, whatever this PySpark asks for the zone."""
    inner = T.StructType([T.StructField("at", T.TimestampType())])
    columns = {"at": T.TimestampType(), "wall": T.TimestampNTZType(), "list": T.ArrayType(inner)}
    found = arrow_schema_of(T.StructType([T.StructField(name, kind) for name, kind in columns.items()]))
    utc = pa.timestamp("us", "UTC")
    assert found.field("at").type == utc
    assert found.field("wall").type == pa.timestamp("us")
    assert found.field("list").type.value_type.field("at").type == utc
