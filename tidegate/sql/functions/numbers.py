"""Functions of numbers, and functions that return one of their arguments (COALESCE, GREATEST, IF and similar)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import polars as pl

from tidegate.sql.functions.call import ANY_NUMBER, Call, Function, Functions, of
from tidegate.sql.operators import remainder
from tidegate.sql.typed_values import (
    Typed,
    as_type,
    bounded_decimal,
    is_float,
    is_integer,
    needed_common_type,
    read_decimal,
    truth,
)


def _double(change: Callable[[pl.Expr], pl.Expr]) -> Function:
    return of(1)(lambda call: Typed(change(call.double(0)), pl.Float64()))


def _positive(change: Callable[[pl.Expr], pl.Expr]) -> Function:
    """Returns the SQL function that applies `change` to a double. Its result is null for arguments that are not greater
    than 0, as in Spark.
    """
    return of(1)(lambda call: Typed(change(pl.when(call.double(0) > 0).then(call.double(0))), pl.Float64()))


def _abs(call: Call) -> Typed:
    given = call.number(0)
    return Typed(given.expr.abs(), given.type)


def _whole(change: Callable[[pl.Expr], pl.Expr]) -> Function:
    """Returns the SQL function that rounds to whole numbers by `change`. The result is BIGINT for doubles, and a
    decimal of scale 0 for decimals.
    """

    def make(call: Call) -> Typed:
        given = call.number(0)
        if is_integer(given.type):
            return Typed(given.expr.cast(pl.Int64), pl.Int64())
        wanted: Any = pl.Int64()
        if isinstance(given.type, pl.Decimal):
            wanted = pl.Decimal(max(1, min(38, given.type.precision - given.type.scale + 1)), 0)
        return Typed(change(given.expr).cast(wanted, strict=False), wanted)

    return of(1)(make)


def _round(call: Call) -> Typed:
    """Translates ROUND, which rounds half away from zero."""
    given, digits = call.number(0), call.literal_int(1, otherwise=0)
    if is_integer(given.type):
        if digits < 0:
            raise call.refused("the number of digits must not be negative: give 0 or more")
        return given
    if digits < 0:
        raise call.refused("the number of digits must not be negative: give 0 or more")
    if not isinstance(given.type, pl.Decimal):
        return Typed(_rounded(given.expr.cast(pl.Float64), digits).cast(given.type), given.type)
    rounded = given.expr.round(digits, mode="half_away_from_zero")
    scale = min(digits, given.type.scale)
    wanted = bounded_decimal(given.type.precision - given.type.scale + scale + 1, scale)
    return Typed(rounded.cast(wanted, strict=False), wanted)


def _rounded(value: pl.Expr, digits: int) -> pl.Expr:
    """Rounds doubles by their decimal text: 1.005 becomes 1.01, although its binary value is a little less.

    Doubles that are too large for `digits` exact digits are returned unchanged.
    """
    if digits > _ROUNDED_DIGITS_MAX:
        return value
    written = read_decimal(value.cast(pl.String), pl.Decimal(20, digits)).cast(pl.Float64)
    return pl.when(value.abs() < 2**53 / 10**digits).then(pl.coalesce(written, value)).otherwise(value)


def _sign(call: Call) -> Typed:
    value = call.double(0)
    positive = (value > 0) & value.is_not_nan()  # in polars NaN is greater than any number
    return Typed(pl.when(positive).then(1.0).when(value < 0).then(-1.0).otherwise(value), pl.Float64())


def _mod(call: Call) -> Typed:
    return remainder(call.node, call.args[0], call.args[1])


def _power(call: Call) -> Typed:
    """Translates POWER, with the results of Java for infinities, NaN and signed zeros.

    Polars takes the square root for 0.5, which differs for -Infinity and -0.0. Its power of 1 and -1 is 1 also for
    exponents that are NaN or infinite.
    """
    base, exponent = call.double(0), call.double(1)
    rooted = (exponent == 0.5) & ((base == float("-inf")) | (base == 0))
    power = pl.when(rooted).then(base.abs()).otherwise(base).pow(exponent)
    undefined = (base.abs() == 1) & (exponent.is_nan() | exponent.is_infinite())
    return Typed(pl.when(undefined).then(float("nan")).otherwise(power), pl.Float64())


def _in_common(call: Call, args: tuple[Typed, ...]) -> tuple[list[pl.Expr], Any]:
    wanted = needed_common_type(call.node, [each.type for each in args])
    return [as_type(call.node, each, wanted).expr for each in args], wanted


def _coalesce(call: Call) -> Typed:
    found, data_type = _in_common(call, call.args)
    return Typed(pl.coalesce(*found), data_type)


def _extreme(greatest: bool) -> Function:
    """Returns the SQL function GREATEST (if `greatest`) or LEAST. Nulls are skipped, as in Spark. NaN is greater than
    any number.
    """

    def make(call: Call) -> Typed:
        found, data_type = _in_common(call, call.args)
        best = found[0]
        for each in found[1:]:
            better = each > best if greatest else each < best
            best = pl.when(best.is_null() | better).then(each).otherwise(best)
        return Typed(best, data_type)

    return of(2, ANY_NUMBER)(make)


def _nullif(call: Call) -> Typed:
    found, _ = _in_common(call, call.args)
    given = call.args[0]
    return Typed(pl.when((found[0] != found[1]).fill_null(True)).then(given.expr), given.type)


def _if(call: Call) -> Typed:
    found, data_type = _in_common(call, call.args[1:])
    return Typed(pl.when(truth(call.nodes[0], call.args[0])).then(found[0]).otherwise(found[1]), data_type)


def _isnan(call: Call) -> Typed:
    given = call.number(0)
    if not is_float(given.type):
        return Typed(given.expr.is_null() & pl.lit(False), pl.Boolean())
    return Typed(given.expr.is_nan().fill_null(False), pl.Boolean())


def _nvl2(call: Call) -> Typed:
    found, data_type = _in_common(call, call.args[1:])
    return Typed(pl.when(call.args[0].expr.is_not_null()).then(found[0]).otherwise(found[1]), data_type)


def _pi(call: Call) -> Typed:
    return Typed(pl.lit(math.pi), pl.Float64())


_ROUNDED_DIGITS_MAX = 15

NUMBERS: Functions = {
    "ABS": of(1)(_abs),
    "CEIL": _whole(lambda value: value.ceil()),
    "CEILING": _whole(lambda value: value.ceil()),
    "FLOOR": _whole(lambda value: value.floor()),
    "ROUND": of(1, 2)(_round),
    "SIGN": of(1)(_sign),
    "MOD": of(2)(_mod),
    "POWER": of(2)(_power),
    "POW": of(2)(_power),
    "SQRT": _double(lambda value: value.sqrt()),
    "EXP": _double(lambda value: value.exp()),
    "LN": _positive(lambda value: value.log()),
    "LOG10": _positive(lambda value: value.log10()),
    "LOG2": _positive(lambda value: value.log(2)),
    "SIN": _double(lambda value: value.sin()),
    "COS": _double(lambda value: value.cos()),
    "TAN": _double(lambda value: value.tan()),
    "ASIN": _double(lambda value: value.arcsin()),
    "ACOS": _double(lambda value: value.arccos()),
    "ATAN": _double(lambda value: value.arctan()),
    "ATAN2": of(2)(lambda call: Typed(pl.arctan2(call.double(0), call.double(1)), pl.Float64())),
    "RADIANS": _double(lambda value: value.radians()),
    "DEGREES": _double(lambda value: value.degrees()),
    "PI": of(0)(_pi),
    "COALESCE": of(1, ANY_NUMBER)(_coalesce),
    "IFNULL": of(2)(_coalesce),
    "NVL": of(2)(_coalesce),
    "NVL2": of(3)(_nvl2),
    "NULLIF": of(2)(_nullif),
    "IF": of(3)(_if),
    "GREATEST": _extreme(greatest=True),
    "LEAST": _extreme(greatest=False),
    "ISNULL": of(1)(lambda call: Typed(call.args[0].expr.is_null(), pl.Boolean())),
    "ISNOTNULL": of(1)(lambda call: Typed(call.args[0].expr.is_not_null(), pl.Boolean())),
    "ISNAN": of(1)(_isnan),
}
