"""`TextOptions`: how text is read, under Spark's names.

Names do not depend on case, as with Spark, and values may be Spark's strings ("true", ";"). Defaults are Spark's with
four exceptions, which keep values that Spark loses. They are in `docs/sources.md`: `header`, `multiLine`, doubled
quotes, and a quoted empty value, which is an empty string and not null.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from tidegate.state.kernels.text_scan import NOTHING, CsvDialect
from tidegate.storage.errors import ConfigurationError

UTF_8 = "utf-8"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The options of one source. Each format uses some of them."""

    sep: str = ","
    quote: str = '"'
    escape: str = "\\"
    comment: str = ""
    header: bool = True
    encoding: str = UTF_8
    null_value: str = ""
    empty_value: str = ""
    nan_value: str = "NaN"
    positive_inf: str = "Inf"
    negative_inf: str = "-Inf"
    multi_line: bool = True
    ignore_leading_white_space: bool = False
    ignore_trailing_white_space: bool = False

    @staticmethod
    def of(kind: str, given: Mapping[str, object] | None, method: str) -> TextOptions:
        """The options that a user has given for a format. Raises ConfigurationError for unknown ones and bad values."""
        known = OPTIONS.get(kind, {})
        found: dict[str, object] = {}
        for name, value in (given or {}).items():
            option = known.get(str(name).lower())
            if option is None:
                names = ", ".join(each.name for each in dict.fromkeys(known.values())) or "none"
                raise ConfigurationError(f"{method}(options=): {kind} has no option {name!r}; its options are {names}")
            found[option.field] = option.value(value, method)
        return TextOptions(**found)._checked(method)  # type: ignore[arg-type]

    @property
    def dialect(self) -> CsvDialect:
        """The characters of CSV."""
        return CsvDialect(
            separator=ord(self.sep),
            quote=_code(self.quote),
            escape=_code(self.escape),
            comment=_code(self.comment),
            multi_line=self.multi_line,
            ignore_leading=self.ignore_leading_white_space,
            ignore_trailing=self.ignore_trailing_white_space,
        )

    def _checked(self, method: str) -> TextOptions:
        same = [
            name
            for name, other in (("quote", self.quote), ("escape", self.escape), ("comment", self.comment))
            if other == self.sep
        ]
        if same:
            raise ConfigurationError(f"{method}(options=): sep and {same[0]} are both {self.sep!r}; change one")
        return self


DEFAULTS = TextOptions()


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    field: str
    read: Callable[[object], object]
    wanted: str

    def value(self, given: object, method: str) -> object:
        try:
            return self.read(given)
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigurationError(f"{method}(options=): {self.name}={given!r} is not {self.wanted}") from error


def _code(character: str) -> int:
    return ord(character) if character else NOTHING


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError(given)
    return given


def _flag(given: object) -> bool:
    if isinstance(given, bool):
        return given
    return {"true": True, "false": False}[_text(given).lower()]


def _separator(given: object) -> str:
    text = {"\\t": "\t"}.get(_text(given), _text(given))
    if len(text) != 1 or not text.isascii() or text in "\r\n":
        raise ValueError(text)
    return text


def _character(given: object) -> str:
    return "" if given is None or given in ("", "\0") else _separator(given)


def _encoding(given: object) -> str:
    return codecs.lookup(_text(given)).name


_CHARACTER = "one ASCII character, or empty for none"
_SEPARATOR = _Option("sep", "sep", _separator, "one ASCII character")
_ENCODING = _Option("encoding", "encoding", _encoding, "the name of an encoding that Python has")
_CSV = (
    _SEPARATOR,
    _Option("quote", "quote", _character, _CHARACTER),
    _Option("escape", "escape", _character, _CHARACTER),
    _Option("comment", "comment", _character, _CHARACTER),
    _Option("header", "header", _flag, "true or false"),
    _ENCODING,
    _Option("nullValue", "null_value", _text, "a string"),
    _Option("emptyValue", "empty_value", _text, "a string"),
    _Option("nanValue", "nan_value", _text, "a string"),
    _Option("positiveInf", "positive_inf", _text, "a string"),
    _Option("negativeInf", "negative_inf", _text, "a string"),
    _Option("multiLine", "multi_line", _flag, "true or false"),
    _Option("ignoreLeadingWhiteSpace", "ignore_leading_white_space", _flag, "true or false"),
    _Option("ignoreTrailingWhiteSpace", "ignore_trailing_white_space", _flag, "true or false"),
)
OPTIONS: Mapping[str, Mapping[str, _Option]] = {
    "csv": {**{each.name.lower(): each for each in _CSV}, "delimiter": _SEPARATOR, "charset": _ENCODING},
    "json": {"encoding": _ENCODING, "charset": _ENCODING},
    "text": {"encoding": _ENCODING, "charset": _ENCODING},
}
"""The options of each format, by their names in small letters."""
assert {each.field for each in _CSV} == {field.name for field in fields(TextOptions)}
