"""Common parts of the text formats: options (`TextOptions`), the decoder interface (`Decoder`), and conversion to typed
columns.

Options have Spark's names, in any case, and values may be Spark's strings ("true", ";"). Defaults are Spark's with four
exceptions, which keep values that Spark loses (`docs/sources.md`): `header`, `multiLine`, doubled quotes, and a quoted
empty value, which is an empty string and not null.

Rules for values:

- A value is parsed completely or refused with a reason. Blanks around numbers, times and booleans are ignored.
- Strings are not changed, except by `nullValue` and `emptyValue`.
- A number that is too large for its float or decimal type is refused. It never becomes infinity or another number.
- Integers are decimal digits with a sign. Floats may also be `nanValue`, `positiveInf`, `negativeInf`, NaN or Infinity,
  in this case. Booleans are true and false in any case. Spark has the same rules.
"""

from __future__ import annotations

import codecs
import contextlib
import decimal
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.state.kernels.text_scan import NOTHING, CsvDialect
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.exact_casts import times_per_day
from tidegate.storage.user_values import value_text

UTF_8 = "utf-8"
BOM = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The options of a text source. Each format uses some of them."""

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
        """Parses and checks the options that a user has given for the format `kind`.

        Raises ConfigurationError for unknown options and bad values.
        """
        known = OPTIONS.get(kind, {})
        found: dict[str, object] = {}
        for name, value in (given or {}).items():
            option = known.get(str(name).lower())
            if option is None:
                names = ", ".join(each.name for each in dict.fromkeys(known.values())) or "none"
                raise ConfigurationError(f"{method}(options=): {kind} has no option {name!r}; give one of {names}")
            found[option.field] = option.value(value, method)
        return TextOptions(**found)._checked(method)  # type: ignore[arg-type]

    @property
    def dialect(self) -> CsvDialect:
        """Returns the special characters of CSV for the kernels."""
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
            raise ConfigurationError(
                f"{method}(options=): {self.name}={given!r} is not valid; give {self.wanted}"
            ) from error


def _code(character: str) -> int:
    return ord(character) if character else NOTHING


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{given!r} is not a str; give a str")
    return given


def _flag(given: object) -> bool:
    if isinstance(given, bool):
        return given
    return {"true": True, "false": False}[_text(given).lower()]


def _separator(given: object) -> str:
    text = {"\\t": "\t"}.get(_text(given), _text(given))
    if len(text) != 1 or not text.isascii() or text in "\r\n":
        raise ValueError(f"{text!r} cannot be a separator; give one ASCII character")
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
"""The options of each format, by format and by option name in lower case."""
assert {each.field for each in _CSV} == {field.name for field in fields(TextOptions)}


@dataclass(frozen=True, slots=True)
class Decoded:
    """The records of a decoded block.

    `batch` has the good records, in order. `bad` has the reasons of bad records, by record number.
    """

    batch: pa.RecordBatch
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    bad: dict[int, str] = field(default_factory=dict)
    consumed: int = 0
    """Position of the first record that the block may not contain completely."""

    @property
    def records(self) -> int:
        """Returns the number of records, including bad ones."""
        return len(self.starts)


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that does not fit its column. `wider` is a type that fits the value and the column, or None."""

    column: str
    type: pa.DataType
    wider: pa.DataType | None


class InferredTypeError(ConfigurationError):
    """Raised for a value that does not fit a type that was inferred, if the row would be dropped."""


class Decoder(Protocol):
    """Decodes one file of a text format."""

    @property
    def begun(self) -> bool:
        """True once the header of the file was read, or if the file has none."""
        ...

    def begin(self, block: bytes, final: bool) -> int | None:
        """Reads the header of the file. Returns the position of the first record, or None if more bytes are needed.

        Raises ConfigurationError if the file lacks a column of the schema.
        """
        ...

    def decode(self, block: bytes, final: bool, size_max: int) -> Decoded:
        """Decodes the records of a block, which must begin at a record.

        Records of more than `size_max` bytes are bad.
        """
        ...

    def misfit(self, record: bytes) -> Misfit | None:
        """Returns the first value of a bad record that does not fit its column, or None if the record is bad for
        another reason.
        """
        ...

    def skip(self, block: bytes, state: NDArray[np.int64]) -> int:
        """Skips the rest of a too long record.

        Returns the position of the next record, or -1 if that is after the block.
        """
        ...


def too_long(size_max: int) -> str:
    """Returns the reason for a record that exceeds the size limit."""
    return (
        f"the row has more than {size_max:,} bytes, the limit that max_row_size sets; raise it, "
        'as in from_files(max_row_size="64mb")'
    )


def not_utf8(record: bytes, of: str) -> str | None:
    """Describes the first byte of a record that is not valid UTF-8, or returns None.

    `of` names the record ("of the row").
    """
    try:
        record.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} {of}, 0x{record[error.start]:02x}, is not UTF-8"
    return None


def is_utf8(block: bytes) -> bool:
    """Returns whether all bytes of the block are valid UTF-8."""
    if block.isascii():
        return True
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def utf8_faults(
    block: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64], encoding: str | None
) -> dict[int, str]:
    """Returns the reasons for records that are not valid UTF-8, by record number.

    `encoding`: encoding of the file, for the reason; None if a user cannot set it.
    """
    if block.isascii() or is_utf8(block[: int(ends[-1]) if len(ends) else 0]):
        return {}
    found = {}
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        reason = not_utf8(block[start:end], "of the row")
        if reason is not None and encoding == UTF_8:
            reason = f'{reason}; give the encoding of the file, as in options={{"encoding": "ISO-8859-1"}}'
        elif reason is not None and encoding is not None:
            reason = f"a character is not {encoding}"
        if reason is not None:
            found[number] = reason
    return found


_INTEGER = r"^[+-]?[0-9]+$"
_PLAIN_INTEGER = r"^-?[0-9]+$"
_ZONE = r"(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)$"
_NOT_FINITE = r"^[+-]?(NaN|Infinity)$"
_BOOLEAN = r"(?i)^(true|false)$"
_SHOWN_CHARACTERS = 60
_NO_VALUE = (pa.ArrowInvalid, OverflowError, ValueError)
"""Exceptions that a converter raises for a string that is not a value of the type."""
Converter = Callable[[pa.Array], pa.Array]
"""A function that converts strings to values. Raises one of `_NO_VALUE` if a string is not a value of the type."""


def converter_of(field: pa.Field, options: TextOptions) -> Converter | None:
    """Returns the converter from strings to the type of a field, or None for strings.

    Raises ConfigurationError for types that text cannot represent.
    """
    wanted = field.type
    if pa.types.is_string(wanted):
        return None
    if pa.types.is_integer(wanted):
        return lambda texts: _integers(texts, wanted)
    if pa.types.is_floating(wanted):
        return lambda texts: _floats(texts, wanted, options)
    if pa.types.is_boolean(wanted):
        return _booleans
    if pa.types.is_timestamp(wanted):
        return lambda texts: _timestamps(texts, wanted)
    if pa.types.is_time(wanted):
        return lambda texts: _times(texts, wanted)
    if pa.types.is_decimal(wanted):
        return lambda texts: _decimals(texts, wanted)
    try:
        pa.array([], pa.string()).cast(wanted)
    except pa.ArrowNotImplementedError as error:
        raise ConfigurationError(
            f"column {field.name!r} is {wanted}, which text cannot hold; read it as a string, and make it in a step"
        ) from error
    return lambda texts: texts.cast(wanted)


def converted(
    texts: pa.Array,
    field: pa.Field,
    convert: Converter | None,
    reasons: dict[int, str],
    blank_is_null: bool = True,
) -> pa.Array:
    """Converts a column of strings. A value that does not fit becomes null, and its row is added to `reasons`.

    `blank_is_null`: a string of only blanks is null, except in columns of strings and bytes.
    """
    strings = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    binary = pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type) or strings
    binary = binary or pa.types.is_dictionary(field.type)
    if convert is None:
        values = texts
    else:
        if not binary:
            texts = pc.utf8_trim(texts, " \t")
            if blank_is_null:
                texts = pc.if_else(pc.equal(pc.binary_length(texts), 0), pa.scalar(None, pa.string()), texts)
        try:
            values = convert(texts)
        except _NO_VALUE:
            values = _one_by_one(texts, field, convert, reasons)
    if not field.nullable and values.null_count:
        for row in np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)).tolist():
            reasons.setdefault(row, f"column {field.name!r} is not nullable, and has no value")
    return values


def _one_by_one(texts: pa.Array, field: pa.Field, convert: Converter, reasons: dict[int, str]) -> pa.Array:
    """Converts a column in smaller and smaller halves, until each value that cannot be converted is isolated."""
    parts: list[tuple[int, pa.Array]] = []
    waiting = [(0, texts)]
    while waiting:
        start, part = waiting.pop()
        try:
            parts.append((start, convert(part)))
        except _NO_VALUE:
            if len(part) > 1:
                half = len(part) // 2
                waiting += [(start + half, part.slice(half)), (start, part.slice(0, half))]
                continue
            value = part[0].as_py()
            shown = value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}…"
            reasons.setdefault(start, f"column {field.name!r}: {value_text(shown)} is not a value of type {field.type}")
            parts.append((start, pa.nulls(1, field.type)))
    return pa.concat_arrays([part for _, part in sorted(parts, key=lambda each: each[0])])


def _integers(texts: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Casts strings to integers. Checks them first, because Arrow accepts 0x1 and refuses +1."""
    if not _all(pc.match_substring_regex(texts, _PLAIN_INTEGER)):
        if not _all(pc.match_substring_regex(texts, _INTEGER)):
            raise pa.ArrowInvalid("a text is not an integer; correct it, or read the column as a string")
        texts = pc.utf8_ltrim(texts, "+")
    return texts.cast(wanted)


def _floats(texts: pa.Array, wanted: pa.DataType, options: TextOptions) -> pa.Array:
    """Casts strings to floats, and checks results that are not finite.

    Arrow turns too large numbers into infinity, and accepts NaN and infinity in any spelling.
    """
    words = ((options.nan_value, "NaN"), (options.positive_inf, "Infinity"), (options.negative_inf, "-Infinity"))
    values = None
    if words == _USUAL_WORDS:
        with contextlib.suppress(pa.ArrowInvalid):
            values = texts.cast(wanted)
    if values is None or not _all(pc.is_finite(values)):
        for given, known in words:
            texts = pc.if_else(pc.equal(texts, given), known, texts)
        values = texts.cast(wanted)
        odd = pc.invert(pc.is_finite(values))
        if not _all(pc.match_substring_regex(texts.filter(odd), _NOT_FINITE)):
            raise pa.ArrowInvalid(
                f"a text is not a number, or one that is too great for {wanted}; give the column a wider type"
            )
    return values


_USUAL_WORDS = (("NaN", "NaN"), ("Inf", "Infinity"), ("-Inf", "-Infinity"))


def _decimals(texts: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Casts strings to decimals, in Python if Arrow could return a wrong number.

    Arrow overflows silently for numbers with too many digits, such as 95 as decimal32(9, 9).
    """
    longest = pc.max(pc.binary_length(texts)).as_py() or 0
    if longest + max(wanted.scale, 0) <= DECIMAL_DIGITS[wanted.bit_width] and not _any_exponent(texts):
        return texts.cast(wanted)
    return pa.array([None if text is None else _decimal(text, wanted) for text in texts.to_pylist()], wanted)


def _decimal(text: str, wanted: pa.DataType) -> decimal.Decimal:
    """Parses a number, with the scale of a decimal type. Raises ArrowInvalid if the type cannot represent it."""
    if not _DECIMAL.fullmatch(text):
        raise pa.ArrowInvalid(f"{text!r} is not a number; correct it, or read the column as a string")
    try:
        sign, digits, exponent = decimal.Decimal(text).as_tuple()
    except decimal.InvalidOperation as error:
        raise pa.ArrowInvalid(
            f"the exponent of {text!r} is too great for {wanted}; read the column as a string"
        ) from error
    assert isinstance(exponent, int)
    written = "".join(map(str, digits)).lstrip("0")
    zeros = exponent + wanted.scale
    if zeros < 0 and written.endswith("0" * min(-zeros, len(written))):
        written = written[:zeros]
        zeros = 0
    if not written:
        return decimal.Decimal((0, (0,), -wanted.scale))
    if zeros < 0 or len(written) + zeros > wanted.precision:
        raise pa.ArrowInvalid(f"{text!r} has too many digits for {wanted}; give the column a wider type")
    return decimal.Decimal((sign, tuple(map(int, written + "0" * zeros)), -wanted.scale))


def _any_exponent(texts: pa.Array) -> bool:
    return pc.any(pc.match_substring(texts, "e", ignore_case=True), min_count=0).as_py() is True


_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
DECIMAL_DIGITS = {32: 9, 64: 18, 128: 38, 256: 76}
"""Maximum number of digits of a decimal type, by its bit width."""


def _booleans(texts: pa.Array) -> pa.Array:
    """Casts strings to booleans. Checks them first, because Arrow accepts 1 and 0 too."""
    if not _all(pc.match_substring_regex(texts, _BOOLEAN)):
        raise pa.ArrowInvalid("a text is not true or false; correct it, or read the column as a string")
    return texts.cast(pa.bool_())


def _timestamps(texts: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Casts strings to timestamps. For a type with a zone, strings without a zone are UTC.

    A type without a zone accepts only strings without a zone.
    """
    if wanted.tz is None:
        return texts.cast(wanted)
    zoned = pc.match_substring_regex(texts, _ZONE)
    zoned = pc.and_(zoned, pc.greater(pc.binary_length(texts), 10))
    naive = pa.timestamp(wanted.unit)
    utc = pa.timestamp(wanted.unit, "UTC")
    nothing = pa.scalar(None, pa.string())
    without = pc.if_else(zoned, nothing, texts).cast(naive).cast(pa.int64())
    with_zone = pc.if_else(zoned, texts, nothing).cast(utc).cast(pa.int64())
    return pc.coalesce(without, with_zone).cast(wanted)


def _times(texts: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Converts strings to times of a day, for which Arrow has no cast."""
    unit = {"s": "s", "ms": "ms", "us": "us", "ns": "ns"}[wanted.unit]
    day = pc.binary_join_element_wise("1970-01-01T", texts, "")
    return day.cast(pa.timestamp(unit)).cast(wanted)


def _all(flags: pa.Array) -> bool:
    return pc.all(flags, min_count=0).as_py() is not False


_FIRST_DAY, _LAST_DAY = -719_528, 2_932_896
"""The days of 0000-01-01 and 9999-12-31, counted from 1970."""


def unwritable_times(column: pa.Array) -> dict[int, str]:
    """Returns the reasons for dates, times and timestamps that have no text, by row number.

    A reason follows the name of the column: the year has no four digits, a `date64` has a time of day, or a time is
    not one of a day.
    """
    kind = column.type
    if pa.types.is_time(kind):
        return times_beyond_a_day(column)
    if pa.types.is_date32(kind):
        per_day = 1
    elif pa.types.is_date64(kind):
        per_day = times_per_day("ms")
    elif pa.types.is_timestamp(kind) and kind.unit != "ns":
        per_day = times_per_day(kind.unit)
    else:
        return {}
    counts = column.cast(pa.int32() if pa.types.is_date32(kind) else pa.int64())
    outside = pc.or_(pc.less(counts, _FIRST_DAY * per_day), pc.greater_equal(counts, (_LAST_DAY + 1) * per_day))
    found = dict.fromkeys(_true_rows(outside), _UNREADABLE_YEAR)
    if pa.types.is_date64(kind):
        parts = pc.fill_null(counts, 0).to_numpy() % per_day != 0
        found = dict.fromkeys(np.flatnonzero(parts).tolist(), _TIME_OF_DAY) | found
    return found


def times_beyond_a_day(column: pa.Array) -> dict[int, str]:
    """Returns the reasons for times that are negative or of 24 hours and more, by row number. Arrow does not check
    them. A reason follows the name of the column.
    """
    counts = column.cast(pa.int32() if pa.types.is_time32(column.type) else pa.int64())
    outside = pc.or_(pc.less(counts, 0), pc.greater_equal(counts, times_per_day(column.type.unit)))
    return dict.fromkeys(_true_rows(outside), _NO_TIME_OF_DAY)


def _true_rows(flags: pa.Array) -> list[int]:
    return np.flatnonzero(pc.fill_null(flags, False).to_numpy(zero_copy_only=False)).tolist()


_UNREADABLE_YEAR = "has a year outside 0 to 9999, which readers refuse; make it null in a step before"
_NO_TIME_OF_DAY = "is not a time between 00:00 and 24:00; make it a duration, or null, in a step before"
_TIME_OF_DAY = "is a date with a time of day, which its text would lose; cast it to a timestamp in a step before"


def inferred_type(texts: pa.Array, options: TextOptions) -> pa.DataType:
    """Returns the first type that fits all values: integer, boolean, date, time, timestamp, decimal, float, string.

    Decimals are used for integers beyond int64, which a float could not represent exactly.
    """
    if texts.null_count == len(texts):
        return pa.string()
    for wanted in _INFERRED:
        field = pa.field("", wanted)
        convert = converter_of(field, options)
        assert convert is not None
        trimmed = pc.utf8_trim(texts, " \t")
        if pc.any(pc.equal(pc.binary_length(trimmed), 0)).as_py():
            break
        if wanted == WIDE_INTEGERS and not _all(pc.match_substring_regex(trimmed, _INTEGER)):
            continue
        try:
            convert(trimmed)
        except _NO_VALUE:
            continue
        return wanted
    return pa.string()


def wider_type(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Returns the inferred type that fits the values of two inferred types, or None if only strings do."""
    for one, other in ((first, second), (second, first)):
        if one == other or pa.types.is_null(one):
            return other
        if pa.types.is_float64(other) and (pa.types.is_integer(one) or pa.types.is_decimal(one)):
            return other
        if other == WIDE_INTEGERS and pa.types.is_integer(one):
            return other
        if pa.types.is_timestamp(other) and other.tz is None:
            finer = pa.types.is_timestamp(one) and one.tz is None and one.unit == "s"
            if pa.types.is_date(one) or finer:
                return other
    return None


WIDE_INTEGERS = pa.decimal128(38, 0)
"""The inferred type of integers beyond int64."""
_INFERRED = (
    pa.int64(),
    pa.bool_(),
    pa.date32(),
    pa.time32("s"),
    pa.timestamp("s"),
    pa.timestamp("ns"),
    pa.timestamp("ns", "UTC"),
    WIDE_INTEGERS,
    pa.float64(),
)
