"""Types of SQL, and what becomes of two types that meet: Spark's rules, over the types of polars.

Text is never taken for a number, nor a number for text: Spark would guess, a cast says it. Text beside a date or a
timestamp is read as one.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from sqlglot import exp

from tidegate.sql.text.places import refused
from tidegate.storage.errors import ConfigurationError

DIGITS_MAX = 38
_SCALE_KEPT = 6
"""Digits behind the point that a product keeps where it would have too many digits."""

_INTS: dict[Any, int] = {pl.Int8: 3, pl.Int16: 5, pl.Int32: 10, pl.Int64: 20}
"""Signed integers, narrow before wide, and the digits of a decimal that holds each."""
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
    """The type that a cast names. ConfigurationError for one that there is not."""
    kind = str(getattr(node.this, "value", node.this)).upper()
    numbers = [int(each.name) for each in node.expressions if each.name.isdigit()]
    if kind == "DECIMAL":
        precision, scale = (*numbers, 10, 0)[:2] if len(numbers) != 1 else (numbers[0], 0)
        if not 0 <= scale <= precision <= DIGITS_MAX or not precision:
            raise refused(node, f"a decimal has 1 to {DIGITS_MAX} digits, and no more of them behind the point")
        return pl.Decimal(precision, scale)
    if kind in _TIMES:
        digits = numbers[0] if numbers else 6
        return pl.Datetime("ms" if digits <= 3 else "us" if digits <= 6 else "ns")
    if kind not in _NAMED:
        raise refused(node, f"there is no type {kind}; there are {', '.join(sorted(_NAMED))}, DECIMAL and TIMESTAMP")
    return _NAMED[kind]()


def named(data_type: Any) -> str:
    """A type in the words of SQL."""
    if isinstance(data_type, pl.Decimal):
        return f"DECIMAL({data_type.precision},{data_type.scale})"
    if isinstance(data_type, pl.Datetime):
        return "TIMESTAMP"
    words = {"TEXT": "STRING"}
    found = next((name for name, each in _NAMED.items() if data_type == each), None)
    return words.get(found, found) if found is not None else str(data_type)


def calculated(data_type: Any) -> Any:
    """The type with which a column is calculated: categories are text, unsigned integers wider ones with a sign."""
    if isinstance(data_type, pl.Categorical | pl.Enum):
        return pl.String()
    return _SIGNED[data_type.base_type()]() if data_type.base_type() in _SIGNED else data_type


def is_integer(data_type: Any) -> bool:
    """Whether it is an integer with a sign."""
    return data_type.base_type() in _INTS


def is_float(data_type: Any) -> bool:
    """Whether it is a float."""
    return data_type.base_type() in (pl.Float32, pl.Float64)


def is_number(data_type: Any) -> bool:
    """Whether it can be calculated with."""
    return is_integer(data_type) or is_float(data_type) or isinstance(data_type, pl.Decimal)


def is_time(data_type: Any) -> bool:
    """Whether it is a date or a timestamp."""
    return isinstance(data_type, pl.Date | pl.Datetime)


def decimal_of(data_type: Any) -> pl.Decimal:
    """The decimal that holds all values of an integer, or the decimal itself."""
    if isinstance(data_type, pl.Decimal):
        return data_type
    return pl.Decimal(_INTS[data_type.base_type()], 0)


def bounded_decimal(precision: int, scale: int) -> pl.Decimal:
    """A decimal of so many digits; where these are too many some behind the point go, as in Spark."""
    if precision <= DIGITS_MAX:
        return pl.Decimal(precision, scale)
    whole = precision - scale
    return pl.Decimal(DIGITS_MAX, max(DIGITS_MAX - whole, min(scale, _SCALE_KEPT)))


def common_type(one: Any, other: Any) -> Any:
    """The type in which values of both are compared, or stand in one column. None where there is none."""
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
    """The common type of several. ConfigurationError where there is none."""
    found: Any = pl.Null()
    for each in types:
        common = common_type(found, each)
        if common is None:
            raise refused(
                node, f"{named(found)} and {named(each)} do not go together; say what you mean with CAST(… AS …)"
            )
        found = common
    return found


def check_known(name: str, data_type: Any) -> None:
    """ConfigurationError for a column of whole numbers that no type of SQL holds."""
    if data_type.base_type() == pl.UInt64:
        raise ConfigurationError(
            f"column {name!r} is uint64, which SQL has no type for: cast it before, as in "
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
