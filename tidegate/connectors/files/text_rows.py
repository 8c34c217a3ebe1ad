"""`TextRows`: reads the rows of one text file in file order, from any row on, and its dead letters.

Rules:

- Rows are numbered in file order, including bad rows, so a position does not depend on block sizes. To start at a later
  row, the file is read from its beginning and earlier rows are dropped.
- A record must fit into `size_max` bytes. The remainder of a longer record is skipped without being kept in memory.
- If bytes cannot be read (a truncated or damaged file), all rows before that position are returned, and then one dead
  letter for the rest of the file.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidegate.connectors.bad_rows import RowsRead
from tidegate.connectors.files.store_file import StoreFile, text_stream
from tidegate.connectors.formats.csv import CsvDecoder, csv_schema
from tidegate.connectors.formats.json_decoder import JsonDecoder, json_schema
from tidegate.connectors.formats.lines import LINE_SCHEMA, LineDecoder
from tidegate.connectors.formats.text import (
    DEFAULTS,
    UTF_8,
    Decoder,
    InferredTypeError,
    Misfit,
    TextOptions,
    too_long,
)
from tidegate.storage.errors import ConfigurationError

BLOCK_BYTES = 4 * 2**20
"""Number of bytes that are decoded at a time."""
ADVICE_MAX = 10
"""Number of bad records of a block whose dead letters name the column and a wider type. It takes ms to find them."""
LETTER_BYTES_MAX = 64 * 2**10
"""Limit of the bytes of a bad record in its dead letter."""
LETTERS = pa.schema(
    [
        ("raw", pa.binary()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("offset", pa.int64()),
        ("error", pa.string()),
    ]
)
"""Schema of the dead letters of files.

`line` counts from 1. `offset` is the position of the first byte in the decompressed file.
"""


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The text format of a source: `kind` is "csv", "json" or "text".

    - `columns`: the column names of CSV files without a header.
    - `inferred`: whether the types of the columns were inferred from the first file.
    - `drops`: whether bad rows are dropped (`bad_rows="skip"`).
    """

    kind: str
    options: TextOptions = DEFAULTS
    columns: tuple[str, ...] = ()
    size_max: int = BLOCK_BYTES
    inferred: bool = False
    drops: bool = False

    def decoder(self, schema: pa.Schema, path: str) -> Decoder:
        """Returns a decoder for one file.

        Raises ConfigurationError for column types that the text format cannot represent.
        """
        if self.kind == "csv":
            return CsvDecoder(schema, self.columns or schema.names, self.options, path)
        if self.kind == "json":
            return JsonDecoder(schema, self.options.encoding)
        return LineDecoder(schema, self.options)

    def schema_of(self, file: StoreFile, path: str) -> pa.Schema:
        """Infers the columns of a file from its first block."""
        if self.kind == "text":
            return LINE_SCHEMA
        blocks = Blocks(file, path, self.options.encoding)
        block = blocks.read(self.size_max)
        found = (csv_schema if self.kind == "csv" else json_schema)(block, len(block) < self.size_max, self.options)
        if blocks.failure is not None and not len(found):
            raise blocks.failure
        return found


class Blocks:
    """Reads a text file in blocks: decompressed, converted to UTF-8, and without a byte-order mark."""

    def __init__(self, file: StoreFile, path: str, encoding: str) -> None:
        self._file = file
        self._path = path
        self.encoding = encoding
        self.failure: Exception | None = None
        """The error that ended the reading before the end of the file, or None."""
        self.bom_bytes = 0
        self._read_bytes = 0
        self._first = True
        file.seek(0)
        self._stream = self._open()
        self._decode: codecs.IncrementalDecoder | None = None

    def read(self, size: int) -> bytes:
        """Returns about `size` bytes of the file in UTF-8, or no bytes at the end. Raises StorageError."""
        data = self._bytes(size)
        if self._first:
            while 0 < len(data) < _BOM_BYTES_MAX and (more := self._bytes(size)):
                data += more
            data = self._begin(data) or self._bytes(size)
        if self._decode is None:
            return data
        text = self._decode.decode(data, final=not data)
        while data and not text:
            data = self._bytes(size)
            text = self._decode.decode(data, final=not data)
        return text.encode(UTF_8, "surrogatepass")

    def _begin(self, data: bytes) -> bytes:
        """Determines the exact encoding from the first bytes of the file.

        Returns these bytes without a byte-order mark.
        """
        self._first = False
        for bom, codec in _BOMS.get(self.encoding, ()):
            if data.startswith(bom):
                self.encoding, self.bom_bytes = codec, len(bom)
                break
        if self.encoding != UTF_8:
            self._decode = codecs.getincrementaldecoder(self.encoding)(_KEEP)
        return data[self.bom_bytes :]

    def original_size(self, block: bytes) -> int:
        """Returns the size in bytes that a UTF-8 block has in the encoding of the file."""
        return len(self.original(block))

    def original(self, block: bytes) -> bytes:
        """Converts a UTF-8 block back to the encoding of the file."""
        if self.encoding == UTF_8:
            return block
        parts = _KEPT.split(block.decode(UTF_8, "surrogatepass"))
        return b"".join(
            bytes(ord(each) - _LOW for each in part) if number % 2 else part.encode(self.encoding)
            for number, part in enumerate(parts)
        )

    def _open(self) -> pa.NativeFile:
        return text_stream(self._file, self._path)

    def _bytes(self, size: int) -> bytes:
        if self.failure is not None:
            return b""
        try:
            data: bytes = self._stream.read(size)
        except (OSError, pa.ArrowException) as error:
            if self._file.failure is not None:
                raise self._file.failure from error
            data = self._up_to_failure(size)
        self._read_bytes += len(data)
        return data

    def _up_to_failure(self, size: int) -> bytes:
        """Reads, in small steps, all bytes before the position at which reading fails."""
        found = b""
        for step in (_COARSE_BYTES, 1):
            self._file.seek(0)
            self._stream = self._open()
            left = self._read_bytes + len(found)
            while left:
                left -= len(self._stream.read(min(left, BLOCK_BYTES)))
            try:
                while len(found) < size and (data := self._stream.read(min(step, size - len(found)))):
                    found += data
            except (OSError, pa.ArrowException) as error:
                if self._file.failure is not None:
                    raise self._file.failure from error
                if step == 1:
                    self.failure = error
            else:
                break
        return found


class TextRows:
    """Reads the rows of one open text file."""

    def __init__(
        self,
        file: StoreFile,
        path: str,
        form: TextFormat,
        schema: pa.Schema,
        complete: Callable[[pa.RecordBatch], pa.RecordBatch],
        fails: bool,
    ) -> None:
        """Opens nothing yet.

        `complete` adds the columns that the file does not have. With `fails`, a bad record raises an error.
        """
        self._file = file
        self._path = path
        self._form = form
        self._schema = schema
        self._complete = complete
        self._fails = fails
        self._parts: Iterator[_Part] = iter(())
        self._part: _Part | None = None
        self._first = -1
        """Index of the first row in the current parsed part."""

    def read(self, row: int, rows_max: int) -> RowsRead | None:
        """Returns up to `rows_max` rows from row `row` on, or None after the last row. For an earlier row, the file is
        read again from its start.

        Raises ConfigurationError, StorageError. If bad records are errors, it also raises ArrowInvalid, or the error of
        the decompression.
        """
        if self._first < 0 or row < self._first:
            self._parts = self._parsed()
            self._first, self._part = 0, next(self._parts, None)
        while self._part is not None and row >= self._first + self._part.rows:
            self._first += self._part.rows
            self._part = next(self._parts, None)
        return None if self._part is None else self._part.slice(row - self._first, rows_max)

    def next_row(self, row: int) -> int:
        """Returns `row`, because rows of text cannot be skipped without reading them."""
        return row

    def _parsed(self) -> Iterator[_Part]:
        if not self._file.size():
            return
        form = self._form
        blocks = Blocks(self._file, self._path, form.options.encoding)
        decoder = form.decoder(self._schema, self._file.url)
        place = _Place(blocks)
        block = b""
        final = False
        while not final:
            more = blocks.read(BLOCK_BYTES)
            block = block + more
            final = not more
            if not decoder.begun:
                at = decoder.begin(block, final and blocks.failure is None)
                if at is None:
                    if len(block) > form.size_max:
                        raise ConfigurationError(f"the header: {too_long(form.size_max)}")
                    continue
                place.passed(block[:at])
                block = block[at:]
                if not decoder.begun:
                    break
            decoded = decoder.decode(block, final and blocks.failure is None, form.size_max)
            if decoded.records:
                letters: list[dict[str, object]] = []
                for number in sorted(decoded.bad):
                    start, end = int(decoded.starts[number]), int(decoded.ends[number])
                    # A row that would be dropped is always examined, a letter only for its advice.
                    examined = form.inferred and (form.drops or len(letters) < ADVICE_MAX)
                    misfit = decoder.misfit(block[start:end]) if examined else None
                    letters.append(self._letter(block, start, end, decoded.bad[number], place, misfit))
                batch = decoded.batch if decoded.batch.num_rows else None
                bad = np.array(sorted(decoded.bad), dtype=np.int64)
                yield _Part(None if batch is None else self._complete(batch), bad, letters, decoded.records)
            place.passed(block[: decoded.consumed])
            block = block[decoded.consumed :]
            if len(block) > form.size_max + 1:
                letter = self._letter(block, 0, len(block), too_long(form.size_max), place)
                block, final = self._skip(blocks, decoder, block, place)
                yield _Part(None, np.zeros(1, dtype=np.int64), [letter], 1)
        if blocks.failure is not None:
            reason = f"the rest of the file cannot be read: {blocks.failure}"
            if self._fails:
                raise blocks.failure
            yield _Part(None, np.zeros(1, dtype=np.int64), [self._letter(block, 0, len(block), reason, place)], 1)

    def _skip(self, blocks: Blocks, decoder: Decoder, block: bytes, place: _Place) -> tuple[bytes, bool]:
        """Skips a record that exceeds the size limit.

        Returns the bytes after the record in the last block that was read, and whether the file has ended.
        """
        state = np.zeros(1, dtype=np.int64)
        while (at := decoder.skip(block, state)) < 0:
            place.passed(block)
            block = blocks.read(BLOCK_BYTES)
            if not block:
                return b"", True
        place.passed(block[:at])
        return block[at:], False

    def _letter(
        self, block: bytes, start: int, end: int, reason: str, place: _Place, misfit: Misfit | None = None
    ) -> dict[str, object]:
        """Returns the dead letter of a bad record. Raises ConfigurationError instead if bad records fail the job.

        `misfit`: the value that does not fit a type that was inferred. Such a record is never dropped: its row may be
        as good as the rows before it.
        """
        line, offset = place.of(block[:start])
        if misfit is not None:
            reason = f"{reason}. {_advice(misfit)}"
            if self._fails or self._form.drops:
                ending = (
                    ". bad_rows='skip' drops no row for an inferred type, only for one in schema="
                    if self._form.drops
                    else ""
                )
                raise InferredTypeError(f"line {line:,} (byte {offset:,}): {reason}{ending}")
        if self._fails:
            raise ConfigurationError(f"line {line:,} (byte {offset:,}): {reason}")
        size = min(LETTER_BYTES_MAX, self._form.size_max)
        raw = place.blocks.original(block[start : min(end, start + size)])
        return {"raw": raw, "file": self._file.url, "line": line, "offset": offset, "error": reason}


def _advice(misfit: Misfit) -> str:
    inferred = f"The type {misfit.type} of column {misfit.column!r} was inferred from the begin of the first file"
    if misfit.wider is None:
        return f"{inferred}, and no type fits both values: give schema=, and correct the file or give bad_rows='side'"
    return f"{inferred}: give schema= with {misfit.wider} for this column"


class _Place:
    """The position of the current block in the file: the number of lines and bytes before it."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self._lines = 1
        self._bytes = 0
        self._ends_in_return = False

    def passed(self, data: bytes) -> None:
        """Advances the position by the lines and bytes in `data`."""
        if data:
            self._lines += _breaks(data, self._ends_in_return)
            self._bytes += self.blocks.original_size(data)
            self._ends_in_return = data.endswith(b"\r")

    def of(self, before: bytes) -> tuple[int, int]:
        """Returns the line (from 1) and the byte offset (from 0) of the position after the bytes `before` of the
        block.
        """
        line = self._lines + (_breaks(before, self._ends_in_return) if before else 0)
        return line, self.blocks.bom_bytes + self._bytes + self.blocks.original_size(before)


def _breaks(data: bytes, after_return: bool) -> int:
    both = data.count(b"\r\n") + (after_return and data.startswith(b"\n"))
    return data.count(b"\n") + data.count(b"\r") - both


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive records of a file.

    `bad` are the indices of bad records among them, and `letters` their dead letters.
    """

    batch: pa.RecordBatch | None
    bad: np.ndarray[tuple[int], np.dtype[np.int64]]
    letters: Sequence[dict[str, object]]
    rows: int

    def slice(self, start: int, rows_max: int) -> RowsRead:
        """Returns up to `rows_max` records from the index `start` on."""
        end = min(self.rows, start + rows_max)
        first, last = np.searchsorted(self.bad, [start, end]).tolist()
        good = (end - last) - (start - first)
        batch = None
        if good:
            assert self.batch is not None
            batch = self.batch.slice(start - first, good)
        letters = pa.RecordBatch.from_pylist(list(self.letters[first:last]), LETTERS) if last > first else None
        return RowsRead(batch, letters, end - start)


_COARSE_BYTES = 1_024
_KEEP = "tidegate-keep"
_LOW = 0xDC00
_KEPT = re.compile("([\udc00-\udcff]+)")
_BOM_BYTES_MAX = 4
_UTF_16 = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"), (b"", "utf-16-be"))
_UTF_32 = ((codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"), (b"", "utf-32-be"))
_BOMS: Mapping[str, Sequence[tuple[bytes, str]]] = {
    UTF_8: ((codecs.BOM_UTF8, UTF_8),),
    "utf-8-sig": ((codecs.BOM_UTF8, UTF_8), (b"", UTF_8)),
    "utf-16": _UTF_16,
    "utf-16-le": ((codecs.BOM_UTF16_LE, "utf-16-le"),),
    "utf-16-be": ((codecs.BOM_UTF16_BE, "utf-16-be"),),
    "utf-32": _UTF_32,
    "utf-32-le": ((codecs.BOM_UTF32_LE, "utf-32-le"),),
    "utf-32-be": ((codecs.BOM_UTF32_BE, "utf-32-be"),),
}
"""For each encoding that a user can choose: the byte-order marks with which a file may begin, and the encoding that
each selects.

Without a mark, UTF-16 is big-endian, as in Java.
"""


def _kept(error: UnicodeError) -> tuple[str, int]:
    """Error handler for decoding UTF-8: replaces invalid bytes by lone surrogates, so that the original bytes can be
    restored.

    Returns the replacement and the position at which decoding continues, as Python requires.
    """
    assert isinstance(error, UnicodeDecodeError)
    return "".join(chr(_LOW + byte) for byte in error.object[error.start : error.end]), error.end


codecs.register_error(_KEEP, _kept)
