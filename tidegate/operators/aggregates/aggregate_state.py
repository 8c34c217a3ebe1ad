"""Defines the stored columns of each aggregate: their names, their types, and the result types that follow from them.

The names and types of stored columns describe their contents, because a restore has only the program and these columns,
and no input schema yet. `stored_groups` finds the columns of each aggregate, and `result_type` returns the type of its
results.

Most values are stored as they are, in a column with the name of the aggregate: numbers and times where kernels change
them in place, strings and nested values as Arrow values. Booleans and decimals are converted, and a suffix marks their
columns:

- A boolean is a byte in `_tidegate_x.as_bool`.
- A decimal is the two words of its 128 bits, in `_tidegate_x.decimal(10,2).high` and `_tidegate_x.decimal(10,2).low`.

Combined rows are partial aggregates: one row for each key (and window slice) of a batch. The sender of the batch makes
them before the exchange by key, and the aggregate after the exchange merges them. A batch has either rows or combined
rows, and its columns show which, so a checkpoint that contains rows or combined rows in flight can be restored with any
setting. The columns of combined rows are:

- the key columns and, for event-time windows, the time column, with the values of the first row that was combined;
- a column `_tidegate_combined.<name>` for each stored column of the accumulators;
- the number of rows, `_tidegate_combined`, as the last column.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate_function import SEEN, BatchAggregateFunction
from tidegate.operators.aggregates.column_expressions import ColumnLike
from tidegate.operators.combined_rows import COMBINED, is_combined
from tidegate.state.kernels.accumulate import decimal_words, decimals_of
from tidegate.state.kernels.columns import array_of, fixed_values, plain, storage_dtype
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.column_names import is_reserved, part_name


class AggregateKind(enum.Enum):
    """The kinds of aggregates. The value is the name of the function of `tg` that creates it."""

    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    VAR_POP = "var_pop"
    VAR_SAMP = "var_samp"
    STDDEV_POP = "stddev_pop"
    STDDEV_SAMP = "stddev_samp"
    BOOL_AND = "bool_and"
    BOOL_OR = "bool_or"
    FIRST = "first"
    LAST = "last"
    ARG_MIN = "arg_min"
    ARG_MAX = "arg_max"
    COUNT_DISTINCT = "count_distinct"
    COLLECT_LIST = "collect_list"
    USER = "udaf"


EXTREMES = frozenset({AggregateKind.MIN, AggregateKind.MAX, AggregateKind.BOOL_AND, AggregateKind.BOOL_OR})
"""Kinds that compute the least or the greatest value of a column."""

SPREADS = frozenset(
    {AggregateKind.VAR_POP, AggregateKind.VAR_SAMP, AggregateKind.STDDEV_POP, AggregateKind.STDDEV_SAMP}
)
"""Kinds that compute a variance or a standard deviation."""

CHOICES = frozenset({AggregateKind.FIRST, AggregateKind.LAST, AggregateKind.ARG_MIN, AggregateKind.ARG_MAX})
"""Kinds that choose one row and return a column of it."""

NULL_WITHOUT_VALUES = frozenset({AggregateKind.SUM, *EXTREMES})
"""Kinds for which the first state column is null until the first value arrives."""


Fields = dict[str, tuple[pa.Field, ...]]
"""The state columns of each aggregate, by the name of its output column."""


class Described(Protocol):
    """The attributes of an `Aggregate` that determine its state columns."""

    @property
    def kind(self) -> AggregateKind:
        """Returns the function that the aggregate computes."""
        ...

    @property
    def column(self) -> ColumnLike | None:
        """Returns the input column, or None for `count()`, which counts rows."""
        ...

    @property
    def by(self) -> ColumnLike | None:
        """Order column of an aggregate that chooses a row, or None for arrival order."""
        ...

    @property
    def condition(self) -> ColumnLike | None:
        """Name of the boolean column that selects rows, or None for all rows."""
        ...

    @property
    def retractable(self) -> bool:
        """Returns True for a sum whose values may be retracted."""
        ...

    @property
    def function(self) -> BatchAggregateFunction | None:
        """The `tg.udaf` function that computes the aggregate, or None for built-in kinds."""
        ...

    @property
    def inputs(self) -> tuple[ColumnLike, ...]:
        """Input columns. Only an aggregate with a `tg.udaf` function may have more than one."""
        ...


_CONVERT = "(convert it with with_columns first)"


def state_fields(aggregate: Described, name: str, input_schema: pa.Schema) -> tuple[pa.Field, ...]:
    """Returns the state columns of an aggregate whose output column is `name`.

    The aggregate must have been validated.
    """
    kind = aggregate.kind
    if aggregate.function is not None:
        kept = (pa.field(part_name(name, f".{field.name}"), field.type) for field in aggregate.function.state)
        return (*kept, pa.field(part_name(name, f".{SEEN}"), pa.uint8()))
    data_type = None if aggregate.column is None else _type_of(aggregate.column, input_schema)
    if kind is AggregateKind.COUNT or data_type is None:
        return (pa.field(name, pa.int64()),)
    if kind is AggregateKind.SUM and not aggregate.retractable:
        return _sum_fields(name, data_type)
    if kind in (AggregateKind.SUM, AggregateKind.MEAN):
        return (*_sum_fields(name, data_type, ".sum"), pa.field(part_name(name, ".count"), pa.int64()))
    if kind in SPREADS:
        types = {"count": pa.int64(), "mean": pa.float64(), "m2": pa.float64()}
        return tuple(pa.field(part_name(name, f".{part}"), part_type) for part, part_type in types.items())
    if kind is AggregateKind.COLLECT_LIST:
        return (pa.field(name, pa.list_(kept_type(data_type))),)
    values = value_fields(name, data_type)
    if kind in EXTREMES:
        return values
    by: tuple[pa.Field, ...] = ()
    if aggregate.by is not None:
        by = (pa.field(part_name(name, ".by"), _by_type(_type_of(aggregate.by, input_schema))),)
    return (*values, *by, pa.field(part_name(name, ".seen"), pa.uint8()))


def result_type(aggregate: Described, fields: Sequence[pa.Field]) -> pa.DataType:
    """Returns the result type of an aggregate, given its state columns."""
    kind = aggregate.kind
    if aggregate.function is not None:
        return aggregate.function.output
    if kind in EXTREMES or kind in CHOICES:
        return value_type(fields)
    if kind is AggregateKind.COLLECT_LIST:
        return fields[0].type
    decimal = decimal_of(fields[0].name)
    if kind is AggregateKind.MEAN and decimal is not None:
        return pa.decimal128(min(DIGITS_MAX, decimal.precision + 4), min(DIGITS_MAX, decimal.scale + 4))
    if kind is AggregateKind.SUM and decimal is not None:
        return pa.decimal128(sum_digits(decimal), decimal.scale)
    return fields[0].type if kind in (AggregateKind.COUNT, AggregateKind.SUM) else pa.float64()


def sum_digits(decimal: pa.DataType) -> int:
    """Returns the number of digits of a sum of decimals: ten more than the input, so that 10 billion rows fit."""
    return min(DIGITS_MAX, int(decimal.precision) + 10)


def state_names(aggregate: Described, name: str, suffixes: Sequence[str] = ("",)) -> list[str]:
    """Returns the names of the state columns of the aggregate `name`.

    `suffixes` are the suffixes of the columns that store its value or its sum: two for decimals, else one.
    """
    kind = aggregate.kind
    if aggregate.function is not None:
        return [part_name(name, f".{column}") for column in (*aggregate.function.state.names, SEEN)]
    if kind is AggregateKind.MEAN or aggregate.retractable:
        return [*(part_name(name, f".sum{suffix}") for suffix in suffixes), part_name(name, ".count")]
    if kind in SPREADS:
        return [part_name(name, suffix) for suffix in (".count", ".mean", ".m2")]
    names = [part_name(name, suffix) for suffix in suffixes]
    if kind in CHOICES:
        names += [part_name(name, ".by")] * (aggregate.by is not None) + [part_name(name, ".seen")]
    return names


def state_columns(keys: pa.Schema, fields: Fields) -> list[pa.Field]:
    """Returns the columns of a state table: the key columns, followed by the state columns of each aggregate."""
    return [*keys, *(field for group in fields.values() for field in group)]


def stored_groups(aggregates: Mapping[str, Described], stored: Sequence[pa.Field]) -> Fields | None:
    """Divides the stored columns `stored` into the columns of each aggregate, in order. Returns None if the columns do
    not match the aggregates.
    """
    groups: Fields = {}
    rest = [field.remove_metadata() for field in stored]
    for name, aggregate in aggregates.items():
        for suffixes in _possible_suffixes(rest):
            names = state_names(aggregate, name, suffixes)
            if [field.name for field in rest[: len(names)]] == names:
                groups[name], rest = tuple(rest[: len(names)]), rest[len(names) :]
                break
        else:
            return None
    return None if rest else groups


def found_groups(aggregates: Mapping[str, Described], stored: Sequence[pa.Field]) -> Fields:
    """Returns the stored columns of each aggregate for which `stored` has columns, at any position."""
    groups: Fields = {}
    start = 0
    while start < len(stored):
        rest = stored[start:]
        found = next(
            (
                (name, len(names))
                for name, aggregate in aggregates.items()
                for suffixes in _possible_suffixes(rest)
                if name not in groups
                for names in [state_names(aggregate, name, suffixes)]
                if [field.name for field in rest[: len(names)]] == names
            ),
            None,
        )
        if found is None:
            start += 1
            continue
        name, length = found
        groups[name] = tuple(rest[:length])
        start += length
    return groups


def combined_fields(aggregates: Mapping[str, Described], schema: pa.Schema) -> Fields:
    """Returns the state columns of each aggregate in a schema of combined rows.

    Raises ConfigurationError if the rows were combined for other aggregates.
    """
    fields = stored_groups(aggregates, state_of(schema))
    if fields is None:
        raise ConfigurationError(
            f"rows in flight were combined for other aggregates than {list(aggregates)}: they have {schema.names}; "
            "restore with the aggregates that they were sent to, or from a savepoint, which has none in flight"
        )
    return fields


def validate(aggregate: Described, input_schema: pa.Schema) -> None:
    """Raises ConfigurationError if a column of an aggregate is missing, or if its type is not supported."""
    if aggregate.condition is not None:
        found = _column_type(aggregate, aggregate.condition, input_schema)
        if not pa.types.is_boolean(found):
            raise ConfigurationError(f"{aggregate}: the condition is {found}; where(...) takes one that is boolean")
    if aggregate.function is not None:
        _validate_function(aggregate, aggregate.function, input_schema)
        return
    if aggregate.column is None:
        return
    data_type = _column_type(aggregate, aggregate.column, input_schema)
    kind = aggregate.kind
    if kind is AggregateKind.COUNT:
        return
    if kind is AggregateKind.COUNT_DISTINCT:
        raise ConfigurationError(
            f"{aggregate}: count_distinct was not translated to the function that stores its values; this is a bug in "
            "tidegate, please report it"
        )
    _check_not_null(aggregate, aggregate.column, data_type)
    takes = _takes(kind, data_type)
    if takes is not None:
        raise ConfigurationError(f"{aggregate}: column {str(aggregate.column)!r} is {data_type}; {kind.value} {takes}")
    if aggregate.by is not None:
        _validate_by(aggregate, input_schema)


def _takes(kind: AggregateKind, data_type: pa.DataType) -> str | None:
    """Returns a text that lists the types that a kind of aggregate accepts, for the error.

    None if it accepts `data_type`.
    """
    types = pa.types
    number = types.is_integer(data_type) or types.is_floating(data_type) or is_small_decimal(data_type)
    if kind in (AggregateKind.BOOL_AND, AggregateKind.BOOL_OR):
        return None if types.is_boolean(data_type) else "takes booleans: an expression such as pl.col('x') > 0"
    if kind in (AggregateKind.SUM, AggregateKind.MEAN):
        if number or types.is_boolean(data_type) or (kind is AggregateKind.SUM and types.is_duration(data_type)):
            return None
        durations = ", booleans and durations" if kind is AggregateKind.SUM else " and booleans"
        return f"takes integers, floats, decimals of at most {DIGITS_MAX} digits{durations} {_CONVERT}"
    if kind in SPREADS:
        return None if number else f"takes integers, floats and decimals of at most {DIGITS_MAX} digits {_CONVERT}"
    if kind not in EXTREMES or is_text(data_type) or (is_fixed(data_type) and not types.is_float16(data_type)):
        return None
    kinds = f"numbers, decimals of at most {DIGITS_MAX} digits, booleans, strings, dates, times, timestamps, durations"
    return f"takes {kinds} {_CONVERT}"


def _validate_function(aggregate: Described, function: BatchAggregateFunction, input_schema: pa.Schema) -> None:
    types = [_column_type(aggregate, column, input_schema) for column in aggregate.inputs]
    try:
        function.validate(*types)
    except ValueError as error:
        raise ConfigurationError(f"{aggregate}: {error}") from error


def _validate_by(aggregate: Described, input_schema: pa.Schema) -> None:
    assert aggregate.by is not None
    found = _column_type(aggregate, aggregate.by, input_schema)
    _check_not_null(aggregate, aggregate.by, found)
    comparable = is_fixed(found) and value_suffixes(found) == ("",)
    if pa.types.is_boolean(found) or (comparable and not pa.types.is_float16(found)):
        return
    raise ConfigurationError(
        f"{aggregate}: column {str(aggregate.by)!r} is {found}; by= takes integers, float32, float64, booleans, dates, "
        f"times, timestamps and durations {_CONVERT}"
    )


def _check_not_null(aggregate: Described, column: object, data_type: pa.DataType) -> None:
    if pa.types.is_null(data_type):
        raise ConfigurationError(
            f"{aggregate}: column {str(column)!r} has the type null, because all its first values were null; "
            f"pass schema= to the function that makes it"
        )


def _column_type(aggregate: Described, column: object, input_schema: pa.Schema) -> pa.DataType:
    if not isinstance(column, str):
        raise ConfigurationError(
            f"{aggregate} takes names of columns, and {column} is an expression; compute it in with_columns before"
        )
    if input_schema.get_field_index(column) < 0:
        raise ConfigurationError(
            f"{aggregate}: there is no column {column!r} (or two of them) in {input_schema.names}; name one of these"
        )
    return _type_of(column, input_schema)


def _type_of(column: object, input_schema: pa.Schema) -> pa.DataType:
    return decoded_type(input_schema.field(column).type)


def _by_type(data_type: pa.DataType) -> pa.DataType:
    """Returns the type in which values of an order column are stored: the widest type to which schema evolution may
    change them.
    """
    if pa.types.is_uint64(data_type) or pa.types.is_temporal(data_type):
        return data_type
    return pa.float64() if pa.types.is_floating(data_type) else pa.int64()


def _sum_fields(name: str, data_type: pa.DataType, suffix: str = "") -> tuple[pa.Field, ...]:
    if is_small_decimal(data_type):
        return value_fields(name, data_type, suffix)
    if pa.types.is_duration(data_type):
        return (pa.field(part_name(name, suffix), data_type),)
    return (pa.field(part_name(name, suffix), pa.float64() if pa.types.is_floating(data_type) else pa.int64()),)


def _possible_suffixes(stored: Sequence[pa.Field]) -> Iterator[tuple[str, ...]]:
    yield ("",)
    boolean = value_suffixes(pa.bool_())
    assert boolean is not None, "booleans have a column"
    yield boolean
    decimal = decimal_of(stored[0].name) if stored else None
    if decimal is not None:
        yield decimal_suffixes(decimal.precision, decimal.scale)


_BOOL = ".as_bool"
_DECIMAL = re.compile(r"\.decimal\((\d+),(-?\d+)\)\.(?:high|low)$")
DIGITS_MAX = 38
"""Largest number of digits of a 128-bit decimal."""


def is_small_decimal(data_type: pa.DataType) -> bool:
    """Returns whether the type is a decimal of at most 128 bits."""
    return bool(pa.types.is_decimal(data_type) and data_type.bit_width <= 128)


def is_fixed(data_type: pa.DataType) -> bool:
    """Returns whether state stores values of a type in fixed-width columns. `data_type` must not be a dictionary
    type.
    """
    return storage_dtype(data_type) is not None or pa.types.is_boolean(data_type) or is_small_decimal(data_type)


def is_text(data_type: pa.DataType) -> bool:
    """Returns whether values of a type are stored as strings or bytes."""
    kinds, kept = pa.types, kept_type(data_type)
    return bool(
        kinds.is_string(kept) or kinds.is_large_string(kept) or kinds.is_binary(kept) or kinds.is_large_binary(kept)
    )


def kept_type(data_type: pa.DataType) -> pa.DataType:
    """Returns the Arrow type in which values of variable width are stored: the type without dictionary encoding."""
    return plain(pa.array([], data_type)).type


def value_suffixes(data_type: pa.DataType) -> tuple[str, ...]:
    """Returns the suffixes of the state columns that store one value of a type. `data_type` must not be a dictionary
    type.
    """
    if pa.types.is_boolean(data_type):
        return (_BOOL,)
    if is_small_decimal(data_type):
        return decimal_suffixes(data_type.precision, data_type.scale)
    return ("",)


def value_fields(name: str, data_type: pa.DataType, suffix: str = "") -> tuple[pa.Field, ...]:
    """Returns the state columns of the aggregate `name` that store one value of a type.

    `suffix` is part of the column names, and identifies one of several values of an aggregate.
    """
    suffixes = value_suffixes(data_type)
    if pa.types.is_boolean(data_type):
        return (pa.field(part_name(name, suffix + _BOOL), pa.uint8()),)
    if len(suffixes) == 1:
        return (pa.field(part_name(name, suffix), data_type if is_fixed(data_type) else kept_type(data_type)),)
    high, low = (part_name(name, suffix + each) for each in suffixes)
    return (pa.field(high, pa.int64()), pa.field(low, pa.uint64()))


def value_type(fields: Sequence[pa.Field]) -> pa.DataType:
    """Returns the type of the value that state columns store.

    `fields` begins with the columns of the value (see `value_fields`).
    """
    first = fields[0]
    if is_reserved(first.name) and first.name.endswith(_BOOL):
        return pa.bool_()
    decimal = decimal_of(first.name)
    return first.type if decimal is None else decimal


def decimal_of(name: str) -> pa.DataType | None:
    """Returns the decimal type that a state column stores, according to its name. None if it stores no decimals."""
    found = _DECIMAL.search(name) if is_reserved(name) else None
    return None if found is None else pa.decimal128(int(found[1]), int(found[2]))


def decimal_suffixes(precision: int, scale: int) -> tuple[str, str]:
    """Returns the suffixes of the two columns that store a decimal."""
    return f".decimal({precision},{scale}).high", f".decimal({precision},{scale}).low"


def value_words(column: pa.Array) -> list[NDArray[Any]]:
    """Returns the values of a fixed-width column in stored form: one array for each field of `value_fields`.

    Dictionaries are decoded. The entries of nulls are undefined.
    """
    if pa.types.is_boolean(column.type):
        return [fixed_values(column.cast(pa.uint8()))]
    if pa.types.is_decimal(column.type):
        highs, lows = decimal_words(column.cast(pa.decimal128(column.type.precision, column.type.scale)))
        return [highs, lows]
    return [fixed_values(column)]


def value_array(words: Sequence[NDArray[Any]], valid: NDArray[np.uint8] | None, data_type: pa.DataType) -> pa.Array:
    """Returns values in stored form (see `value_words`) as an Arrow array. Entries with `valid` 0 are null."""
    if pa.types.is_boolean(data_type):
        bits = pa.py_buffer(np.packbits(words[0] == 1, bitorder="little"))
        bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
        return pa.Array.from_buffers(pa.bool_(), len(words[0]), [bitmap, bits])
    if pa.types.is_decimal(data_type):
        return decimals_of(words[0], words[1], valid, data_type)
    return array_of(words[0], valid, data_type)


_STATE = f"{COMBINED}."


class _Accumulator(Protocol):
    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None: ...

    def merge(self, slots: NDArray[np.int32], parts: Sequence[pa.Array]) -> None: ...


def combined_rows(heads: pa.RecordBatch, state: Mapping[str, pa.Array], counts: pa.Array) -> pa.RecordBatch:
    """Returns a batch of combined rows.

    `heads` has the key and time columns, `state` the accumulator columns by name, and `counts` the number of rows in
    each combined row.
    """
    names = [*heads.schema.names, *(_STATE + name for name in state), COMBINED]
    return pa.RecordBatch.from_arrays([*heads.columns, *state.values(), counts], names=names)


def state_of(schema: pa.Schema) -> list[pa.Field]:
    """Returns the accumulator columns in a schema of combined rows, with the names that they have in the state."""
    return [field.with_name(field.name.removeprefix(_STATE)) for field in schema if field.name.startswith(_STATE)]


def add_rows(
    accumulator: _Accumulator, fields: Sequence[pa.Field], batch: pa.RecordBatch, slots: NDArray[np.int32]
) -> None:
    """Adds a batch to an accumulator: combined rows (partial aggregates) are merged, and plain rows are added.

    `fields` are the accumulator's state columns.
    """
    if is_combined(batch.schema):
        accumulator.merge(slots, [batch.column(_STATE + field.name) for field in fields])
    else:
        accumulator.update(batch, slots)
