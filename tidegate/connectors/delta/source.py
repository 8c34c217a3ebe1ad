"""`DeltaSource`: the rows of one version of a Delta Lake table, read from its files without Spark.

A split is a file. Rules:

- The version is chosen once, when the job is submitted. A restored job continues in the files of its checkpoint, even
  if the table has changed. Delta never changes a file; a file that was changed by other means is detected by size and
  time.
- Partition columns have the values from Delta's log. A column that was added to the table is null in older files. Files
  are skipped if the program's filter drops their partition values.
- A table that uses a feature which this source does not support is refused: deletion vectors, column mapping, and later
  features. A table that only enables such a feature, without using it, is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa

from tidegate.connectors.files.open_file import Advice, FileAt, OpenFile
from tidegate.connectors.pushed_filters import Rows
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.schemas.arrow_types import plain_schema
from tidegate.storage.tables.delta_mirror import (
    check_place,
    imported,
    padded_column,
    partition_of_bytes,
    storage_options,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable

_READER_VERSION_MAX = 3
_READ_ALIKE = frozenset(
    {"appendOnly", "deletionVectors", "columnMapping", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
)
"""Reader features of a Delta table that do not change how this source must read it, or that are checked separately."""
_ADVICE = Advice(
    "Delta never changes a file, so something else did; put it back as it was, or start without restore",
    "A vacuum may have deleted it: let vacuums keep files for longer than jobs run (RETAIN n HOURS), and start without "
    "restore; or put it back as it was",
    "Shorten the values, or drop the column, where the table is written",
)


@wire
@dataclass(frozen=True, slots=True)
class DeltaFile:
    """A data file of the table. `constants` has its partition values: one row, encoded as an Arrow stream."""

    file: FileAt
    constants: bytes


@dataclass(frozen=True, slots=True)
class DeltaSource:
    """A bounded source that reads the files of one version of the Delta table at `url`, in commit order."""

    url: str
    version: int
    schema: pa.Schema
    files: tuple[tuple[DeltaFile, int], ...]
    """The data files, each with its number of rows, or -1 if Delta's log does not state it."""
    rows: Rows = None
    """A filter on the rows that the program needs, or None for all rows."""

    @staticmethod
    def open(url: str, version: int | None = None) -> DeltaSource:
        """Opens a version of the table (None: the newest). Raises ConfigurationError, StorageError."""
        store = open_store(url)
        check_place(store.url)
        if version is not None and (not isinstance(version, int) or isinstance(version, bool) or version < 0):
            raise ConfigurationError(f"from_delta({url!r}): version={version!r}; give a whole number from 0 on")
        with _named_errors(url):
            table = imported().DeltaTable(store.url, version=version, storage_options=storage_options(store.url))
            _check_readable(url, table)
            adds = pa.table(table.get_add_actions(flatten=True))
            schema = plain_schema(pa.schema(table.schema().to_arrow()).remove_metadata())
            schema = pa.schema([field.remove_metadata() for field in schema])
            by = table.metadata().partition_columns
        there = {file.path: file for file in store.walk("", follow_links=True)}
        files = []
        for add in adds.sort_by([("modification_time", "ascending"), ("path", "ascending")]).to_pylist():
            path = unquote(add["path"])
            if path not in there:
                raise ConfigurationError(
                    f"from_delta({url!r}): version {table.version()} has the file {path}, which does not exist. A "
                    "vacuum may have deleted it: give a newer version. In a clone it is elsewhere: copy the table"
                )
            constants = {name: pa.array([add[f"partition.{name}"]], schema.field(name).type) for name in by}
            values = pa.record_batch(constants)
            file = DeltaFile(FileAt.of(there[path]), _stream_of(values))
            files.append((file, -1 if add["num_records"] is None else add["num_records"]))
        return DeltaSource(store.url, table.version(), schema, tuple(files))

    def splits(self) -> Sequence[SourceSplit]:
        """Returns one split for each data file."""
        return tuple(SourceSplit(file.file.path, encode(file), rows) for file, rows in self.files)

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError for splits of a checkpoint that another kind of source wrote.

        A restored job reads the files of the version that was found at the first submission.
        """
        if strange := [s.split_id for s in splits if s.payload and not isinstance(decode(s.payload), DeltaFile)]:
            raise ConfigurationError(
                f"its split {strange[0]!r} is not a file of a Delta table; give the source of the checkpoint, or start "
                "without restore"
            )

    def projected(self, columns: Sequence[str]) -> DeltaSource:
        """Returns a copy of the source that reads only these columns."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def filtered(self, rows: Rows) -> DeltaSource:
        """Returns a copy of the source that may skip rows which do not match the filter `rows`."""
        return replace(self, rows=rows)

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return _DeltaReader(self)


class _DeltaReader:
    def __init__(self, source: DeltaSource) -> None:
        self._source = source
        self._store = open_store(source.url)
        self._open: OpenFile | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of the split's file from row `offset`. Raises UnreadableFileError, StorageError."""
        source = self._source
        if self._open is None or self._open.path != split.split_id:
            file = decode(split.payload)
            assert isinstance(file, DeltaFile)
            constants = pa.ipc.open_stream(file.constants).read_next_batch()
            if split.rows >= 0 and not _may_count(constants, source.rows):
                return ReadResult(None, split.rows, at_end=True, skipped=split.rows - offset)
            self._open = OpenFile(self._store, file.file, _ADVICE, source.schema, source.rows, constants, may_lack=True)
        if (counts := self._open.next_row(offset)) > offset:
            return ReadResult(None, counts, at_end=False, skipped=counts - offset)
        batch = self._open.read(offset, rows_max)
        return ReadResult(batch, offset + (0 if batch is None else batch.num_rows), at_end=batch is None)

    def close(self) -> None:
        """Releases the open file."""
        self._open = None


def _may_count(constants: pa.RecordBatch, rows: Rows) -> bool:
    if rows is None:
        return True
    # A job without filters need not load polars.
    from tidegate.connectors.formats.parquet_statistics import may_count

    return may_count(constants, rows)


def _stream_of(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def _check_readable(url: str, table: DeltaTable) -> None:
    """Raises ConfigurationError for a table that uses features which this source does not support, such as deletion
    vectors.
    """
    protocol = table.protocol()
    settings = table.metadata().configuration
    unknown = sorted(set(protocol.reader_features or ()) - _READ_ALIKE)
    reason = None
    if protocol.min_reader_version > _READER_VERSION_MAX or unknown:
        reason = f"needs what only other readers know ({', '.join(unknown) or protocol.min_reader_version})"
    elif settings.get("delta.columnMapping.mode", "none") != "none":
        reason = "has column mapping: its files have other names of columns"
    elif _has_deletion_vectors(table):
        reason = (
            "has deletion vectors: its files have rows that are deleted; REORG TABLE ... APPLY (PURGE) rewrites them"
        )
    elif (name := partition_of_bytes(table)) is not None:
        reason = f"is partitioned by the bytes of {name!r}, which its writers write in different ways"
    elif (declared := padded_column(table)) is not None:
        reason = f"declares column {declared}, whose values readers of Spark fill with spaces"
    if reason is not None:
        raise ConfigurationError(
            f"from_delta({url!r}): version {table.version()} {reason}. Or let Spark read it "
            '(env.from_dataframe(spark.read.format("delta").load(...)))'
        )


def _has_deletion_vectors(table: DeltaTable) -> bool:
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return False
    return bool(pa.table(table.deletion_vectors()).num_rows)


@contextmanager
def _named_errors(url: str) -> Iterator[None]:
    """Returns a context that converts errors of the package `deltalake` to ConfigurationErrors that name the URL of the
    table.
    """
    deltalake = imported()
    try:
        yield
    except deltalake.exceptions.DeltaError as error:
        raise ConfigurationError(
            f"from_delta({url!r}): cannot read the Delta table: {str(error).partition(chr(10))[0]}"
            "; check the URL, and that this process may read it"
        ) from error
