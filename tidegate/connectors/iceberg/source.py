"""`IcebergSource` reads the rows of one snapshot. `IcebergFollower` reads one snapshot, and then the rows of later
appends.

A split of an `IcebergSource` is a data file, and a split of an `IcebergFollower` is a lane (a hash partition of the
files). Rules:

- The snapshot is chosen once, when the job is submitted. Iceberg never changes a data file, and rows are read in the
  order of the file, without rows that delete files remove. A position is therefore a row number.
- Columns are found by their ids, as Iceberg requires. A column that was added later is null in older files.
- A follower reads snapshots in their order. In each snapshot, a lane reads the files whose path hash selects the lane,
  in the order of the paths. The position of a lane is in its payload, so any reader continues from it.
- Snapshots that rewrite files without changing rows are skipped. A snapshot that replaces or deletes rows is an error,
  or is skipped if the program accepts that.
- A snapshot that was expired before its files were read raises an error that names the snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import xxhash

from tidegate.connectors.iceberg.client import TablePlace
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.clock import now_ms
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import settled_type

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import FileScanTask, Table
    from pyiceberg.table.snapshots import Snapshot

log = logging.getLogger(__name__)

Changes = Literal["fail", "skip"]
"""The reaction of a follower to a snapshot that replaces or deletes rows: "fail" or "skip"."""
_SNAPSHOTS_A_READ = 100
"""Limit of snapshots without files for a lane that one `read` call skips."""


@wire
@dataclass(frozen=True, slots=True)
class IcebergFile:
    """A data file, and the delete files that apply to it.

    - `partition`: the values of its partition, in Iceberg's binary form.
    - `deletes`: path and format of each delete file.
    """

    path: str
    file_format: str
    rows: int
    size_bytes: int
    spec_id: int
    partition: tuple[bytes | None, ...]
    deletes: tuple[tuple[str, str], ...] = ()
    table: str = ""
    """The UUID of the table. The field ids of another one name other columns."""


@dataclass(frozen=True, slots=True)
class IcebergSource:
    """A bounded source that reads the data files of one snapshot, in the order of their paths."""

    place: TablePlace
    schema: pa.Schema
    field_ids: tuple[int, ...]
    """Iceberg's field ids of the columns."""
    files: tuple[IcebergFile, ...]
    table: str
    """The UUID of the table."""

    @staticmethod
    def open(place: TablePlace, snapshot_id: int | None = None) -> IcebergSource:
        """Opens a snapshot of the table (None: the current one). Raises ConfigurationError."""
        table = place.load()
        _check_snapshot(table, place, snapshot_id)
        schema, ids = columns_of(table)
        return IcebergSource(place, schema, ids, planned(table, place, snapshot_id), str(table.metadata.table_uuid))

    def splits(self) -> Sequence[SourceSplit]:
        """Returns one split for each data file."""
        return tuple(SourceSplit(file.path, encode(file), -1 if file.deletes else file.rows) for file in self.files)

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError for splits of a checkpoint that another kind of source wrote.

        A restored job reads the files of the snapshot that was found at the first submission.
        """
        if strange := [s.split_id for s in splits if s.payload and not isinstance(decode(s.payload), IcebergFile)]:
            raise ConfigurationError(
                f"its split {strange[0]!r} is not a file of an Iceberg table's snapshot; give the source of the "
                "checkpoint, or start without restore"
            )
        if {decode(split.payload).table for split in splits if split.payload} - {self.table}:
            raise ConfigurationError(
                f"the checkpoint is of another table than {self.place.named}, which may have been created again; give "
                "the table that it was, or start without restore"
            )

    def projected(self, columns: Sequence[str]) -> IcebergSource:
        """Returns a copy of the source that reads only these columns."""
        ids = dict(zip(self.schema.names, self.field_ids, strict=True))
        schema = pa.schema([self.schema.field(name) for name in columns])
        return replace(self, schema=schema, field_ids=tuple(ids[name] for name in columns))

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return _FilesReader(self)


class _FilesReader:
    def __init__(self, source: IcebergSource) -> None:
        self._rows = FileRows(source.place, source.schema, source.field_ids)

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of the split's file from row `offset`.

        Raises ConfigurationError if the file no longer exists.
        """
        batch = self._rows.read(decode(split.payload), offset, rows_max)
        return ReadResult(batch, offset + (0 if batch is None else batch.num_rows), at_end=batch is None)

    def close(self) -> None:
        """Releases the open file."""
        self._rows.close()


class FileRows:
    """Reads rows of data files with the given columns, from any row on.

    A file is read once if rows are requested in order.
    """

    def __init__(self, place: TablePlace, schema: pa.Schema, field_ids: Sequence[int]) -> None:
        self._place = place
        self._schema = schema
        self._field_ids = field_ids
        self._table: Table | None = None
        self._file: IcebergFile | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._row = 0

    def read(self, file: IcebergFile, row: int, rows_max: int) -> pa.RecordBatch | None:
        """Returns up to `rows_max` rows of a file from row `row` on, or None after the last row.

        Raises ConfigurationError if the file no longer exists.
        """
        try:
            if file != self._file or row != self._row:
                self._open(file)
            while True:
                if self._rest is None or not self._rest.num_rows:
                    self._rest = next(self._batches, None)
                    if self._rest is None:
                        self._file = None
                        return None
                skipped = min(row - self._row, self._rest.num_rows)
                self._row += skipped
                self._rest = self._rest.slice(skipped)
                if self._rest.num_rows:
                    batch = self._rest.slice(0, rows_max)
                    self._rest = self._rest.slice(batch.num_rows)
                    self._row += batch.num_rows
                    return batch
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{file.path} of {self._place.named} does not exist any more. Its snapshot was expired before all of "
                "it was read: keep snapshots for longer than jobs read them, and start without restore"
            ) from error

    def close(self) -> None:
        """Releases the open file."""
        self._file = None
        self._batches = iter(())
        self._rest = None

    def _open(self, file: IcebergFile) -> None:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan, _read_all_delete_files
        from pyiceberg.schema import Schema

        if self._table is None or file.spec_id not in self._table.specs():
            self._table = self._place.load()
        table = self._table
        current = table.schema()
        known = {each.field_id: each for schema in (*table.schemas().values(), current) for each in schema.fields}
        names = dict(zip(self._field_ids, self._schema.names, strict=True))
        fields = [known[number].model_copy(update={"name": name, "required": False}) for number, name in names.items()]
        scan = ArrowScan(table.metadata, table.io, Schema(*fields), AlwaysTrue())
        task = _task(table, file)
        batches = scan._record_batches_from_scan_tasks_and_deletes([task], _read_all_delete_files(table.io, [task]))
        self._batches = (_conformed(batch, self._schema, self._place) for batch in batches)
        self._file, self._row, self._rest = file, 0, None


def _conformed(batch: pa.RecordBatch, schema: pa.Schema, place: TablePlace) -> pa.RecordBatch:
    """Returns the rows with the types of the stream. Raises ConfigurationError for a value that does not fit."""
    if batch.schema.equals(schema):
        return batch
    columns = []
    for name, wanted in zip(schema.names, schema.types, strict=True):
        try:
            columns.append(batch.column(name).cast(wanted))
        except pa.ArrowInvalid as error:
            raise ConfigurationError(
                f"{place.named}: column {name!r} was {wanted} when the job was submitted, and has a value that does "
                f"not fit: {error}. The table has a wider type now: start without restore, which reads it"
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def columns_of(table: Table) -> tuple[pa.Schema, tuple[int, ...]]:
    """Returns the columns of a table, with types that streams support, and their Iceberg field ids."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    found = schema_to_pyarrow(table.schema(), include_field_ids=False)
    schema = pa.schema([pa.field(each.name, settled_type(each.type)) for each in found])
    return schema, tuple(each.field_id for each in table.schema().fields)


def planned(table: Table, place: TablePlace, snapshot_id: int | None = None) -> tuple[IcebergFile, ...]:
    """Returns the data files of a snapshot, in the order of their paths. Raises ConfigurationError."""
    if snapshot_id is None and table.metadata.current_snapshot() is None:
        return ()
    try:
        tasks = list(table.scan(snapshot_id=snapshot_id).plan_files())
    except (NotImplementedError, ValueError) as error:
        raise ConfigurationError(
            f"{place.named} cannot be read by pyiceberg: {error}"
            "; check that its files exist, and that its catalog may read them"
        ) from error
    return tuple(sorted((_file(table, task) for task in tasks), key=lambda file: file.path))


def _file(table: Table, task: FileScanTask) -> IcebergFile:
    from pyiceberg.conversions import to_bytes

    types = _partition_types(table, task.file.spec_id)
    values = [task.file.partition[position] for position in range(len(types))]
    partition = tuple(None if v is None else to_bytes(t, v) for t, v in zip(types, values, strict=True))
    deletes = tuple(sorted((each.file_path, each.file_format.value) for each in task.delete_files))
    data = task.file
    return IcebergFile(
        data.file_path,
        data.file_format.value,
        data.record_count,
        data.file_size_in_bytes,
        data.spec_id,
        partition,
        deletes,
        str(table.metadata.table_uuid),
    )


def _partition_types(table: Table, spec_id: int) -> list[Any]:
    """Returns the types of the values of a partition. Its columns may have been dropped since."""
    schemas = [table.schema(), *reversed(table.schemas().values())]

    def source_type(number: int) -> Any:
        return next(schema.find_type(number) for schema in schemas if schema.find_column_name(number) is not None)

    return [field.transform.result_type(source_type(field.source_id)) for field in table.specs()[spec_id].fields]


def _task(table: Table, file: IcebergFile) -> FileScanTask:
    from pyiceberg.conversions import from_bytes
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.table import FileScanTask
    from pyiceberg.typedef import Record

    def data_file(path: str, file_format: str, content: DataFileContent, partition: Record, rows: int) -> DataFile:
        made = DataFile.from_args(
            content=content,
            file_path=path,
            file_format=FileFormat(file_format),
            partition=partition,
            record_count=rows,
            file_size_in_bytes=file.size_bytes,
        )
        made.spec_id = file.spec_id
        return made

    types = _partition_types(table, file.spec_id)
    values = (None if v is None else from_bytes(t, v) for t, v in zip(types, file.partition, strict=True))
    data = data_file(file.path, file.file_format, DataFileContent.DATA, Record(*values), file.rows)
    deletes = {data_file(path, kind, DataFileContent.POSITION_DELETES, Record(), 0) for path, kind in file.deletes}
    return FileScanTask(data, deletes)


def _check_snapshot(table: Table, place: TablePlace, snapshot_id: int | None) -> None:
    if snapshot_id is None or table.metadata.snapshot_by_id(snapshot_id) is not None:
        return
    known = ", ".join(str(snapshot.snapshot_id) for snapshot in table.metadata.snapshots[-5:]) or "none"
    raise ConfigurationError(
        f"{place.named} has no snapshot {snapshot_id}; its newest ones are {known}; give one of these"
    )


@wire
@dataclass(frozen=True, slots=True)
class LaneOfSnapshots:
    """The position of a lane (one of the hash partitions in which an `IcebergFollower` reads files).

    - `after`: id of the last snapshot that was read completely, None before the first one.
    - `current`: id of the snapshot that is being read, None between two snapshots.
    - `file`, `row`: the next row: the number of the file among the lane's files, and the row in that file.
    """

    lanes: int
    number: int
    whole: bool
    """True until the first snapshot has been read. All files that the table had in the first snapshot are read then."""
    after: int | None = None
    current: int | None = None
    file: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class IcebergFollower:
    """An unbounded source over an Iceberg table: the rows of a first snapshot, and then the rows of each append."""

    place: TablePlace
    schema: pa.Schema
    field_ids: tuple[int, ...]
    first: int | None
    """Id of the snapshot at which to begin: the current one at submission, or the one that the user chose.

    None if the table was empty.
    """
    whole: bool
    """True if the rows of the first snapshot are read too."""
    every_ms: int
    lanes: int
    changes: Changes
    table: str
    """The UUID of the table."""
    clock: Callable[[], int] = field(default=now_ms, compare=False)
    unbounded: Literal[True] = True

    @staticmethod
    def open(place: TablePlace, start: object, every_ms: int, lanes: int, changes: Changes) -> IcebergFollower:
        """Opens a table.

        `start`: "all", "new", or the id of a snapshot after which to begin. Raises ConfigurationError.
        """
        table = place.load()
        schema, ids = columns_of(table)
        current = table.metadata.current_snapshot()
        first = None if current is None else current.snapshot_id
        if isinstance(start, int) and not isinstance(start, bool):
            _check_snapshot(table, place, start)
            first = start
        elif start not in ("all", "new"):
            raise ConfigurationError(f"from_iceberg(start={start!r}): give 'all', 'new' or the id of a snapshot")
        whole = start == "all" and first is not None
        uuid = str(table.metadata.table_uuid)
        return IcebergFollower(place, schema, ids, first, whole, every_ms, lanes, changes, uuid)

    def splits(self) -> Sequence[SourceSplit]:
        """Returns one split for each lane (hash partition of the files)."""
        states = [
            LaneOfSnapshots(
                self.lanes,
                number,
                self.whole,
                None if self.whole else self.first,
                self.first if self.whole else None,
            )
            for number in range(self.lanes)
        ]
        return tuple(SourceSplit(_lane_id(state), encode(state)) for state in states)

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if the number of lanes has changed.

        That number determines which subtask reads a file.
        """
        now = {split.split_id for split in self.splits()}
        before = {split.split_id for split in splits}
        if now != before:
            raise ConfigurationError(
                f"its files were divided into {len(before)} splits ({min(before, default='none')!r}), and now there "
                f"are {self.lanes}; give splits={len(before)}, or start without restore"
            )

    def projected(self, columns: Sequence[str]) -> IcebergFollower:
        """Returns a copy of the source that reads only these columns."""
        ids = dict(zip(self.schema.names, self.field_ids, strict=True))
        schema = pa.schema([self.schema.field(name) for name in columns])
        return replace(self, schema=schema, field_ids=tuple(ids[name] for name in columns))

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return _FollowingReader(self)


def _lane_id(state: LaneOfSnapshots) -> str:
    return f"lane {state.number} of {state.lanes} of snapshots"


class _FollowingReader:
    def __init__(self, source: IcebergFollower) -> None:
        self._source = source
        self._rows: dict[str, FileRows] = {}
        self._table: Table | None = None
        self._catalog: Catalog | None = None
        """Stays open between polls: to open a catalog takes several requests. Opened again after an error."""
        self._interval = -1
        """Number of the polling interval in which the table was last loaded."""
        self._skipped: int | None = None
        """Id of the last snapshot that the log reports as skipped."""
        self._files: tuple[tuple[int, bool], tuple[IcebergFile, ...]] | None = None
        """The snapshot and the `whole` flag for which files were last planned, and these files."""

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of the lane's current file.

        Raises ConfigurationError for a snapshot that cannot be followed.
        """
        state = decode(split.payload)
        rows = self._rows.setdefault(
            split.split_id, FileRows(self._source.place, self._source.schema, self._source.field_ids)
        )
        for _ in range(_SNAPSHOTS_A_READ):
            if state.current is None:
                following = self._next(state)
                if following is None:
                    break
                state = following
                continue
            files = [file for file in self._planned(state) if _lane_of(file.path, state.lanes) == state.number]
            if state.file >= len(files):
                state = replace(state, whole=False, after=state.current, current=None, file=0, row=0)
                continue
            batch = rows.read(files[state.file], state.row, rows_max)
            if batch is None:
                state = replace(state, file=state.file + 1, row=0)
                continue
            state = replace(state, row=state.row + batch.num_rows)
            return ReadResult(batch, offset + batch.num_rows, at_end=False, payload=encode(state))
        payload = encode(state)
        return ReadResult(None, offset, at_end=False, payload=None if payload == split.payload else payload)

    def close(self) -> None:
        """Releases all open files."""
        for rows in self._rows.values():
            rows.close()
        self._rows.clear()
        self._catalog = None

    def _loaded(self, snapshot_id: int | None = None) -> Table:
        """Returns the table.

        It is reloaded at most once in a polling interval, or if it does not have the snapshot `snapshot_id`.
        """
        interval = self._source.clock() // self._source.every_ms
        known = self._table is not None and (
            snapshot_id is None or self._table.metadata.snapshot_by_id(snapshot_id) is not None
        )
        if not known or (snapshot_id is None and interval != self._interval):
            self._table = self._load()
            self._interval = interval
        assert self._table is not None
        return self._table

    def _load(self) -> Table:
        """Loads the table from the catalog, which stays open unless that fails."""
        catalog, self._catalog = self._catalog, None
        if catalog is None:
            catalog = self._source.place.catalog.open()
        table = self._source.place.load(catalog)
        if self._source.table != str(table.metadata.table_uuid):
            raise ConfigurationError(
                f"{self._source.place.named} was dropped and created again, and its columns may be others now: start "
                "without restore"
            )
        self._catalog = catalog
        return table

    def _next(self, state: LaneOfSnapshots) -> LaneOfSnapshots | None:
        """Returns the position of a lane at the start of the next snapshot, or None if there is no newer snapshot."""
        table = self._loaded()
        following = next_snapshot(table, state.after, self._source.place)
        if following is None:
            return None
        if not self._adds_rows(following):
            return replace(state, after=following.snapshot_id)
        return replace(state, current=following.snapshot_id)

    def _adds_rows(self, snapshot: Snapshot) -> bool:
        from pyiceberg.table.snapshots import Operation

        operation = Operation.APPEND if snapshot.summary is None else snapshot.summary.operation
        if operation in (Operation.APPEND, Operation.REPLACE):
            return operation is Operation.APPEND
        place = self._source.place.named
        what = f"snapshot {snapshot.snapshot_id} of {place} is of the kind {operation.value!r}: it changes rows"
        if self._source.changes == "skip":
            if self._skipped != snapshot.snapshot_id:
                self._skipped = snapshot.snapshot_id
                log.warning("%s. It is skipped, because changes='skip' is given", what)
            return False
        raise ConfigurationError(
            f"{what} that were read before, and a stream of appended rows cannot take them back. Skip such snapshots "
            "with changes='skip', or read the table again from its start"
        )

    def _planned(self, state: LaneOfSnapshots) -> tuple[IcebergFile, ...]:
        assert state.current is not None
        which = state.current, state.whole
        if self._files is None or self._files[0] != which:
            table = self._loaded(state.current)
            if table.metadata.snapshot_by_id(state.current) is None:
                raise ConfigurationError(
                    f"snapshot {state.current} of {self._source.place.named} was expired before all of its rows were "
                    "read: keep snapshots for longer, and start without restore"
                )
            place = self._source.place
            files = planned(table, place, state.current) if state.whole else added_files(table, state.current)
            self._files = which, files
        return self._files[1]


def next_snapshot(table: Table, after: int | None, place: TablePlace) -> Snapshot | None:
    """Returns the snapshot that follows `after` in the history of the current snapshot, or None if `after` is the
    current one.

    Raises ConfigurationError if `after` is not in this history, because it was expired or the table was rolled back.
    """
    following: Snapshot | None = None
    snapshot = table.metadata.current_snapshot()
    while snapshot is not None:
        if snapshot.snapshot_id == after:
            return following
        following = snapshot
        parent = snapshot.parent_snapshot_id
        if parent == after:
            return following  # `after` may have been expired
        snapshot = None if parent is None else table.metadata.snapshot_by_id(parent)
    if following is None and after is None:
        return None
    raise ConfigurationError(
        f"snapshot {after} of {place.named} does not lead to its current one. Snapshots after it were expired before "
        "they were read, or the table was rolled back: start without restore"
    )


def added_files(table: Table, snapshot_id: int) -> tuple[IcebergFile, ...]:
    """Returns the data files that an append snapshot has added, in the order of their paths."""
    from pyiceberg.manifest import ManifestContent, ManifestEntryStatus
    from pyiceberg.table import FileScanTask

    snapshot = table.metadata.snapshot_by_id(snapshot_id)
    assert snapshot is not None
    found: list[IcebergFile] = []
    for manifest in snapshot.manifests(table.io):
        if manifest.content is not ManifestContent.DATA or manifest.added_snapshot_id != snapshot_id:
            continue
        entries: list[Any] = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
        found += [
            _file(table, FileScanTask(entry.data_file))
            for entry in entries
            if entry.status is ManifestEntryStatus.ADDED and entry.snapshot_id == snapshot_id
        ]
    return tuple(sorted(found, key=lambda file: file.path))


def _lane_of(path: str, lanes: int) -> int:
    return int(xxhash.xxh64_intdigest(path.encode()) % lanes)
