"""Accumulators whose values are of no fixed width: extremes of strings, and lists, as `accumulators.py` makes them.

Their columns are read and written as Arrow arrays. So each batch is first brought down to what it says of each slot,
and then each slot is read once, and written if it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_kinds import AggregateKind
from tidegate.operators.aggregates.aggregated_rows import (
    Slots,
    counted_so_far,
    grouped,
    input_column,
    row_mask,
    rows_in,
)
from tidegate.state.common.backend import ValueColumn
from tidegate.state.kernels.choose import choose_strings
from tidegate.state.kernels.columns import Strings, key_form, valid_mask


class TextExtreme:
    """The least or the greatest string or binary value, in the order of bytes."""

    def __init__(self, aggregate: Aggregate, column: ValueColumn) -> None:
        self._aggregate = aggregate
        self._column = column
        self._greatest = aggregate.kind is AggregateKind.MAX

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Look at the values of a batch."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        self._take_in(slots, values, rows_in(mask, len(slots)))

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Look at the values of a batch. Returns the extremes after each row."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        groups, distinct = grouped(slots)
        held = self._column.take(distinct)
        either = pa.concat_arrays([held, values.cast(held.type)])
        form = key_form(either, "")
        assert isinstance(form, Strings), f"{either.type} is no text"
        start = np.where(held.is_valid().to_numpy(zero_copy_only=False), np.arange(len(held)), -1)
        best, after = start.copy(), np.empty(len(slots), dtype=np.int64)
        rows = np.arange(len(held), len(either))
        choose_strings(form.offsets, form.data, rows, groups, best, self._greatest, mask, after)
        changed = np.flatnonzero(best != start)
        if len(changed):
            self._column.put(distinct[changed], either.take(pa.array(best[changed])))
        return either.take(pa.array(after, mask=after < 0))

    def merge(self, slots: Slots, parts: Sequence[pa.Array]) -> None:
        """Look at other extremes."""
        self._take_in(slots, parts[0], rows_in(valid_mask(parts[0]), len(slots)))

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """The extremes."""
        return self._column.take(slots)

    def _take_in(self, slots: Slots, values: pa.Array, rows: NDArray[np.int64]) -> None:
        if not len(rows):
            return
        codes, distinct = grouped(slots[rows])
        form = key_form(values, "")
        assert isinstance(form, Strings), f"{values.type} is no text"
        best = np.full(len(distinct), -1, dtype=np.int64)
        choose_strings(form.offsets, form.data, rows, codes, best, self._greatest)
        found, held = values.take(pa.array(best)), self._column.take(distinct)
        found = found.cast(held.type)
        better = (pc.greater if self._greatest else pc.less)(found, held)
        wins = np.flatnonzero(pc.fill_null(better, True).to_numpy(zero_copy_only=False))
        if len(wins):
            self._column.put(distinct[wins], found.take(pa.array(wins)))


class Collected:
    """A list of values, in the order of arrival, up to a limit."""

    def __init__(self, aggregate: Aggregate, column: ValueColumn, data_type: pa.DataType) -> None:
        assert aggregate.limit is not None, "a list without a limit"
        self._aggregate = aggregate
        self._column = column
        self._type = data_type
        self._limit = aggregate.limit

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Add the values of a batch."""
        values = input_column(batch, self._aggregate.column)
        rows = rows_in(row_mask(batch, self._aggregate.condition, values), len(slots))
        self._add(slots[rows], values.take(pa.array(rows)))

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Add the values of a batch. Returns the lists after each row: each is a beginning of the list in the end."""
        values = input_column(batch, self._aggregate.column)
        rows = rows_in(row_mask(batch, self._aggregate.condition, values), len(slots))
        groups, distinct = grouped(slots)
        held = _lengths(self._column.take(distinct))
        self._add(slots[rows], values.take(pa.array(rows)))
        lists = self._column.take(distinct)
        in_the_end = _lengths(lists)
        starts = np.cumsum(in_the_end) - in_the_end
        lengths = np.minimum(held[groups] + counted_so_far(groups, rows), in_the_end[groups])
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        places = np.arange(offsets[-1]) + np.repeat(starts[groups] - offsets[:-1], lengths)
        elements = lists.flatten().take(pa.array(places))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements, type=self._type)

    def merge(self, slots: Slots, parts: Sequence[pa.Array]) -> None:
        """Add the values of other lists, as if they had come later."""
        self._add(np.repeat(slots, _lengths(parts[0])), parts[0].flatten())

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """The lists; empty where no value has come."""
        lists = self._column.take(slots)
        return pc.fill_null(lists, pa.scalar([], self._type)) if lists.null_count else lists

    def _add(self, slots: Slots, values: pa.Array) -> None:
        """Add values to the lists of slots, which are not full."""
        if not len(slots):
            return
        codes, distinct = grouped(slots)
        lists = self._column.take(distinct)
        held = _lengths(lists)
        order = np.argsort(codes, kind="stable")
        came = np.bincount(codes, minlength=len(distinct))
        ranks = np.arange(len(codes)) - np.repeat(np.cumsum(came) - came, came)
        added = order[ranks < np.repeat(self._limit - held, came)]
        if not len(added):
            return
        of_held = np.repeat(np.arange(len(distinct)), held)
        every = pa.concat_arrays([lists.flatten(), values.take(pa.array(added)).cast(self._type.value_type)])
        places = np.argsort(np.concatenate((of_held, codes[added])), kind="stable")
        grown = held + np.bincount(codes[added], minlength=len(distinct))
        offsets = np.concatenate(([0], np.cumsum(grown)))
        new = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), every.take(pa.array(places)), type=self._type)
        changed = np.flatnonzero(grown > held)
        self._column.put(distinct[changed], new.take(pa.array(changed)))


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    return lengths
