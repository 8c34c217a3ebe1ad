"""GET_JSON_OBJECT and FROM_JSON. Paths and schemas are written out.

They are inputs of the expression, although the function has them already: so they are part of the meaning of state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import polars as pl

from tidegate.operators.functions.json_values import Step, json_objects, json_structs
from tidegate.sql.functions.call import Call, Functions, of
from tidegate.sql.values.typed import Typed
from tidegate.sql.values.types import DIGITS_MAX

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
    said = call.said_text(1)
    function = partial(json_objects, _path_of(call, said))
    return Typed(_mapped(call.text(0), "GET_JSON_OBJECT", said, function, pl.String()), pl.String())


def _mapped(
    text: pl.Expr, name: str, said: str, function: Callable[[Sequence[pl.Series]], pl.Series], made: Any
) -> pl.Expr:
    return pl.map_batches([text, pl.lit(name), pl.lit(said)], function, return_dtype=made, is_elementwise=True)


def _path_of(call: Call, text: str) -> tuple[Step, ...]:
    """The steps of a path such as `$.a.b[0]`. ConfigurationError for one that is not covered."""
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
        raise call.refused(f"a path is $ and then .name, ['name'], [0] or [*], and this is {text!r}")
    return tuple(steps)


def _from_json(call: Call) -> Typed:
    said = call.said_text(1)
    data_type = _schema_of(call, said)
    return Typed(_mapped(call.text(0), "FROM_JSON", said, partial(json_structs, data_type), data_type), data_type)


def _schema_of(call: Call, text: str) -> pl.Struct:
    """The type that a schema such as `id INT, tags ARRAY<STRING>` describes. ConfigurationError for what is none."""
    words = _Schema(call, text)
    whole = words.peek().upper() == "STRUCT" and words.peek(1) == "<"
    found = words.type() if whole else words.fields("")
    if words.peek():
        raise words.refused()
    assert isinstance(found, pl.Struct)
    return found


class _Schema:
    """Reads a schema word by word: sqlglot passes over what it does not know."""

    def __init__(self, call: Call, text: str) -> None:
        self._call, self._text = call, text
        self._words = _SCHEMA_WORDS.findall(text)
        self._place = 0

    def refused(self, why: str = "") -> Exception:
        """The error for the next word."""
        found = f"{self.peek()!r}" if self.peek() else "the end"
        said = why or f"{found} is not understood; write names and types, as in 'id INT, tags ARRAY<STRING>'"
        return self._call.refused(f"the schema {self._text!r}: {said}")

    def peek(self, further: int = 0) -> str:
        """The next word, or a later one; empty at the end."""
        place = self._place + further
        return self._words[place] if place < len(self._words) else ""

    def fields(self, end: str) -> pl.Struct:
        """Names with types, up to a word."""
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
                raise self.refused(f"{name!r} is there twice")
            found[name] = self.type()
            if self.peek() == end:
                return pl.Struct(found)
            self._expect(",")

    def type(self) -> Any:
        """A type."""
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
            raise self.refused(f"{word} is not read from JSON: take it as STRING, and CAST the field")
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
            raise self.refused(f"a decimal has 1 to {DIGITS_MAX} digits, and no more of them behind the point")
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
