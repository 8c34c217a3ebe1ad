"""DataFrames staged by Spark's executors: exact rows, only of successful tasks, in bounded time."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
import waiting
from pyspark import TaskContext, cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from tidegate.spark_bridge import (
    ParquetSource,
    RayDPSession,
    SparkBridgeError,
    SparkTimeoutError,
    stage_dataframe,
)
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError
from tidegate.storage.files.file_system_store import open_store

Batches = Iterable[pa.RecordBatch]

# Executors cannot import the modules of the tests: Spark sends them by value.
cloudpickle.register_pickle_by_value(waiting)  # type: ignore[no-untyped-call]

TYPED = T.StructType(
    [
        T.StructField("id", T.LongType(), nullable=False),
        T.StructField("flag", T.BooleanType()),
        T.StructField("b", T.ByteType()),
        T.StructField("s", T.ShortType()),
        T.StructField("i", T.IntegerType()),
        T.StructField("f", T.FloatType()),
        T.StructField("d", T.DoubleType()),
        T.StructField("amount", T.DecimalType(20, 3)),
        T.StructField("text", T.StringType()),
        T.StructField("raw", T.BinaryType()),
        T.StructField("day", T.DateType()),
        T.StructField("at", T.TimestampType()),
        T.StructField("wall", T.TimestampNTZType()),
        T.StructField("took", T.DayTimeIntervalType()),
        T.StructField("tags", T.ArrayType(T.StringType())),
        T.StructField("times", T.ArrayType(T.TimestampType())),
        T.StructField("counts", T.MapType(T.StringType(), T.IntegerType())),
        T.StructField("point", T.StructType([T.StructField("x", T.IntegerType())])),
    ]
)
WALL = dt.datetime(2013, 7, 1, 12, 30, 0, 123456)
AT = dt.datetime(1890, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
FULL_ROW = (
    1,
    True,
    -128,
    32767,
    -(2**31),
    1.5,
    float("inf"),
    Decimal("12345678901234567.891"),
    "Zoë ☃",
    bytearray(b"\x00\xff"),
    dt.date(1582, 10, 15),
    AT,
    WALL,
    dt.timedelta(days=-1, microseconds=7),
    ["a", None],
    [AT, None],
    {"k": None, "l": 2},
    (3,),
)


def rows_of(source: ParquetSource, rows_max: int = 1000) -> list[dict[str, object]]:
    """All rows of a source, split by split."""
    rows: list[dict[str, object]] = []
    reader = source.reader()
    for split in source.splits():
        offset, at_end = 0, False
        while not at_end:
            result = reader.read(split, offset, rows_max)
            if result.batch is not None:
                rows.extend(result.batch.to_pylist())
            offset, at_end = result.next_offset, result.at_end
    reader.close()
    return rows


def stored_files(folder: Path) -> set[str]:
    """Parquet files that lie in the folder, referred to or not."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*.parquet")}


def failure_after_a_file(folder: str, reason: str) -> Callable[[], None]:
    """A function for a Spark task: waits until a file of its partition lies in the folder, then fails.

    Nested, so that Spark sends it by value.
    """

    def fail() -> None:
        task = TaskContext.get()
        assert task is not None
        written = f"data-*/part-{task.partitionId():06d}-*.parquet"
        waiting.until("a file of the partition", lambda: list(Path(folder).glob(written)))
        raise RuntimeError(reason)

    return fail


def test_every_spark_type_keeps_its_values_and_nulls(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Values of each type come back as they are, timestamps in UTC, nulls as nulls."""
    nulls = (2, *([None] * (len(TYPED.fields) - 1)))
    df = raydp_session.spark.createDataFrame([FULL_ROW, nulls], TYPED).coalesce(1)
    source = stage_dataframe(df, str(tmp_path))
    full, empty = rows_of(source)
    expected = dict(zip(TYPED.names, FULL_ROW, strict=True))
    expected |= {"raw": b"\x00\xff", "point": {"x": 3}}
    # A map has no order.
    assert isinstance(full["counts"], list)
    assert full | {"counts": dict(full["counts"])} == expected
    assert empty == {"id": 2} | dict.fromkeys(TYPED.names[1:])
    assert source.schema.field("at").type == pa.timestamp("us", "UTC")
    assert source.schema.field("wall").type == pa.timestamp("us")
    assert not source.schema.field("id").nullable


def test_partitions_become_files_and_the_source_opens_again(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Row order within partitions, group and file limits hold;

    The url alone is enough to open it elsewhere.
    """
    df = raydp_session.spark.range(0, 50_000, 1, 3).selectExpr("id", "id % 7 AS k")
    source = stage_dataframe(df, f"file://{tmp_path}", rows_per_group=4096, files_max_rows=8192)
    assert [row["id"] for row in rows_of(source)] == list(range(50_000))
    assert [file.rows for file in source.files[:3]] == [8192, 8192, 50_000 // 3 - 2 * 8192]
    assert stored_files(tmp_path) == {file.path for file in source.files}
    assert ParquetSource.open(source.url) == source


def test_an_empty_dataframe_is_a_source_without_splits(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """It has its schema and no rows, and opens again."""
    source = stage_dataframe(raydp_session.spark.range(10).where("id < 0"), str(tmp_path))
    assert source.splits() == ()
    assert source.schema == pa.schema([pa.field("id", pa.int64(), nullable=False)])
    assert ParquetSource.open(str(tmp_path)) == source


def test_only_files_of_successful_attempts_count(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """A task that wrote files and then failed is repeated; its first attempt leaves no rows and no files."""

    def fail_once(batches: Batches) -> Batches:
        task = TaskContext.get()
        assert task is not None
        yield from batches
        if task.partitionId() == 1 and task.attemptNumber() == 0:
            fail_late()

    folder = str(tmp_path)
    fail_late = failure_after_a_file(folder, "lost on purpose")
    df = raydp_session.spark.range(0, 400_000, 1, 2)
    source = stage_dataframe(df.mapInArrow(fail_once, df.schema), folder, files_max_rows=5000)
    assert [row["id"] for row in rows_of(source)] == list(range(400_000))
    assert stored_files(tmp_path) == {file.path for file in source.files}


def test_a_failing_dataframe_is_an_error_and_leaves_nothing(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """The error says what failed, and the folder can be used again."""

    def fail(batches: Batches) -> Batches:
        yield from batches
        fail_late()

    folder = str(tmp_path)
    fail_late = failure_after_a_file(folder, "no luck today")
    df = raydp_session.spark.range(0, 200_000, 1, 1)
    with pytest.raises(SparkBridgeError, match=r"failed in Spark: RuntimeError: no luck today\. Nothing was"):
        stage_dataframe(df.mapInArrow(fail, df.schema), folder, files_max_rows=5000)
    assert stored_files(tmp_path) == set()
    assert stage_dataframe(df, folder).rows == 200_000


def test_staging_that_hangs_ends_in_time_and_frees_the_executors(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """After the timeout the jobs are cancelled, so that the cores they held run other work."""

    def hang(batches: Batches) -> Batches:
        threading.Event().wait()
        yield from batches

    df = raydp_session.spark.range(0, 100, 1, 2)
    with pytest.raises(SparkTimeoutError, match="did not end within 2 s"):
        stage_dataframe(df.mapInArrow(hang, df.schema), str(tmp_path), timeout_s=2)
    assert stage_dataframe(df, str(tmp_path), timeout_s=120).rows == 100


def test_staging_twice_into_a_folder_is_refused(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """What is staged stays as it is."""
    df = raydp_session.spark.range(10)
    first = stage_dataframe(df, str(tmp_path))
    with pytest.raises(AlreadyExistsError, match="holds a staged DataFrame already"):
        stage_dataframe(df, str(tmp_path))
    assert ParquetSource.open(str(tmp_path)) == first


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT 1 AS fine, make_interval(1, 2) AS gap", "'gap' is of type interval"),
        ("SELECT array(make_ym_interval(1, 2)) AS gaps", "'gaps.element' is of type interval year to month"),
        ("SELECT named_struct('inner', NULL) AS outer", "'outer.inner' is of type void"),
        ("SELECT 1 AS a, 2 AS a", "2 columns called 'a'"),
    ],
)
def test_columns_that_cannot_be_held_are_refused_by_name(
    raydp_session: RayDPSession, tmp_path: Path, query: str, message: str
) -> None:
    """The error names the column, before Spark runs anything."""
    with pytest.raises(ConfigurationError, match=message):
        stage_dataframe(raydp_session.spark.sql(query), str(tmp_path))
    assert open_store(str(tmp_path)).list("") == []


def test_staging_to_memory_is_refused(raydp_session: RayDPSession) -> None:
    """Executors write into memory of their own, so nothing would be staged."""
    with pytest.raises(ConfigurationError, match="do not see"):
        stage_dataframe(raydp_session.spark.range(10), "memory://staged")


def test_a_streaming_dataframe_is_refused(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """It has no end."""
    streaming: DataFrame = raydp_session.spark.readStream.format("rate").load()
    with pytest.raises(ConfigurationError, match="streaming"):
        stage_dataframe(streaming, str(tmp_path))
