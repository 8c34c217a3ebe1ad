"""`ParquetSource`: a source over a staged DataFrame (written to Parquet files). Each file is a split that replays
exactly from any row.

Rules:
* The rows of a split are the rows of the file in file order. So the result of a read depends only on
  `(split, offset, rows_max)`.
* A reader verifies size and checksum of the whole file each time it opens it, before it returns any row.
* Only the used columns are decoded. Row groups in which no row can match the program's filter are skipped.
* A reader holds one file and one decoded row group, and returns zero-copy slices of that group. A read stops at the end
  of its row group, so it may return fewer rows than requested.
* The manifest is created once, by a conditional create, when every file is complete. So a folder contains a whole
  staged DataFrame or none. It has paths relative to the folder, a checksum of each file, and one of its own.

`write_files` writes such files. Every row group but the last of a file has exactly `rows_per_group` rows, unless it
reaches a limit of bytes first; files are bounded in rows and bytes, and one row group is in memory. The encoding was
measured on int64 (1e6 distinct values) and float64 columns. LZ4 with byte-stream split took 10 bytes a row, and read
126 million rows/s on one core. Dictionaries made files larger, and both reads and writes slower. Strings keep
dictionaries; Parquet drops them by itself when there are too many distinct values.
"""

from __future__ import annotations

import io
import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from tidegate.connectors.formats.parquet import RowGroups
from tidegate.connectors.pushed_filters import Rows
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, CorruptionError, NotFoundError, StorageError
from tidegate.storage.files.envelope import checksum_of, format_checksum, seal, unseal
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store
from tidegate.storage.schemas.batches import slice_from
from tidegate.storage.schemas.exact_casts import misencoded_row

_RANGE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """A bounded source over the files that `stage_dataframe` wrote under `url`.

    Every batch has `schema`. `staged` is the schema of the files, if they have more columns, else None. Rows that do
    not match the filter `needed` may be skipped.
    """

    url: str
    files: tuple[StagedFile, ...]
    schema: pa.Schema
    staged: pa.Schema | None = None
    needed: Rows = None

    @classmethod
    def open(cls, url: str) -> ParquetSource:
        """Opens the source staged at `url`, by this process or another one.

        Raises NotFoundError if no staging has finished there, CorruptionError for a damaged manifest.
        """
        manifest = read_manifest(open_store(url))
        return cls(url, manifest.files, manifest.schema)

    @property
    def rows(self) -> int:
        """Returns the number of rows in all files."""
        return sum(file.rows for file in self.files)

    def splits(self) -> Sequence[SourceSplit]:
        """Returns one split for each file, in the order of the DataFrame's partitions. Empty for an empty DataFrame."""
        return tuple(SourceSplit(file.path, encode(file), file.rows) for file in self.files)

    def projected(self, columns: Sequence[str]) -> ParquetSource:
        """Returns a copy of the source that reads only these columns."""
        wanted = pa.schema([self.schema.field(name) for name in columns])
        return replace(self, schema=wanted, staged=self.staged or self.schema)

    def filtered(self, rows: Rows) -> ParquetSource:
        """Returns a copy of the source that may skip rows which do not match the filter `rows`."""
        return replace(self, needed=rows)

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return ParquetReader(self.url, self.schema, self.staged, self.needed)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """An open file whose size and checksum have been verified."""

    file: StagedFile
    parquet: pq.ParquetFile
    groups: RowGroups


class ParquetReader:
    """Reads the splits of a `ParquetSource`. Called from one thread at a time."""

    def __init__(self, url: str, schema: pa.Schema, staged: pa.Schema | None = None, needed: Rows = None) -> None:
        """Opens nothing yet. The paths of splits are relative to `url`. `staged` is the schema of the files."""
        self._url = url
        self._schema = schema
        self._needed = needed
        self._staged = schema if staged is None else staged
        self._open: _OpenFile | None = None
        self._group_index = -1
        self._group: list[pa.RecordBatch] | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns up to `rows_max` rows from `offset` on, at most to the end of the row group, as a zero-copy slice.

        Raises ConfigurationError for an offset outside the split, and NotFoundError or CorruptionError if the file is
        missing or has changed since it was staged.
        """
        opened = self._opened(decode(split.payload))
        rows = opened.file.rows
        if not 0 <= offset <= rows or rows_max < 1:
            raise ConfigurationError(
                f"cannot read {rows_max} rows from row {offset} of {split.split_id}, which has {rows} rows. "
                "Restore with the source of the checkpoint, or start without restore"
            )
        if offset == rows:
            return ReadResult(None, rows, at_end=True)
        if (counts := opened.groups.next_row(offset)) > offset:
            return ReadResult(None, counts, at_end=counts == rows, skipped=counts - offset)
        index = opened.groups.group_of(offset)
        group = self._decoded(opened, index)
        batch = slice_from(group, offset - opened.groups.starts[index], rows_max)
        next_offset = offset + batch.num_rows
        return ReadResult(batch, next_offset, at_end=next_offset == rows)

    def close(self) -> None:
        """Releases the file and the decoded row group. A later read opens the file again."""
        self._group_index = -1
        self._group = None
        opened = self._open
        self._open = None
        if opened is not None:
            opened.parquet.close(force=True)

    def _opened(self, file: StagedFile) -> _OpenFile:
        if self._open is None or self._open.file != file:
            self.close()
            self._open = self._verified(file)
        return self._open

    def _verified(self, file: StagedFile) -> _OpenFile:
        data = self._bytes_of(file)
        found = checksum_of(memoryview(data)) if data.size == file.size_bytes else None
        if found != file.checksum:
            raise CorruptionError(
                f"{file.path} at {self._url} is not what was staged: it has {data.size} bytes with checksum "
                f"{found or 'not computed'}, staged were {file.size_bytes} with {file.checksum}. Something "
                "wrote into the folder; stage the DataFrame again and start the job without restoring it."
            )
        try:
            # The verified buffer may be a memory map: column chunks are then decompressed from the page cache.
            parquet = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise CorruptionError(
                f"{file.path} at {self._url} is not a Parquet file: {error}"
                "; stage the DataFrame again, and start the job without restore"
            ) from error
        groups = RowGroups(parquet, self._schema, self._needed)
        if groups.rows != file.rows or not parquet.schema_arrow.equals(self._staged):
            raise CorruptionError(
                f"{file.path} at {self._url} has {groups.rows} rows of {parquet.schema_arrow.to_string()}; "
                f"the manifest has {file.rows} rows of {self._staged.to_string()}. Stage the DataFrame again."
            )
        return _OpenFile(file, parquet, groups)

    def _bytes_of(self, file: StagedFile) -> pa.Buffer:
        root = local_root(self._url)
        if root is None:
            return pa.py_buffer(_read_in_ranges(open_store(self._url), file))
        try:
            with (root / file.path).open("rb") as handle:
                # An empty file cannot be mapped. It is no Parquet file either: the check of its size fails.
                size_bytes = handle.seek(0, 2)
                mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size_bytes else b""
        except FileNotFoundError as error:
            raise NotFoundError(
                f"{file.path} is not at {self._url}, where it was staged. Restore the folder, or stage the "
                "DataFrame again; on several nodes the folder must be shared."
            ) from error
        return pa.py_buffer(mapped)

    def _decoded(self, opened: _OpenFile, index: int) -> list[pa.RecordBatch]:
        if self._group is None or self._group_index != index:
            # Measured: threads gain nothing at this size, and they would compete with operators for cores.
            columns = None if self._staged is self._schema else self._schema.names
            table = opened.parquet.read_row_group(index, columns=columns, use_threads=False)
            table = table.replace_schema_metadata(None)
            self._group_index, self._group = index, table.combine_chunks().to_batches()
        return self._group


def _read_in_ranges(store: Store, file: StagedFile) -> bytes:
    """Reads a whole remote file in parts, because the store limits the time of each request."""
    # Request one byte more than was staged, to notice a file that has grown.
    end = file.size_bytes + 1
    parts = [store.read(file.path, at, min(_RANGE_BYTES, end - at)) for at in range(0, end, _RANGE_BYTES)]
    return b"".join(parts)


def local_root(url: str) -> Path | None:
    """Returns the folder of a local URL ("/a/b", "file:///a/b"), or None for any other file system."""
    if get_protocol(url) not in ("file", "local"):
        return None
    return Path(LocalFileSystem._strip_protocol(url))


MANIFEST_PATH = "_staged"
MANIFEST_VERSION = 1

_MAGIC = b"TGSTAGED"


@wire
@dataclass(frozen=True, slots=True)
class StagedFile:
    """A staged Parquet file. `checksum` of its bytes is `xxh3:` and 16 hex digits."""

    path: str
    rows: int
    size_bytes: int
    checksum: str


@wire
@dataclass(frozen=True, slots=True)
class StagedManifest:
    """The files of a staged DataFrame, in the order of its partitions, and their schema."""

    schema: pa.Schema
    files: tuple[StagedFile, ...]


def write_manifest(store: Store, schema: pa.Schema, files: tuple[StagedFile, ...]) -> None:
    """Creates the manifest. Raises AlreadyExistsError if the folder has staged data already."""
    data = seal(_MAGIC, MANIFEST_VERSION, encode(StagedManifest(schema, files)))
    try:
        store.create(MANIFEST_PATH, data)
    except AlreadyExistsError as error:
        raise already_staged(store.url) from error


def already_staged(url: str) -> AlreadyExistsError:
    """Returns the error for a folder that has staged data already."""
    return AlreadyExistsError(
        f"{url} holds a staged DataFrame already. Open it with ParquetSource.open(url), or stage to a new folder."
    )


def read_manifest(store: Store) -> StagedManifest:
    """Returns the manifest of a staging folder.

    Raises NotFoundError if nothing was staged there, CorruptionError for damaged bytes, and CodecError for a manifest
    of a newer tidegate.
    """
    where = f"{store.url}/{MANIFEST_PATH}"
    try:
        data = store.read(MANIFEST_PATH)
    except NotFoundError as error:
        raise NotFoundError(
            f"no staged DataFrame at {store.url} ({MANIFEST_PATH} is not there): staging did not finish, or "
            "the url is another. Stage the DataFrame again."
        ) from error
    manifest = decode(unseal(_MAGIC, MANIFEST_VERSION, data, where))
    if not isinstance(manifest, StagedManifest):
        raise CorruptionError(
            f"{where} holds a {type(manifest).__name__}, not a manifest of staged data"
            "; stage the DataFrame again, and start the job without restore"
        )
    return manifest


ROWS_PER_GROUP = 262_144
FILE_ROWS_MAX = 16 * ROWS_PER_GROUP


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of row groups and files. A row group or file ends when it reaches the first of its limits."""

    rows_per_group: int = ROWS_PER_GROUP
    group_bytes_max: int = 32 * 2**20
    file_rows_max: int = FILE_ROWS_MAX
    file_bytes_max: int = 64 * 2**20


def write_files(
    store: Store, name: str, batches: Iterable[pa.RecordBatch], schema: pa.Schema, limits: FileLimits
) -> Iterator[StagedFile]:
    """Writes batches as `<name>-0000.parquet`, `<name>-0001.parquet`, …, and yields each file when it is complete.

    No file is written if there are no rows. Batches have the columns of `schema` in order, under any names, and are
    cast to it. Raises ConfigurationError for a string that is not UTF-8, and StorageError.
    """
    groups = _row_groups(batches, schema, limits)
    for number in itertools.count():
        first = next(groups, None)
        if first is None:
            return
        path = f"{name}-{number:04d}.parquet"
        encoder = _FileEncoder(schema, limits)
        size_bytes = store.write(path, encoder.chunks(itertools.chain([first], groups)))
        yield encoder.staged(path, size_bytes)


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema, limits: FileLimits) -> Iterator[pa.Table]:
    pending: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, limits.rows_per_group - rows)
            start += part.num_rows
            pending.append(_checked(pa.RecordBatch.from_arrays(part.columns, schema.names).cast(schema)))
            rows += part.num_rows
            size_bytes += part.nbytes
            if rows == limits.rows_per_group or size_bytes >= limits.group_bytes_max:
                yield pa.Table.from_batches(pending, schema)
                pending = []
                rows = 0
                size_bytes = 0
    if pending:
        yield pa.Table.from_batches(pending, schema)


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the batch unchanged.

    Raises ConfigurationError for a string that is not valid UTF-8, which neither Spark nor Arrow checks.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if misencoded_row(column) is not None:
            raise ConfigurationError(
                f"column {name!r} has a string that is not UTF-8; make it bytes, and decode them in the program"
            )
    return batch


class _FileEncoder:
    """Encodes rows as one Parquet file, in chunks of bytes. Counts rows and bytes, and computes the checksum."""

    def __init__(self, schema: pa.Schema, limits: FileLimits) -> None:
        self._schema = schema
        self._limits = limits
        self._rows = 0
        self._size_bytes = 0
        self._digest = xxhash.xxh3_64()

    def chunks(self, groups: Iterator[pa.Table]) -> Iterator[bytes]:
        """Yields the bytes of the file. Consumes row groups until a limit is reached or there are no more."""
        sink = _ChunkSink()
        options = _parquet_options(self._schema)
        with pq.ParquetWriter(sink, self._schema, **options) as writer:
            for group in groups:
                writer.write_table(group, row_group_size=group.num_rows)
                self._rows += group.num_rows
                yield from self._drain(sink)
                if self._rows >= self._limits.file_rows_max or self._size_bytes >= self._limits.file_bytes_max:
                    break
        yield from self._drain(sink)

    def staged(self, path: str, size_bytes: int) -> StagedFile:
        """Returns the description of the written file.

        Raises StorageError if `size_bytes` differs from the encoded size.
        """
        if size_bytes != self._size_bytes:
            raise StorageError(
                f"{path}: the store wrote {size_bytes} of {self._size_bytes} bytes of staged rows; check the free "
                "space of the storage, and execute the job again"
            )
        return StagedFile(path, self._rows, size_bytes, format_checksum(self._digest.intdigest()))

    def _drain(self, sink: _ChunkSink) -> Iterator[bytes]:
        for chunk in sink.take():
            self._size_bytes += len(chunk)
            self._digest.update(chunk)
            yield chunk


class _ChunkSink(io.RawIOBase):
    """A file object that collects written bytes until `take` returns them, so that the whole file is never in
    memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chunks: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        chunk = bytes(memoryview(data))  # type: ignore[arg-type]
        self._chunks.append(chunk)
        self._position += len(chunk)
        return len(chunk)

    def tell(self) -> int:
        return self._position

    def take(self) -> list[bytes]:
        """Removes and returns the chunks that were written since the last call."""
        taken = self._chunks
        self._chunks = []
        return taken


def _parquet_options(schema: pa.Schema) -> dict[str, object]:
    split = [f.name for f in schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    text = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_binary(f.type)]
    return {
        "compression": "lz4",
        "use_dictionary": text or False,
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") or None,
        # Readers skip row groups by their statistics.
        "write_statistics": True,
    }
