"""Accumulators keep the state of aggregates in the columns of a `VectorTable` of any backend. Each key has one slot,
which is the index of its values in these columns.

`KeyedAggregate` and windows use them. `make_accumulator` chooses the class, and `value_specs` lists the columns and the
initial values of a new slot. An accumulator adds a batch to the slots of its rows, merges the contents of other slots
into slots, and returns the results of slots. A column starts to track which slots have a value when the first null
arrives, so nulls cost nothing before.

Merging gives the same result as adding the rows of both sides in one table, except for the order in which floats are
added. Slices therefore combine into windows, sessions grow together, and partial results of several subtasks become
one.

- `Extreme` (`min`, `max`) and `Choice` (`first`, `last`, `arg_min`, `arg_max`) keep a value of the input unchanged.
- Extremes of strings and lists (`TextExtreme`, `Collected`) have no fixed width, so their columns are read and written
  as Arrow arrays. A batch is first reduced to one entry for each slot. Each slot is then read once, and written if it
  changes.
- Sums and means are in `accumulators_of_numbers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.aggregates.accumulators_of_numbers import CountedSum, Mean, Spread, Sum
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_function import (
    Mask,
    Slots,
    UserAggregate,
    counted_so_far,
    grouped,
    input_column,
    mark,
    row_mask,
    rows_in,
    running_valid,
    valid_of,
)
from tidegate.operators.aggregates.aggregate_state import (
    CHOICES,
    EXTREMES,
    SPREADS,
    AggregateKind,
    result_type,
    value_array,
    value_words,
)
from tidegate.state.common.backend import ValueColumn, ValueSpec
from tidegate.state.kernels import accumulate, choose
from tidegate.state.kernels.choose import choose_strings, newest_chosen
from tidegate.state.kernels.columns import NO_MASK, Strings, fixed_values, key_form, storage_dtype, valid_mask


class Accumulator(Protocol):
    """Computes one aggregate and stores its state in table columns, one slot for each key."""

    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        """Adds each row i of a batch to the slot `slots[i]`. Must be called between `upsert` and `done` of the table.

        Raises OverflowError if a sum leaves the range of its type.
        """
        ...

    def merge(self, slots: NDArray[np.int32], parts: Sequence[pa.Array]) -> None:
        """Merges partial aggregates into the slots: entry i of each array in `parts` into slot `slots[i]`.

        `parts` are the stored columns of the partial aggregates, in the order of `state_fields`. They come from this
        table, from another table or from a checkpoint. A slot may appear several times. Must be called between `upsert`
        and `done` of the table. Raises OverflowError if a sum leaves the range of its type.
        """
        ...

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the current result of the aggregate in each slot of `slots`."""
        ...

    def running(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> pa.Array:
        """Adds the rows of a batch to their slots. Returns, for each row, the result of its slot right after the row
        was added.

        The results equal the results of `update` and `results` for batches of one row each. Raises OverflowError if a
        sum leaves the range of its type.
        """
        ...


class ColumnsByName(Protocol):
    """Gives access to the state columns of accumulators by name. A `VectorTable` is one implementation."""

    def column(self, name: str) -> ValueColumn:
        """Returns the state column called `name`. Each call returns the same object."""
        ...


def value_specs(aggregate: Aggregate, fields: Sequence[pa.Field]) -> list[ValueSpec]:
    """Returns the specs (name, type, initial value of a new slot) of an aggregate's state columns.

    `fields` are the columns that `Aggregate.state_fields` returned.
    """
    if aggregate.kind not in EXTREMES or storage_dtype(fields[0].type) is None:
        return [ValueSpec(field.name, field.type, 0) for field in fields]
    greatest = aggregate.kind in (AggregateKind.MIN, AggregateKind.BOOL_AND)
    return [ValueSpec(field.name, field.type, _bound(field.type, greatest)) for field in fields]


def make_accumulator(aggregate: Aggregate, fields: Sequence[pa.Field], table: ColumnsByName) -> Accumulator:
    """Returns the accumulator that computes `aggregate` in the state columns of `table` that `fields` names."""
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
    if kind is AggregateKind.SUM and not aggregate.retractable:
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

    def retract(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
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


class Extreme:
    """Accumulator of `min` and `max` of fixed-width values: one state column, or two for the high and low 64-bit words
    of a decimal.
    """

    def __init__(self, aggregate: Aggregate, fields: Sequence[pa.Field], columns: Sequence[ValueColumn]) -> None:
        self._aggregate = aggregate
        self._columns = columns
        self._type = result_type(aggregate, fields)
        self._least = aggregate.kind in (AggregateKind.MIN, AggregateKind.BOOL_AND)

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Updates the minimum or maximum of each slot with the values of a batch."""
        values = input_column(batch, self._aggregate.column)
        self._add_rows(slots, value_words(values), row_mask(batch, self._aggregate.condition, values))

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Updates the minimum or maximum of each slot.

        Returns, for each row, the extreme of its slot right after the row.
        """
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
        """Merges the extremes that other accumulators stored (`parts`) into the slots."""
        self._add_rows(slots, [fixed_values(part) for part in parts], valid_mask(parts[0]))

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the minimum or maximum stored in each slot of `slots`."""
        words = [column.raw(slots) for column in self._columns]
        return value_array(words, valid_of(self._columns[0], slots), self._type)

    def _add_rows(self, slots: Slots, words: Sequence[NDArray[Any]], mask: Mask) -> None:
        mark(self._columns[0], slots, mask)
        pages = [column.pages for column in self._columns]
        if len(pages) == 2:
            of_decimals = accumulate.least_decimals if self._least else accumulate.greatest_decimals
            of_decimals(pages[0], pages[1], slots, words[0], words[1], mask)
        else:
            (accumulate.minimum if self._least else accumulate.maximum)(pages[0], slots, words[0], mask)


class Choice:
    """Accumulator of `first`, `last`, `arg_min` and `arg_max`.

    Each slot stores the value of the chosen row, the row's value in the order column, and whether a row was chosen.
    """

    def __init__(self, aggregate: Aggregate, fields: Sequence[pa.Field], columns: Sequence[ValueColumn]) -> None:
        self._aggregate = aggregate
        self._type = result_type(aggregate, fields)
        self._seen = columns[-1]
        self._by = None if aggregate.by is None else columns[-2]
        self._by_type = None if aggregate.by is None else fields[-2].type
        self._values = columns[: -1 if self._by is None else -2]
        self._is_fixed = storage_dtype(fields[0].type) is not None

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Chooses, for each slot, between the row chosen so far and the rows of a batch."""
        self._add_rows(batch, slots)

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Updates the chosen rows with a batch.

        Returns, for each row, the chosen value of its slot right after the row.
        """
        groups, distinct = grouped(slots)
        held = self.results(distinct)
        values, chosen = self._add_rows(batch, slots)
        newest, after = np.full(len(distinct), -1, dtype=np.int64), np.empty(len(slots), dtype=np.int64)
        newest_chosen(groups, chosen, newest, after)
        either = pa.concat_arrays([held, values.cast(held.type)])
        return either.take(pa.array(np.where(after < 0, groups, after + len(held))))

    def _add_rows(self, batch: pa.RecordBatch, slots: Slots) -> tuple[pa.Array, NDArray[np.uint8]]:
        """Stores the rows of a batch that are chosen.

        Returns the values of all rows of the batch, and a mask with 1 for each row that was the chosen one when it
        arrived.
        """
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
        """Chooses between the rows stored in the slots and the rows that other accumulators chose (`parts`), which are
        treated as later rows.
        """
        by = None if self._by is None else parts[-2]
        chosen = self._chosen(slots, by, fixed_values(parts[-1]))
        if self._is_fixed:
            words = [fixed_values(part) for part in parts[: len(self._values)]]
            self._store(slots, words, valid_mask(parts[0]), chosen)
        else:
            self._put(slots, parts[0], chosen)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the value that first, last, min_by or max_by has chosen in each slot of `slots`. Null without one."""
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
        """Returns the order column, cast to the type in which its values are compared."""
        return column if column.type == self._by_type else column.cast(self._by_type)

    def _put(self, slots: Slots, values: pa.Array, chosen: NDArray[np.uint8]) -> None:
        """Stores values of variable width in their slots, but only the rows that `chosen` selects. If a slot has
        several, the last one is stored.
        """
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


class TextExtreme:
    """Accumulator of `min` and `max` of strings and binary values, compared byte by byte."""

    def __init__(self, aggregate: Aggregate, column: ValueColumn) -> None:
        self._aggregate = aggregate
        self._column = column
        self._greatest = aggregate.kind is AggregateKind.MAX

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Updates the minimum or maximum of each slot with the values of a batch."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        self._add_rows(slots, values, rows_in(mask, len(slots)))

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Updates the minimum or maximum of each slot.

        Returns, for each row, the extreme of its slot right after the row.
        """
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
        """Merges the extremes that other accumulators stored (`parts`) into the slots."""
        self._add_rows(slots, parts[0], rows_in(valid_mask(parts[0]), len(slots)))

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the minimum or maximum stored in each slot of `slots`."""
        return self._column.take(slots)

    def _add_rows(self, slots: Slots, values: pa.Array, rows: NDArray[np.int64]) -> None:
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
    """Accumulator of `collect_list`: a list of values for each slot, in the order of arrival, up to a limit."""

    def __init__(self, aggregate: Aggregate, column: ValueColumn, data_type: pa.DataType) -> None:
        assert aggregate.limit is not None, "a list without a limit"
        self._aggregate = aggregate
        self._column = column
        self._type = data_type
        self._limit = aggregate.limit

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Appends the values of a batch to the lists of their slots."""
        values = input_column(batch, self._aggregate.column)
        rows = rows_in(row_mask(batch, self._aggregate.condition, values), len(slots))
        self._add(slots[rows], values.take(pa.array(rows)))

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Appends the values of a batch.

        Returns, for each row, the list of its slot right after the row, which is a prefix of the list after the batch.
        """
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
        """Appends the lists that other accumulators stored (`parts`), as if their values had arrived later."""
        self._add(np.repeat(slots, _lengths(parts[0])), parts[0].flatten())

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the list of each slot in `slots`. A slot without values has an empty list."""
        lists = self._column.take(slots)
        return pc.fill_null(lists, pa.scalar([], self._type)) if lists.null_count else lists

    def _add(self, slots: Slots, values: pa.Array) -> None:
        """Appends each value to the list of its slot, and drops values that exceed the limit of the list."""
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
