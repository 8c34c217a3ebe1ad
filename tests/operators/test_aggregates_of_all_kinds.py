"""Keyed aggregates of every kind equal plain Python, through restores, and refuse columns that they cannot take."""

from __future__ import annotations

import dataclasses
import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from aggregate_cases import AGGREGATES, SCHEMA, batch_of, expected, rows
from aggregate_model import same_rows
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import Subtasks, context, opened, run

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_state import AggregateKind
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.protocol.failures import OperatorError
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable


def _make() -> KeyedAggregate:
    return KeyedAggregate(("k",), AGGREGATES, "final")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(rows(), max_size=5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_all_kinds_equal_plain_python(parts: list[list[dict[str, Any]]], before: int, after: int, cut_at: int) -> None:
    """Of all types, with nulls and NaN and conditions, after a restore at another parallelism."""
    batches = [batch_of(part) for part in parts if part]
    first = Subtasks(_make, ("k",), before)
    first.process(batches[:cut_at])
    second = Subtasks(_make, ("k",), after, restored=first.snapshot())
    second.process(batches[cut_at:])
    second.finish()
    found = [row for batch in second.emitted for row in batch.to_pylist()]
    assert same_rows(found, expected([row for part in parts for row in part]), "k")
    assert all(batch.schema.equals(_make().output_schema(SCHEMA)) for batch in second.emitted)


@settings(max_examples=8, deadline=None)
@given(part=rows(), more=rows())
def test_rocksdb_keeps_all_kinds(tmp_path_factory: pytest.TempPathFactory, part: Any, more: Any) -> None:
    """State that memory has written is gone on with in RocksDB, before any other batch has come."""
    first = opened(_make())
    run(first, [batch_of(part)], finish=False)
    second = _on_rocksdb(tmp_path_factory.mktemp("rocks"), _stored(first))
    run(second, [batch_of(more)], finish=False)
    third = opened(_make(), _stored(second))
    found = [row for batch in run(third, []) for row in batch.to_pylist()]
    assert same_rows(found, expected([*part, *more]), "k")
    second.close()


def _on_rocksdb(folder: Path, tables: list[StateTable]) -> KeyedAggregate:
    operator = _make()
    options = StateBackendOptions("rocksdb", directory=str(folder), memory_bytes=4 * 1024 * 1024)
    operator.open(dataclasses.replace(context(), backend=options), tables)
    return operator


def _stored(operator: KeyedAggregate) -> list[StateTable]:
    snapshot = operator.snapshot(Cut(CheckpointId(1), canonical=True))
    return [table for state in snapshot.states for table in tables_of(state)]


def _of(aggregate: Aggregate, values: list[Any], data_type: pa.DataType) -> Any:
    batch = pa.record_batch({"k": [1] * len(values), "x": pa.array(values, data_type)})
    (out,) = run(opened(KeyedAggregate(("k",), {"a": aggregate}, "final")), [batch])
    assert out.schema.field("a").type == aggregate.output_type(batch.schema)
    return out.column("a").to_pylist()[0]


def test_decimals_keep_their_digits() -> None:
    """A sum has ten digits more and a mean four more behind the point, rounded half up, as in Spark."""
    cents = pa.decimal128(10, 2)
    values = [Decimal("0.01"), Decimal("0.01"), Decimal("-99999999.99"), None]
    assert _of(tg.sum("x"), values, cents) == Decimal("-99999999.97")
    assert tg.sum("x").output_type(pa.schema({"x": cents})) == pa.decimal128(20, 2)
    assert _of(tg.mean("x"), [Decimal("0.01"), Decimal("0.02"), Decimal("0.02")], cents) == Decimal("0.016667")
    assert _of(tg.mean("x"), [Decimal("-0.01"), Decimal("-0.02"), Decimal("-0.02")], cents) == Decimal("-0.016667")
    assert tg.mean("x").output_type(pa.schema({"x": cents})) == pa.decimal128(14, 6)
    assert _of(tg.max("x"), [Decimal("0.5"), Decimal("-1.0")], pa.decimal64(5, 1)) == Decimal("0.5")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_of_decimals_that_has_too_many_digits_is_an_error(sign: int) -> None:
    """38 digits are the most: one more is an error, and the greatest number is not."""
    most = Decimal(sign * (10**38 - 1))
    assert _of(tg.sum("x"), [most], pa.decimal128(38, 0)) == most
    for values in ([most, Decimal(sign)], [most, most]):
        with pytest.raises(OperatorError, match="sum of column 'x' has more than 38 digits"):
            _of(tg.sum("x"), values, pa.decimal128(38, 0))


@pytest.mark.parametrize("emit", ["final", "update"])
def test_a_mean_of_decimals_that_does_not_fit_is_an_error(emit: str) -> None:
    """It has four digits more behind the point than the values. Operator and column are named."""
    batch = pa.record_batch({"k": [0], "x": pa.array([Decimal(10) ** 27], pa.decimal128(38, 10))})
    with pytest.raises(
        OperatorError, match=r"operator .*the mean of column 'x' does not fit into decimal128\(38, 14\)"
    ):
        run(opened(KeyedAggregate(("k",), {"a": tg.mean("x")}, emit)), [batch])


def test_durations_are_summed_in_their_type() -> None:
    """As in Spark; a mean of them is refused."""
    assert _of(tg.sum("x"), [1, 2, None], pa.duration("ms")) == dt.timedelta(milliseconds=3)


def test_variances_of_large_values_are_exact() -> None:
    """Differences of 1 around a mean of a billion: the difference of two sums of squares would have lost them."""
    values = [1e9, 1e9 + 1, 1e9 + 2]
    assert _of(tg.var_samp("x"), values, pa.float64()) == pytest.approx(1.0, rel=1e-12)
    assert _of(tg.var_samp("x"), [5.0], pa.float64()) is None
    assert _of(tg.var_pop("x"), [5.0], pa.float64()) == 0.0


@pytest.mark.parametrize(
    ("aggregate", "said"),
    [
        (
            tg.var_pop("text"),
            r"var_pop\('text'\): column 'text' is string; var_pop takes integers, floats",
        ),
        (tg.bool_and("i"), r"bool_and\('i'\): column 'i' is int64; bool_and takes booleans"),
        (tg.max("texts"), r"max\('texts'\): column 'texts' is list<.*>; max takes numbers, .*strings"),
        (tg.arg_min("i", by="text"), r"arg_min\('i', by='text'\): column 'text' is string; by= takes integers"),
        (tg.arg_max("i", by="no"), r"there is no column 'no'"),
        (tg.sum("wide"), r"column 'wide' is decimal256.*decimals of at most 38 digits"),
        (tg.mean("for"), r"column 'for' is duration"),
        (tg.count().where("i"), r"count\(\)\.where\('i'\): the condition is int64"),
        (tg.count().where("no"), r"there is no column 'no'"),
        (tg.max(pl.col("i") + 1), r"takes names of columns"),
    ],
)
def test_columns_that_do_not_fit_are_refused(aggregate: Aggregate, said: str) -> None:
    """The error names the aggregate, the column, its type and what the aggregate takes."""
    types = {
        "k": pa.int64(),
        "i": pa.int64(),
        "text": pa.string(),
        "texts": pa.list_(pa.string()),
        "wide": pa.decimal256(50, 1),
        "for": pa.duration("s"),
    }
    with pytest.raises(ConfigurationError, match=said):
        KeyedAggregate(("k",), {"a": aggregate}).validate(pa.schema(types))


def test_arguments_that_contradict_each_other_are_refused() -> None:
    """When the aggregate is made."""
    with pytest.raises(ConfigurationError, match="needs a column to compare"):
        Aggregate(AggregateKind.ARG_MIN, "x")
    with pytest.raises(ConfigurationError, match="does not choose a row"):
        Aggregate(AggregateKind.SUM, "x", by="y")
    with pytest.raises(ConfigurationError, match="already has a condition"):
        tg.count().where("a").where("b")
    with pytest.raises(ConfigurationError, match="sum takes the name of a column or a polars expression, not int"):
        tg.sum(5)  # type: ignore[arg-type]


def test_columns_that_are_only_columns_are_names() -> None:
    """`pl.col("x")` is the same as "x", and equal expressions make equal aggregates."""
    assert tg.sum(pl.col("x")) == tg.sum("x")
    assert tg.sum(pl.col("x") * 2) == tg.sum(pl.col("x") * 2)
    assert tg.sum(pl.col("x") * 2) != tg.sum(pl.col("x") * 3)
    assert "col(" in str(tg.count().where(pl.col("x") > 3))


def test_state_of_another_type_is_refused() -> None:
    """A column of decimals has other state columns than one of integers, and other digits are other columns."""
    for before, after, said in (
        (pa.int64(), pa.decimal128(10, 2), "kept in other columns"),
        (pa.decimal128(10, 2), pa.decimal128(10, 3), "cannot become"),
    ):
        what = {"x": tg.max("x")}
        first = opened(KeyedAggregate(("k",), what))
        run(first, [pa.record_batch({"k": [1], "x": pa.array([1], before)})], finish=False)
        second = opened(KeyedAggregate(("k",), what), _stored(first))
        with pytest.raises(OperatorError, match=said):
            run(second, [pa.record_batch({"k": [1], "x": pa.array([1], after)})])
    other = opened(KeyedAggregate(("k",), {"x": tg.max("x")}))
    run(other, [pa.record_batch({"k": [1], "x": pa.array([True])})], finish=False)
    with pytest.raises(IncompatibleStateError, match=r"has the aggregates \[\] of \['x'\]"):
        opened(KeyedAggregate(("k",), {"x": tg.first("x")}), _stored(other))
