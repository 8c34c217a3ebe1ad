"""`AvroRows`: reads the rows of one Avro object container file (`.avro`) in file order, from any row on.

`avro_file_head` and `avro_file_block` write such files.

Rules:

- A file has its schema in its header. Its records are read with that schema, and then cast to the columns of the source
  without loss (`fitting.py`). A missing column is an error.
- `fastavro` reads the header and the blocks (codecs, sync markers), and compiled kernels decode the records of a block.
- To continue at an earlier row, the file is read again from its beginning. Blocks before the requested row are not
  decoded.
- A block that cannot be read, or a value that does not fit its column, is an error with the number of the record.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.connectors.formats.avro import AvroRecords
from tidegate.connectors.formats.avro_schema import AvroSchema, compiled, kind_of, parsed
from tidegate.connectors.formats.fitting import check_read
from tidegate.connectors.formats.format import PayloadUse
from tidegate.connectors.formats.parquet import TooLargeError
from tidegate.connectors.formats.registry import UnfitSchemaError
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load

_BUFFER_BYTES = 4 * 2**20
_USE = PayloadUse("from_files", setting="schema")
_DEFLATE_LEVEL = 6


def avro_file_schema(file: Any, columns: Sequence[str] | None = None) -> pa.Schema:
    """Returns the columns of an Avro file, given as a Python file object. `columns`: only these, if it has them.

    Raises ConfigurationError, ValueError.
    """
    written = _written(_blocks(io.BufferedReader(file, _BUFFER_BYTES)))
    try:
        return compiled(written, written.only(columns)).schema
    except UnfitSchemaError as error:
        # The rest of the error is for records of Kafka.
        fault = str(error).partition(";")[0]
        raise ConfigurationError(
            f"{fault}; read the other fields, with schema= or columns=, or write the file without this field"
        ) from error


class AvroRows:
    """Reads the rows of one Avro file."""

    def __init__(
        self,
        file: Any,
        size_bytes: int,
        schema: pa.Schema,
        complete: Callable[[pa.RecordBatch], pa.RecordBatch],
        limit_bytes: int,
    ) -> None:
        """`schema`: the columns that the file must have. `complete`: adds columns that the file does not have.

        `limit_bytes`: limit of the decompressed bytes of a block. Raises ConfigurationError, ValueError.
        """
        self._file = file
        self._size_bytes = size_bytes
        self._schema = schema
        self._complete = complete
        self._limit_bytes = limit_bytes
        self._buffered: Any = None
        self._block: Any = None
        self._batch: pa.RecordBatch | None = None
        self._first = 0
        """The number of the first row of the current block, which has `_rows` rows."""
        self._rows = 0
        self._open()
        written = _written(self._reader)
        check_read(compiled(written, written, schema).schema, schema, "avro", _USE, written.fields())
        self._records = AvroRecords(compiled(written, written, schema), schema)

    def next_row(self, row: int) -> int:
        """Returns `row`, because rows of an Avro file cannot be skipped without reading them."""
        return row

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """Returns up to `rows_max` rows from `row` on, or None after the last row. Raises ValueError."""
        if row < self._first:
            self._open()
        while row >= self._first + self._rows:
            self._first += self._rows
            self._block = next(self._iterator, None)
            self._batch = None
            if self._block is None:
                self._rows = 0
                if self._buffered.tell() != self._size_bytes:
                    raise ValueError(
                        f"the file ends within a block, after {self._first} records; the file is damaged: write it "
                        "again"
                    )
                return None
            self._rows = int(self._block.num_records)
            if self._rows < 0:
                raise ValueError(
                    f"the block after record {self._first} has {self._rows} records, and the number must not be "
                    "negative; the file is damaged: write it again"
                )
        if self._batch is None:
            self._batch = self._decoded()
        return self._complete(self._batch.slice(row - self._first, rows_max))

    def _open(self) -> None:
        if self._buffered is not None:
            # A buffer closes its file when it goes.
            self._buffered.detach()
        self._file.seek(0)
        self._buffered = io.BufferedReader(self._file, _BUFFER_BYTES)
        self._reader = _blocks(self._buffered)
        self._iterator = _iterated(self._reader)
        self._first = 0
        self._rows = 0
        self._block = None
        self._batch = None

    def _decoded(self) -> pa.RecordBatch:
        data = self._block.bytes_.getvalue()
        if len(data) > self._limit_bytes:
            raise TooLargeError(
                f"the Avro block after record {self._first} has {len(data):,} bytes, more than {self._limit_bytes:,}; "
                "give a greater max_row_size"
            )
        found = self._records.decode_sequence(np.frombuffer(data, dtype=np.uint8), self._rows)
        if found.bad:
            number = min(found.bad)
            raise ValueError(f"record {self._first + number}: {found.bad[number]}")
        return found.batch


def _blocks(file: Any) -> Any:
    library = load("from_files(format='avro')", "avro", "fastavro")
    try:
        return library.block_reader(file)
    except (EOFError, KeyError) as error:
        raise ValueError(f"the file has no Avro header: {error}; give an Avro object container file") from error


def _iterated(reader: Any) -> Iterator[Any]:
    """Yields the blocks of an Avro file. Raises ValueError for a broken block."""
    while True:
        try:
            block = next(reader, None)
        except (EOFError, MemoryError) as error:
            raise ValueError(f"the file ends within a block: {error}; the file is damaged: write it again") from error
        except OSError:
            raise
        except Exception as error:  # each codec raises its own errors
            raise ValueError(
                f"a block cannot be read: {type(error).__name__}: {error}; the file is damaged: write it again"
            ) from error
        if block is None:
            return
        yield block


def _written(reader: Any) -> AvroSchema:
    schema = parsed(json.loads(reader.metadata["avro.schema"]))
    if kind_of(schema.of(schema.root)) != "record":
        raise ConfigurationError(
            f"the Avro schema of the file is {kind_of(schema.of(schema.root))} and not a record, so it has no "
            "columns; write the file with records"
        )
    return schema


AVRO_CODECS = ("deflate", "none")
"""The codecs of files that are written."""


def avro_file_head(schema: str, codec: str, sync: bytes) -> bytes:
    """Returns the bytes of the head of an Avro file. `schema`: as JSON. `sync`: 16 bytes that end the head and each
    block.
    """
    entries = {"avro.schema": schema.encode(), "avro.codec": (b"null" if codec == "none" else codec.encode())}
    items = b"".join(_sized(name.encode()) + _sized(value) for name, value in entries.items())
    return b"Obj\x01" + _long(len(entries)) + items + _long(0) + sync


def joined_bytes(values: pa.Array) -> memoryview:
    """Returns the bytes of all values, one after the other, without a copy. `values`: binary without nulls."""
    _, offset_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=len(values) + 1, offset=4 * values.offset)
    return memoryview(data_buffer if data_buffer is not None else b"")[offsets[0] : offsets[-1]]


def avro_file_block(records: pa.Array, codec: str, sync: bytes) -> bytes:
    """Returns the bytes of a block of an Avro file. `records` are encoded records, as a binary array."""
    data = joined_bytes(records)
    if codec == "deflate":
        packer = zlib.compressobj(_DEFLATE_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = packer.compress(data) + packer.flush()
    else:
        packed = bytes(data)
    return _long(len(records)) + _sized(packed) + sync


def _sized(data: bytes) -> bytes:
    return _long(len(data)) + data


def _long(number: int) -> bytes:
    """Returns a number that is not negative in Avro's encoding of long: zigzag, with seven bits in each byte."""
    rest = number << 1
    found = bytearray()
    while rest > 0x7F:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)
