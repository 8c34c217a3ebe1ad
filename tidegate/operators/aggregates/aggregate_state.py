"""What the state of each aggregate looks like: its columns in a checkpoint, and of which types of input.

The names and types of these columns tell what they hold: who restores a checkpoint has the program and these columns,
but no input yet. `stored_groups` finds the columns of each aggregate, `result_type` the type of its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from tidegate.operators.aggregates.aggregate_function import SEEN, BatchAggregateFunction
from tidegate.operators.aggregates.aggregate_kinds import CHOICES, EXTREMES, SPREADS, AggregateKind
from tidegate.operators.aggregates.column_expressions import ColumnLike
from tidegate.operators.aggregates.stored_values import (
    DIGITS_MAX,
    decimal_of,
    decimal_suffixes,
    is_fixed,
    is_small_decimal,
    is_text,
    kept_type,
    value_fields,
    value_suffixes,
    value_type,
)
from tidegate.operators.combined_rows import state_of
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.dictionaries import decoded_type
from tidegate.storage.schemas.reserved_names import part_name

Fields = dict[str, tuple[pa.Field, ...]]
"""The state columns of each aggregate, by its name."""


class Described(Protocol):
    """What an `Aggregate` says of itself."""

    @property
    def kind(self) -> AggregateKind:
        """What it computes."""
        ...

    @property
    def column(self) -> ColumnLike | None:
        """Of which column."""
        ...

    @property
    def by(self) -> ColumnLike | None:
        """By which column it chooses a row."""
        ...

    @property
    def condition(self) -> ColumnLike | None:
        """Which rows count."""
        ...

    @property
    def taken_back(self) -> bool:
        """Whether values of a sum may be taken back."""
        ...

    @property
    def function(self) -> BatchAggregateFunction | None:
        """What computes it, if a program brings that along."""
        ...

    @property
    def inputs(self) -> tuple[ColumnLike, ...]:
        """All columns of which it is."""
        ...


_CONVERT = "(convert it with with_columns first)"


def state_fields(aggregate: Described, name: str, input_schema: pa.Schema) -> tuple[pa.Field, ...]:
    """The state columns of a valid aggregate that is called `name`."""
    kind = aggregate.kind
    if aggregate.function is not None:
        kept = (pa.field(part_name(name, f".{field.name}"), field.type) for field in aggregate.function.state)
        return (*kept, pa.field(part_name(name, f".{SEEN}"), pa.uint8()))
    data_type = None if aggregate.column is None else _type_of(aggregate.column, input_schema)
    if kind is AggregateKind.COUNT or data_type is None:
        return (pa.field(name, pa.int64()),)
    if kind is AggregateKind.SUM and not aggregate.taken_back:
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
    """The type of the results of an aggregate that keeps these columns."""
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
    """How many digits a sum of decimals may have: ten more than they have, so that 10 billion rows fit."""
    return min(DIGITS_MAX, int(decimal.precision) + 10)


def state_names(aggregate: Described, name: str, suffixes: Sequence[str] = ("",)) -> list[str]:
    """Names of the state columns, where values (or their sum) have columns with these suffixes."""
    kind = aggregate.kind
    if aggregate.function is not None:
        return [part_name(name, f".{column}") for column in (*aggregate.function.state.names, SEEN)]
    if kind is AggregateKind.MEAN or aggregate.taken_back:
        return [*(part_name(name, f".sum{suffix}") for suffix in suffixes), part_name(name, ".count")]
    if kind in SPREADS:
        return [part_name(name, suffix) for suffix in (".count", ".mean", ".m2")]
    names = [part_name(name, suffix) for suffix in suffixes]
    if kind in CHOICES:
        names += [part_name(name, ".by")] * (aggregate.by is not None) + [part_name(name, ".seen")]
    return names


def state_columns(keys: pa.Schema, fields: Fields) -> list[pa.Field]:
    """The columns of a state: those of the key, then those of each aggregate."""
    return [*keys, *(field for group in fields.values() for field in group)]


def stored_groups(aggregates: Mapping[str, Described], stored: Sequence[pa.Field]) -> Fields | None:
    """The stored columns of each aggregate, of which `stored` are all. None if they are those of other aggregates."""
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
    """The stored columns of those aggregates that have some, wherever they stand in `stored`."""
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
    """The state columns in a schema of combined rows. ConfigurationError if they are those of other aggregates."""
    fields = stored_groups(aggregates, state_of(schema))
    if fields is None:
        raise ConfigurationError(
            f"rows in flight were combined for other aggregates than {list(aggregates)}: they have {schema.names}; "
            "restore with the aggregates that they were sent to, or from a savepoint, which has none in flight"
        )
    return fields


def validate(aggregate: Described, input_schema: pa.Schema) -> None:
    """Raise ConfigurationError if a column is missing or of a type that cannot be aggregated so."""
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
        raise ConfigurationError(f"{aggregate}: an operator takes the function that keeps its values in its place")
    _check_not_null(aggregate, aggregate.column, data_type)
    takes = _takes(kind, data_type)
    if takes is not None:
        raise ConfigurationError(f"{aggregate}: column {str(aggregate.column)!r} is {data_type}; {kind.value} {takes}")
    if aggregate.by is not None:
        _validate_by(aggregate, input_schema)


def _takes(kind: AggregateKind, data_type: pa.DataType) -> str | None:
    """What an aggregate takes, if it does not take this type. First, last and their like take any."""
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
        raise ConfigurationError(f"{aggregate}: an operator takes names of columns, and {column} is an expression")
    if input_schema.get_field_index(column) < 0:
        raise ConfigurationError(f"{aggregate}: there is no column {column!r} (or two of them) in {input_schema.names}")
    return _type_of(column, input_schema)


def _type_of(column: object, input_schema: pa.Schema) -> pa.DataType:
    return decoded_type(input_schema.field(column).type)


def _by_type(data_type: pa.DataType) -> pa.DataType:
    """In which type the greatest value so far is kept: numbers as widely as they may become."""
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
