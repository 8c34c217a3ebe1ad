"""Aggregates that keep all distinct values of a key: extremes and distinct counts after changes, and exact distinct
counts.

`KeptValues` computes least and greatest values and distinct counts when rows can be retracted, because the next greater
value must be known when the least value is retracted. `ValueSet` counts distinct values where all state of a key must
be in one row: in windows, and with a time to live. (`DistinctRows` stores each pair of key and value separately, and
cannot detect the end of a window.) Rules:

- `KeptValues` stores the distinct values in ascending order and the number of times each occurs, like Flink's sorted
  map state. `ValueSet` stores each distinct value once in the order of arrival, and merges by uniting sets.
- The state grows with the distinct values of a key, and a batch rewrites the values of each key in it. With very many
  values, apply `top_n` before the aggregate, or use `approx_count_distinct`, which keeps a sketch.
- All NaN are one value, the greatest. 0.0 and -0.0 are one value. A null is not a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction, Groups, NewState, counted_so_far
from tidegate.operators.aggregates.aggregate_state import EXTREMES, AggregateKind, kept_type
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError

_VALUES, _TIMES = "values", "times"
_GREATEST = (AggregateKind.MAX, AggregateKind.BOOL_OR)
_KEPT = EXTREMES | {AggregateKind.COUNT_DISTINCT}


class KeptValues(BatchAggregateFunction):
    """Aggregate function for min, max and distinct counts over values that are added and retracted.

    Stores all distinct values of a group, with the number of times each occurs.
    """

    def __init__(self, kind: AggregateKind, data_type: pa.DataType) -> None:
        self._kind = kind
        self._type = data_type
        self.state = pa.schema({_VALUES: pa.list_(data_type), _TIMES: pa.list_(pa.int64())})
        self.output = pa.int64() if kind is AggregateKind.COUNT_DISTINCT else data_type

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Adds the values of rows to the stored values of their groups. Returns the new state of all groups."""
        return self._changed(state, groups, columns[0], np.ones(len(groups), dtype=np.int64))

    def retract(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Removes the values of rows from the stored values of their groups. Returns the new state of all groups."""
        return self._changed(state, groups, columns[0], np.full(len(groups), -1, dtype=np.int64))

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Adds the stored values of other states to their groups. Returns the new state of all groups."""
        of = np.repeat(groups, list_lengths(other.column(_VALUES)))
        times = other.column(_TIMES).flatten().to_numpy()
        return self._changed(state, of, other.column(_VALUES).flatten(), times)

    def result(self, state: pa.RecordBatch) -> Any:
        """Returns, for each group, its least value, its greatest value, or its number of distinct values."""
        lists = state.column(_VALUES)
        lengths = list_lengths(lists)
        if self._kind is AggregateKind.COUNT_DISTINCT:
            return lengths
        ends = np.cumsum(lengths)
        places = ends - 1 if self._kind in _GREATEST else ends - lengths
        return lists.flatten().take(pa.array(places, mask=lengths == 0))

    def _changed(self, state: pa.RecordBatch, groups: Groups, values: pa.Array, times: NDArray[np.int64]) -> NewState:
        """Returns the state of all groups after `values[i]` occurs `times[i]` more often in group `groups[i]`. `times`
        is negative to remove values.

        Raises ValueError if a value would occur less than 0 times.
        """
        held = state.column(_VALUES)
        known = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        every = pa.concat_arrays([held.flatten(), values.take(pa.array(known)).cast(self._type)])
        of = np.concatenate((np.repeat(np.arange(len(held)), list_lengths(held)), groups[known]))
        counts = np.concatenate((state.column(_TIMES).flatten().to_numpy(), times[known]))
        found = KeyIndex(("group", "value")).upsert(pa.record_batch({"group": of, "value": every}))
        totals = np.zeros(len(found.first_rows), dtype=np.int64)
        np.add.at(totals, found.slots, counts)
        if (totals < 0).any():
            raise ValueError(
                "a value was retracted that never came, so the stream of changes contradicts itself. Functions "
                "before this step must return the same result for the same row, and must keep the order of the rows "
                "of a key"
            )
        rows = found.first_rows[totals > 0]
        left = pa.table({"group": of[rows], "value": every.take(pa.array(rows)), "times": totals[totals > 0]})
        left = left.take(pc.sort_indices(left, [("group", "ascending"), ("value", "ascending")])).combine_chunks()
        lengths = np.bincount(left["group"].to_numpy(), minlength=len(held))
        offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
        columns = ((_VALUES, left["value"], self._type), (_TIMES, left["times"], pa.int64()))
        return {
            name: pa.ListArray.from_arrays(offsets, _whole(column, data_type)) for name, column, data_type in columns
        }

    def __str__(self) -> str:
        return self._kind.value


def kept_values(aggregates: Mapping[str, Aggregate], schema: pa.Schema | None) -> dict[str, Aggregate]:
    """Returns the aggregates in a form that supports retractions. Min, max and distinct counts are replaced by
    functions that store all values.

    Raises ConfigurationError if the type of an input column is not known, or if its values have no order.
    """
    return {label: _kept(label, aggregate, schema) for label, aggregate in aggregates.items()}


def _kept(label: str, aggregate: Aggregate, schema: pa.Schema | None) -> Aggregate:
    if aggregate.kind not in _KEPT:
        return aggregate
    function = KeptValues(aggregate.kind, comparable_type(label, aggregate, schema))
    return replace(aggregate, kind=AggregateKind.USER, function=function)


def comparable_type(label: str, aggregate: Aggregate, schema: pa.Schema | None) -> pa.DataType:
    """Returns the type in which the values of an aggregate's column are stored, so that they can be compared.

    `label` is the output column. Raises ConfigurationError if the type of the column is unknown or has no order.
    """
    what = f"{label}={aggregate}"
    if schema is None:
        raise ConfigurationError(
            f"{what}: it stores values, so the types of columns must be known; pass schema= to the step before"
        )
    column = str(aggregate.column)
    if column not in schema.names:
        raise ConfigurationError(f"{what}: there is no column {column!r} in {schema.names}; name one of these")
    if aggregate.kind is not AggregateKind.COUNT_DISTINCT:
        aggregate.validate(schema)
    data_type = kept_type(schema.field(column).type)
    _check_ordered(what, column, data_type)
    return data_type


def _check_ordered(what: str, column: str, data_type: pa.DataType) -> None:
    """Raises ConfigurationError, which begins with `what`, for a type whose values cannot be compared."""
    kinds = pa.types
    if kinds.is_nested(data_type) or kinds.is_interval(data_type):
        advice = "give a column of plain values, such as a field of it"
    elif kinds.is_float16(data_type):
        advice = "cast it to float32"
    else:
        return
    raise ConfigurationError(f"{what}: column {column!r} is {data_type}, whose values cannot be compared; {advice}")


def list_lengths(lists: pa.Array) -> NDArray[np.int64]:
    """Returns the number of values in each list. A null list has none."""
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    return lengths


def _whole(column: pa.ChunkedArray, data_type: pa.DataType) -> pa.Array:
    return pa.concat_arrays([pa.array([], data_type), *column.chunks])


class ValueSet(BatchAggregateFunction):
    """Aggregate function that counts distinct values. Stores the set of values of each group."""

    output = pa.int64()

    def __init__(self, data_type: pa.DataType) -> None:
        self._type = data_type
        self.state = pa.schema({_VALUES: pa.list_(data_type)})

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Adds the values of rows to the sets of their groups. Returns the new state of all groups."""
        return self._united(state.column(_VALUES), groups, columns[0])

    def accumulate_each(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> tuple[NewState, Any]:
        """Adds the values of rows to the sets of their groups.

        Returns the new state of all groups and, for each row, the number of distinct values in its group right after
        the row.
        """
        held = state.column(_VALUES)
        known = np.flatnonzero(columns[0].is_valid().to_numpy(zero_copy_only=False))
        every, of, rows = self._distinct(held, groups[known], columns[0].take(pa.array(known)))
        values_held = len(every) - len(known)
        new = known[rows[rows >= values_held] - values_held]
        return self._lists(held, every, of, rows), list_lengths(held)[groups] + counted_so_far(groups, new)

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Adds the sets of other states to the sets of their groups. Returns the new state of all groups."""
        lists = other.column(_VALUES)
        return self._united(state.column(_VALUES), np.repeat(groups, list_lengths(lists)), lists.flatten())

    def result(self, state: pa.RecordBatch) -> Any:
        """Returns the number of distinct values of each group."""
        return list_lengths(state.column(_VALUES))

    def _united(self, held: pa.Array, groups: Groups, values: pa.Array) -> NewState:
        """Returns the state of all groups after adding values to the stored sets `held`. Values that a set already
        contains are skipped.
        """
        known = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        return self._lists(held, *self._distinct(held, groups[known], values.take(pa.array(known))))

    def _distinct(
        self, held: pa.Array, groups: Groups, values: pa.Array
    ) -> tuple[pa.Array, NDArray[np.int64], NDArray[np.int32]]:
        """Returns three arrays: the stored values followed by the new values, the group of each, and the sorted indices
        at which a value first occurs in its group.
        """
        every = pa.concat_arrays([held.flatten(), values.cast(self._type)])
        of = np.concatenate((np.repeat(np.arange(len(held)), list_lengths(held)), groups))
        first = KeyIndex(("group", "value")).upsert(pa.record_batch({"group": of, "value": every})).first_rows
        return every, of, np.sort(first)

    def _lists(self, held: pa.Array, every: pa.Array, of: NDArray[np.int64], rows: NDArray[np.int32]) -> NewState:
        """Returns the state with one list for each group, made of the values `every[rows]`. `of` has the group of each
        value.
        """
        rows = rows[np.argsort(of[rows], kind="stable")]
        offsets = np.concatenate(([0], np.cumsum(np.bincount(of[rows], minlength=len(held)))))
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), every.take(pa.array(rows)))
        return {_VALUES: lists}

    def __str__(self) -> str:
        return AggregateKind.COUNT_DISTINCT.value


def with_value_sets(aggregates: Mapping[str, Aggregate], schema: pa.Schema | None) -> dict[str, Aggregate]:
    """Returns the aggregates with each `count_distinct` replaced by a function that stores the distinct values.

    Raises ConfigurationError if the type of an input column is not known, or if its values cannot be compared.
    """
    return {
        label: replace(a, kind=AggregateKind.USER, function=ValueSet(comparable_type(label, a, schema)))
        if isinstance(a, Aggregate) and a.kind is AggregateKind.COUNT_DISTINCT
        else a
        for label, a in aggregates.items()
    }
