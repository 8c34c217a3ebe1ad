"""Accumulators that keep a value as it came: extremes, and columns of a chosen row, as `accumulators.py` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_kinds import AggregateKind
from tidegate.operators.aggregates.aggregate_state import result_type
from tidegate.operators.aggregates.aggregated_rows import (
    Mask,
    Slots,
    grouped,
    input_column,
    mark,
    row_mask,
    running_valid,
    valid_of,
)
from tidegate.operators.aggregates.stored_values import value_array, value_words
from tidegate.state.common.backend import ValueColumn
from tidegate.state.kernels import accumulate, choose
from tidegate.state.kernels.choose import newest_chosen
from tidegate.state.kernels.columns import fixed_values, storage_dtype, valid_mask


class Extreme:
    """The least or the greatest value: one column, or the two words of a decimal."""

    def __init__(self, aggregate: Aggregate, fields: Sequence[pa.Field], columns: Sequence[ValueColumn]) -> None:
        self._aggregate = aggregate
        self._columns = columns
        self._type = result_type(aggregate, fields)
        self._least = aggregate.kind in (AggregateKind.MIN, AggregateKind.BOOL_AND)

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Look at the values of a batch."""
        values = input_column(batch, self._aggregate.column)
        self._take_in(slots, value_words(values), row_mask(batch, self._aggregate.condition, values))

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Look at the values of a batch. Returns the extremes after each row."""
        values = input_column(batch, self._aggregate.column)
        words, mask = value_words(values), row_mask(batch, self._aggregate.condition, values)
        valid = running_valid(self._columns[0], slots, mask)
        pages = [column.pages for column in self._columns]
        after = [np.empty(len(slots), dtype=each.dtype) for each in words]
        if len(pages) == 2:
            of_decimals = accumulate.least_decimals if self._least else accumulate.greatest_decimals
            of_decimals(pages[0], pages[1], slots, words[0], words[1], mask, after[0], after[1])
        else:
            (accumulate.minimum if self._least else accumulate.maximum)(pages[0], slots, words[0], mask, after[0])
        return value_array(after, valid, self._type)

    def merge(self, slots: Slots, parts: Sequence[pa.Array]) -> None:
        """Look at other extremes."""
        self._take_in(slots, [fixed_values(part) for part in parts], valid_mask(parts[0]))

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """The extremes."""
        words = [column.raw(slots) for column in self._columns]
        return value_array(words, valid_of(self._columns[0], slots), self._type)

    def _take_in(self, slots: Slots, words: Sequence[NDArray[Any]], mask: Mask) -> None:
        mark(self._columns[0], slots, mask)
        pages = [column.pages for column in self._columns]
        if len(pages) == 2:
            of_decimals = accumulate.least_decimals if self._least else accumulate.greatest_decimals
            of_decimals(pages[0], pages[1], slots, words[0], words[1], mask)
        else:
            (accumulate.minimum if self._least else accumulate.maximum)(pages[0], slots, words[0], mask)


class Choice:
    """The value in a chosen row: its words, what it was chosen by, and whether there is one."""

    def __init__(self, aggregate: Aggregate, fields: Sequence[pa.Field], columns: Sequence[ValueColumn]) -> None:
        self._aggregate = aggregate
        self._type = result_type(aggregate, fields)
        self._seen = columns[-1]
        self._by = None if aggregate.by is None else columns[-2]
        self._by_type = None if aggregate.by is None else fields[-2].type
        self._values = columns[: -1 if self._by is None else -2]
        self._is_fixed = storage_dtype(fields[0].type) is not None

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Look at the rows of a batch."""
        self._take_in(batch, slots)

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Look at the rows of a batch. Returns the values after each row."""
        groups, distinct = grouped(slots)
        held = self.results(distinct)
        values, chosen = self._take_in(batch, slots)
        newest, after = np.full(len(distinct), -1, dtype=np.int64), np.empty(len(slots), dtype=np.int64)
        newest_chosen(groups, chosen, newest, after)
        either = pa.concat_arrays([held, values.cast(held.type)])
        return either.take(pa.array(np.where(after < 0, groups, after + len(held))))

    def _take_in(self, batch: pa.RecordBatch, slots: Slots) -> tuple[pa.Array, NDArray[np.uint8]]:
        """Store what is chosen of a batch. Returns the values, and 1 for each row that was chosen when it came."""
        aggregate = self._aggregate
        values = input_column(batch, aggregate.column)
        by = None if aggregate.by is None else self._comparable(input_column(batch, aggregate.by))
        never_null = ([values] if aggregate.ignore_nulls else []) + ([] if by is None else [by])
        chosen = self._chosen(slots, by, row_mask(batch, aggregate.condition, *never_null))
        if self._is_fixed:
            self._store(slots, value_words(values), valid_mask(values), chosen)
        else:
            self._put(slots, values, chosen)
        return values, chosen

    def merge(self, slots: Slots, parts: Sequence[pa.Array]) -> None:
        """Look at rows that others have chosen: as if they had come after those of the slots."""
        by = None if self._by is None else parts[-2]
        chosen = self._chosen(slots, by, fixed_values(parts[-1]))
        if self._is_fixed:
            words = [fixed_values(part) for part in parts[: len(self._values)]]
            self._store(slots, words, valid_mask(parts[0]), chosen)
        else:
            self._put(slots, parts[0], chosen)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """The values; null where no row was chosen."""
        if not self._is_fixed:
            return self._values[0].take(slots)
        valid, known = self._seen.raw(slots), valid_of(self._values[0], slots)
        valid = valid if known is None else valid & known
        words = [column.raw(slots) for column in self._values]
        return value_array(words, None if valid.all() else valid, self._type)

    def _chosen(self, slots: Slots, by: pa.Array | None, mask: Mask) -> NDArray[np.uint8]:
        chosen = np.zeros(len(slots), dtype=np.uint8)
        kind, seen = self._aggregate.kind, self._seen.pages
        if self._by is None or by is None:
            (choose.choose_first if kind is AggregateKind.FIRST else choose.choose_last)(seen, slots, mask, chosen)
        else:
            greatest = kind in (AggregateKind.LAST, AggregateKind.ARG_MAX)
            ties = kind is AggregateKind.LAST
            choose.choose_extreme(seen, self._by.pages, slots, fixed_values(by), mask, chosen, greatest, ties)
        return chosen

    def _comparable(self, column: pa.Array) -> pa.Array:
        """A column in the type in which it is compared."""
        return column if column.type == self._by_type else column.cast(self._by_type)

    def _put(self, slots: Slots, values: pa.Array, chosen: NDArray[np.uint8]) -> None:
        """Store values of any width: of several chosen rows of a slot the last one."""
        rows = np.flatnonzero(chosen)
        if len(rows):
            codes, distinct = grouped(slots[rows])
            last = np.empty(len(distinct), dtype=np.int64)
            last[codes] = rows
            self._values[0].put(distinct, values.take(pa.array(last)))

    def _store(self, slots: Slots, words: Sequence[NDArray[Any]], valid: Mask, chosen: NDArray[np.uint8]) -> None:
        first = self._values[0]
        if len(valid) or len(first.valid_pages):
            valid_pages = first.track_nulls()
            choose.store_chosen(valid_pages, slots, valid if len(valid) else np.ones(len(slots), np.uint8), chosen)
        for column, values in zip(self._values, words, strict=True):
            choose.store_chosen(column.pages, slots, values, chosen)
