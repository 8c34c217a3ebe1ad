"""`open_rows`: the rows of a Parquet file, in file order, from any row on; and what format a name tells.

Rules:

- Only the columns that are wanted are read, and they come as the schema says: in its order, with its types. A value
  that does not fit its type is an error; a column that the file does not have as well.
- Parquet is read by row groups (`parquet_rows.py`), so any row is found soon. Text is read by
  `sources/files/text_rows.py`.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import pyarrow as pa

from tidegate.connectors.files.parquet_pieces import LIMIT_BYTES
from tidegate.connectors.files.parquet_rows import ParquetRows, parquet_schema
from tidegate.connectors.files.store_file import StoreFile, without_compression
from tidegate.connectors.pushed_filters import Rows

FileFormat = Literal["parquet", "csv", "json", "text"]
FORMATS: tuple[str, ...] = get_args(FileFormat)
_SUFFIXES = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".txt": "text",
}


class FileRows(Protocol):
    """The rows of one open file."""

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """Up to `rows_max` rows from `row` on; None behind the last row."""
        ...

    def next_row(self, row: int) -> int:
        """The first row from `row` on that may count for the program."""
        ...


def format_of(path: str) -> str | None:
    """The format that the name of a file, or of files, tells."""
    bare = without_compression(path)
    return next((known for suffix, known in _SUFFIXES.items() if bare.endswith(suffix)), None)


def open_rows(
    file: StoreFile,
    path: str,
    schema: pa.Schema,
    rows: Rows = None,
    constants: pa.RecordBatch | None = None,
    *,
    may_lack: bool = False,
    limit_bytes: int = LIMIT_BYTES,
) -> FileRows:
    """The rows of a Parquet file with the columns of a schema, of which only `rows` count.

    `constants`: one row with columns that are the same in all rows, whatever the file has there. With `may_lack` any
    other column that the file lacks is null. `limit_bytes`: what a row may have, and large pages together, where few
    bytes of the file stand for them (`parquet_pieces.py`).

    Raises ConfigurationError, ArrowInvalid, StorageError.
    """
    return ParquetRows(pa.PythonFile(file, mode="r"), path, schema, rows, constants, may_lack, limit_bytes)


def schema_of(file: StoreFile) -> pa.Schema:
    """The columns of a Parquet file."""
    return parquet_schema(pa.PythonFile(file, mode="r")).remove_metadata()


def without_constants(schema: pa.Schema, constants: pa.RecordBatch | None) -> pa.Schema:
    """The columns that a file must have itself."""
    known = () if constants is None else constants.schema.names
    return pa.schema([field for field in schema if field.name not in known])


def completed(table: pa.Table, rows: int, schema: pa.Schema, constants: pa.RecordBatch | None) -> pa.Table:
    """The rows with all columns of a schema."""

    def column(field: pa.Field) -> pa.Array | pa.ChunkedArray:
        if constants is not None and field.name in constants.schema.names:
            return pa.repeat(constants.column(field.name)[0], rows)
        return table[field.name] if field.name in table.schema.names else pa.nulls(rows, field.type)

    return pa.table({field.name: column(field) for field in schema})
