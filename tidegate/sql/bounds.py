"""Conditions on `window_start`, `window_end` and `window_time` of rows that are not in windows yet.

Such a condition is the same for all rows of a window, so it is held until the windows are made, by a group, a join or a
ranking, and is asked of what comes out. There HAVING would do the same.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl
from sqlglot import exp

from tidegate.operators.windows.window_rows import WINDOW_END
from tidegate.sql.expressions import Expressions
from tidegate.sql.relations import WINDOW_TIME, Held, Relation, all_of, columns_in
from tidegate.sql.steps import Steps
from tidegate.sql.text.places import refused, standing_at
from tidegate.sql.values.operators import moved
from tidegate.sql.values.typed import Interval, Typed


def names_bound(node: exp.Expr, relation: Relation) -> bool:
    """Whether a condition names a bound of windows that are not made yet."""
    return relation.windows is not None and any(_is_bound(each, relation) for each in columns_in(node))


def with_held(relation: Relation, conditions: list[exp.Expr]) -> tuple[Relation, list[exp.Expr]]:
    """The relation with the conditions on bounds, and the other conditions.

    ConfigurationError for one that names something else beside a bound: rows are no longer single behind the windows.
    """
    held = [each for each in conditions if names_bound(each, relation)]
    for node in held:
        for each in columns_in(node):
            if not _is_bound(each, relation):
                raise refused(
                    node,
                    f"a condition on the bounds of a window holds for all of its rows, and {each.name!r} is of one "
                    "row: put it into HAVING if it is a key, else compute what you mean in a query in FROM",
                )
    if not held:
        return relation, conditions
    waiting = tuple(Held(node, relation.names) for node in held)
    return replace(relation, held=(*relation.held, *waiting)), [each for each in conditions if each not in held]


def with_asked(made: Relation, held: tuple[Held, ...], steps: Steps) -> Relation:
    """The rows of windows that have been made, for whose bounds the conditions hold."""
    if not held:
        return made
    conditions = [_translated(each, made) for each in held]
    with standing_at(held[0].node):
        return made.with_stream(steps.filtered(made.stream, all_of(conditions)))


def _translated(held: Held, made: Relation) -> pl.Expr:
    within = replace(made, names=held.names)

    def bound(node: exp.Column) -> Typed:
        inner = within.find(node).inner
        if inner == WINDOW_TIME:
            return moved(node, made.of_inner(WINDOW_END), Interval(0, -1))
        return made.of_inner(inner)

    return Expressions(bound).condition(held.node)


def _is_bound(node: exp.Column, relation: Relation) -> bool:
    return relation.root(node) is node and relation.find(node).bound
