"""Translates the columns of SELECT: stars, columns of the stream that are only renamed, computed expressions, and
`explode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
from sqlglot import exp

from tidegate.sql.expressions import Expressions
from tidegate.sql.joining import pruned
from tidegate.sql.query_text import check_only, errors_at, is_call, refused
from tidegate.sql.ranking import is_ranking
from tidegate.sql.relations import Name, Rank, Relation, Steps, columns_in, columns_of, free_name
from tidegate.sql.typed_values import Interval, named


@dataclass(frozen=True, slots=True)
class Item:
    """A column of SELECT: an expression `node` with its name, or one column (`column`) of an expanded star."""

    name: str
    node: exp.Expr
    column: Name | None = None


def items_of(select: exp.Select, relation: Relation) -> list[Item]:
    """Returns the columns of SELECT, with stars expanded.

    A column without a name is named by its position: `_c0`, `_c1`.
    """
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
            raise refused(node, "a column can have only one name: remove one AS")
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
        raise refused(
            node, f"there is no table {table!r} here: write the name of a table in FROM, or remove the prefix"
        )
    if star.args.get("replace") or star.args.get("rename"):
        raise refused(node, "REPLACE and RENAME after * are not covered: name the columns instead")
    excluded = {each.name.lower() for each in star.args.get("except_") or []}
    found = [each for each in relation.names if not table or (each.table or "").lower() == table]
    unknown = excluded - {each.name.lower() for each in found}
    if unknown:
        raise refused(node, f"EXCEPT names {', '.join(sorted(unknown))}, but there is no such column: remove the name")
    return [each for each in found if each.name.lower() not in excluded]


def selected(
    relation: Relation,
    items: list[Item],
    expressions: Expressions,
    steps: Steps,
    rank: Rank | None,
    plain: bool,
) -> Relation:
    """Returns the relation with the columns of SELECT under their names.

    - `rank`: the ranking that one of the columns defines, or None.
    - `plain`: True if columns of the relation are copied with their types. If False, `expressions` translates them.
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
            raise refused(
                item.node, "an interval cannot be a column: add it to a time, or write a number of milliseconds"
            )
        if typed.expr.meta.is_column():
            inner = typed.expr.meta.output_name()
        if inner is None:
            inner = free_name(item.name, [*taken, *computed])
            computed[inner] = typed.expr if not typed.is_null else pl.lit(None, dtype=pl.String)
        names.append(Name(None, item.name, inner))
    with errors_at(items[0].node):
        stream = steps.computed(relation.stream, computed)
    return replace(relation, stream=stream, names=tuple(names), rank=rank if rank is not None else relation.rank)


def _waiting(node: exp.Expr, relation: Relation) -> Name | None:
    """Returns the window bound or rank to which a SELECT item refers, if its value is not computed yet.

    None for other items.
    """
    if not isinstance(node, exp.Column) or relation.root(node) is not node:
        return None
    if not (relation.windows is not None or relation.rank is not None):
        return None
    found = relation.find(node)
    return found if found.bound or found.rank else None


def _plain_column(node: exp.Expr, relation: Relation) -> str | None:
    """Returns the column of the stream to which an expression refers, whatever its type is.

    None for other expressions.
    """
    if not isinstance(node, exp.Column) or relation.root(node) is not node:
        return None
    return relation.find(node).inner


_PLAIN, _OUTER = "EXPLODE", "EXPLODE_OUTER"
_ALONE = "SELECT takes EXPLODE alone, once and without groups; elsewhere write LATERAL VIEW EXPLODE(…) t AS x"
_TABLES = (
    "LATERAL takes EXPLODE(…) or EXPLODE_OUTER(…) of a list. Use flat_map for other functions that return several "
    "rows, and a join for a query for each row"
)


@dataclass(frozen=True, slots=True)
class Generator:
    """A call such as `explode` that makes a row for each element of a list.

    `values` is the list. `outer` is True if a row without elements is kept. `table` and `columns` are the new names.
    `expands` is True if the fields of a struct element become columns.
    """

    node: exp.Expr
    values: exp.Expr
    outer: bool
    table: str | None
    columns: tuple[str, ...]
    expands: bool = False


def is_generator(node: exp.Expr) -> bool:
    """Returns whether an expression is a call of `explode` or `explode_outer`."""
    return is_call(node, _PLAIN, _OUTER)


def joined_generator(join: exp.Join) -> Generator | None:
    """Returns the generator (UNNEST or LATERAL) after a JOIN or a comma, or None for a table or a query.

    Raises ConfigurationError for a form that is not supported.
    """
    if not isinstance(join.this, exp.Unnest | exp.Lateral):
        return None
    check_only(join, "this", "side", "kind", "on")
    side, kind = str(join.side or "").upper(), str(join.kind or "").upper()
    on = join.args.get("on")
    if side not in ("", "LEFT") or kind not in ("", "CROSS", "INNER", "OUTER"):
        raise refused(join, "join the elements of a list with CROSS JOIN, or with LEFT JOIN … ON TRUE")
    if on is not None and not (isinstance(on, exp.Boolean) and on.this):
        raise refused(on, "join the elements of a list with ON TRUE: put the condition into WHERE")
    if isinstance(join.this, exp.Lateral):
        found = lateral_generator(join.this)
        return replace(found, outer=found.outer or side == "LEFT")
    unnest = join.this
    if unnest.args.get("offset"):
        raise refused(unnest, "WITH ORDINALITY is not covered: remove it")
    check_only(unnest, "expressions", "alias")
    if len(unnest.expressions) != 1:
        raise refused(unnest, "UNNEST takes one list: write a CROSS JOIN UNNEST for each")
    table, columns = _alias(unnest)
    return Generator(unnest, unnest.expressions[0], side == "LEFT", table, columns, expands=True)


def lateral_generator(node: exp.Lateral) -> Generator:
    """Returns the generator after LATERAL.

    Raises ConfigurationError for functions other than `explode` and `explode_outer`.
    """
    if node.args.get("ordinality"):
        raise refused(node, "WITH ORDINALITY is not covered: remove it")
    check_only(node, "this", "view", "outer", "alias")
    table, columns = _alias(node)
    if not is_generator(node.this):
        raise refused(node.this, _TABLES)
    return _called(node.this, bool(node.args.get("outer")), table, columns)


def exploded(
    relation: Relation, generator: Generator, steps: Steps, narrow: Callable[[Relation], Relation]
) -> Relation:
    """Returns the relation with a row for each element of a list, and the other columns repeated.

    `narrow` removes columns that are not needed afterwards.
    """
    if relation.rank is not None:
        raise refused(
            generator.node,
            "a rank needs an outer condition that limits the number of rows: write WHERE rn <= 10 around it",
        )
    typed = Expressions(relation.typed).of(generator.values)
    if not isinstance(typed.type, pl.List | pl.Array):
        raise refused(
            generator.values,
            f"a list is needed here, but this is {named(typed.type)}; give a column of lists, or array(...)",
        )
    names = _names_of(generator, typed.type.inner)
    inner = free_name(generator.columns[0] if generator.columns else "element", columns_of(relation.stream))
    relation = relation.with_stream(steps.computed(relation.stream, {inner: typed.expr}))
    kept = narrow(replace(relation, names=(*relation.names, Name(None, _HIDDEN, inner))))
    relation = replace(kept, names=tuple(each for each in kept.names if each.name != _HIDDEN))
    stream = kept.stream
    with errors_at(generator.node):
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
    """Applies an `explode` among the columns of a SELECT. Returns the new rows and the columns of SELECT.

    Without `explode` both are returned unchanged.
    """
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
    # This query does not refer to the element by name, but pruning must keep its column.
    return replace(relation, names=(*relation.names[:-1], replace(element, name=_ELEMENT))), items


def pruned_to(select: exp.Select, relation: Relation, steps: Steps, besides: exp.Expr | None = None) -> Relation:
    """Returns a relation without the columns that a query does not use, or uses only in the part `besides`."""
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
"""Name of the column of lists before its elements become rows."""


def _called(call: exp.Expr, outer: bool, table: str | None, columns: tuple[str, ...]) -> Generator:
    arguments = call.expressions
    if len(arguments) != 1:
        raise refused(
            call,
            f"{call.name.upper()} takes 1 argument, not {len(arguments)}: give exactly one",
        )
    return Generator(call, arguments[0], outer or is_call(call, _OUTER), table, columns)


def _alias(node: exp.Expr) -> tuple[str | None, tuple[str, ...]]:
    alias = node.args.get("alias")
    if not isinstance(alias, exp.TableAlias):
        return None, ()
    return alias.name or None, tuple(each.name for each in alias.args.get("columns") or [])


def _names_of(generator: Generator, element: Any) -> Sequence[str]:
    """Returns the names of the new columns.

    Raises ConfigurationError if the query gives too many names, or lacks one.
    """
    given, node = generator.columns, generator.node
    if generator.expands and isinstance(element, pl.Struct):
        fields = [field.name for field in element.fields]
        if given and len(given) != len(fields):
            raise refused(node, f"each element has the fields {', '.join(fields)}: name a column for each, or none")
        return given or fields
    if len(given) > 1:
        raise refused(node, f"an element becomes one column, but {len(given)} names are given: give one name")
    if not given and generator.expands:
        raise refused(node, "name the column of the elements, as in UNNEST(tags) AS t(tag)")
    return given or ("col",)
