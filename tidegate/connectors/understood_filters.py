"""Reads a filter of the program, a polars expression, as tests of columns.

A filter is understood if it compares columns with constants (`==`, `<`, `<=`, `>`, `>=`, `is_in`, `is_between`,
`is_null`, `is_not_null`), all joined by `&`. All of it is, or it counts for nothing: what else is in it may fail for a
row, and then that row must come.
"""

from __future__ import annotations

import json
from typing import Any

import polars as pl

from tidegate.connectors.pushed_filters import ColumnTest, Rows

_COMPARISONS = {"Eq": "==", "Lt": "<", "LtEq": "<=", "Gt": ">", "GtEq": ">="}
_MIRRORED = {"==": "==", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_BETWEEN = {"Both": (">=", "<="), "Left": (">=", "<"), "Right": (">", "<="), "None": (">", "<")}
_NULLS = {"IsNull": "is_null", "IsNotNull": "is_not_null"}


def rows_kept(condition: pl.Expr, after: Rows) -> Rows:
    """Of the input of a filter, the rows that count if those of `after` do in its output."""
    tests = tests_of(condition)
    if tests is None or after is None:
        return None if tests is None else (tests,)
    return tuple(tests + more for more in after)


def tests_of(condition: pl.Expr) -> tuple[ColumnTest, ...] | None:
    """The tests that must all hold where a condition is true; None if not all of it is understood."""
    condition = condition.meta.undo_aliases()
    written = json.loads(condition.meta.serialize(format="json"))
    # As JSON it has lost NaN and infinity; its parts have them.
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
    """The constant of a test, as in the filter."""
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
