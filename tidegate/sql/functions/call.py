"""`Call`: a call of a function with its arguments, from which the translations of functions read the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import polars as pl
from sqlglot import exp

from tidegate.sql.query_text import refused
from tidegate.sql.typed_values import Typed, as_type, is_number, is_time, named, python_value


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function.

    In all methods `place` is the index of an argument. They raise ConfigurationError for an argument of another kind.
    """

    node: exp.Expr
    name: str
    args: tuple[Typed, ...]
    nodes: tuple[exp.Expr, ...]

    def text(self, place: int) -> pl.Expr:
        """Returns an argument as a text expression. Numbers and times are converted."""
        return as_type(self.nodes[place], self.args[place], pl.String()).expr

    def integer(self, place: int) -> pl.Expr:
        """Returns a numeric argument as a BIGINT expression."""
        self._check_number(place)
        return as_type(self.nodes[place], self.args[place], pl.Int64()).expr

    def double(self, place: int) -> pl.Expr:
        """Returns a numeric argument as a DOUBLE expression."""
        self._check_number(place)
        return as_type(self.nodes[place], self.args[place], pl.Float64()).expr

    def number(self, place: int) -> Typed:
        """Returns a numeric argument in its own type. The literal NULL becomes a double."""
        self._check_number(place)
        given = self.args[place]
        return as_type(self.nodes[place], given, pl.Float64()) if given.is_null else given

    def time(self, place: int) -> Typed:
        """Returns a date or timestamp argument. Text is converted to a timestamp."""
        given = self.args[place]
        if is_time(given.type):
            return given
        if not (given.is_null or isinstance(given.type, pl.String)):
            raise refused(
                self.nodes[place],
                f"{self.name} takes a date or a timestamp, not {named(given.type)}: convert it with CAST",
            )
        return as_type(self.nodes[place], given, pl.Datetime("us"))

    def as_(self, place: int, data_type: Any) -> pl.Expr:
        """Returns an argument as an expression, cast to `data_type`."""
        return as_type(self.nodes[place], self.args[place], data_type).expr

    def literal_text(self, place: int) -> str:
        """Returns the text of an argument, which must be a literal."""
        return str(python_value(self.nodes[place], self.args[place], str))

    def literal_int(self, place: int, otherwise: int | None = None) -> int:
        """Returns the number of an argument, which must be a whole number as a literal, or `otherwise` if the argument
        is missing.
        """
        if otherwise is not None and place >= len(self.args):
            return otherwise
        return int(python_value(self.nodes[place], self.args[place], int))

    def refused(self, why: str) -> Exception:
        """Returns the error for this call. `why` has the reason and what to write instead."""
        return refused(self.node, why)

    def _check_number(self, place: int) -> None:
        given = self.args[place]
        if not (given.is_null or is_number(given.type)):
            raise refused(
                self.nodes[place], f"{self.name} takes a number here, not {named(given.type)}: convert it with CAST"
            )


Make: TypeAlias = Callable[[Call], Typed]


@dataclass(frozen=True, slots=True)
class Function:
    """The translation of a function (`make`), and the least and greatest number of its arguments."""

    make: Make
    least: int
    most: int


def of(least: int, most: int | None = None) -> Callable[[Make], Function]:
    """Decorator for a translation that accepts `least` to `most` arguments. Returns the translation as a `Function`. By
    default `most` equals `least`.
    """
    return lambda make: Function(make, least, least if most is None else most)


Functions: TypeAlias = Mapping[str, Function]
ANY_NUMBER = 1_000
