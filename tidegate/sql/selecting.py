"""The columns of SELECT: stars, columns that keep their place in the stream, and expressions, which are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import polars as pl
from sqlglot import exp

from tidegate.sql.expressions import Expressions
from tidegate.sql.ranking import is_ranking
from tidegate.sql.relations import Name, Rank, Relation, columns_of, free_name
from tidegate.sql.steps import Steps
from tidegate.sql.text.dialect import is_call
from tidegate.sql.text.places import refused, standing_at
from tidegate.sql.values.typed import Interval


@dataclass(frozen=True, slots=True)
class Item:
    """A column of SELECT: an expression under a name, or a column that a star stands for."""

    name: str
    node: exp.Expr
    column: Name | None = None


def items_of(select: exp.Select, relation: Relation) -> list[Item]:
    """The columns, stars written out. A column without a name is called by its place: `_c0`, `_c1`."""
    return list(_items(select, relation))


def _items(select: exp.Select, relation: Relation) -> Iterator[Item]:
    place = 0
    for node in select.expressions:
        star = node if isinstance(node, exp.Star) else node.this if isinstance(node, exp.Column) else None
        if isinstance(star, exp.Star):
            for column in _starred(node, star, relation):
                place += 1
                yield Item(column.name, node, column)
            continue
        inner = node.this if isinstance(node, exp.Alias) else node
        if isinstance(node, exp.Aliases):
            raise refused(node, "one column has one name")
        name = node.alias if isinstance(node, exp.Alias) else ""
        if not name and isinstance(inner, exp.Column | exp.Dot):
            name = inner.name
        if not name and is_call(inner, "EXPLODE", "EXPLODE_OUTER"):
            name = "col"
        yield Item(name or f"_c{place}", inner)
        place += 1


def _starred(node: exp.Expr, star: exp.Star, relation: Relation) -> list[Name]:
    table = node.table.lower() if isinstance(node, exp.Column) else ""
    if table and not relation.has_table(table):
        raise refused(node, f"there is no table {table!r} here")
    if star.args.get("replace") or star.args.get("rename"):
        raise refused(node, "name the columns instead")
    left_out = {each.name.lower() for each in star.args.get("except_") or []}
    found = [each for each in relation.names if not table or (each.table or "").lower() == table]
    unknown = left_out - {each.name.lower() for each in found}
    if unknown:
        raise refused(node, f"EXCEPT names {', '.join(sorted(unknown))}, and there is no such column")
    return [each for each in found if each.name.lower() not in left_out]


def selected(
    relation: Relation,
    items: list[Item],
    expressions: Expressions,
    steps: Steps,
    rank: Rank | None,
    plain: bool,
) -> Relation:
    """The relation under these names. `rank`: the ranking that one of the columns is.

    `plain`: columns are those of the relation, which keep their types; else what `expressions` says.
    """
    names: list[Name] = []
    computed: dict[str, pl.Expr] = {}
    taken = list(columns_of(relation.stream))
    for item in items:
        if item.column is not None:
            names.append(replace(item.column, table=None))
            continue
        if rank is not None and is_ranking(item.node):
            names.append(Name(None, item.name, "rank", rank=True))
            continue
        waiting = _waiting(item.node, relation)
        if waiting is not None:
            names.append(replace(waiting, table=None, name=item.name))
            continue
        inner = _plain_column(item.node, relation) if plain else None
        if inner is not None:
            names.append(Name(None, item.name, inner))
            continue
        typed = expressions.of(item.node)
        if isinstance(typed.value, Interval):
            raise refused(item.node, "an interval is no column: add it to a time, or write a number of milliseconds")
        if typed.expr.meta.is_column():
            inner = typed.expr.meta.output_name()
        if inner is None:
            inner = free_name(item.name, [*taken, *computed])
            computed[inner] = typed.expr if not typed.is_null else pl.lit(None, dtype=pl.String)
        names.append(Name(None, item.name, inner))
    with standing_at(items[0].node):
        stream = steps.computed(relation.stream, computed)
    return replace(relation, stream=stream, names=tuple(names), rank=rank if rank is not None else relation.rank)


def _waiting(node: exp.Expr, relation: Relation) -> Name | None:
    """A bound of windows or a rank that is passed on as it is, to where it is made."""
    if not isinstance(node, exp.Column) or relation.root(node) is not node:
        return None
    if not (relation.windows is not None or relation.rank is not None):
        return None
    found = relation.find(node)
    return found if found.bound or found.rank else None


def _plain_column(node: exp.Expr, relation: Relation) -> str | None:
    """The column of the stream that an expression is, whatever its type."""
    if not isinstance(node, exp.Column) or relation.root(node) is not node:
        return None
    return relation.find(node).inner
