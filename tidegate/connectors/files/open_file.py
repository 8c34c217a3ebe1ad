"""`OpenFile`: the rows of a file that must stay as it was when it was taken.

Rules:

- Each range of its bytes must be of the file that was taken, by size, time of change, and the storage's own name for
  its bytes (the ETag of S3) where it was asked for. So no row of another file ever comes, and none of a mixture.
- It is looked at once more behind the last row: a file that grew while it was read would have been cut anywhere.
- What can not be read is an UnreadableFileError, which names the file and says what to do; a restart does not help.
  Storage that does not answer is a StorageError, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from tidegate.connectors.bad_rows import RowsRead
from tidegate.connectors.files.formats import completed, open_rows, without_constants
from tidegate.connectors.files.lanes import FileAt
from tidegate.connectors.files.parquet_pieces import LIMIT_BYTES, TooLargeError
from tidegate.connectors.files.store_file import StoreFile
from tidegate.connectors.files.text_rows import TextFormat, TextRows
from tidegate.connectors.pushed_filters import Rows
from tidegate.storage.errors import ConfigurationError, NotFoundError, StorageError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.file_system_store import FileSystemStore, join_url

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class UnreadableFileError(ConfigurationError):
    """A file of the input is damaged, has other columns, was changed, or is gone."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a file, as a sentence that ends an error. It differs from source to source."""

    changed: str
    unreadable: str
    """It is damaged, or gone."""
    too_large: str
    """A row or a page of it exceeds the limit."""


OF_FILES = Advice(
    'Files must be complete when they get their name: write them under a name that begins with "_" or ".", or '
    "elsewhere in the same storage, and rename them",
    'Correct it, or leave out what cannot be read: from_files(bad_rows="skip"), or "side" to keep it in a stream',
    'Or leave out the rest of the file: from_files(bad_rows="skip"), or "side" to keep it in a stream',
)


class TakenFile:
    """A file that was taken: its bytes, as long as it is the same."""

    def __init__(self, store: FileSystemStore, file: FileAt, advice: Advice) -> None:
        """Nothing is read yet."""
        self._store = store
        self._file = file
        self._url = join_url(store.url, file.path)
        self.advice = advice

    def compare(self) -> None:
        """Look at it. Raises UnreadableFileError if it is another one or gone, and StorageError."""
        with self._there():
            now = self._store.info(self._file.path)
        self._check(now)

    def open(self) -> StoreFile:
        """Its bytes. Reads of them raise as `compare`."""
        return StoreFile(self._url, self._file.size_bytes, self._range)

    def _range(self, at: int, size: int) -> bytes:
        with self._there():
            data, now = self._store.read_with_info(self._file.path, at, size)
        self._check(now)
        return data

    def _check(self, now: FileInfo) -> None:
        if (difference := difference_of(self._file, now)) is not None:
            raise UnreadableFileError(
                f"{self._url} was changed since the job has found it: {difference}. {self.advice.changed}"
            )

    @contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except NotFoundError as error:
            raise UnreadableFileError(
                f"{self._url} is gone, and not all of it was read. {self.advice.unreadable}"
            ) from error


class OpenFile:
    """The rows of one Parquet file, in file order."""

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
    ) -> None:
        """Only `rows` count; the other arguments as of `open_rows`. Raises UnreadableFileError, StorageError."""
        self.path = file.path
        self._taken = TakenFile(store, file, advice)
        self._bytes = self._taken.open()
        with reading(self._bytes, advice):
            self._rows = open_rows(
                self._bytes, file.path, schema, rows, constants, may_lack=may_lack, limit_bytes=limit_bytes
            )

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """Rows from `row` on; None behind the last one. Raises UnreadableFileError, StorageError."""
        with reading(self._bytes, self._taken.advice):
            batch = self._rows.read(row, rows_max)
        if batch is None:
            self.compare()
        return batch

    def read_rows(self, row: int, rows_max: int) -> RowsRead | None:
        """The same, as text is read."""
        batch = self.read(row, rows_max)
        return None if batch is None else RowsRead(batch, None, batch.num_rows)

    def next_row(self, row: int) -> int:
        """The first row from `row` on that may count."""
        return self._rows.next_row(row)

    def compare(self) -> None:
        """Raises UnreadableFileError if the file is another one by now or gone, and StorageError."""
        self._taken.compare()


class OpenText:
    """The rows of one file of text, in file order, and its dead letters."""

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
        """`constants`: one row with columns that are the same in all rows. `fails`: bad rows are errors."""
        self.path = file.path
        self._taken = TakenFile(store, file, advice)
        self._bytes = self._taken.open()
        wanted = without_constants(schema, constants)

        def complete(batch: pa.RecordBatch) -> pa.RecordBatch:
            if constants is None:
                return batch
            table = completed(pa.Table.from_batches([batch]), batch.num_rows, schema, constants)
            return table.combine_chunks().to_batches()[0]

        self._rows = TextRows(self._bytes, file.path, form, wanted, complete, fails)

    def read_rows(self, row: int, rows_max: int) -> RowsRead | None:
        """Rows from `row` on; None behind the last one. Raises UnreadableFileError, StorageError."""
        with reading(self._bytes, self._taken.advice):
            found = self._rows.read(row, rows_max)
        if found is None:
            self._taken.compare()
        return found

    def next_row(self, row: int) -> int:
        """Nothing is known of text before it is read."""
        return row


def difference_of(file: FileAt, now: FileInfo) -> str | None:
    """What has changed of a file that was taken; None if it is the same."""
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
    """Errors of what reads a file name it; those of its storage come as they were."""
    try:
        yield
    except (StorageError, UnreadableFileError):
        raise
    except (ConfigurationError, pa.ArrowException, ValueError, KeyError, OSError) as error:
        if file.failure is not None:
            raise file.failure from error
        what_to_do = advice.too_large if isinstance(error, TooLargeError) else advice.unreadable
        raise UnreadableFileError(f"{file.url} cannot be read: {error}. {what_to_do}") from error
