"""The lines of the tables "Side by side" of `coming-from.md` for PySpark and Ray Data: both sides are run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import ray.data
from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F
from ray.data import Dataset
from ray.data.aggregate import Max, Sum
from ray.data.expressions import col
from side_by_side import Line, Rows, bag, data, lines, ours

from tidegate.spark_bridge import RayDPSession

pytestmark = pytest.mark.slow
LINES = [line for line in lines() if line.expression is not None and line.engine in ("PySpark", "Ray Data")]
ORDERS, USERS = data()
SCHEMAS = (
    "id long, user string, item string, price long, tip long, tags array<string>, at timestamp",
    "user string, city string, since timestamp",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all expressions of tidegate give, from one job."""
    return ours([str(line.expression) for line in LINES], tmp_path_factory.mktemp("side-by-side"))


def _flat(rows: Rows) -> Rows:
    """Windows of Spark as two columns."""
    found = []
    for row in rows:
        for name in ("window", "session_window"):
            if name in row:
                window = row.pop(name)
                row |= {"window_start": window["start"], "window_end": window["end"]}
        found.append(row)
    return found


def _rows(value: Any) -> Any:
    if isinstance(value, DataFrame):
        return _flat([row.asDict() for row in value.collect()])
    if isinstance(value, Dataset):
        value = value.take_all()
    if isinstance(value, pd.DataFrame):
        value = pa.Table.from_pandas(value, preserve_index=False).to_pylist()
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} is no rows")
    return [_plain(row) if isinstance(row, dict) else row for row in value]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Values of numpy and pandas as those of Python; a number that is missing is null, whatever its type."""
    found = {}
    for name, value in row.items():
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, pd.Timestamp):
            value = value.to_pydatetime()
        if isinstance(value, float):
            value = None if value != value else int(value)
        found[name] = value
    return found


@pytest.fixture(scope="module")
def frames(raydp_session: RayDPSession) -> list[DataFrame]:
    """The orders and the users as DataFrames of Spark, in one partition each."""
    return [
        raydp_session.spark.createDataFrame([tuple(row.values()) for row in rows], schema).coalesce(1)
        for rows, schema in zip((ORDERS, USERS), SCHEMAS, strict=True)
    ]


@pytest.fixture(scope="module")
def few_partitions(raydp_session: RayDPSession) -> Iterator[None]:
    """Ray Data shuffles into two partitions. By default it has 200, with a task for each."""
    context = ray.data.DataContext.get_current()
    before = context.default_hash_shuffle_parallelism
    context.default_hash_shuffle_parallelism = 2
    yield
    context.default_hash_shuffle_parallelism = before


def _of_spark(theirs: str, frames: list[DataFrame]) -> Any:
    names = {"F": F, "pd": pd, "Window": Window, "Row": Row}
    return _rows(eval(theirs, {**names, "orders": frames[0], "users": frames[1]}))


def _of_ray(theirs: str, folder: Path) -> Any:
    orders, users = (ray.data.from_arrow(pa.Table.from_pylist(rows)) for rows in (ORDERS, USERS))
    names = {"pa": pa, "col": col, "Sum": Sum, "Max": Max, "orders": orders, "users": users, "PATH": str(folder / "o")}
    value = eval(theirs, names)
    return _rows(ray.data.read_parquet(names["PATH"]) if value is None else value)


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.engine}: {line.theirs}")
@pytest.mark.usefixtures("few_partitions")
def test_both_sides_give_the_same_rows(
    line: Line, found: dict[str, Any], frames: list[DataFrame], tmp_path: Path
) -> None:
    """The left side on the other engine, and the right one on tidegate."""
    spark = line.engine == "PySpark"
    theirs = _of_spark(line.theirs, frames) if spark else _of_ray(line.theirs, tmp_path)
    assert bag(found[str(line.expression)]) == bag(theirs)
