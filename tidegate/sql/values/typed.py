"""`Typed`: an expression of polars with its type in SQL, and how one type becomes another.

Rules of casts: what cannot be read or does not fit is null, as of Spark's `try_cast`. Numbers with a point lose what
stands behind it when they become integers, and are rounded half up when they become decimals. Timestamps without a zone
are taken for UTC where they meet some with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

import polars as pl
from sqlglot import exp

from tidegate.sql.text.places import refused
from tidegate.sql.values.types import DIGITS_MAX, calculated, is_float, is_integer, is_number, is_time, named
from tidegate.storage.schemas.polars_frames import exact_column

_DATE, _TIME = "%Y-%m-%d", "%Y-%m-%d %H:%M:%S%.f"
_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")


@dataclass(frozen=True, slots=True)
class Interval:
    """A length of time: months, which differ, and milliseconds."""

    months: int
    ms: int

    def negated(self) -> Interval:
        """As long, back in time."""
        return Interval(-self.months, -self.ms)


@dataclass(frozen=True, slots=True)
class Typed:
    """An expression. `value` is that of a literal: a Python value or an `Interval`; else it is None."""

    expr: pl.Expr
    type: Any
    value: Any = None

    @property
    def is_null(self) -> bool:
        """Whether it is the word NULL."""
        return isinstance(self.type, pl.Null)


def literal(value: Any, data_type: Any) -> Typed:
    """A value as it stands in the text."""
    return Typed(pl.lit(value, dtype=data_type), data_type, value)


def null() -> Typed:
    """The word NULL, whose type is that of what stands beside it."""
    return Typed(pl.lit(None), pl.Null())


def column(name: str, data_type: Any) -> Typed:
    """A column of a stream, as it is calculated with."""
    of_kind = calculated(data_type)
    return Typed(exact_column(name) if of_kind == data_type else exact_column(name).cast(of_kind), of_kind)


def as_type(node: exp.Expr, given: Typed, wanted: Any) -> Typed:
    """The same values in another type. ConfigurationError where SQL has no such cast, or a literal does not fit."""
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
            # As it is written: in binary 1.005 is a little less.
            return Typed(read_decimal(expr.cast(pl.Float64).cast(pl.String), wanted), wanted)
        if isinstance(has, pl.Decimal) and isinstance(wanted, pl.Decimal) and wanted.scale < has.scale:
            expr = expr.round(wanted.scale, mode="half_away_from_zero")  # a cast of polars rounds 2.345 to 2.34
        return Typed(expr.cast(wanted, strict=False), wanted)
    if isinstance(has, pl.Boolean) and is_number(wanted):
        return Typed(given.expr.cast(pl.Int8).cast(wanted), wanted)
    if is_number(has) and isinstance(wanted, pl.Boolean):
        return Typed(given.expr != 0, wanted)
    if is_time(has) and is_time(wanted):
        return Typed(_as_time(given.expr, has, wanted), wanted)
    advice = ""
    if is_time(has) or is_time(wanted):
        advice = ": use UNIX_MILLIS(…) or TIMESTAMP_MILLIS(…), which say the unit"
    raise refused(node, f"{named(has)} cannot become {named(wanted)}{advice}")


def truth(node: exp.Expr, given: Typed) -> pl.Expr:
    """A condition. ConfigurationError for anything else."""
    if given.is_null:
        return pl.lit(None, dtype=pl.Boolean)
    if not isinstance(given.type, pl.Boolean):
        raise refused(
            node, f"this is {named(given.type)}, and stands where a condition must: compare it with something"
        )
    return given.expr


def _literal_as(node: exp.Expr, given: Typed, wanted: Any) -> Typed | None:
    """A literal in another type, known now; None where the value decides nothing."""
    value = given.value
    if isinstance(value, str) and is_time(wanted):
        found = _parsed(value)
        if found is None:
            raise refused(node, f"{value!r} is no {named(wanted)}; write 'YYYY-MM-DD' or 'YYYY-MM-DD hh:mm:ss.fff'")
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
        said = plain.dt.strftime(_TIME)
        return pl.when(said.str.contains(".", literal=True)).then(said.str.strip_chars_end("0")).otherwise(said)
    if is_number(has) or isinstance(has, pl.Boolean | pl.Binary):
        return expr.cast(pl.String, strict=False)
    raise refused(node, f"{named(has)} cannot become STRING")


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
    raise refused(node, f"STRING cannot become {named(wanted)}")


def read_decimal(text: pl.Expr, wanted: pl.Decimal) -> pl.Expr:
    """Text as a decimal, rounded half up: polars reads 0.125 as 0.12 where two digits are kept."""
    spare = DIGITS_MAX - wanted.precision
    if not spare:
        return text.cast(wanted, strict=False)
    # What does not fit is null at once, and then there is a digit more, or rounding up might fail.
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
    """The value of a literal. ConfigurationError for what is none of these kinds."""
    value = given.value
    if isinstance(value, bool) or not isinstance(value, kinds):
        words = {int: "a whole number", str: "a text", Interval: "an INTERVAL", float: "a number", Decimal: "a number"}
        raise refused(node, f"this must be {' or '.join(dict.fromkeys(words[kind] for kind in kinds))}, written out")
    return value
