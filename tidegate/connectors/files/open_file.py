"""`OpenFile` and `OpenText`: read the rows of a file, and detect if the file changes meanwhile.

Rules:

- With each byte range that is read, size, modification time and ETag (if the storage has ETags) of the file are
  compared. So rows of a changed file are never returned.
- The file is compared once more after its last row: a file that grows while it is read could be cut anywhere.
- A file that cannot be read is an UnreadableFileError, which names the file and what to do; a restart does not help.
  Storage that does not answer is a StorageError.
- Only the requested columns are read, with the order and types of the schema. A value that does not fit its type is an
  error, and so is a missing column.
- Parquet is read by row groups (`formats/parquet.py`), text from the beginning (`text_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal, Protocol, get_args

import pyarrow as pa

from tidegate.connectors.bad_rows import RowsRead
from tidegate.connectors.files.store_file import StoreFile, without_compression
from tidegate.connectors.files.text_rows import TextFormat, TextRows
from tidegate.connectors.formats.avro_file import AvroRows, avro_file_schema
from tidegate.connectors.formats.parquet import LIMIT_BYTES, ParquetRows, TooLargeError, parquet_schema
from tidegate.connectors.formats.text import InferredTypeError
from tidegate.connectors.pushed_filters import Rows
from tidegate.storage.codec import wire
from tidegate.storage.errors import ConfigurationError, NotFoundError, StorageError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.file_system_store import FileSystemStore, join_url

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class UnreadableFileError(ConfigurationError):
    """Raised if an input file is damaged, has other columns, has changed since reading began, or no longer exists."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice sentences at the end of error texts about an input file. Each kind of source has different advice."""

    changed: str
    unreadable: str
    """Advice for a file that is damaged or no longer exists."""
    too_large: str
    """Advice for a row or a Parquet page that exceeds the size limit."""


OF_FILES = Advice(
    'Files must be complete when they get their name: write them under a name that begins with "_" or ".", or '
    "elsewhere in the same storage, and rename them",
    'Correct it, or skip what cannot be read by from_files(bad_rows="skip"), or "side" to keep it in a stream',
    'Or skip the rest of the file by from_files(bad_rows="skip"), or "side" to keep it in a stream',
)


@wire
@dataclass(frozen=True, slots=True)
class FileAt:
    """A file to read, with its size and modification time when reading began, and the index of the first row that was
    not read yet.
    """

    path: str
    size_bytes: int
    modified_at_ms: int
    row: int = 0
    tag: str = ""
    """The ETag of the file. Empty if a listing found the file, or if the storage has no ETags."""

    @staticmethod
    def of(file: FileInfo) -> FileAt:
        """Returns a position at the first row of a file, with the file's present size and modification time."""
        return FileAt(file.path, file.size_bytes, file.modified_at_ms or 0, tag=file.tag)


class TakenFile:
    """Reads the bytes of an input file that must not change while a job reads it.

    Raises an error once the file has changed.
    """

    def __init__(self, store: FileSystemStore, file: FileAt, advice: Advice) -> None:
        """Prepares reading the file. `open` then opens it."""
        self._store = store
        self._file = file
        self._url = join_url(store.url, file.path)
        self.advice = advice

    def compare(self) -> None:
        """Compares the file with its state when reading began.

        Raises UnreadableFileError if the file has changed or no longer exists, and StorageError.
        """
        with self._there():
            now = self._store.info(self._file.path)
        self._check(now)

    def open(self) -> StoreFile:
        """Opens the file. Reading from it raises UnreadableFileError if the file has changed, and StorageError."""
        return StoreFile(self._url, self._file.size_bytes, self._range)

    def _range(self, at: int, size: int) -> bytes:
        with self._there():
            data, now = self._store.read_with_info(self._file.path, at, size)
        self._check(now)
        return data

    def _check(self, now: FileInfo) -> None:
        if (difference := difference_of(self._file, now)) is not None:
            raise UnreadableFileError(
                f"{self._url} was changed after the job found it: {difference}. {self.advice.changed}"
            )

    @contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except NotFoundError as error:
            raise UnreadableFileError(
                f"{self._url} was deleted before all of it was read. {self.advice.unreadable}"
            ) from error


class OpenFile:
    """Reads the rows of one Parquet or Avro file, in file order."""

    def __init__(
        self,
        store: FileSystemStore,
        file: FileAt,
        advice: Advice,
        schema: pa.Schema,
        rows: Rows = None,
        constants: pa.RecordBatch | None = None,
        *,
        may_lack: bool = False,
        limit_bytes: int = LIMIT_BYTES,
        is_avro: bool = False,
    ) -> None:
        """Opens the file. `rows` is a filter that selects the rows which the program needs. The other arguments are as
        for `open_rows`.

        Raises UnreadableFileError, StorageError.
        """
        self.path = file.path
        self._taken = TakenFile(store, file, advice)
        self._bytes = self._taken.open()
        with reading(self._bytes, advice):
            if is_avro:
                self._rows: FileRows = open_avro(self._bytes, schema, constants, limit_bytes)
            else:
                self._rows = open_rows(
                    self._bytes, file.path, schema, rows, constants, may_lack=may_lack, limit_bytes=limit_bytes
                )

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """Returns up to `rows_max` rows from row `row` on, or None after the last row.

        Raises UnreadableFileError, StorageError.
        """
        with reading(self._bytes, self._taken.advice):
            batch = self._rows.read(row, rows_max)
        if batch is None:
            self.compare()
        return batch

    def read_rows(self, row: int, rows_max: int) -> RowsRead | None:
        """Returns up to `rows_max` rows from row `row` on, as a `RowsRead` without dead letters. None after the last
        row.
        """
        batch = self.read(row, rows_max)
        return None if batch is None else RowsRead(batch, None, batch.num_rows)

    def next_row(self, row: int) -> int:
        """Returns the index of the first row, from `row` on, that the program's filter may keep."""
        return self._rows.next_row(row)

    def compare(self) -> None:
        """Raises UnreadableFileError if the file has changed or no longer exists, and StorageError."""
        self._taken.compare()


class OpenText:
    """Reads the rows of one text file (CSV, JSON or plain text) in file order, and its dead letters."""

    def __init__(
        self,
        store: FileSystemStore,
        file: FileAt,
        advice: Advice,
        form: TextFormat,
        schema: pa.Schema,
        constants: pa.RecordBatch | None = None,
        *,
        fails: bool = True,
    ) -> None:
        """Opens the file.

        `constants` is one row with the columns that have one value in all rows. With `fails`, a bad row is an error.
        """
        self.path = file.path
        self._taken = TakenFile(store, file, advice)
        self._bytes = self._taken.open()
        wanted = without_constants(schema, constants)
        self._rows = TextRows(self._bytes, file.path, form, wanted, partial(_with_constants, schema, constants), fails)

    def read_rows(self, row: int, rows_max: int) -> RowsRead | None:
        """Returns up to `rows_max` rows from row `row` on, or None after the last row.

        Raises UnreadableFileError, StorageError.
        """
        with reading(self._bytes, self._taken.advice):
            found = self._rows.read(row, rows_max)
        if found is None:
            self._taken.compare()
        return found

    def next_row(self, row: int) -> int:
        """Returns `row`, because rows of text cannot be skipped without reading them."""
        return row


def difference_of(file: FileAt, now: FileInfo) -> str | None:
    """Describes how a file differs from its state when reading began. Returns None if it is unchanged."""
    before = file.size_bytes, file.modified_at_ms
    if before == (after := (now.size_bytes, now.modified_at_ms or 0)):
        if not file.tag or not now.tag or file.tag == now.tag:
            return None
        return f"it had the ETag {file.tag} and has {now.tag}"
    return f"it had {_words(*before)} and has {_words(*after)}"


def _words(size_bytes: int, modified_at_ms: int) -> str:
    try:
        time = (_EPOCH + timedelta(milliseconds=modified_at_ms)).isoformat(timespec="milliseconds")
    except OverflowError:  # a file may be dated after the year 9999
        time = f"{modified_at_ms:,} ms since 1970"
    return f"{size_bytes:,} bytes of {time}"


@contextmanager
def reading(file: StoreFile, advice: Advice) -> Iterator[None]:
    """Returns a context that converts errors of a reader to UnreadableFileError with the name of the file. Storage
    errors pass unchanged.
    """
    try:
        yield
    except (StorageError, UnreadableFileError):
        raise
    except (ConfigurationError, pa.ArrowException, ValueError, KeyError, OSError) as error:
        if file.failure is not None:
            raise file.failure from error
        if isinstance(error, InferredTypeError):  # It has its own advice, which is not to skip rows.
            raise UnreadableFileError(f"{file.url} cannot be read: {error}") from error
        what_to_do = advice.too_large if isinstance(error, TooLargeError) else advice.unreadable
        raise UnreadableFileError(f"{file.url} cannot be read: {error}. {what_to_do}") from error


FileFormat = Literal["parquet", "avro", "csv", "json", "text"]
FORMATS: tuple[str, ...] = get_args(FileFormat)
_SUFFIXES = {
    ".parquet": "parquet",
    ".avro": "avro",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".txt": "text",
}


class FileRows(Protocol):
    """Reads the rows of one open file."""

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """Returns up to `rows_max` rows from row `row` on, or None after the last row."""
        ...

    def next_row(self, row: int) -> int:
        """Returns the index of the first row, from `row` on, that the program's filter may keep."""
        ...


def format_of(path: str) -> str | None:
    """Returns the format that the suffix of a file name or pattern implies, or None."""
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
    """Opens a Parquet file to read the columns of a schema. `rows` is a filter that selects the rows which the program
    needs.

    - `constants`: one row with columns that have this value in all rows, even if the file has such columns.
    - `may_lack`: any other column that the file lacks is null.
    - `limit_bytes`: limit of the decoded size of a row, and of large pages in total, if they are highly compressed.

    Raises ConfigurationError, ArrowInvalid, StorageError.
    """
    return ParquetRows(pa.PythonFile(file, mode="r"), path, schema, rows, constants, may_lack, limit_bytes)


def open_avro(
    file: StoreFile, schema: pa.Schema, constants: pa.RecordBatch | None, limit_bytes: int = LIMIT_BYTES
) -> FileRows:
    """Opens an Avro file to read the columns of a schema. `constants`, `limit_bytes`: as for `open_rows`."""
    wanted = without_constants(schema, constants)
    return AvroRows(file, file.size(), wanted, partial(_with_constants, schema, constants), limit_bytes)


def schema_of(file: StoreFile, kind: str = "parquet", columns: Sequence[str] | None = None) -> pa.Schema:
    """Returns the columns of a Parquet or Avro file. `kind` is "parquet" or "avro".

    `columns`: the columns of an Avro file that are needed, so that others may have types that have no column.
    """
    if kind == "avro":
        return avro_file_schema(file, columns)
    return parquet_schema(pa.PythonFile(file, mode="r")).remove_metadata()


def without_constants(schema: pa.Schema, constants: pa.RecordBatch | None) -> pa.Schema:
    """Returns the columns that the file itself must have: all columns of the schema that are not constant."""
    known = () if constants is None else constants.schema.names
    return pa.schema([field for field in schema if field.name not in known])


def _with_constants(schema: pa.Schema, constants: pa.RecordBatch | None, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns rows of a file with the constant columns added."""
    if constants is None:
        return batch
    table = completed(pa.Table.from_batches([batch]), batch.num_rows, schema, constants)
    return table.combine_chunks().to_batches()[0]


def completed(table: pa.Table, rows: int, schema: pa.Schema, constants: pa.RecordBatch | None) -> pa.Table:
    """Returns the rows with all columns of a schema, in its order.

    Constant columns are added, and missing columns as nulls.
    """

    def column(field: pa.Field) -> pa.Array | pa.ChunkedArray:
        if constants is not None and field.name in constants.schema.names:
            return pa.repeat(constants.column(field.name)[0], rows)
        return table[field.name] if field.name in table.schema.names else pa.nulls(rows, field.type)

    return pa.table({field.name: column(field) for field in schema})
