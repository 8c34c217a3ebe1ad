"""Which Parquet files Arrow reads as Spark does, by what their footers say."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidegate.spark_bridge.dataframes.files_in_place import why_only_spark

UTC = pa.timestamp("us", "UTC")
SPARK = {"org.apache.spark.version": "3.5.7"}
NOON, ANCIENT = dt.datetime(2013, 1, 1, 12, tzinfo=dt.UTC), dt.datetime(1500, 1, 1, tzinfo=dt.UTC)


def reason(
    folder: Path,
    values: pa.Array,
    wanted: pa.DataType,
    keys: dict[str, str] | None = None,
    name: str = "x",
    **options: Any,
) -> str | None:
    """Of a file with one column, which the DataFrame calls "x"."""
    path = str(folder / "file.parquet")
    table = pa.table({name: values})
    with pq.ParquetWriter(path, table.schema, store_schema=False, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(keys or {})
    return why_only_spark(pq.ParquetFile(path), pa.schema([("x", wanted)]))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([1], pa.int8()), pa.int8()),
        (pa.array([1], pa.int32()), pa.int32()),
        (pa.array([1], pa.int64()), pa.int64()),
        (pa.array([1.5], pa.float32()), pa.float32()),
        (pa.array([True]), pa.bool_()),
        (pa.array(["a"]), pa.string()),
        (pa.array([b"a"]), pa.binary()),
        (pa.array([dt.date(2013, 1, 1)]), pa.date32()),
        (pa.array([NOON], UTC), UTC),
        (pa.array([None], UTC), UTC),
        (pa.array([NOON], pa.timestamp("us")), pa.timestamp("us")),
        (pa.array([1], pa.decimal128(9, 2)), pa.decimal128(9, 2)),
    ],
    ids=str,
)
def test_plain_columns_of_any_writer_are_read_in_place(tmp_path: Path, values: pa.Array, wanted: pa.DataType) -> None:
    """If they are stored as what the DataFrame says."""
    assert reason(tmp_path, values, wanted) is None


@pytest.mark.parametrize(
    ("values", "wanted", "found"),
    [
        (pa.array([1], pa.int32()), pa.int64(), "stores x in another way than as int64"),
        (pa.array([1], pa.uint32()), pa.int64(), "stores x in another way than as int64"),
        (pa.array([1], pa.int8()), pa.int16(), "stores x in another way than as int16"),
        (pa.array([1], pa.uint8()), pa.int8(), "stores x in another way than as int8"),
        (pa.array([b"a"]), pa.string(), "stores x in another way than as string"),
        (pa.array([NOON], pa.timestamp("ns", "UTC")), UTC, "stores x in another way"),
        (pa.array([NOON], pa.timestamp("us")), UTC, "stores x in another way"),
        (pa.array([1], pa.decimal128(9, 2)), pa.decimal128(9, 3), "stores x in another way"),
        (pa.array([dt.date(1500, 1, 1)]), pa.date32(), "may have values of x in an older calendar"),
        (pa.array([ANCIENT], UTC), UTC, "may have values of x in an older calendar"),
        (pa.array([[1]]), pa.list_(pa.int64()), "which only Spark surely reads alike"),
    ],
    ids=str,
)
def test_what_spark_may_read_otherwise_is_left_to_it(
    tmp_path: Path, values: pa.Array, wanted: pa.DataType, found: str
) -> None:
    """Other types, old calendars, and nested columns of other writers."""
    assert found in str(reason(tmp_path, values, wanted))


def test_the_writer_of_a_file_decides_its_calendar(tmp_path: Path) -> None:
    """Spark of today says in its files which calendar they have; of timestamps in 96 bits nobody else does."""
    ancient, lists = pa.array([ANCIENT], UTC), pa.array([[1]])
    old = {"org.apache.spark.version": "3.0.1"}
    julian = SPARK | {"org.apache.spark.legacyDateTime": ""}
    assert reason(tmp_path, ancient, UTC, SPARK) is None
    assert reason(tmp_path, lists, pa.list_(pa.int64()), SPARK) is None
    assert "older calendar" in str(reason(tmp_path, ancient, UTC, old))
    assert "older calendar" in str(reason(tmp_path, ancient, UTC, julian))
    noon = pa.array([NOON], UTC)
    assert reason(tmp_path, noon, UTC, SPARK, use_deprecated_int96_timestamps=True) is None
    assert "older calendar" in str(reason(tmp_path, noon, UTC, use_deprecated_int96_timestamps=True))


def test_a_column_that_is_missing_is_null_and_one_of_another_spelling_is_for_spark(tmp_path: Path) -> None:
    """Spark takes "X" for "x"."""
    assert reason(tmp_path, pa.array([1]), pa.int64(), name="y") is None
    assert reason(tmp_path, pa.array([1]), pa.int64(), name="X") == "has x as X"
