"""`translate` translates a query into a stream, by adding steps of the public API to a program.

A query in FROM is translated before its outer query, and becomes a `Relation`. A SELECT is translated in this order:
FROM and joins, WHERE, groups, HAVING, its columns, and LIMIT. Only the outermost query names columns in the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlglot import exp

from tidegate.api.program import Program, UserFunctions, Views, functions_of
from tidegate.api.streams.stream import Stream
from tidegate.operators.aggregates.aggregate import count
from tidegate.operators.changes import CHANGE
from tidegate.sql.expressions import Expressions
from tidegate.sql.froms import From
from tidegate.sql.grouping import Emit, EmitOptions, Grouping, aggregates_in, is_grouped
from tidegate.sql.joining import pruned
from tidegate.sql.query_text import check_only, errors_at, parse, refused
from tidegate.sql.ranking import is_ranking, ordered, rank_of, ranked, taken_limit
from tidegate.sql.relations import Name, Relation, Steps, all_of, columns_of, conjuncts, free_name, prefix_of
from tidegate.sql.selecting import Item, items_of, selected, selected_generator
from tidegate.sql.typed_values import as_type, common_type, named
from tidegate.sql.windows import with_bound_conditions
from tidegate.storage.errors import ConfigurationError

Queries = Mapping[str, "_Bound"]
_ORDER = (
    "a stream has no end, so it cannot be sorted: for the first rows write ORDER BY … LIMIT n, or for each key "
    "ROW_NUMBER() OVER (PARTITION BY … ORDER BY …) with a condition on it, or sort the collected rows"
)
_OFFSET = "OFFSET is not covered: write LIMIT n without it"
_QUALIFY = "QUALIFY takes a condition on one ROW_NUMBER() OVER (…), as in … <= 3"
_REFUSED = {
    "offset": _OFFSET,
    "sort": _ORDER,
    "windows": "named windows are not covered: write the window in OVER (…)",
    "sample": "a sample is random, so a replay would give other rows: select rows by a column, as in WHERE id % 100 = "
    "0",
    "pivots": "PIVOT is not covered: write aggregates with FILTER (WHERE …)",
    "distribute": "steps partition rows themselves: remove it",
    "cluster": "steps partition rows themselves: remove it",
    "into": "a query makes a stream: write it with to_table(…)",
    "connect": "CONNECT BY is not covered",
    "match": "MATCH_RECOGNIZE is not covered: use key_by(…).process(…)",
    "hint": "hints are not supported: remove it",
}


def translate(
    text: str,
    program: Program,
    views: Views,
    emit: Emit = "changes",
    ttl: Any = None,
    uid: str | None = None,
    functions: UserFunctions | None = None,
) -> Stream:
    """Returns the stream of a query over the registered streams and tables (`views`) of a program.

    Raises ConfigurationError, with the line and column in the query, for parts that are not supported.
    """
    if emit not in ("changes", "update", "final"):
        raise ConfigurationError(f'sql: emit must be "changes", "update" or "final", not {emit!r}')
    try:
        tree = parse(text)
        steps = Steps(prefix_of(text, uid, program))
        emit_options = EmitOptions(emit, ttl)
        with functions_of(functions):
            relation = _Query(steps, views, emit_options, {}).relation(tree, outermost=True)
            return _finished(tree, relation, steps)
    except RecursionError:
        raise ConfigurationError(
            "SQL: the query is nested too deeply. Remove parentheses that are not needed, name parts of the query with "
            "WITH or create_temporary_view, or compute parts of an expression in a query of their own"
        ) from None


def _finished(tree: exp.Expr, relation: Relation, steps: Steps) -> Stream:
    """Returns the final stream of a query, with exactly the selected columns under their names."""
    if relation.windows is not None:
        raise refused(
            tree,
            "the query puts rows into windows, but does not use the windows: add GROUP BY window_start, window_end, "
            "or join or rank the rows of each window",
        )
    if relation.rank is not None:
        raise refused(tree, "a rank needs an outer condition that limits the number of rows, as in WHERE rn <= 10")
    names = [each.name for each in relation.names]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise refused(tree, f"the result would have {', '.join(doubles)} twice; give one of them another name with AS")
    if CHANGE in names and relation.stream._changelog is not None:
        raise refused(
            tree, f"{CHANGE} is a reserved column, which marks inserted and retracted rows; rename your column with AS"
        )
    with errors_at(tree):
        return steps.selected(relation.stream, [(each.inner, each.name) for each in relation.names])


class _Query:
    """Translates the queries of one scope: all of them can use the queries of WITH in `queries`."""

    def __init__(self, steps: Steps, views: Views, emit_options: EmitOptions, queries: Queries) -> None:
        self._steps, self._views, self._emit_options, self._queries = steps, views, emit_options, queries

    def relation(self, node: exp.Expr, outermost: bool = False) -> Relation:
        """Returns the rows of a query. `outermost` is True for the whole query, and False for a query inside it."""
        node = node.this if isinstance(node, exp.Paren) else node
        for word, why in _REFUSED.items():
            if node.args.get(word):
                found = node.args[word]
                raise refused(found[0] if isinstance(found, list) else found, why)
        if isinstance(node, exp.Subquery):
            check_only(node, "this", "alias", "with_", "limit", "order")
            if node.args.get("with_") is not None:
                return self._with(node.args["with_"]).relation(_without(node), outermost)
            inner = self.relation(node.this, outermost).called(node.alias or None, _alias_columns(node))
            return self._first(node, inner, inner, [], self._options_of(outermost))
        if not isinstance(node, exp.Query):
            raise refused(node, f"sql takes a query, SELECT …, not {node.key.upper()}: write rows with to_table(…)")
        with_ = node.args.get("with_")
        if with_ is not None:
            if with_.args.get("recursive"):
                raise refused(with_, "a recursive query is not covered: remove RECURSIVE")
            return self._with(with_).relation(_without(node), outermost)
        if isinstance(node, exp.SetOperation):
            check_only(node, "this", "expression", "distinct", "by_name", "limit", "order")
            united = self._united(node, outermost)
            return self._first(node, united, united, [], self._options_of(outermost))
        if not isinstance(node, exp.Select):
            raise refused(node, f"{node.key.upper()} is not covered; see docs/sql.md")
        known = ("expressions", "from_", "joins", "laterals", "where", "group", "having", "qualify", "distinct")
        check_only(node, *known, "limit", "order")
        return self._select(node, outermost)

    def _with(self, with_: exp.Expr) -> _Query:
        queries = dict(self._queries)
        for each in with_.expressions:
            queries[each.alias.lower()] = _Bound(each, dict(queries))
        return _Query(self._steps, self._views, self._emit_options, queries)

    def named(self, name: str) -> Relation | None:
        """Returns the rows of a query of WITH, or None if WITH has no query with this name."""
        found = self._queries.get(name.lower())
        if found is None:
            return None
        inner = _Query(self._steps, self._views, self._emit_options, found.queries)
        return inner.relation(found.node.this).called(found.node.alias, _alias_columns(found.node))

    # --- SELECT ---------------------------------------------------------------------------------------------------

    def _select(self, node: exp.Select, outermost: bool) -> Relation:
        emit_options = self._options_of(outermost)
        where = node.args.get("where")
        conditions = conjuncts(None if where is None else where.this)
        source = From(node, self._steps, self._views, emit_options, self.relation, self.named)
        relation = source.relation(conditions)
        for each in conditions:
            for found in aggregates_in([each]):
                raise refused(found, "WHERE is calculated before aggregates: put the condition into HAVING")
        relation, conditions = with_bound_conditions(relation, conditions)
        if conditions:
            relation = self._filtered(relation, Expressions(relation.typed), conditions)
        if is_grouped(node):
            relation, expressions = Grouping(relation, node, self._steps, emit_options).result()
            having = node.args.get("having")
            if having is not None:
                relation = self._filtered(relation, expressions, conjuncts(having.this))
        else:
            if node.args.get("having") is not None:
                raise refused(node.args["having"], "HAVING is for groups: put the condition into WHERE")
            expressions = Expressions(relation.typed)
        items = items_of(node, relation)
        if not is_grouped(node):
            relation, items = selected_generator(node, relation, items, self._steps)
            expressions = Expressions(relation.typed)
        return self._chosen(node, relation, expressions, items, emit_options)

    def _options_of(self, outermost: bool) -> EmitOptions:
        """Returns how a query emits its results.

        Only the outermost query may emit updates. Inner queries emit changes.
        """
        if outermost or self._emit_options.emit == "final":
            return self._emit_options
        return replace(self._emit_options, emit="changes")

    def _chosen(
        self,
        node: exp.Select,
        relation: Relation,
        expressions: Expressions,
        items: list[Item],
        emit_options: EmitOptions,
    ) -> Relation:
        """Returns the result columns of SELECT, restricted by QUALIFY, and without duplicates for DISTINCT."""
        ranks = [each for each in items if isinstance(each.node, exp.Expr) and is_ranking(each.node)]
        grouped = is_grouped(node)
        qualify = node.args.get("qualify")
        if grouped and (ranks or qualify is not None):
            raise refused(
                node,
                "groups cannot be ranked in the same query: put GROUP BY into a query in FROM, and rank its result",
            )
        if len(ranks) > 1 or (ranks and relation.rank is not None):
            raise refused(node, "a query can have only one rank; put the other one into an outer query")
        rank = None
        if ranks:
            window = ranks[0].node
            assert isinstance(window, exp.Window)
            relation, rank = rank_of(window, relation, self._steps)
        if qualify is not None:
            relation = self._qualified(node, relation, qualify, emit_options)
        if not grouped:
            expressions = Expressions(relation.typed)
        made = selected(relation, items, expressions, self._steps, rank, plain=not grouped)
        distinct = node.args.get("distinct")
        if distinct is not None:
            if distinct.args.get("on") is not None:
                raise refused(distinct, "DISTINCT ON is not covered: use ROW_NUMBER() with a condition rn = 1")
            made = self._once(node, made, emit_options)
        source = relation if distinct is None else made
        return self._first(node, made, source, node.expressions, emit_options)

    def _first(
        self, node: exp.Expr, made: Relation, source: Relation, items: list[exp.Expr], emit_options: EmitOptions
    ) -> Relation:
        """Returns the rows that LIMIT keeps: the first rows to arrive, or with ORDER BY the first rows of a ranking.

        `source` are the rows before SELECT, from which the result columns are computed. ORDER BY may use columns of
        `source`.
        """
        limit = node.args.get("limit")
        if limit is None:
            if node.args.get("order") is not None:
                raise refused(node.args["order"], _ORDER)
            return made
        number = _limit_of(limit)
        if made.windows is not None or made.rank is not None:
            raise refused(
                limit,
                "LIMIT cannot be applied before the rows are grouped by their windows, or filtered by their "
                "rank: put it into an outer query",
            )
        if node.args.get("order") is not None:
            if not number:
                raise refused(limit, "ORDER BY … LIMIT keeps at least one row")
            if emit_options.emit == "update":
                raise refused(
                    node.args["order"],
                    'with emit="update" a row replaces the row with the same keys, and sorted rows have no keys: use '
                    'emit="changes", or ROW_NUMBER() OVER (…) with its rank as a column',
                )
            ranking = ordered(node, made, source, items, self._steps)
            return ranked(ranking, number, False, self._steps, emit_options)
        if made.stream._changelog is not None:
            raise refused(
                limit,
                "LIMIT cannot be applied to rows that may be replaced or retracted: apply it to results of windows, or "
                'of emit="final"',
            )
        made = pruned(made, lambda _: True, self._steps)
        with errors_at(limit):
            return made.with_stream(made.stream.limit(number, name="sql limit", uid=self._steps.uid("limit")))

    def _qualified(
        self, node: exp.Select, relation: Relation, qualify: exp.Expr, emit_options: EmitOptions
    ) -> Relation:
        """Returns the rows that satisfy a QUALIFY clause such as `QUALIFY ROW_NUMBER() OVER (…) <= 3`."""
        condition = qualify.this.copy()
        windows = [each for each in condition.find_all(exp.Window) if is_ranking(each)]
        if len(windows) != 1:
            raise refused(qualify, _QUALIFY)
        relation, rank = rank_of(windows[0], relation, self._steps)
        column = exp.column("rank of qualify", quoted=True)
        pending = replace(
            relation, names=(*relation.names, Name(None, "rank of qualify", "rank", rank=True)), rank=rank
        )
        windows[0].replace(column)
        limit = taken_limit([condition], pending)
        if limit is None:
            raise refused(qualify, _QUALIFY)
        return ranked(pending, limit, False, self._steps, emit_options)

    def _filtered(self, relation: Relation, expressions: Expressions, conditions: list[exp.Expr]) -> Relation:
        condition = all_of([expressions.condition(each) for each in conditions])
        with errors_at(conditions[0]):
            return relation.with_stream(self._steps.filtered(relation.stream, condition))

    def _once(self, node: exp.Expr, relation: Relation, emit_options: EmitOptions) -> Relation:
        """Returns the rows of a SELECT DISTINCT: the first of equal rows."""
        if relation.windows is not None or relation.rank is not None:
            raise refused(
                node,
                "DISTINCT cannot be applied before the rows are grouped by their windows, or filtered by their "
                "rank: put it into an outer query",
            )
        keys = tuple(dict.fromkeys(each.inner for each in relation.names))
        relation = pruned(relation, lambda _: True, self._steps)
        stream = relation.stream
        with errors_at(node):
            if stream._changelog is None:
                made = stream.key_by(*keys).deduplicate(ttl=emit_options.ttl, uid=self._steps.uid("distinct"))
            elif emit_options.ttl is not None:
                raise refused(
                    node, "DISTINCT of changes must keep all rows, so ttl= cannot limit them; remove one of the two"
                )
            else:
                name = free_name("rows", columns_of(stream))
                counted: dict[str, Any] = {name: count()}
                made = stream.key_by(*keys).aggregate(counted, emit="changes", uid=self._steps.uid("distinct"))
        return replace(relation, stream=made, results=None)

    # --- UNION ----------------------------------------------------------------------------------------------------

    def _united(self, node: exp.SetOperation, outermost: bool) -> Relation:
        if not isinstance(node, exp.Union):
            raise refused(node, f"{node.key.upper()} is not covered: use LEFT SEMI JOIN or LEFT ANTI JOIN in windows")
        if node.args.get("by_name"):
            raise refused(node, "BY NAME is not covered: name the columns in their order, or use union(by_name=True)")
        sides = [self.relation(each) for each in (node.this, node.expression)]
        first, second = sides
        if any(side.windows is not None or side.rank is not None for side in sides):
            raise refused(
                node,
                "UNION cannot be applied before the rows are grouped by their windows, or filtered by their rank: "
                "put it into an outer query, or into FROM",
            )
        if len(first.names) != len(second.names):
            raise refused(
                node,
                f"UNION: one side has {len(first.names)} columns, the other {len(second.names)}"
                ": select the same number of columns on both sides",
            )
        names = [free_name(each.name, ()) for each in first.names]
        if len(set(names)) < len(names):
            raise refused(node, "UNION: the columns of its first query must have different names: rename one with AS")
        types = []
        for one, other in zip(first.names, second.names, strict=True):
            both = first.of_inner(one.inner).type, second.of_inner(other.inner).type
            types.append(common_type(*both))
            if types[-1] is None:
                raise refused(
                    node,
                    f"UNION: column {one.name!r} is {named(both[0])} in the first query and {named(both[1])} in the "
                    "second; convert one of them with CAST(… AS …). NULL without a CAST is a STRING",
                )
        with errors_at(node):
            streams = [self._cast(node, side, names, types) for side in sides]
            made = streams[0].union(streams[1])
        united = Relation(made, tuple(Name(None, e.name, name) for e, name in zip(first.names, names, strict=True)))
        return self._once(node, united, self._emit_options) if node.args.get("distinct") else united

    def _cast(self, node: exp.Expr, relation: Relation, names: list[str], types: list[Any]) -> Stream:
        expressions = {
            name: as_type(node, relation.of_inner(each.inner), wanted).expr
            for each, name, wanted in zip(relation.names, names, types, strict=True)
        }
        return self._steps.chosen(relation.stream, expressions, "union")


@dataclass(frozen=True, slots=True)
class _Bound:
    """A named query of WITH, and the earlier queries of WITH to which it can refer."""

    node: exp.Expr
    queries: Queries


def _limit_of(node: exp.Expr) -> int:
    """Returns the number of rows that a LIMIT keeps.

    Raises ConfigurationError if it is not a whole number as a literal.
    """
    number = node.args.get("expression") if isinstance(node, exp.Limit) else None
    if not (isinstance(number, exp.Literal) and not number.is_string and str(number.this).isdigit()):
        raise refused(node, "LIMIT takes a whole number as a literal, as in LIMIT 10")
    check_only(node, "expression")
    return int(str(number.this))


def _alias_columns(node: exp.Expr) -> list[str]:
    alias = node.args.get("alias")
    return [each.name for each in alias.args.get("columns") or []] if isinstance(alias, exp.TableAlias) else []


def _without(node: exp.Expr) -> exp.Expr:
    """Returns a query without its WITH clause."""
    plain = node.copy()
    plain.set("with_", None)
    return plain
