"""CSV: `CsvFormat` for records of Kafka, which are one line each without a header, and `CsvDecoder` for records and
files.

The kernels of `text_scan.py` find records and fields, `text.py` converts the values. Rules of the decoder:

- With a header, columns are found by name, otherwise by position. Requested names must exist.
- A record that has more or fewer values than the header, or than the schema without a header, is bad.

Rules of the format:

- A payload has a value for each column, in their order. A byte order mark may precede the record, and a line break may
  follow it.
- Payloads are decoded together, as lines of one block. If the decoded records do not correspond to the payloads (an
  unclosed quote, a blank payload, several lines), halves of the block are decoded. A bad payload therefore does not
  affect others.
- A written value is read back as the same value. A text that equals `nullValue` is bad, because it would be read as
  null.
- An empty payload is a null, if there is one column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.format import (
    DecodedRecords,
    EncodedRecords,
    Format,
    PayloadDecoder,
    PayloadEncoder,
    PayloadUse,
    ReadFormat,
    WriteFormat,
    good_payloads,
    required_columns,
)
from tidegate.connectors.formats.payload_block import Block
from tidegate.connectors.formats.text import (
    BOM,
    Decoded,
    Misfit,
    TextOptions,
    converted,
    converter_of,
    inferred_type,
    not_utf8,
    too_long,
    unwritable_times,
    utf8_faults,
    wider_type,
)
from tidegate.state.kernels.text_scan import (
    OK,
    TEXT_AFTER_QUOTE,
    CsvRecords,
    csv_column,
    scan_csv,
    skip_csv,
)
from tidegate.storage.errors import ConfigurationError

_OPTIONS = ("sep", "delimiter", "quote", "escape", "nullValue", "nanValue", "positiveInf", "negativeInf")
_TEXT = pa.string()
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class CsvFormat(Format):
    """Records of CSV without a header.

    - `options`: sep (or delimiter), quote, escape, nullValue, nanValue, positiveInf and negativeInf, as for
      `from_files`.

    Raises ConfigurationError for other options and wrong values.

    Example:

        >>> tg.CsvFormat({"sep": ";"}).kind
        'csv'
    """

    options: Mapping[str, object] = field(default_factory=dict)

    kind = "csv"

    def __post_init__(self) -> None:
        known = [name.lower() for name in _OPTIONS]
        if unknown := [name for name in self.options if str(name).lower() not in known]:
            raise ConfigurationError(
                f"CsvFormat(options=): {unknown[0]!r} does not apply to records without a header; give only "
                f"{', '.join(_OPTIONS)}"
            )
        self.text_options()

    def text_options(self) -> TextOptions:
        """Returns the options of the format as an object, checked and with default values."""
        return replace(TextOptions.of("csv", self.options, "CsvFormat"), header=False)

    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the columns of a source. Raises ConfigurationError for nested columns."""
        found = CsvRead(required_columns(columns, self.kind, use), self.text_options(), use.part)
        try:
            found.decoder()
        except ConfigurationError as error:
            raise ConfigurationError(f"{use.method}(format='csv'): {error}") from error
        return found

    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format to the columns of a sink. Raises ConfigurationError for types that CSV cannot represent."""
        options = self.text_options()
        _check_words(options, columns, use)
        for each in columns:
            kind = each.type.value_type if pa.types.is_dictionary(each.type) else each.type
            text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
            try:
                converter_of(each.with_type(pa.string() if text else kind), options)
                known = not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind)
                known = known and not pa.types.is_fixed_size_binary(kind) and not pa.types.is_null(kind)
                known = known and not pa.types.is_duration(kind)
            except ConfigurationError:
                known = False
            if not known:
                raise ConfigurationError(
                    f"{use.method}(format='csv'): column {each.name!r} is {each.type}, which CSV cannot hold. Convert "
                    "it in a step before"
                )
        return CsvWrite(options)


def _check_words(options: TextOptions, columns: pa.Schema, use: PayloadUse) -> None:
    """Raises ConfigurationError for texts of nulls and floats that would be read as other values."""
    where = f"{use.method}(format=CsvFormat(...))"
    null = options.null_value
    quotes = any(each in null for each in (options.sep, "\n", "\r")) or null != null.strip(" \t")
    if (quotes and (not options.quote or (options.escape and options.escape in null))) or (
        options.quote and options.quote in null
    ):
        raise ConfigurationError(
            f"{where}: nullValue={null!r} has a character that needs quotes or an escape, and would be read as a text; "
            "give another one"
        )
    words = {
        "nanValue": options.nan_value,
        "positiveInf": options.positive_inf,
        "negativeInf": options.negative_inf,
    }
    kinds = (each.type.value_type if pa.types.is_dictionary(each.type) else each.type for each in columns)
    if not any(map(pa.types.is_floating, kinds)):
        return
    for name, word in words.items():
        same = list(words.values()).count(word) > 1 or word == null
        # A reader removes blanks around a number, and then does not find the word.
        if same or not word or word != word.strip(" \t") or _NUMBER.fullmatch(word):
            raise ConfigurationError(
                f"{where}: {name}={word!r} would be read as another value; give texts that are not numbers, have no "
                "blanks around them, and differ from each other and from nullValue"
            )


@dataclass(frozen=True, slots=True)
class CsvRead(ReadFormat):
    """CSV bound to the columns of a source."""

    columns: pa.Schema
    options: TextOptions
    part: str

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of every decoded batch."""
        return self.columns

    def decoder(self) -> PayloadDecoder:
        """Returns a decoder for one task."""
        return _CsvPayloads(self)


class _CsvPayloads(PayloadDecoder):
    def __init__(self, form: CsvRead) -> None:
        self._form = form
        self._decoder = CsvDecoder(form.columns, form.columns.names, form.options, "the payload")

    def decode(self, payloads: pa.Array) -> DecodedRecords:
        bad: dict[int, str] = {}
        numbers = np.arange(len(payloads), dtype=np.int64)
        given = block = Block.of(payloads)
        joined = block.lines()
        if not joined.ascii and BOM in joined.data.tobytes():
            without = [payload.removeprefix(BOM) for payload in payloads.to_pylist()]
            block = Block.of(pa.array(without, pa.binary()))
        if not joined.is_utf8():
            for number, payload in enumerate(block.array().to_pylist()):
                if (fault := not_utf8(payload, f"of the {self._form.part}")) is not None:
                    bad[number] = fault
            numbers = np.delete(numbers, list(bad))
        parts: list[pa.RecordBatch] = []
        waiting = [numbers]
        while waiting:
            some = waiting.pop()
            if not len(some):
                continue
            whole = len(some) == len(payloads) and block is given
            part = block if whole else block.only(some)
            found = self._lines(part, joined.data if whole else part.lines().data)
            if found is None and len(some) > 1:
                middle = len(some) // 2
                waiting += [some[middle:], some[:middle]]
                continue
            if found is None:
                found = self._alone(part.lines().data)
            bad |= {int(some[number]): reason for number, reason in found.bad.items()}
            parts.append(found.batch)
        table = pa.Table.from_batches(parts, self._form.columns).combine_chunks()
        batches = table.to_batches()
        batch = batches[0] if batches else _no_rows(self._form.columns)
        return DecodedRecords(batch, bad)

    def _lines(self, payloads: Block, lines: NDArray[np.uint8]) -> DecodedRecords | None:
        """Decodes payloads together, as lines. Returns None unless each payload is exactly one record."""
        sizes = payloads.ends - payloads.starts
        ends = np.cumsum(sizes + 1) - 1
        found = self._decoder.decode_text(lines)
        same = found.records == len(payloads) and np.array_equal(found.ends, ends)
        if not same or not np.array_equal(found.starts, ends - sizes):
            return None
        return DecodedRecords(found.batch, found.bad)

    def _alone(self, payload: NDArray[np.uint8]) -> DecodedRecords:
        """Decodes one payload alone, because it may not be exactly one record."""
        found = self._decoder.decode_text(payload)
        if found.records == 1:
            return DecodedRecords(found.batch, found.bad)
        columns = self._form.columns
        if not len(payload) and len(columns) == 1:
            if columns[0].nullable:
                return DecodedRecords(pa.RecordBatch.from_arrays([pa.nulls(1, columns[0].type)], schema=columns), {})
            reason = f"column {columns.names[0]!r} is not nullable, and has no value"
        elif found.records:
            reason = f"it has {found.records} records of CSV, and must have one"
        else:
            reason = "it has no record of CSV"
        return DecodedRecords(_no_rows(columns), {0: reason})


def _no_rows(columns: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in columns], schema=columns)


@dataclass(frozen=True, slots=True)
class CsvWrite(WriteFormat):
    """CSV bound to the columns of a sink."""

    options: TextOptions

    def encoder(self) -> PayloadEncoder:
        """Returns an encoder for one task."""
        return _CsvEncoder(self.options)


class _CsvEncoder(PayloadEncoder):
    def __init__(self, options: TextOptions) -> None:
        self._options = options
        special = "".join(map(re.escape, (options.sep, options.quote)))
        # Without quotes, blanks at an end are lost, and so are an empty text and a byte order mark.
        self._unsafe = rf"[{special}\r\n]|^$|^[ \t{BOM.decode()}]|[ \t]$"
        # A quoted text that equals nullValue is a null, too.
        null = pa.array([options.null_value])
        unsafe = bool(options.null_value) and pc.match_substring_regex(null, self._unsafe)[0].as_py()
        self._null = self._quoted(null)[0].as_py() if unsafe and options.quote else options.null_value

    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        bad: dict[int, str] = {}
        named = zip(batch.schema.names, batch.columns, strict=True)
        texts = [self._texts(column, name, bad) for name, column in named]
        joined = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, self._options.sep)
        return good_payloads(joined.cast(pa.binary()), bad)

    def _texts(self, column: pa.Array, name: str, bad: dict[int, str]) -> pa.Array:
        """Returns the CSV text of each value, with `nullValue` for nulls.

        Rows with values that CSV cannot represent go to `bad`.
        """
        options = self._options
        kind = column.type
        if pa.types.is_dictionary(kind):
            column = column.cast(kind.value_type)
            kind = column.type
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            column = column.cast(pa.timestamp(kind.unit, "UTC"))
        if pa.types.is_float16(kind):
            column = column.cast(pa.float32())
        for row, reason in unwritable_times(column).items():
            bad.setdefault(row, f"column {name!r} {reason}")
        texts = column.cast(pa.string())
        if pa.types.is_floating(kind):
            for found, word in (
                ("nan", options.nan_value),
                ("inf", options.positive_inf),
                ("-inf", options.negative_inf),
            ):
                texts = pc.if_else(pc.equal(texts, found), word, texts)
        if options.null_value:
            self._refuse(pc.equal(texts, options.null_value), name, "equals nullValue, so it would be null", bad)
        unsafe = pc.match_substring_regex(texts, self._unsafe)
        if pc.any(unsafe).as_py():
            if options.quote:
                texts = pc.if_else(unsafe, self._quoted(texts), texts)
            else:
                self._refuse(unsafe, name, "has a separator or a line break, or begins or ends with a blank", bad)
        return pc.fill_null(texts, self._null)

    def _quoted(self, texts: pa.Array) -> pa.Array:
        quote, escape = self._options.quote, self._options.escape
        if escape and escape != quote:
            texts = pc.replace_substring(texts, escape, escape + escape)
        doubled = pc.replace_substring(texts, quote, quote + quote)
        return pc.binary_join_element_wise(quote, doubled, quote, "")

    def _refuse(self, wrong: pa.Array, name: str, reason: str, bad: dict[int, str]) -> None:
        for row in np.flatnonzero(pc.fill_null(wrong, False).to_numpy(zero_copy_only=False)).tolist():
            bad.setdefault(row, f"column {name!r} {reason}")


class CsvDecoder:
    """Decodes CSV to the columns of `schema`. `columns` are all columns of a file without a header, in order."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str], options: TextOptions, path: str) -> None:
        self._schema = schema
        self._options = options
        self._path = path
        self._dialect = options.dialect
        self._converters = [converter_of(field, options) for field in schema]
        self._positions: list[int] = []
        self._width = 0
        self.begun = not options.header
        if self.begun:
            self._take(columns)

    def begin(self, block: bytes, final: bool) -> int | None:
        """Reads the header. Returns the position after it, or None if the block does not contain the whole header."""
        data = np.frombuffer(block, dtype=np.uint8)
        names, at = csv_header(data, final, self._options)
        if names is None:
            return at if final else None
        self._take(names)
        self.begun = True
        return at

    def decode(self, block: bytes, final: bool, size_max: int) -> Decoded:
        """Decodes the complete records of a block to rows."""
        data = np.frombuffer(block, dtype=np.uint8)
        records = scan_csv(data, 0, final, self._dialect)
        return self._decoded(data, records, self._faults(block, records, size_max))

    def decode_text(self, data: NDArray[np.uint8]) -> Decoded:
        """Decodes all records of a text that is valid UTF-8 to rows."""
        records = scan_csv(data, 0, True, self._dialect)
        return self._decoded(data, records, self._faults_of_form(records, len(data)))

    def _decoded(self, data: NDArray[np.uint8], records: CsvRecords, bad: dict[int, str]) -> Decoded:
        good = np.ones(len(records), dtype=np.bool_)
        good[list(bad)] = False
        numbers = np.flatnonzero(good)
        first = records.first_fields[:-1][numbers]
        reasons: dict[int, str] = {}
        arrays = []
        for column, position, convert in zip(self._schema, self._positions, self._converters, strict=True):
            texts = csv_texts(data, records, first + position, self._options)
            arrays.append(converted(texts, column, convert, reasons))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema) if arrays else _rows_alone(len(numbers))
        if reasons:
            kept = np.ones(len(numbers), dtype=np.bool_)
            for row, reason in reasons.items():
                kept[row] = False
                bad[int(numbers[row])] = reason
            batch = batch.filter(pa.array(kept))
        return Decoded(batch, records.starts, records.ends, bad, records.consumed)

    def misfit(self, record: bytes) -> Misfit | None:
        """Returns the first value of a bad record that does not fit its column, or None."""
        data = np.frombuffer(record, dtype=np.uint8)
        records = scan_csv(data, 0, True, self._dialect)
        if len(records) != 1 or self._faults(record, records, len(record) + 1):
            return None
        for column, position, convert in zip(self._schema, self._positions, self._converters, strict=True):
            texts = csv_texts(data, records, records.first_fields[:1] + position, self._options)
            reasons: dict[int, str] = {}
            converted(texts, column, convert, reasons)
            if reasons:
                wider = wider_type(column.type, inferred_type(texts, self._options))
                return Misfit(column.name, column.type, pa.string() if wider is None else wider)
        return None

    def skip(self, block: bytes, state: NDArray[np.int64]) -> int:
        """Skips the rest of a record that exceeds the size limit.

        Returns the position after it, or -1 if it continues.
        """
        return skip_csv(np.frombuffer(block, dtype=np.uint8), 0, self._dialect, state)

    def _take(self, names: Sequence[str]) -> None:
        missing = [name for name in self._schema.names if name not in names]
        if missing:
            raise ConfigurationError(
                f"{self._path} has no column {missing[0]!r}; it has {list(names)}. Remove the column from the schema, "
                "or this file from the input"
            )
        twice = [name for name in self._schema.names if list(names).count(name) > 1]
        if twice:
            raise ConfigurationError(
                f"{self._path} has two columns {twice[0]!r}; its columns are {list(names)}"
                "; rename one of them in the file"
            )
        self._positions = [list(names).index(name) for name in self._schema.names]
        self._width = len(names)

    def _faults(self, block: bytes, records: CsvRecords, size_max: int) -> dict[int, str]:
        """Returns the errors of records that can be detected without parsing values, by record number."""
        found = self._faults_of_form(records, size_max)
        for number, reason in utf8_faults(block, records.starts, records.ends, self._options.encoding).items():
            found.setdefault(number, reason)
        return found

    def _faults_of_form(self, records: CsvRecords, size_max: int) -> dict[int, str]:
        widths = np.diff(records.first_fields)
        wrong = (records.status != OK) | (widths != self._width) | (records.ends - records.starts > size_max)
        found = {}
        for number in np.flatnonzero(wrong).tolist():
            if records.ends[number] - records.starts[number] > size_max:
                found[number] = too_long(size_max)
            elif records.status[number] == TEXT_AFTER_QUOTE:
                found[number] = "text follows the closing quote of a value"
            elif records.status[number] != OK:
                found[number] = "a quoted value has no closing quote"
            else:
                whose = "the header" if self._options.header else "the schema"
                found[number] = f"the row has {widths[number]} values, and {whose} has {self._width} columns"
        return found


def csv_header(data: NDArray[np.uint8], final: bool, options: TextOptions) -> tuple[list[str] | None, int]:
    """Returns the column names in the first record of a CSV file, and the position of the second record.

    The names are None if the first record is incomplete.
    """
    records = scan_csv(data, 0, final, options.dialect)
    if not len(records):
        return None, records.consumed
    fields = np.arange(records.first_fields[1])
    texts = csv_texts(data, records, fields, options)
    names = [
        f"_c{number}" if name is None or name == "" else name
        for number, name in enumerate(texts.cast(pa.string()).to_pylist())
    ]
    return names, int(records.starts[1]) if len(records) > 1 else records.consumed


def csv_texts(
    data: NDArray[np.uint8], records: CsvRecords, fields: NDArray[np.int64], options: TextOptions
) -> pa.Array:
    """Returns the values of the fields with these numbers as strings."""
    dialect = options.dialect
    null = options.null_value.encode()
    empty = options.empty_value.encode()
    offsets, out, valid = csv_column(data, records, fields, dialect.escape, dialect.quote, null, empty)
    nulls = None
    if not valid.all():
        nulls = pa.array(valid.astype(np.bool_)).buffers()[1]
    return pa.Array.from_buffers(_TEXT, len(fields), [nulls, pa.py_buffer(offsets), pa.py_buffer(out)])


def csv_schema(block: bytes, final: bool, options: TextOptions) -> pa.Schema:
    """Infers the columns of a CSV file from its first block.

    Columns without a header are named `_c0`, `_c1` and so on, as in Spark.
    """
    data = np.frombuffer(block, dtype=np.uint8)
    records = scan_csv(data, 0, final, options.dialect)
    if not len(records):
        return pa.schema([])
    width = int(records.first_fields[1])
    names = [f"_c{number}" for number in range(width)]
    first = 0
    if options.header:
        names = csv_header(data, final, options)[0] or names
        first = 1
    widths = np.diff(records.first_fields)
    good = np.flatnonzero((records.status == OK) & (widths == width))
    good = good[good >= first]
    bad_bytes = utf8_faults(block, records.starts, records.ends, options.encoding)
    good = np.array([number for number in good if number not in bad_bytes], dtype=np.int64) if bad_bytes else good
    columns = [csv_texts(data, records, records.first_fields[good] + number, options) for number in range(width)]
    return pa.schema(
        [pa.field(name, inferred_type(texts, options)) for name, texts in zip(names, columns, strict=True)]
    )


def _rows_alone(rows: int) -> pa.RecordBatch:
    """Returns a batch that has `rows` rows and no columns."""
    return pa.RecordBatch.from_arrays([pa.nulls(rows)], names=[""]).select([])
