"""Expressions and queries of SQL give the values, and the kinds of values, that Spark gives for the same rows."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import spark_json
from spark_expressions import ROWS, expressions

import tidegate as tg
from tidegate.spark_bridge import RayDPSession


def _selected() -> list[str]:
    return [f"{expression} AS c{number}" for number, expression in enumerate(expressions())]


def _plain(value: Any) -> Any:
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


def _same(one: Any, other: Any) -> bool:
    one, other = _plain(one), _plain(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12) or (math.isnan(one) and math.isnan(other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


@pytest.mark.slow
def test_expressions_are_those_of_spark(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """All of them in one query on either side; a value of Spark that tidegate has not is named with its expression."""
    with tg.StreamEnvironment.local(1) as env:
        env.create_temporary_view("rows", env.from_batches(ROWS, splits=1))
        rows = env.sql(f"SELECT {', '.join(_selected())} FROM rows").collect()
        assert env.execute("expressions").wait("4min") == "finished"
    found = rows.to_arrow()

    moments = ROWS.column("ts").cast(pa.timestamp("us", "UTC"))
    pq.write_table(ROWS.set_column(ROWS.schema.get_field_index("ts"), "ts", moments), tmp_path / "rows.parquet")
    spark = raydp_session.spark
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        read = spark.read.parquet(str(tmp_path / "rows.parquet")).coalesce(1)
        read.selectExpr(*_selected()).write.parquet(str(tmp_path / "of_spark"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    of_spark = pq.read_table(tmp_path / "of_spark", coerce_int96_timestamp_unit="us")

    assert (found.num_rows, found.num_columns) == (of_spark.num_rows, of_spark.num_columns)
    wrong = {
        expression: (mine, theirs)
        for number, expression in enumerate(expressions())
        for mine, theirs in [[each.column(f"c{number}").to_pylist() for each in (found, of_spark)]]
        if not all(map(_same, mine, theirs))
    }
    assert wrong == {}


def _result(table: pa.Table, name: str, query: str) -> pa.Table:
    with tg.StreamEnvironment.local(1) as env:
        env.create_temporary_view(name, env.from_batches(table, splits=1))
        rows = env.sql(query).collect()
        assert env.execute(name).wait("4min") == "finished"
    return rows.to_arrow()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "name", "expressions"),
    [
        (spark_json.ROWS, "texts", spark_json.expressions()),
        (spark_json.LINES, "lines", [f"split(line, '{pattern}')" for pattern in spark_json.PATTERNS]),
    ],
    ids=["json", "split"],
)
def test_json_and_lists_are_those_of_spark(
    raydp_session: RayDPSession, tmp_path: Path, table: pa.Table, name: str, expressions: list[str]
) -> None:
    """Every path and schema over every text: nulls, quotes, numbers, wildcards, and texts that are no JSON."""
    selected = [f"{expression} AS c{number}" for number, expression in enumerate(expressions)]
    found = _result(table, name, f"SELECT {', '.join(selected)} FROM {name}")
    pq.write_table(table, tmp_path / "rows.parquet")
    read = raydp_session.spark.read.parquet(str(tmp_path / "rows.parquet")).coalesce(1)
    read.selectExpr(*selected).write.parquet(str(tmp_path / "of_spark"))
    of_spark = pq.read_table(tmp_path / "of_spark")
    assert (found.num_rows, found.num_columns) == (of_spark.num_rows, of_spark.num_columns)
    wrong = [
        (expression, row, mine, theirs)
        for expression, *columns in zip(expressions, found.columns, of_spark.columns, strict=True)
        for row, mine, theirs in zip(
            table.column(1).to_pylist(), *(column.to_pylist() for column in columns), strict=True
        )
        if not _same(mine, theirs)
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("query", spark_json.QUERIES)
def test_rows_of_lists_are_those_of_spark(raydp_session: RayDPSession, tmp_path: Path, query: str) -> None:
    """LATERAL VIEW, LATERAL and explode in SELECT, with empty lists and lists that are null."""
    mine = [tuple(row.values()) for row in _result(spark_json.LINES, "lines", query).to_pylist()]
    pq.write_table(spark_json.LINES, tmp_path / "lines.parquet")
    spark = raydp_session.spark
    spark.read.parquet(str(tmp_path / "lines.parquet")).createOrReplaceTempView("lines")
    try:
        theirs = [tuple(row) for row in spark.sql(query).collect()]
    finally:
        spark.catalog.dropTempView("lines")
    assert sorted(mine, key=repr) == sorted(theirs, key=repr)
