"""Functions of text and JSON. Positions count characters from 1, as in Spark."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import polars as pl

from tidegate.sql.functions.call import ANY_NUMBER, Call, Function, Functions, of
from tidegate.sql.functions.json_values import Step, json_objects, json_structs
from tidegate.sql.typed_values import DIGITS_MAX, Typed


def _text(change: Callable[[pl.Expr], pl.Expr]) -> Function:
    return of(1)(lambda call: Typed(change(call.text(0)), pl.String()))


def _test(test: Callable[[pl.Expr, pl.Expr], pl.Expr]) -> Function:
    return of(2)(lambda call: Typed(test(call.text(0), call.text(1)), pl.Boolean()))


def sliced(text: pl.Expr, start: pl.Expr, length: pl.Expr | None) -> pl.Expr:
    """Returns `length` characters of a text from the position `start`. Positions count from 1, or from the end if
    negative. 0 means 1.

    `length` is None for all characters up to the end.
    """
    size = text.str.len_chars().cast(pl.Int64)
    first = pl.when(start > 0).then(start - 1).when(start < 0).then(size + start).otherwise(start)
    end = size if length is None else first + length
    begin = first.clip(lower_bound=0)
    return _part(text, begin, (end - begin).clip(lower_bound=0))


def _part(text: pl.Expr, begin: pl.Expr, size: pl.Expr) -> pl.Expr:
    """Returns `size` characters of a text from the index `begin`, or null if `size` is null.

    (In polars a null size means all characters up to the end.)
    """
    return pl.when(size.is_not_null()).then(text.str.slice(begin, size))


def _substring(call: Call) -> Typed:
    length = call.integer(2) if len(call.args) > 2 else None
    return Typed(sliced(call.text(0), call.integer(1), length), pl.String())


def _left(call: Call) -> Typed:
    return Typed(_part(call.text(0), pl.lit(0), call.integer(1).clip(lower_bound=0)), pl.String())


def _right(call: Call) -> Typed:
    text, count = call.text(0), call.integer(1).clip(lower_bound=0)
    size = text.str.len_chars().cast(pl.Int64)
    return Typed(_part(text, (size - count).clip(lower_bound=0), count), pl.String())


def _concat(call: Call) -> Typed:
    parts = [call.text(place) for place in range(len(call.args))]
    return Typed(pl.concat_str(parts), pl.String())


def _concat_ws(call: Call) -> Typed:
    parts = [call.text(place) for place in range(1, len(call.args))]
    return Typed(pl.concat_str(parts, separator=call.literal_text(0), ignore_nulls=True), pl.String())


def _replace(call: Call) -> Typed:
    old, text = call.literal_text(1), call.text(0)
    new = call.literal_text(2) if len(call.args) > 2 else ""
    return Typed(text.str.replace_all(old, new, literal=True) if old else text, pl.String())


def _regexp_replace(call: Call) -> Typed:
    pattern = call.literal_text(1)
    return Typed(call.text(0).str.replace_all(pattern, _replacement(call, pattern)), pl.String())


def _replacement(call: Call, pattern: str) -> str:
    r"""Translates a Java replacement text with `$1` and `\$` to the syntax of Rust, in which `$1st` would be a group
    named `1st`.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error:  # The pattern may be valid in Rust alone, which reports errors itself.
        groups = 9
    found, letters = [], call.literal_text(2)
    for escaped, digits, other in re.findall(r"\\(.)|\$(\d+)|([\\$]|[^\\$]+)", letters, re.DOTALL):
        if other in ("$", "\\"):
            raise call.refused(f"write a group's number after {other}, or a backslash before it")
        if digits:
            count = next((n for n in range(len(digits), 1, -1) if int(digits[:n]) <= groups), 1)
            if int(digits[:count]) > groups:
                raise call.refused(
                    f"the pattern has no group {digits[:count]}, only {groups}: give the number of one of its groups"
                )
            found.append(f"${{{digits[:count]}}}{digits[count:]}")
        else:
            found.append((escaped or other).replace("$", "$$"))
    return "".join(found)


def _regexp_extract(call: Call) -> Typed:
    """Translates REGEXP_EXTRACT. The result is an empty text if nothing matches, as in Spark."""
    text, group = call.text(0), call.literal_int(2, otherwise=1)
    found = text.str.extract(call.literal_text(1), group).fill_null("")
    return Typed(pl.when(text.is_not_null()).then(found), pl.String())


def _split_index(call: Call) -> Typed:
    """Translates SPLIT_INDEX by Flink's rules: parts count from 0, and a missing part is null."""
    place = call.literal_int(2)
    if place < 0:
        return Typed(pl.lit(None, dtype=pl.String), pl.String())
    return Typed(call.text(0).str.split(call.literal_text(1)).list.get(place, null_on_oob=True), pl.String())


def _split_part(call: Call) -> Typed:
    """Translates SPLIT_PART by Spark's rules.

    Parts count from 1, or from the end if negative, and a missing part is an empty text. An empty separator does not
    split.
    """
    text, between, place = call.text(0), call.literal_text(1), call.literal_int(2)
    if not place:
        raise call.refused("SPLIT_PART counts parts from 1, or from the end with -1")
    parts = (text.str.split(between) if between else pl.concat_list(text)).list
    found = parts.get(place - 1 if place > 0 else place, null_on_oob=True).fill_null("")
    return Typed(pl.when(text.is_not_null()).then(found), pl.String())


def _split(call: Call) -> Typed:
    """Translates SPLIT by Spark's rules: splits at the matches of a regular expression.

    An empty pattern splits into characters.
    """
    text, pattern = call.text(0), call.literal_text(1)
    plain = re.sub(r"\\([^A-Za-z0-9])", r"\1", pattern)
    if not set(re.sub(r"\\[^A-Za-z0-9]", "", pattern)) & set(".^$*+?{}[]\\|()"):
        parts = text.str.split(plain)
        if not plain:
            parts = pl.when(text == "").then(pl.concat_list(text)).otherwise(parts)
        return Typed(parts, pl.List(pl.String()))
    try:
        empty = (
            any(not found[0] for found in re.finditer(pattern, f"a B1_,. \n{pattern}"))
            or re.search(pattern, "") is not None
        )
    except re.error:  # The pattern may be valid in Rust alone, which reports errors itself.
        empty = False
    if empty:
        raise call.refused("the pattern also matches an empty text between two characters: use +, as in ' +'")
    return Typed(text.str.split(pattern, literal=False), pl.List(pl.String()))


def _padded(start: bool) -> Function:
    def make(call: Call) -> Typed:
        text, length = call.text(0), max(0, call.literal_int(1))
        fill = call.literal_text(2) if len(call.args) > 2 else " "
        if len(fill) != 1:
            raise call.refused("the fill must be one character: give a text such as '0'")
        padded = text.str.pad_start(length, fill) if start else text.str.pad_end(length, fill)
        return Typed(padded.str.slice(0, length), pl.String())

    return of(2, 3)(make)


def position(text: pl.Expr, part: str) -> pl.Expr:
    """Returns the position at which `part` first occurs in a text, from 1, or 0 if the text does not contain it."""
    if not part:
        return pl.when(text.is_not_null()).then(pl.lit(1, dtype=pl.Int32))
    before = text.str.splitn(part, 2).struct.field("field_0").str.len_chars().cast(pl.Int32) + 1
    found = pl.when(text.str.contains(part, literal=True)).then(before).otherwise(pl.lit(0, dtype=pl.Int32))
    return pl.when(text.is_not_null()).then(found)


def _length(call: Call) -> Typed:
    return Typed(call.text(0).str.len_chars().cast(pl.Int32), pl.Int32())


_LENGTH = of(1)(_length)

TEXTS: Functions = {
    "LOWER": _text(lambda text: text.str.to_lowercase()),
    "LCASE": _text(lambda text: text.str.to_lowercase()),
    "UPPER": _text(lambda text: text.str.to_uppercase()),
    "UCASE": _text(lambda text: text.str.to_uppercase()),
    "LTRIM": _text(lambda text: text.str.strip_chars_start(" ")),
    "RTRIM": _text(lambda text: text.str.strip_chars_end(" ")),
    "BTRIM": _text(lambda text: text.str.strip_chars(" ")),
    "REVERSE": _text(lambda text: text.str.reverse()),
    "LENGTH": _LENGTH,
    "LEN": _LENGTH,
    "CHAR_LENGTH": _LENGTH,
    "CHARACTER_LENGTH": _LENGTH,
    "STARTSWITH": _test(lambda text, part: text.str.starts_with(part)),
    "ENDSWITH": _test(lambda text, part: text.str.ends_with(part)),
    "CONTAINS": _test(lambda text, part: text.str.contains(part, literal=True)),
    "SUBSTR": of(2, 3)(_substring),
    "SUBSTRING": of(2, 3)(_substring),
    "LEFT": of(2)(_left),
    "RIGHT": of(2)(_right),
    "CONCAT": of(1, ANY_NUMBER)(_concat),
    "CONCAT_WS": of(2, ANY_NUMBER)(_concat_ws),
    "REPLACE": of(2, 3)(_replace),
    "REGEXP_REPLACE": of(3)(_regexp_replace),
    "REGEXP_EXTRACT": of(2, 3)(_regexp_extract),
    "SPLIT": of(2)(_split),
    "SPLIT_INDEX": of(3)(_split_index),
    "SPLIT_PART": of(3)(_split_part),
    "LPAD": _padded(start=True),
    "RPAD": _padded(start=False),
    "INSTR": of(2)(lambda call: Typed(position(call.text(0), call.literal_text(1)), pl.Int32())),
    "LOCATE": of(2)(lambda call: Typed(position(call.text(1), call.literal_text(0)), pl.Int32())),
}


_ALL = "*"
_PATH = re.compile(r"\.(?P<name>[^\s.\[*][^.\[]*)|\['(?P<quoted>[^'?*][^'?]*)'\]|\[(?P<index>\d+|\*)\]")

_SCHEMA_WORDS = re.compile(r"`[^`]+`|\w+|\S")
_SCHEMA_NAME = re.compile(r"\w+")
_SCHEMA_TYPES: dict[str, Any] = {
    "BOOLEAN": pl.Boolean,
    **dict.fromkeys(("TINYINT", "BYTE"), pl.Int8),
    **dict.fromkeys(("SMALLINT", "SHORT"), pl.Int16),
    **dict.fromkeys(("INT", "INTEGER"), pl.Int32),
    **dict.fromkeys(("BIGINT", "LONG"), pl.Int64),
    **dict.fromkeys(("FLOAT", "REAL"), pl.Float32),
    "DOUBLE": pl.Float64,
    "STRING": pl.String,
}
_CAST_TYPES = ("DATE", "TIMESTAMP", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ", "BINARY", "VARCHAR", "CHAR")


def _get_json_object(call: Call) -> Typed:
    path = call.literal_text(1)
    function = partial(json_objects, _path_of(call, path))
    return Typed(_mapped(call.text(0), "GET_JSON_OBJECT", path, function, pl.String()), pl.String())


def _mapped(
    text: pl.Expr, name: str, argument: str, function: Callable[[Sequence[pl.Series]], pl.Series], made: Any
) -> pl.Expr:
    return pl.map_batches([text, pl.lit(name), pl.lit(argument)], function, return_dtype=made, is_elementwise=True)


def _path_of(call: Call, text: str) -> tuple[Step, ...]:
    """Returns the steps of a JSON path such as `$.a.b[0]`.

    Raises ConfigurationError for a path that is not supported.
    """
    steps: list[Step] = []
    place = 1
    while text.startswith("$") and place < len(text):
        found = _PATH.match(text, place)
        if found is None:
            break
        index = found["index"]
        steps.append((found["name"] or found["quoted"]) if index is None else None if index == _ALL else int(index))
        place = found.end()
    if not text.startswith("$") or place < len(text):
        raise call.refused(f"a path has $ and then .name, ['name'], [0] or [*], but this is {text!r}: correct the path")
    return tuple(steps)


def _from_json(call: Call) -> Typed:
    schema = call.literal_text(1)
    data_type = _schema_of(call, schema)
    return Typed(_mapped(call.text(0), "FROM_JSON", schema, partial(json_structs, data_type), data_type), data_type)


def _schema_of(call: Call, text: str) -> pl.Struct:
    """Returns the struct type for a schema text such as `id INT, tags ARRAY<STRING>`.

    Raises ConfigurationError if the text cannot be read.
    """
    words = _Schema(call, text)
    whole = words.peek().upper() == "STRUCT" and words.peek(1) == "<"
    found = words.type() if whole else words.fields("")
    if words.peek():
        raise words.refused()
    assert isinstance(found, pl.Struct)
    return found


class _Schema:
    """Parses the text of a schema word by word. (The parser of sqlglot would ignore words that it does not support.)"""

    def __init__(self, call: Call, text: str) -> None:
        self._call, self._text = call, text
        self._words = _SCHEMA_WORDS.findall(text)
        self._place = 0

    def refused(self, why: str = "") -> Exception:
        """Returns the error for the next word of the schema text. `why` is the reason, or empty for a general error
        text.
        """
        found = f"{self.peek()!r}" if self.peek() else "the end"
        reason = why or f"{found} is not understood; write names and types, as in 'id INT, tags ARRAY<STRING>'"
        return self._call.refused(f"the schema {self._text!r}: {reason}")

    def peek(self, further: int = 0) -> str:
        """Returns the next word, or the word `further` words later, without consuming it. An empty text at the end."""
        place = self._place + further
        return self._words[place] if place < len(self._words) else ""

    def fields(self, end: str) -> pl.Struct:
        """Parses fields (names with types) up to the closing word `end`, and returns them as a struct type."""
        found: dict[str, Any] = {}
        while True:
            word = self._next()
            name = word[1:-1] if word.startswith("`") else word
            if not (word.startswith("`") or _SCHEMA_NAME.fullmatch(word)):
                self._place -= 1
                raise self.refused()
            if self.peek() == ":":
                self._next()
            if name in found:
                raise self.refused(f"{name!r} occurs twice: rename one of the fields")
            found[name] = self.type()
            if self.peek() == end:
                return pl.Struct(found)
            self._expect(",")

    def type(self) -> Any:
        """Parses a type at the current position of the schema text, and returns it."""
        word = self.peek().upper()
        if word == "STRUCT":
            self._next()
            self._expect("<")
            made: Any = self.fields(">")
            self._expect(">")
            return made
        if word == "ARRAY":
            self._next()
            self._expect("<")
            made = pl.List(self.type())
            self._expect(">")
            return made
        if word in _SCHEMA_TYPES:
            self._next()
            return _SCHEMA_TYPES[word]()
        if word in ("DECIMAL", "DEC", "NUMERIC"):
            self._next()
            return self._decimal()
        if word in _CAST_TYPES:
            raise self.refused(f"{word} cannot be read from JSON: use STRING, and CAST the field")
        raise self.refused()

    def _decimal(self) -> pl.Decimal:
        digits = [10, 0]
        if self.peek() == "(":
            self._next()
            for place, end in ((0, ","), (1, ")")):
                if not self.peek().isdigit():
                    raise self.refused()
                digits[place] = int(self._next())
                if self.peek() == ")":
                    break
                self._expect(end)
            self._expect(")")
        if not 0 <= digits[1] <= digits[0] <= DIGITS_MAX or not digits[0]:
            raise self.refused(f"a decimal has 1 to {DIGITS_MAX} digits, and its scale is at most its number of digits")
        return pl.Decimal(*digits)

    def _expect(self, word: str) -> None:
        if self.peek() != word:
            raise self.refused()
        self._place += 1

    def _next(self) -> str:
        self._place += 1
        return self._words[self._place - 1] if self._place <= len(self._words) else ""


JSON: Functions = {
    "GET_JSON_OBJECT": of(2)(_get_json_object),
    "FROM_JSON": of(2)(_from_json),
}
