"""`FileEncoding`: how rows become the bytes of a file, for `to_files`. Bound to columns when the program is made.

Rules:

- An encoder takes the rows of one file, a batch at a time. What it has encoded is in memory until the file ends.
- A row that the format cannot hold raises ConfigurationError, which names the column. Files are read by other systems,
  so a row is never omitted.
- What is written is read by `from_files` with the same columns as the same values.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.connectors.formats.avro import AvroFormat, AvroWrite
from tidegate.connectors.formats.avro_file import AVRO_CODECS, avro_file_block, avro_file_head, joined_bytes
from tidegate.connectors.formats.avro_schema import kind_of, parsed
from tidegate.connectors.formats.csv import CsvFormat
from tidegate.connectors.formats.format import EncodedRecords, Format, PayloadUse, WriteFormat
from tidegate.connectors.formats.json import JsonFormat
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import seconds_beyond_parquet

WrittenFormat: TypeAlias = "Literal['parquet', 'avro', 'csv', 'json'] | Format"
"""The format of files that users give: a name, or an AvroFormat or CsvFormat with options."""
_PARQUET_CODECS = ("zstd", "snappy", "gzip", "lz4", "none")
_GROUP_BYTES = 64 * 2**20
"""A row group of Parquet ends after about this many bytes in memory."""


class FileEncoder(ABC):
    """Encodes rows as one file. Called from one thread at a time."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Returns the approximate size of the file so far, in bytes."""

    @abstractmethod
    def add(self, batch: pa.RecordBatch) -> None:
        """Adds rows to the file. Raises ConfigurationError for a row that the file format cannot represent."""

    @abstractmethod
    def finish(self) -> list[bytes]:
        """Returns the bytes of the whole file, as a list of buffers."""


class FileEncoding(ABC):
    """A file format that is bound to the columns of a sink. Must be picklable."""

    @property
    @abstractmethod
    def suffix(self) -> str:
        """Returns the suffix of file names, such as `.parquet`."""

    @abstractmethod
    def encoder(self) -> FileEncoder:
        """Returns an encoder for one file."""


def file_encoding(format: WrittenFormat, columns: pa.Schema, compression: str | None) -> FileEncoding:
    """Returns the encoding of a format for some columns.

    `compression`: the codec of Avro or Parquet, or None for the default. Raises ConfigurationError for a codec or
    columns that the format does not have.
    """
    use = PayloadUse("to_files")
    if format == "parquet":
        codec = _codec(format, compression, _PARQUET_CODECS, "zstd")
        try:
            pq.ParquetWriter(pa.BufferOutputStream(), columns).close()
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise ConfigurationError(
                f"to_files(format='parquet'): the columns cannot be written: {error}; cast them in a step before"
            ) from error
        return ParquetEncoding(columns, codec)
    if format == "avro" or isinstance(format, AvroFormat):
        form = format if isinstance(format, AvroFormat) else AvroFormat()
        if form.registry is not None:
            raise ConfigurationError(
                "to_files(format=AvroFormat(registry=)): an Avro file contains its schema, so registry= does not "
                "apply; remove it"
            )
        codec = _codec("avro", compression, AVRO_CODECS, "deflate")
        written = form.for_writing(columns, use)
        assert isinstance(written, AvroWrite)
        schema = parsed(written.text)
        if kind_of(schema.of(schema.root)) != "record":
            raise ConfigurationError(
                "to_files(format=AvroFormat(schema=)): the schema of a file must be a record, not "
                f"{kind_of(schema.of(schema.root))}; give a record with one field for each column"
            )
        return AvroEncoding(written, codec)
    if compression is not None:
        raise ConfigurationError(f"to_files(compression=) is for Avro and Parquet, not {format!r}; remove it")
    if format == "json" or isinstance(format, JsonFormat):
        return LinesEncoding(JsonFormat().for_writing(columns, use), "json")
    if format == "csv" or isinstance(format, CsvFormat):
        csv = format if isinstance(format, CsvFormat) else CsvFormat()
        names = pa.schema([(f"c{number}", pa.string()) for number in range(len(columns))])
        row = pa.RecordBatch.from_pylist([dict(zip(names.names, columns.names, strict=True))], names)
        head = csv.for_writing(names, use).encoder().encode(row)
        if head.bad:
            raise ConfigurationError(
                f"to_files(format='csv'): the names of the columns cannot be written: {head.bad[0]}; rename the columns"
            )
        return LinesEncoding(csv.for_writing(columns, use), "csv", head.payloads[0].as_py())
    raise ConfigurationError(f"to_files(format={format!r}): give 'parquet', 'avro', 'csv' or 'json'")


def _codec(format: str, given: str | None, known: tuple[str, ...], default: str) -> str:
    if given is not None and given not in known:
        raise ConfigurationError(f"to_files(format={format!r}, compression={given!r}): give one of {', '.join(known)}")
    return default if given is None else given


@dataclass(frozen=True)
class ParquetEncoding(FileEncoding):
    """The encoding of Parquet files."""

    columns: pa.Schema
    codec: str
    suffix = ".parquet"

    def encoder(self) -> FileEncoder:
        """Returns an encoder for one file."""
        return _ParquetFile(self)


class _ParquetFile(FileEncoder):
    def __init__(self, form: ParquetEncoding) -> None:
        self._columns = form.columns
        self._out = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._out, form.columns, compression=form.codec)
        self._group: list[pa.RecordBatch] = []
        self._group_bytes = 0

    @property
    def size_bytes(self) -> int:
        return int(self._out.tell()) + self._group_bytes

    def add(self, batch: pa.RecordBatch) -> None:
        if (reason := seconds_beyond_parquet(batch)) is not None:
            raise ConfigurationError(
                f"to_files(format='parquet'): a row cannot be written: {reason}. Correct or drop such rows in a step "
                "before"
            )
        self._group.append(batch)
        self._group_bytes += batch.nbytes
        if self._group_bytes >= _GROUP_BYTES:
            self._end_group()

    def finish(self) -> list[bytes]:
        self._end_group()
        self._writer.close()
        return [self._out.getvalue().to_pybytes()]

    def _end_group(self) -> None:
        if self._group:
            rows = pa.Table.from_batches(self._group).cast(self._columns)
            self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))
            self._group = []
            self._group_bytes = 0


@dataclass(frozen=True)
class AvroEncoding(FileEncoding):
    """The encoding of Avro object files, in which each batch of rows is one block."""

    form: AvroWrite
    codec: str
    suffix = ".avro"

    def encoder(self) -> FileEncoder:
        """Returns an encoder for one file."""
        return _AvroFile(self)


class _AvroFile(FileEncoder):
    def __init__(self, encoding: AvroEncoding) -> None:
        self._codec = encoding.codec
        self._encoder = encoding.form.encoder()
        self._sync = os.urandom(16)
        self._pieces = [avro_file_head(encoding.form.text, self._codec, self._sync)]
        self._size_bytes = len(self._pieces[0])

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def add(self, batch: pa.RecordBatch) -> None:
        payloads = _all_payloads(self._encoder.encode(batch), "avro")
        block = avro_file_block(payloads, self._codec, self._sync)
        self._pieces.append(block)
        self._size_bytes += len(block)

    def finish(self) -> list[bytes]:
        self._encoder.close()
        return self._pieces


@dataclass(frozen=True)
class LinesEncoding(FileEncoding):
    """The encoding of text files with a line for each row. `head` is the first line, or None."""

    form: WriteFormat
    kind: str
    head: bytes | None = None

    @property
    def suffix(self) -> str:
        """Returns the suffix of file names."""
        return f".{self.kind}"

    def encoder(self) -> FileEncoder:
        """Returns an encoder for one file."""
        return _Lines(self)


class _Lines(FileEncoder):
    def __init__(self, encoding: LinesEncoding) -> None:
        self._kind = encoding.kind
        self._encoder = encoding.form.encoder()
        self._pieces = [] if encoding.head is None else [encoding.head + b"\n"]
        self._size_bytes = sum(map(len, self._pieces))

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def add(self, batch: pa.RecordBatch) -> None:
        payloads = _all_payloads(self._encoder.encode(batch), self._kind)
        if self._kind == "csv" and pc.any(pc.equal(pc.binary_length(payloads), 0)).as_py():
            raise ConfigurationError(
                f"to_files(format='csv'): a row whose only column {batch.schema.names[0]!r} is null would be a blank "
                "line, which is no row; filter such rows, or write JSON"
            )
        lines = pc.binary_join_element_wise(payloads, pa.scalar(b"", pa.binary()), pa.scalar(b"\n", pa.binary()))
        data = bytes(joined_bytes(lines))
        self._pieces.append(data)
        self._size_bytes += len(data)

    def finish(self) -> list[bytes]:
        self._encoder.close()
        return self._pieces


def _all_payloads(found: EncodedRecords, kind: str) -> pa.Array:
    """Returns the payloads of all rows. Raises ConfigurationError if a row could not be encoded."""
    if found.bad:
        row = min(found.bad)
        raise ConfigurationError(
            f"to_files(format={kind!r}): a row cannot be written: {found.bad[row]}. Correct or drop such rows in a "
            "step before"
        )
    return found.payloads
