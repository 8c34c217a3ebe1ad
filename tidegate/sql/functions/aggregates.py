"""The aggregates of SQL by name, and their translations into aggregates of the public API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl
from sqlglot import exp

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.sketches import approx_count_distinct, approx_quantile
from tidegate.sql.query_text import is_call, refused
from tidegate.sql.typed_values import Typed, is_number, named, truth

Column = str | pl.Expr


@dataclass(frozen=True, slots=True)
class AggregateCall:
    """A call of an aggregate function: its arguments, and the modifiers DISTINCT and IGNORE NULLS."""

    node: exp.Expr
    name: str
    args: tuple[Typed, ...]
    distinct: bool = False
    ignore_nulls: bool = False

    def column(self, place: int = 0) -> Column:
        """Returns the argument at the index `place` as a column name, or as a polars expression."""
        return column_of(self.args[place])

    def number(self) -> Column:
        """Returns the first argument as a column name or expression. Raises ConfigurationError if it is not numeric."""
        if not (is_number(self.args[0].type) or self.args[0].is_null):
            raise refused(
                self.node, f"{self.name} takes a number, not {named(self.args[0].type)}: convert it with CAST"
            )
        return self.column()


def column_of(given: Typed) -> Column:
    """Returns the column name if the value is a plain column, else its polars expression."""
    return given.expr.meta.output_name() if given.expr.meta.is_column() else given.expr


def _count(call: AggregateCall) -> Aggregate:
    if call.distinct:
        return tg.count_distinct(call.column())
    return tg.count() if not call.args or call.args[0].value is not None else tg.count(call.column())


def _count_if(call: AggregateCall) -> Aggregate:
    return tg.count().where(truth(call.node, call.args[0]))


def _quantile(call: AggregateCall) -> Aggregate:
    share = call.args[1].value
    if share is None or not 0 <= float(share) <= 1:
        raise refused(call.node, "the share must be a literal from 0 to 1, as in APPROX_PERCENTILE(ms, 0.99)")
    return approx_quantile(call.number(), float(share))


def _condition(of: Callable[[Column], Aggregate]) -> Callable[[AggregateCall], Aggregate]:
    return lambda call: of(truth(call.node, call.args[0]))


def _chosen(of: Callable[..., Aggregate]) -> Callable[[AggregateCall], Aggregate]:
    return lambda call: of(call.column(), ignore_nulls=call.ignore_nulls)


def _by(of: Callable[[Column, Column], Aggregate]) -> Callable[[AggregateCall], Aggregate]:
    return lambda call: of(call.column(0), call.column(1))


def _number(of: Callable[[Column], Aggregate]) -> Callable[[AggregateCall], Aggregate]:
    return lambda call: of(call.number())


def _value(of: Callable[[Column], Aggregate]) -> Callable[[AggregateCall], Aggregate]:
    return lambda call: of(call.column())


AGGREGATES: dict[str, tuple[int, Callable[[AggregateCall], Aggregate]]] = {
    "COUNT": (1, _count),
    "COUNT_IF": (1, _count_if),
    "SUM": (1, _number(tg.sum)),
    "AVG": (1, _number(tg.mean)),
    "MEAN": (1, _number(tg.mean)),
    "MIN": (1, _value(tg.min)),
    "MAX": (1, _value(tg.max)),
    "STDDEV": (1, _number(tg.stddev_samp)),
    "STDDEV_SAMP": (1, _number(tg.stddev_samp)),
    "STDDEV_POP": (1, _number(tg.stddev_pop)),
    "VARIANCE": (1, _number(tg.var_samp)),
    "VAR_SAMP": (1, _number(tg.var_samp)),
    "VAR_POP": (1, _number(tg.var_pop)),
    "BOOL_AND": (1, _condition(tg.bool_and)),
    "EVERY": (1, _condition(tg.bool_and)),
    "BOOL_OR": (1, _condition(tg.bool_or)),
    "SOME": (1, _condition(tg.bool_or)),
    "FIRST": (1, _chosen(tg.first)),
    "FIRST_VALUE": (1, _chosen(tg.first)),
    "LAST": (1, _chosen(tg.last)),
    "LAST_VALUE": (1, _chosen(tg.last)),
    "MIN_BY": (2, _by(tg.arg_min)),
    "MAX_BY": (2, _by(tg.arg_max)),
    "APPROX_COUNT_DISTINCT": (1, _value(approx_count_distinct)),
    "APPROX_PERCENTILE": (2, _quantile),
    "PERCENTILE_APPROX": (2, _quantile),
}
"""For each aggregate, by name, the number of its arguments and the function that translates a call."""

_ELSEWHERE = ("COLLECT_LIST", "COLLECT_SET", "ARRAY_AGG", "LISTAGG", "STRING_AGG", "GROUP_CONCAT")


def is_aggregate(node: exp.Expr) -> bool:
    """Returns whether a node is an aggregate, maybe with FILTER, IGNORE NULLS or RESPECT NULLS."""
    if isinstance(node, exp.Filter | exp.IgnoreNulls | exp.RespectNulls):
        return is_aggregate(node.this)
    return is_call(node, *AGGREGATES) or is_call(node, *_ELSEWHERE)


def aggregate_of(node: exp.Expr, translate: Callable[[exp.Expr], Typed]) -> Aggregate:
    """Translates an aggregate, maybe with FILTER or IGNORE NULLS. `translate` translates its arguments.

    Raises ConfigurationError for an aggregate that is not supported.
    """
    if isinstance(node, exp.Filter):
        condition = truth(node.expression.this, translate(node.expression.this))
        return aggregate_of(node.this, translate).where(condition)
    ignore = isinstance(node, exp.IgnoreNulls)
    call = node.this if isinstance(node, exp.IgnoreNulls | exp.RespectNulls) else node
    name, arguments, distinct = str(call.name).upper(), list(call.expressions), False
    if name in _ELSEWHERE:
        raise refused(
            call, f"{name} would keep all values; use aggregate(…) with tg.collect_list(…, limit=…), which limits them"
        )
    if len(arguments) == 1 and isinstance(arguments[0], exp.IgnoreNulls):
        ignore, arguments = True, [arguments[0].this]
    if arguments and isinstance(arguments[0], exp.Distinct):
        distinct, arguments = True, list(arguments[0].expressions)
    if name == "COUNT" and len(arguments) == 1 and isinstance(arguments[0], exp.Star):
        arguments = []
    count, make = AGGREGATES[name]
    _check(call, name, arguments, count, distinct)
    return make(AggregateCall(call, name, tuple(map(translate, arguments)), distinct, ignore))


def _check(call: exp.Expr, name: str, arguments: Sequence[exp.Expr], count: int, distinct: bool) -> None:
    if distinct and name != "COUNT" and name not in ("MIN", "MAX"):
        raise refused(call, f"DISTINCT is for COUNT; for {name} group by the values in a query in FROM first")
    if distinct and len(arguments) != 1:
        raise refused(call, "COUNT(DISTINCT …) takes one column: join several with CONCAT_WS, or group by them first")
    if len(arguments) != count and not (name == "COUNT" and not arguments):
        raise refused(call, f"{name} takes {count} argument{'s' if count > 1 else ''}, not {len(arguments)}")
