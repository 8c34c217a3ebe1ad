"""`CsvDecoder`: decodes CSV records to rows.

The kernels of `text_scan.py` find records and fields, `text.py` converts the values. Rules:

- With a header, columns are found by name, otherwise by position. Requested names must exist.
- A record that has more or fewer values than the header, or than the schema without a header, is bad.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.connectors.formats.text import (
    Decoded,
    TextOptions,
    converted,
    converter_of,
    inferred_type,
    too_long,
    utf8_faults,
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

_TEXT = pa.string()


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
        bad = self._faults(block, records, size_max)
        good = np.ones(len(records), dtype=np.bool_)
        good[list(bad)] = False
        numbers = np.flatnonzero(good)
        first = records.first_fields[:-1][numbers]
        reasons: dict[int, str] = {}
        arrays = []
        for field, position, convert in zip(self._schema, self._positions, self._converters, strict=True):
            texts = csv_texts(data, records, first + position, self._options)
            arrays.append(converted(texts, field, convert, reasons))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema) if arrays else _rows_alone(len(numbers))
        if reasons:
            kept = np.ones(len(numbers), dtype=np.bool_)
            for row, reason in reasons.items():
                kept[row] = False
                bad[int(numbers[row])] = reason
            batch = batch.filter(pa.array(kept))
        return Decoded(batch, records.starts, records.ends, bad, records.consumed)

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
        for number, reason in utf8_faults(block, records.starts, records.ends, self._options.encoding).items():
            found.setdefault(number, reason)
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
