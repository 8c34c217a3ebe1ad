"""`FilesSource`: the files that a pattern names at submission. `FolderSource`: a folder to which files are added.

A split of the first is a file, and one of the second a lane (`lanes.py`). Rules:

- All that a reader knows of a position is in the split, so any reader goes on from any checkpoint.
- A reader of a folder lists it when a lane has no file left, and at most once in an interval. Intervals begin at the
  same times for all readers, so that files that come together are found at about the same time. What was found and
  not read yet is one listing, however many lanes there are.
- Row groups of which the program's filter drops all rows are not read. With `skip` they are: what cannot be read in
  them decides what else is.
- With `skip` a file that cannot be read, or only in part, is left there with a warning. Without it that ends the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa

from tidegate.actors.sources.files.formats import FORMATS, format_of, schema_of
from tidegate.actors.sources.files.hive_folders import folder_values
from tidegate.actors.sources.files.lanes import FileAt, Lane, LaneState, digest_of, lane_of
from tidegate.actors.sources.files.open_file import OF_FILES, OpenFile, UnreadableFileError, reading
from tidegate.actors.sources.files.patterns import FilePattern
from tidegate.actors.sources.files.store_file import StoreFile
from tidegate.actors.sources.pushed_filters import Rows
from tidegate.actors.sources.source import ReadResult, Source, SourceReader, SourceSplit
from tidegate.storage.clock import now_ms
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError, NotFoundError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.schemas.plain_types import plain_schema

log = logging.getLogger(__name__)
_FILES_A_READ = 100
"""So many files without rows are passed over in one read."""


@dataclass(frozen=True, slots=True)
class FilesSource:
    """A bounded source over files, in the order of their names. `schema` is that of every batch."""

    pattern: FilePattern
    kind: str
    schema: pa.Schema
    skip: bool = False
    rows: Rows = None
    """Rows that count."""
    partitions: pa.Schema | None = None
    """Columns that stand in the names of folders."""

    def splits(self) -> Sequence[SourceSplit]:
        """One for each file that is there now. ConfigurationError for one outside of the folders of `partitions`."""
        files = self.pattern.files()
        for file in files:
            _constants(file.path, self.schema, self.partitions)
        return tuple(SourceSplit(file.path, encode(FileAt.of(file))) for file in files)

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """A restored job reads the files that the first one had found."""
        strange = [
            split.split_id for split in splits if split.payload and not isinstance(decode(split.payload), FileAt)
        ]
        if strange:
            raise ConfigurationError(f"{strange[0]!r} is no file; was it another source, or one with discover=?")

    def projected(self, columns: Sequence[str]) -> FilesSource:
        """The same files, of which only these columns are read."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def filtered(self, rows: Rows) -> FilesSource:
        """The same files, of which only these rows count."""
        return self if self.skip else replace(self, rows=rows)

    def reader(self) -> SourceReader:
        """A reader for one subtask."""
        return _FilesReader(self)


class _FilesReader:
    def __init__(self, source: FilesSource) -> None:
        self._source = source
        self._store = source.pattern.store()
        self._open: OpenFile | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Rows of a file. Raises UnreadableFileError, StorageError."""
        source = self._source
        try:
            if self._open is None or self._open.path != split.split_id:
                constants = _constants(split.split_id, source.schema, source.partitions)
                file = decode(split.payload)
                self._open = OpenFile(self._store, file, OF_FILES, source.kind, source.schema, source.rows, constants)
            if (counts := self._open.next_row(offset)) > offset:
                return ReadResult(None, counts, at_end=False, skipped=counts - offset)
            batch = self._open.read(offset, rows_max)
        except UnreadableFileError as error:
            if not source.skip:
                raise
            log.warning("the rest of a file is left out: %s", error)
            return ReadResult(None, offset, at_end=True)
        return ReadResult(batch, offset + (0 if batch is None else batch.num_rows), at_end=batch is None)

    def close(self) -> None:
        """Let go of the file."""
        self._open = None


@dataclass(frozen=True, slots=True)
class FolderSource:
    """An unbounded source over the files of a folder, looked for every `discover_ms`."""

    pattern: FilePattern
    kind: str
    schema: pa.Schema
    discover_ms: int
    age_ms: int
    lanes: int
    skip: bool = False
    clock: Callable[[], int] = field(default=now_ms, compare=False)
    unbounded: Literal[True] = True
    partitions: pa.Schema | None = None
    """Columns that stand in the names of folders."""

    def splits(self) -> Sequence[SourceSplit]:
        """The lanes."""
        payload = encode(LaneState(self.lanes))
        return tuple(SourceSplit(f"lane {number} of {self.lanes}", payload) for number in range(self.lanes))

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """The lanes must be all there, and as many as before: they say who reads a file."""
        now, before = {split.split_id for split in self.splits()}, {split.split_id for split in splits}
        if now != before:
            had = f"{len(before)} splits ({min(before, default='none')!r})"
            raise ConfigurationError(
                f"its files were dealt out to {had}, and now there are {self.lanes}; give splits={len(before)}, or "
                "start without restore"
            )

    def projected(self, columns: Sequence[str]) -> FolderSource:
        """The same folder, of which only these columns are read."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def reader(self) -> SourceReader:
        """A reader for one subtask."""
        return _FolderReader(self)


class _FolderReader:
    def __init__(self, source: FolderSource) -> None:
        self._source = source
        self._store = source.pattern.store()
        self._lanes: dict[str, Lane] = {}
        self._open: dict[str, OpenFile] = {}
        self._listing: dict[int, list[tuple[bytes, FileInfo]]] = {}
        """The files of each lane when the folder was last listed."""
        self._interval = -1
        """The interval in which that was."""
        self._waiting: dict[str, tuple[int, list[FileInfo]]] = {}
        """The files that a lane has still to read, the first one last, and the interval of the listing."""

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Rows of the file that a lane is at; no rows if there is no file. Raises UnreadableFileError, StorageError."""
        lane = self._lanes.get(split.split_id)
        if lane is None or lane.payload != split.payload:
            lane = self._lanes[split.split_id] = Lane.of(split.payload)
            self._open.pop(split.split_id, None)
            self._waiting.pop(split.split_id, None)
        for _ in range(_FILES_A_READ):
            if lane.state.file is None and not self._take(split.split_id, lane):
                break
            batch = self._rows(split.split_id, lane, rows_max)
            if batch is not None:
                lane.advance(batch.num_rows)
                return ReadResult(batch, offset + batch.num_rows, at_end=False, payload=lane.payload)
            lane.leave(self._source.age_ms)
            self._open.pop(split.split_id, None)
        moved = lane.payload if lane.payload != split.payload else None
        return ReadResult(None, offset, at_end=False, payload=moved)

    def close(self) -> None:
        """Let go of all files."""
        self._open.clear()
        self._lanes.clear()

    def _rows(self, split_id: str, lane: Lane, rows_max: int) -> pa.RecordBatch | None:
        """The next rows of the file of a lane; None behind the last one that can be had."""
        file, source = lane.state.file, self._source
        assert file is not None
        try:
            opened = self._open.get(split_id)
            if opened is None or opened.path != file.path:
                constants = _constants(file.path, source.schema, source.partitions)
                opened = OpenFile(self._store, file, OF_FILES, source.kind, source.schema, None, constants)
                self._open[split_id] = opened
            return opened.read(file.row, rows_max)
        except UnreadableFileError as error:
            if not source.skip:
                raise
            log.warning("the rest of a file is left out: %s", error)
            return None

    def _take(self, split_id: str, lane: Lane) -> bool:
        """Begin with the next file of a lane, if there is one."""
        interval, waiting = self._waiting.get(split_id, (-1, []))
        if not waiting:
            self._look()
            if interval != self._interval:
                number = int(split_id.split()[1])
                waiting = lane.choose(self._listing.get(number, ()), self._source.age_ms)
                self._waiting[split_id] = self._interval, waiting
        while waiting:
            path = waiting.pop().path
            try:
                lane.take(self._store.info(path))
            except NotFoundError:
                log.warning("%s is gone before it was read", path)
                continue
            return True
        return False

    def _look(self) -> None:
        """List the folder, unless that was done in this interval."""
        interval = self._source.clock() // self._source.discover_ms
        if interval == self._interval:
            return
        listing: dict[int, list[tuple[bytes, FileInfo]]] = {}
        for file in self._source.pattern.files():
            digest = digest_of(file.path)
            listing.setdefault(lane_of(digest, self._source.lanes), []).append((digest, file))
        self._listing, self._interval = listing, interval


def source_of_files(
    url: str,
    kind: str | None,
    schema: pa.Schema | None,
    columns: Sequence[str] | None,
    folder: Callable[[FilePattern, str, pa.Schema], Source] | None,
    skip: bool,
    partitions: pa.Schema | None = None,
) -> Source:
    """The source for a pattern; `folder` makes it if files are looked for while the job runs.

    `partitions`: columns that stand in the names of folders, behind those of `schema`.

    Without a schema it is that of the first file in the order of names. Raises ConfigurationError, StorageError.
    """
    named = f"from_files({url!r})"
    pattern, found = FilePattern.of(url), format_of(url)
    if kind is not None and kind not in FORMATS:
        raise ConfigurationError(f"{named}: format={kind!r} is none of {', '.join(FORMATS)}")
    files: Sequence[FileInfo] = ()
    if schema is None or kind is None or folder is None:
        files = pattern.files()
        if not files and (schema is None or folder is None):
            wanted = "no file matches" if folder is None else "no file matches yet, so give the schema"
            raise ConfigurationError(f"{named}: {wanted}; names that begin with '_' or '.' do not count")
        found = found or next((format_of(file.path) for file in files), None)
    kind = kind or found
    if kind is None:
        raise ConfigurationError(
            f"{named}: the name does not tell the format; give format=, one of {', '.join(FORMATS)}"
        )
    if schema is None:
        schema = plain_schema(_schema_of(pattern, files[0], kind))
    if partitions is not None:
        schema = pa.schema([*(field for field in schema if field.name not in partitions.names), *partitions])
    if columns is not None:
        missing = [name for name in columns if name not in schema.names]
        if missing or not columns:
            raise ConfigurationError(f"{named}: columns={list(columns)!r}; choose among {schema.names}")
        schema = pa.schema([schema.field(name) for name in columns])
    if folder is not None:
        return folder(pattern, kind, schema)
    return FilesSource(pattern, kind, schema, skip, partitions=partitions)


def _constants(path: str, schema: pa.Schema, partitions: pa.Schema | None) -> pa.RecordBatch | None:
    if partitions is None:
        return None
    return folder_values(path, pa.schema([field for field in partitions if field.name in schema.names]))


def _schema_of(pattern: FilePattern, file: FileInfo, kind: str) -> pa.Schema:
    opened = StoreFile.of(pattern.store(), file.path, file.size_bytes)
    with reading(opened, OF_FILES):
        return schema_of(opened, file.path, kind)
