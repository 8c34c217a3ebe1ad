"""Expressions that look beyond a row are refused; the others give the same whatever way batches are cut."""

from __future__ import annotations

import datetime as dt
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.operators.functions.expressions import FilterExpr, Select, WithColumns, check_row_wise
from tidegate.storage.errors import ConfigurationError

x, y, s, e, t = pl.col("x"), pl.col("y"), pl.col("s"), pl.col("l"), pl.col("t")

ROW_WISE: list[pl.Expr] = [
    x,
    pl.lit(3).alias("three"),
    pl.lit(1) + pl.lit(2),
    (x + 1).alias("z"),
    -x,
    (x * 2 + y) // 3,
    x.is_null() | (y > 2),
    x.cast(pl.Int32),
    x.fill_null(0),
    x.fill_null(y),
    x < float("inf"),
    x.fill_null(float("nan")),
    (x * 1.0).clip(float("-inf"), 1),
    (x * 1.0).is_in([float("nan"), float("inf")]),
    x.is_close(1.0, abs_tol=float("inf")),
    (x * 1.0).replace_strict({1.0: float("inf")}, default=float("nan")),
    pl.when(x == float("inf")).then(pl.lit(float("nan"), dtype=pl.Float32)).otherwise(y),
    pl.coalesce(x, y),
    pl.when(x > 1).then(y).otherwise(pl.lit(None)),
    x.is_in([1, 2]),
    x.is_in(pl.Series([1, 2]).implode()),
    x.is_between(1, y),
    x.clip(1, 2),
    (x / 3).round(2),
    x.replace({1: 5}),
    x.replace_strict({1: 5}, default=0),
    x.replace_strict({1: 5}, default=y),
    x.reinterpret(signed=False),
    x.cast(pl.Date).dt.is_business_day(),
    x.cast(pl.Date).dt.add_business_days(1, roll="forward"),
    pl.business_day_count(x.cast(pl.Date), y.cast(pl.Date)),
    pl.max_horizontal(x, y),
    pl.sum_horizontal(x, y),
    pl.concat_str(x, s, separator="-"),
    pl.format("{}:{}", x, s),
    pl.concat_list(x, y).alias("both"),
    pl.struct(x, y).alias("both"),
    pl.struct(x, y).struct.field("y"),
    pl.struct(x, y).struct.field("*").name.suffix("_again"),
    pl.struct(x, y).struct.with_fields(pl.field("x") + 1).alias("both"),
    x.name.suffix("_q"),
    x.name.map(str.upper),
    pl.all().is_null(),
    pl.col(pl.Int64) + 1,
    pl.col("^[xy]$") * 2,
    pl.all().exclude("x"),
    x.hash(),
    x.repeat_by(2),
    x.map_elements(lambda value: hash(value), return_dtype=pl.Int64),
    x.map_batches(lambda values: values + 1, return_dtype=pl.Int64, is_elementwise=True),
    s.str.len_chars(),
    s.str.to_uppercase(),
    s.str.contains("a"),
    s.str.contains_any(["a", "b"]),
    s.str.split("a"),
    s.str.reverse(),
    s.str.replace("a", y.cast(pl.String).fill_null("-")),
    s.str.replace_all("a", s.str.reverse().fill_null(""), literal=True),
    s.str.replace_all("(a)", "$1$1"),
    s.str.replace_many(["a", "b"], ["b", "a"]),
    pl.struct(x.alias("Sample")).struct.field("Sample"),
    pl.struct(x.alias("IsIn")).name.prefix_fields("Sample").alias("both"),
    pl.concat_list(pl.struct(x.alias("Shuffle"))).list.eval(pl.element().struct.field("Shuffle")).alias("both"),
    s.str.strptime(pl.Date, "%Y", strict=False),
    s.str.to_datetime("%Y-%m-%d", strict=False),
    s.str.json_path_match("$.a"),
    e.list.sum(),
    e.list.sort(),
    e.list.len(),
    e.list.get(0, null_on_oob=True),
    e.list.contains(x),
    e.list.eval(pl.element().rank()),
    e.list.eval(pl.element() + 1).list.max(),
    e.list.agg(pl.element().sum()),
    e.list.filter(pl.element() > 1),
    t.dt.truncate("1h"),
    t.dt.hour(),
    t.dt.replace(hour=x.clip(0, 3)),
    t.dt.offset_by("1d"),
    t.dt.convert_time_zone("Europe/Berlin"),
    pl.datetime(2020, 1, x.fill_null(1).clip(1, 28)),
    pl.int_ranges(0, x.fill_null(0)),
]


def _beyond() -> dict[str, Callable[[], Any]]:
    return {
        "sum": lambda: x.sum(),
        "nested sum": lambda: x.sum() + 1,
        "when over max": lambda: pl.when(x.max() > 1).then(1).otherwise(x),
        "fill with mean": lambda: x.fill_null(x.mean()),
        "cum_sum": lambda: x.cum_sum(),
        "cum_count": lambda: x.cum_count(),
        "over": lambda: x.sum().over("s"),
        "over within": lambda: x - x.first().over("s"),
        "rank": lambda: x.rank(),
        "shift": lambda: x.shift(1),
        "diff": lambda: x.diff(),
        "pct_change": lambda: x.pct_change(),
        "explode": lambda: e.explode(),
        "flatten": lambda: e.list.explode(),
        "mean": lambda: x.mean(),
        "median": lambda: x.median(),
        "std": lambda: x.std(),
        "quantile": lambda: x.quantile(0.5),
        "first": lambda: x.first(),
        "last": lambda: x.last(),
        "get": lambda: x.get(0),
        "gather": lambda: x.gather([0]),
        "head": lambda: x.head(1),
        "slice": lambda: x.slice(0, 1),
        "sort": lambda: x.sort(),
        "sort_by": lambda: x.sort_by(y),
        "arg_sort": lambda: x.arg_sort(),
        "reverse": lambda: x.reverse(),
        "unique": lambda: x.unique(),
        "n_unique": lambda: x.n_unique(),
        "value_counts": lambda: x.value_counts(),
        "implode": lambda: x.implode(),
        "cumulative_eval": lambda: x.cumulative_eval(pl.element().sum()),
        "replace_strict default": lambda: x.replace_strict({1: 5}, default=y.max()),
        "len": lambda: pl.len(),
        "count": lambda: x.count(),
        "null_count": lambda: x.null_count(),
        "any": lambda: (x > 1).any(),
        "all of it": lambda: (x > 1).all(),
        "is_duplicated": lambda: x.is_duplicated(),
        "is_unique": lambda: x.is_unique(),
        "is_first_distinct": lambda: x.is_first_distinct(),
        "interpolate": lambda: x.interpolate(),
        "forward": lambda: x.fill_null(strategy="forward"),
        "backward": lambda: x.backward_fill(),
        "mean strategy": lambda: x.fill_null(strategy="mean"),
        "rolling": lambda: x.rolling_mean(3),
        "rolling_map": lambda: x.rolling_map(sum, 2),
        "rolling_by": lambda: x.rolling_sum_by("t", "1h"),
        "ewm": lambda: x.ewm_mean(alpha=0.5),
        "rle": lambda: x.rle_id(),
        "peak": lambda: x.peak_max(),
        "qcut": lambda: x.qcut(3),
        "drop_nulls": lambda: x.drop_nulls(),
        "filter": lambda: x.filter(x > 1),
        "shuffle": lambda: x.shuffle(),
        "sample": lambda: x.sample(1),
        "sample in lists": lambda: e.list.sample(1),
        "shuffle in lists": lambda: e.list.eval(pl.element().shuffle()),
        "map_batches": lambda: x.map_batches(lambda values: values),
        "fold": lambda: pl.fold(0, lambda a, b: a + b, [x, y]),
        "series": lambda: pl.lit(pl.Series([1, 2])),
        "int_range": lambda: pl.int_range(pl.len()),
        "is_in column": lambda: x.is_in(y),
        "is_in all": lambda: x.is_in(y.implode()),
        "replace by columns": lambda: x.replace(x, y),
        "replace_many by columns": lambda: s.str.replace_many(s.implode(), s.implode()),
        "replace_all with what looks beyond": lambda: s.str.replace_all("a", s.first()),
        "corr": lambda: pl.corr("x", "y"),
        "all columns": lambda: pl.all().sum() + 1,
        "by type": lambda: pl.col(pl.Int64).cum_sum(),
        "struct field": lambda: pl.struct(x).struct.with_fields(pl.field("x").sum()),
        "deep in a struct": lambda: pl.struct(a=pl.concat_list(x, x.max())),
        "in a function": lambda: (x.cum_sum()).map_elements(lambda v: v, return_dtype=pl.Int64),
        "in a list": lambda: pl.concat_list(x.sum(), y).list.eval(pl.element() + 1),
        "text without format": lambda: s.str.to_datetime(),
        "append": lambda: x.append(y),
    }


@pytest.mark.parametrize("make", _beyond().values(), ids=_beyond().keys())
def test_what_looks_beyond_a_row_is_refused(make: Callable[[], pl.Expr]) -> None:
    """When the operator is made, with what to use instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        expression = make()
    with pytest.raises(ConfigurationError, match=r"with_columns\(.*row by row.*aggregate.*map_batches"):
        WithColumns(expression)
    with pytest.raises(ConfigurationError, match=r"select\("):
        Select(expression)
    with pytest.raises(ConfigurationError, match=r"filter\("):
        FilterExpr(expression.is_null())


def test_an_expression_that_is_nested_too_deeply_is_refused_as_such() -> None:
    """Polars does not read it back, so nothing can be said of its parts; the error says what to do."""
    expression = pl.col("x")
    for _ in range(100):
        expression = expression + 1
    with pytest.raises(ConfigurationError, match=r"with_columns\(.*nested too deeply.*columns of their own"):
        WithColumns(expression)


_ROWS = st.fixed_dictionaries(
    {
        "x": st.none() | st.integers(-3, 3),
        "y": st.none() | st.integers(-3, 3),
        "s": st.none() | st.sampled_from(["", "a", "ab", "2020", '{"a": 1}']),
        "l": st.none() | st.lists(st.none() | st.integers(-3, 3), max_size=3),
        "t": st.none() | st.datetimes(dt.datetime(2000, 1, 1), dt.datetime(2030, 1, 1)),
    }
)
_SCHEMA = {"x": pl.Int64, "y": pl.Int64, "s": pl.String, "l": pl.List(pl.Int64), "t": pl.Datetime("us", "UTC")}


@pytest.mark.parametrize("expression", ROW_WISE, ids=str)
def test_what_works_row_by_row_is_taken(expression: pl.Expr) -> None:
    """Nothing that is row-wise is refused."""
    check_row_wise(expression, "select")


@settings(max_examples=30)
@given(rows=st.lists(_ROWS, min_size=1, max_size=12), cuts=st.lists(st.integers(0, 12), max_size=3))
def test_what_is_taken_does_not_depend_on_how_batches_are_cut(rows: list[dict[str, Any]], cuts: list[int]) -> None:
    """Evaluated on a batch, and on its slices one after the other."""
    frame = pl.DataFrame(rows, schema=_SCHEMA)
    bounds = sorted({0, frame.height, *(cut for cut in cuts if cut < frame.height)})
    slices = [frame[start:stop] for start, stop in pairwise(bounds)]
    for expression in ROW_WISE:
        whole = frame.with_columns(expression)
        assert whole.equals(pl.concat([part.with_columns(expression) for part in slices])), str(expression)
