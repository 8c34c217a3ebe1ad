"""UNNEST, LATERAL VIEW and `explode`: several rows of one, by the elements of a list.

| what stands there | it is |
| --- | --- |
| `t CROSS JOIN UNNEST(list) AS u(x)`, also with a comma | `stream.explode` of a column with the list |
| `t LEFT JOIN UNNEST(list) AS u(x) ON TRUE` | the same with `outer=True` |
| `t LATERAL VIEW [OUTER] explode(list) u AS x` | as these two |
| `t, LATERAL explode(list) AS u(x)` | as these two; `explode_outer` is OUTER |
| `SELECT explode(list) AS x` | as these two |

Rule: UNNEST makes a column of each field of a struct, as in Flink. `explode` makes one column, as in Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
from sqlglot import exp

from tidegate.sql.expressions import Expressions
from tidegate.sql.joining import pruned
from tidegate.sql.relations import Name, Relation, columns_in, columns_of, free_name
from tidegate.sql.selecting import Item
from tidegate.sql.steps import Steps
from tidegate.sql.text.dialect import is_call
from tidegate.sql.text.places import check_only, refused, standing_at
from tidegate.sql.values.types import named

_PLAIN, _OUTER = "EXPLODE", "EXPLODE_OUTER"
_ALONE = "EXPLODE stands alone in SELECT, once and without groups; elsewhere write LATERAL VIEW EXPLODE(…) t AS x"
_TABLES = (
    "LATERAL is followed by EXPLODE(…) or EXPLODE_OUTER(…) of a list. Other functions with several rows are flat_map, "
    "and a query for each row is a join"
)


@dataclass(frozen=True, slots=True)
class Generator:
    """What makes rows of a list: the node, the list, whether a row without elements stays, and the new names.

    `expands`: whether the fields of a struct become columns.
    """

    node: exp.Expr
    values: exp.Expr
    outer: bool
    table: str | None
    columns: tuple[str, ...]
    expands: bool = False


def is_generator(node: exp.Expr) -> bool:
    """Whether an expression is a call of `explode`."""
    return is_call(node, _PLAIN, _OUTER)


def joined_generator(join: exp.Join) -> Generator | None:
    """What stands behind a JOIN or a comma, if it makes rows of a list; None for a table or a query.

    ConfigurationError for what is not covered.
    """
    if not isinstance(join.this, exp.Unnest | exp.Lateral):
        return None
    check_only(join, "this", "side", "kind", "on")
    side, kind = str(join.side or "").upper(), str(join.kind or "").upper()
    on = join.args.get("on")
    if side not in ("", "LEFT") or kind not in ("", "CROSS", "INNER", "OUTER"):
        raise refused(join, "the elements of a list come by CROSS JOIN, or by LEFT JOIN … ON TRUE")
    if on is not None and not (isinstance(on, exp.Boolean) and on.this):
        raise refused(on, "the elements of a list come by ON TRUE: put the condition into WHERE")
    if isinstance(join.this, exp.Lateral):
        found = lateral_generator(join.this)
        return replace(found, outer=found.outer or side == "LEFT")
    unnest = join.this
    if unnest.args.get("offset"):
        raise refused(unnest, "WITH ORDINALITY is not covered")
    check_only(unnest, "expressions", "alias")
    if len(unnest.expressions) != 1:
        raise refused(unnest, "UNNEST takes one list")
    table, columns = _alias(unnest)
    return Generator(unnest, unnest.expressions[0], side == "LEFT", table, columns, expands=True)


def lateral_generator(node: exp.Lateral) -> Generator:
    """What stands behind LATERAL. ConfigurationError for anything but `explode`."""
    if node.args.get("ordinality"):
        raise refused(node, "WITH ORDINALITY is not covered")
    check_only(node, "this", "view", "outer", "alias")
    table, columns = _alias(node)
    if not is_generator(node.this):
        raise refused(node.this, _TABLES)
    return _called(node.this, bool(node.args.get("outer")), table, columns)


def exploded(
    relation: Relation, generator: Generator, steps: Steps, narrow: Callable[[Relation], Relation]
) -> Relation:
    """A row for each element. `narrow` leaves out what is not needed behind it: other columns are repeated."""
    if relation.rank is not None:
        raise refused(generator.node, "a rank needs a condition around it that says how many rows stay")
    typed = Expressions(relation.typed).of(generator.values)
    if not isinstance(typed.type, pl.List | pl.Array):
        raise refused(generator.values, f"this makes rows of a list, and here is {named(typed.type)}")
    names = _names_of(generator, typed.type.inner)
    inner = free_name(generator.columns[0] if generator.columns else "element", columns_of(relation.stream))
    relation = relation.with_stream(steps.computed(relation.stream, {inner: typed.expr}))
    kept = narrow(replace(relation, names=(*relation.names, Name(None, _HIDDEN, inner))))
    relation = replace(kept, names=tuple(each for each in kept.names if each.name != _HIDDEN))
    stream = kept.stream
    with standing_at(generator.node):
        uid, wide = steps.uid("explode"), stream._input_parallelism
        stream = stream.explode(inner, outer=generator.outer, name="sql explode", uid=uid, parallelism=wide)
    if not isinstance(typed.type.inner, pl.Struct) or not generator.expands:
        return replace(relation, stream=stream, names=(*relation.names, Name(generator.table, names[0], inner)))
    fields: dict[str, pl.Expr] = {}
    for field in typed.type.inner.fields:
        name = free_name(field.name, [*columns_of(stream), *fields])
        fields[name] = pl.col(inner).struct.field(field.name)
    new = [Name(generator.table, name, inner) for name, inner in zip(names, fields, strict=True)]
    return replace(relation, stream=steps.computed(stream, fields), names=(*relation.names, *new))


def selected_generator(
    node: exp.Select, relation: Relation, items: list[Item], steps: Steps
) -> tuple[Relation, list[Item]]:
    """The rows and the columns of a SELECT with `explode` among its columns; the same ones without."""
    found = [place for place, each in enumerate(items) if each.column is None and is_generator(each.node)]
    if not found:
        return relation, items
    if len(found) > 1 or node.args.get("group") is not None:
        raise refused(items[found[-1]].node, _ALONE)
    item = items[found[0]]
    call = item.node
    generator = _called(call, False, None, (item.name,))
    relation = exploded(relation, generator, steps, lambda each: pruned_to(node, each, steps, generator.values))
    element = relation.names[-1]
    items = [*items[: found[0]], Item(item.name, call, element), *items[found[0] + 1 :]]
    # Nothing calls it by its name in this query, and it stays where columns that nothing names are left out.
    return replace(relation, names=(*relation.names[:-1], replace(element, name=_ELEMENT))), items


def pruned_to(select: exp.Select, relation: Relation, steps: Steps, besides: exp.Expr | None = None) -> Relation:
    """A relation without the columns that a query does not name, or names only in one part of it (`besides`)."""
    if any(not isinstance(star.parent, exp.Anonymous) for star in select.find_all(exp.Star)):
        return relation
    inside = set() if besides is None else {id(each) for each in besides.find_all(exp.Column)}
    used = [each for join in select.args.get("joins") or [] for each in join.args.get("using") or []]
    wanted = {_HIDDEN, *(each.name.lower() for each in used)}
    for each in columns_in(select):
        if id(each) not in inside:
            wanted |= {each.name.lower(), each.table.lower()}
    return pruned(relation, lambda each: each.name.lower() in wanted, steps)


_ELEMENT = "element of explode"
_HIDDEN = "list to explode"
"""The name of the column whose elements become rows, as long as it is a list."""


def _called(call: exp.Expr, outer: bool, table: str | None, columns: tuple[str, ...]) -> Generator:
    arguments = call.expressions
    if len(arguments) != 1:
        raise refused(call, f"{call.name.upper()} takes 1 argument, and here are {len(arguments)}")
    return Generator(call, arguments[0], outer or is_call(call, _OUTER), table, columns)


def _alias(node: exp.Expr) -> tuple[str | None, tuple[str, ...]]:
    alias = node.args.get("alias")
    if not isinstance(alias, exp.TableAlias):
        return None, ()
    return alias.name or None, tuple(each.name for each in alias.args.get("columns") or [])


def _names_of(generator: Generator, element: Any) -> Sequence[str]:
    """The names of the new columns. ConfigurationError if there are too many of them, or none where one is needed."""
    given, node = generator.columns, generator.node
    if generator.expands and isinstance(element, pl.Struct):
        fields = [field.name for field in element.fields]
        if given and len(given) != len(fields):
            raise refused(node, f"each element has the fields {', '.join(fields)}: name a column for each, or none")
        return given or fields
    if len(given) > 1:
        raise refused(node, f"an element becomes one column, and here are {len(given)} names")
    if not given and generator.expands:
        raise refused(node, "name the column of the elements, as in UNNEST(tags) AS t(tag)")
    return given or ("col",)
