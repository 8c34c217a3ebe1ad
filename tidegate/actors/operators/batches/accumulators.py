"""Accumulators: how each aggregate is kept in the columns of a `VectorTable` of any backend, one slot for each key.

`KeyedAggregate` uses them. An accumulator adds a batch to the slots of its rows, and gives the results of some slots.
`value_specs` says which columns it has, and what a new slot holds. Nulls cost nothing until a batch has one: only then
does a column keep track of which slots have a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels import accumulate
from tidegate.actors.kernels.columns import NO_MASK, fixed_values, plain, valid_mask
from tidegate.actors.kernels.fixed_width import array_of, storage_dtype
from tidegate.actors.operators.batches.aggregates import Aggregate, AggregateKind
from tidegate.actors.state_backends.common.backend import ValueColumn, ValueSpec, VectorTable


class Accumulator(Protocol):
    """The accumulator of one aggregate over the slots of one state."""

    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        """Add the rows of a batch, row i to slot `slots[i]`, between `upsert` and `done` of the table.

        Raises OverflowError when an integer sum leaves the range of int64.
        """
        ...

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Current results of some slots."""
        ...


def value_specs(aggregate: Aggregate, fields: Sequence[pa.Field]) -> list[ValueSpec]:
    """Columns that an aggregate keeps: `fields` (of `Aggregate.state_fields`) with what a new slot holds."""
    if aggregate.kind is AggregateKind.MIN:
        return [ValueSpec(field.name, field.type, _bound(field.type, greatest=True)) for field in fields]
    if aggregate.kind is AggregateKind.MAX:
        return [ValueSpec(field.name, field.type, _bound(field.type, greatest=False)) for field in fields]
    return [ValueSpec(field.name, field.type, 0) for field in fields]


def make_accumulator(aggregate: Aggregate, fields: Sequence[pa.Field], table: VectorTable) -> Accumulator:
    """The accumulator of an aggregate whose columns are in a table."""
    names = [field.name for field in fields]
    if aggregate.column is None:
        return _Count(table, names[0], None)
    match aggregate.kind:
        case AggregateKind.COUNT:
            return _Count(table, names[0], aggregate.column)
        case AggregateKind.SUM:
            return _Sum(table, names[0], aggregate.column)
        case AggregateKind.MEAN:
            return _Mean(table, names[0], names[1], aggregate.column)
        case AggregateKind.MIN | AggregateKind.MAX:
            return _Extreme(table, names[0], aggregate.column, aggregate.kind is AggregateKind.MIN)


class _Count:
    def __init__(self, table: VectorTable, name: str, column: str | None) -> None:
        self._counts = table.column(name)
        self._column = column

    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        mask = NO_MASK if self._column is None else valid_mask(plain(batch.column(self._column)))
        accumulate.count(self._counts.pages, slots, mask)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        return self._counts.take(slots)


class _Sum:
    def __init__(self, table: VectorTable, name: str, column: str) -> None:
        self._sums = table.column(name)
        self._column = column

    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        values = plain(batch.column(self._column))
        mask = valid_mask(values)
        _mark(self._sums, slots, mask)
        _add(self._sums, slots, values, mask, self._column)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        return self._sums.take(slots)


class _Mean:
    def __init__(self, table: VectorTable, sums: str, counts: str, column: str) -> None:
        self._sums = table.column(sums)
        self._counts = table.column(counts)
        self._column = column

    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        values = plain(batch.column(self._column))
        mask = valid_mask(values)
        _add(self._sums, slots, values, mask, self._column)
        accumulate.count(self._counts.pages, slots, mask)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        counts = self._counts.raw(slots)
        has_value = (counts > 0).astype(np.uint8)
        means = self._sums.raw(slots) / np.maximum(counts, 1)
        return array_of(means, None if has_value.all() else has_value, pa.float64())


class _Extreme:
    def __init__(self, table: VectorTable, name: str, column: str, least: bool) -> None:
        self._results = table.column(name)
        self._column = column
        self._kernel = accumulate.minimum if least else accumulate.maximum

    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        values = plain(batch.column(self._column))
        mask = valid_mask(values)
        _mark(self._results, slots, mask)
        self._kernel(self._results.pages, slots, fixed_values(values), mask)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        return self._results.take(slots)


def _mark(column: ValueColumn, slots: NDArray[np.int32], mask: NDArray[np.uint8]) -> None:
    """Note which slots get a value. Until there is a null every slot has one: that of the row that made the slot."""
    if len(mask) > 0:
        accumulate.mark(column.track_nulls(), slots, mask)
    elif len(valid_pages := column.valid_pages) > 0:
        accumulate.mark(valid_pages, slots, mask)


def _add(column: ValueColumn, slots: NDArray[np.int32], values: pa.Array, mask: NDArray[np.uint8], name: str) -> None:
    if column.dtype == np.float64:
        accumulate.sum_float64(column.pages, slots, fixed_values(values.cast(pa.float64())), mask)
    elif accumulate.sum_int64(column.pages, slots, fixed_values(_as_int64(values, name)), mask):
        raise OverflowError(f"the sum of column {name!r} does not fit into int64; cast the column to float64 first")


def _as_int64(values: pa.Array, name: str) -> pa.Array:
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise OverflowError(
            f"column {name!r} has a value over 2**63 - 1, and sums of integers are int64; cast it to float64 first"
        ) from error


def _bound(data_type: pa.DataType, greatest: bool) -> int | float:
    dtype = storage_dtype(data_type)
    assert dtype is not None, f"{data_type} has no bounds"
    if dtype.kind == "f":
        return float("nan") if greatest else float("-inf")
    return int(np.iinfo(dtype).max if greatest else np.iinfo(dtype).min)
