"""`FilesSource` reads the files that match a pattern at submission. `FolderSource` reads a folder to which files are
added.

A split of a `FilesSource` is a file, and a split of a `FolderSource` is a `Lane`, which reads the files of one hash
partition. Rules:

- The split contains the complete position of a reader, so any reader continues from any checkpoint.
- A reader of a folder lists it when a lane has no file left, and at most once in an interval. Intervals begin at the
  same times for all readers, so that files that appear together are found at about the same time. Files that were found
  and not read yet are kept in one listing for all lanes of a reader.
- Row groups of which the program's filter drops all rows are skipped. They are read if bad rows are not errors, because
  which rows can be read then depends on every value. For the same reason all columns of text are read in that case.
- A file that cannot be read to its end produces one dead letter for its unread part.

Rules of lanes, of which a folder that grows has a fixed number:

- The hash of a file's path determines its lane. Two subtasks therefore never read the same file, wherever they run, and
  need no coordination.
- A lane reads its files in the order of modification time, then path, one file at a time.
- A modification time may be wrong: before 1970, or in the future. The newest time that a lane has seen is never later
  than the clock, so a file with a future date does not make all later files too old.
- The payload of a lane lists the files that it has read, and is stored in each checkpoint together with their rows.
  Each file is therefore read once, whatever restarts.
- A lane remembers files up to `age` older than the newest file that it has read (Spark's maxFileAge). A file that is
  already older when it appears is skipped, because it is unknown whether it was read. This bounds the payload. Files
  are forgotten many at a time, up to an eighth of `age` later, so that the cost of one more file does not depend on
  their number.
- A file is never read twice, even if it changes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import pyarrow as pa
import xxhash

from tidegate.connectors.bad_rows import BadRows, BadRowsLog, RowsRead
from tidegate.connectors.files.open_file import (
    FORMATS,
    OF_FILES,
    FileAt,
    OpenFile,
    OpenText,
    UnreadableFileError,
    format_of,
    reading,
    schema_of,
)
from tidegate.connectors.files.patterns import FilePattern, folder_values, folders_named
from tidegate.connectors.files.store_file import StoreFile, text_stream
from tidegate.connectors.files.text_rows import BLOCK_BYTES, LETTERS, TextFormat
from tidegate.connectors.formats.parquet import LIMIT_BYTES
from tidegate.connectors.formats.text import InferredTypeError, TextOptions
from tidegate.connectors.pushed_filters import Rows
from tidegate.connectors.source import ReadResult, Source, SourceReader, SourceSplit
from tidegate.storage.clock import now_ms
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError, NotFoundError
from tidegate.storage.extras import need
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.file_system_store import FileSystemStore, join_url
from tidegate.storage.schemas.arrow_types import plain_schema

log = logging.getLogger(__name__)
_FILES_A_READ = 100
"""Limit of files without rows that one read skips."""
_DIGEST_BYTES = 16
_TIME_BYTES = 8
_ENTRY_BYTES = _DIGEST_BYTES + _TIME_BYTES
_LATER = 8
REMEMBERED_FILES_MAX = 1_000_000
"""Limit of files that a lane remembers. Each needs 24 bytes in the checkpoint."""
_PLACE = "line {line} of {file} (byte {offset})"
_Open: TypeAlias = OpenFile | OpenText


@dataclass(frozen=True, slots=True)
class FileForm:
    """The format and schema of the files of a source. `text` is the text format, or None for Parquet and Avro.

    `schema` has all columns, including partition columns.
    """

    schema: pa.Schema
    text: TextFormat | None = None
    bad_rows: BadRows = "fail"
    partitions: pa.Schema | None = None
    """The partition columns, whose values are in the names of folders. None without partitions."""
    limit_bytes: int = LIMIT_BYTES
    """For Parquet: the limit in bytes of a decoded row, and of large pages in total, if they are highly compressed."""
    is_avro: bool = False
    """True for Avro files. `limit_bytes` is then the limit of a decompressed block."""

    @property
    def fails(self) -> bool:
        """Returns True if a bad row fails the job."""
        return self.bad_rows == "fail"

    @property
    def bad_rows_schema(self) -> pa.Schema | None:
        """Returns the schema of the stream of dead letters, or None if there is no such stream."""
        return LETTERS if self.bad_rows == "side" else None

    def opened(self, store: FileSystemStore, file: FileAt, schema: pa.Schema, rows: Rows = None) -> _Open:
        """Opens a file to read the columns of `schema`.

        `rows` is a filter for rows. Raises UnreadableFileError, StorageError.
        """
        if self.text is None:
            constants = self.constants(file.path, schema)
            limit_bytes = self.limit_bytes
            return OpenFile(
                store, file, OF_FILES, schema, rows, constants, limit_bytes=limit_bytes, is_avro=self.is_avro
            )
        # Whether a row is bad must not depend on the columns that the program uses.
        read = schema if self.fails else self.schema
        return OpenText(store, file, OF_FILES, self.text, read, self.constants(file.path, read), fails=self.fails)

    def constants(self, path: str, schema: pa.Schema) -> pa.RecordBatch | None:
        """Returns the partition columns of `schema` for a file, parsed from its path, as one row. None without
        partitions.

        Raises ConfigurationError if the path lacks a partition folder.
        """
        if self.partitions is None:
            return None
        return folder_values(path, pa.schema([field for field in self.partitions if field.name in schema.names]))

    def read(self, opened: _Open, row: int, rows_max: int, schema: pa.Schema) -> RowsRead | None:
        """Reads up to `rows_max` rows from `row` on, with the columns of `schema`. Returns None after the last row."""
        found = opened.read_rows(row, rows_max)
        if found is None or found.batch is None or found.batch.schema.equals(schema):
            return found
        return replace(found, batch=found.batch.select(schema.names))


def rest_of_file(path: str, store: FileSystemStore, error: UnreadableFileError) -> pa.RecordBatch:
    """Returns the dead letter for the unread part of a file that cannot be read further because of `error`."""
    letter = {
        "raw": b"",
        "file": join_url(store.url, path),
        "line": None,
        "offset": None,
        "error": str(error.__cause__ or error),
    }
    return pa.RecordBatch.from_pylist([letter], LETTERS)


@dataclass(frozen=True, slots=True)
class FilesSource:
    """A bounded source over files, in the order of their paths. Every batch has the columns of `schema`."""

    pattern: FilePattern
    form: FileForm
    schema: pa.Schema
    rows: Rows = None
    """A filter on the rows that the program needs, or None for all rows."""

    @property
    def bad_rows_schema(self) -> pa.Schema | None:
        """Returns the schema of the stream of dead letters, or None if there is no such stream."""
        return self.form.bad_rows_schema

    def splits(self) -> Sequence[SourceSplit]:
        """Returns one split for each file that matches now.

        Raises ConfigurationError for a file outside of the folders of `partitions`.
        """
        files = self.pattern.files()
        for file in files:
            self.form.constants(file.path, self.schema)
        return tuple(SourceSplit(file.path, encode(FileAt.of(file))) for file in files)

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError for splits of a checkpoint that another kind of source wrote.

        A restored job reads the files that were found at the first submission.
        """
        strange = [
            split.split_id for split in splits if split.payload and not isinstance(decode(split.payload), FileAt)
        ]
        if strange:
            raise ConfigurationError(
                f"its split {strange[0]!r} is not a file; give the source of the checkpoint (discover=?), or "
                "start without restore"
            )

    def projected(self, columns: Sequence[str]) -> FilesSource:
        """Returns a copy of the source that reads only these columns."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def filtered(self, rows: Rows) -> FilesSource:
        """Returns a copy of the source that may skip rows which do not match the filter `rows`."""
        return replace(self, rows=rows) if self.form.fails else self

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return _FilesReader(self)


class _FilesReader:
    def __init__(self, source: FilesSource) -> None:
        self._source = source
        self._store = source.pattern.store()
        self._open: _Open | None = None
        self._log = BadRowsLog(log)

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of the split's file from row `offset`. Raises UnreadableFileError, StorageError."""
        source = self._source
        form = self._source.form
        try:
            if self._open is None or self._open.path != split.split_id:
                self._open = form.opened(self._store, decode(split.payload), source.schema, source.rows)
            if (counts := self._open.next_row(offset)) > offset:
                return ReadResult(None, counts, at_end=False, skipped=counts - offset)
            found = form.read(self._open, offset, rows_max, source.schema)
        except UnreadableFileError as error:
            if form.fails or isinstance(error.__cause__, InferredTypeError):
                raise
            letter = rest_of_file(split.split_id, self._store, error)
            letters = self._log.add(letter, "the rest of {file}")
            return ReadResult(None, offset + 1, at_end=True, bad=letters)
        if found is None:
            return ReadResult(None, offset, at_end=True)
        letters = None if found.bad is None else self._log.add(found.bad, _PLACE)
        return ReadResult(found.batch, offset + found.rows, at_end=False, bad=letters)

    def close(self) -> None:
        """Releases the open file."""
        self._open = None


@dataclass(frozen=True, slots=True)
class FolderSource:
    """An unbounded source over the files of a folder, which is listed every `discover_ms` for new files."""

    pattern: FilePattern
    form: FileForm
    schema: pa.Schema
    discover_ms: int
    age_ms: int
    lanes: int
    clock: Callable[[], int] = field(default=now_ms, compare=False)
    unbounded: Literal[True] = True

    @property
    def bad_rows_schema(self) -> pa.Schema | None:
        """Returns the schema of the stream of dead letters, or None if there is no such stream."""
        return self.form.bad_rows_schema

    def splits(self) -> Sequence[SourceSplit]:
        """Returns one split for each lane (hash partition of the files)."""
        payload = encode(LaneState(self.lanes))
        return tuple(SourceSplit(f"lane {number} of {self.lanes}", payload) for number in range(self.lanes))

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if the number of lanes has changed.

        That number determines which subtask reads a file.
        """
        now = {split.split_id for split in self.splits()}
        before = {split.split_id for split in splits}
        if now != before:
            had = f"{len(before)} splits ({min(before, default='none')!r})"
            raise ConfigurationError(
                f"its files were divided into {had}, and now there are {self.lanes}; give splits={len(before)}, "
                "or start without restore"
            )

    def projected(self, columns: Sequence[str]) -> FolderSource:
        """Returns a copy of the source that reads only these columns."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return _FolderReader(self)


class _FolderReader:
    def __init__(self, source: FolderSource) -> None:
        self._source = source
        self._store = source.pattern.store()
        self._lanes: dict[str, Lane] = {}
        self._open: dict[str, _Open] = {}
        self._log = BadRowsLog(log)
        self._listing: dict[int, list[tuple[bytes, FileInfo]]] = {}
        """The files of each lane, as of the last listing of the folder."""
        self._new: set[bytes] | None = None
        """Hashes of the files that are new in the last listing. None after the first listing."""
        self._interval = -1
        """Number of the discovery interval in which the folder was last listed."""
        self._waiting: dict[str, tuple[int, list[FileInfo]]] = {}
        """For each lane: the number of the discovery interval of the listing, and the unread files, the next one
        last.
        """

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of the current file of a lane (hash partition of the files), or no rows if no file is
        available.

        Raises UnreadableFileError, StorageError.
        """
        lane = self._lanes.get(split.split_id)
        if lane is None or lane.payload != split.payload:
            lane = self._lanes[split.split_id] = Lane.of(split.payload)
            self._open.pop(split.split_id, None)
            self._waiting.pop(split.split_id, None)
        for _ in range(_FILES_A_READ):
            if lane.state.file is None and not self._take(split.split_id, lane):
                break
            try:
                found = self._rows(split.split_id, lane, rows_max)
            except UnreadableFileError as error:
                if self._source.form.fails or isinstance(error.__cause__, InferredTypeError):
                    raise
                assert lane.state.file is not None
                letter = rest_of_file(lane.state.file.path, self._store, error)
                letters = self._log.add(letter, "the rest of {file}")
                self._leave(split.split_id, lane)
                return ReadResult(None, offset + 1, at_end=False, payload=lane.payload, bad=letters)
            if found is not None:
                lane.advance(found.rows)
                letters = None if found.bad is None else self._log.add(found.bad, _PLACE)
                next_offset = offset + found.rows
                return ReadResult(found.batch, next_offset, at_end=False, payload=lane.payload, bad=letters)
            self._leave(split.split_id, lane)
        moved = lane.payload if lane.payload != split.payload else None
        return ReadResult(None, offset, at_end=False, payload=moved)

    def close(self) -> None:
        """Releases all open files."""
        self._open.clear()
        self._lanes.clear()

    def _leave(self, split_id: str, lane: Lane) -> None:
        """Records that the lane's current file was read completely."""
        lane.leave(self._source.age_ms, self._source.clock())
        self._open.pop(split_id, None)

    def _rows(self, split_id: str, lane: Lane, rows_max: int) -> RowsRead | None:
        """Returns the next rows of the lane's current file, or None after the last row.

        Raises UnreadableFileError, StorageError.
        """
        file = lane.state.file
        source = self._source
        assert file is not None
        opened = self._open.get(split_id)
        if opened is None or opened.path != file.path:
            opened = self._open[split_id] = source.form.opened(self._store, file, source.schema)
        return source.form.read(opened, file.row, rows_max, source.schema)

    def _take(self, split_id: str, lane: Lane) -> bool:
        """Starts reading the next file of a lane (hash partition of the files). Returns False if there is no unread
        file.
        """
        interval, waiting = self._waiting.get(split_id, (-1, []))
        if not waiting:
            self._look()
            if interval != self._interval:
                files = self._listing.get(int(split_id.split()[1]), ())
                waiting = lane.choose(files, self._source.age_ms)
                self._log_left_out(lane, files)
                self._waiting[split_id] = self._interval, waiting
        while waiting:
            path = waiting.pop().path
            try:
                lane.take(self._store.info(path))
            except NotFoundError:
                log.warning("%s was deleted before it was read", path)
                continue
            return True
        return False

    def _look(self) -> None:
        """Lists the folder for new files, unless that was done in this discovery interval already."""
        interval = self._source.clock() // self._source.discover_ms
        if interval == self._interval:
            return
        listing: dict[int, list[tuple[bytes, FileInfo]]] = {}
        for file in self._source.pattern.files():
            digest = _digest_of(file.path)
            listing.setdefault(_lane_of(digest, self._source.lanes), []).append((digest, file))
        before = {digest for files in self._listing.values() for digest, _ in files}
        now = {digest for files in listing.values() for digest, _ in files}
        self._new = now - before if self._interval >= 0 else None
        self._listing = listing
        self._interval = interval

    def _log_left_out(self, lane: Lane, files: Sequence[tuple[bytes, FileInfo]]) -> None:
        """Logs the files that appeared in this listing and are skipped because they are older than `max_file_age`."""
        if not self._new:
            return
        age_ms = self._source.age_ms
        old = [
            file
            for digest, file in files
            if digest in self._new and digest not in lane.known and lane.is_too_old(file, age_ms)
        ]
        if old:
            log.warning(
                "%d new files in %s are not read: they were last changed more than max_file_age (%d s) before the "
                "newest file of their split. The first is %s. Give a longer max_file_age, or set their time of change",
                len(old),
                self._source.pattern.folder,
                age_ms // 1_000,
                old[0].path,
            )


@wire
@dataclass(frozen=True, slots=True)
class LaneState:
    """The state of a lane (a hash partition of a folder's files) in a checkpoint.

    `read` has, for each file that was read, the hash of its path (16 bytes) and its modification time in ms (8 bytes).
    """

    lanes: int
    newest_ms: int | None = None
    """The latest modification time among the files that were read, in ms since the epoch, but at most the clock's time.

    None before the first file.
    """
    read: bytes = b""
    file: FileAt | None = None


@dataclass(slots=True)
class Lane:
    """One split of a growing folder while it is read: the files whose path hash is in one lane (hash partition).

    `payload` is its encoded state, for checkpoints.
    """

    payload: bytes
    state: LaneState
    known: dict[bytes, int] = field(default_factory=dict)
    """Hash of the path, and modification time in ms, of every file that was read and is still remembered."""
    oldest_ms: int = field(init=False)
    """The earliest modification time (ms) in `known`. Without files in `known`: the newest time so far, or 0."""

    def __post_init__(self) -> None:
        self.oldest_ms = min(self.known.values(), default=self.state.newest_ms or 0)

    @classmethod
    def of(cls, payload: bytes) -> Lane:
        """Restores a lane from its payload in a checkpoint."""
        state = decode(payload)
        assert isinstance(state, LaneState)
        entries = (state.read[at : at + _ENTRY_BYTES] for at in range(0, len(state.read), _ENTRY_BYTES))
        known = {e[:_DIGEST_BYTES]: int.from_bytes(e[_DIGEST_BYTES:], "big", signed=True) for e in entries}
        return cls(payload, state, known)

    def is_too_old(self, file: FileInfo, age_ms: int) -> bool:
        """Returns whether a file is older than the files that the lane still records as read, so that it may have been
        read before.
        """
        newest_ms = self.state.newest_ms
        return newest_ms is not None and (file.modified_at_ms or 0) < newest_ms - age_ms

    def choose(self, files: Iterable[tuple[bytes, FileInfo]], age_ms: int) -> list[FileInfo]:
        """Returns the files of this lane that were not read yet, with the next file at the end of the list. Called
        between two files.
        """
        assert self.state.file is None, "a lane reads one file at a time"
        chosen = [file for digest, file in files if digest not in self.known and not self.is_too_old(file, age_ms)]
        return sorted(chosen, key=lambda file: (file.modified_at_ms or 0, file.path), reverse=True)

    def take(self, file: FileInfo) -> None:
        """Starts reading a file at its first row."""
        self._become(replace(self.state, file=FileAt.of(file)))

    def advance(self, rows: int) -> None:
        """Records that `rows` more rows of the current file have been read."""
        assert self.state.file is not None
        self._become(replace(self.state, file=replace(self.state.file, row=self.state.file.row + rows)))

    def leave(self, age_ms: int, now_ms: int) -> None:
        """Records that the current file has been read completely, and forgets files that are too old.

        Raises ConfigurationError if too many files remain.
        """
        file = self.state.file
        assert file is not None
        seen_ms = min(file.modified_at_ms, now_ms)
        newest_ms = seen_ms if self.state.newest_ms is None else max(self.state.newest_ms, seen_ms)
        digest = _digest_of(file.path)
        self.oldest_ms = min(self.oldest_ms, file.modified_at_ms) if self.known else file.modified_at_ms
        self.known[digest] = file.modified_at_ms
        read = self.state.read + _entry(digest, file.modified_at_ms)
        if self.oldest_ms < newest_ms - age_ms - age_ms // _LATER or len(self.known) > REMEMBERED_FILES_MAX:
            self.known = {digest: at for digest, at in self.known.items() if at >= newest_ms - age_ms}
            self.oldest_ms = min(self.known.values(), default=newest_ms)
            read = b"".join(_entry(digest, at) for digest, at in self.known.items())
        if len(self.known) > REMEMBERED_FILES_MAX:
            raise ConfigurationError(
                f"from_files: {len(self.known):,} files of one split are younger than max_file_age, and at most "
                f"{REMEMBERED_FILES_MAX:,} can be remembered; make max_file_age shorter, or give more splits to a new "
                "job"
            )
        self._become(LaneState(self.state.lanes, newest_ms, read))

    def _become(self, state: LaneState) -> None:
        self.state, self.payload = state, encode(state)


def _digest_of(path: str) -> bytes:
    """Returns the 16-byte hash of a file's path, which identifies the file and determines its lane (hash partition)."""
    return xxhash.xxh3_128_digest(path.encode("utf-8", "surrogateescape"))


def _lane_of(digest: bytes, lanes: int) -> int:
    """Returns the number of the lane (hash partition) that reads a file with this hash."""
    return int.from_bytes(digest[:8], "big") % lanes


def _entry(digest: bytes, at_ms: int) -> bytes:
    return digest + at_ms.to_bytes(_TIME_BYTES, "big", signed=True)


def source_of_files(
    url: str | Sequence[str],
    kind: str | None = None,
    schema: pa.Schema | None = None,
    columns: Sequence[str] | None = None,
    folder: Callable[[FilePattern, FileForm, pa.Schema], Source] | None = None,
    bad_rows: BadRows = "fail",
    partitions: pa.Schema | None = None,
    options: Mapping[str, object] | None = None,
    size_max: int = BLOCK_BYTES,
) -> Source:
    """Returns the source for one or several file patterns. `folder` creates the source of a job that discovers new
    files while it runs.

    - `partitions`: columns in the names of folders, after the columns of `schema`.
    - `options`: options of a text format, with Spark's names.
    - `size_max`: maximum bytes of a row of text; for Parquet it raises `FileForm.limit_bytes`.

    Without `schema`, the columns are taken from the first file in the order of paths. Raises ConfigurationError,
    StorageError.
    """
    named = f"from_files({url!r})"
    pattern = FilePattern.of(folders_named(url, deep=partitions is not None, growing=folder is not None))
    kinds = [format_of(each) for each in ([url] if isinstance(url, str) else url)]
    found = kinds[0] if len(set(kinds)) == 1 else None
    if kind is not None and kind not in FORMATS:
        raise ConfigurationError(f"{named}: format={kind!r} is not supported; give one of {', '.join(FORMATS)}")
    files: Sequence[FileInfo] = ()
    if schema is None or kind is None or folder is None:
        files = pattern.files()
        if not files and (schema is None or folder is None):
            wanted = "correct the path" if folder is None else "give schema= to wait for the first file"
            raise ConfigurationError(
                f"{named}: no file matches; {wanted}. Names that begin with '_' or '.' are ignored{_below(url)}"
            )
        if kind is None and found is None:
            _check_one_format(files, named)
        found = found or next((format_of(file.path) for file in files), None)
    kind = kind or found
    if kind is None:
        raise ConfigurationError(
            f"{named}: the format is not clear from the name; give format=, one of {', '.join(FORMATS)}"
        )
    if kind == "avro":
        need(f"{named} of Avro", "avro")
    text = (
        None
        if kind in ("parquet", "avro")
        else TextFormat(kind, TextOptions.of(kind, options, "from_files"), (), size_max)
    )
    if text is None and options:
        raise ConfigurationError(
            f"{named}: options= is for csv, json and text, and these files are {kind}; remove options="
        )
    if schema is None:
        schema = plain_schema(_schema_of(pattern, files[0], text, kind, columns))
        text = None if text is None else replace(text, inferred=True, drops=bad_rows == "skip")
    if text is not None:
        text = replace(text, columns=tuple(schema.names))
    if partitions is not None:
        schema = pa.schema([*(field for field in schema if field.name not in partitions.names), *partitions])
    if text is not None:
        own = [field for field in schema if partitions is None or field.name not in partitions.names]
        with named_error(named):
            text.decoder(pa.schema(own), "")
    form = FileForm(schema, text, bad_rows, partitions, max(LIMIT_BYTES, size_max), kind == "avro")
    if columns is not None:
        missing = [name for name in columns if name not in schema.names]
        if missing or not columns:
            wrong = f"has {missing[0]!r}, which is not a column" if missing else "is empty"
            raise ConfigurationError(f"{named}: columns={list(columns)!r} {wrong}; choose among {schema.names}")
        schema = pa.schema([schema.field(name) for name in columns])
        form = replace(form, schema=schema)
    if folder is not None:
        return folder(pattern, form, schema)
    return FilesSource(pattern, form, schema)


@contextmanager
def named_error(named: str) -> Iterator[None]:
    """Returns a context that puts `named` in front of the texts of ConfigurationErrors."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{named}: {error}") from error


def _check_one_format(files: Sequence[FileInfo], named: str) -> None:
    """Raises ConfigurationError, with the names of two files, if the names of the files have several formats."""
    first: dict[str | None, str] = {}
    for file in files:
        first.setdefault(format_of(file.path), file.path)
    if len(first) > 1:
        (kind, path), (other_kind, other_path), *_ = first.items()
        raise ConfigurationError(
            f"{named}: the files have different formats: {path!r} is {kind or 'of an unknown format'}, and "
            f"{other_path!r} is {other_kind or 'of an unknown format'}. Give a pattern with the files of one format, "
            "such as 'folder/*.json', or format= if all have the same one"
        )


def _below(url: str | Sequence[str]) -> str:
    """Returns advice if the files of a folder are in folders below it, as Spark writes tables with partitions."""
    for each in [url] if isinstance(url, str) else url:
        folder = each.rstrip("/")
        if folder and folders_named(folder, deep=True, growing=False) != folder:
            return (
                f". The files of {folder!r} are in folders below it: give {folder + '/**/*'!r}, and partitions= for "
                "columns in the names of folders"
            )
    return ""


_HEAD = 1024
_ARRAY = re.compile(rb"\s*\[\s*(?:\{|$)")
_PRETTY = re.compile(rb"\s*\{[^\S\n]*\n")


def _check_lines(head: bytes) -> None:
    """Raises ConfigurationError if a file of JSON, of which `head` is the begin, has no object in each line."""
    found = "an array" if _ARRAY.match(head) else "an object in several lines" if _PRETTY.match(head) else None
    if found is not None:
        raise ConfigurationError(
            f"a file of JSON has one object a line, and this file begins with {found}; write each object in one line"
        )


def _schema_of(
    pattern: FilePattern, file: FileInfo, text: TextFormat | None, kind: str, columns: Sequence[str] | None
) -> pa.Schema:
    """Returns the columns of a file. `columns`: the only ones that are read, or None; others may have any type."""
    opened = StoreFile.of(pattern.store(), file.path, file.size_bytes)
    with reading(opened, OF_FILES):
        if kind == "json":
            _check_lines(text_stream(StoreFile.of(pattern.store(), file.path, file.size_bytes), file.path).read(_HEAD))
        found = schema_of(opened, kind, columns) if text is None else text.schema_of(opened, file.path)
        if not len(found):
            raise ConfigurationError("the file has no columns, so the schema cannot be inferred; give schema=")
        return found
