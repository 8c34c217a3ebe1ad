"""`RowStage` stages the rows of a sink in files until their checkpoint has completed and the sink can commit them.

The sinks of Kafka, databases, Delta and Iceberg use it. Rules:

- A file is an Arrow stream of limited size. Its `StagedPart` belongs into the committable, next to the path, so a
  commit finds out if the file has changed.
- Files whose commit happens in the same process also stay in memory, up to `RECENT_BYTES_MAX`, so that the commit does
  not read them. A commit takes them out, and a repeated commit reads the file.
- Buffered rows own their memory, so the limits count the bytes that are really kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from tidegate.state.kernels.partition import compact
from tidegate.storage.codec import wire
from tidegate.storage.errors import CorruptionError, NotFoundError

RECENT_BYTES_MAX = 128 << 20
"""Maximum bytes of staged files that a process also keeps in memory until they are committed."""


@wire
@dataclass(frozen=True, slots=True)
class StagedPart:
    """Describes a staged file. `checksum` is xxh3 with 64 bits over its bytes."""

    rows: int
    size_bytes: int
    checksum: int


class RowStage:
    """Buffers the rows of one writer, and writes them to files. Not thread-safe."""

    def __init__(
        self,
        write: Callable[[Iterable[memoryview]], str],
        *,
        bytes_max: int,
        rows_max: int | None = None,
        chunk_rows: int | None = None,
        convert: Callable[[list[pa.RecordBatch]], Sequence[pa.RecordBatch]] | None = None,
        compression: str | None = "lz4",
        recent_of: str | None = None,
    ) -> None:
        """Creates an empty stage.

        - `write`: stores chunks of bytes durably in a new file, and returns its path. It may iterate over the chunks
          again.
        - `bytes_max`, `rows_max`: size of the buffer that is written to one file. A larger batch has its own file.
        - `chunk_rows`: larger batches are split into batches of this number of rows.
        - `convert`: called once for each file, returns the batches to write in place of the buffered ones.
        - `recent_of`: prefix of the writer, if commits happen in this process (`staged_rows`). None: files do not stay
          in memory.
        """
        self._write = write
        self._bytes_max = bytes_max
        self._rows_max = rows_max
        self._chunk_rows = chunk_rows
        self._convert = convert
        self._compression = compression
        self._recent_of = recent_of
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._rows = 0
        self._files: list[tuple[str, StagedPart]] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Buffers rows. First writes the buffer to a file if it would become too large."""
        batch = compact(batch)  # A slice would keep its whole batch in memory.
        step = self._chunk_rows or max(1, batch.num_rows)
        for start in range(0, batch.num_rows, step):
            self._add(batch.slice(start, step))

    def _add(self, batch: pa.RecordBatch) -> None:
        size_bytes = batch.nbytes
        too_large = self._bytes + size_bytes > self._bytes_max
        too_long = self._rows_max is not None and self._rows + batch.num_rows > self._rows_max
        if too_large or too_long:
            self._flush()
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += size_bytes

    def take(self) -> list[tuple[str, StagedPart]]:
        """Writes the buffered rows. Returns path and part of each file since the last call, in order."""
        self._flush()
        files = self._files
        self._files = []
        return files

    def close(self) -> None:
        """Releases memory. The files stay."""
        if self._recent_of is not None:
            _RECENT.drop(self._recent_of)

    def _flush(self) -> None:
        if not self._batches:
            return
        batches: Sequence[pa.RecordBatch] = self._batches
        self._batches, self._bytes, self._rows = [], 0, 0
        if self._convert is not None:
            batches = self._convert(list(batches))
        content = _Content(batches, self._compression)
        path = self._write(content)
        rows = sum(batch.num_rows for batch in batches)
        self._files.append((path, StagedPart(rows, content.size_bytes, content.checksum)))
        if self._recent_of is not None:
            _RECENT.add(self._recent_of, path, batches)


class _Content:
    """The bytes of a staged file: an Arrow stream. It may be iterated again, so a write can be repeated.

    `size_bytes` and `checksum` describe the bytes of the last complete iteration.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], compression: str | None) -> None:
        self._batches = batches
        self._compressed = None if compression is None else _compressed(batches, compression)
        self.size_bytes = 0
        self.checksum = 0

    def __iter__(self) -> Iterator[memoryview]:
        checksum = xxhash.xxh3_64()
        size_bytes = 0
        for chunk in self._serialized() if self._compressed is None else (self._compressed,):
            checksum.update(chunk)
            size_bytes += len(chunk)
            yield chunk
        self.size_bytes = size_bytes
        self.checksum = checksum.intdigest()

    def _serialized(self) -> Iterator[memoryview]:
        """Yields one batch at a time, so that the bytes of all of them are never in memory."""
        for each in (self._batches[0].schema, *self._batches):
            yield memoryview(each.serialize())


def _compressed(batches: Sequence[pa.RecordBatch], compression: str) -> memoryview:
    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(out, batches[0].schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return memoryview(out.getvalue())


def staged_rows(
    read: Callable[[str], bytes], path: str, part: StagedPart, *, recent_of: str | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a staged file. Raises CorruptionError if it is missing, or its size or checksum has changed.

    `read` returns the content of the file. It is not called if the file is still in memory (`recent_of`: prefix of the
    writer of this subtask).
    """
    recent = None if recent_of is None else _RECENT.take(recent_of, path)
    if recent is not None:
        yield from recent
        return
    try:
        data = read(path)
    except (NotFoundError, FileNotFoundError) as error:
        # A commit is repeated after errors that may pass, and a file that was deleted does not come back.
        raise CorruptionError(
            f"the staged rows in {path} are missing, and {part.rows:,} rows cannot be committed. The file was deleted "
            "before its commit, or the target was put back to a time before it. Put the file back, or restore another "
            "checkpoint"
        ) from error
    if len(data) != part.size_bytes or xxhash.xxh3_64_intdigest(data) != part.checksum:
        raise CorruptionError(
            f"the staged rows in {path} have changed since they were written ({len(data)} bytes; {part.size_bytes} "
            "were written). They cannot be committed; restore an earlier checkpoint"
        )
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        yield from reader


def forget_staged(paths: Iterable[str], *, recent_of: str) -> None:
    """Releases the memory of committed files, also of files that a token covered, which no commit has read."""
    for path in paths:
        _RECENT.take(recent_of, path)


class RecentFiles:
    """Staged files that are still in memory, by the prefix of their writer and their path. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._lock = threading.Lock()
        self._files: dict[tuple[str, str], tuple[Sequence[pa.RecordBatch], int]] = {}

    def add(self, writer: str, path: str, batches: Sequence[pa.RecordBatch]) -> None:
        """Stores the batches of a file, and drops the oldest files if the limit is exceeded."""
        size_bytes = pa.Table.from_batches(batches).get_total_buffer_size()
        with self._lock:
            self._files[writer, path] = batches, size_bytes
            self._bytes += size_bytes
            while self._bytes > self._bytes_max:
                self._bytes -= self._files.pop(next(iter(self._files)))[1]

    def take(self, writer: str, path: str) -> Sequence[pa.RecordBatch] | None:
        """Removes a file and returns its batches, or None if it is not in memory."""
        with self._lock:
            batches, size_bytes = self._files.pop((writer, path), (None, 0))
            self._bytes -= size_bytes
            return batches

    def drop(self, writer: str) -> None:
        """Drops all files of a writer."""
        with self._lock:
            for key in [key for key in self._files if key[0] == writer]:
                self._bytes -= self._files.pop(key)[1]


_RECENT = RecentFiles(RECENT_BYTES_MAX)
"""The staged files in memory of this process. Writer and committer of a subtask run in the same process."""
