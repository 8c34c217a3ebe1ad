"""`open_rows`: the rows of a file in one of three formats, in file order, from any row on.

Rules:

- Only the columns that are wanted are read, and they come as the schema says: in its order, with its types. A value
  that does not fit its type is an error; a column that the file does not have as well.
- Parquet is read by row groups, so any row is found at once. Text is read from its begin: from another row on, the rows
  before it are read again and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol, get_args

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from tidegate.actors.sources.files.row_groups import RowGroups
from tidegate.actors.sources.files.store_file import StoreFile, text_stream, without_compression
from tidegate.actors.sources.pushed_filters import Rows
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.one_batch import slice_from

FileFormat = Literal["parquet", "csv", "json"]
FORMATS: tuple[str, ...] = get_args(FileFormat)
_BLOCK_BYTES = 4 * 2**20
"""A line must fit into a block."""
_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}


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
    kind: str,
    schema: pa.Schema,
    rows: Rows = None,
    constants: pa.RecordBatch | None = None,
    *,
    may_lack: bool = False,
) -> FileRows:
    """The rows of a file with the columns of a schema, of which only `rows` count.

    `constants`: one row with columns that are the same in all rows, whatever the file has there. With `may_lack` any
    other column that a Parquet file lacks is null.

    Raises ConfigurationError, ArrowInvalid, StorageError.
    """
    if kind == "parquet":
        return _ParquetRows(file, path, schema, rows, constants, may_lack)
    return _TextRows(file, path, kind, schema, constants)


def schema_of(file: StoreFile, path: str, kind: str) -> pa.Schema:
    """The columns of a file; those of text as Arrow takes its first block."""
    if kind == "parquet":
        found = pq.ParquetFile(pa.PythonFile(file, mode="r")).schema_arrow
    else:
        with _text_batches(file, path, kind, None) as batches:
            found = batches.schema
    return found.remove_metadata()


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
        wanted = _without(schema, constants)
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
                table = _completed(table, self._groups.rows_of(index), self._schema, self._constants)
            self._group_index, self._group = index, _as_schema(table, self._schema).combine_chunks().to_batches()
        return slice_from(self._group, row - self._groups.starts[index], rows_max)

    def next_row(self, row: int) -> int:
        """Behind row groups without rows that count."""
        return self._groups.next_row(row)


class _TextRows:
    def __init__(
        self, file: StoreFile, path: str, kind: str, schema: pa.Schema, constants: pa.RecordBatch | None
    ) -> None:
        self._file, self._path, self._kind, self._schema = file, path, kind, schema
        self._constants = constants
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None
        self._first = -1
        """The number of the first row of the batch."""

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """A slice of what was parsed last; an earlier row begins the file anew."""
        if self._first < 0 or row < self._first:
            self._file.seek(0)
            self._batches = self._parsed()
            self._first, self._batch = 0, next(self._batches, None)
        while self._batch is not None and row >= self._first + self._batch.num_rows:
            self._first += self._batch.num_rows
            self._batch = next(self._batches, None)
        return None if self._batch is None else self._batch.slice(row - self._first, rows_max)

    def next_row(self, row: int) -> int:
        """Nothing is known of text before it is read."""
        return row

    def _parsed(self) -> Iterator[pa.RecordBatch]:
        if not self._file.size():
            return
        wanted = _without(self._schema, self._constants)
        # Without a column there would be no rows.
        with _text_batches(self._file, self._path, self._kind, wanted if len(wanted) else None) as batches:
            if self._kind == "csv":
                _check_columns(self._path, batches.schema, wanted)
            for batch in batches:
                if batch.num_rows:
                    table = pa.Table.from_batches([batch])
                    if self._constants is not None:
                        table = _completed(table, batch.num_rows, self._schema, self._constants)
                    yield _as_schema(table, self._schema).combine_chunks().to_batches()[0]


def _text_batches(file: StoreFile, path: str, kind: str, schema: pa.Schema | None) -> pa.RecordBatchReader:
    stream = text_stream(file, path)
    if kind == "csv":
        return pa_csv.open_csv(
            stream,
            pa_csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            convert_options=pa_csv.ConvertOptions(
                column_types=schema, strings_can_be_null=True, include_columns=None if schema is None else schema.names
            ),
        )
    return pa_json.open_json(
        stream,
        pa_json.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"),
    )


def _check_columns(path: str, found: pa.Schema, wanted: pa.Schema) -> None:
    missing = [name for name in wanted.names if name not in found.names]
    if missing:
        raise ConfigurationError(f"{path} has no column {missing[0]!r}; it has {found.names}")


def _without(schema: pa.Schema, constants: pa.RecordBatch | None) -> pa.Schema:
    known = () if constants is None else constants.schema.names
    return pa.schema([field for field in schema if field.name not in known])


def _completed(table: pa.Table, rows: int, schema: pa.Schema, constants: pa.RecordBatch | None) -> pa.Table:
    """The rows with all columns of a schema."""

    def column(field: pa.Field) -> pa.Array | pa.ChunkedArray:
        if constants is not None and field.name in constants.schema.names:
            return pa.repeat(constants.column(field.name)[0], rows)
        return table[field.name] if field.name in table.schema.names else pa.nulls(rows, field.type)

    return pa.table({field.name: column(field) for field in schema})


def _as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    return table.select(schema.names).cast(schema)
