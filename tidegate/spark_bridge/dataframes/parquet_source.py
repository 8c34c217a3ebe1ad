"""`ParquetSource`: a staged DataFrame as a source. Each Parquet file is a split that replays exactly from any row.

Rules:
* The rows of a split are the file's rows in file order. So `(split, offset, rows_max)` alone decides what a read
  returns.
* A reader verifies size and checksum of the whole file each time it opens it, before it returns any row.
* Only the columns that are used are decoded, and no row groups of which the program's filter drops all rows.
* A reader holds one file and one decoded row group, and returns zero-copy slices of that group.
* A read stops at the end of its row group, so it may return fewer rows than asked for. Offsets stay exact.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from tidegate.connectors.files.row_groups import RowGroups
from tidegate.connectors.pushed_filters import Rows
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.spark_bridge.dataframes.manifest import StagedFile, read_manifest
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError, CorruptionError, NotFoundError
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store
from tidegate.storage.schemas.one_batch import slice_from

_RANGE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """A bounded source over the files that `stage_dataframe` wrote under `url`.

    `schema` is that of every batch; `staged` that of the files, if these have more columns. Only `needed` rows count.
    """

    url: str
    files: tuple[StagedFile, ...]
    schema: pa.Schema
    staged: pa.Schema | None = None
    needed: Rows = None

    @classmethod
    def open(cls, url: str) -> ParquetSource:
        """The source staged at `url`, by this process or another one.

        Raises NotFoundError if no staging has finished there, CorruptionError for a damaged manifest.
        """
        manifest = read_manifest(open_store(url))
        return cls(url, manifest.files, manifest.schema)

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(file.rows for file in self.files)

    def splits(self) -> Sequence[SourceSplit]:
        """One split for each file, in the order of the DataFrame's partitions. Empty for an empty DataFrame."""
        return tuple(SourceSplit(file.path, encode(file), file.rows) for file in self.files)

    def projected(self, columns: Sequence[str]) -> ParquetSource:
        """The same files, of which only these columns are read."""
        wanted = pa.schema([self.schema.field(name) for name in columns])
        return replace(self, schema=wanted, staged=self.staged or self.schema)

    def filtered(self, rows: Rows) -> ParquetSource:
        """The same files, of which only these rows count."""
        return replace(self, needed=rows)

    def reader(self) -> SourceReader:
        """A reader for one subtask."""
        return ParquetReader(self.url, self.schema, self.staged, self.needed)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A verified file."""

    file: StagedFile
    parquet: pq.ParquetFile
    groups: RowGroups


class ParquetReader:
    """Reads the splits of a `ParquetSource`. Called from one thread at a time."""

    def __init__(self, url: str, schema: pa.Schema, staged: pa.Schema | None = None, needed: Rows = None) -> None:
        """Opens nothing yet. The paths of splits are relative to `url`; `staged` is the schema of the files."""
        self._url = url
        self._schema = schema
        self._needed = needed
        self._staged = schema if staged is None else staged
        self._open: _OpenFile | None = None
        self._group_index = -1
        self._group: list[pa.RecordBatch] | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Up to `rows_max` rows from `offset` on, to the end of the row group at most: a zero-copy slice.

        Raises ConfigurationError for an offset outside the split, and NotFoundError or CorruptionError if the file is
        gone or is not the one that was staged.
        """
        opened = self._opened(decode(split.payload))
        rows = opened.file.rows
        if not 0 <= offset <= rows or rows_max < 1:
            raise ConfigurationError(
                f"cannot read {rows_max} rows from row {offset} of {split.split_id}, which has {rows} rows. "
                "Was the job restored with another source?"
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
        """Release the file and the decoded row group. A later read opens the file again."""
        self._group_index, self._group = -1, None
        opened, self._open = self._open, None
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
            raise CorruptionError(f"{file.path} at {self._url} is not a Parquet file: {error}") from error
        groups = RowGroups(parquet, self._schema, self._needed)
        if groups.rows != file.rows or not parquet.schema_arrow.equals(self._staged):
            raise CorruptionError(
                f"{file.path} at {self._url} has {groups.rows} rows of {parquet.schema_arrow.to_string()}; "
                f"the source says {file.rows} rows of {self._staged.to_string()}. Stage the DataFrame again."
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
    """A whole remote file, in parts. The store bounds the time of a request, so each asks for little."""
    # Ask for one byte more than was staged, to notice a file that has grown.
    end = file.size_bytes + 1
    parts = [store.read(file.path, at, min(_RANGE_BYTES, end - at)) for at in range(0, end, _RANGE_BYTES)]
    return b"".join(parts)


def local_root(url: str) -> Path | None:
    """The folder of a local url ("/a/b", "file:///a/b"). None for any other file system."""
    if get_protocol(url) not in ("file", "local"):
        return None
    return Path(LocalFileSystem._strip_protocol(url))
