"""Accumulators: how each aggregate is kept in the columns of a `VectorTable` of any backend, one slot for each key.

`KeyedAggregate` uses them. An accumulator adds a batch to the slots of its rows, merges what other slots hold into some
slots, and gives the results of some slots. `value_specs` says which columns it has, and what a new slot holds. Nulls
cost nothing until a batch has one: only then does a column keep track of which slots have a value.

To merge gives the same as to add the rows from which both sides were made, all in one table (of float sums, up to the
order in which they are added). So slices combine into windows, sessions grow together, and parts that several subtasks
have made become one result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.accumulators_of_any_width import Collected, TextExtreme
from tidegate.operators.aggregates.accumulators_of_numbers import CountedSum, Mean, Spread, Sum
from tidegate.operators.aggregates.accumulators_of_values import Choice, Extreme
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_function import UserAggregate
from tidegate.operators.aggregates.aggregate_kinds import CHOICES, EXTREMES, SPREADS, AggregateKind
from tidegate.operators.aggregates.aggregated_rows import input_column, row_mask
from tidegate.state.common.backend import ValueColumn, ValueSpec
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK, fixed_values, storage_dtype


class Accumulator(Protocol):
    """The accumulator of one aggregate over the slots of one state."""

    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        """Add the rows of a batch, row i to slot `slots[i]`, between `upsert` and `done` of the table.

        Raises OverflowError when a sum leaves the range of its type.
        """
        ...

    def merge(self, slots: NDArray[np.int32], parts: Sequence[pa.Array]) -> None:
        """Merge accumulators of other slots into these, row i into slot `slots[i]`, between `upsert` and `done`.

        `parts` are their stored columns, in the order of `state_fields`: taken from this table or another one, or
        read from a checkpoint. A slot may come several times. Raises OverflowError as `update` does.
        """
        ...

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Current results of some slots."""
        ...

    def running(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> pa.Array:
        """Add the rows of a batch as `update` does, and return the result of each row's slot right after the row.

        It is what `update` and `results` give for batches of one row each. Raises OverflowError as `update` does.
        """
        ...


class ColumnsByName(Protocol):
    """What has the columns of accumulators: a `VectorTable`, or less."""

    def column(self, name: str) -> ValueColumn:
        """A value column; always the same object."""
        ...


def value_specs(aggregate: Aggregate, fields: Sequence[pa.Field]) -> list[ValueSpec]:
    """Columns that an aggregate keeps: `fields` (of `Aggregate.state_fields`) with what a new slot holds."""
    if aggregate.kind not in EXTREMES or storage_dtype(fields[0].type) is None:
        return [ValueSpec(field.name, field.type, 0) for field in fields]
    greatest = aggregate.kind in (AggregateKind.MIN, AggregateKind.BOOL_AND)
    return [ValueSpec(field.name, field.type, _bound(field.type, greatest)) for field in fields]


def make_accumulator(aggregate: Aggregate, fields: Sequence[pa.Field], table: ColumnsByName) -> Accumulator:
    """The accumulator of an aggregate whose columns are in a table."""
    columns = [table.column(field.name) for field in fields]
    kind = aggregate.kind
    if aggregate.function is not None:
        return UserAggregate(aggregate.function, aggregate.inputs, aggregate.condition, columns)
    if kind is AggregateKind.COLLECT_LIST:
        return Collected(aggregate, columns[0], fields[0].type)
    if kind in EXTREMES:
        if storage_dtype(fields[0].type) is None:
            return TextExtreme(aggregate, columns[0])
        return Extreme(aggregate, fields, columns)
    if kind in CHOICES:
        return Choice(aggregate, fields, columns)
    if kind in SPREADS:
        return Spread(aggregate, columns)
    if kind is AggregateKind.COUNT:
        return _Count(aggregate, table, fields[0].name)
    if kind is AggregateKind.SUM and not aggregate.taken_back:
        return Sum(aggregate, fields, columns)
    made = CountedSum if kind is AggregateKind.SUM else Mean
    return made(aggregate, fields, Sum(aggregate, fields[:-1], columns[:-1]), columns[-1])


class _Count:
    def __init__(self, aggregate: Aggregate, table: ColumnsByName, name: str) -> None:
        self._counts = table.column(name)
        self._aggregate = aggregate

    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        accumulate.count(self._counts.pages, slots, self._mask(batch))

    def running(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> pa.Array:
        after = np.empty(len(slots), dtype=np.int64)
        accumulate.count(self._counts.pages, slots, self._mask(batch), after)
        return pa.array(after)

    def take_back(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        accumulate.discount(self._counts.pages, slots, self._mask(batch))

    def merge(self, slots: NDArray[np.int32], parts: Sequence[pa.Array]) -> None:
        accumulate.sum_int64(self._counts.pages, slots, fixed_values(parts[0]), NO_MASK)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        return self._counts.take(slots)

    def _mask(self, batch: pa.RecordBatch) -> NDArray[np.uint8]:
        column = self._aggregate.column
        columns = [] if column is None else [input_column(batch, column)]
        return row_mask(batch, self._aggregate.condition, *columns)


def _bound(data_type: pa.DataType, greatest: bool) -> int | float:
    dtype = storage_dtype(data_type)
    assert dtype is not None, f"{data_type} has no bounds"
    if dtype.kind == "f":
        return float("nan") if greatest else float("-inf")
    return int(np.iinfo(dtype).max if greatest else np.iinfo(dtype).min)
