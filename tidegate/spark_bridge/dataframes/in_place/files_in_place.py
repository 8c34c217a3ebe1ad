"""`FilesInPlace`: the files of a DataFrame as a source, read where they are.

`place_files` makes it at submission, of a DataFrame whose plan does nothing but read Parquet files. Rules:

- What it reads is written down before the job starts: files with size and time of change, columns, the filter. A job
  that is restored goes on with that, whatever the DataFrame is by then.
- A split is a run of row groups of a file. Its rows are those of the file, before the filter: offsets count them all.
- A file that is another one by the time it is read fails the job.
- Every file has been looked at (`footers.py`) before it counts. If one of them is for Spark to read, all are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.connectors.files.lanes import FileAt
from tidegate.connectors.files.open_file import Advice, OpenFile, TakenFile, UnreadableFileError
from tidegate.connectors.pushed_filters import ColumnTest, Rows, rows_renamed
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.spark_bridge.dataframes.in_place.footers import why_only_spark
from tidegate.spark_bridge.dataframes.in_place.plan import FilesOfPlan, FoundFile, NeedsSparkError
from tidegate.spark_bridge.dataframes.in_place.row_condition import RowCondition, column_tests, conjuncts, mask_of
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError, CorruptionError, StorageError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.file_system_store import FileSystemStore, join_url, open_store
from tidegate.storage.files.store import Store

MANIFEST_PATH = "_files"
MANIFEST_VERSION = 1
SPLIT_ROWS = 1_000_000
"""A split ends with the row group with which it has so many rows."""
_MAGIC = b"TGFILES"
_LOOKS_AT_ONCE = 16
_STAGE = (
    "The files of a DataFrame that only reads files must stay as they are while the job runs, and for whoever restores "
    "it. Put it back as it was, its time of change included, and restore. Or start without restore, with "
    "from_dataframe(stage=True), which writes the rows down when the job is submitted"
)
_ADVICE = Advice(_STAGE, _STAGE, "Shorten the values, or leave the column out, before from_dataframe")


@wire
@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows of a file from `first` on, and the columns that stand in the names of its folders: one row."""

    file: FileAt
    first: int
    rows: int
    constants: pa.RecordBatch


@wire
@dataclass(frozen=True, slots=True)
class FilesManifest:
    """What the job reads: `relation` has all columns of the files below `url`, of which `schema` is called `stored`."""

    url: str
    schema: pa.Schema
    stored: tuple[str, ...]
    relation: pa.Schema
    condition: RowCondition | None
    splits: tuple[PlacedRows, ...]


@dataclass(frozen=True, slots=True)
class FilesInPlace:
    """A bounded source. `schema` is that of every batch."""

    manifest: FilesManifest
    schema: pa.Schema
    needed: Rows = None
    """Rows that count for the program, besides the condition."""

    @staticmethod
    def of(manifest: FilesManifest) -> FilesInPlace:
        """The source that reads all columns of a manifest."""
        return FilesInPlace(manifest, manifest.schema)

    def splits(self) -> Sequence[SourceSplit]:
        """In the order of files."""
        return tuple(
            SourceSplit(f"{each.file.path}:{each.first}" if each.first else each.file.path, encode(each), each.rows)
            for each in self.manifest.splits
        )

    def check_unread(self, splits: Sequence[SourceSplit]) -> None:
        """Look at the files that a restored job has still to read. Raises UnreadableFileError, StorageError."""
        store = open_store(self.manifest.url)
        files = {placed.file for placed in map(_placed_rows, splits)}
        with ThreadPoolExecutor(_LOOKS_AT_ONCE, "files") as threads:
            for _ in threads.map(lambda file: TakenFile(store, file, _ADVICE).compare(), files):
                pass

    def projected(self, columns: Sequence[str]) -> FilesInPlace:
        """The same files, of which only these columns are read."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def filtered(self, rows: Rows) -> FilesInPlace:
        """The same files, of which only these rows count."""
        return replace(self, needed=rows)

    def reader(self) -> SourceReader:
        """A reader for one subtask."""
        return _Reader(self)


class _Reader:
    """Reads one file at a time."""

    def __init__(self, source: FilesInPlace) -> None:
        manifest = source.manifest
        stored = dict(zip(manifest.schema.names, manifest.stored, strict=True))
        self._schema = source.schema
        self._columns = [stored[name] for name in source.schema.names]
        self._condition = manifest.condition
        used = {*self._columns, *(set() if self._condition is None else self._condition.columns)}
        self._read = pa.schema([field for field in manifest.relation if field.name in used])
        self._rows = _both(rows_renamed(stored, source.needed), column_tests(self._condition))
        self._store = open_store(manifest.url)
        self._open: OpenFile | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Rows of a file for which the condition is true. Raises UnreadableFileError, StorageError."""
        placed = _placed_rows(split)
        if not 0 <= offset <= placed.rows:
            raise ConfigurationError(f"{split.split_id!r} has no row {offset:,}; was it another source?")
        return self._rows_from(placed, offset, rows_max)

    def close(self) -> None:
        """Let go of the file."""
        self._open = None

    def _rows_from(self, placed: PlacedRows, offset: int, rows_max: int) -> ReadResult:
        if self._open is None or self._open.path != placed.file.path:
            self._open = OpenFile(
                self._store, placed.file, _ADVICE, self._read, self._rows, placed.constants, may_lack=True
            )
        at, end = placed.first + offset, placed.first + placed.rows
        counts = min(self._open.next_row(at), end)
        batch = self._open.read(at, min(rows_max, end - at)) if counts == at < end else None
        if batch is None and counts == at < end:
            raise UnreadableFileError(f"{placed.file.path} has no row {at:,}. {_ADVICE.unreadable}")
        taken = counts - at if batch is None else batch.num_rows
        kept = None if batch is None else self._kept(batch)
        rows = 0 if kept is None else kept.num_rows
        return ReadResult(kept, offset + taken, at_end=at + taken == end, skipped=taken - rows)

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        if self._condition is not None:
            batch = batch.filter(mask_of(self._condition, batch))
        if not batch.num_rows:
            return None
        return pa.record_batch([batch.column(name) for name in self._columns], schema=self._schema)


def place_files(plan: FilesOfPlan, url: str) -> FilesInPlace:
    """Look at every file of a plan, and write down under `url` what a job reads of them.

    Raises NeedsSparkError if Spark reads one of the files otherwise, and StorageError.
    """
    root, files = _below_one_folder([(file, _url_of(file.path)) for file in plan.files])
    store = open_store(root)
    used = {*plan.stored, *(set() if plan.condition is None else plan.condition.columns)}
    stored = pa.schema([f for f in plan.relation if f.name in used and f.name not in plan.partitions.names])
    chosen = [(file, path) for file, path in files if _may_have_rows(plan.condition, plan.folders[file.folder])]

    def look(file: FoundFile, path: str) -> list[PlacedRows]:
        return list(_placed(store, file, path, stored, plan.folders[file.folder]))

    with ThreadPoolExecutor(_LOOKS_AT_ONCE, "footers") as threads:
        found = list(threads.map(lambda each: look(*each), chosen))
    splits = tuple(placed for each in found for placed in each)
    manifest = FilesManifest(root, plan.schema, plan.stored, plan.relation, plan.condition, splits)
    open_store(url).create(MANIFEST_PATH, seal(_MAGIC, MANIFEST_VERSION, encode(manifest)))
    return FilesInPlace.of(manifest)


def placed_files(store: Store) -> FilesInPlace | None:
    """The source that was written down there by `place_files`; None if there is none."""
    if not store.exists(MANIFEST_PATH):
        return None
    where = join_url(store.url, MANIFEST_PATH)
    manifest = decode(unseal(_MAGIC, MANIFEST_VERSION, store.read(MANIFEST_PATH), where))
    if not isinstance(manifest, FilesManifest):
        raise CorruptionError(f"{where} holds a {type(manifest).__name__}, not what a job reads")
    return FilesInPlace.of(manifest)


def _placed_rows(split: SourceSplit) -> PlacedRows:
    placed = decode(split.payload)
    if not isinstance(placed, PlacedRows):
        raise ConfigurationError(f"{split.split_id!r} is no part of a file here; was it another source?")
    return placed


def _placed(
    store: FileSystemStore, file: FoundFile, path: str, stored: pa.Schema, constants: pa.RecordBatch
) -> Iterator[PlacedRows]:
    """The parts of a file. Raises NeedsSparkError."""
    try:
        at = FileAt.of(store.info(path))
        if at.size_bytes != file.size_bytes:
            raise NeedsSparkError(f"{file.path} has changed since Spark has listed it")
        parquet = pq.ParquetFile(pa.PythonFile(TakenFile(store, at, _ADVICE).open(), mode="r"))
    except (StorageError, ConfigurationError, pa.ArrowException, OSError, ValueError) as error:
        raise NeedsSparkError(f"{file.path} cannot be read without Spark: {error}") from error
    if (reason := why_only_spark(parquet, stored)) is not None:
        raise NeedsSparkError(f"{file.path} {reason}")
    first = rows = 0
    for group in range(parquet.metadata.num_row_groups):
        rows += parquet.metadata.row_group(group).num_rows
        if rows >= SPLIT_ROWS:
            yield PlacedRows(at, first, rows, constants)
            first, rows = first + rows, 0
    if rows:
        yield PlacedRows(at, first, rows, constants)


def _url_of(path: str) -> tuple[str, str]:
    """Scheme and path of a file as tidegate's storage has them."""
    scheme, _, rest = path.partition(":")
    if scheme == "file" and rest.startswith("/"):
        return "", "/" + rest.lstrip("/")
    if scheme in ("s3", "s3a", "s3n") and rest.startswith("//"):
        return "s3://", rest.lstrip("/")
    raise NeedsSparkError(f"{path} is in a storage that tidegate may not reach")


def _below_one_folder(
    files: Sequence[tuple[FoundFile, tuple[str, str]]],
) -> tuple[str, list[tuple[FoundFile, str]]]:
    """The folder below which all files are, and what they are called there."""
    if not files:
        raise NeedsSparkError("it reads no files")
    schemes = {scheme for _, (scheme, _) in files}
    folder = os.path.commonpath([os.path.dirname(path) for _, (_, path) in files])
    if len(schemes) > 1 or not folder:
        raise NeedsSparkError("its files are in several storages")
    return schemes.pop() + folder, [(file, os.path.relpath(path, folder)) for file, (_, path) in files]


def _may_have_rows(condition: RowCondition | None, constants: pa.RecordBatch) -> bool:
    """Whether there can be rows that are kept in a folder whose columns have these values."""
    known = set(constants.schema.names)
    judged = (each for each in conjuncts(condition) if each.columns and each.columns <= known)
    return all(mask_of(each, constants)[0].as_py() for each in judged)


def _both(rows: Rows, tests: tuple[ColumnTest, ...]) -> Rows:
    """Rows that count for the program and pass the tests of the DataFrame's own filter."""
    if rows is None:
        return (tests,) if tests else None
    return tuple((*each, *tests) for each in rows)
