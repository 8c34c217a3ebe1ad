"""`FileSink` writes rows to files of a folder, exactly once.

Rules:

- A writer encodes rows as they come. A file is complete when a checkpoint begins, or when it reaches the target size.
  Complete files wait in checkpoint storage.
- After the checkpoint, the subtask that owns the bucket copies each file into the folder, under a name that was fixed
  when the file was prepared. A file appears complete or not at all. A commit that is repeated finds the name there, and
  leaves the file as it is, so two committers of one file do no harm.
- Files are never changed or deleted by the sink. Names are unique to the job, the subtask and the attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.connectors.committing_sink import (
    DEFAULT_BUCKETS,
    Committable,
    Committer,
    CommittingContext,
    CommittingSink,
    CommittingWriter,
    CommitToken,
    SinkFiles,
)
from tidegate.connectors.files.encoders import FileEncoder, FileEncoding
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store

_COPIED_BYTES = 16 * 2**20
"""Bytes of a file that are in memory while it is copied."""


@wire
@dataclass(frozen=True, slots=True)
class PreparedFile:
    """A complete file in checkpoint storage: its name in the folder, and its size."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class FileSink(CommittingSink):
    """Writes files of one encoding to the folder `url`. A file ends after about `file_bytes`."""

    url: str
    encoding: FileEncoding
    file_bytes: int
    buckets: int = DEFAULT_BUCKETS

    def check(self) -> None:
        """Raises ConfigurationError if the folder cannot be listed."""
        try:
            open_store(self.url).list("")
        except StorageError as error:
            raise ConfigurationError(
                f"to_files({self.url!r}): the folder cannot be listed: {error}; check the URL, and that this "
                "process may read the folder"
            ) from error

    def open_writer(self, context: CommittingContext) -> CommittingWriter:
        """Returns the writer of one subtask."""
        return FileWriter(self.encoding, self.file_bytes, context)

    def open_committer(self, context: CommittingContext) -> Committer:
        """Returns the committer of one subtask."""
        return FileCommitter(open_store(self.url), context.files)


class FileWriter(CommittingWriter):
    """Encodes the rows of one subtask as files."""

    def __init__(self, encoding: FileEncoding, file_bytes: int, context: CommittingContext) -> None:
        self._encoding = encoding
        self._file_bytes = file_bytes
        self._context = context
        self._encoder: FileEncoder | None = None
        self._number = 0
        self._complete: list[Committable] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Adds rows to the current file. Raises ConfigurationError for a row that the file cannot hold."""
        if self._encoder is None:
            self._encoder = self._encoding.encoder()
        self._encoder.add(batch)
        if self._encoder.size_bytes >= self._file_bytes:
            self._finish()

    def prepare(self, checkpoint_id: int) -> Sequence[Committable]:
        """Ends the current file, and returns all files since the last call."""
        self._finish()
        found = self._complete
        self._complete = []
        return found

    def _finish(self) -> None:
        if self._encoder is None:
            return
        name = f"part-{self._context.prefix}-{self._number:06d}{self._encoding.suffix}"
        pieces = self._encoder.finish()
        path = self._context.files.write(pieces)
        self._encoder = None
        self._number += 1
        prepared = encode(PreparedFile(name, sum(map(len, pieces))))
        self._complete.append(Committable(self._context.buckets[0], prepared, (path,)))


class FileCommitter(Committer):
    """Copies prepared files into the folder."""

    def __init__(self, store: Store, files: SinkFiles) -> None:
        self._store = store
        self._files = files

    def commit(self, token: CommitToken, committables: Sequence[Committable]) -> None:
        """Copies the files that are not there yet. Raises StorageError."""
        for each in committables:
            file: PreparedFile = decode(each.data)
            if not self._store.exists(file.name):
                (path,) = each.files
                self._store.write(file.name, _pieces(self._files, path, file.size_bytes))


def _pieces(files: SinkFiles, path: str, size_bytes: int) -> Iterator[bytes]:
    for offset in range(0, size_bytes, _COPIED_BYTES):
        yield files.read(path, offset, min(_COPIED_BYTES, size_bytes - offset))
