"""Types of Spark in Arrow, without Spark: with every version of PySpark that the tests run with."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import types as T

from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of, spark_schema_of


def test_timestamps_are_in_utc_wherever_they_stand() -> None:
    """Those with a zone; also in lists and structs, whatever this PySpark asks for the zone."""
    inner = T.StructType([T.StructField("at", T.TimestampType())])
    columns = {"at": T.TimestampType(), "wall": T.TimestampNTZType(), "list": T.ArrayType(inner)}
    found = arrow_schema_of(T.StructType([T.StructField(name, kind) for name, kind in columns.items()]))
    utc = pa.timestamp("us", "UTC")
    assert found.field("at").type == utc
    assert found.field("wall").type == pa.timestamp("us")
    assert found.field("list").type.value_type.field("at").type == utc


def struct_type(*fields: tuple[str, T.DataType], nullable: bool) -> T.StructType:
    """A struct of Spark."""
    return T.StructType([T.StructField(name, kind, nullable) for name, kind in fields])


def test_what_is_in_a_null_struct_may_be_null() -> None:
    """Spark promises values in the fields of a struct; a struct that may be null has none to give."""
    promised = struct_type(("a", struct_type(("b", T.LongType()), nullable=False)), nullable=False)
    schema = T.StructType(
        [
            T.StructField("may_be_null", promised, nullable=True),
            T.StructField("never_null", promised, nullable=False),
            T.StructField("list", T.ArrayType(promised, containsNull=True)),
            T.StructField("map", T.MapType(T.StringType(), promised, valueContainsNull=True)),
            T.StructField("full_map", T.MapType(T.StringType(), promised, valueContainsNull=False)),
        ]
    )
    found = arrow_schema_of(schema)
    for name, kind, nullable in (
        ("may_be_null", found.field("may_be_null").type, True),
        ("never_null", found.field("never_null").type, False),
        ("list", found.field("list").type.value_type, True),
        ("map", found.field("map").type.item_type, True),
        ("full_map", found.field("full_map").type.item_type, False),
    ):
        assert (kind.field("a").nullable, kind.field("a").type.field("b").nullable) == (nullable, nullable), name


def test_what_is_promised_in_a_null_struct_is_not_promised_to_spark() -> None:
    """As a table of Arrow may, which has been written with such a type."""
    inner = pa.struct([pa.field("a", pa.int64(), nullable=False)])
    found = spark_schema_of(pa.schema([pa.field("s", inner), pa.field("t", inner, nullable=False)]))
    assert found["s"].dataType["a"].nullable
    assert not found["t"].dataType["a"].nullable
