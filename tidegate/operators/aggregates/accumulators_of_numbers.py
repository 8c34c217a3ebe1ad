"""Accumulators that calculate: sums, means, variances and standard deviations. `make_accumulator` (`accumulators.py`)
creates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_function import (
    Mask,
    Slots,
    input_column,
    mark,
    row_mask,
    running_valid,
    valid_of,
)
from tidegate.operators.aggregates.aggregate_state import (
    AggregateKind,
    decimal_of,
    result_type,
    sum_digits,
    value_words,
)
from tidegate.state.common.backend import ValueColumn
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.accumulate import decimals_of
from tidegate.state.kernels.columns import NO_MASK, array_of, fixed_values, valid_mask


class Sum:
    """Accumulator of `sum`: one state column, or two for the high and low 64-bit words of a decimal."""

    def __init__(self, aggregate: Aggregate, fields: Sequence[pa.Field], columns: Sequence[ValueColumn]) -> None:
        self._aggregate = aggregate
        self._columns = columns
        self._type = fields[0].type
        self._decimal = decimal_of(fields[0].name)

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Adds the values of a batch to the sums of their slots."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        mark(self._columns[0], slots, mask)
        self.add(slots, values, mask)

    def merge(self, slots: Slots, parts: Sequence[pa.Array]) -> None:
        """Adds the partial sums that other accumulators stored (`parts`) to the sums of the slots."""
        mask = valid_mask(parts[0])
        mark(self._columns[0], slots, mask)
        self.add_parts(slots, parts, mask)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the sum of each slot in `slots`. Null where no value was added."""
        return self.as_array(self.words(slots), valid_of(self._columns[0], slots))

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Adds the values of a batch. Returns, for each row, the sum of its slot right after the row."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        valid = running_valid(self._columns[0], slots, mask)
        return self.as_array(self.running_words(slots, values, mask), valid)

    def words(self, slots: NDArray[Any]) -> list[NDArray[Any]]:
        """Returns the sums of slots in stored form: one array, or two arrays of 64-bit words for decimals.

        The entries of slots without a value are undefined.
        """
        return [column.raw(slots) for column in self._columns]

    def as_array(self, words: Sequence[NDArray[Any]], valid: Mask | None) -> pa.Array:
        """Returns sums in stored form (see `words`) as an Arrow array. Entries with `valid` 0 are null."""
        if self._decimal is None:
            return array_of(words[0], valid, self._type)
        data_type = pa.decimal128(sum_digits(self._decimal), self._decimal.scale)
        return decimals_of(words[0], words[1], valid, data_type)

    def running_words(self, slots: Slots, values: pa.Array, mask: Mask) -> list[NDArray[Any]]:
        """Adds values to the sums of their slots. Returns, for each row, the sum right after the row, in stored form
        (see `words`).

        `mask` selects the rows to add. Raises OverflowError if a sum leaves the range of its type.
        """
        after = [np.empty(len(slots), dtype=column.dtype) for column in self._columns]
        if self._decimal is not None:
            highs, lows = value_words(values)
            pages = [column.pages for column in self._columns]
            digits = sum_digits(self._decimal)
            if accumulate.sum_decimals(pages[0], pages[1], slots, highs, lows, mask, digits, after[0], after[1]):
                raise self._too_many_digits()
        elif self._columns[0].dtype == np.float64:
            floats = fixed_values(values.cast(pa.float64(), safe=False))
            accumulate.sum_float64(self._columns[0].pages, slots, floats, mask, after[0])
        else:
            integers = fixed_values(_signed(values, self._aggregate.column))
            if accumulate.sum_int64(self._columns[0].pages, slots, integers, mask, after[0]):
                raise self._too_great()
        return after

    def add(self, slots: Slots, values: pa.Array, mask: Mask) -> None:
        """Adds the values that `mask` selects to the sums of their slots.

        Raises OverflowError if a sum leaves its range.
        """
        if self._decimal is not None:
            self._add_words(slots, value_words(values), mask)
        elif self._columns[0].dtype == np.float64:
            floats = values.cast(pa.float64(), safe=False)
            accumulate.sum_float64(self._columns[0].pages, slots, fixed_values(floats), mask)
        else:
            self._add_integers(slots, values, mask)

    def take_out(self, slots: Slots, values: pa.Array, mask: Mask) -> None:
        """Subtracts the values that `mask` selects from the sums of their slots.

        Raises OverflowError if a sum leaves its range.
        """
        values = _signed(values, self._aggregate.column)
        if self._decimal is None and self._columns[0].dtype != np.float64:
            values = self._take_out_least(slots, values, mask)
        self.add(slots, pc.negate_checked(values), mask)

    def add_parts(self, slots: Slots, parts: Sequence[pa.Array], mask: Mask) -> None:
        """Adds partial sums in stored form (`parts`) to the sums of their slots.

        Raises OverflowError if a sum leaves its range.
        """
        if self._decimal is None:
            self.add(slots, parts[0], mask)
        else:
            self._add_words(slots, [fixed_values(part) for part in parts], mask)

    def _take_out_least(self, slots: Slots, values: pa.Array, mask: Mask) -> pa.Array:
        """Subtracts half of each value that is the smallest int64, because its negative would overflow.

        Returns the amounts that the caller still has to subtract.
        """
        words = fixed_values(values)
        least = words == np.iinfo(np.int64).min
        if not least.any():
            return values
        half = words // 2
        self.add(slots, pa.array(np.where(least, -half, 0)).view(values.type), mask)
        return pa.array(np.where(least, half, words)).view(values.type)

    def _add_integers(self, slots: Slots, values: pa.Array, mask: Mask) -> None:
        values = _signed(values, self._aggregate.column)
        if accumulate.sum_int64(self._columns[0].pages, slots, fixed_values(values), mask):
            raise self._too_great()

    def _add_words(self, slots: Slots, words: Sequence[NDArray[Any]], mask: Mask) -> None:
        assert self._decimal is not None, "a sum of other numbers"
        digits = sum_digits(self._decimal)
        highs, lows = self._columns
        if accumulate.sum_decimals(highs.pages, lows.pages, slots, words[0], words[1], mask, digits):
            raise self._too_many_digits()

    def _too_great(self) -> OverflowError:
        name = self._aggregate.column
        return OverflowError(f"the sum of column {name!r} does not fit into int64; cast the column to float64 first")

    def _too_many_digits(self) -> OverflowError:
        assert self._decimal is not None, "a sum of other numbers"
        return OverflowError(
            f"the sum of column {self._aggregate.column!r} has more than {sum_digits(self._decimal)} digits; cast the "
            "column to float64, or to a decimal with fewer digits behind the point, first"
        )


class Mean:
    """Accumulator of `mean`: stores the sum and the number of the values of each slot."""

    def __init__(self, aggregate: Aggregate, fields: Sequence[pa.Field], sums: Sum, counts: ValueColumn) -> None:
        self._aggregate = aggregate
        self._type = result_type(aggregate, fields)
        self._sums = sums
        self._counts = counts

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Adds the values of a batch to the sums and the counts of their slots."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        self._sums.add(slots, values, mask)
        accumulate.count(self._counts.pages, slots, mask)

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Adds the values of a batch. Returns, for each row, the mean of its slot right after the row."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        sums = self._sums.running_words(slots, values, mask)
        counts = np.empty(len(slots), dtype=np.int64)
        accumulate.count(self._counts.pages, slots, mask, counts)
        return self._of(sums, counts)

    def retract(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Subtracts the values of retracted rows from the sums and the counts of their slots."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        self._sums.take_out(slots, values, mask)
        accumulate.discount(self._counts.pages, slots, mask)

    def merge(self, slots: Slots, parts: Sequence[pa.Array]) -> None:
        """Adds the sums and counts that other accumulators stored (`parts`) to the slots."""
        self._sums.add_parts(slots, parts[:-1], NO_MASK)
        accumulate.sum_int64(self._counts.pages, slots, fixed_values(parts[-1]), NO_MASK)

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the mean of each slot in `slots`. Null where there are no values."""
        return self._of(self._sums.words(slots), self._counts.raw(slots))

    def _of(self, sums: Sequence[NDArray[Any]], counts: NDArray[np.int64]) -> pa.Array:
        """Returns the means for sums in stored form (`Sum.words`) and `counts`, the number of values in each sum."""
        valid = _any_of(counts)
        if not pa.types.is_decimal(self._type):
            return array_of(sums[0] / np.maximum(counts, 1), valid, pa.float64())
        return self._decimal_means(self._sums.as_array(sums, valid), counts)

    def _decimal_means(self, totals: pa.Array, counts: NDArray[np.int64]) -> pa.Array:
        """Returns exact means of decimals. Half of the last digit is rounded away from zero, as in Spark."""
        numbers = pa.array(np.maximum(counts, 1)).cast(pa.decimal256(19, 0))
        means = pc.divide(totals.cast(pa.decimal256(totals.type.precision, totals.type.scale)), numbers)
        try:
            return pc.round(means, self._type.scale, "half_towards_infinity").cast(self._type)
        except pa.ArrowInvalid as error:
            raise OverflowError(
                f"the mean of column {self._aggregate.column!r} does not fit into {self._type}, which has four digits "
                "more behind the point; cast the column to float64, or to a decimal with fewer digits behind the "
                "point, first"
            ) from error


class CountedSum(Mean):
    """Accumulator of a `sum` that supports retractions: also counts the values of each slot, and is null when the count
    is 0.
    """

    def _of(self, sums: Sequence[NDArray[Any]], counts: NDArray[np.int64]) -> pa.Array:
        """Returns the sums as an Arrow array, null where the number of values is 0."""
        return self._sums.as_array(sums, _any_of(counts))


class Spread:
    """Accumulator of variances and standard deviations.

    Each slot stores the number of values, their mean, and the sum of squared differences from the mean.
    """

    def __init__(self, aggregate: Aggregate, columns: Sequence[ValueColumn]) -> None:
        self._aggregate = aggregate
        self._columns = columns

    def update(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Adds the values of a batch to the statistics of their slots."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        accumulate.add_moments(*self._pages(), slots, fixed_values(values.cast(pa.float64(), safe=False)), mask)

    def running(self, batch: pa.RecordBatch, slots: Slots) -> pa.Array:
        """Adds the values of a batch.

        Returns, for each row, the variance or deviation of its slot right after the row.
        """
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        numbers = fixed_values(values.cast(pa.float64(), safe=False))
        counts, squares = np.empty(len(slots), dtype=np.int64), np.empty(len(slots), dtype=np.float64)
        accumulate.add_moments(*self._pages(), slots, numbers, mask, counts, squares)
        return self._of(counts, squares)

    def retract(self, batch: pa.RecordBatch, slots: Slots) -> None:
        """Removes the values of retracted rows from the statistics of their slots."""
        values = input_column(batch, self._aggregate.column)
        mask = row_mask(batch, self._aggregate.condition, values)
        accumulate.remove_moments(*self._pages(), slots, fixed_values(values.cast(pa.float64(), safe=False)), mask)

    def merge(self, slots: Slots, parts: Sequence[pa.Array]) -> None:
        """Merges the counts, means and squared differences that other accumulators stored (`parts`) into the slots."""
        accumulate.merge_moments(*self._pages(), slots, *(fixed_values(part) for part in parts))

    def results(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the variance of each slot in `slots`, or its square root for standard deviations."""
        counts, _, squares = (column.raw(slots) for column in self._columns)
        return self._of(counts, squares)

    def _of(self, counts: NDArray[np.int64], squares: NDArray[np.float64]) -> pa.Array:
        kind = self._aggregate.kind
        lacking = 0 if kind in (AggregateKind.VAR_POP, AggregateKind.STDDEV_POP) else 1
        has_result = (counts > lacking).astype(np.uint8)
        spreads = squares / np.maximum(counts - lacking, 1)
        if kind in (AggregateKind.STDDEV_POP, AggregateKind.STDDEV_SAMP):
            spreads = np.sqrt(spreads)
        return array_of(spreads, None if has_result.all() else has_result, pa.float64())

    def _pages(self) -> tuple[NDArray[np.uintp], NDArray[np.uintp], NDArray[np.uintp]]:
        counts, means, squares = self._columns
        return counts.pages, means.pages, squares.pages


def _any_of(counts: NDArray[np.int64]) -> Mask | None:
    """Returns a mask with 1 for each count of at least 1, else 0. None if all counts are at least 1."""
    has_value = (counts > 0).astype(np.uint8)
    return None if has_value.all() else has_value


def _signed(values: pa.Array, name: object) -> pa.Array:
    """Returns integers and booleans as int64, and values of other types unchanged.

    `name` is the column in the error. Raises OverflowError for an integer that does not fit into int64.
    """
    if pa.types.is_int64(values.type) or not (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        return values
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise OverflowError(
            f"column {name!r} has a value over 2**63 - 1, and sums of integers are int64; cast it to float64 first"
        ) from error
