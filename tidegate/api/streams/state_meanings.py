"""Describes the meaning of each step's state as a `StateMeaning`. Checkpoints store it, and a restore compares it with
the program.

The texts describe the arguments as the program gives them: an aggregate over `pl.col("v") * 2` is described by this
expression, and not by the column that an earlier step computes for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.column_expressions import ColumnLike
from tidegate.operators.joins.join_operator import JoinSides
from tidegate.operators.ranking.top_n import Ranking
from tidegate.operators.state.keys import key_schema
from tidegate.operators.windows.window_specs import (
    Clock,
    Count,
    Cumulating,
    Session,
    Sliding,
    Tumbling,
    WindowSpec,
)
from tidegate.storage.checkpoints.metadata import MeaningColumns, MeaningPart, StateMeaning

if TYPE_CHECKING:
    import polars as pl

    from tidegate.actors.graph.stream_graph import StreamNode
    from tidegate.protocol.edges import Partitioning

Inputs: TypeAlias = "Sequence[tuple[StreamNode, Partitioning | None]]"

EVENT_TIME = "event time"
TIME_COLUMN = "time expression"
"""The kind of `StateMeaning` that `assign_timestamps` stores in checkpoints, and the role of the column or expression
that it was given.
"""
AGGREGATE = "aggregate"
"""The role of an aggregate in a `StateMeaning`.

Only parts with this role may be added or removed between a checkpoint and a restore.
"""


def column_of(column: ColumnLike | None) -> str:
    """Returns the canonical text of a column name or an expression. Empty for None."""
    if column is None:
        return ""
    if isinstance(column, str):
        return column if column.isidentifier() else f"col({json.dumps(column)})"
    from tidegate.operators.functions.expressions import expression_text

    return expression_text(column.expression)


def computed_text(step: str, expressions: Sequence[pl.Expr | str]) -> str:
    """Returns the canonical text of a step of polars expressions. It does not depend on the order of the columns."""
    from tidegate.operators.functions.expressions import column_text, expression_text

    texts = []
    for expression in expressions:
        if isinstance(expression, str):
            texts.append(column_text(expression))
            continue
        name = expression.meta.output_name(raise_if_undetermined=False)
        text = expression_text(expression)
        texts.append(text if name is None or column_text(name) == text else f"{column_text(name)}={text}")
    return f"{step}({', '.join(sorted(texts))})"


def column_texts(expressions: Sequence[pl.Expr | str]) -> dict[str, str]:
    """Returns, by output column, the canonical text of each expression that computes a column.

    Copied columns are omitted.
    """
    from tidegate.operators.functions.expressions import column_text, expression_text

    texts = {}
    for expression in expressions:
        if not isinstance(expression, str):
            name, text = expression.meta.output_name(raise_if_undetermined=False), expression_text(expression)
            if name is not None and column_text(name) != text:
                texts[name] = text
    return texts


def aggregate_text(aggregate: Aggregate) -> str:
    """Returns the canonical text of an aggregate: function, columns, order, limit and condition."""
    given = [column_of(column) for column in aggregate.inputs]
    if aggregate.function is not None:
        given = [f"function={type(aggregate.function).__name__}", *given]
    if aggregate.by is not None:
        given.append(f"by={column_of(aggregate.by)}")
    if aggregate.ignore_nulls:
        given.append("ignore_nulls=True")
    if aggregate.limit is not None:
        given.append(f"limit={aggregate.limit}")
    where = "" if aggregate.condition is None else f".where({column_of(aggregate.condition)})"
    return f"{aggregate.kind.value}({', '.join(given)}){where}"


def window_text(spec: WindowSpec) -> str:
    """Returns the canonical text of a window specification, with durations in ms."""
    match spec:
        case Tumbling():
            zone = "" if spec.timezone is None else f", timezone={spec.timezone}"
            return f"Tumbling(size={spec.size_ms} ms, offset={spec.offset_ms} ms{zone})"
        case Sliding():
            return f"Sliding(size={spec.size_ms} ms, slide={spec.slide_ms} ms, offset={spec.offset_ms} ms)"
        case Cumulating():
            return f"Cumulating(step={spec.step_ms} ms, max={spec.max_ms} ms)"
        case Session():
            return f"Session(gap={column_of(spec.column) if spec.gap_ms is None else f'{spec.gap_ms} ms'})"
        case Count():
            slide = "" if spec.slide is None else f", slide={spec.slide} rows"
            timeout = "" if spec.timeout_ms is None else f", timeout={spec.timeout_ms} ms"
            return f"Count({spec.rows} rows{slide}{timeout})"


def time_text(time: str | Clock | None) -> str:
    """Returns the canonical text for the time that a step uses: an event-time column, processing time, or "none"."""
    if time is None:
        return "none"
    if isinstance(time, Clock):
        return "processing time"
    return f"{EVENT_TIME} in {column_of(str(time))}"


def meaning(
    kind: str,
    facts: Mapping[str, object],
    *,
    aggregates: Mapping[str, Aggregate] | None = None,
    fields: Mapping[str, Sequence[pa.Field]] | None = None,
    rows: Mapping[str, tuple[pa.Schema | None, Sequence[str]]] | None = None,
    evolves: bool = False,
) -> StateMeaning:
    """Returns the `StateMeaning` of a step of this kind.

    - `facts`: values that describe the step, by role. Roles with the value None are omitted.
    - `aggregates`: by output column.
    - `fields`: the state columns of each aggregate, or None if they are not known.
    - `rows`: input rows by name, with their schema and their key columns.
    - `evolves`: True if aggregates may be added and removed.
    """
    parts = [MeaningPart(role, "", _text(value)) for role, value in facts.items() if value is not None]
    columns: list[MeaningColumns] = []
    for name, aggregate in (aggregates or {}).items():
        parts.append(MeaningPart(AGGREGATE, name, aggregate_text(aggregate)))
        if fields is not None:
            columns.append(MeaningColumns.of(AGGREGATE, name, pa.schema(fields[name])))
    for name, (schema, keys) in (rows or {}).items():
        if schema is None:
            continue
        if keys:
            columns.append(MeaningColumns.of("keys", name, key_schema(schema, keys)))
    return StateMeaning(kind, tuple(parts), tuple(columns), (AGGREGATE,) if evolves else ())


def with_rows(of: StateMeaning, **stored: pa.Schema) -> StateMeaning:
    """Returns the meaning `of` a step, extended by the columns of the input rows that it stores.

    `stored` has their schema by side.
    """
    columns = (MeaningColumns.of("rows", side, schema) for side, schema in stored.items())
    return StateMeaning(of.kind, of.parts, (*of.columns, *columns), of.evolves, of.version)


def with_computed_columns(of: StateMeaning, inputs: Sequence[Inputs]) -> StateMeaning:
    """Returns the meaning `of` a step, extended by the expressions that compute its keys and its event time:
    `key_by(pl.col("n") % 2)`, GROUP BY in SQL, or `assign_timestamps(pl.col("s") * 1000)`.

    `inputs` has, for each input of the step, the nodes that it reads and how their rows are partitioned.
    """
    parts: dict[MeaningPart, None] = {}
    times = [part.text for part in of.parts if f"{EVENT_TIME} in " in part.text]
    for side, nodes in enumerate(inputs):
        where = "" if not any(inputs[1:]) else f" of the {('first', 'second')[side]} input"
        for node, partitioning in nodes:
            for key in () if partitioning is None else partitioning.keys:
                if (text := _computed_key(node, key)) is not None:
                    parts[MeaningPart(f"key expression{where}", key, text)] = None
            for text in _assigned_times(node) if times else ():
                if not any(time.endswith(f"{EVENT_TIME} in {text}") for time in times):
                    parts[MeaningPart(f"{TIME_COLUMN}{where}", "", text)] = None
    return replace(of, parts=(*of.parts, *parts)) if parts else of


def _computed_key(node: StreamNode, key: str) -> str | None:
    """Returns the canonical text of the expression that computes a key column in the steps before `node`, or None if
    the key is not computed.
    """
    while (text := node.key_texts.get(key)) is None:
        if not node.computes or len(node.inputs) != 1:
            return None
        node = node.inputs[0][0]
    return text


def _assigned_times(node: StreamNode) -> list[str]:
    """Returns the canonical texts of the columns or expressions that `assign_timestamps` was given, in the steps
    without state before a step.
    """
    found: dict[str, None] = {}
    left, seen = [node.maker], {node.maker.uid}
    while left:
        each = left.pop()
        if each.meaning is not None and each.meaning.kind == EVENT_TIME:
            found |= {part.text: None for part in each.meaning.parts if part.role == TIME_COLUMN}
        elif each.meaning is None:
            makers = {upstream.maker.uid: upstream.maker for upstream, _ in each.inputs}
            left += [maker for uid, maker in makers.items() if uid not in seen]
            seen |= makers.keys()
    return sorted(found)


def ranking_facts(ranking: Ranking) -> dict[str, object]:
    """Returns the facts that describe a ranking, by role (see `meaning`)."""
    columns = zip(ranking.by, ranking.descending, ranking.nulls_behind, strict=True)
    order = [
        f"{column_of(by)} {'descending' if down else 'ascending'}, nulls {'last' if last else 'first'}"
        for by, down, last in columns
    ]
    emit = "final" if ranking.final else "changes" if ranking.changes else "update"
    return {
        "keys": ranking.keys,
        "n": ranking.n,
        "order": order,
        "rank": "column" if ranking.rank is not None else None,
        "emit": emit,
        "ties": ranking.ties,
    }


def join_facts(sides: JoinSides, how: str) -> dict[str, object]:
    """Returns the facts that describe any join, by role (see `meaning`): keys, kind, and the time of each side."""
    return {
        "left keys": sides.keys[0],
        "right keys": sides.keys[1],
        "how": how,
        "left time": None if sides.times[0] is None else time_text(str(sides.times[0])),
        "right time": None if sides.times[1] is None else time_text(str(sides.times[1])),
    }


def ttl_text(ttl_ms: int | None, time: str | None) -> str | None:
    """Returns the canonical text of a time to live, or None if there is none.

    `time` is the event-time column, or None for processing time.
    """
    if ttl_ms is None:
        return None
    return f"{ttl_ms} ms of {'processing time' if time is None else time_text(str(time))}"


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable):
        return f"({', '.join(map(str, value))})"
    return str(value)
