"""`JsonDecoder`: decodes JSON records, one object each, to rows. Files and Kafka use it.

Rules:

- A kernel first checks the outline of each record: one object, whose strings are closed and have no control characters.
  No object can then begin in one record and end in another, so Arrow, which parses all records at once, returns a row
  for each. If all records of a block begin and end with a brace and are good, this needs no kernel (`_good`).
- Records that Arrow refuses are found by halving the block, so most blocks are parsed once. A number that exceeds its
  column's type is refused as well. Arrow would return infinity, or a decimal with too many or with wrong digits.
- A member that the schema does not name is ignored. A missing member is null, and an error if its column is not
  nullable. NaN, Infinity and -Infinity are numbers, as for Spark.
- Dates, times and dictionaries are parsed from strings as in CSV, also within structs and lists. Bytes are Base64, as
  Spark writes them.
"""

from __future__ import annotations

import decimal
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
from numpy.typing import NDArray

from tidegate.connectors.formats.format import DecodedRecords
from tidegate.connectors.formats.payload_block import Block
from tidegate.connectors.formats.text import (
    BOM,
    DECIMAL_DIGITS,
    DEFAULTS,
    WIDE_INTEGERS,
    Converter,
    Decoded,
    Misfit,
    TextOptions,
    converted,
    converter_of,
    inferred_type,
    is_utf8,
    too_long,
    utf8_faults,
    wider_type,
)
from tidegate.state.kernels.text_scan import (
    BLANK,
    CONTROL_CHARACTER,
    NO_OBJECT,
    TEXT_BEHIND,
    UNFINISHED,
    braced_lines,
    frame_json,
)
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import LEVELS_MAX, levels_of
from tidegate.storage.schemas.exact_casts import leaves
from tidegate.storage.user_values import mark_values, marked, unmarked

_CHANGED = re.compile(r"Column\(([^)]*)\) changed from (\w+ to \w+)")
"""Finds the column and its types in Arrow's error for a column with values of two types."""
_UNREAD = re.compile(r"Failed to convert JSON to (.+?)(?:, couldn't parse:|: )(\S+)")
"""Finds the type and the value in Arrow's error for a value that its column cannot hold."""
_REASONS = {
    NO_OBJECT: "the row is not a JSON object",
    UNFINISHED: "the JSON object does not end",
    TEXT_BEHIND: "text follows the JSON object",
    CONTROL_CHARACTER: "a string has a line break or another control character; JSON writes it as an escape",
    BLANK: "the row is empty",
}
_NEWLINE = 10
_RETURN = 13
_BREAK = re.compile(rb"[\r\n]")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_GREAT_DECIMAL = rb'[0-9]{%d}|[:,\[\s]-?[0-9.]+[eE][+-]?[0-9]|"[+-]?[0-9.]+[eE][+-]?[0-9]+"'
"""Matches numbers with the given count of digits before the point, or with an exponent, also in strings."""
_TOO_LONG = re.compile(rb"[0-9]{309}")
"""Matches digits of a number that is too large for a float64. Arrow itself refuses such a number with an exponent."""
_VALUES = re.compile(rb'"[^"]*"\s*:?|[^\s",:{}\[\]]+')
"""Matches texts that may be values in a record that cannot be parsed."""


class JsonDecoder:
    """Decodes JSON objects to batches with the columns of a schema.

    Raises ConfigurationError for types that JSON cannot represent.
    """

    begun = True

    def __init__(self, schema: pa.Schema, encoding: str = "utf-8") -> None:
        self._schema = schema
        self._encoding = encoding
        self._texts: dict[pa.DataType, Converter | None] = {}
        parsed = []
        for field in schema:
            for leaf in _text_leaves(field):
                self._texts[leaf.type] = _base64_converter(leaf.type) or converter_of(leaf, DEFAULTS)
            parsed.append(pa.field(field.name, _with_texts(field.type)))
        self._parsed = pa.schema(parsed)
        self._wide = pa.schema([field.with_type(_widened(field.type)) for field in parsed])
        """The parsed columns with every float as float64, to find numbers that are too large for a smaller type."""
        self._floats = [
            number
            for number, field in enumerate(self._parsed)
            if any(map(pa.types.is_floating, _leaf_types(pa.schema([field]))))
        ]
        """The columns that have floats."""
        decimals = [leaf for leaf in _leaf_types(self._parsed) if pa.types.is_decimal(leaf)]
        whole = min((DECIMAL_DIGITS[leaf.bit_width] - max(leaf.scale, 0) for leaf in decimals), default=0)
        self._great_decimal = re.compile(_GREAT_DECIMAL % (whole + 1)) if decimals else None
        """Finds numbers that Arrow may wrap around because they, with zeros up to the scale, have too many digits."""
        for field in self._parsed:
            try:
                _parse(b"{}", pa.schema([field]))
            except pa.ArrowNotImplementedError as error:
                raise ConfigurationError(
                    f"column {field.name!r} is {field.type}, which is not read from JSON; read it as a string, or as "
                    "the structs and lists that the file has, and make it in a step"
                ) from error
            except pa.ArrowInvalid as error:
                # Arrow fills the fields of a struct that is missing with nulls.
                raise ConfigurationError(
                    f"column {field.name!r} is {field.type}, with a field that may not be null, which is not read from "
                    "JSON; let it be null in the schema, and check it in a step"
                ) from error

    def begin(self, block: bytes, final: bool) -> int | None:
        """Returns 0, because JSON has no header."""
        return 0

    def decode(self, block: bytes, final: bool, size_max: int) -> Decoded:
        """Decodes the complete lines of a block to rows. Blank lines are skipped."""
        data = np.frombuffer(block, dtype=np.uint8)
        starts, ends, consumed = lines_of(data, final)
        if len(starts) and int((ends - starts).max()) <= size_max:
            lines = block[: int(ends[-1])]
            batch = self._good(np.frombuffer(lines, dtype=np.uint8), len(starts)) if is_utf8(lines) else None
            if batch is not None:
                return Decoded(batch, starts, ends, {}, consumed)
        status = frame_json(data, starts, ends)
        if (blank := status == BLANK).any():
            starts = starts[~blank]
            ends = ends[~blank]
            status = status[~blank]
        found = self._decoded(block, starts, ends, status, size_max, self._encoding)
        return Decoded(found.batch, starts, ends, found.bad, consumed)

    def misfit(self, record: bytes) -> Misfit | None:
        """Returns the first value of a bad record that does not fit its column, or None if it is no JSON object."""
        try:
            found = _parse(record, None).schema
        except pa.ArrowInvalid:
            return None
        for field in self._schema:
            if self._fits(record, field):
                continue
            at = found.get_field_index(field.name)
            kind = pa.null() if at < 0 else _exact_schema(found, [record]).field(at).type
            wider = wider_type(field.type, kind)
            if wider is None and _is_text_in_json(field.type) and _is_text_in_json(kind):
                wider = pa.string()
            return Misfit(field.name, field.type, wider)
        return None

    def _fits(self, record: bytes, field: pa.Field) -> bool:
        decoder = JsonDecoder(pa.schema([field]), self._encoding)
        return not decoder.records(Block.of(pa.array([record], pa.binary()))).bad

    def skip(self, block: bytes, state: NDArray[np.int64]) -> int:
        """Skips the rest of a line that exceeds the size limit.

        Returns the position after it, or -1 if it continues.
        """
        found = _BREAK.search(block)
        return -1 if found is None else found.end()

    def records(self, records: Block) -> DecodedRecords:
        """Decodes records, one object each, to rows. Objects may contain line breaks, and may begin with a BOM."""
        joined = records.lines()
        batch = self._good(joined.data, len(records)) if joined.is_utf8() else None
        if batch is not None:
            return DecodedRecords(batch, {})
        lines = [record.removeprefix(BOM) for record in records.array().to_pylist()]
        block = b"\n".join(lines)
        sizes = np.fromiter((len(line) for line in lines), dtype=np.int64, count=len(lines))
        ends = np.cumsum(sizes + 1) - 1
        starts = ends - sizes
        status = frame_json(np.frombuffer(block, dtype=np.uint8), starts, ends)
        return self._decoded(block, starts, ends, status, None, None)

    def _good(self, block: NDArray[np.uint8], count: int) -> pa.RecordBatch | None:
        """Decodes `count` lines of valid UTF-8 in one pass. Returns None if a line may not be a valid object.

        Arrow accepts two objects in a line, or one object in two lines. If each line begins and ends with a brace, an
        object cannot span lines: strings have no line breaks, and no brace may open directly after a closing brace
        inside an object. So each line ends where an object ends, and with as many rows as lines, each line is one
        object.
        """
        if braced_lines(block) != count:
            return None
        try:
            found = _parse(block.data, self._parsed)
            if found.num_rows != count:
                return None
            self._check_numbers(found, block.data)
        except pa.ArrowInvalid:
            return None
        batch, reasons = self._converted(found)
        return None if reasons else batch

    def _decoded(
        self,
        block: bytes,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        status: NDArray[np.uint8],
        size_max: int | None,
        encoding: str | None,
    ) -> DecodedRecords:
        bad = {number: _REASONS[int(status[number])] for number in np.flatnonzero(status).tolist()}
        bad |= utf8_faults(block, starts, ends, encoding)
        if size_max is not None:
            bad |= {int(number): too_long(size_max) for number in np.flatnonzero(ends - starts > size_max)}
        numbers = [number for number in range(len(starts)) if number not in bad] if bad else range(len(starts))
        batches: list[pa.RecordBatch] = []
        self._parse(block, starts, ends, numbers, batches, bad)
        made, reasons = self._converted(pa.Table.from_batches(batches, self._parsed))
        kept = [number for number in numbers if number not in bad] if bad else numbers
        if reasons:
            fits = np.ones(made.num_rows, dtype=np.bool_)
            for row, reason in reasons.items():
                fits[row] = False
                bad[kept[row]] = reason
            made = made.filter(pa.array(fits))
        return DecodedRecords(made, bad)

    def _converted(self, parsed: pa.Table) -> tuple[pa.RecordBatch, dict[int, str]]:
        """Converts parsed rows to the types of the schema.

        Also returns the numbers of rows that do not fit, with the reasons.
        """
        table = parsed.combine_chunks()
        batch = table.to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], self._parsed)
        rows = np.arange(batch.num_rows)
        reasons = dict[int, str]()
        arrays = [
            self._made(column, field, rows, reasons) for column, field in zip(batch.columns, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema) if arrays else batch, reasons

    def _made(self, column: pa.Array, field: pa.Field, rows: NDArray[np.int64], reasons: dict[int, str]) -> pa.Array:
        """Converts the strings in a parsed column to values of the field's type.

        `rows` is the row number of each entry.
        """
        wanted = field.type
        if column.type != wanted and pa.types.is_struct(wanted):
            children = [
                self._made(column.field(number), _below(field, wanted.field(number)), rows, reasons)
                for number in range(wanted.num_fields)
            ]
        elif column.type != wanted and pa.types.is_list(wanted):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
            children = [self._made(column.values, _below(field, wanted.value_field), np.repeat(rows, lengths), reasons)]
        else:
            found: dict[int, str] = {}
            values = converted(column, field, self._texts.get(wanted), found, blank_is_null=False)
            for entry, reason in found.items():
                reasons.setdefault(int(rows[entry]), reason)
            return values
        assert column.offset == 0, "a column that was just parsed begins at its first entry"
        own = column.buffers()[: 1 if pa.types.is_struct(wanted) else 2]
        values = pa.Array.from_buffers(wanted, len(column), own, children=children)
        return converted(values, field, None, reasons)

    def _parse(
        self,
        block: bytes,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        numbers: Sequence[int],
        batches: list[pa.RecordBatch],
        bad: dict[int, str],
    ) -> None:
        """Parses records at once, or in halves until the records that Arrow refuses are found.

        Results go to `batches` and `bad`.
        """
        waiting = [numbers] if len(numbers) else []
        while waiting:
            part = waiting.pop()
            if part[-1] - part[0] + 1 == len(part):
                data = block[int(starts[part[0]]) : int(ends[part[-1]])]
            else:
                data = b"\n".join(block[int(starts[number]) : int(ends[number])] for number in part)
            try:
                found = _parse(data, self._parsed)
                if found.num_rows != len(part):
                    raise pa.ArrowInvalid(
                        f"{len(part)} JSON records were parsed to {found.num_rows} rows; write one JSON object for "
                        "each record"
                    )
                self._check_numbers(found, data)
                batches += found.to_batches()
            except pa.ArrowInvalid as error:
                if len(part) > 1:
                    half = len(part) // 2
                    waiting += [part[half:], part[:half]]
                else:
                    bad[part[0]] = _reason(error, data, self._schema)

    def _check_numbers(self, found: pa.Table, data: bytes | memoryview) -> None:
        """Raises ArrowInvalid if Arrow has converted a number that does not fit its type to another value."""
        if self._great_decimal is not None:
            for leaf in _leaf_arrays(found):
                if pa.types.is_decimal(leaf.type):
                    leaf.validate(full=True)
            if self._great_decimal.search(data):
                rows = [_loads(line, decimal.Decimal) for line in _BREAK.split(data) if line.strip()]
                given = [[row.get(field.name) for row in rows] for field in self._parsed]
                for field, texts, column in zip(self._parsed, given, found.columns, strict=True):
                    if _has_other_decimals(field.type, texts, column.to_pylist()):
                        raise pa.ArrowInvalid(
                            f"a number does not fit column {field.name!r} ({field.type}); give a wider type in schema="
                        )
        if not self._floats or (infinite := self._infinities(found)) == 0:
            return
        if _TOO_LONG.search(data) or (
            self._wide != self._parsed and infinite != self._infinities(_parse(data, self._wide))
        ):
            names = " or ".join(repr(self._parsed[number].name) for number in self._floats)
            raise pa.ArrowInvalid(f"a number is too great for column {names}; give a wider type in the schema")

    def _infinities(self, table: pa.Table) -> int:
        """Returns the number of infinite floats in a table, at any depth."""
        floats = (leaf for leaf in _leaf_arrays(table.select(self._floats)) if pa.types.is_floating(leaf.type))
        return sum(int(np.isinf(each.to_numpy(zero_copy_only=False)).sum()) for each in floats)


def _is_text(wanted: pa.DataType) -> bool:
    """Returns whether a type is parsed as a JSON string first, because Arrow does not read it, or differently than
    Spark.
    """
    tests = (
        pa.types.is_date,
        pa.types.is_time,
        pa.types.is_timestamp,
        pa.types.is_dictionary,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_fixed_size_binary,
    )
    return any(test(wanted) for test in tests)


def _is_text_in_json(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_date(kind) or pa.types.is_time(kind)) or (
        pa.types.is_timestamp(kind)
    )


def _text_leaves(field: pa.Field) -> Iterator[pa.Field]:
    """Yields the fields that are parsed as strings, at any depth."""
    if _is_text(field.type):
        yield field
    elif pa.types.is_struct(field.type) or pa.types.is_list(field.type):
        for number in range(field.type.num_fields):
            yield from _text_leaves(_below(field, field.type.field(number)))


def _below(field: pa.Field, inner: pa.Field) -> pa.Field:
    """Returns the child field of a struct or list, nullable and with its full name."""
    return pa.field(f"{field.name}.{inner.name}", inner.type)


def _with_texts(wanted: pa.DataType) -> pa.DataType:
    """Returns the type as which Arrow parses a value: strings for types of `_is_text`, at any depth."""
    if _is_text(wanted):
        return pa.string()
    if pa.types.is_struct(wanted):
        return pa.struct([field.with_type(_with_texts(field.type)) for field in wanted])
    if pa.types.is_list(wanted):
        return pa.list_(wanted.value_field.with_type(_with_texts(wanted.value_type)))
    return wanted


def _base64_converter(wanted: pa.DataType) -> Converter | None:
    """Returns a function that decodes Base64 to values of a binary type, or None for other types."""
    binary = pa.types.is_binary(wanted) or pa.types.is_large_binary(wanted)
    return _base64(wanted) if binary or pa.types.is_fixed_size_binary(wanted) else None


def _base64(wanted: pa.DataType) -> Converter:
    def convert(texts: pa.Array) -> pa.Array:
        import polars as pl

        try:
            found = pl.Series(texts).str.decode("base64", strict=True)
        except pl.exceptions.ComputeError as error:
            raise pa.ArrowInvalid(
                "a text is not Base64; write bytes in Base64, or read the column as a string"
            ) from error
        return found.to_arrow().cast(pa.binary()).cast(wanted)

    return convert


def _leaf_types(schema: pa.Schema) -> Iterator[pa.DataType]:
    waiting = list(schema.types)
    while waiting:
        found = waiting.pop()
        waiting += [found.field(position).type for position in range(found.num_fields)]
        yield found


def _widened(found: pa.DataType) -> pa.DataType:
    """Returns the type with floats as float64, at any depth of structs and lists."""
    if pa.types.is_floating(found):
        return pa.float64()
    if pa.types.is_struct(found):
        return pa.struct([field.with_type(_widened(field.type)) for field in found])
    if pa.types.is_list(found):
        return pa.list_(found.value_field.with_type(_widened(found.value_type)))
    return found


def _leaf_arrays(table: pa.Table) -> Iterator[pa.Array]:
    return (leaf for column in table.columns for chunk in column.chunks for leaf in leaves(chunk))


def json_schema(block: bytes, final: bool, options: TextOptions) -> pa.Schema:
    """Infers the columns of a JSON file with Arrow, from the valid lines of its first block.

    Two types that Arrow infers are corrected. Whole numbers beyond int64 become decimals instead of floats, and times
    with a zone get a type with a zone. A block of blank lines has no columns. Raises ConfigurationError if no other
    line is valid.
    """
    data = np.frombuffer(block, dtype=np.uint8)
    starts, ends, _ = lines_of(data, final)
    status = frame_json(data, starts, ends)
    wrong = np.flatnonzero((status != 0) & (status != BLANK))
    bad = {number: _REASONS[int(status[number])] for number in wrong.tolist()}
    bad |= utf8_faults(block, starts, ends, options.encoding)
    good = [number for number in np.flatnonzero(status == 0).tolist() if number not in bad]
    lines = [block[int(starts[n]) : int(ends[n])] for n in good]
    found = pa.schema([])
    try:
        if lines:
            found = _parse(b"\n".join(lines), None).schema
    except pa.ArrowInvalid:
        # Reading reports a line that is no JSON. Here the other lines count.
        faults = [_fault(line) for line in lines]
        bad |= {number: fault for number, fault in zip(good, faults, strict=True) if fault is not None}
        lines = [line for line, fault in zip(lines, faults, strict=True) if fault is None]
        if lines:
            found = _schema_together(lines)
    if bad and not lines:
        first = min(bad)
        raise ConfigurationError(
            f"the columns cannot be inferred, because no line is a valid JSON object (line "
            f"{_line_number(block[: int(starts[first])])}: {unmarked(bad[first])}); give schema="
        )
    for field in found:
        if (levels := levels_of(field.type)) > LEVELS_MAX:
            raise ConfigurationError(
                f"the columns cannot be inferred, because {field.name!r} is nested {levels:,} levels deep, and a "
                f"column may have {LEVELS_MAX}; give schema= without it"
            )
    return _exact_schema(found, lines)


def _exact_schema(found: pa.Schema, lines: Sequence[bytes]) -> pa.Schema:
    """Returns the columns that Arrow has inferred from lines, with corrected types."""
    if not any(_is_doubtful(leaf) for leaf in _leaf_types(found)):
        return found
    rows = [_loads(line, _whole_number) for line in lines]
    return pa.schema(
        [field.with_type(_exact_type(field.type, [row.get(field.name) for row in rows])) for field in found]
    )


def _fault(line: bytes) -> str | None:
    """Returns why a line is not a valid JSON object, or None."""
    try:
        _parse(line, None)
    except pa.ArrowInvalid as error:
        return _reason(error, line)
    return None


def _line_number(before: bytes) -> int:
    """Returns the number of a line, from 1. `before` is the text before the line."""
    return 1 + len(_LINE_END.findall(before))


def _schema_together(lines: Sequence[bytes]) -> pa.Schema:
    """Infers the columns of lines that are valid JSON.

    Raises ConfigurationError if a column has values of two types.
    """
    try:
        return _parse(b"\n".join(lines), None).schema
    except pa.ArrowInvalid as error:
        found = _CHANGED.search(str(error))
        what = str(error) if found is None else f"column {found[1].strip('/')!r} has values of two types, {found[2]}"
        raise ConfigurationError(
            f"the columns cannot be inferred, because {what}; give schema=, and bad_rows= for rows that do not fit it"
        ) from error


def _loads(line: bytes, parse_int: Callable[[str], object]) -> dict[str, Any]:
    """Parses a line as a JSON object in Python, for values that Arrow does not return exactly.

    Raises ArrowInvalid if malformed.
    """
    try:
        return dict(json.loads(line, parse_int=parse_int, parse_float=decimal.Decimal))
    except (ValueError, RecursionError, decimal.InvalidOperation) as error:
        raise pa.ArrowInvalid(
            f"a record is not valid JSON: {error}; correct it, or skip it with bad_rows='skip'"
        ) from error


def _has_other_decimals(wanted: pa.DataType, given: Sequence[Any], found: Sequence[Any]) -> bool:
    """Returns whether a decoded decimal differs from the number in the JSON values, at any depth."""
    pairs = [(value, taken) for value, taken in zip(given, found, strict=True) if value is not None]
    if pa.types.is_struct(wanted):
        return any(
            _has_other_decimals(
                field.type,
                [value.get(field.name) for value, _ in pairs],
                [taken[field.name] for _, taken in pairs],
            )
            for field in wanted
        )
    if pa.types.is_list(wanted):
        return any(_has_other_decimals(wanted.value_type, value, taken) for value, taken in pairs)
    return pa.types.is_decimal(wanted) and any(decimal.Decimal(value) != taken for value, taken in pairs)


def _is_doubtful(found: pa.DataType) -> bool:
    return bool(pa.types.is_floating(found) or pa.types.is_timestamp(found))


def _whole_number(text: str) -> float:
    """Returns the value of a JSON number without a fraction: an int if `WIDE_INTEGERS` can hold it, else a float."""
    return int(text) if len(text.lstrip("-")) <= WIDE_INTEGERS.precision else float(text)


def _exact_type(found: pa.DataType, values: Sequence[Any]) -> pa.DataType:
    """Returns the type that represents the given JSON values exactly, or `found` if Arrow's inference is exact."""
    values = [value for value in values if value is not None]
    if pa.types.is_struct(found):
        return pa.struct(
            [field.with_type(_exact_type(field.type, [value.get(field.name) for value in values])) for field in found]
        )
    if pa.types.is_list(found):
        return pa.list_(found.value_field.with_type(_exact_type(found.value_type, list(chain.from_iterable(values)))))
    if pa.types.is_floating(found):
        wide = any(type(value) is int and not _INT64_MIN <= value <= _INT64_MAX for value in values)
        return WIDE_INTEGERS if wide and all(type(value) is int for value in values) else found
    if pa.types.is_timestamp(found):
        return inferred_type(pa.array(values, pa.string()), DEFAULTS) if any(map(_ZONED.search, values)) else found
    return found


_INT64_MIN = -(2**63)
_INT64_MAX = 2**63 - 1
_ZONED = re.compile(r"\d[ T].*(?:Z|[+-]\d\d(?::?\d\d)?)$")


def lines_of(data: NDArray[np.uint8], final: bool) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Returns the starts and ends of complete lines, and the start of the first line that may be incomplete.

    A line feed and a carriage return each end a line, so there is an empty line between both.
    """
    breaks = data == _NEWLINE
    breaks |= data == _RETURN
    ends = np.flatnonzero(breaks).astype(np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends + 1])
    if final and starts[-1] < len(data):
        return starts, np.append(ends, len(data)), len(data)
    return starts[:-1], ends, int(starts[-1])


def _parse(data: bytes | memoryview, schema: pa.Schema | None) -> pa.Table:
    table = pa_json.read_json(
        pa.BufferReader(data),
        pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"),
    )
    if schema is None:
        return table
    table = table.select(schema.names)
    return table if table.schema == schema else table.cast(schema)


def _reason(error: Exception, record: bytes, schema: pa.Schema | None = None) -> str:
    """Returns why Arrow refuses a record, with the values of the record between marks.

    With a schema, a value that does not fit its column is named with the column and its type.
    """
    text = str(error).removesuffix(" in row 0").rstrip(". ")
    if schema is not None and (changed := _CHANGED.search(text)) is not None:
        path = [part for part in changed[1].split("/") if part]
        given = changed[2].rpartition(" ")[2]
        return f"column {'.'.join(path)!r}: a JSON {given} is not a value of type {_type_at(schema, path)}"
    if schema is not None and (unread := _UNREAD.search(text)) is not None:
        for path in _places(record, unread[2]):
            if str(wanted := _type_at(schema, path)) == unread[1]:
                return f"column {'.'.join(path)!r}: {marked(unread[2])} is not a value of type {wanted}"
    values = [
        found.strip(b'"').decode("utf-8", "replace") for found in _VALUES.findall(record) if not found.endswith(b":")
    ]
    return mark_values(text, values)


def _type_at(schema: pa.Schema, path: Sequence[str]) -> pa.DataType:
    """Returns the type of a value at the names in `path`, in which an element of a list is `[]`."""
    found: Any = pa.struct(list(schema))
    for part in path:
        if pa.types.is_list(found):
            found = found.value_type
        elif pa.types.is_struct(found) and found.get_field_index(part) >= 0:
            found = found.field(part).type
    return found


def _places(record: bytes, text: str) -> Iterator[list[str]]:
    """Yields the paths at which a record has a string or a number with this text."""
    try:
        waiting: list[tuple[list[str], Any]] = [([], json.loads(record, parse_int=str, parse_float=str))]
    except (ValueError, RecursionError):
        return
    while waiting:
        path, value = waiting.pop()
        if value == text:
            yield path
        elif isinstance(value, dict):
            waiting += [([*path, name], of) for name, of in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [([*path, "[]"], of) for of in reversed(value)]
