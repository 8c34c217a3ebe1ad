"""Translates GROUP BY: keys, windows and aggregates become `key_by(…).aggregate(…)` or
`key_by(…).window(…).aggregate(…)`.

Expressions of SELECT and HAVING are translated over the grouped rows. A key or an aggregate in them becomes the column
that has its values. Any other column raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import polars as pl
from sqlglot import exp

from tidegate.api.streams.stream import Stream
from tidegate.operators.aggregates.aggregate import count
from tidegate.operators.windows.window_columns import WINDOW_END, WINDOW_START
from tidegate.operators.windows.window_specs import Session
from tidegate.sql.expressions import Expressions
from tidegate.sql.functions.aggregates import aggregate_of, column_of, is_aggregate
from tidegate.sql.operators import moved
from tidegate.sql.query_text import errors_at, is_call, refused
from tidegate.sql.relations import WINDOW_TIME, Name, Relation, Spec, Steps, columns_in, columns_of, free_name
from tidegate.sql.typed_values import Interval, Typed
from tidegate.sql.windows import filtered_by_bounds, grid_of, spark_window
from tidegate.storage.errors import ConfigurationError

Emit = Literal["changes", "update", "final"]
_SPARK = ("WINDOW", "SESSION_WINDOW")
_IN_WINDOWS = "the rows are in windows: add window_start and window_end to GROUP BY"
_BOUND_OF = {"start": WINDOW_START, "end": WINDOW_END}


@dataclass(frozen=True, slots=True)
class EmitOptions:
    """How running aggregates and rankings emit results (`emit`), and how long they keep keys (`ttl`, a duration or
    None).
    """

    emit: Emit
    ttl: str | int | None


@dataclass(slots=True)
class _Groups:
    """The parts of a GROUP BY: keys, computed columns, and the window bounds that it lists (`bounds`)."""

    keys: dict[str, str] = field(default_factory=dict)
    """Maps the text of each key in the query to its column in the stream."""
    computed: dict[str, pl.Expr] = field(default_factory=dict)
    bounds: set[str] = field(default_factory=set)
    spark: exp.Expr | None = None
    names: dict[str, str] = field(default_factory=dict)
    """Maps each key column of the stream to its name in the query."""


def is_grouped(select: exp.Select) -> bool:
    """Returns whether a query has GROUP BY or aggregates."""
    return select.args.get("group") is not None or bool(aggregates_in([*select.expressions, select.args.get("having")]))


def aggregates_in(nodes: Sequence[exp.Expr | None]) -> list[exp.Expr]:
    """Returns the aggregate calls in expressions, outermost first, without aggregates that have OVER."""
    found, waiting = [], [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop(0)
        if is_aggregate(node):
            found.append(node)
        elif not isinstance(node, exp.Window | exp.Query):
            waiting += list(node.iter_expressions())
    return found


class Grouping:
    """Translates GROUP BY and the aggregates of one query. `relation` are the rows of its FROM."""

    def __init__(self, relation: Relation, select: exp.Select, steps: Steps, emit_options: EmitOptions) -> None:
        self._relation, self._select, self._steps, self._emit_options = relation, select, steps, emit_options
        self._inputs = Expressions(relation.typed)
        self._made: dict[str, str] = {}
        """Maps the text of each key and aggregate to the column of the grouped rows that has its values."""

    def result(self) -> tuple[Relation, Expressions]:
        """Returns the grouped rows, and the translator of SELECT and HAVING over them.

        Raises ConfigurationError for a form of GROUP BY that is not supported.
        """
        groups = self._groups()
        calls = aggregates_in([*self._select.expressions, self._select.args.get("having")])
        stream = self._steps.computed(self._relation.stream, groups.computed)
        aggregates = self._aggregates(calls, groups)
        keys = tuple(dict.fromkeys(groups.keys.values()))
        self._made.update(groups.keys)
        where = calls[0] if calls else self._select
        with errors_at(where):
            if groups.bounds:
                stream, spec = self._windowed(stream, keys, aggregates, groups)
            else:
                stream, spec = self._running(stream, keys, aggregates), None
        named = [Name(None, groups.names.get(name, name), name) for name in keys]
        bounds = [WINDOW_START, WINDOW_END] if spec is not None else []
        made = Relation(stream, (*named, *(Name(None, name, name) for name in bounds)), results=spec)
        self._result = made = filtered_by_bounds(made, self._relation.bound_conditions, self._steps)
        return made, Expressions(self._column, self._known)

    # --- keys -----------------------------------------------------------------------------------------------------

    def _groups(self) -> _Groups:
        groups, group = _Groups(), self._select.args.get("group")
        if group is None:
            if self._relation.windows is not None:
                raise refused(self._select, _IN_WINDOWS)
            return groups
        for word in ("rollup", "cube", "grouping_sets", "totals", "all"):
            if group.args.get(word):
                raise refused(
                    group, f"{word.upper().replace('_', ' ')} is not covered: write one query for each grouping"
                )
        for each in group.expressions:
            if isinstance(each, exp.Rollup | exp.Cube | exp.GroupingSets):
                raise refused(each, "ROLLUP, CUBE and GROUPING SETS are not covered: write one query for each grouping")
            self._add(groups, self._meant(each))
        if groups.bounds and not groups.bounds >= {WINDOW_START, WINDOW_END} and self._relation.windows is not None:
            raise refused(group, "windows must be grouped by both window_start and window_end")
        if self._relation.windows is not None and not groups.bounds:
            raise refused(group, _IN_WINDOWS)
        return groups

    def _meant(self, node: exp.Expr) -> exp.Expr:
        """Returns the expression to which an item of GROUP BY refers: `GROUP BY 1` or an alias refers to a column of
        SELECT.

        A column of the rows takes precedence over an alias.
        """
        items = self._select.expressions
        if isinstance(node, exp.Literal) and not node.is_string:
            if not (str(node.this).isdigit() and 1 <= int(str(node.this)) <= len(items)):
                raise refused(
                    node,
                    f"SELECT has {len(items)} columns: give a number from 1 to {len(items)}, or the name of a column",
                )
            found: exp.Expr = items[int(str(node.this)) - 1]
            return _unnamed(found)
        if isinstance(node, exp.Column) and not node.table:
            if any(each.name.lower() == node.name.lower() for each in self._relation.names):
                return node
            aliases = [each for each in items if isinstance(each, exp.Alias)]
            named = [_unnamed(each) for each in aliases if each.alias.lower() == node.name.lower()]
            if len(named) == 1:
                return named[0]
        return node

    def _add(self, groups: _Groups, node: exp.Expr) -> None:
        if is_call(node, *_SPARK):
            if groups.spark is not None or self._relation.windows is not None:
                raise refused(
                    node, "a query can have windows of one kind only; put the other windows into an outer query"
                )
            groups.spark = node
            groups.bounds |= {WINDOW_START, WINDOW_END}
            return
        if aggregates_in([node]):
            raise refused(
                node,
                "an aggregate cannot be a key: GROUP BY is calculated before aggregates; "
                "compute the aggregate in a subquery, and group its rows",
            )
        if isinstance(node, exp.Column) and (not node.table or self._relation.has_table(node.table)):
            name = self._relation.find(node)
            if name.bound:
                groups.bounds.add(name.inner)
                return
            if self._relation.results is not None and name.inner in (WINDOW_START, WINDOW_END):
                groups.bounds.add(name.inner)
                groups.names[name.inner] = name.name
                return
            if not name.rank:
                groups.names.setdefault(name.inner, name.name)
        typed = self._inputs.of(node)
        column = column_of(typed)
        if not isinstance(column, str) or column not in columns_of(self._relation.stream):
            wanted = self._alias_of(node) or f"key_{len(groups.keys) + 1}"
            taken = [*columns_of(self._relation.stream), *groups.computed]
            name_of = free_name(wanted, taken)
            groups.computed[name_of] = typed.expr
            column = name_of
        groups.keys[self._written(node)] = column

    def _alias_of(self, node: exp.Expr) -> str | None:
        written = self._written(node)
        for item in self._select.expressions:
            if isinstance(item, exp.Alias) and self._written(item.this) == written:
                return item.alias
        return None

    # --- aggregates -----------------------------------------------------------------------------------------------

    def _aggregates(self, calls: list[exp.Expr], groups: _Groups) -> dict[str, Any]:
        found: dict[str, Any] = {}
        taken = {*groups.keys.values(), *columns_of(self._relation.stream)}
        for node in calls:
            written = self._written(node)
            if written in self._made:
                continue
            name = free_name(self._alias_of(node) or f"aggregate_{len(found) + 1}", {*taken, *found})
            found[name] = aggregate_of(node, self._inputs.of)
            self._made[written] = name
        return found

    def _running(self, stream: Stream, keys: tuple[str, ...], aggregates: dict[str, Any]) -> Stream:
        emit, ttl = self._emit_options.emit, self._emit_options.ttl
        if not keys:
            return stream.aggregate(aggregates, emit=emit, uid=self._steps.uid("aggregate"))
        if not aggregates and stream._changelog is None:
            pruned = self._steps.selected(stream, [(name, name) for name in self._with_time(stream, keys)])
            return pruned.key_by(*keys).deduplicate(uid=self._steps.uid("distinct"), ttl=ttl)
        aggregates = aggregates or {free_name("rows", keys): count()}
        return stream.key_by(*keys).aggregate(aggregates, emit=emit, ttl=ttl, uid=self._steps.uid("aggregate"))

    def _with_time(self, stream: Stream, keys: tuple[str, ...]) -> tuple[str, ...]:
        time = stream.timestamp
        return keys if time is None or time in keys else (*keys, str(time))

    def _windowed(
        self, stream: Stream, keys: tuple[str, ...], aggregates: dict[str, Any], groups: _Groups
    ) -> tuple[Stream, Spec | None]:
        relation, aggregates = self._relation, aggregates or {free_name("rows", keys): count()}
        if groups.spark is None and relation.windows is None:
            return self._of_results(stream, keys, aggregates, groups)
        spec = spark_window(groups.spark, relation) if groups.spark is not None else relation.windows
        assert spec is not None, "windows of no kind"
        if isinstance(spec, Session) and groups.spark is None and set(relation.sessions_by) != set(keys):
            raise ConfigurationError(
                f"SQL: the keys of the sessions are {list(relation.sessions_by) or 'no columns'}, but GROUP BY names "
                f"{list(keys)} besides the bounds: give SESSION(TABLE … PARTITION BY …) the same columns"
            )
        return self._in_windows(stream, keys, aggregates, spec), spec

    def _in_windows(self, stream: Stream, keys: tuple[str, ...], aggregates: dict[str, Any], spec: Spec) -> Stream:
        windows = stream.key_by(*keys).window(spec) if keys else stream.window(spec)
        return windows.aggregate(aggregates, uid=self._steps.uid("window"))

    def _of_results(
        self, stream: Stream, keys: tuple[str, ...], aggregates: dict[str, Any], groups: _Groups
    ) -> tuple[Stream, Spec | None]:
        """Aggregates the results of windows once more, grouped by their window bounds. Returns the new stream and the
        specification of its windows.

        Uses tumbling windows that end together with the original windows. Each of them contains the results of one
        original window.
        """
        spec = self._relation.results
        grid = None if spec is None else grid_of(spec)
        if grid is None or groups.bounds != {WINDOW_START, WINDOW_END}:
            raise ConfigurationError(
                "SQL: results of windows must be grouped by both window_start and window_end, and results of "
                "sessions by neither; for a running aggregate of all results remove the bounds from GROUP BY"
            )
        start = free_name("of_start", columns_of(stream))
        stream = self._steps.computed(stream, {start: pl.col(WINDOW_START)})
        made = self._in_windows(stream, (*keys, start), aggregates, grid)
        made = self._steps.computed(made, {WINDOW_START: pl.col(start)})
        return made, spec

    # --- what SELECT and HAVING see -------------------------------------------------------------------------------

    def _known(self, node: exp.Expr) -> Typed | None:
        if isinstance(node, exp.Literal | exp.Null | exp.Boolean):
            return None
        bound = self._spark_bound(node)
        if bound is not None:
            return self._result.of_inner(bound)
        name = self._made.get(self._written(node))
        if name is not None:
            return self._result.of_inner(name)
        if is_aggregate(node):
            raise refused(node, "an aggregate cannot contain another one: put the inner one into a query in FROM")
        return None

    def _spark_bound(self, node: exp.Expr) -> str | None:
        """Returns the window bound that a node such as `window.start` or `window(…).start` refers to, in Spark's
        syntax.

        None for other nodes.
        """
        if isinstance(node, exp.Column) and node.table.upper() in _SPARK and not self._relation.has_table(node.table):
            return _BOUND_OF.get(node.name.lower()) if self._result.results is not None else None
        if isinstance(node, exp.Dot) and is_call(node.this, *_SPARK):
            group = self._select.args.get("group")
            if group is not None and any(self._written(node.this) == self._written(each) for each in group.expressions):
                return _BOUND_OF.get(node.expression.name.lower())
        return None

    def _column(self, node: exp.Column) -> Typed:
        result = self._result
        if result.results is not None and not node.table and node.name.lower() in _SPARK_NAMES:
            raise refused(node, "a window is not a column here: select its bounds, window.start or window.end")
        found = self._relation.find(node)
        if result.results is not None and found.inner in (WINDOW_START, WINDOW_END):
            return result.of_inner(found.inner)
        if result.results is not None and found.inner == WINDOW_TIME and found.bound:
            return moved(node, result.of_inner(WINDOW_END), Interval(0, -1))
        raise refused(
            node,
            f"{node.name!r} is neither in GROUP BY nor in an aggregate: add it to GROUP BY, or use an aggregate such "
            "as MAX",
        )

    def _written(self, node: exp.Expr) -> str:
        """Returns the canonical text of an expression, with each column named as in the stream."""
        plain = node.copy()
        plain = exp.Paren(this=plain)
        for each in columns_in(plain):
            if each.table.upper() in _SPARK and not self._relation.has_table(each.table):
                continue
            known = [n for n in self._relation.names if n.name.lower() == each.name.lower()]
            known = [n for n in known if not each.table or (n.table or "").lower() == each.table.lower()]
            if len({n.inner for n in known}) == 1:
                each.replace(exp.column(exp.to_identifier(known[0].inner, quoted=True)))
        for call in plain.find_all(exp.Anonymous):
            call.set("this", str(call.this).upper())
        return str(plain.this.unnest().sql(dialect="spark", comments=False))


def _unnamed(node: exp.Expr) -> exp.Expr:
    """Returns an expression without its alias."""
    found: exp.Expr = node.this if isinstance(node, exp.Alias) else node
    return found


_SPARK_NAMES = tuple(name.lower() for name in _SPARK)
