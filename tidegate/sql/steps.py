"""`Steps`: adds the steps of a query to a program, each with a uid that only depends on the query.

Rules: uids begin with the `uid` of the query, or with a digest of its text (blanks and comments apart), and go on with
the kind of the step and a number, counted within the kind. So a query that is not touched finds its state again, and
one with a `uid` does so as long as its stateful steps stay the same, in number and order. A step that only looks at
rows is as parallel as the one before it, so that they are one task.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import polars as pl

from tidegate.api.program import Program
from tidegate.api.streams.stream import Stream
from tidegate.storage.schemas.polars_frames import exact_column

_DIGEST = 10
_TEXT = re.compile(r"('(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`)|(?:--[^\n]*|/\*.*?\*/|\s+)+", re.DOTALL)


def prefix_of(text: str, uid: str | None, program: Program) -> str:
    """How the uids of a query begin. The second query of one text is told apart by a number."""
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
    """Makes steps of one query."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._made: Counter[str] = Counter()

    def uid(self, kind: str) -> str:
        """The uid of the next step of a kind."""
        self._made[kind] += 1
        return f"{self._prefix}-{kind}-{self._made[kind]}"

    def computed(self, stream: Stream, columns: Mapping[str, pl.Expr]) -> Stream:
        """The stream with columns more."""
        if not columns:
            return stream
        expressions = [expr.alias(name) for name, expr in columns.items()]
        wide = stream._input_parallelism
        return stream._with_columns(expressions, "sql columns", self.uid("columns"), wide, are_keys=True)

    def filtered(self, stream: Stream, condition: pl.Expr) -> Stream:
        """The rows for which a condition is true."""
        wide = stream._input_parallelism
        return stream.filter(condition, name="sql where", uid=self.uid("where"), parallelism=wide)

    def selected(self, stream: Stream, columns: Sequence[tuple[str, str]]) -> Stream:
        """These columns, each with its new name; the same stream where nothing changes."""
        assert stream.schema is not None, "columns that are not known"
        kept = [name for name, _ in columns]
        changing = stream._updating is not None and stream._updating.changes
        names = [name for name in stream.schema.names if not (changing and name == "row_kind")]
        if kept == names and all(name == new for name, new in columns):
            return stream
        return self.chosen(stream, {new: exact_column(name) for name, new in columns}, "select")

    def chosen(self, stream: Stream, columns: Mapping[str, pl.Expr], kind: str) -> Stream:
        """What a step of this kind computes, and nothing else. Event time that no query names goes without a word."""
        kept = {expr.meta.output_name() for expr in columns.values() if expr.meta.is_column()}
        if stream.timestamp not in kept:
            stream = Stream(stream._program, stream._inputs, stream._keyed_by, None, stream._updating)
        expressions = [expr if _is(expr, name) else expr.alias(name) for name, expr in columns.items()]
        wide = stream._input_parallelism
        return stream._select(expressions, f"sql {kind}", self.uid(kind), wide)


def _is(expr: pl.Expr, name: str) -> bool:
    return expr.meta.is_column() and expr.meta.output_name() == name
