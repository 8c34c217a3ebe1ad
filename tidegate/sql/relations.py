"""`Relation` is a stream in a query, with the names by which the query may refer to its columns.

Names are not case-sensitive. A name that two columns have is an error, unless the query writes the table before it. A
query in FROM that renames columns changes only these names, and not the columns of the stream. The stream therefore
keeps its event time and window bounds, and needs no step for it.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import pyarrow as pa
from sqlglot import exp

from tidegate.api.program import Program
from tidegate.api.streams.expression_columns import known_schema
from tidegate.api.streams.step import StepOptions
from tidegate.api.streams.stream import Stream
from tidegate.operators.changes import CHANGE
from tidegate.operators.output_schema import polars_frame
from tidegate.operators.windows.window_columns import WINDOW_END, WINDOW_START
from tidegate.operators.windows.window_specs import Cumulating, Session, Sliding, Tumbling
from tidegate.sql.expressions import balanced, field_of
from tidegate.sql.query_text import refused
from tidegate.sql.typed_values import Typed, check_known, column
from tidegate.storage.schemas.polars_frames import exact_column

Spec = Tumbling | Sliding | Cumulating | Session
WINDOW_TIME = "window_time"
RESERVED = frozenset({CHANGE, WINDOW_START, WINDOW_END, WINDOW_TIME})


@dataclass(frozen=True, slots=True)
class Name:
    """A name by which a query may refer to a column. `inner` is the name of the column in the stream.

    `bound` is set for a bound of windows to which the rows are not assigned yet, and `rank` for the rank of a ranking
    that is not applied yet. In both cases the stream does not have the column yet.
    """

    table: str | None
    name: str
    inner: str
    bound: bool = False
    rank: bool = False


@dataclass(frozen=True, slots=True)
class OrderColumn:
    """A column of the stream in ORDER BY, with its direction and the place of nulls."""

    name: str
    descending: bool
    nulls_last: bool


@dataclass(frozen=True, slots=True)
class Rank:
    """A ranking that is not applied yet, because the condition that limits its rows follows in an outer query or
    QUALIFY.
    """

    ties: bool
    partition: tuple[Name, ...]
    order: tuple[OrderColumn, ...]
    node: exp.Expr


@dataclass(frozen=True, slots=True)
class BoundCondition:
    """A condition on the bounds of windows that are not applied yet, and the names that were visible where the query
    has it.
    """

    node: exp.Expr
    names: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A stream in a query, with the names of its columns.

    `windows` are windows to which the rows are not assigned yet. `results` are the windows of which the rows are the
    results. `rank` is a ranking that is not applied yet.
    """

    stream: Stream
    names: tuple[Name, ...]
    windows: Spec | None = None
    results: Spec | None = None
    rank: Rank | None = None
    sessions_by: tuple[str, ...] = ()
    """Key columns of session windows, by their names in the stream."""
    bound_conditions: tuple[BoundCondition, ...] = ()
    """Conditions on window bounds, which are applied when the windows are applied."""

    @staticmethod
    def of(stream: Stream, table: str | None) -> Relation:
        """Returns a registered stream as a relation. Raises ConfigurationError if its columns are not known."""
        names = known_schema(stream, "SQL", repr(table)).names
        if stream._changelog is not None and stream._changelog.changes:
            names = [name for name in names if name != CHANGE]
        return Relation(stream, tuple(Name(table, name, name) for name in names))

    def called(self, table: str | None, columns: Iterable[str] = ()) -> Relation:
        """Returns the relation with the alias `table` and, if `columns` is given, with new column names."""
        others = list(columns)
        new = [
            replace(each, table=table, name=others[n] if n < len(others) else each.name)
            for n, each in enumerate(self.names)
        ]
        return replace(self, names=tuple(new))

    def find(self, node: exp.Column) -> Name:
        """Returns the column to which a name refers.

        Raises ConfigurationError if there is no such column, or more than one.
        """
        table = node.table.lower() or None
        found = [each for each in self.names if each.name.lower() == node.name.lower()]
        if table is not None:
            found = [each for each in found if (each.table or "").lower() == table]
        if len({(each.table, each.inner, each.bound, each.rank) for each in found}) > 1:
            tables = sorted({str(each.table) for each in found if each.table is not None})
            advice = f"write {tables[0]}.{node.name}" if len(tables) > 1 else "rename one of them"
            raise refused(node, f"{node.name!r} is ambiguous: {advice}")
        if not found:
            raise refused(node, f"there is no column {node.name!r}; name one of {self.listed()}")
        return found[0]

    def typed(self, node: exp.Column) -> Typed:
        """Returns the value of a column of the stream, or of a field of a struct column.

        Raises ConfigurationError for window bounds and ranks that are not columns of the stream yet.
        """
        root = self.root(node)
        if root is not node:
            return field_of(node, self.typed(root), node.name)
        return self._of_stream(node, self.find(node))

    def root(self, node: exp.Column) -> exp.Column:
        """Returns the column to which a name refers.

        For `t.point.x` or `point.x`, where x is a field of a struct column, it is `point`. Other names are returned
        unchanged.
        """
        if node.args.get("catalog") is not None:
            raise refused(
                node,
                "a name has at most three parts: table, column, field"
                ": give a nested field a name with AS in a query in FROM",
            )
        if node.args.get("db") is not None:
            return exp.column(node.args["table"].copy(), node.args["db"].copy())
        if node.table and not self.has_table(node.table):
            return exp.column(node.args["table"].copy())
        return node

    def has(self, node: exp.Column) -> bool:
        """Returns whether a name refers to a column of this relation, or to a field of one of its struct columns."""
        root = self.root(node)
        named = [each for each in self.names if each.name.lower() == root.name.lower()]
        return any(not root.table or (each.table or "").lower() == root.table.lower() for each in named)

    def has_table(self, table: str) -> bool:
        """Returns whether a column of this relation belongs to the named table."""
        return any((each.table or "").lower() == table.lower() for each in self.names)

    def listed(self) -> str:
        """Returns the column names as text, separated by commas, for errors."""
        tables = {each.table for each in self.names}
        several = len(tables) > 1
        return ", ".join(f"{each.table}.{each.name}" if several and each.table else each.name for each in self.names)

    def of_inner(self, name: str) -> Typed:
        """Returns the value of the column with the name `name` in the underlying stream."""
        found = types_of(self.stream.schema)[name]
        check_known(name, found)
        return column(name, found)

    def with_stream(self, stream: Stream) -> Relation:
        """Returns the relation with the same names over another stream, which must have the columns."""
        return replace(self, stream=stream)

    def _of_stream(self, node: exp.Expr, name: Name) -> Typed:
        if name.bound:
            raise refused(
                node,
                "the bounds of a window have values only in GROUP BY window_start, window_end, in a join on both, in "
                "PARTITION BY with both, and in the result of these",
            )
        if name.rank:
            raise refused(node, "a rank needs an outer condition that limits the number of rows, as in WHERE rn <= 10")
        return self.of_inner(name.inner)


def columns_of(stream: Stream) -> list[str]:
    """Returns the column names of a stream, whose schema must be known."""
    assert stream.schema is not None, "columns that are not known"
    return list(stream.schema.names)


def types_of(schema: pa.Schema | None) -> dict[str, Any]:
    """Returns the polars type of each column of a schema."""
    assert schema is not None, "columns that are not known"
    frame = polars_frame(pa.RecordBatch.from_pylist([], schema))
    return dict(zip(frame.columns, frame.dtypes, strict=True))


def free_name(wanted: str, taken: Iterable[str]) -> str:
    """Returns `wanted`, with a number appended if the name is already used (`taken`) or reserved for operators."""
    used, number, name = {*taken, *RESERVED}, 1, wanted
    while name in used:
        number += 1
        name = f"{wanted}_{number}"
    return name


def conjuncts(node: exp.Expr | None) -> list[exp.Expr]:
    """Returns the conditions that AND combines, as a list. Empty for None."""
    if node is None:
        return []
    if isinstance(node, exp.Paren) and isinstance(node.this, exp.And | exp.Paren):
        return conjuncts(node.this)
    if isinstance(node, exp.And):
        return [each for operand in node.flatten(unnest=False) for each in conjuncts(operand)]
    return [node]


def columns_in(node: exp.Expr) -> list[exp.Column]:
    """Returns the column references in an expression, without stars."""
    return [each for each in node.find_all(exp.Column) if not isinstance(each.this, exp.Star)]


def all_of(conditions: list[pl.Expr]) -> pl.Expr:
    """Combines conditions with AND."""
    return balanced(conditions, operator.and_)


_DIGEST = 10
_TEXT = re.compile(r"('(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`)|(?:--[^\n]*|/\*.*?\*/|\s+)+", re.DOTALL)


def prefix_of(text: str, uid: str | None, program: Program) -> str:
    """Returns the prefix of the uids of a query's steps: the given `uid`, or else a hash of the query text.

    A second query with the same text gets a number.
    """
    if uid is not None:
        return uid
    plain = _TEXT.sub(lambda found: found[1] or " ", text).strip().rstrip("; ")
    wanted = f"sql-{hashlib.sha256(plain.encode()).hexdigest()[:_DIGEST]}"
    prefix, number = wanted, 1
    while any(str(node.uid).startswith(f"{prefix}-") for node in program.nodes):
        number += 1
        prefix = f"{wanted}.{number}"
    return prefix


class Steps:
    """Adds the steps of one query to the program, with uids that begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._made: Counter[str] = Counter()

    def uid(self, kind: str) -> str:
        """Returns the uid of the next step of a kind, such as `<prefix>-where-1`."""
        self._made[kind] += 1
        return f"{self._prefix}-{kind}-{self._made[kind]}"

    def computed(self, stream: Stream, columns: Mapping[str, pl.Expr]) -> Stream:
        """Returns the stream with further columns, which are computed by expressions."""
        if not columns:
            return stream
        expressions = [expr.alias(name) for name, expr in columns.items()]
        wide = stream._input_parallelism
        options = StepOptions("sql columns", self.uid("columns"), wide)
        return stream._with_columns(expressions, options, are_keys=True)

    def filtered(self, stream: Stream, condition: pl.Expr) -> Stream:
        """Returns the stream with only the rows for which a condition is true."""
        wide = stream._input_parallelism
        return stream.filter(condition, name="sql where", uid=self.uid("where"), parallelism=wide)

    def selected(self, stream: Stream, columns: Sequence[tuple[str, str]]) -> Stream:
        """Returns the stream with only these columns.

        `columns` are pairs of a column and its new name. Returns the same stream if nothing changes.
        """
        assert stream.schema is not None, "columns that are not known"
        kept = [name for name, _ in columns]
        changing = stream._changelog is not None and stream._changelog.changes
        names = [name for name in stream.schema.names if not (changing and name == "row_kind")]
        if kept == names and all(name == new for name, new in columns):
            return stream
        return self.chosen(stream, {new: exact_column(name) for name, new in columns}, "select")

    def chosen(self, stream: Stream, columns: Mapping[str, pl.Expr], kind: str) -> Stream:
        """Returns the stream with exactly these computed columns. `kind` names the step.

        If the event-time column is not among them, the resulting stream has no event time.
        """
        kept = {expr.meta.output_name() for expr in columns.values() if expr.meta.is_column()}
        if stream.timestamp not in kept:
            stream = stream._derived(keyed_by=stream._keyed_by, changelog=stream._changelog)
        expressions = [expr if _is(expr, name) else expr.alias(name) for name, expr in columns.items()]
        wide = stream._input_parallelism
        return stream._select(expressions, StepOptions(f"sql {kind}", self.uid(kind), wide))


def _is(expr: pl.Expr, name: str) -> bool:
    return expr.meta.is_column() and expr.meta.output_name() == name
