"""Filters that a program pushes into its sources, so that a source need not read rows that the filter drops.

Rules:

- The filter also stays in the program. A source skips only rows that the filter certainly drops. It may return rows
  that the filter drops, but never skips a row that the filter keeps.
- A filter is supported if it compares columns with constants (`==`, `<`, `<=`, `>`, `>=`, `is_in`, `is_between`,
  `is_null`, `is_not_null`), joined by `&`. If one part is not supported, the whole filter is ignored: evaluating that
  part may raise an error for a row, and so the row must be read.
- Constants are stored as polars serializes them. Only polars compares them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import polars as pl

ALTERNATIVES_MAX = 16
"""Maximum number of groups of tests. A filter that needs more is not pushed, and all rows are read."""


@dataclass(frozen=True, slots=True)
class ColumnTest:
    """The test `column test constant`. The constant is serialized by polars, and is empty for tests of null."""

    column: str
    test: str
    constant: bytes = b""


Rows: TypeAlias = tuple[tuple[ColumnTest, ...], ...] | None
"""A pushed filter: groups of tests.

A row is needed if all tests of at least one group hold. None: all rows are needed.
"""


def either(first: Rows, second: Rows) -> Rows:
    """Combines the filters of two readers of a stream: returns the filter for rows that at least one of them needs."""
    if first is None or second is None or len(first) + len(second) > ALTERNATIVES_MAX:
        return None
    return first + tuple(tests for tests in second if tests not in first)


def rows_renamed(columns: dict[str, str], after: Rows) -> Rows:
    """Converts a filter on the output of a step that only copies columns to a filter on its input.

    `columns` maps the name of an output column to the name of the input column. None if a tested column is not a copy.
    """
    if after is None or any(test.column not in columns for tests in after for test in tests):
        return None
    return tuple(tuple(replace(test, column=columns[test.column]) for test in tests) for tests in after)


_COMPARISONS = {"Eq": "==", "Lt": "<", "LtEq": "<=", "Gt": ">", "GtEq": ">="}
_MIRRORED = {"==": "==", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_BETWEEN = {"Both": (">=", "<="), "Left": (">=", "<"), "Right": (">", "<="), "None": (">", "<")}
_NULLS = {"IsNull": "is_null", "IsNotNull": "is_not_null"}


def rows_kept(condition: pl.Expr, after: Rows) -> Rows:
    """Returns the filter for the input of a filter step with this condition. `after` is the filter for its output."""
    tests = tests_of(condition)
    if tests is None or after is None:
        return None if tests is None else (tests,)
    return tuple(tests + more for more in after)


def tests_of(condition: pl.Expr) -> tuple[ColumnTest, ...] | None:
    """Returns tests, all of which hold if a condition is true. None if a part of the condition is not supported."""
    condition = condition.meta.undo_aliases()
    written = json.loads(condition.meta.serialize(format="json"))
    # JSON loses NaN and infinity. The parts of the expression still have them.
    parts = condition.meta.pop()[::-1]
    match written:
        case {"BinaryExpr": {"op": "And"}}:
            first, second = map(tests_of, parts)
            return None if first is None or second is None else first + second
        case {"BinaryExpr": {"left": {"Column": str(name)}, "op": op, "right": {"Literal": literal}}}:
            return _compared(name, _COMPARISONS.get(op), literal, parts[1])
        case {"BinaryExpr": {"left": {"Literal": literal}, "op": op, "right": {"Column": str(name)}}}:
            return _compared(name, _MIRRORED.get(_COMPARISONS.get(op, "")), literal, parts[0])
        case {"Function": {"input": [{"Column": str(name)}, *literals], "function": {"Boolean": function}}}:
            return _function(name, function, literals, parts[1:])
    return None


def constant_of(test: ColumnTest) -> pl.Expr:
    """Returns the constant of a test, as a polars expression."""
    import polars as pl  # A job without filters need not load polars.

    return pl.Expr.deserialize(test.constant)


def _function(name: str, function: Any, literals: list[Any], parts: list[pl.Expr]) -> tuple[ColumnTest, ...] | None:
    match function, literals:
        case str(test), [] if test in _NULLS:
            return (ColumnTest(name, _NULLS[test]),)
        case {"IsIn": {"nulls_equal": False}}, [{"Literal": {"Scalar": {"List": _}} | {"Series": _}}]:
            return (ColumnTest(name, "is_in", parts[0].meta.serialize()),)
        case {"IsBetween": {"closed": str(closed)}}, [{"Literal": low}, {"Literal": high}] if closed in _BETWEEN:
            above, below = map(_compared, (name, name), _BETWEEN[closed], (low, high), parts)
            return None if above is None or below is None else above + below
    return None


def _compared(name: str, test: str | None, literal: Any, part: pl.Expr) -> tuple[ColumnTest, ...] | None:
    one_value = isinstance(literal, dict) and ("Dyn" in literal or "Scalar" in literal)
    if test is None or not one_value:
        return None
    return (ColumnTest(name, test, part.meta.serialize()),)
