"""`OpenFile`: the rows of a file that must stay as it was when it was taken.

Rules:

- Size and time of change are compared before the first row is read and after the last one. A file that is written while
  it is read would be cut anywhere.
- What can not be read is an UnreadableFileError, which names the file; a restart does not help. Storage that does not
  answer is a StorageError, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from tidegate.actors.sources.files.formats import open_rows
from tidegate.actors.sources.files.lanes import FileAt
from tidegate.actors.sources.files.store_file import StoreFile
from tidegate.actors.sources.pushed_filters import Rows
from tidegate.storage.errors import ConfigurationError, NotFoundError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, join_url


class UnreadableFileError(ConfigurationError):
    """A file of the input is damaged, has other columns, was changed, or is gone."""


class OpenFile:
    """One file of a folder. The rows come in file order."""

    def __init__(
        self,
        store: FileSystemStore,
        file: FileAt,
        kind: str,
        schema: pa.Schema,
        rows: Rows = None,
        constants: pa.RecordBatch | None = None,
        *,
        may_lack: bool = False,
    ) -> None:
        """Only `rows` count; `constants` and `may_lack` as of `open_rows`. Raises UnreadableFileError, StorageError."""
        self.path = file.path
        self._store = store
        self._file = file
        self._url = join_url(store.url, file.path)
        self.compare()
        self._bytes = StoreFile(store, file.path, file.size_bytes)
        with reading(self._bytes):
            self._rows = open_rows(self._bytes, file.path, kind, schema, rows, constants, may_lack=may_lack)

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """Rows from `row` on; None behind the last one. Raises UnreadableFileError, StorageError."""
        with reading(self._bytes):
            batch = self._rows.read(row, rows_max)
        if batch is None:
            self.compare()
        return batch

    def next_row(self, row: int) -> int:
        """The first row from `row` on that may count."""
        return self._rows.next_row(row)

    def compare(self) -> None:
        try:
            now = self._store.info(self._file.path)
        except NotFoundError as error:
            raise UnreadableFileError(
                f"{self._url} is gone, and not all of it was read; put it back as it was, or leave such files out "
                '(from_files(on_error="skip"))'
            ) from error
        if (now.size_bytes, now.modified_at_ms or 0) != (self._file.size_bytes, self._file.modified_at_ms):
            raise UnreadableFileError(
                f"{self._url} was changed while it was read: it had {self._file.size_bytes:,} bytes and has "
                f"{now.size_bytes:,}. Files must be complete when they get their name: write them under a name that "
                'begins with "_" or ".", or elsewhere in the same storage, and rename them'
            )


@contextmanager
def reading(file: StoreFile) -> Iterator[None]:
    """Errors of what reads a file name it; those of its storage come as they were."""
    try:
        yield
    except StorageError:
        raise
    except (ConfigurationError, pa.ArrowException, ValueError, KeyError, OSError) as error:
        if file.failure is not None:
            raise file.failure from error
        raise UnreadableFileError(
            f"{file.url} cannot be read: {error}; mend or remove it, or leave such files out "
            '(from_files(on_error="skip"))'
        ) from error
