"""Translates FROM: tables, windows over tables, queries, and the joins between them, in the order of the query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa
from sqlglot import exp

from tidegate.api.program import LookupView, Views
from tidegate.api.tables.lookup_tables import reader_of
from tidegate.sql.expressions import Expressions
from tidegate.sql.grouping import EmitOptions
from tidegate.sql.joining import StreamJoin, how_of
from tidegate.sql.query_text import check_only, errors_at, refused
from tidegate.sql.ranking import ranked, taken_limit
from tidegate.sql.relations import Name, Relation, Steps, all_of, columns_in, columns_of, conjuncts, free_name, types_of
from tidegate.sql.selecting import Generator, exploded, joined_generator, lateral_generator, pruned_to
from tidegate.sql.typed_values import Typed, as_type, calculated, check_known, needed_common_type
from tidegate.sql.windows import window_call, windowed_table


class From:
    """The FROM clause of one SELECT.

    `query` translates a query in FROM, and `named` returns a query of WITH by its name.
    """

    def __init__(
        self,
        select: exp.Select,
        steps: Steps,
        views: Views,
        emit_options: EmitOptions,
        query: Callable[[exp.Expr], Relation],
        named: Callable[[str], Relation | None],
    ) -> None:
        self._select, self._steps, self._views, self._emit_options = select, steps, views, emit_options
        self._query, self._named = query, named

    def relation(self, conditions: list[exp.Expr]) -> Relation:
        """Returns the rows of the FROM clause.

        `conditions` are the conditions of WHERE. Conditions that joins and rankings apply are removed from the list.
        """
        from_ = self._select.args.get("from_")
        if from_ is None:
            raise refused(self._select, "a query needs FROM, with the stream that it reads")
        joins, laterals = self._select.args.get("joins") or [], self._select.args.get("laterals") or []
        generators = [joined_generator(each) for each in joins]
        movable = all(
            how_of(each) in ("inner", "left", "semi", "anti")
            for each, generator in zip(joins, generators, strict=True)
            if generator is None
        )
        found = self._table(from_.this, conditions if movable else [])
        if isinstance(found, Lookup):
            raise refused(
                from_.this, "FROM must begin with a stream: name a stream first, and join the registered table with it"
            )
        relation = self._pruned(found) if joins else found
        for join, generator in zip(joins, generators, strict=True):
            if generator is not None:
                relation = self._exploded(relation, generator)
            else:
                relation = self._joined(relation, join, conditions if movable else [])
        for lateral in laterals:
            relation = self._exploded(relation, lateral_generator(lateral))
        return relation

    def _exploded(self, relation: Relation, generator: Generator) -> Relation:
        """Returns the relation with a row for each element of a list. Columns that only the list needs are removed."""
        return exploded(relation, generator, self._steps, lambda each: self._pruned(each, generator.values))

    # --- tables ---------------------------------------------------------------------------------------------------

    def _table(self, node: exp.Expr, conditions: list[exp.Expr]) -> Relation | Lookup:
        """Returns a table, stream or query under its alias.

        If it has a rank, applies the condition that limits the rank, and removes it from `conditions`.
        """
        found = self._read(node)
        if isinstance(found, Lookup) or found.rank is None:
            return found
        limit = taken_limit(conditions, found)
        if limit is None:
            raise refused(node, "a rank needs an outer condition that limits the number of rows, as in WHERE rn <= 10")
        return ranked(found, limit, self._names_rank(found), self._steps, self._emit_options)

    def _names_rank(self, relation: Relation) -> bool:
        """Returns whether the query reads the rank.

        The condition that limits the rank was removed before, and is not considered.
        """
        if any(True for each in self._select.expressions for _ in each.find_all(exp.Star)):
            return True
        (rank,) = (each.name.lower() for each in relation.names if each.rank)
        where = self._select.args.get("where")
        named = [each for each in columns_in(self._select) if each.name.lower() == rank]
        in_where = [] if where is None else [each for each in columns_in(where) if each.name.lower() == rank]
        return len(named) > 1 or len(named) > len(in_where)

    def _read(self, node: exp.Expr) -> Relation | Lookup:
        if isinstance(node, exp.Subquery):
            check_only(node, "this", "alias", "with_")
            return self._query(node)
        if not isinstance(node, exp.Table):
            raise refused(node, f"{node.key.upper()} in FROM is not covered; see docs/sql.md")
        check_only(node, "this", "alias", "db", "catalog", *(["version"] if isinstance(node.parent, exp.Join) else []))
        alias, columns = node.args.get("alias"), []
        if isinstance(alias, exp.TableAlias):
            columns = [each.name for each in alias.args.get("columns") or []]
        call = window_call(node)
        if call is not None:
            found: Relation | Lookup = windowed_table(call, self._stream, Expressions(_no_column).of)
        else:
            found = self._named_table(node)
        table = node.alias or (node.name if call is None else None)
        if isinstance(found, Lookup):
            return Lookup(found.view, table)
        return found.called(table or (found.names[0].table if found.names else None), columns)

    def _named_table(self, node: exp.Expr) -> Relation | Lookup:
        if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
            raise refused(node, "FROM takes views, queries, and TUMBLE, HOP, CUMULATE or SESSION over a view")
        if node.args.get("db") is not None:
            raise refused(node, "there are neither databases nor catalogs: write the name of the view alone")
        found = self._named(node.name)
        if found is not None:
            return found
        view = self._views.find(node.name)
        if view is None:
            raise refused(
                node,
                f"there is no view {node.name!r}; there are {self._views.listed()}. Register a stream with "
                f"create_temporary_view({node.name!r}, stream)",
            )
        return Lookup(view, node.name) if isinstance(view, LookupView) else Relation.of(view, node.name)

    def _stream(self, node: exp.Expr) -> Relation:
        found = self._named_table(node)
        if isinstance(found, Lookup):
            raise refused(node, "a registered table has no event time: use windows over streams")
        return found

    # --- joins ----------------------------------------------------------------------------------------------------

    def _joined(self, left: Relation, join: exp.Join, where: list[exp.Expr]) -> Relation:
        check_only(join, "this", "side", "kind", "method", "on", "using")
        how = how_of(join)
        conditions = _and(join.args.get("on"))
        found = self._table(join.this, where if how == "inner" else [])
        if isinstance(found, Lookup):
            return looked_up(join, left, found, conditions, where, self._steps)
        right = self._pruned(found)
        using = join.args.get("using") or []
        if using and how not in ("inner", "left", "semi", "anti"):
            raise refused(join, f"USING in a {how.upper()} JOIN is not covered: name both columns with ON")
        conditions += [self._same(each, left, right) for each in using]
        if how == "inner":
            merged = {each.name.lower() for each in using}
            for each in [e for e in where if self._is_of(e, left, right, merged)]:
                where.remove(each)
                conditions.append(each)
        made = StreamJoin(join, left, right, self._steps, self._emit_options.ttl).result(conditions)
        if not using or how in ("semi", "anti"):
            return made
        merged = {each.name.lower() for each in using}
        tables = {each.table for each in right.names}
        hidden = {(table, name) for table in tables for name in merged}
        return replace(made, names=tuple(e for e in made.names if (e.table, e.name.lower()) not in hidden))

    def _same(self, name: exp.Expr, left: Relation, right: Relation) -> exp.Expr:
        """Returns the condition that the column `name` of both sides is equal, for USING."""
        found = []
        for side in (left, right):
            column = side.find(exp.column(name.copy()))
            table = None if column.table is None else exp.to_identifier(column.table, quoted=True)
            found.append(exp.column(exp.to_identifier(column.name, quoted=True), table))
        return exp.EQ(this=found[0], expression=found[1])

    def _is_of(self, node: exp.Expr, left: Relation, right: Relation, merged: set[str]) -> bool:
        """Returns whether a condition of WHERE refers only to columns of these two relations, so that their join may
        apply the condition. False for conditions on the `merged` columns, which USING has merged.
        """
        columns = columns_in(node)
        if any(not each.table and each.name.lower() in merged for each in columns):
            return False
        return bool(columns) and all(left.has(each) or right.has(each) for each in columns)

    def _pruned(self, relation: Relation, besides: exp.Expr | None = None) -> Relation:
        """Returns a relation without the columns that the query does not use.

        Columns that the query uses only in its part `besides` are removed as well.
        """
        return pruned_to(self._select, relation, self._steps, besides)


def _and(node: exp.Expr | None) -> list[exp.Expr]:
    return [each for each in conjuncts(node) if not (isinstance(each, exp.Boolean) and each.this)]


def _no_column(column: exp.Column) -> Typed:
    raise refused(column, "this argument must be a literal, because a column has no value before the table is read")


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table registered for lookup joins, with its alias in the query."""

    view: LookupView
    table: str | None


def looked_up(
    node: exp.Join, left: Relation, lookup: Lookup, conditions: list[exp.Expr], where: list[exp.Expr], steps: Steps
) -> Relation:
    """Returns the lookup join of a stream with a table. `conditions` are the conditions of ON.

    For an inner join, equalities in `where` are used as keys too, and are removed from the list. Raises
    ConfigurationError for conditions other than equalities.
    """
    how = how_of(node)
    if how not in ("inner", "left"):
        raise refused(
            node, "a join with a table must be INNER or LEFT, because rows of the table alone are never emitted"
        )
    read, schema, changes = reader_of(lookup.view.table)
    right = [Name(lookup.table, name, name) for name in schema.names]
    keys, rest = _keys(conditions, left, right)
    merged = {each.name.lower() for each in node.args.get("using") or []}
    keys += [_same(each, left, right) for each in node.args.get("using") or []]
    if how == "inner":
        keys += _taken_keys(where, left, right, merged)
    if not keys or (rest and how == "left"):
        raise refused(
            rest[0] if rest else node,
            "a join with a registered table needs equalities between a column of the table and a column of the "
            "stream, and a LEFT JOIN takes no other conditions",
        )
    pairs: list[tuple[str, str]] = []
    computed: dict[str, pl.Expr] = {}
    types = types_of(schema)
    for number, (of_left, column) in enumerate(keys, start=1):
        typed = Expressions(left.typed).of(of_left)
        with errors_at(node):
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
    # In a LEFT join the key of the table may be null where the key of the stream is not. Other keys may have another
    # type than the column of the table.
    copied = {name for name in names if how == "left" or calculated(types[name]) != types[name]}
    keyed = [(column, f"{new[column]} key {number}") for number, (_, column) in enumerate(pairs, start=1)]
    as_calculated = {column: _ARROW.get(types[column].base_type()) for column in names}
    read_as = partial(_renamed, read, new, tuple(keyed), frozenset(copied), as_calculated)
    on = [(key, of_table) for (key, _), (_, of_table) in zip(pairs, keyed, strict=True)]
    with errors_at(node):
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
    """Returns a value of the stream converted to the type of a key column of the table.

    Null if the key type has no equal value, so that no row of the table matches.
    """
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
"""For key types that SQL calculates in another type (see `calculated`), the Arrow type in which keys of the table are
compared.
"""


def _renamed(
    read: Callable[[], pa.Table],
    new: dict[str, str],
    keys: tuple[tuple[str, str], ...],
    copied: frozenset[str],
    calculated: dict[str, pa.DataType | None],
) -> pa.Table:
    """Reads the table and renames its columns. `keys` are pairs of a column and the name of its key column. Columns in
    `copied` also stay under their own name.

    `calculated` has the type to which a key column is cast, or None.
    """
    table, by = read(), dict(keys)
    columns = {new[name]: table.column(name) for name in table.column_names if name in copied or name not in by}
    for name, key in keys:
        wanted = calculated[name]
        columns[key] = table.column(name) if wanted is None else table.column(name).cast(wanted)
    return pa.table(columns)


def _taken_keys(
    where: list[exp.Expr], left: Relation, right: list[Name], merged: set[str]
) -> list[tuple[exp.Expr, str]]:
    """Removes the equalities between stream and table from WHERE. Returns pairs of an expression of the stream and a
    column of the table.

    Columns that USING merges belong to the stream.
    """
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
    """Returns the equality for a column of USING: the column of the stream and the column of the table."""
    found = left.find(exp.column(name.copy()))
    column = next((each.inner for each in right if each.name.lower() == name.name.lower()), None)
    if column is None:
        raise refused(name, f"the table has no column {name.name!r}; name one of {', '.join(e.name for e in right)}")
    table = None if found.table is None else exp.to_identifier(found.table, quoted=True)
    return exp.column(exp.to_identifier(found.name, quoted=True), table), column


def _keys(
    conditions: list[exp.Expr], left: Relation, right: list[Name]
) -> tuple[list[tuple[exp.Expr, str]], list[exp.Expr]]:
    """Divides conditions into pairs of a stream expression and the table column that it must equal, and other
    conditions.
    """
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
    """Returns the column of the table to which a name refers, or None if it does not refer to the table."""
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
