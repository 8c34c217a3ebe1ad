"""`Aggregate`: what a program wants to know about each key, as a value.

Users make one with `tg.count`, `tg.sum`, …; `accumulators.py` computes it. Rules (SQL's):

- Nulls are skipped. Sum, min, max and mean of nothing are null. `count()` counts rows, `count("x")` values.
- A sum of integers is int64, and an overflow is an error. A sum of floats is float64.
- A mean is float64. That of integers is an exact sum, divided once.
- Min and max keep the column's type. NaN is greater than any number.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pyarrow as pa

from tidegate.actors.kernels.fixed_width import storage_dtype
from tidegate.storage.codec import wire
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.dictionaries import decoded_type


@wire
class AggregateKind(enum.Enum):
    """What is computed."""

    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"


@wire
@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregate of a column; a count may have none. Made by `count`, `sum`, `min`, `max` and `mean`."""

    kind: AggregateKind
    column: str | None = None

    def __post_init__(self) -> None:
        if self.column is None and self.kind is not AggregateKind.COUNT:
            raise ConfigurationError(f'{self.kind.value} needs a column: {self.kind.value}("x")')
        if self.column is not None and not isinstance(self.column, str):
            raise ConfigurationError(f"{self.kind.value} takes the name of a column, not {type(self.column).__name__}")

    def __str__(self) -> str:
        return f"{self.kind.value}({'' if self.column is None else repr(self.column)})"

    def state_fields(self, name: str, input_schema: pa.Schema) -> tuple[pa.Field, ...]:
        """Columns that hold the accumulators in a checkpoint, for an aggregate that is called `name`.

        Raises ConfigurationError if the column is missing or of a type that cannot be aggregated so.
        """
        self.validate(input_schema)
        if self.kind is AggregateKind.COUNT:
            return (pa.field(name, pa.int64()),)
        data_type = decoded_type(input_schema.field(self.column).type)
        if self.kind in (AggregateKind.MIN, AggregateKind.MAX):
            return (pa.field(name, data_type),)
        total = pa.int64() if pa.types.is_integer(data_type) else pa.float64()
        if self.kind is AggregateKind.SUM:
            return (pa.field(name, total),)
        return (pa.field(f"{name}.sum", total), pa.field(f"{name}.count", pa.int64()))

    def output_type(self, input_schema: pa.Schema) -> pa.DataType:
        """Type of the result. Raises ConfigurationError as `state_fields` does."""
        if self.kind is AggregateKind.MEAN:
            self.validate(input_schema)
            return pa.float64()
        return self.state_fields("", input_schema)[0].type

    def validate(self, input_schema: pa.Schema) -> None:
        """Raise ConfigurationError if the column is missing or of a type that cannot be aggregated so."""
        if self.column is None:
            return
        position = input_schema.get_field_index(self.column)
        if position < 0:
            raise ConfigurationError(
                f"{self}: there is no column {self.column!r} (or two of them) in {input_schema.names}"
            )
        data_type = decoded_type(input_schema.field(position).type)
        if self.kind is AggregateKind.COUNT:
            return
        if pa.types.is_null(data_type):
            raise ConfigurationError(
                f"{self}: column {self.column!r} has the type null, because all its first values were null; "
                f"pass schema= to the function that makes it"
            )
        if self.kind in (AggregateKind.MIN, AggregateKind.MAX):
            if storage_dtype(data_type) is None or pa.types.is_float16(data_type):
                raise ConfigurationError(
                    f"{self}: column {self.column!r} is {data_type}; {self.kind.value} takes integers, "
                    f"float32, float64, dates, times and timestamps (convert it with with_columns first)"
                )
        elif not (pa.types.is_integer(data_type) or pa.types.is_floating(data_type)):
            raise ConfigurationError(
                f"{self}: column {self.column!r} is {data_type}; {self.kind.value} takes integers and floats "
                f"(convert it with with_columns first)"
            )


def count(column: str | None = None) -> Aggregate:
    """Number of rows, or of values that are not null in a column. int64, never null."""
    return Aggregate(AggregateKind.COUNT, column)


def sum(column: str) -> Aggregate:
    """Sum of a column: int64 for integers (overflow is an error), float64 for floats."""
    return Aggregate(AggregateKind.SUM, column)


def min(column: str) -> Aggregate:
    """Least value of a column, in the column's type."""
    return Aggregate(AggregateKind.MIN, column)


def max(column: str) -> Aggregate:
    """Greatest value of a column, in the column's type; NaN is greater than any number."""
    return Aggregate(AggregateKind.MAX, column)


def mean(column: str) -> Aggregate:
    """Mean of a column, float64."""
    return Aggregate(AggregateKind.MEAN, column)
