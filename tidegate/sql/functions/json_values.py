"""`json_objects` and `json_structs`: values of JSON texts, as Spark 3.5 returns them for GET_JSON_OBJECT and FROM_JSON.

Tasks import this module, so it does not import sqlglot. Rules:

- A text is read up to the end of its first value, with strings in double or in single quotes. A text that cannot be
  read gives null, or a struct of nulls in FROM_JSON.
- GET_JSON_OBJECT returns a string as it is, and everything else as compact JSON. If an object has a name twice, the
  first value is used.
- FROM_JSON returns null for a value that has another type than its field, and other fields keep their values. If an
  object has a name twice, the last value is used. A STRING field accepts a value of any kind, as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from functools import partial
from typing import Any, TypeAlias

import polars as pl

_NUMBER_CHARACTERS_MAX = 1_000
"""Greatest number of characters of a JSON number. A longer number cannot be read, as in Jackson."""


class _Object(list[tuple[str, Any]]):
    """The members of a JSON object as pairs of name and value, in order, with duplicate names."""


class _Float(float):
    """A JSON number with a fraction or an exponent, which keeps its original text."""

    text: str


def _float(text: str) -> _Float:
    made = _Float(text)
    made.text = text
    return made


def _int(text: str) -> int:
    if len(text) > _NUMBER_CHARACTERS_MAX:
        raise ValueError(
            f"a number in JSON has {len(text):,} characters, more than {_NUMBER_CHARACTERS_MAX:,}; write it as a text"
        )
    return int(text)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a value of JSON; write null or a text")


_DECODERS = {
    lenient: json.JSONDecoder(
        object_pairs_hook=_Object,
        parse_float=_float,
        parse_int=_int,
        parse_constant=_float if lenient else _no_constant,
        strict=lenient,
    )
    for lenient in (False, True)
}
"""JSON decoders.

The decoder for FROM_JSON (key True) accepts NaN and Infinity. The decoder for GET_JSON_OBJECT (key False) accepts
control characters.
"""
_BLANKS = " \t\n\r"
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
_ESCAPED = re.compile(r'\\.|"', re.DOTALL)
_BAD = object()
"""Returned for a text that is not JSON."""


def _read(text: str, of_schema: bool) -> Any:
    """Returns the first JSON value of a text.

    Returns `_BAD` if the text has none, and None for the JSON value `null`. `of_schema` is True for FROM_JSON.
    """
    text = text.lstrip(_BLANKS)
    try:
        value, end = _DECODERS[of_schema].raw_decode(text)
        return value if _ends(value, text[end : end + 1]) else _BAD
    except (ValueError, RecursionError):
        if "'" not in text:
            return _BAD
    try:
        return _DECODERS[of_schema].raw_decode(_QUOTED.sub(_in_double_quotes, text))[0]
    except (ValueError, RecursionError):
        return _BAD


def _ends(value: Any, following: str) -> bool:
    """Returns whether the first value may end before the text `following`: a number must be followed by a blank, and a
    word by a character that cannot be part of a name.
    """
    if not following or isinstance(value, str | list):
        return True
    if value is None or isinstance(value, bool):
        return following < "0" or following in "]}" or not (following.isidentifier() or following.isdigit())
    return following in _BLANKS


def _in_double_quotes(found: re.Match[str]) -> str:
    def escaped(part: re.Match[str]) -> str:
        return {"\\'": "'", '"': '\\"'}.get(part[0], part[0])

    return f'"{_ESCAPED.sub(escaped, found[0][1:-1])}"'


# --- writing ----------------------------------------------------------------------------------------------------------

_IN_TEXT = re.compile(r'["\\\x00-\x1f]')
"""Matches the characters that are written as escapes in arrays that come from a wildcard, as Jackson does for character
output.
"""
_IN_BYTES = re.compile(r'["\\\x00-\x1f\ud800-\udfff\U00010000-\U0010ffff]')
"""Matches the characters that are written as escapes elsewhere, as Jackson does for byte output.

A character beyond U+FFFF becomes two escapes.
"""
_HALVES = re.compile("[\ud800-\udfff]")
"""Matches single surrogates (halves of a pair), which UTF-8 cannot represent."""
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN_FROM, _PLAIN_TO = -3, 7
"""Powers of ten between which Java writes a double without an exponent."""


def _written(value: Any, escape: re.Pattern[str]) -> str:
    """Returns a value as compact JSON text. `escape` matches the characters of strings that are written as escapes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{escape.sub(_escaped, value)}"'
    if isinstance(value, float):
        text = _java_double(value)
        return text if text[-1].isdigit() else f'"{text}"'
    if isinstance(value, int):
        return str(value)
    if isinstance(value, _Object):
        members = (f"{_written(name, escape)}:{_written(each, escape)}" for name, each in value)
        return "{" + ",".join(members) + "}"
    return "[" + ",".join(_written(each, escape) for each in value) + "]"


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    if character in _ESCAPES:
        return _ESCAPES[character]
    units = character.encode("utf-16-be", "surrogatepass").hex().upper()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _java_double(value: float) -> str:
    """Returns the text of a double as Java writes it, for example 1.0E10 where Python writes 10000000000.0."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    sign, digits, exponent = Decimal(repr(float(value))).as_tuple()
    figures = "".join(map(str, digits)).rstrip("0") or "0"
    power = len(digits) + int(exponent) - 1 if any(digits) else 0
    minus = "-" if sign else ""
    if not any(digits):
        return f"{minus}0.0"
    if not _PLAIN_FROM <= power < _PLAIN_TO:
        return f"{minus}{figures[0]}.{figures[1:] or '0'}E{power}"
    if power < 0:
        return f"{minus}0.{'0' * (-power - 1)}{figures}"
    figures = figures.ljust(power + 1, "0")
    return f"{minus}{figures[: power + 1]}.{figures[power + 1 :] or '0'}"


# --- GET_JSON_OBJECT --------------------------------------------------------------------------------------------------

Step: TypeAlias = "str | int | None"
"""A step of a JSON path: a name, an index, or None for all elements."""
_RAW, _QUOTE, _FLATTEN = "raw", "quoted", "flatten"


def _found(value: Any, path: Sequence[Step], style: str, escape: re.Pattern[str] = _IN_BYTES) -> tuple[list[str], bool]:
    """Evaluates a path as Spark does. Returns the output texts, and whether a value was found.

    `style` determines how matches are written. Two consecutive wildcards flatten their matches. A single wildcard
    unwraps a single match.
    """
    if not path:
        if isinstance(value, str) and style == _RAW:
            return [value], True
        if isinstance(value, list) and not isinstance(value, _Object) and style == _FLATTEN:
            parts = [_found(each, (), style, escape) for each in value]
            return [text for texts, _ in parts for text in texts], any(found for _, found in parts)
        return [_written(value, escape)], True
    step, rest = path[0], path[1:]
    if isinstance(value, _Object):
        if not isinstance(step, str):
            return [], False
        for name, each in value:
            if name == step and each is not None:
                texts, found = _found(each, rest, style, escape)
                if found:
                    return texts, True
        return [], False
    if not isinstance(value, list) or isinstance(step, str):
        return [], False
    if step is not None:
        if step >= len(value):
            return [], False
        return _found(value[step], rest, _QUOTE if rest and rest[0] is None else style, escape)
    if rest and rest[0] is None:
        parts = [_found(each, rest[1:], _FLATTEN, escape) for each in value]
    elif style == _QUOTE:
        parts = [_found(each, rest, _QUOTE, escape) for each in value]
    else:
        parts = [_found(each, rest, _FLATTEN if style == _FLATTEN else _QUOTE, _IN_TEXT) for each in value]
    inner = ",".join(text for texts, _ in parts for text in texts)
    count = sum(found for _, found in parts)
    if style == _QUOTE or (rest and rest[0] is None):
        return [f"[{inner}]"], count > 0
    return ([f"[{inner}]"] if count > 1 else [inner] if count else []), count > 0


def json_objects(path: tuple[Step, ...], inputs: Sequence[pl.Series]) -> pl.Series:
    """Returns, for each text of the first input, the value at a path as text, or null if there is none
    (GET_JSON_OBJECT).
    """
    return pl.Series([_object_of(text, path) for text in inputs[0].to_list()], dtype=pl.String)


def _object_of(text: str | None, path: tuple[Step, ...]) -> str | None:
    value = _BAD if text is None else _read(text, of_schema=False)
    if value is _BAD:
        return None
    texts, found = _found(value, path, _RAW)
    text = "".join(texts)
    return text if found and _HALVES.search(text) is None else None


# --- FROM_JSON --------------------------------------------------------------------------------------------------------


class _NoValueError(Exception):
    """Raised if a JSON value cannot be converted to the type of its field."""


Read: TypeAlias = Callable[[Any], Any]
"""A function that converts a JSON value other than null to the value of a field. Raises `_NoValueError`."""
_BITS = {pl.Int8: 7, pl.Int16: 15, pl.Int32: 31, pl.Int64: 63}
_INFINITE = {"NaN": "nan", "+INF": "inf", "INF": "inf", "+Infinity": "inf", "Infinity": "inf"}
_INFINITE |= {"-INF": "-inf", "-Infinity": "-inf"}
_FLOAT32_MAX = 3.4028235677973366e38


def _reader(data_type: Any) -> Read:
    if isinstance(data_type, pl.Struct):
        return partial(_struct, {field.name: _reader(field.dtype) for field in data_type.fields})
    if isinstance(data_type, pl.List):
        return partial(_list, _reader(data_type.inner))
    if isinstance(data_type, pl.Decimal):
        return partial(_decimal, data_type.precision, data_type.scale)
    if isinstance(data_type, pl.Float32 | pl.Float64):
        return partial(_double, isinstance(data_type, pl.Float32))
    if isinstance(data_type, pl.Boolean):
        return _boolean
    if isinstance(data_type, pl.String):
        return _string
    return partial(_whole, _BITS[type(data_type)])


def _struct(readers: dict[str, Read], value: Any) -> dict[str, Any]:
    if not isinstance(value, _Object):
        raise _NoValueError
    made: dict[str, Any] = dict.fromkeys(readers)
    for name, each in value:
        if name in readers:
            try:
                made[name] = None if each is None else readers[name](each)
            except _NoValueError:
                made[name] = None
    return made


def _list(reader: Read, value: Any) -> list[Any]:
    if not isinstance(value, list) or isinstance(value, _Object):
        raise _NoValueError
    return [None if each is None else reader(each) for each in value]


def _whole(bits: int, value: Any) -> int | None:
    if value == "":
        return None
    if type(value) is not int or not -(2**bits) <= value < 2**bits:
        raise _NoValueError
    return value


def _double(single: bool, value: Any) -> float:
    if isinstance(value, str) and value in _INFINITE:
        return float(_INFINITE[value])
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _NoValueError
    try:
        made = float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return made if not single or abs(made) < _FLOAT32_MAX else made * float("inf")


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _NoValueError
    return value


def _string(value: Any) -> str:
    return _HALVES.sub("?", value) if isinstance(value, str) else _written(value, _IN_BYTES)


def _decimal(precision: int, scale: int, value: Any) -> Decimal | None:
    if value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _NoValueError
    text = value.text if isinstance(value, _Float) else str(value)
    try:
        made = Context(prec=_NUMBER_CHARACTERS_MAX + scale, rounding=ROUND_HALF_UP).quantize(
            Decimal(text), Decimal(1).scaleb(-scale)
        )
    except InvalidOperation:
        raise _NoValueError from None
    if not made.is_finite() or len(made.as_tuple().digits) > precision:
        raise _NoValueError
    return made


def _struct_of(text: str | None, readers: dict[str, Read]) -> dict[str, Any] | None:
    value = None if text is None or not text.strip(_BLANKS) else _read(text, of_schema=True)
    if value is None and (text is None or not text.strip(_BLANKS)):
        return None
    try:
        return _struct(readers, value)
    except _NoValueError:
        return dict.fromkeys(readers)


def json_structs(data_type: Any, inputs: Sequence[pl.Series]) -> pl.Series:
    """Returns each JSON text of the first input as a struct (FROM_JSON), or null for a text without a value."""
    readers = {field.name: _reader(field.dtype) for field in data_type.fields}
    return pl.Series([_struct_of(text, readers) for text in inputs[0].to_list()], dtype=data_type)
