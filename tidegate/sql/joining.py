"""Translates the joins of a query. The conditions of a join determine which join of the public API it becomes:

| query | join |
| --- | --- |
| FOR SYSTEM_TIME AS OF, of a stream | `join_asof` |
| a registered table, with or without FOR SYSTEM_TIME | `lookup_join` |
| both sides in the same windows, and both bounds equal | `join(window=…)` |
| both bounds of the difference of event times | `interval_join` |
| anything else with an equality | `join`, of all rows |

The other conditions of an inner join become a filter: before the join if they refer to one side only, else after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import polars as pl
from sqlglot import exp

from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.operators.windows.window_columns import WINDOW_END, WINDOW_START
from tidegate.operators.windows.window_specs import Sliding, Tumbling
from tidegate.sql.expressions import Expressions
from tidegate.sql.query_text import check_only, errors_at, refused
from tidegate.sql.relations import (
    WINDOW_TIME,
    Name,
    Relation,
    Steps,
    all_of,
    columns_in,
    columns_of,
    free_name,
    types_of,
)
from tidegate.sql.typed_values import Interval, Typed, as_type, needed_common_type
from tidegate.sql.windows import filtered_by_bounds, grid_of, with_bound_conditions

How = Literal["inner", "left", "right", "full", "semi", "anti"]


@dataclass(slots=True)
class Parts:
    """The conditions of a join, divided by their use: keys, time bounds, filters of one side, and other conditions."""

    keys: list[tuple[exp.Expr, exp.Expr, exp.Expr]] = field(default_factory=list)
    """For each key, the expressions of the left and the right side, and the condition that compares them."""
    bounds: dict[str, tuple[exp.Expr, exp.Expr, exp.Expr]] = field(default_factory=dict)
    """Maps each window bound that both sides must share to its two expressions and its condition, as in `keys`."""
    one_sided: tuple[list[exp.Expr], list[exp.Expr]] = field(default_factory=lambda: ([], []))
    rest: list[exp.Expr] = field(default_factory=list)


def how_of(node: exp.Join) -> How:
    """Returns the kind of a join ("inner", "left" and so on).

    Raises ConfigurationError for a kind that is not supported.
    """
    side, kind = str(node.side or "").upper(), str(node.kind or "").upper()
    if node.method or kind in ("STRAIGHT", "ASOF") or side == "ASOF":
        raise refused(node, f"{node.method or kind or side} JOIN is not covered: name the columns with ON")
    if kind in ("SEMI", "ANTI"):
        return "semi" if kind == "SEMI" else "anti"
    found: dict[str, How] = {"": "inner", "LEFT": "left", "RIGHT": "right", "FULL": "full"}
    return found[side]


class StreamJoin:
    """Translates one join of two streams."""

    def __init__(self, node: exp.Join, left: Relation, right: Relation, steps: Steps, ttl: str | int | None) -> None:
        self._node, self._sides, self._steps, self._ttl = node, [left, right], steps, ttl
        self._how = how_of(node)

    def result(self, conditions: list[exp.Expr]) -> Relation:
        """Returns the joined rows.

        `conditions` are the conditions of ON, and all of them hold for the result. Raises ConfigurationError for
        conditions that the kind of join does not support.
        """
        if isinstance(self._node.this, exp.Table) and self._node.this.args.get("version") is not None:
            return self._as_of(conditions)
        parts = self._sorted(conditions)
        both = (self._sides[LEFT], self._sides[RIGHT])
        if both[LEFT].windows is not None or both[RIGHT].windows is not None:
            return self._in_windows(parts)
        if parts.bounds.keys() == {WINDOW_START, WINDOW_END} and self._how == "inner":
            return self._of_results(parts)
        parts.keys += parts.bounds.values()
        near = between_of(parts.rest, both, self.side_of, filtered=self._how == "inner")
        if near.is_whole and parts.keys:
            return self._in_interval(parts, near)
        return self._regular(parts)

    def side_of(self, column: exp.Column) -> int:
        """Returns the side (0 for left, 1 for right) to which a column belongs.

        Raises ConfigurationError if neither or both sides have it.
        """
        whole = replace(self._sides[LEFT], names=(*self._sides[LEFT].names, *self._sides[RIGHT].names))
        column = whole.root(column)
        if column.table:
            has = [side.has_table(column.table) for side in self._sides]
            if has != [True, True] and any(has):
                return RIGHT if has[RIGHT] else LEFT
        found = [any(each.name.lower() == column.name.lower() for each in side.names) for side in self._sides]
        if all(found):
            tables = sorted({str(each.table) for each in whole.names if each.name.lower() == column.name.lower()})
            raise refused(column, f"{column.name!r} is ambiguous: write {tables[0]}.{column.name}")
        if not any(found):
            whole.find(column)
        return RIGHT if found[RIGHT] else LEFT

    # --- conditions -----------------------------------------------------------------------------------------------

    def _sorted(self, conditions: list[exp.Expr], versions: bool = False) -> Parts:
        """Divides conditions by their use. Conditions that refer to one side only filter that side.

        `versions` is True if the right rows are versions of an as-of join. Versions are not filtered, because without a
        version the previous version would be valid for longer.
        """
        parts = Parts()
        for node in conditions:
            sides = {self.side_of(each) for each in columns_in(node)}
            if len(sides) == 1 and not (versions and RIGHT in sides):
                parts.one_sided[sides.pop()].append(node)
            elif isinstance(node, exp.EQ) and self._is_key(node, parts):
                continue
            else:
                parts.rest.append(node)
        self._filter_sides(parts)
        return parts

    def _is_key(self, node: exp.EQ, parts: Parts) -> bool:
        """Returns whether a condition is an equality of an expression of each side.

        If so, adds it to `parts` as a key or a window bound.
        """
        of = [{self.side_of(each) for each in columns_in(part)} for part in (node.this, node.expression)]
        if sorted(map(sorted, of)) != [[LEFT], [RIGHT]]:
            return False
        pair = (node.this, node.expression) if of[0] == {LEFT} else (node.expression, node.this)
        bound = self._bound(*pair)
        if bound is not None:
            parts.bounds[bound] = (*pair, node)
        elif pair not in [(left, right) for left, right, _ in parts.keys]:
            parts.keys.append((*pair, node))
        return True

    def _bound(self, left: exp.Expr, right: exp.Expr) -> str | None:
        """Returns the name of the window bound if both columns are the same bound of the same windows, else None."""
        if not (isinstance(left, exp.Column) and isinstance(right, exp.Column)):
            return None
        if any(side.root(each) is not each for side, each in zip(self._sides, (left, right), strict=True)):
            return None
        names = (self._sides[LEFT].find(left), self._sides[RIGHT].find(right))
        if names[LEFT].inner != names[RIGHT].inner or names[LEFT].inner not in (WINDOW_START, WINDOW_END):
            return None
        if all(each.bound for each in names):
            return names[LEFT].inner
        specs = [side.results for side in self._sides]
        of_left = specs[LEFT]
        grid = None if of_left is None else grid_of(of_left)
        same = specs[LEFT] == specs[RIGHT] and grid is not None and self._how == "inner"
        return names[LEFT].inner if same else None

    def _filter_sides(self, parts: Parts) -> None:
        """Filters each side by the conditions that refer to this side only.

        Raises ConfigurationError if the kind of join keeps all rows of the side.
        """
        allowed = {LEFT: ("inner", "right", "semi"), RIGHT: ("inner", "left", "semi", "anti")}
        for side in (LEFT, RIGHT):
            nodes = parts.one_sided[side]
            if not nodes:
                continue
            if self._how not in allowed[side]:
                raise refused(
                    nodes[0],
                    f"a {self._how.upper()} JOIN keeps all rows of this side, so the condition cannot filter them; "
                    "put it into WHERE, or into a query in FROM",
                )
            relation, plain = with_bound_conditions(self._sides[side], nodes)
            if plain:
                expressions = Expressions(relation.typed)
                condition = all_of([expressions.condition(node) for node in plain])
                relation = relation.with_stream(self._steps.filtered(relation.stream, condition))
            self._sides[side] = relation

    # --- kinds of joins -------------------------------------------------------------------------------------------

    def _in_windows(self, parts: Parts) -> Relation:
        left, right = self._sides
        spec = left.windows
        if spec is None or spec != right.windows or parts.bounds.keys() != {WINDOW_START, WINDOW_END}:
            raise refused(
                self._node,
                "a join in windows needs the same windows on both sides, and equal window_start and window_end in ON",
            )
        if not isinstance(spec, Tumbling | Sliding):
            raise refused(self._node, "a join in windows needs windows of TUMBLE or HOP: use one of them on both sides")
        self._refuse_rest(parts, [])
        self._refuse_bound_conditions()
        on, names = self._prepared(parts, window=True)
        left, right = self._sides
        with errors_at(self._node):
            made = left.stream.join(
                right.stream, on=on, window=spec, how=self._how, uid=self._steps.uid("join"), suffix=_SUFFIX
            )
        # The bounds of a side that may be missing would be null, so the bounds of the other side are used. In a FULL
        # JOIN they belong to neither side.
        side = right if self._how == "right" else left
        bounds = [replace(each, bound=False) for each in side.names if each.bound and each.inner != WINDOW_TIME]
        if self._how == "full":
            bounds = [replace(each, table=None) for each in bounds]
        kept = [each for each in names if not each.bound]
        joined = filtered_by_bounds(
            Relation(made, (*kept, *bounds)), (*left.bound_conditions, *right.bound_conditions), self._steps
        )
        return self._rest(joined, parts, [])

    def _refuse_bound_conditions(self) -> None:
        """Raises ConfigurationError if a side whose rows stay in the result without a partner has conditions on window
        bounds.

        Such conditions are checked only on joined pairs.
        """
        for side, allowed in ((LEFT, ("inner", "left", "semi", "anti")), (RIGHT, ("inner", "right", "semi"))):
            held = self._sides[side].bound_conditions
            if held and self._how not in allowed:
                raise refused(
                    held[0].node,
                    f"a condition on the bounds of windows is checked after the join, but a {self._how.upper()} JOIN "
                    "keeps rows without a partner: put it into the WHERE of the join, on the side that keeps its rows",
                )

    def _of_results(self, parts: Parts) -> Relation:
        """Joins rows that are results of the same windows, in tumbling windows that end together with these windows."""
        left, right = self._sides
        assert left.results is not None
        grid, spec = grid_of(left.results), left.results
        assert grid is not None
        starts: list[str] = []
        for side in (LEFT, RIGHT):
            start, end = (
                free_name(f"{word}_{side}", columns_of(self._sides[side].stream)) for word in ("of_start", "of_end")
            )
            renamed = {WINDOW_START: start, WINDOW_END: end}
            relation = self._sides[side]
            columns = [(name, renamed.get(name, name)) for name in _columns(relation)]
            stream = self._steps.selected(relation.stream, columns)
            names = [replace(each, inner=renamed.get(each.inner, each.inner)) for each in relation.names]
            self._sides[side] = replace(relation, stream=stream, names=tuple(names))
            starts.append(start)
        on, names_made = self._prepared(parts, extra=[(starts[LEFT], starts[RIGHT])])
        left, right = self._sides
        with errors_at(self._node):
            made = left.stream.join(right.stream, on=on, window=grid, uid=self._steps.uid("join"), suffix=_SUFFIX)
        made = self._steps.computed(made, {WINDOW_START: pl.col(starts[LEFT])})
        inner = {starts[LEFT]: WINDOW_START, starts[RIGHT]: WINDOW_START}
        inner |= {name: WINDOW_END for name in columns_of(made) if name.startswith("of_end_")}
        names = [replace(each, inner=inner.get(each.inner, each.inner)) for each in names_made]
        return self._rest(Relation(made, tuple(names), results=spec), parts, [])

    def _in_interval(self, parts: Parts, near: Between) -> Relation:
        checked_again = [] if near.exact else list(near.conditions or [])
        self._refuse_rest(parts, near.conditions or [])
        on, names = self._prepared(parts)
        left, right = self._sides
        assert near.lower is not None
        assert near.upper is not None
        with errors_at(self._node):
            made = left.stream.interval_join(
                right.stream,
                on=on,
                between=(near.lower, near.upper),
                how=self._how,
                uid=self._steps.uid("join"),
                suffix=_SUFFIX,
            )
        parts.rest = [each for each in parts.rest if each not in (near.conditions or [])]
        return self._rest(Relation(made, names), parts, checked_again)

    def _as_of(self, conditions: list[exp.Expr]) -> Relation:
        version = self._node.this.args["version"]
        time, left = version.expression, self._sides[LEFT]
        if not isinstance(time, exp.Column) or left.find(time).inner != left.stream.timestamp:
            raise refused(
                self._node, f"FOR SYSTEM_TIME AS OF needs the event time of the left stream, {left.stream.timestamp!r}"
            )
        if self._how not in ("inner", "left"):
            raise refused(self._node, "a join with FOR SYSTEM_TIME AS OF must be LEFT or INNER")
        if any(side.windows is not None for side in self._sides):
            raise refused(
                self._node, "FOR SYSTEM_TIME AS OF joins single rows: join first, and put the result into windows"
            )
        parts = self._sorted(conditions, versions=True)
        parts.keys += parts.bounds.values()
        self._refuse_rest(parts, [])
        on, names = self._prepared(parts)
        left, right = self._sides
        with errors_at(self._node):
            made = left.stream.join_asof(
                right.stream,
                on=on,
                how="left" if self._how == "left" else "inner",
                uid=self._steps.uid("join"),
                suffix=_SUFFIX,
            )
        return self._rest(Relation(made, names), parts, [])

    def _regular(self, parts: Parts) -> Relation:
        if self._how in ("semi", "anti"):
            raise refused(
                self._node,
                f"{self._how.upper()} JOIN is for windows and intervals: put both sides into the same windows, or give "
                "both bounds of the difference of their event times",
            )
        self._refuse_rest(parts, [])
        on, names = self._prepared(parts)
        left, right = self._sides
        with errors_at(self._node):
            made = left.stream.join(
                right.stream, on=on, how=self._how, ttl=self._ttl, uid=self._steps.uid("join"), suffix=_SUFFIX
            )
        return self._rest(Relation(made, names), parts, [])

    # --- before and after -----------------------------------------------------------------------------------------

    def _refuse_rest(self, parts: Parts, handled: list[exp.Expr]) -> None:
        rest = [each for each in parts.rest if each not in handled]
        if rest and self._how != "inner":
            raise refused(
                rest[0],
                f"a {self._how.upper()} JOIN takes equalities of both sides, and in an interval both bounds of their "
                "times. Other conditions would determine which rows have no partner, and are not covered",
            )
        if not parts.keys and not parts.bounds:
            raise refused(
                self._node, "a join needs an equality between a column of each side, to partition the rows by"
            )
        if not parts.keys:
            raise refused(
                self._node, "a join of windows needs an equality besides the bounds, to partition the rows by"
            )

    def _rest(self, relation: Relation, parts: Parts, more: list[exp.Expr]) -> Relation:
        """Filters the joined rows by all conditions that the join did not apply (`parts.rest` and `more`)."""
        conditions = [*parts.rest, *more]
        if not conditions:
            return relation
        expressions = Expressions(relation.typed)
        condition = all_of([expressions.condition(node) for node in conditions])
        return relation.with_stream(self._steps.filtered(relation.stream, condition))

    def _prepared(
        self, parts: Parts, window: bool = False, extra: list[tuple[str, str]] | None = None
    ) -> tuple[list[tuple[str, str]], tuple[Name, ...]]:
        """Adds computed key columns to both streams, and renames columns. Returns the pairs of key columns, and the
        column names of the result.

        Afterwards no column of the right stream has the name of a column of the left stream.
        """
        pairs: list[tuple[str, str]] = []
        computed: tuple[dict[str, pl.Expr], dict[str, pl.Expr]] = ({}, {})
        keeps = {LEFT: self._how in ("right", "full"), RIGHT: self._how in ("left", "right", "full")}
        for number, (left, right, node) in enumerate(parts.keys, start=1):
            typed = [Expressions(side.typed).of(part) for side, part in zip(self._sides, (left, right), strict=True)]
            wanted = needed_common_type(node, [each.type for each in typed])
            again = [keeps[side] or _column_of(typed[side]) in {pair[side] for pair in pairs} for side in (LEFT, RIGHT)]
            found = [
                self._key(side, typed[side], as_type(node, typed[side], wanted), number, computed[side], again[side])
                for side in (LEFT, RIGHT)
            ]
            pairs.append((found[LEFT], found[RIGHT]))
        pairs += extra or []
        for side in (LEFT, RIGHT):
            stream = self._steps.computed(self._sides[side].stream, computed[side])
            self._sides[side] = self._sides[side].with_stream(stream)
        return self._apart(pairs, window)

    def _key(self, side: int, given: Typed, cast: Typed, number: int, computed: dict[str, pl.Expr], copy: bool) -> str:
        """Returns the name of the key column for a value: an existing column if possible and `copy` is False, otherwise
        a new column with the computed value.

        `side` is the input, `number` makes the name of a new column unique.
        """
        stream = self._sides[side].stream
        column = _column_of(given)
        if not copy and cast is given and column is not None:
            return column
        name = free_name(f"key_{number}", [*columns_of(stream), *computed])
        computed[name] = cast.expr
        return name

    def _apart(self, pairs: list[tuple[str, str]], window: bool) -> tuple[list[tuple[str, str]], tuple[Name, ...]]:
        left, right = self._sides
        taken = [*columns_of(left.stream)]
        keys = {name: key for key, name in pairs}
        new: dict[str, str] = {}
        columns = _columns(right, keep=keys)
        for name in columns:
            others = [*taken, *new.values(), *(each for each in columns if each != name)]
            new[name] = free_name(name, others) if name in taken or window else name
        self._sides[RIGHT] = right.with_stream(self._steps.selected(right.stream, [(n, new[n]) for n in columns]))
        inner = {name: keys[name] if name in keys else new[name] for name in columns}
        names = list(left.names)
        if self._how not in ("semi", "anti"):
            names += [replace(each, inner=inner[each.inner]) for each in right.names if not each.bound]
        return [(key, new[name]) for key, name in pairs], tuple(names)


_SUFFIX = "_right"


def _column_of(given: Typed) -> str | None:
    """Returns the column name if the value is a plain column, else None."""
    return given.expr.meta.output_name() if given.expr.meta.is_column() else None


def _columns(relation: Relation, keep: Any = ()) -> list[str]:
    """Returns the columns of a relation's stream that are needed, and the columns in `keep`, in the order of the
    stream.
    """
    stream = relation.stream
    needed = {each.inner for each in relation.names} | {*keep}
    if stream.timestamp is not None:
        needed.add(str(stream.timestamp))
    if stream._changelog is not None:
        needed |= {*stream._changelog.keys}
    return [name for name in columns_of(stream) if name in needed]


def pruned(relation: Relation, wanted: Callable[[Name], bool], steps: Steps) -> Relation:
    """Returns a relation with only the wanted names, over a stream without the other columns."""
    names = tuple(each for each in relation.names if each.bound or wanted(each))
    kept = replace(relation, names=names)
    keep = [WINDOW_START, WINDOW_END] if relation.results is not None else []
    keep += [*relation.sessions_by]
    columns = _columns(kept, keep)
    return kept.with_stream(steps.selected(relation.stream, [(name, name) for name in columns]))


LEFT, RIGHT = 0, 1
_MIRRORED: dict[type[exp.Expr], type[exp.Expr]] = {exp.LT: exp.GT, exp.LTE: exp.GTE, exp.GT: exp.LT, exp.GTE: exp.LTE}
Sides = tuple[Relation, Relation]


@dataclass(slots=True)
class Between:
    """The interval to which conditions restrict the difference `right time - left time`, in ms.

    A bound is None if no condition sets it.
    """

    lower: int | None = None
    upper: int | None = None
    conditions: list[exp.Expr] | None = None
    """The conditions that set the bounds."""
    exact: bool = True
    """False if the bounds are wider than the conditions. The conditions are then checked again on the joined rows."""

    @property
    def is_whole(self) -> bool:
        """Returns whether both bounds of the interval are set."""
        return self.lower is not None and self.upper is not None


def between_of(
    conditions: list[exp.Expr], sides: Sides, side_of: Callable[[exp.Column], int], filtered: bool
) -> Between:
    """Returns the interval to which conditions restrict the event times of two streams. Bounds may be missing.

    `filtered` is True if the conditions can be checked again on the joined pairs, which is necessary if times are finer
    than milliseconds. A join that also returns rows without a partner cannot check them again, and compares whole
    milliseconds.
    """
    found = Between(conditions=[])
    if any(each.stream.timestamp is None for each in sides):
        return found
    assert found.conditions is not None
    found.exact = not filtered or all(_in_ms(each) for each in sides)
    for node in conditions:
        bounds = [_bound(each, sides, side_of) for each in _comparisons(node)]
        if not bounds or any(each is None for each in bounds):
            continue
        for bound in bounds:
            assert bound is not None
            _narrow(found, *bound)
        found.conditions.append(node)
    return found


def _narrow(found: Between, is_lower: bool, apart_ms: int, strict: bool) -> None:
    """Applies one more bound to an interval: at least (`is_lower`) or at most `apart_ms` ms.

    If times are finer than 1 ms, the bound is 1 ms wider, and the conditions are checked again later.
    """
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
    return [(type(node), node.this, node.expression)] if type(node) in _MIRRORED else []


def _bound(
    comparison: tuple[type[exp.Expr], exp.Expr, exp.Expr], sides: Sides, side_of: Callable[[exp.Column], int]
) -> tuple[bool, int, bool] | None:
    """Returns the bound of `right time - left time` that a comparison sets, or None if it sets none.

    The result is whether it is a lower bound, the bound in ms, and whether it is strict (`<` or `>`).
    """
    kind, one, other = comparison
    a, b = _moment(one, sides, side_of), _moment(other, sides, side_of)
    if a is None or b is None or a[0] == b[0]:
        return None
    if a[0] == LEFT:
        kind, a, b = _MIRRORED[kind], b, a
    return kind in (exp.GT, exp.GTE), b[1] - a[1], kind in (exp.GT, exp.LT)


def _moment(node: exp.Expr, sides: Sides, side_of: Callable[[exp.Column], int]) -> tuple[int, int] | None:
    """Returns the side (0 for left, 1 for right) and the offset in ms, if an expression is the event time of a side
    plus an offset.

    None for other expressions.
    """
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
    """Returns whether the event time of a side has a resolution of whole milliseconds."""
    found: Any = types_of(relation.stream.schema)[str(relation.stream.timestamp)]
    return not isinstance(found, pl.Datetime) or found.time_unit == "ms"
