"""Tells columns from options where a step takes both by keyword, as in `select("id", name=pl.col("full_name"))`.

A step takes its columns in three ways, and its options (`name`, `uid`, `parallelism` and others) by keyword:

- by position: names, or expressions that have a name; also lists of these;
- by keyword, under any word. Under the word of an option, an expression or an aggregate is a column all the same,
  because no option takes one. It comes behind the other columns;
- in a mapping, `select({"name": "full_name"})`, which has columns only, so it always works.

A string under `name=` or `uid=` is the option, unless the stream has a column of that name: then both readings are
possible, and the step refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.column_expressions import column_like
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import exact_column, is_polars_expression

if TYPE_CHECKING:
    import polars as pl

_OF_STRINGS = ("name", "uid")
"""Options whose values are strings. Under any other option a string is the name of a column."""


def expressions_and_options(
    method: str,
    given: Sequence[pl.Expr | str | Mapping[str, pl.Expr | str] | Sequence[pl.Expr | str]],
    named: Mapping[str, pl.Expr | str],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    schema: pa.Schema | None,
) -> tuple[tuple[pl.Expr | str, ...], dict[str, Any]]:
    """The expressions of a step, and its options.

    `options` are the values that came under the words of options, `defaults` those of options that were not given.
    `schema` has the columns of the stream, if they are known. Raises ConfigurationError for a string that may be
    either, and for a value that is neither a name nor an expression.
    """
    columns = dict(named)
    found = dict(options)
    for word, value in options.items():
        is_column = isinstance(value, str) and schema is not None and value in schema.names
        if isinstance(value, str) and word in _OF_STRINGS and is_column:
            raise ConfigurationError(
                f"{method}: {word}={value!r} may be the {word} of the step, or a column called {word!r} that copies "
                f"the column {value!r}. For the column write {method}({{{word!r}: {value!r}}}); for the step choose "
                f"another {word}"
            )
        if is_polars_expression(value) or (isinstance(value, str) and word not in _OF_STRINGS):
            columns[word], found[word] = value, defaults[word]
    expressions: list[pl.Expr | str] = []
    for item in _flat(given):
        if isinstance(item, Mapping):
            expressions += _named(item, method)
        elif isinstance(item, str) and _is_for_several(item) and schema is not None and item in schema.names:
            several = "pl.all()" if item == "*" else f"pl.col({item!r})"
            raise ConfigurationError(
                f"{method}({item!r}) may be several columns, or the one that is called {item!r}. Write {several} for "
                f"several columns, and {method}({{{item!r}: {item!r}}}) for the one"
            )
        else:
            expressions.append(item)
    return (*expressions, *_named(columns, method)), found


def aggregates_and_options(
    method: str,
    mapping: Mapping[str, Aggregate] | None,
    named: Mapping[str, Aggregate],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> tuple[dict[str, Aggregate], dict[str, Any]]:
    """The aggregates of a step by their names, and its options, as `expressions_and_options`.

    Raises ConfigurationError for a name that comes twice, in the mapping and by keyword.
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        raise ConfigurationError(
            f"{method} takes aggregates by keyword, n=tg.count(), or in one mapping, {{'n': tg.count()}}, not "
            f"{type(mapping).__name__}"
        )
    found = dict(options)
    columns = dict(named)
    for word, value in options.items():
        if isinstance(value, Aggregate):
            columns[word], found[word] = value, defaults[word]
    of_mapping = dict(mapping or {})
    for name in of_mapping:
        if not isinstance(name, str):
            raise ConfigurationError(f"{method}: the key {name!r} of the mapping is no name of a column")
    if twice := sorted(of_mapping.keys() & columns.keys()):
        raise ConfigurationError(f"{method}: {twice} are in the mapping and by keyword; give each aggregate once")
    return of_mapping | columns, found


def _is_for_several(name: str) -> bool:
    """Whether a name stands for several columns in polars: `*`, or a regular expression."""
    return name == "*" or (name.startswith("^") and name.endswith("$"))


def _flat(given: Sequence[Any]) -> Iterator[Any]:
    """What was given by position, where a list stands for its items: `select(["a", "b"])`."""
    for item in given:
        yield from item if isinstance(item, list | tuple) else (item,)


def _named(named: Mapping[str, pl.Expr | str], method: str) -> Iterator[pl.Expr]:
    """Expressions that were given with a name, as in polars: `x=pl.col("y") * 2`, or `x="y"`."""
    for name, value in named.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"{method}: the key {name!r} of the mapping is no name of a column")
        column = column_like(value, f"{method}: {name}=")
        yield (exact_column(column) if isinstance(column, str) else column.expression).alias(name)
