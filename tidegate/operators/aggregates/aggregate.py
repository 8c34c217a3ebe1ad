"""`Aggregate` describes a value to compute for each key.

Users create one with `tg.count`, `tg.sum` and so on. `aggregate_state.py` defines the stored columns, and accumulators
compute the result. Where Spark and Polars differ, the result is Spark's (`docs/aggregates.md`). Rules:

- Nulls are skipped, and so are rows for which `where` is not true. Without values the result is null, except for
  counts.
- A sum of integers is int64, and a sum of decimals has ten more digits. An overflow is an error. A sum of floats is
  float64.
- A mean is float64. A mean of integers is an exact sum that is divided once. A mean of decimals is a decimal.
- Min and max keep the type of the column. NaN is greater than any number.
- First and last take a row as it is, including a null, unless they skip nulls.
- A `tg.udaf` function gets all rows for which `where` is true, with their nulls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.operators.aggregates import aggregate_state
from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction, check_function
from tidegate.operators.aggregates.aggregate_state import CHOICES, AggregateKind
from tidegate.operators.aggregates.column_expressions import ColumnLike, column_like
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import polars as pl

_LIST_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Describes one aggregate of a column, or of rows for `count()`.

    Made by `tg.count`, `tg.sum`, `tg.min`, `tg.max`, `tg.mean` and others.
    """

    kind: AggregateKind
    column: ColumnLike | None = None
    by: ColumnLike | None = None
    """Order column of an aggregate that chooses a row: the row with its least or greatest value is chosen.

    None for arrival order.
    """
    condition: ColumnLike | None = None
    """Name of a boolean column, or None. Rows for which it is false or null do not count."""
    ignore_nulls: bool = False
    """True if an aggregate that chooses a row skips rows whose value is null."""
    retractable: bool = False
    """True for a sum of values that may be retracted.

    Its state then also counts the values, so that the sum becomes null when the last value is retracted.
    """
    limit: int | None = None
    """Greatest number of values in a list of `collect_list`."""
    function: BatchAggregateFunction | None = None
    """The `BatchAggregateFunction` object of `tg.udaf`, or None."""
    more: tuple[ColumnLike, ...] = ()
    """The second and later input columns of a `tg.udaf`."""

    def __post_init__(self) -> None:
        word = self.kind.value
        if self.column is None and self.kind not in (AggregateKind.COUNT, AggregateKind.USER):
            raise ConfigurationError(f'{word} needs a column: name the column that it aggregates, as in {word}("x")')
        for name in ("column", "by", "condition"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, column_like(getattr(self, name), word))
        if self.by is None and self.kind in (AggregateKind.ARG_MIN, AggregateKind.ARG_MAX):
            raise ConfigurationError(f'{word} needs a column to compare: name it with by=, as in {word}("x", by="y")')
        if (self.by is not None or self.ignore_nulls) and self.kind not in CHOICES:
            raise ConfigurationError(
                f"{word} does not choose a row, so it takes neither by= nor ignore_nulls=; remove them"
            )

    def __str__(self) -> str:
        said = [] if self.function is None else [str(self.function)]
        said += [repr(column) for column in self.inputs]
        said += [f"by={self.by!r}"] if self.by is not None else []
        said += [f"limit={self.limit}"] if self.limit is not None else []
        condition = "" if self.condition is None else f".where({self.condition!r})"
        return f"{self.kind.value}({', '.join(said)}){condition}"

    def where(self, condition: pl.Expr | str) -> Aggregate:
        """Returns this aggregate restricted to rows for which a condition is true.

        `condition` is a polars expression or the name of a boolean column. Rows for which it is false or null are
        skipped: `tg.count().where(pl.col("delay") > 60)`.
        """
        if self.condition is not None:
            raise ConfigurationError(f"{self} already has a condition; combine both: where((a) & (b))")
        return replace(self, condition=column_like(condition, f"{self}.where"))

    @property
    def inputs(self) -> tuple[ColumnLike, ...]:
        """Returns the columns with the values that are aggregated. Empty for `count()`, which counts rows."""
        return () if self.column is None else (self.column, *self.more)

    @property
    def columns(self) -> tuple[ColumnLike, ...]:
        """Returns all columns that the aggregate reads: its inputs, the order column and the condition."""
        return tuple(column for column in (*self.inputs, self.by, self.condition) if column is not None)

    def over(self, plain: Callable[[ColumnLike], ColumnLike]) -> Aggregate:
        """Returns this aggregate with each column or expression `c` replaced by `plain(c)`, for example by a column
        name.
        """
        column, by, condition = (
            None if each is None else plain(each) for each in (self.column, self.by, self.condition)
        )
        return replace(self, column=column, by=by, condition=condition, more=tuple(map(plain, self.more)))

    def state_fields(self, name: str, input_schema: pa.Schema) -> tuple[pa.Field, ...]:
        """Returns the state columns of the aggregate, if its output column is called `name`.

        Raises ConfigurationError if a column is missing, or if the aggregate does not support its type.
        """
        self.validate(input_schema)
        return aggregate_state.state_fields(self, name, input_schema)

    def output_type(self, input_schema: pa.Schema) -> pa.DataType:
        """Returns the type of the result.

        Raises ConfigurationError if a column is missing, or if its type is not supported.
        """
        return aggregate_state.result_type(self, self.state_fields("", input_schema))

    def validate(self, input_schema: pa.Schema) -> None:
        """Raises ConfigurationError if a column is missing, or if the aggregate does not support the type of a
        column.
        """
        aggregate_state.validate(self, input_schema)


def count(column: str | pl.Expr | None = None) -> Aggregate:
    """Counts rows, or the values of a column (or expression) that are not null. The result is int64 and never null."""
    return _of(AggregateKind.COUNT, column)


def sum(column: str | pl.Expr) -> Aggregate:
    """Sum of a column: int64 for integers and booleans, float64 for floats, a decimal for decimals, a duration.

    An overflow is an error.
    """
    return _of(AggregateKind.SUM, column)


def min(column: str | pl.Expr) -> Aggregate:
    """Least value of a column, in the column's type."""
    return _of(AggregateKind.MIN, column)


def max(column: str | pl.Expr) -> Aggregate:
    """Greatest value of a column, in the column's type; NaN is greater than any number."""
    return _of(AggregateKind.MAX, column)


def mean(column: str | pl.Expr) -> Aggregate:
    """Mean of a column: float64. For decimals, a decimal with four more digits after the point. True counts as 1."""
    return _of(AggregateKind.MEAN, column)


def var_pop(column: str | pl.Expr) -> Aggregate:
    """Population variance of a column of numbers, as float64: the sum of the squared differences from the mean, divided
    by the number of values. Null without values.
    """
    return _of(AggregateKind.VAR_POP, column)


def var_samp(column: str | pl.Expr) -> Aggregate:
    """Sample variance of a column of numbers, as float64: the sum of the squared differences from the mean, divided by
    the number of values less one. Null for fewer than two values.
    """
    return _of(AggregateKind.VAR_SAMP, column)


def stddev_pop(column: str | pl.Expr) -> Aggregate:
    """Population standard deviation: the square root of `var_pop`."""
    return _of(AggregateKind.STDDEV_POP, column)


def stddev_samp(column: str | pl.Expr) -> Aggregate:
    """Sample standard deviation: the square root of `var_samp`."""
    return _of(AggregateKind.STDDEV_SAMP, column)


def bool_and(column: str | pl.Expr) -> Aggregate:
    """Returns True if a boolean column (or expression) is true in all rows in which it is not null."""
    return _of(AggregateKind.BOOL_AND, column)


def bool_or(column: str | pl.Expr) -> Aggregate:
    """Returns True if a boolean column (or expression) is true in any row in which it is not null."""
    return _of(AggregateKind.BOOL_OR, column)


def first(column: str | pl.Expr, by: str | pl.Expr | None = None, *, ignore_nulls: bool = False) -> Aggregate:
    """Value of a column in the first row: the first to arrive, or the row with the least value in the column `by`.

    Of rows that are equal in `by`, the first to arrive is used. Rows with a null in `by` are ignored. The value may be
    null, unless `ignore_nulls` skips such rows. The order of arrival is the same after a replay only if one split has
    all rows of a key. Pass `by` for a result that does not depend on the order of arrival.
    """
    return _of(AggregateKind.FIRST, column, by, ignore_nulls)


def last(column: str | pl.Expr, by: str | pl.Expr | None = None, *, ignore_nulls: bool = False) -> Aggregate:
    """Value of a column in the last row: the last to arrive, or the row with the greatest value in the column `by`.

    Of rows that are equal in `by`, the last to arrive is used. Rows with a null in `by` are ignored. The value may be
    null, unless `ignore_nulls` skips such rows. Without `by` the result depends on the order of arrival, as described
    at `first`.
    """
    return _of(AggregateKind.LAST, column, by, ignore_nulls)


def arg_min(column: str | pl.Expr, by: str | pl.Expr) -> Aggregate:
    """Value of a column in the row with the least value in the column `by` (Spark's `min_by`). Among equal rows the
    first to arrive is used.
    """
    return _of(AggregateKind.ARG_MIN, column, by)


def arg_max(column: str | pl.Expr, by: str | pl.Expr) -> Aggregate:
    """Value of a column in the row with the greatest value in the column `by` (Spark's `max_by`). Among equal rows the
    first to arrive is used.
    """
    return _of(AggregateKind.ARG_MAX, column, by)


def count_distinct(column: str | pl.Expr) -> Aggregate:
    """Exact number of distinct values of a column, without nulls. All NaN are one value, and so are 0.0 and -0.0.

    The state stores each distinct value of each key (in windows, of each key and window), so it grows with the number
    of distinct values.
    """
    return _of(AggregateKind.COUNT_DISTINCT, column)


def collect_list(column: str | pl.Expr, *, limit: int) -> Aggregate:
    """Collects the values of a column, without nulls, into a list in the order of arrival.

    The list keeps the first `limit` values and is empty without values. Each batch that adds to a list rewrites the
    whole list, so keep the limit small.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit <= _LIST_MAX:
        raise ConfigurationError(
            f"collect_list(limit={limit!r}): give the largest number of values in a list, from 1 to {_LIST_MAX}"
        )
    return replace(_of(AggregateKind.COLLECT_LIST, column), limit=limit)


def udaf(function: BatchAggregateFunction, *columns: str | pl.Expr) -> Aggregate:
    """Returns an aggregate that a function of the program computes from columns: `tg.udaf(GeometricMean(), "x")`.

    `function` is an object of a class that derives from `tg.BatchAggregateFunction`. `columns` are its inputs.
    """
    check_function(function)
    inputs = [column_like(column, f"udaf({function})") for column in columns]
    return Aggregate(AggregateKind.USER, inputs[0] if inputs else None, function=function, more=tuple(inputs[1:]))


def _of(
    kind: AggregateKind,
    column: str | pl.Expr | None,
    by: str | pl.Expr | None = None,
    ignore_nulls: bool = False,
) -> Aggregate:
    columns = [None if given is None else column_like(given, kind.value) for given in (column, by)]
    return Aggregate(kind, columns[0], columns[1], None, ignore_nulls)
