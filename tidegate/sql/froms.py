"""FROM: tables, windows over them, queries, and the joins between them, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sqlglot import exp

from tidegate.api.views import LookupView, Views
from tidegate.sql.exploding import Generator, exploded, joined_generator, lateral_generator, pruned_to
from tidegate.sql.expressions import Expressions
from tidegate.sql.grouping import Keeping
from tidegate.sql.joining import StreamJoin, how_of
from tidegate.sql.lookups import Lookup, looked_up
from tidegate.sql.ranking import ranked, taken_limit
from tidegate.sql.relations import Relation, columns_in, conjuncts
from tidegate.sql.steps import Steps
from tidegate.sql.text.places import check_only, refused
from tidegate.sql.values.typed import Typed
from tidegate.sql.windows import window_call, windowed_table


class From:
    """What one SELECT reads."""

    def __init__(
        self,
        select: exp.Select,
        steps: Steps,
        views: Views,
        keeping: Keeping,
        query: Callable[[exp.Expr], Relation],
        named: Callable[[str], Relation | None],
    ) -> None:
        self._select, self._steps, self._views, self._keeping = select, steps, views, keeping
        self._query, self._named = query, named

    def relation(self, conditions: list[exp.Expr]) -> Relation:
        """The rows. Conditions of WHERE that joins and rankings need are taken out of the list."""
        from_ = self._select.args.get("from_")
        if from_ is None:
            raise refused(self._select, "a query reads streams: FROM is not there")
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
                from_.this, "a registered table is no stream: name a stream first, and join the table with it"
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
        """A row for each element of a list. What only the list was needed for is not repeated with it."""
        return exploded(relation, generator, self._steps, lambda each: self._pruned(each, generator.values))

    # --- tables ---------------------------------------------------------------------------------------------------

    def _table(self, node: exp.Expr, conditions: list[exp.Expr]) -> Relation | Lookup:
        """A table under its alias, ranked if a condition says so."""
        found = self._read(node)
        if isinstance(found, Lookup) or found.rank is None:
            return found
        limit = taken_limit(conditions, found)
        if limit is None:
            raise refused(node, "a rank needs a condition around it that says how many rows stay, as in WHERE rn <= 10")
        return ranked(found, limit, self._names_rank(found), self._steps, self._keeping)

    def _names_rank(self, relation: Relation) -> bool:
        """Whether the query reads the rank. Its condition has been taken out already."""
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
            raise refused(node, f"{node.key.upper()} in FROM is not covered; docs/sql.md says what is")
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
            raise refused(node, "FROM takes views, queries, and TUMBLE, HOP, CUMULATE or SESSION of one")
        if node.args.get("db") is not None:
            raise refused(node, "views have one name: there are neither databases nor catalogs")
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
            raise refused(node, "a registered table has no event time: windows are of streams")
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
            raise refused(join, f"USING of a {how.upper()} JOIN is not covered: name both columns with ON")
        conditions += [self._same(each, left, right) for each in using]
        if how == "inner":
            merged = {each.name.lower() for each in using}
            for each in [e for e in where if self._is_of(e, left, right, merged)]:
                where.remove(each)
                conditions.append(each)
        made = StreamJoin(join, left, right, self._steps, self._keeping.ttl).result(conditions)
        if not using or how in ("semi", "anti"):
            return made
        merged = {each.name.lower() for each in using}
        tables = {each.table for each in right.names}
        hidden = {(table, name) for table in tables for name in merged}
        return replace(made, names=tuple(e for e in made.names if (e.table, e.name.lower()) not in hidden))

    def _same(self, name: exp.Expr, left: Relation, right: Relation) -> exp.Expr:
        """The condition that USING stands for."""
        found = []
        for side in (left, right):
            column = side.find(exp.column(name.copy()))
            table = None if column.table is None else exp.to_identifier(column.table, quoted=True)
            found.append(exp.column(exp.to_identifier(column.name, quoted=True), table))
        return exp.EQ(this=found[0], expression=found[1])

    def _is_of(self, node: exp.Expr, left: Relation, right: Relation, merged: set[str]) -> bool:
        """Whether a condition of WHERE is of these two alone, so that the join may have it; not of `merged` columns."""
        columns = columns_in(node)
        if any(not each.table and each.name.lower() in merged for each in columns):
            return False
        return bool(columns) and all(left.has(each) or right.has(each) for each in columns)

    def _pruned(self, relation: Relation, besides: exp.Expr | None = None) -> Relation:
        """Without the columns that the query does not name, or names in one part of it alone."""
        return pruned_to(self._select, relation, self._steps, besides)


def _and(node: exp.Expr | None) -> list[exp.Expr]:
    return [each for each in conjuncts(node) if not (isinstance(each, exp.Boolean) and each.this)]


def _no_column(column: exp.Column) -> Typed:
    raise refused(column, "this is written out: a column is not known yet")
