"""`open_rows`: the rows of a Parquet file, in file order, from any row on; and what format a name tells.

Rules:

- Only the columns that are wanted are read, and they come as the schema says: in its order, with its types. A value
  that does not fit its type is an error; a column that the file does not have as well.
- Parquet is read by row groups, so any row is found at once. Text is read by `sources/files/text_rows.py`.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.actors.sources.files.row_groups import RowGroups
from tidegate.actors.sources.files.store_file import StoreFile, without_compression
from tidegate.actors.sources.pushed_filters import Rows
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.one_batch import slice_from

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
) -> FileRows:
    """The rows of a Parquet file with the columns of a schema, of which only `rows` count.

    `constants`: one row with columns that are the same in all rows, whatever the file has there. With `may_lack` any
    other column that the file lacks is null.

    Raises ConfigurationError, ArrowInvalid, StorageError.
    """
    return _ParquetRows(file, path, schema, rows, constants, may_lack)


def schema_of(file: StoreFile) -> pa.Schema:
    """The columns of a Parquet file."""
    return pq.ParquetFile(pa.PythonFile(file, mode="r")).schema_arrow.remove_metadata()


class _ParquetRows:
    def __init__(
        self,
        file: StoreFile,
        path: str,
        schema: pa.Schema,
        rows: Rows,
        constants: pa.RecordBatch | None,
        may_lack: bool,
    ) -> None:
        # Spark writes some timestamps in an old form, which Arrow takes for nanoseconds; there is room for fewer years.
        unit = "us" if may_lack else None
        self._parquet = pq.ParquetFile(pa.PythonFile(file, mode="r"), pre_buffer=True, coerce_int96_timestamp_unit=unit)
        has = self._parquet.schema_arrow
        # What a file has of a column that is constant does not count.
        wanted = without_constants(schema, constants)
        _check_columns(path, has, pa.schema([field for field in wanted if not (may_lack and field.nullable)]))
        self._stored = [name for name in wanted.names if name in has.names]
        self._path, self._schema, self._constants = path, schema, constants
        self._completes = may_lack or constants is not None
        self._groups = RowGroups(self._parquet, wanted, rows)
        self._group_index = -1
        self._group: list[pa.RecordBatch] = []

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """A slice of a row group."""
        if row >= self._groups.rows:
            return None
        index = self._groups.group_of(row)
        if self._group_index != index:
            table = self._parquet.read_row_group(index, columns=self._stored, use_threads=False)
            if self._completes:
                table = completed(table, self._groups.rows_of(index), self._schema, self._constants)
            self._group_index, self._group = index, _as_schema(table, self._schema).combine_chunks().to_batches()
        return slice_from(self._group, row - self._groups.starts[index], rows_max)

    def next_row(self, row: int) -> int:
        """Behind row groups without rows that count."""
        return self._groups.next_row(row)


def _check_columns(path: str, found: pa.Schema, wanted: pa.Schema) -> None:
    missing = [name for name in wanted.names if name not in found.names]
    if missing:
        raise ConfigurationError(f"{path} has no column {missing[0]!r}; it has {found.names}")


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


def _as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    return table.select(schema.names).cast(schema)
