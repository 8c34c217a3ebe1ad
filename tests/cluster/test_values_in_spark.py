"""Values and names at which Spark and Arrow differ, from DataFrames into streams and from tables into Spark."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, config
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tidegate as tg
from tidegate.spark_bridge import RayDPSession, stage_dataframe

pytestmark = pytest.mark.slow


def rows_of(df: DataFrame, folder: Path) -> list[tuple[Any, ...]]:
    """The rows of a DataFrame as a stream has them, once they are staged; maps as dicts, structs as tuples."""
    source = stage_dataframe(df, str(folder))
    reader, found = source.reader(), []
    for split in source.splits():
        batch = reader.read(split, 0, 1_000).batch
        assert batch is not None
        found += [tuple(_plain(value) for value in row.values()) for row in batch.to_pylist()]
    return sorted(found, key=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return [(name, _plain(each)) for name, each in value.items()]
    return value


def spark_rows(df: DataFrame) -> list[tuple[Any, ...]]:
    """The rows as Spark has them, in the same form."""

    def plain(value: Any) -> Any:
        if hasattr(value, "asDict"):
            return [(name, plain(each)) for name, each in value.asDict().items()]
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, dict):
            return [[plain(key), plain(each)] for key, each in value.items()]
        return value

    return sorted((tuple(plain(value) for value in row) for row in df.collect()), key=repr)


@pytest.mark.parametrize(
    "expression",
    [
        "if(id = 1, null, named_struct('a', id))",
        "if(id = 1, null, named_struct('a', named_struct('b', id)))",
        "array(if(id = 1, null, named_struct('a', id)))",
        "map('k', named_struct('a', id))",
        "map(named_struct('a', id), 'v')",
        "map('k', array(named_struct('a', id)))",
        "map('k', 1)",
        "if(id = 1, null, map('k', if(id = 2, null, named_struct('a', id))))",
    ],
)
def test_nested_values_are_those_of_spark(raydp_session: RayDPSession, tmp_path: Path, expression: str) -> None:
    """Structs that may be null in all places, though Spark promises values in their fields; maps without nulls."""
    df = raydp_session.spark.range(3).selectExpr("id", f"{expression} AS x")
    with tg.StreamEnvironment.local(1) as env:
        assert env.from_dataframe(df, stage=True).schema is not None  # No type is refused.
    assert rows_of(df, tmp_path / "staged") == spark_rows(df)


def test_structs_of_a_left_join_are_null(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """The commonest way to such a struct; the stream has it to the end."""
    spark = raydp_session.spark
    df = spark.range(3).join(spark.range(2).select("id", F.struct("id").alias("st")), "id", "left")
    with tg.StreamEnvironment.local(1) as env:
        rows = env.from_dataframe(df).collect()
        assert env.execute("join", checkpoints=config(tmp_path), restart=NO_RESTART).wait("4min") == "finished"
    found = sorted(rows.to_arrow().to_pylist(), key=lambda row: row["id"])
    assert found == [{"id": n, "st": {"id": n} if n < 2 else None} for n in range(3)]


def test_columns_may_have_any_names(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Dots, backticks, and names that differ in case only; what is written to a table is read again as it was."""
    names = ["a.b", "a`b", "id", "ID", "row", "latest", "c0"]
    df = raydp_session.spark.range(2).selectExpr(*(f"id + {n} AS x{n}" for n in range(len(names)))).toDF(*names)
    assert rows_of(df, tmp_path / "staged") == [tuple(range(n, n + 7)) for n in range(2)]
    with tg.StreamEnvironment.local(1) as env:
        stream = env.from_dataframe(df, stage=True)
        plain = stream.to_table(tmp_path / "plain", uid="plain")
        newest = stream.to_table(
            tmp_path / "newest", mode="upsert", keys=["latest", "a.b"], order_by="a`b", uid="upsert"
        )
        assert env.execute("names", checkpoints=config(tmp_path / "ck"), restart=NO_RESTART).wait("4min") == "finished"
    for table in (plain, newest):
        read = table.read(raydp_session.spark)
        assert read.columns == names
        assert sorted(map(tuple, read.collect())) == [tuple(range(n, n + 7)) for n in range(2)]


OLD = pa.table(
    {
        "day": [dt.date(1, 1, 1), dt.date(1500, 2, 3), dt.date(1582, 10, 10)],
        "at": pa.array([dt.datetime(1000, 1, 1), dt.datetime(1850, 1, 1), None], pa.timestamp("us", "UTC")),
        "wall": pa.array([dt.datetime(1, 1, 1), dt.datetime(1582, 10, 10), None], pa.timestamp("us")),
    }
)
OLD_TEXTS = [
    ("0001-01-01", "1000-01-01 00:00:00", "0001-01-01 00:00:00"),
    ("1500-02-03", "1850-01-01 00:00:00", "1582-10-10 00:00:00"),
    ("1582-10-10", None, None),
]


def texts(df: DataFrame) -> list[tuple[str | None, ...]]:
    """All values as texts that Spark makes: Python's own dates do not tell calendars apart."""
    return sorted(tuple(row) for row in df.selectExpr(*(f"cast({c} AS string)" for c in OLD.column_names)).collect())


@pytest.mark.parametrize("mode", ["EXCEPTION", "LEGACY", "CORRECTED"])
def test_old_dates_are_read_as_they_are(raydp_session: RayDPSession, tmp_path: Path, mode: str) -> None:
    """Whatever the session says of files of others: by `read`, and by Spark itself, which sees it in the footers."""
    spark = raydp_session.spark
    with tg.StreamEnvironment.local(1) as env:
        table = env.from_batches(OLD).to_table(tmp_path / "out")
        assert env.execute("old", checkpoints=config(tmp_path / "ck"), restart=NO_RESTART).wait("4min") == "finished"
    settings = {"spark.sql.parquet.datetimeRebaseModeInRead": mode, "spark.sql.session.timeZone": "UTC"}
    before = {key: spark.conf.get(key) for key in settings}
    try:
        for key, value in settings.items():
            spark.conf.set(key, value)
        assert texts(table.read(spark)) == OLD_TEXTS
        assert texts(spark.read.parquet(*table.files())) == OLD_TEXTS
    finally:
        for key, old in before.items():
            spark.conf.set(key, str(old))


def test_a_session_is_active_where_a_function_is_called(raydp_session: RayDPSession) -> None:
    """So its settings hold in expressions that the function of `for_each_checkpoint` makes, as in `foreachBatch`."""
    from tidegate.spark_bridge.spark_calls import run_spark_action

    spark = raydp_session.spark.newSession()
    spark.conf.set("spark.sql.ansi.enabled", "true")

    def look() -> tuple[bool, str]:
        active = SparkSession.getActiveSession()
        try:
            spark.createDataFrame([("x",)], "s string").select(F.col("s").cast("int")).collect()
        except Exception as error:  # noqa: BLE001 (whatever Spark raises)
            return active is not None, str(error)
        return active is not None, "null"

    is_active, found = run_spark_action(spark, look, timeout_s=240.0, what="a look")
    assert is_active
    assert "CAST_INVALID_INPUT" in found
