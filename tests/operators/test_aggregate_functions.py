"""Aggregate functions of programs: what is refused when they are made, and what of theirs is checked in each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from frozen_tables import tables_of
from operator_harness import opened, run
from user_functions import Longest, Product

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction
from tidegate.operators.aggregates.changing_aggregate import ChangingAggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.changes import CHANGE
from tidegate.protocol.failures import OperatorError
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut

_BATCH = pa.record_batch({"k": [1, 2, 1], "i": pa.array([2, 3, 5])})


class Total(BatchAggregateFunction):
    """A sum, in whatever way a test says."""

    state = pa.schema({"total": pa.int64()})
    output: Any = pa.int64()
    initial: ClassVar = {"total": 0}

    def __init__(self, made: Callable[[Any], Any] = lambda totals: {"total": totals}, shown: Any = None) -> None:
        self._made, self._shown = made, shown

    def validate(self, *columns: pa.DataType) -> None:
        """Integers."""
        if not all(map(pa.types.is_integer, columns)):
            raise ValueError(f"Total takes integers, not {', '.join(map(str, columns))}")

    def accumulate(self, state: Any, groups: Any, *columns: Any) -> Any:
        """Add."""
        sums = np.bincount(groups, columns[0].to_numpy(), len(state)).astype(np.int64)
        return self._made(state["total"].to_numpy() + sums)

    def merge(self, state: Any, groups: Any, other: Any) -> Any:
        """Add."""
        return self.accumulate(state, groups, other["total"])

    def result(self, state: Any) -> Any:
        """The sums."""
        return state["total"] if self._shown is None else self._shown


def _operator(function: BatchAggregateFunction, column: str = "i") -> KeyedAggregate:
    return KeyedAggregate(("k",), {"a": tg.udaf(function, column)})


def test_rows_are_added_to_the_groups_of_their_keys() -> None:
    """With what there was before them."""
    first, second = run(opened(_operator(Total())), [_BATCH, _BATCH], finish=False)
    assert first.to_pylist() == [{"k": 1, "a": 7}, {"k": 2, "a": 3}]
    assert second.to_pylist() == [{"k": 1, "a": 14}, {"k": 2, "a": 6}]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (Total(lambda totals: totals), r"Total.accumulate returned ndarray; it returns the new state"),
        (Total(lambda totals: {"sum": totals}), r"returned the columns \['sum'\]; the state has \['total'\]"),
        (Total(lambda totals: {"total": totals[:1]}), r"accumulate: total has 1 values; there are 2 groups"),
        (Total(lambda totals: {"total": ["x", "y"]}), r"Total.accumulate: total is not an array of int64"),
        (Total(shown=[1]), r"Total.result has 1 values; there are 2 groups"),
        (Total(shown=[1.5, 2.5]), r"Total.result is not an array of int64"),
    ],
)
def test_what_a_function_returns_is_checked(function: BatchAggregateFunction, said: str) -> None:
    """By its columns, their types, and one value for each group; the error has function and operator."""
    with pytest.raises(OperatorError, match=said):
        run(opened(_operator(function)), [_BATCH])


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"state": {"total": pa.int64()}}, "state must be a schema"),
        ({"output": "int64"}, "output must be the type of the results"),
        ({"initial": {"sum": 0}}, r"initial names \['sum'\], and state has \['total'\]"),
        ({"initial": {"total": "none"}}, "initial total='none' is not of type int64"),
        ({"state": pa.schema({"total": pa.int64(), "seen": pa.int8()})}, "none may be called 'seen'"),
    ],
)
def test_functions_that_say_too_little_are_refused(attributes: dict[str, Any], said: str) -> None:
    """When an aggregate is made of them."""
    with pytest.raises(ConfigurationError, match=said):
        tg.udaf(type("Total", (Total,), attributes)(), "i")
    with pytest.raises(ConfigurationError, match=r"derives from tg\.BatchAggregateFunction"):
        tg.udaf(Total, "i")  # type: ignore[arg-type]


def test_a_function_says_which_columns_it_takes() -> None:
    """In the call of the program."""
    with pytest.raises(ConfigurationError, match=r"udaf\(Total, 'k'\): Total takes integers, not string"):
        _operator(Total(), "k").validate(pa.schema({"k": pa.string()}))
    with pytest.raises(ConfigurationError, match="there is no column 'x'"):
        _operator(Total(), "x").validate(pa.schema({"k": pa.string()}))


def test_state_of_another_function_is_refused() -> None:
    """Its columns tell."""
    first = opened(_operator(Total()))
    run(first, [_BATCH], finish=False)
    stored = [table for state in first.snapshot(Cut(CheckpointId(1))).states for table in tables_of(state)]
    with pytest.raises(IncompatibleStateError, match=r"has the aggregates \[\] of \['a'\]"):
        opened(_operator(Product()), stored)


def test_rows_are_taken_back_where_a_function_can() -> None:
    """And refused, with what is missing, where it cannot."""
    with pytest.raises(ConfigurationError, match=r"udaf\(Total, 'i'\) cannot follow changes.*a method retract"):
        ChangingAggregate(("k",), {"a": tg.udaf(Total(), "i")}, retracts=True)
    operator = opened(ChangingAggregate(("k",), {"a": tg.udaf(Product(), "i")}, retracts=True))
    rows = [(1, 2, "+I"), (1, 0, "+I"), (1, 5, "+I"), (1, 0, "-U"), (1, 3, "+U")]
    columns = dict(zip(("k", "i", CHANGE), map(list, zip(*rows, strict=True)), strict=True))
    out = run(operator, [pa.record_batch(columns)], finish=False)
    assert [row for batch in out for row in batch.to_pylist()] == [{"k": 1, "a": 30, CHANGE: "+I"}]


def test_nulls_come_to_a_function() -> None:
    """It says what becomes of them."""
    batch = pa.record_batch({"k": [1, 1], "text": ["xy", None], "name": pa.array([None, "n"])})
    (out,) = run(opened(KeyedAggregate(("k",), {"a": tg.udaf(Longest(), "text", "name")})), [batch], finish=False)
    assert out.to_pylist() == [{"k": 1, "a": "xy 2 ?"}]
