"""Exact counts of distinct values where a key's state must be whole: in windows, and with a time to live.

`DistinctRows` remembers each pair of key and value apart, and nothing tells it that a window is over. Rules:

- The state of a key (and window) is its distinct values, each once, in the order in which they came. To merge is to
  unite: slices of a window, sessions that grow together.
- It grows with the distinct values, and a batch writes those of each key in it anew. With very many of them,
  `approx_count_distinct` keeps a sketch instead.
- All NaN are one value, and so are 0.0 and -0.0; nulls are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction, Groups, NewState
from tidegate.operators.aggregates.aggregate_kinds import AggregateKind
from tidegate.operators.aggregates.aggregated_rows import counted_so_far
from tidegate.operators.aggregates.functions.multisets import comparable_type, list_lengths
from tidegate.state.key_index.key_index import KeyIndex

_VALUES = "values"


class ValueSet(BatchAggregateFunction):
    """How many distinct values a column of this type has."""

    output = pa.int64()

    def __init__(self, data_type: pa.DataType) -> None:
        self._type = data_type
        self.state = pa.schema({_VALUES: pa.list_(data_type)})

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Add values."""
        return self._united(state.column(_VALUES), groups, columns[0])

    def accumulate_each(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> tuple[NewState, Any]:
        """Add values. Also how many there are after each row."""
        held = state.column(_VALUES)
        known = np.flatnonzero(columns[0].is_valid().to_numpy(zero_copy_only=False))
        every, of, rows = self._distinct(held, groups[known], columns[0].take(pa.array(known)))
        values_held = len(every) - len(known)
        new = known[rows[rows >= values_held] - values_held]
        return self._lists(held, every, of, rows), list_lengths(held)[groups] + counted_so_far(groups, new)

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Add the values of others."""
        lists = other.column(_VALUES)
        return self._united(state.column(_VALUES), np.repeat(groups, list_lengths(lists)), lists.flatten())

    def result(self, state: pa.RecordBatch) -> Any:
        """How many there are."""
        return list_lengths(state.column(_VALUES))

    def _united(self, held: pa.Array, groups: Groups, values: pa.Array) -> NewState:
        """What groups hold, with values that may be among it already."""
        known = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        return self._lists(held, *self._distinct(held, groups[known], values.take(pa.array(known))))

    def _distinct(
        self, held: pa.Array, groups: Groups, values: pa.Array
    ) -> tuple[pa.Array, NDArray[np.int64], NDArray[np.int32]]:
        """What groups hold with other values behind it, the group of each, and which are the first of their kind."""
        every = pa.concat_arrays([held.flatten(), values.cast(self._type)])
        of = np.concatenate((np.repeat(np.arange(len(held)), list_lengths(held)), groups))
        first = KeyIndex(("group", "value")).upsert(pa.record_batch({"group": of, "value": every})).first_rows
        return every, of, np.sort(first)

    def _lists(self, held: pa.Array, every: pa.Array, of: NDArray[np.int64], rows: NDArray[np.int32]) -> NewState:
        """Lists of the values in some rows, by group."""
        rows = rows[np.argsort(of[rows], kind="stable")]
        offsets = np.concatenate(([0], np.cumsum(np.bincount(of[rows], minlength=len(held)))))
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), every.take(pa.array(rows)))
        return {_VALUES: lists}

    def __str__(self) -> str:
        return AggregateKind.COUNT_DISTINCT.value


def with_value_sets(aggregates: Mapping[str, Aggregate], schema: pa.Schema | None) -> dict[str, Aggregate]:
    """Aggregates of which those that count distinct values keep them. ConfigurationError for unknown or other types."""
    return {
        label: replace(a, kind=AggregateKind.USER, function=ValueSet(comparable_type(label, a, schema)))
        if isinstance(a, Aggregate) and a.kind is AggregateKind.COUNT_DISTINCT
        else a
        for label, a in aggregates.items()
    }
