"""Functions of dates and timestamps. All of them calculate in UTC.

Functions that read the clock, such as NOW, raise an error, because they would return other values when rows are
replayed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import polars as pl
from sqlglot import exp

from tidegate.sql.functions.call import Call, Function, Functions, of
from tidegate.sql.operators import moved
from tidegate.sql.query_text import refused
from tidegate.sql.typed_values import Interval, Typed, as_type, is_integer, is_number, named

_DAY_MS = 86_400_000
UNIT_MS = {"MILLISECOND": 1, "SECOND": 1_000, "MINUTE": 60_000, "HOUR": 3_600_000, "DAY": _DAY_MS, "WEEK": 7 * _DAY_MS}
UNIT_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}

_PARTS: Mapping[str, Callable[[pl.Expr], pl.Expr]] = {
    "YEAR": lambda time: time.dt.year(),
    "QUARTER": lambda time: time.dt.quarter(),
    "MONTH": lambda time: time.dt.month(),
    "WEEK": lambda time: time.dt.week(),
    "DAY": lambda time: time.dt.day(),
    "DOY": lambda time: time.dt.ordinal_day(),
    "DOW": lambda time: time.dt.weekday() % 7 + 1,
    "WEEKDAY": lambda time: time.dt.weekday() - 1,
    "HOUR": lambda time: time.dt.hour(),
    "MINUTE": lambda time: time.dt.minute(),
    "SECOND": lambda time: time.dt.second(),
}
_NAMES = {"DAYOFMONTH": "DAY", "DAYOFYEAR": "DOY", "DAYOFWEEK": "DOW", "WEEKOFYEAR": "WEEK"}
_TRUNCATED = {"YEAR": "1y", "QUARTER": "1q", "MONTH": "1mo", "WEEK": "1w", "DAY": "1d", "HOUR": "1h", "MINUTE": "1m"}
_TRUNCATED |= {"SECOND": "1s", "MILLISECOND": "1ms"}
_FORMS = {
    "yyyy": "%Y",
    "yy": "%y",
    "MM": "%m",
    "MMM": "%b",
    "MMMM": "%B",
    "dd": "%d",
    "DDD": "%j",
    "HH": "%H",
    "hh": "%I",
    "mm": "%M",
    "ss": "%S",
    "SSS": "%3f",
    "SSSSSS": "%6f",
    "a": "%p",
    "E": "%a",
    "EEE": "%a",
    "EEEE": "%A",
}


def unit_of(node: exp.Expr, word: str) -> str:
    """Returns the name of a unit of time in the singular and in capitals.

    Raises ConfigurationError for an unknown unit.
    """
    found = word.upper().strip()
    found = found if found in UNIT_MS or found in UNIT_MONTHS else found.removesuffix("S")
    if found not in UNIT_MS and found not in UNIT_MONTHS:
        raise refused(node, f"{word!r} is not a unit of time; use one of {', '.join((*UNIT_MS, *UNIT_MONTHS))}")
    return found


def in_utc(given: Typed) -> pl.Expr:
    """Returns a time as an expression in UTC, so that its parts (such as the hour) are in UTC."""
    zone = getattr(given.type, "time_zone", None)
    return given.expr if zone in (None, "UTC") else given.expr.dt.convert_time_zone("UTC")


def part_of(node: exp.Expr, word: str, given: Typed) -> Typed:
    """Returns the part of a time that `word` names, such as the hour. For functions such as HOUR(…)."""
    name = word.upper()
    name = _NAMES.get(name, name)
    name = name if name in _PARTS else name.removesuffix("S")
    if name not in _PARTS:
        raise refused(node, f"a time has no part {word!r}; use one of {', '.join(_PARTS)}")
    if isinstance(given.type, pl.Date):
        given = as_type(node, given, pl.Datetime("ms"))
    return Typed(_PARTS[name](in_utc(given)).cast(pl.Int32), pl.Int32())


def extracted(node: exp.Expr, word: str, given: Typed) -> Typed:
    """Translates EXTRACT. Like `part_of`, but seconds include their fraction, as in Spark."""
    if word.upper().removesuffix("S") != "SECOND":
        return part_of(node, word, given)
    time = in_utc(as_type(node, given, pl.Datetime("us")) if isinstance(given.type, pl.Date) else given)
    micros = time.dt.second().cast(pl.Int64) * 1_000_000 + time.dt.microsecond()
    wide, wanted = pl.Decimal(38, 6), pl.Decimal(8, 6)
    return Typed((micros.cast(wide) / pl.lit(1_000_000).cast(wide)).cast(wanted), wanted)


def strftime_of(node: exp.Expr, pattern: str) -> str:
    """Converts a date pattern of Java to a pattern of strftime. Raises ConfigurationError for unknown letters."""
    found = []
    for quoted, letters, other in re.findall(r"'([^']*)'|([A-Za-z]+)|([^A-Za-z']+)", pattern):
        if letters:
            for run in (match[0] for match in re.finditer(r"([A-Za-z])\1*", letters)):
                if run not in _FORMS:
                    known = ", ".join(_FORMS)
                    raise refused(node, f"no letters {run!r} in a pattern; there are {known}. Put text in 'quotes'")
                found.append(_FORMS[run])
        else:
            found.append((quoted or other).replace("%", "%%"))
    return "".join(found)


def _part(name: str) -> Function:
    return of(1)(lambda call: part_of(call.node, name, call.time(0)))


def _date_format(call: Call) -> Typed:
    given = call.time(0)
    if isinstance(given.type, pl.Date):
        given = as_type(call.node, given, pl.Datetime("ms"))
    return Typed(in_utc(given).dt.strftime(strftime_of(call.nodes[1], call.literal_text(1))), pl.String())


def _date_trunc(call: Call) -> Typed:
    return _truncated(call, call.literal_text(0), call.time(1))


def _trunc(call: Call) -> Typed:
    given = _truncated(call, call.literal_text(1), call.time(0))
    return as_type(call.node, given, pl.Date())


def _truncated(call: Call, word: str, given: Typed) -> Typed:
    unit = unit_of(call.node, word)
    given = given if isinstance(given.type, pl.Datetime) else as_type(call.node, given, pl.Datetime("us"))
    return Typed(in_utc(given).dt.truncate(_TRUNCATED[unit]), _utc_type(given))


def _utc_type(given: Typed) -> pl.Datetime:
    return pl.Datetime(given.type.time_unit, None if given.type.time_zone is None else "UTC")


def _parsed_by_pattern(call: Call) -> pl.Expr:
    """Returns the text of the first argument as a timestamp, read by the pattern of the second argument.

    As in Spark, parts that the pattern lacks are taken from 1970-01-01 00:00 AM, and years of two digits are in this
    century.
    The parser has no such defaults, so the text of these parts is put before each value.
    """
    form = strftime_of(call.nodes[1], call.literal_text(1))
    given = set(re.findall(r"%\d?([A-Za-z])", form.replace("%%", "")))
    lacking: list[tuple[str, str]] = []
    if "y" in given:
        lacking.append(("%C", "20"))
    elif "Y" not in given:
        lacking.append(("%Y", "1970"))
    if not given & set("mbBj"):
        lacking.append(("%m", "01"))
    if not given & set("dj"):
        lacking.append(("%d", "01"))
    if given & set("HIpMSf"):
        if not given & set("HI"):
            lacking.append(("%I", "12") if "p" in given else ("%H", "00"))
        if "I" in given and "p" not in given:
            lacking.append(("%p", "AM"))
        lacking += [(part, "00") for part in ("%M", "%S") if part[1] not in given]
    text = call.text(0)
    if lacking:
        text = pl.lit("".join(f"{value}|" for _, value in lacking)) + text
        form = "".join(f"{part}|" for part, _ in lacking) + form
    return text.str.to_datetime(form, time_unit="us", strict=False)


def _to_date(call: Call) -> Typed:
    if len(call.args) > 1:
        return Typed(_parsed_by_pattern(call).dt.date(), pl.Date())
    return as_type(call.node, call.args[0], pl.Date())


def _to_timestamp(call: Call) -> Typed:
    if len(call.args) > 1:
        return Typed(_parsed_by_pattern(call), pl.Datetime("us"))
    return as_type(call.node, call.args[0], pl.Datetime("us"))


def _days_later(sign: int) -> Function:
    def make(call: Call) -> Typed:
        day = call.as_(0, pl.Date()).cast(pl.Int32).cast(pl.Int64)
        if not is_integer(call.args[1].type):
            raise call.refused(f"the number of days must be a whole number, not {named(call.args[1].type)}")
        return Typed((day + sign * call.integer(1)).cast(pl.Int32, strict=False).cast(pl.Date), pl.Date())

    return of(2)(make)


def _datediff(call: Call) -> Typed:
    one, other = (call.as_(place, pl.Date()).cast(pl.Int32) for place in (0, 1))
    return Typed(one - other, pl.Int32())


def _timestampdiff(call: Call) -> Typed:
    """Translates TIMESTAMPDIFF: the number of whole units from the first time to the second time."""
    unit = unit_of(call.node, call.nodes[0].name)
    if unit in UNIT_MONTHS:
        raise call.refused("months have no fixed length: use a unit from MILLISECOND to WEEK")
    first, second = (_moments(call, place, "us") for place in (1, 2))
    apart, size = second - first, UNIT_MS[unit] * 1_000
    whole = apart // size
    return Typed(whole + ((apart % size != 0) & (apart < 0)).cast(pl.Int64), pl.Int64())


def _timestampadd(call: Call) -> Typed:
    unit, count = unit_of(call.node, call.nodes[0].name), call.literal_int(1)
    by = Interval(UNIT_MONTHS[unit] * count, 0) if unit in UNIT_MONTHS else Interval(0, UNIT_MS[unit] * count)
    return moved(call.node, call.time(2), by)


def _moments(call: Call, place: int, unit: str) -> pl.Expr:
    """Returns a time argument as a whole number of units since 1970. `unit` is "s", "ms" or "us"."""
    given = as_type(call.nodes[place], call.time(place), pl.Datetime("us"))
    return (
        given.expr.cast(pl.Int64) if unit == "us" else given.expr.cast(pl.Int64) // (1_000 if unit == "ms" else 10**6)
    )


def _since_1970(unit: str) -> Function:
    return of(1)(lambda call: Typed(_moments(call, 0, unit), pl.Int64()))


def _of_number(unit: str) -> Function:
    """Returns the SQL function that converts a number of units since 1970 to a timestamp. `unit` is "s", "ms" or
    "us".
    """

    def make(call: Call) -> Typed:
        if unit == "s" and is_number(call.args[0].type) and not is_integer(call.args[0].type):
            return Typed(
                (call.double(0) * 1_000_000).cast(pl.Int64, strict=False).cast(pl.Datetime("us")), pl.Datetime("us")
            )
        number = call.integer(0) * 1_000 if unit == "s" else call.integer(0)
        kept = pl.Datetime("us" if unit == "us" else "ms")
        return Typed(number.cast(kept), kept)

    return of(1)(make)


def _last_day(call: Call) -> Typed:
    return Typed(call.as_(0, pl.Date()).dt.month_end(), pl.Date())


def _add_months(call: Call) -> Typed:
    return Typed(call.as_(0, pl.Date()).dt.offset_by(f"{call.literal_int(1)}mo"), pl.Date())


TIMES: Functions = {
    **{name: _part(name) for name in ("YEAR", "QUARTER", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND", "WEEKDAY")},
    **{name: _part(name) for name in _NAMES},
    "DATE_FORMAT": of(2)(_date_format),
    "DATE_TRUNC": of(2)(_date_trunc),
    "TRUNC": of(2)(_trunc),
    "TO_DATE": of(1, 2)(_to_date),
    "DATE": of(1)(_to_date),
    "TO_TIMESTAMP": of(1, 2)(_to_timestamp),
    "DATE_ADD": _days_later(1),
    "DATE_SUB": _days_later(-1),
    "DATEDIFF": of(2)(_datediff),
    "DATE_DIFF": of(2)(_datediff),
    "TIMESTAMPDIFF": of(3)(_timestampdiff),
    "TIMESTAMPADD": of(3)(_timestampadd),
    "ADD_MONTHS": of(2)(_add_months),
    "LAST_DAY": of(1)(_last_day),
    "UNIX_TIMESTAMP": _since_1970("s"),
    "UNIX_SECONDS": _since_1970("s"),
    "UNIX_MILLIS": _since_1970("ms"),
    "UNIX_MICROS": _since_1970("us"),
    "TIMESTAMP_SECONDS": _of_number("s"),
    "TIMESTAMP_MILLIS": _of_number("ms"),
    "TIMESTAMP_MICROS": _of_number("us"),
}
CLOCK: tuple[str, ...] = ("NOW", "CURRENT_TIMESTAMP", "CURRENT_DATE", "CURRENT_TIME", "CURDATE", "PROCTIME")
CLOCK += ("LOCALTIMESTAMP", "LOCALTIME", "CURRENT_TIMEZONE")
RANDOM = ("RAND", "RANDOM", "RANDN", "UUID", "SHUFFLE")
