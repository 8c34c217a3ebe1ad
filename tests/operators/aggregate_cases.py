"""Aggregates of every kind over columns of many types, random rows for them, and what they must give."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from aggregate_model import Row, model
from hypothesis import strategies as st
from user_functions import Longest, Product

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.multisets import ValueSet, with_value_sets

SCHEMA = pa.schema(
    {
        "k": pa.int64(),
        "i": pa.int32(),
        "f": pa.float64(),
        "b": pa.bool_(),
        "d": pa.decimal128(38, 3),
        "day": pa.date32(),
        "t": pa.timestamp("us"),
        "u": pa.uint64(),
        "s": pa.dictionary(pa.int8(), pa.int64()),
        "w": pa.bool_(),
        "text": pa.string(),
        "name": pa.dictionary(pa.int8(), pa.large_string()),
        "tags": pa.list_(pa.string()),
    }
)
_FLOATS = st.integers(-9, 9).map(float) | st.sampled_from([math.nan, math.inf, -math.inf, 0.5])
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "i": st.integers(-9, 9),
    "f": _FLOATS,
    "b": st.booleans(),
    "d": st.integers(-(10**37), 10**37).map(lambda n: Decimal(n).scaleb(-3)) | st.just(Decimal("0.001")),
    "day": st.dates(dt.date(2020, 1, 1), dt.date(2020, 1, 9)),
    "t": st.datetimes(dt.datetime(1969, 1, 1), dt.datetime(1971, 1, 1)),
    "u": st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    "s": st.integers(0, 5),
    "w": st.booleans(),
    "text": st.sampled_from(["", "a", "ab", "b", "ä", "z", "\U0001f300", "a" * 30]),
    "name": st.sampled_from(["x", "y"]),
    "tags": st.lists(st.none() | st.sampled_from(["p", "q"]), max_size=2),
}


@st.composite
def rows(draw: st.DrawFn, size_max: int = 8) -> list[dict[str, Any]]:
    """Rows of few keys, with or without nulls."""
    values = {name: st.none() | v for name, v in _VALUES.items()} if draw(st.booleans()) else _VALUES
    return draw(st.lists(st.fixed_dictionaries({"k": st.integers(0, 3), **values}), max_size=size_max))


def batch_of(found: Sequence[Row]) -> pa.RecordBatch:
    """Rows as a batch."""
    return pa.RecordBatch.from_pylist([dict(row) for row in found], SCHEMA)


AGGREGATES: dict[str, Aggregate] = {
    "n": tg.count(),
    "n_w": tg.count().where("w"),
    "n_b": tg.count("b"),
    "sum_i": tg.sum("i").where("w"),
    "sum_b": tg.sum("b"),
    "mean_i": tg.mean("i"),
    "mean_b": tg.mean("b").where("w"),
    "mean_f": tg.mean("f"),
    "min_d": tg.min("d"),
    "max_d": tg.max("d").where("w"),
    "min_b": tg.min("b"),
    "max_u": tg.max("u"),
    "min_s": tg.min("s"),
    "max_t": tg.max("t"),
    "every": tg.bool_and("b").where("w"),
    "some": tg.bool_or("b"),
    "var": tg.var_pop("i"),
    "var_s": tg.var_samp("s").where("w"),
    "std": tg.stddev_pop("i"),
    "std_s": tg.stddev_samp("f"),
    "first_i": tg.first("i"),
    "first_known": tg.first("d", ignore_nulls=True),
    "first_by": tg.first("b", by="t"),
    "last_day": tg.last("day").where("w"),
    "last_by": tg.last("i", by="f"),
    "last_known": tg.last("d", by="day", ignore_nulls=True),
    "least": tg.arg_min("d", by="u"),
    "greatest": tg.arg_max("i", by="f").where("w"),
    "greatest_b": tg.arg_max("s", by="b"),
    "min_text": tg.min("text"),
    "max_text": tg.max("text").where("w"),
    "max_name": tg.max("name"),
    "first_text": tg.first("text"),
    "last_text": tg.last("text", by="i", ignore_nulls=True),
    "last_tags": tg.last("tags").where("w"),
    "tags_of_least": tg.arg_min("tags", by="f"),
    "some_i": tg.collect_list("i", limit=3),
    "some_texts": tg.collect_list("text", limit=2).where("w"),
    "some_tags": tg.collect_list("tags", limit=4),
    "product": tg.udaf(Product(), "i").where("w"),
    "longest": tg.udaf(Longest(), "text", "name"),
    **with_value_sets(
        {
            "texts": tg.count_distinct("text"),
            "floats": tg.count_distinct("f").where("w"),
            "decimals": tg.count_distinct("d"),
            "names": tg.count_distinct("name"),
            "bools": tg.count_distinct("b"),
        },
        SCHEMA,
    ),
}


def expected(found: Sequence[Row], what: Mapping[str, Aggregate] = AGGREGATES) -> list[dict[str, Any]]:
    """One row for each key, in plain Python."""
    groups: dict[Any, list[Row]] = {}
    for row in found:
        groups.setdefault(row["k"], []).append(row)
    return [
        {"k": key, **{name: result_of(aggregate, of_key) for name, aggregate in what.items()}}
        for key, of_key in groups.items()
    ]


def result_of(aggregate: Aggregate, found: list[Row]) -> Any:
    """One result, in plain Python."""
    counted = [row for row in found if aggregate.condition is None or row[str(aggregate.condition)]]
    column, by = (None if c is None else str(c) for c in (aggregate.column, aggregate.by))
    if isinstance(aggregate.function, ValueSet):
        return len({str(row[column]) for row in counted if row[column] is not None})
    if aggregate.function is not None:
        return aggregate.function.of_rows(counted)  # type: ignore[attr-defined]
    if aggregate.limit is not None:
        return [row[column] for row in counted if row[column] is not None][: aggregate.limit]
    return model(aggregate.kind.value, counted, column, by, aggregate.ignore_nulls)
