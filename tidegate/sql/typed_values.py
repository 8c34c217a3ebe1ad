"""`Typed` is a polars expression with its SQL type. This module also has the casts between types.

Rules of casts: a value that cannot be read or does not fit becomes null, as in Spark's `try_cast`. Numbers lose their
fraction when they become integers, and are rounded half up when they become decimals. Timestamps without a time zone
count as UTC when they are combined with timestamps that have a time zone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

import polars as pl
from sqlglot import exp

from tidegate.sql.query_text import refused
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import exact_column

_DATE, _TIME = "%Y-%m-%d", "%Y-%m-%d %H:%M:%S%.f"
_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")


@dataclass(frozen=True, slots=True)
class Interval:
    """A duration: a number of months, whose lengths differ, and a number of milliseconds."""

    months: int
    ms: int

    def negated(self) -> Interval:
        """Returns the negative interval."""
        return Interval(-self.months, -self.ms)


@dataclass(frozen=True, slots=True)
class Typed:
    """A polars expression with its SQL type. `value` is the Python value or `Interval` of a literal, else None."""

    expr: pl.Expr
    type: Any
    value: Any = None

    @property
    def is_null(self) -> bool:
        """Returns True for the literal NULL."""
        return isinstance(self.type, pl.Null)


def literal(value: Any, data_type: Any) -> Typed:
    """Returns a literal value as a `Typed`."""
    return Typed(pl.lit(value, dtype=data_type), data_type, value)


def null() -> Typed:
    """Returns the literal NULL, which gets the type of the other operands."""
    return Typed(pl.lit(None), pl.Null())


def column(name: str, data_type: Any) -> Typed:
    """Returns a column of a stream as a `Typed`, converted to the type in which SQL calculates."""
    of_kind = calculated(data_type)
    return Typed(exact_column(name) if of_kind == data_type else exact_column(name).cast(of_kind), of_kind)


def as_type(node: exp.Expr, given: Typed, wanted: Any) -> Typed:
    """Returns a value converted to the type `wanted`.

    Raises ConfigurationError if SQL has no such cast, or if a literal does not fit.
    """
    has = given.type
    if has == wanted:
        return given
    if given.is_null:
        return Typed(pl.lit(None, dtype=wanted), wanted)
    if given.value is not None and not isinstance(given.value, Interval):
        known = _literal_as(node, given, wanted)
        if known is not None:
            return known
    if isinstance(wanted, pl.String):
        return Typed(_as_text(node, given), wanted)
    if isinstance(wanted, pl.Binary) and isinstance(has, pl.String):
        return Typed(given.expr.cast(pl.Binary), wanted)
    if isinstance(has, pl.String):
        return Typed(_of_text(node, given, wanted), wanted)
    if is_number(has) and is_number(wanted):
        expr = given.expr
        if is_float(has) and isinstance(wanted, pl.Decimal):
            # Cast the decimal text of the number: in binary 1.005 is a little less.
            return Typed(read_decimal(expr.cast(pl.Float64).cast(pl.String), wanted), wanted)
        if isinstance(has, pl.Decimal) and isinstance(wanted, pl.Decimal) and wanted.scale < has.scale:
            expr = expr.round(wanted.scale, mode="half_away_from_zero")  # a polars cast rounds 2.345 to 2.34
        return Typed(expr.cast(wanted, strict=False), wanted)
    if isinstance(has, pl.Boolean) and is_number(wanted):
        return Typed(given.expr.cast(pl.Int8).cast(wanted), wanted)
    if is_number(has) and isinstance(wanted, pl.Boolean):
        return Typed(given.expr != 0, wanted)
    if is_time(has) and is_time(wanted):
        return Typed(_as_time(given.expr, has, wanted), wanted)
    advice = ""
    if is_time(has) or is_time(wanted):
        advice = ": use UNIX_MILLIS(…) or TIMESTAMP_MILLIS(…), which have a unit"
    raise refused(node, f"{named(has)} cannot be converted to {named(wanted)}{advice}")


def truth(node: exp.Expr, given: Typed) -> pl.Expr:
    """Returns a boolean value as a polars condition. Raises ConfigurationError for a value that is not boolean."""
    if given.is_null:
        return pl.lit(None, dtype=pl.Boolean)
    if not isinstance(given.type, pl.Boolean):
        raise refused(
            node, f"a condition is needed here, but this is {named(given.type)}: compare it with a value, as in x > 0"
        )
    return given.expr


def _literal_as(node: exp.Expr, given: Typed, wanted: Any) -> Typed | None:
    """Returns a literal converted to another type, or None if the value has to be cast when the job runs."""
    value = given.value
    if isinstance(value, str) and is_time(wanted):
        found = _parsed(value)
        if found is None:
            raise refused(node, f"{value!r} is not a {named(wanted)}; write 'YYYY-MM-DD' or 'YYYY-MM-DD hh:mm:ss.fff'")
        if isinstance(wanted, pl.Date):
            return literal(found.date(), wanted)
        zoned = Typed(_as_time(pl.lit(found, dtype=pl.Datetime("us")), pl.Datetime("us"), wanted), wanted)
        return literal(found, wanted) if wanted.time_zone is None else zoned
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        if is_float(wanted):
            return literal(float(value), wanted)
        if is_integer(wanted) and isinstance(value, int) and abs(value) < 2**31:
            small = wanted.base_type() in (pl.Int8, pl.Int16)
            return None if small else literal(value, wanted)
        if isinstance(wanted, pl.Decimal) and isinstance(value, int):
            fits = len(str(abs(value))) <= wanted.precision - wanted.scale
            return literal(Decimal(value), wanted) if fits else None
    return None


def _parsed(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return found if found.tzinfo is None else None


def _as_text(node: exp.Expr, given: Typed) -> pl.Expr:
    has, expr = given.type, given.expr
    if isinstance(has, pl.Date):
        return expr.dt.strftime(_DATE)
    if isinstance(has, pl.Datetime):
        plain = expr.dt.replace_time_zone(None) if has.time_zone in (None, "UTC") else _as_time(expr, has, _PLAIN)
        text = plain.dt.strftime(_TIME)
        return pl.when(text.str.contains(".", literal=True)).then(text.str.strip_chars_end("0")).otherwise(text)
    if is_number(has) or isinstance(has, pl.Boolean | pl.Binary):
        return expr.cast(pl.String, strict=False)
    raise refused(node, f"{named(has)} cannot be converted to STRING: convert its fields or elements one by one")


_PLAIN = pl.Datetime("us")


def _of_text(node: exp.Expr, given: Typed, wanted: Any) -> pl.Expr:
    text = given.expr.str.strip_chars()
    if isinstance(wanted, pl.Decimal):
        return read_decimal(text, wanted)
    if is_number(wanted):
        return text.cast(wanted, strict=False)
    if isinstance(wanted, pl.Boolean):
        lower = text.str.to_lowercase()
        no = pl.when(lower.is_in(list(_FALSE))).then(False)
        return pl.when(lower.is_in(list(_TRUE))).then(True).otherwise(no)
    if is_time(wanted):
        spaced = text.str.replace("T", " ", literal=True)
        moment = spaced.str.to_datetime(_TIME, time_unit="us", strict=False)
        day = text.str.to_date(_DATE, strict=False)
        if isinstance(wanted, pl.Date):
            return pl.coalesce(day, moment.dt.date())
        return _as_time(pl.coalesce(moment, day.cast(_PLAIN)), _PLAIN, wanted)
    raise refused(node, f"STRING cannot be converted to {named(wanted)}: for a list or struct in JSON use FROM_JSON")


def read_decimal(text: pl.Expr, wanted: pl.Decimal) -> pl.Expr:
    """Returns text converted to a decimal, rounded half up.

    (A cast of polars would convert 0.125 with two digits to 0.12.)
    """
    spare = DIGITS_MAX - wanted.precision
    if not spare:
        return text.cast(wanted, strict=False)
    # Values that do not fit become null first. Then one more digit is allowed, because rounding up might need it.
    fits = text.cast(pl.Decimal(DIGITS_MAX, wanted.scale + spare), strict=False)
    roomy = fits.cast(pl.Decimal(DIGITS_MAX, wanted.scale + spare - 1), strict=False)
    return roomy.round(wanted.scale, mode="half_away_from_zero").cast(wanted, strict=False)


def _as_time(expr: pl.Expr, has: Any, wanted: Any) -> pl.Expr:
    if isinstance(wanted, pl.Date):
        return expr.dt.date()
    if isinstance(has, pl.Date):
        expr, has = expr.cast(pl.Datetime(wanted.time_unit)), pl.Datetime(wanted.time_unit)
    if has.time_unit != wanted.time_unit:
        expr = expr.dt.cast_time_unit(wanted.time_unit)
    if has.time_zone == wanted.time_zone:
        return expr
    if has.time_zone is None:
        expr = expr.dt.replace_time_zone("UTC")
        return expr if wanted.time_zone == "UTC" else expr.dt.convert_time_zone(wanted.time_zone)
    if wanted.time_zone is None:
        return expr.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
    return expr.dt.convert_time_zone(wanted.time_zone)


def python_value(node: exp.Expr, given: Typed, *kinds: type) -> Any:
    """Returns the Python value of a literal.

    Raises ConfigurationError for a value that is not a literal of one of these types (`kinds`).
    """
    value = given.value
    if isinstance(value, bool) or not isinstance(value, kinds):
        words = {int: "a whole number", str: "a text", Interval: "an INTERVAL", float: "a number", Decimal: "a number"}
        raise refused(node, f"this must be {' or '.join(dict.fromkeys(words[kind] for kind in kinds))}, as a literal")
    return value


DIGITS_MAX = 38
_SCALE_KEPT = 6
"""Number of digits after the decimal point that a result keeps if it would have too many digits."""

_INTS: dict[Any, int] = {pl.Int8: 3, pl.Int16: 5, pl.Int32: 10, pl.Int64: 20}
"""Signed integer types from narrow to wide, each with the number of decimal digits that represents all of its
values.
"""
_SIGNED: dict[Any, Any] = {pl.UInt8: pl.Int16, pl.UInt16: pl.Int32, pl.UInt32: pl.Int64}
_UNITS = ("ms", "us", "ns")

_NAMED: dict[str, Any] = {
    "BOOLEAN": pl.Boolean,
    "TINYINT": pl.Int8,
    "SMALLINT": pl.Int16,
    "INT": pl.Int32,
    "BIGINT": pl.Int64,
    "FLOAT": pl.Float32,
    "DOUBLE": pl.Float64,
    "TEXT": pl.String,
    "VARCHAR": pl.String,
    "CHAR": pl.String,
    "BINARY": pl.Binary,
    "DATE": pl.Date,
}
_TIMES = ("TIMESTAMP", "TIMESTAMPTZ", "TIMESTAMPNTZ", "TIMESTAMPLTZ", "DATETIME")


def type_of_name(node: exp.DataType) -> Any:
    """Returns the polars type that a CAST names. Raises ConfigurationError for an unknown type."""
    kind = str(getattr(node.this, "value", node.this)).upper()
    numbers = [int(each.name) for each in node.expressions if each.name.isdigit()]
    if kind == "DECIMAL":
        precision, scale = (*numbers, 10, 0)[:2] if len(numbers) != 1 else (numbers[0], 0)
        if not 0 <= scale <= precision <= DIGITS_MAX or not precision:
            raise refused(
                node, f"a decimal has 1 to {DIGITS_MAX} digits, and its scale is at most its number of digits"
            )
        return pl.Decimal(precision, scale)
    if kind in _TIMES:
        digits = numbers[0] if numbers else 6
        return pl.Datetime("ms" if digits <= 3 else "us" if digits <= 6 else "ns")
    if kind not in _NAMED:
        raise refused(node, f"there is no type {kind}; use one of {', '.join(sorted(_NAMED))}, DECIMAL and TIMESTAMP")
    return _NAMED[kind]()


def named(data_type: Any) -> str:
    """Returns the SQL name of a polars type, such as `BIGINT`."""
    if isinstance(data_type, pl.Decimal):
        return f"DECIMAL({data_type.precision},{data_type.scale})"
    if isinstance(data_type, pl.Datetime):
        return "TIMESTAMP"
    words = {"TEXT": "STRING"}
    found = next((name for name, each in _NAMED.items() if data_type == each), None)
    return words.get(found, found) if found is not None else str(data_type)


def calculated(data_type: Any) -> Any:
    """Returns the type in which SQL calculates with the values of a column type.

    Categories become strings, and unsigned integers become wider signed integers.
    """
    if isinstance(data_type, pl.Categorical | pl.Enum):
        return pl.String()
    return _SIGNED[data_type.base_type()]() if data_type.base_type() in _SIGNED else data_type


def is_integer(data_type: Any) -> bool:
    """Returns whether a type is a signed integer."""
    return data_type.base_type() in _INTS


def is_float(data_type: Any) -> bool:
    """Returns whether a type is a float."""
    return data_type.base_type() in (pl.Float32, pl.Float64)


def is_number(data_type: Any) -> bool:
    """Returns whether a type is a number."""
    return is_integer(data_type) or is_float(data_type) or isinstance(data_type, pl.Decimal)


def is_time(data_type: Any) -> bool:
    """Returns whether a type is a date or a timestamp."""
    return isinstance(data_type, pl.Date | pl.Datetime)


def decimal_of(data_type: Any) -> pl.Decimal:
    """Returns the decimal type that can represent all values of an integer type, or the decimal type itself."""
    if isinstance(data_type, pl.Decimal):
        return data_type
    return pl.Decimal(_INTS[data_type.base_type()], 0)


def bounded_decimal(precision: int, scale: int) -> pl.Decimal:
    """Returns a decimal type with this precision and scale.

    If the precision is over the limit, both are reduced, as in Spark.
    """
    if precision <= DIGITS_MAX:
        return pl.Decimal(precision, scale)
    whole = precision - scale
    return pl.Decimal(DIGITS_MAX, max(DIGITS_MAX - whole, min(scale, _SCALE_KEPT)))


def common_type(one: Any, other: Any) -> Any:
    """Returns the type in which values of both types can be compared, or be in one column.

    None if there is no such type.
    """
    if one == other:
        return one
    if isinstance(one, pl.Null) or isinstance(other, pl.Null):
        return other if isinstance(one, pl.Null) else one
    if is_number(one) and is_number(other):
        return _common_number(one, other)
    if is_time(one) and is_time(other):
        return _common_time(one, other)
    if isinstance(one, pl.String) and is_time(other):
        return other
    if isinstance(other, pl.String) and is_time(one):
        return one
    return None


def needed_common_type(node: exp.Expr, types: list[Any]) -> Any:
    """Returns the common type of several types. Raises ConfigurationError if there is none."""
    found: Any = pl.Null()
    for each in types:
        common = common_type(found, each)
        if common is None:
            raise refused(
                node, f"{named(found)} and {named(each)} cannot be combined; convert one of them with CAST(… AS …)"
            )
        found = common
    return found


def check_known(name: str, data_type: Any) -> None:
    """Raises ConfigurationError for a column of type uint64, which SQL does not support."""
    if data_type.base_type() == pl.UInt64:
        raise ConfigurationError(
            f"column {name!r} is uint64, for which SQL has no type: cast it before, as in "
            f"with_columns(pl.col({name!r}).cast(pl.Int64))"
        )


def _common_number(one: Any, other: Any) -> Any:
    if is_float(one) or is_float(other):
        narrow = all(each.base_type() == pl.Float32 or is_integer(each) for each in (one, other))
        return pl.Float32() if narrow else pl.Float64()
    if is_integer(one) and is_integer(other):
        order = list(_INTS)
        return max(one, other, key=lambda each: order.index(each.base_type()))
    a, b = decimal_of(one), decimal_of(other)
    scale = max(a.scale, b.scale)
    return bounded_decimal(max(a.precision - a.scale, b.precision - b.scale) + scale, scale)


def _common_time(one: Any, other: Any) -> Any:
    if isinstance(one, pl.Date) or isinstance(other, pl.Date):
        return other if isinstance(one, pl.Date) else one
    unit = max(one.time_unit, other.time_unit, key=_UNITS.index)
    zone = one.time_zone or other.time_zone
    return pl.Datetime(unit, zone)
