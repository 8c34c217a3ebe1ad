"""Operators around polars expressions: results of polars, schemas of Arrow."""

from __future__ import annotations

import datetime as dt

import cloudpickle
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import opened, run

from tidegate.operators.functions.expressions import FilterExpr, Select, WithColumns
from tidegate.operators.operator import Operator
from tidegate.protocol.failures import OperatorError
from tidegate.storage.errors import ConfigurationError

_BATCH = pa.record_batch(
    {
        "x": pa.array([1, None, 3], pa.int32()),
        "s": ["a", None, "c"],
        "t": pa.array([dt.datetime(2020, 1, 1)] * 3, pa.timestamp("s")),
        "d": pa.array(["u", "v", "u"]).dictionary_encode(),
    }
)


@settings(max_examples=50)
@given(st.lists(st.none() | st.integers(-5, 5), max_size=20), st.integers(0, 20))
def test_filter_equals_polars(values: list[int | None], start: int) -> None:
    """The same rows as polars' own filter; null is not true; slices are honoured."""
    batch = pa.record_batch({"x": pa.array(values, pa.int64()), "row": range(len(values))}).slice(start)
    emitted = run(opened(FilterExpr(pl.col("x") > 0)), [batch])
    expected = [row for row in batch.to_pylist() if row["x"] is not None and row["x"] > 0]
    assert [row for out in emitted for row in out.to_pylist()] == expected


def test_filter_leaves_the_schema_alone() -> None:
    """Filtered rows have the very types that came in, also those that polars does not have."""
    (out,) = run(opened(FilterExpr(pl.col("d") == "u")), [_BATCH])
    assert out.equals(_BATCH.take(pa.array([0, 2])))


def test_with_columns_adds_and_replaces() -> None:
    """New columns come last, replaced ones stay in place, others pass untouched; text is plain string."""
    operator = opened(WithColumns((pl.col("x") * 2).cast(pl.Int64), pl.col("s").str.to_uppercase().alias("upper")))
    (out,) = run(operator, [_BATCH])
    assert out.schema.names == ["x", "s", "t", "d", "upper"]
    assert out.schema.types == [pa.int64(), pa.string(), pa.timestamp("s"), _BATCH.schema.field("d").type, pa.string()]
    assert out.select(["x", "upper"]).to_pydict() == {"x": [2, None, 6], "upper": ["A", None, "C"]}
    assert out.select(["s", "t", "d"]).equals(_BATCH.select(["s", "t", "d"]))


def test_select_computes_and_keeps_types() -> None:
    """Names and expressions; a column that passes through keeps its type; a literal fills every row."""
    operator = opened(Select("s", pl.col("t"), pl.col("d"), pl.col("x").alias("y"), pl.lit("z").alias("z")))
    (out,) = run(operator, [_BATCH])
    assert out.schema.names == ["s", "t", "d", "y", "z"]
    assert out.schema.field("t").type == pa.timestamp("s")
    assert out.schema.field("d").type == _BATCH.schema.field("d").type
    assert out.schema.field("z").type == pa.string()
    assert out.column("y").to_pylist() == [1, None, 3]
    assert out.column("z").to_pylist() == ["z"] * 3


def test_select_may_swap_names() -> None:
    """All expressions see the input."""
    batch = pa.record_batch({"a": [1], "b": [2]})
    (out,) = run(opened(Select(pl.col("b").alias("a"), pl.col("a").alias("b"))), [batch])
    assert out.to_pydict() == {"a": [2], "b": [1]}


@pytest.mark.parametrize(
    "operator",
    [Select(pl.col("t"), pl.col("s").str.to_uppercase()), WithColumns(pl.col("s") + "!"), FilterExpr(pl.lit(True))],
)
def test_schema_does_not_depend_on_the_batch(operator: Operator) -> None:
    """All-null batches and others come out with one schema."""
    nulls = pa.RecordBatch.from_pylist([{}], _BATCH.schema)
    first, second = run(opened(operator), [_BATCH, nulls])
    assert first.schema.equals(second.schema)


@pytest.mark.parametrize(
    "operator",
    [FilterExpr(pl.col("x").is_in([1, 3])), WithColumns(pl.col("x").alias("y")), Select(pl.col("x") + 1)],
)
def test_expressions_travel(operator: Operator) -> None:
    """Expressions survive cloudpickle, as factories are shipped."""
    copy = cloudpickle.loads(cloudpickle.dumps(operator))
    assert run(opened(copy), [_BATCH]) == run(opened(operator), [_BATCH])


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        (FilterExpr(pl.col("missing") > 1), "missing"),
        (FilterExpr(pl.col("x") + 1), "boolean"),
        (FilterExpr(pl.col("x", "s").is_null()), "one boolean column"),
        (WithColumns(pl.col("missing")), "missing"),
        (Select(pl.col("s").cast(pl.Int64)), "first row of the batch"),
    ],
)
def test_wrong_expressions_are_blamed(operator: Operator, said: str) -> None:
    """An expression that does not fit is the operator's error, with the first row."""
    with pytest.raises(OperatorError, match=said):
        run(opened(operator), [_BATCH])


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (
            pa.array([2**62], pa.int64()).view(pa.timestamp("ms")),
            "<timestamp[ms]: 4611686018427387904, which Python cannot represent",
        ),
        (
            pa.array([2**31 - 1], pa.int32()).view(pa.date32()),
            "<date32[day]: 2147483647, which Python cannot represent",
        ),
        (pa.array([b"\xff"]).view(pa.string()), "<string: no value, which Python cannot represent"),
        (pa.array([[2**62]], pa.list_(pa.int64())).cast(pa.list_(pa.timestamp("us"))), "<list<item: timestamp[us]>: "),
    ],
)
def test_the_error_is_told_where_python_has_no_such_row(column: pa.Array, shown: str) -> None:
    """To show the row must not hide what was wrong."""
    with pytest.raises(OperatorError, match="missing") as raised:
        run(opened(WithColumns(pl.col("missing"))), [pa.record_batch({"x": [1], "y": column})])
    assert f"{{'x': 1, 'y': '{shown}" in str(raised.value)


def test_arguments_must_be_expressions() -> None:
    """What is no expression is refused when the operator is made."""
    with pytest.raises(ConfigurationError, match="not str"):
        FilterExpr("x > 1")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at least one"):
        Select()
    with pytest.raises(ConfigurationError, match="not int"):
        WithColumns(5)  # type: ignore[arg-type]
