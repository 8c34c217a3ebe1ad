"""Replaces expressions in the arguments of a step by columns that an earlier step computes.

Operators read only columns. `plain_inputs` adds one `select` before the operator. It computes each expression once,
however often it is used, and keeps only the columns that the operator reads. Fewer columns are therefore sent over the
exchange, and sources still read only the columns that are needed. The name of a computed column is the canonical text
of the expression (`expressions.py`). An error that names the column can therefore be understood, and state and rows in
flight have the same columns with every version of polars.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa

from tidegate.api.streams.expression_columns import schema_after
from tidegate.api.streams.state_meanings import column_of as column_text
from tidegate.api.streams.step import StepOptions
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.column_expressions import ColumnExpression, ColumnLike, column_like
from tidegate.operators.functions.expressions import Select
from tidegate.operators.functions.projection import columns_read
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import exact_column

if TYPE_CHECKING:
    from tidegate.api.streams.stream import Stream

_NAME_CHARACTERS = 60


def plain_inputs(
    stream: Stream,
    kept: Sequence[str],
    aggregates: Mapping[str, Aggregate],
    options: StepOptions,
    narrow: bool = False,
) -> tuple[Stream, dict[str, Aggregate]]:
    """Adds a step that computes the expressions of aggregates as columns. Returns the stream, and the aggregates over
    these columns.

    `kept` names the other columns that are read: keys, and event time. `options` are the options of the operator that
    follows. If no aggregate has an expression, the stream is unchanged unless `narrow` is True, which drops columns
    that are not read. Raises ConfigurationError for an expression that cannot be computed.
    """
    used = _columns_of(aggregates)
    expressions = _expressions(aggregates, stream.schema)
    if not expressions and not narrow:
        return stream, dict(aggregates)
    names = list(dict.fromkeys([*kept, *(column for column in used if isinstance(column, str))]))
    computed = _named(expressions, names)
    columns = [*map(exact_column, names), *(column.expression.alias(computed[column]) for column in expressions)]
    selected = stream._select(columns, options.part("inputs", stream._input_parallelism))
    return selected, _over(aggregates, computed)


def added_inputs(
    stream: Stream, aggregates: Mapping[str, Aggregate], options: StepOptions
) -> tuple[Stream, dict[str, Aggregate], tuple[str, ...]]:
    """Adds a column for each expression in aggregates, and keeps all other columns, so that late rows have all columns.
    The schema of the stream must be known.

    Returns the stream, the aggregates over the added columns, and the names of the added columns.
    """
    assert stream.schema is not None, "columns that are not known"
    expressions = _expressions(aggregates, stream.schema)
    computed = _named(expressions, stream.schema.names)
    added = stream._with_columns(
        [column.expression.alias(computed[column]) for column in expressions],
        options.part("inputs", stream._input_parallelism),
    )
    return added, _over(aggregates, computed), tuple(computed.values())


def counted_column(aggregate: Aggregate) -> ColumnLike:
    """Returns the expression whose values a distinct count counts: null where the aggregate's condition is not true."""
    assert aggregate.column is not None, "a count of distinct values without a column"
    if aggregate.condition is None:
        return aggregate.column
    value, condition = (
        exact_column(column) if isinstance(column, str) else column.expression
        for column in (aggregate.column, aggregate.condition)
    )
    return ColumnExpression(pl.when(condition).then(value))


def key_expressions(
    keys: Sequence[str | pl.Expr], schema: pa.Schema | None
) -> tuple[tuple[str, ...], tuple[pl.Expr, ...], frozenset[str]]:
    """Returns the names of key columns, the expressions that compute some of them, and the stream's columns that these
    expressions replace.

    Raises ConfigurationError for an expression that is not one column, or cannot be computed.
    """
    names, expressions, replaced = [], [], set()
    for key in keys:
        name, expression = column_and_expression(key, "key_by", schema)
        names.append(name)
        if expression is None:
            continue
        expressions.append(expression)
        if name in ((columns_read((expression,)) or ()) if schema is None else schema.names):
            replaced.add(name)
    return tuple(names), tuple(expressions), frozenset(replaced)


def column_and_expression(given: object, where: str, schema: pa.Schema | None) -> tuple[str, pl.Expr | None]:
    """Returns the name of a column and the expression that computes it, or None instead of the expression for a column
    of the stream.

    Raises ConfigurationError, which begins with `where`, for an expression that is not one column, or cannot be
    computed.
    """
    column = column_like(given, where)
    if isinstance(column, str):
        return column, None
    name = column.expression.meta.output_name(raise_if_undetermined=False)
    if name is None or columns_read((column.expression,)) is None:
        raise ConfigurationError(f"{where}({column}): the expression has to make one column, with a name")
    _check(where, column, schema)
    return name, column.expression


def check_not_replaced(aggregates: Mapping[str, Aggregate], replaced: frozenset[str]) -> None:
    """Raises ConfigurationError if an aggregate reads a column that a key of the same name has replaced."""
    for label, aggregate in aggregates.items():
        for column in aggregate.columns:
            read = {column} if isinstance(column, str) else columns_read((column.expression,)) or replaced
            for name in sorted(read & replaced):
                raise ConfigurationError(
                    f"{label}={aggregate}: it would read the key with which key_by has replaced column {name!r}; "
                    'give the key another name, as in key_by((...).alias("key"))'
                )


def _columns_of(aggregates: Mapping[str, Aggregate]) -> list[ColumnLike]:
    """Returns the columns and expressions that aggregates read, without duplicates."""
    return list(dict.fromkeys(column for aggregate in aggregates.values() for column in aggregate.columns))


def _expressions(aggregates: Mapping[str, Aggregate], schema: pa.Schema | None) -> list[ColumnExpression]:
    """Returns the expressions that aggregates read, without duplicates.

    Raises ConfigurationError if one cannot be computed.
    """
    for label, aggregate in aggregates.items():
        for column in aggregate.columns:
            if isinstance(column, ColumnExpression):
                _check(f"{label}={aggregate}", column, schema)
    return [column for column in _columns_of(aggregates) if isinstance(column, ColumnExpression)]


def _over(aggregates: Mapping[str, Aggregate], computed: Mapping[ColumnExpression, str]) -> dict[str, Aggregate]:
    """Returns the aggregates with each expression replaced by the name of its computed column."""

    def plain(column: ColumnLike) -> ColumnLike:
        return computed[column] if isinstance(column, ColumnExpression) else column

    return {label: aggregate.over(plain) for label, aggregate in aggregates.items()}


def _named(expressions: Sequence[ColumnExpression], taken: Sequence[str]) -> dict[ColumnExpression, str]:
    names: dict[ColumnExpression, str] = {}
    known = set(taken)
    for expression in expressions:
        shown = name = _column_name(expression)
        number = 1
        while name in known:
            number += 1
            name = f"{shown} ({number})"
        known.add(name)
        names[expression] = name
    return names


def _column_name(expression: ColumnExpression) -> str:
    """Returns the column name for an expression: its canonical text.

    A long text is shortened, and ends with a hash of the whole text.
    """
    text = column_text(expression)
    if len(text) <= _NAME_CHARACTERS:
        return text
    return f"{text[:_NAME_CHARACTERS]}#{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _check(where: str, column: ColumnExpression, schema: pa.Schema | None) -> None:
    """Raises ConfigurationError, which begins with `where`, for an expression that is not one column, not row-wise, or
    cannot be computed.
    """
    select = Select(column.expression)
    found = schema_after(select, schema, f"{where}: {column} cannot be computed")
    if found is not None and len(found) != 1:
        raise ConfigurationError(
            f"{where}: {column} makes the columns {found.names}; it must make one. Give an expression with one result"
        )
