"""Translates rankings: `ROW_NUMBER() OVER (PARTITION BY … ORDER BY …)` with a condition on the number becomes a top-n
or a deduplication.

The inner query defines the ranking. The outer condition (or QUALIFY) limits its rows. Rows in windows, and results of
windows, are ranked once, when their window ends. RANK is supported only for them. Other rows are ranked as they arrive,
and rows that are no longer among the first rows are retracted.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl
from sqlglot import exp

from tidegate.api.streams.ranking_steps import RankEmit
from tidegate.api.streams.stream import Stream
from tidegate.operators.windows.window_columns import WINDOW_END, WINDOW_START
from tidegate.sql.expressions import Expressions
from tidegate.sql.grouping import EmitOptions, aggregates_in
from tidegate.sql.joining import pruned
from tidegate.sql.query_text import check_only, errors_at, is_call, refused
from tidegate.sql.relations import (
    WINDOW_TIME,
    Name,
    OrderColumn,
    Rank,
    Relation,
    Steps,
    columns_in,
    columns_of,
    free_name,
)
from tidegate.sql.windows import filtered_by_bounds

_MIRRORED: dict[type[exp.Expr], type[exp.Expr]] = {exp.GT: exp.LT, exp.GTE: exp.LTE, exp.EQ: exp.EQ}


def is_ranking(node: exp.Expr) -> bool:
    """Returns whether an expression is ROW_NUMBER or RANK with OVER."""
    return isinstance(node, exp.Window) and is_call(node.this, "ROW_NUMBER", "RANK")


def rank_of(node: exp.Window, relation: Relation, steps: Steps) -> tuple[Relation, Rank]:
    """Returns the relation with the columns that a ranking needs, and the description of the ranking.

    Raises ConfigurationError for a ranking that cannot become a top-n.
    """
    order = node.args.get("order")
    if order is None:
        raise refused(node, "a rank needs an order: OVER (PARTITION BY … ORDER BY …)")
    check_only(node, "this", "partition_by", "order", "over")
    names: list[Name] = []
    for each in node.args.get("partition_by") or []:
        relation, name = _column(each, relation, steps)
        names.append(name)
    by: list[OrderColumn] = []
    for each in order.expressions:
        relation, name = _column(each.this, relation, steps)
        if name.bound:
            raise refused(
                each, "all rows of a window have the same bounds, so these give no order: ORDER BY another column"
            )
        by.append(_order_column(each, name.inner))
    return relation, Rank(is_call(node.this, "RANK"), tuple(names), tuple(by), node)


def ordered(node: exp.Expr, made: Relation, source: Relation, items: list[exp.Expr], steps: Steps) -> Relation:
    """Returns the rows of a query with a pending ranking by its ORDER BY. Raises ConfigurationError for an order that
    is not supported.

    In ORDER BY, a number is the position of a result column, and an expression of SELECT (`items`) refers to its
    column. Other names are columns of the result, or else of `source`, the rows from which the result is computed.
    """
    by: list[OrderColumn] = []
    for each in node.args["order"].expressions:
        place = _place_of(each.this, made, items)
        if place is not None:
            by.append(_order_column(each, made.names[place].inner))
            continue
        for aggregate in aggregates_in([each.this]):
            raise refused(aggregate, "ORDER BY takes columns of SELECT: add the aggregate to SELECT")
        view = made if all(made.has(column) for column in columns_in(each.this)) else source
        view, name = _column(each.this, view.with_stream(made.stream), steps)
        made = made.with_stream(view.stream)
        by.append(_order_column(each, name.inner))
    return replace(made, rank=Rank(False, (), tuple(by), node.args["order"]))


def _place_of(node: exp.Expr, made: Relation, items: list[exp.Expr]) -> int | None:
    """Returns the index of the result column to which an ORDER BY expression refers, or None if the expression has to
    be computed.
    """
    if isinstance(node, exp.Literal) and not node.is_string:
        if not (str(node.this).isdigit() and 1 <= int(str(node.this)) <= len(made.names)):
            raise refused(
                node,
                f"the result has {len(made.names)} columns: give a number from 1 to {len(made.names)}, or the name of "
                "a column",
            )
        return int(str(node.this)) - 1
    starred = any(isinstance(each, exp.Star) or isinstance(each.this, exp.Star) for each in items)
    if isinstance(node, exp.Column) or starred:
        return None
    plain = [each.this if isinstance(each, exp.Alias) else each for each in items]
    return plain.index(node) if node in plain else None


def _order_column(node: exp.Expr, name: str) -> OrderColumn:
    """Returns the order by a column, from an ORDER BY expression whose values are in the column `name`.

    By default nulls are less than all values.
    """
    descending, nulls_first = bool(node.args.get("desc")), node.args.get("nulls_first")
    return OrderColumn(name, descending, descending if nulls_first is None else not nulls_first)


def taken_limit(conditions: list[exp.Expr], relation: Relation) -> int | None:
    """Finds a condition that limits the rank, removes it from `conditions`, and returns the number of rows that it
    keeps.

    None if there is none.
    """
    for node in conditions:
        kind, column, bound = type(node), node.args.get("this"), node.args.get("expression")
        if kind in _MIRRORED and isinstance(bound, exp.Column) and not isinstance(column, exp.Column):
            kind, column, bound = _MIRRORED[kind], bound, column
        if kind not in (exp.LT, exp.LTE, exp.EQ) or not isinstance(column, exp.Column):
            continue
        if not (isinstance(bound, exp.Literal) and str(bound.this).isdigit()) or not _is_rank(column, relation):
            continue
        limit = int(str(bound.this)) - (1 if kind is exp.LT else 0)
        if limit < 1 or (kind is exp.EQ and limit > 1):
            raise refused(node, "a ranking keeps the first rows: write a condition such as rn <= 10, or rn = 1")
        conditions.remove(node)
        return limit
    return None


def ranked(relation: Relation, limit: int, named: bool, steps: Steps, emit_options: EmitOptions) -> Relation:
    """Returns the first `limit` rows of the relation's ranking.

    `named` is True if the query reads the rank. Raises ConfigurationError for a ranking that is not supported.
    """
    rank = relation.rank
    assert rank is not None
    partition = [each.inner for each in rank.partition if not each.bound]
    bounds = {each.inner for each in rank.partition if each.bound}
    bounds |= (
        {each for each in partition if each in (WINDOW_START, WINDOW_END)} if relation.results is not None else set()
    )
    needed = {*(each.name for each in rank.order), *partition}
    visible = [each for each in relation.names if not each.rank]
    kept = pruned(
        replace(relation, names=(*visible, *(Name(None, f"{name} ", name) for name in sorted(needed)))),
        lambda _: True,
        steps,
    )
    stream, column = kept.stream, None
    if named:
        column = free_name(next(each.name for each in relation.names if each.rank), columns_of(stream))
    uid = steps.uid("top")
    with errors_at(rank.node):
        if relation.windows is not None or bounds:
            if not bounds >= {WINDOW_START, WINDOW_END}:
                raise refused(
                    rank.node, "rows in windows must be ranked with both window_start and window_end in PARTITION BY"
                )
            made = _of_windows(stream, relation, partition, limit, rank, column, uid)
        elif rank.ties:
            raise refused(rank.node, "RANK is only supported for windows, where no row arrives later; use ROW_NUMBER")
        elif stream._changelog is not None:
            raise refused(
                rank.node,
                'rows that may be retracted cannot be ranked: rank results of windows, or of emit="final"',
            )
        else:
            made = _running(stream, partition, limit, rank, column, uid, emit_options, steps)
    names = [
        Name(each.table, each.name, column if each.rank and column is not None else each.inner)
        for each in relation.names
        if (named or not each.rank) and not (each.bound and each.inner == WINDOW_TIME)
    ]
    results = relation.results if relation.windows is None else relation.windows
    return filtered_by_bounds(
        Relation(made, tuple(names), results=results if bounds else None), relation.bound_conditions, steps
    )


def _of_windows(
    stream: Stream,
    relation: Relation,
    partition: list[str],
    limit: int,
    rank: Rank,
    column: str | None,
    uid: str,
) -> Stream:
    by, descending, nulls_last = _by_columns(rank)
    if relation.windows is None:
        keyed = stream.key_by(*partition)
        return keyed.top_n(
            limit, by, descending=descending, nulls_last=nulls_last, rank=column, emit="final", ties=rank.ties, uid=uid
        )
    windows = stream.key_by(*partition).window(relation.windows) if partition else stream.window(relation.windows)
    return windows.top_n(limit, by, descending=descending, nulls_last=nulls_last, rank=column, ties=rank.ties, uid=uid)


def _by_columns(rank: Rank) -> tuple[list[str], list[bool], list[bool]]:
    """Returns the order columns of a ranking, and for each whether it is descending and whether its nulls come last."""
    order = rank.order
    return [each.name for each in order], [each.descending for each in order], [each.nulls_last for each in order]


def _running(
    stream: Stream,
    partition: list[str],
    limit: int,
    rank: Rank,
    column: str | None,
    uid: str,
    emit_options: EmitOptions,
    steps: Steps,
) -> Stream:
    alone = None
    if not partition:
        of_all = free_name("of_all", columns_of(stream))
        stream, partition, alone = steps.computed(stream, {of_all: pl.lit(0, dtype=pl.Int8)}), [of_all], 1
    keyed = stream.key_by(*partition)
    by, descending, nulls_last = _by_columns(rank)
    if emit_options.emit == "update" and limit == 1 and len(by) == 1 and column is None:
        return keyed.deduplicate(by[0], keep="last" if descending[0] else "first", ttl=emit_options.ttl, uid=uid)
    emit: RankEmit = "update" if emit_options.emit == "update" else "changes"
    made = keyed.top_n(
        limit,
        by,
        descending=descending,
        nulls_last=nulls_last,
        rank=column,
        emit=emit,
        ttl=emit_options.ttl,
        uid=uid,
        parallelism=alone,
    )
    if alone and emit == "changes" and made._changelog is not None:
        # A single subtask emits all rows, so they are in order for a table with any keys.
        made._changelog = replace(made._changelog, keys=())
    return made


def _column(node: exp.Expr, relation: Relation, steps: Steps) -> tuple[Relation, Name]:
    """Returns the relation and the name of its column with the values of an expression.

    The column is added if the expression has to be computed.
    """
    if isinstance(node, exp.Column) and (not node.table or relation.has_table(node.table)):
        return relation, relation.find(node)
    typed = Expressions(relation.typed).of(node)
    if typed.value is not None:
        raise refused(node, "this value is the same for all rows; name a column")
    name = free_name("rank_by", columns_of(relation.stream))
    made = relation.with_stream(steps.computed(relation.stream, {name: typed.expr}))
    return made, Name(None, name, name)


def _is_rank(node: exp.Column, relation: Relation) -> bool:
    named = [each for each in relation.names if each.name.lower() == node.name.lower()]
    named = [each for each in named if not node.table or (each.table or "").lower() == node.table.lower()]
    return len(named) == 1 and named[0].rank
