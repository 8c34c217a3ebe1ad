"""Translates the operators of SQL: arithmetic and comparisons. Defines how they treat nulls, types and divisions by
zero.

Where Spark and polars differ, the result is Spark's. `/` of integers is a double, a division by zero is null, `%` and
`DIV` round towards zero, and decimals keep the digits of their types. Integers that overflow wrap around. A product of
decimals with more than 38 digits fails the job.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import polars as pl
from sqlglot import exp

from tidegate.sql.functions.exact_numbers import decimal_quotients, float_remainders
from tidegate.sql.query_text import refused
from tidegate.sql.typed_values import (
    DIGITS_MAX,
    Interval,
    Typed,
    as_type,
    bounded_decimal,
    common_type,
    decimal_of,
    is_float,
    is_integer,
    is_number,
    is_time,
    literal,
    named,
    needed_common_type,
)

Compare = Callable[[pl.Expr, pl.Expr], pl.Expr]

COMPARISONS: dict[type[exp.Expr], Compare] = {
    exp.EQ: lambda a, b: a == b,
    exp.NEQ: lambda a, b: a != b,
    exp.LT: lambda a, b: a < b,
    exp.LTE: lambda a, b: a <= b,
    exp.GT: lambda a, b: a > b,
    exp.GTE: lambda a, b: a >= b,
    exp.NullSafeEQ: lambda a, b: a.eq_missing(b),
    exp.NullSafeNEQ: lambda a, b: a.ne_missing(b),
}


def compared(node: exp.Expr, one: Typed, other: Typed, how: Compare) -> Typed:
    """Compares two values in their common type by `how`. Raises ConfigurationError if they have no common type."""
    wanted = needed_common_type(node, [one.type, other.type])
    if isinstance(wanted, pl.Null):
        wanted = pl.Boolean()
    return Typed(how(as_type(node, one, wanted).expr, as_type(node, other, wanted).expr), pl.Boolean())


def negated(node: exp.Expr, given: Typed) -> Typed:
    """Returns the negative of a number or an interval."""
    if isinstance(given.value, Interval):
        return Typed(given.expr, given.type, given.value.negated())
    if given.value is not None and is_number(given.type):
        return literal(-given.value, given.type)
    if not is_number(given.type):
        raise refused(node, f"{named(given.type)} has no sign: remove it, or CAST the value to a number")
    return Typed(-given.expr, given.type)


def added(node: exp.Expr, one: Typed, other: Typed, sign: int) -> Typed:
    """Returns the sum (`sign` 1) or the difference (`sign` -1) of two numbers, two intervals, or a time and an
    interval.
    """
    intervals = [isinstance(each.value, Interval) for each in (one, other)]
    if all(intervals):
        a, b = one.value, other.value if sign > 0 else other.value.negated()
        return Typed(one.expr, one.type, Interval(a.months + b.months, a.ms + b.ms))
    if intervals[0] and sign > 0:
        one, other = other, one
    if isinstance(other.value, Interval):
        return moved(node, one, other.value if sign > 0 else other.value.negated())
    if is_time(one.type) and is_time(other.type):
        raise refused(
            node,
            "the difference of two times cannot be a column: subtract UNIX_MILLIS(…) of them, or use TIMESTAMPDIFF",
        )
    if isinstance(one.type, pl.Date) and is_integer(other.type):
        days = other.expr.cast(pl.Int64) * sign
        moved_days = (one.expr.cast(pl.Int32).cast(pl.Int64) + days).cast(pl.Int32, strict=False)
        return Typed(moved_days.cast(pl.Date), pl.Date())
    wanted = _number(node, one, other)
    if isinstance(wanted, pl.Decimal):
        a, b = (_decimal(each, wanted) for each in (one, other))
        scale = max(a.scale, b.scale)
        wide = bounded_decimal(max(a.precision - a.scale, b.precision - b.scale) + scale + 1, scale)
        x, y = (as_type(node, each, pl.Decimal(DIGITS_MAX, wide.scale)).expr for each in (one, other))
        return Typed((x + y if sign > 0 else x - y).cast(wide, strict=False), wide)
    x, y = as_type(node, one, wanted).expr, as_type(node, other, wanted).expr
    return Typed(x + y if sign > 0 else x - y, wanted)


def moved(node: exp.Expr, time: Typed, by: Interval) -> Typed:
    """Returns the sum of a date or timestamp and an interval."""
    if not is_time(time.type):
        raise refused(
            node,
            f"an INTERVAL can be added to a date or a timestamp, but this is {named(time.type)}; use "
            "CAST(... AS TIMESTAMP)",
        )
    expr, data_type = time.expr, time.type
    if isinstance(data_type, pl.Date) and by.ms % 86_400_000:
        data_type = pl.Datetime("us")
        expr = expr.cast(data_type)
    if by.months:
        expr = expr.dt.offset_by(f"{by.months}mo")
    if by.ms:
        expr = expr + pl.lit(timedelta(milliseconds=by.ms), dtype=pl.Duration(getattr(data_type, "time_unit", "ms")))
    return Typed(expr, data_type)


def multiplied(node: exp.Expr, one: Typed, other: Typed) -> Typed:
    """Returns the product of two numbers.

    Raises ConfigurationError for decimals whose product may have too many digits.
    """
    wanted = _number(node, one, other)
    if not isinstance(wanted, pl.Decimal):
        return Typed(as_type(node, one, wanted).expr * as_type(node, other, wanted).expr, wanted)
    a, b = (_decimal(each, wanted) for each in (one, other))
    precision, scale = a.precision + b.precision + 1, a.scale + b.scale
    if precision > DIGITS_MAX:
        raise refused(
            node,
            f"a product of {named(a)} and {named(b)} may have {precision} digits, but a decimal has at most "
            f"{DIGITS_MAX}: cast one of them to fewer digits",
        )
    x, y = (as_type(node, each, pl.Decimal(DIGITS_MAX, scale)).expr for each in (one, other))
    return Typed((x * y).cast(pl.Decimal(precision, scale)), pl.Decimal(precision, scale))


def divided(node: exp.Expr, one: Typed, other: Typed) -> Typed:
    """Returns the quotient of two numbers. It is null for a division by zero, and a double for integers."""
    wanted = _number(node, one, other)
    if not isinstance(wanted, pl.Decimal):
        x, y = as_type(node, one, pl.Float64()).expr, as_type(node, other, pl.Float64()).expr
        return Typed(x / _not_zero(other, y), pl.Float64())
    a, b = (_decimal(each, wanted) for each in (one, other))
    scale = max(6, a.scale + b.precision + 1)
    result = bounded_decimal(a.precision - a.scale + b.scale + scale, scale)
    wide = pl.Decimal(DIGITS_MAX, max(result.scale, b.scale))
    x, y = (as_type(node, each, wide).expr for each in (one, other))
    expr = (x / _not_zero(other, y)).cast(result, strict=False)
    if all(each.precision - each.scale <= wide.precision - wide.scale for each in (a, b)):
        return Typed(expr, result)
    inputs = [expr, one.expr, _not_zero(other, other.expr), pl.lit("quotient")]
    function = partial(decimal_quotients, precision=result.precision, scale=result.scale)
    return Typed(pl.map_batches(inputs, function, return_dtype=result, is_elementwise=True), result)


def whole_quotient(node: exp.Expr, one: Typed, other: Typed) -> Typed:
    """Translates `DIV`: the integer quotient, rounded towards zero, as a BIGINT. Null for a division by zero."""
    for each in (one, other):
        if not (is_integer(each.type) or each.is_null):
            raise refused(
                node, f"DIV takes integers, but one of these is {named(each.type)}: cast it to BIGINT, or divide with /"
            )
    x, y = as_type(node, one, pl.Int64()).expr, as_type(node, other, pl.Int64()).expr
    floored, rest = x // y, x % y
    below = (rest != 0) & ((x < 0) != (y < 0))
    return Typed(floored + below.cast(pl.Int64), pl.Int64())


def remainder(node: exp.Expr, one: Typed, other: Typed) -> Typed:
    """Translates `%`: the remainder of a division that rounds towards zero, with the sign of the dividend.

    Null for a division by zero.
    """
    wanted = _number(node, one, other)
    x, y = as_type(node, one, wanted).expr, as_type(node, other, wanted).expr
    y = _not_zero(other, y)
    if is_float(wanted):
        inputs = [x, y, pl.lit("remainder")]
        return Typed(pl.map_batches(inputs, float_remainders, return_dtype=wanted, is_elementwise=True), wanted)
    rest = x % y
    below = x < 0 if isinstance(other.value, int) and other.value > 0 else (x < 0) != (y < 0)
    kept = wanted
    if isinstance(wanted, pl.Decimal):
        a, b = (_decimal(each, wanted) for each in (one, other))
        scale = max(a.scale, b.scale)
        kept = bounded_decimal(max(1, min(a.precision - a.scale, b.precision - b.scale) + scale), scale)
    return Typed(pl.when((rest != 0) & below).then(rest - y).otherwise(rest).cast(kept), kept)


def _not_zero(given: Typed, expr: pl.Expr) -> pl.Expr:
    """Returns the expression of a divisor, with zero replaced by null."""
    if given.value:
        return expr
    return pl.when(expr != 0).then(expr)


def _decimal(given: Typed, wanted: pl.Decimal) -> pl.Decimal:
    """Returns the decimal type in which a number is calculated.

    An integer literal has only as many digits as it needs.
    """
    if given.is_null:
        return wanted
    return pl.Decimal(len(str(abs(given.value))), 0) if isinstance(given.value, int) else decimal_of(given.type)


def _number(node: exp.Expr, one: Typed, other: Typed) -> Any:
    """Returns the type in which an operation on two numbers is calculated. Raises ConfigurationError if a value is not
    a number.
    """
    for each in (one, other):
        if not (is_number(each.type) or each.is_null):
            advice = ": cast it" if isinstance(each.type, pl.String) else ""
            raise refused(node, f"{named(each.type)} is not a number{advice}")
    found = common_type(one.type, other.type)
    if isinstance(found, pl.Null):
        return pl.Float64()
    return pl.Float64() if is_float(found) and not isinstance(found, pl.Float32) else found
