"""A join with a registered table: `lookup_join`, as a stream-static join of Spark, or Flink's lookup join."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa
from sqlglot import exp

from tidegate.api.tables.lookup_tables import reader_of
from tidegate.api.views import LookupView
from tidegate.sql.expressions import Expressions
from tidegate.sql.joining import how_of
from tidegate.sql.relations import Name, Relation, all_of, columns_in, columns_of, free_name, types_of
from tidegate.sql.steps import Steps
from tidegate.sql.text.places import refused, standing_at
from tidegate.sql.values.typed import Typed, as_type
from tidegate.sql.values.types import calculated, check_known, needed_common_type


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table in a query, under its alias."""

    view: LookupView
    table: str | None


def looked_up(
    node: exp.Join, left: Relation, lookup: Lookup, conditions: list[exp.Expr], where: list[exp.Expr], steps: Steps
) -> Relation:
    """The rows of a stream with those of a table. ConfigurationError for conditions that are no equalities.

    Of an inner join equalities in `where` count, too; they are taken out of the list.
    """
    how = how_of(node)
    if how not in ("inner", "left"):
        raise refused(node, "a join with a table is INNER or LEFT: rows of the table alone never come")
    read, schema, changes = reader_of(lookup.view.table)
    right = [Name(lookup.table, name, name) for name in schema.names]
    keys, rest = _keys(conditions, left, right)
    merged = {each.name.lower() for each in node.args.get("using") or []}
    keys += [_same(each, left, right) for each in node.args.get("using") or []]
    if how == "inner":
        keys += _taken_keys(where, left, right, merged)
    if not keys or (rest and how == "left"):
        raise refused(rest[0] if rest else node, "a join with a table takes equalities of its columns with the stream")
    pairs: list[tuple[str, str]] = []
    computed: dict[str, pl.Expr] = {}
    types = types_of(schema)
    for number, (of_left, column) in enumerate(keys, start=1):
        typed = Expressions(left.typed).of(of_left)
        with standing_at(node):
            check_known(column, types[column])
        cast = _as_key(of_left, typed, calculated(types[column]))
        same = typed.expr.meta.output_name() if cast is typed and typed.expr.meta.is_column() else None
        if same is not None and same not in dict(pairs):
            pairs.append((same, column))
            continue
        name = free_name(f"key_{number}", [*columns_of(left.stream), *computed])
        computed[name] = cast.expr
        pairs.append((name, column))
    stream = steps.computed(left.stream, computed)
    new: dict[str, str] = {}
    for name in schema.names:
        new[name] = free_name(name, [*columns_of(stream), *new.values()])
    names = {column: key for key, column in pairs}
    # Of a LEFT join a key of the table may be null where that of the stream is not; others may be of another type.
    copied = {name for name in names if how == "left" or calculated(types[name]) != types[name]}
    keyed = [(column, f"{new[column]} key {number}") for number, (_, column) in enumerate(pairs, start=1)]
    as_calculated = {column: _ARROW.get(types[column].base_type()) for column in names}
    read_as = partial(_renamed, read, new, tuple(keyed), frozenset(copied), as_calculated)
    on = [(key, of_table) for (key, _), (_, of_table) in zip(pairs, keyed, strict=True)]
    with standing_at(node):
        made = stream.lookup_join(
            read_as,
            on=on,
            how="left" if how == "left" else "inner",
            refresh=lookup.view.refresh if changes else None,
            max_stale=lookup.view.max_stale,
            uid=steps.uid("lookup"),
        )
    inner = {name: names[name] if name in names and name not in copied else new[name] for name in schema.names}
    shown = [each for each in right if each.name.lower() not in merged]
    of_table = (Name(each.table, each.name, inner[each.inner]) for each in shown)
    result = replace(left, stream=made, names=(*left.names, *of_table))
    if not rest:
        return result
    expressions = Expressions(result.typed)
    return result.with_stream(steps.filtered(made, all_of([expressions.condition(each) for each in rest])))


def _as_key(node: exp.Expr, given: Typed, wanted: Any) -> Typed:
    """A value in the type of a column of the table; null, which finds nothing, where that type has no equal value."""
    common = needed_common_type(node, [given.type, wanted])
    cast = as_type(node, given, wanted)
    if cast is given or common == wanted:
        return cast
    same = as_type(node, cast, common).expr == as_type(node, given, common).expr
    return Typed(pl.when(same).then(cast.expr), wanted)


_ARROW: dict[Any, pa.DataType] = {
    pl.UInt8: pa.int16(),
    pl.UInt16: pa.int32(),
    pl.UInt32: pa.int64(),
    pl.Categorical: pa.string(),
    pl.Enum: pa.string(),
}
"""Types in which a key of a table is compared, where that is not its own (`calculated`)."""


def _renamed(
    read: Callable[[], pa.Table],
    new: dict[str, str],
    keys: tuple[tuple[str, str], ...],
    copied: frozenset[str],
    calculated: dict[str, pa.DataType | None],
) -> pa.Table:
    """The table with other names, and its keys apart, as they are compared; also under their own where `copied`."""
    table, by = read(), dict(keys)
    columns = {new[name]: table.column(name) for name in table.column_names if name in copied or name not in by}
    for name, key in keys:
        wanted = calculated[name]
        columns[key] = table.column(name) if wanted is None else table.column(name).cast(wanted)
    return pa.table(columns)


def _taken_keys(
    where: list[exp.Expr], left: Relation, right: list[Name], merged: set[str]
) -> list[tuple[exp.Expr, str]]:
    """Equalities of both in WHERE, which has them no more. Names that USING merges are the stream's."""
    keys = []
    for node in list(where):
        if any(not each.table and each.name.lower() in merged for each in columns_in(node)):
            continue
        found, _ = _keys([node], left, right)
        of_left = [columns_in(one) for one, _ in found]
        if found and of_left[0] and all(left.has(each) for each in of_left[0]):
            keys += found
            where.remove(node)
    return keys


def _same(name: exp.Expr, left: Relation, right: list[Name]) -> tuple[exp.Expr, str]:
    """The equality that USING stands for."""
    found = left.find(exp.column(name.copy()))
    column = next((each.inner for each in right if each.name.lower() == name.name.lower()), None)
    if column is None:
        raise refused(name, f"the table has no column {name.name!r}; it has {', '.join(e.name for e in right)}")
    table = None if found.table is None else exp.to_identifier(found.table, quoted=True)
    return exp.column(exp.to_identifier(found.name, quoted=True), table), column


def _keys(
    conditions: list[exp.Expr], left: Relation, right: list[Name]
) -> tuple[list[tuple[exp.Expr, str]], list[exp.Expr]]:
    """Equalities of an expression of the stream and a column of the table; and the other conditions."""
    keys: list[tuple[exp.Expr, str]] = []
    rest: list[exp.Expr] = []
    for node in conditions:
        found = None
        if isinstance(node, exp.EQ):
            for one, other in ((node.this, node.expression), (node.expression, node.this)):
                column = _column(other, right, left)
                if column is not None and all(_column(each, right, left) is None for each in columns_in(one)):
                    found = (one, column)
                    break
        if found is None:
            rest.append(node)
        else:
            keys.append(found)
    return keys, rest


def _column(node: exp.Expr, right: list[Name], left: Relation) -> str | None:
    """The column of the table that a name means; None if it means none of them."""
    if not isinstance(node, exp.Column):
        return None
    named = [
        each.inner
        for each in right
        if each.name.lower() == node.name.lower()
        and (not node.table or (each.table or "").lower() == node.table.lower())
    ]
    if not node.table and named and any(each.name.lower() == node.name.lower() for each in left.names):
        raise refused(node, f"{node.name!r} is ambiguous: name the table before it")
    return named[0] if named else None
