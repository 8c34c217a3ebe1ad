"""`ColumnExpression` holds a polars expression that a program gave in place of a column name.

The stream API adds a column that computes each expression before the operator, so operators see only names. Two
expressions are equal if polars serialises them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import is_polars_expression

if TYPE_CHECKING:
    import polars as pl

_CHARACTERS_MAX = 60


class ColumnExpression:
    """A polars expression in place of a column name. Supports equality and hashing."""

    __slots__ = ("_written", "expression")

    def __init__(self, expression: pl.Expr) -> None:
        self.expression = expression
        self._written = expression.meta.serialize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ColumnExpression) and self._written == other._written

    def __hash__(self) -> int:
        return hash(self._written)

    def __repr__(self) -> str:
        text = " ".join(str(self.expression).split())
        return text if len(text) <= _CHARACTERS_MAX else text[: _CHARACTERS_MAX - 1] + "…"


ColumnLike: TypeAlias = str | ColumnExpression


def column_like(value: object, where: str) -> ColumnLike:
    """Returns a column name as it is, and a polars expression as a `ColumnExpression`. An expression that only names a
    column becomes its name.

    Raises ConfigurationError for any other value. `where` is the beginning of its message.
    """
    if isinstance(value, str | ColumnExpression):
        return value
    if not is_polars_expression(value):
        advice = "; give several columns one by one, without brackets" if isinstance(value, list | tuple) else ""
        raise ConfigurationError(
            f"{where} takes the name of a column or a polars expression, not {type(value).__name__}{advice}"
        )
    return value.meta.output_name() if value.meta.is_column() else ColumnExpression(value)


def column_names(given: object, where: str) -> tuple[str, ...]:
    """Returns the names of one or several columns as a tuple.

    Raises ConfigurationError for an expression and for any value that is not a column name. `where` is the beginning of
    its message.
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    found = [column_like(each, where) for each in several]
    for column in found:
        if isinstance(column, ColumnExpression):
            raise ConfigurationError(
                f"{where} takes names of columns, and {column} is an expression: compute it before, in "
                "with_columns(name=...), and give its name"
            )
    return tuple(map(str, found))
