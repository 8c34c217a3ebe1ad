"""Expressions of SQL have the values, and the kinds of values, that Spark gives for the same rows."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from spark_expressions import ROWS, expressions

import tidegate as tg
from tidegate.spark_bridge import RayDPSession


def _selected() -> list[str]:
    return [f"{expression} AS c{number}" for number, expression in enumerate(expressions())]


def _plain(value: Any) -> Any:
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


def _same(one: Any, other: Any) -> bool:
    one, other = _plain(one), _plain(other)
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
