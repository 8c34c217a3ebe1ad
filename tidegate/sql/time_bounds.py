"""Conditions on the times of two streams: which of them say that a pair lies in an interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl
from sqlglot import exp

from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.sql.expressions import Expressions
from tidegate.sql.relations import Relation, types_of
from tidegate.sql.text.places import check_only
from tidegate.sql.values.typed import Interval, Typed

LEFT, RIGHT = 0, 1
_TURNED: dict[type[exp.Expr], type[exp.Expr]] = {exp.LT: exp.GT, exp.LTE: exp.GTE, exp.GT: exp.LT, exp.GTE: exp.LTE}
Sides = tuple[Relation, Relation]


@dataclass(slots=True)
class Between:
    """How far the right time may be after the left one, in ms; None where nothing says it."""

    lower: int | None = None
    upper: int | None = None
    said: list[exp.Expr] | None = None
    """The conditions that say it."""
    exact: bool = True
    """Whether the bounds are all there is; else they are too wide, and the conditions are asked of the pairs again."""

    @property
    def is_whole(self) -> bool:
        """Whether both bounds are there."""
        return self.lower is not None and self.upper is not None


def between_of(
    conditions: list[exp.Expr], sides: Sides, side_of: Callable[[exp.Column], int], filtered: bool
) -> Between:
    """The interval in which conditions hold the event times of two streams; not whole if they do not.

    `filtered`: pairs are asked again, where times are finer than milliseconds. A join that also gives rows without a
    partner cannot do that: there times count in whole milliseconds.
    """
    found = Between(said=[])
    if any(each.stream.timestamp is None for each in sides):
        return found
    assert found.said is not None
    found.exact = not filtered or all(_in_ms(each) for each in sides)
    for node in conditions:
        bounds = [_bound(each, sides, side_of) for each in _comparisons(node)]
        if not bounds or any(each is None for each in bounds):
            continue
        for bound in bounds:
            assert bound is not None
            _narrow(found, *bound)
        found.said.append(node)
    return found


def _narrow(found: Between, is_lower: bool, apart_ms: int, strict: bool) -> None:
    """Take in one more bound. Bounds are too wide where times are finer, and the conditions are asked again."""
    if is_lower:
        bound = apart_ms + (1 if strict else 0) if found.exact else apart_ms - 1
        found.lower = bound if found.lower is None else max(found.lower, bound)
    else:
        bound = apart_ms - (1 if strict else 0) if found.exact else apart_ms + 1
        found.upper = bound if found.upper is None else min(found.upper, bound)


def _comparisons(node: exp.Expr) -> list[tuple[type[exp.Expr], exp.Expr, exp.Expr]]:
    if isinstance(node, exp.Paren):
        return _comparisons(node.this)
    if isinstance(node, exp.Between):
        check_only(node, "this", "low", "high")
        return [(exp.GTE, node.this, node.args["low"]), (exp.LTE, node.this, node.args["high"])]
    if isinstance(node, exp.EQ):
        return [(exp.GTE, node.this, node.expression), (exp.LTE, node.this, node.expression)]
    return [(type(node), node.this, node.expression)] if type(node) in _TURNED else []


def _bound(
    comparison: tuple[type[exp.Expr], exp.Expr, exp.Expr], sides: Sides, side_of: Callable[[exp.Column], int]
) -> tuple[bool, int, bool] | None:
    """Whether a comparison is a lower bound of right time less left time, at how many ms, and whether it is strict."""
    kind, one, other = comparison
    a, b = _moment(one, sides, side_of), _moment(other, sides, side_of)
    if a is None or b is None or a[0] == b[0]:
        return None
    if a[0] == LEFT:
        kind, a, b = _TURNED[kind], b, a
    return kind in (exp.GT, exp.GTE), b[1] - a[1], kind in (exp.GT, exp.LT)


def _moment(node: exp.Expr, sides: Sides, side_of: Callable[[exp.Column], int]) -> tuple[int, int] | None:
    """Of which side an expression is the event time, and how many ms it is later."""
    if isinstance(node, exp.Paren):
        return _moment(node.this, sides, side_of)
    if isinstance(node, exp.Column):
        side = side_of(node)
        time = sides[side].stream.timestamp
        if sides[side].root(node) is not node or sides[side].find(node).inner != time:
            return None
        return side, 1 if isinstance(time, WindowEnd) else 0
    if isinstance(node, exp.Add | exp.Sub):
        inner, by = _moment(node.this, sides, side_of), _interval(node.expression)
        if inner is None and isinstance(node, exp.Add):
            inner, by = _moment(node.expression, sides, side_of), _interval(node.this)
        if inner is None or by is None or by.months:
            return None
        return inner[0], inner[1] + (by.ms if isinstance(node, exp.Add) else -by.ms)
    return None


def _interval(node: exp.Expr) -> Interval | None:
    if any(True for _ in node.find_all(exp.Column)):
        return None

    def nothing(column: exp.Column) -> Typed:
        raise AssertionError(column)

    found = Expressions(nothing).of(node)
    return found.value if isinstance(found.value, Interval) else None


def _in_ms(relation: Relation) -> bool:
    """Whether event time is no finer than milliseconds."""
    found: Any = types_of(relation.stream.schema)[str(relation.stream.timestamp)]
    return not isinstance(found, pl.Datetime) or found.time_unit == "ms"
