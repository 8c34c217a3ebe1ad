"""Writes, reads and deletes the data files of output tables.

    data/<job>/<attempt>/[<column>=<value>/…]part-<subtask>-<number>-<uid>.parquet     under the table's url
    data/<job>/compacted/[<column>=<value>/…]<name>.parquet     written by compactions while the job runs

Rules:

- A file is part of the table only through the commit log.
- Its bytes are checked against the checksum in the log before they are decoded.
- A file to which no entry refers may be deleted once its attempt is over.
- In an upsert table the row of a key with the highest version counts, or the row with the greatest value in the
  `order_by` column. Hidden columns are not shown to readers.
- Reading returns the Arrow types that were written, with dictionaries widened, even if Parquet stores another type.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.storage.checkpoints.layout import escape
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.files.file_system_store import FileSystemStore, join_url
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.ids import AttemptNumber, JobId, OperatorUid, SubtaskIndex
from tidegate.storage.schemas.arrow_types import decoded_type, widened_schema
from tidegate.storage.schemas.column_names import DELETED_COLUMN, VERSION_COLUMN
from tidegate.storage.schemas.polars_frames import polars_has
from tidegate.storage.tables.log.versions import AsOf
from tidegate.storage.tables.partitions import DATA_FILE_SUFFIX, PartitionFilter, matching_files
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

DATA_FOLDER = "data"
_COMPACTED = "compacted"
_MARK_DIGITS = 12
_COMPRESSION: Literal["zstd"] = "zstd"
_GROUP_BYTES = 32 << 20
"""Size in memory, in bytes, of a row group in a file that merges several tables."""
_GROUP_ROWS = 1 << 17
"""Limit of rows of a row group.

A reader decodes one group at a time, and skips groups in which no row matches its filter.
"""
_CALENDAR = {"org.apache.spark.version": "3.5.0"}
"""A Spark version of at least 3.0 as the writer of a file.

Arrow writes dates and times in the Gregorian calendar, as these versions of Spark do. Without this metadata Spark
assumes the Julian calendar, or fails.
"""
_ARROW_SCHEMA = b"ARROW:schema"
_PARQUET_MAGIC = b"PAR1"


def data_dir(job_id: JobId, attempt: AttemptNumber) -> str:
    """Returns the folder of the data files that one attempt of a job writes."""
    return f"{DATA_FOLDER}/{job_id}/{attempt:06d}"


def data_file_name(subtask: SubtaskIndex, index: int, uid: OperatorUid) -> str:
    """Returns the name of the data file number `index` of a sink's subtask in an attempt.

    The name begins with a constant, because Spark and others skip names that begin with `_` or `.`, and a uid may. The
    uid is escaped, so that no uid adds a folder or a wildcard to the path, and two uids never share a name.
    """
    return f"part-{subtask}-{index:06d}-{escape(uid)}{DATA_FILE_SUFFIX}"


def compacted_dir(job_id: JobId) -> str:
    """Returns the folder of the files that compactions write while the job runs."""
    return f"{DATA_FOLDER}/{job_id}/{_COMPACTED}"


def write_data_file(store: Store, path: str, batches: Sequence[pa.RecordBatch]) -> DataFile:
    """Writes batches of one schema (at least one batch) as one Parquet file. Raises StorageError."""
    assert batches, "a data file needs at least one batch, for its schema"
    table = pa.Table.from_batches(batches)
    sink = pa.BufferOutputStream()
    with _writer(sink, table.schema) as writer:
        writer.write_table(table, row_group_size=_GROUP_ROWS)
    return _stored(store, path, table.num_rows, memoryview(sink.getvalue()))


def write_joined_file(store: Store, path: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> DataFile:
    """Writes the rows of several tables of one schema, in order, as one Parquet file. Raises StorageError.

    At most the rows of one row group, and of the table that fills it, are in memory.
    """
    sink = pa.BufferOutputStream()
    rows = waiting_bytes = 0
    waiting: list[pa.Table] = []
    with _writer(sink, schema) as writer:
        for table in tables:
            waiting.append(table)
            rows += table.num_rows
            waiting_bytes += table.nbytes
            if waiting_bytes >= _GROUP_BYTES:
                writer.write_table(pa.concat_tables(waiting).unify_dictionaries(), row_group_size=_GROUP_ROWS)
                waiting, waiting_bytes = [], 0
        if waiting:
            writer.write_table(pa.concat_tables(waiting).unify_dictionaries(), row_group_size=_GROUP_ROWS)
    return _stored(store, path, rows, memoryview(sink.getvalue()))


def _writer(sink: pa.NativeFile, schema: pa.Schema) -> pq.ParquetWriter:
    writer = pq.ParquetWriter(sink, schema, compression=_COMPRESSION)
    writer.add_key_value_metadata(_CALENDAR)
    return writer


def _stored(store: Store, path: str, rows: int, data: memoryview) -> DataFile:
    checksum = checksum_of(data)
    size_bytes = store.write(path, (data,))
    return DataFile(path=path, rows=rows, size_bytes=size_bytes, checksum=checksum)


def read_data_file(store: Store, file: DataFile) -> pa.Table:
    """Reads all columns of a data file, including hidden columns, with dictionaries widened.

    Raises CorruptionError, NotFoundError.
    """
    where = join_url(store.url, file.path)
    data = store.read(file.path)
    if len(data) != file.size_bytes or checksum_of(data) != file.checksum:
        raise CorruptionError(
            f"{where} is damaged: its checksum does not match the table's log"
            "; restore the file from a copy of the table"
        )
    try:
        return _decoded_file(data)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptionError(
            f"{where} cannot be decoded: {error}; restore the file from a copy of the table"
        ) from error


def read_table(store: Store, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pa.Table:
    """Returns the visible rows of the table at the store's root: now, or as of an earlier commit or time.

    In append mode the rows have commit order. In upsert mode the newest row of each key is returned. With `filters`
    only files of matching partitions are read. Raises TableError if there is no such table or commit,
    ConfigurationError for an invalid filter, and CorruptionError or NotFoundError for a damaged or lost file.
    """
    snapshot = TableLog(store).snapshot(as_of)
    files = matching_files(snapshot.info, snapshot.files, filters)
    table = read_files(store, snapshot.info, files)
    if files and snapshot.info.mode == "upsert":
        table = shown_rows(newest_rows(table, snapshot.info))
    return table


def read_head(store: Store, n: int) -> tuple[pa.Table, bool]:
    """Returns the first `n` visible rows of the table, and whether there are more. Raises as `read_table` does.

    In append mode only the files with these rows are read.
    """
    snapshot = TableLog(store).snapshot()
    files = list(snapshot.files)
    if snapshot.info.mode == "append":
        rows = 0
        for number, file in enumerate(files):
            if rows >= n:
                files = files[:number]
                break
            rows += file.rows
        found = read_files(store, snapshot.info, files)
        return found.slice(0, n), snapshot.rows > n
    found = read_files(store, snapshot.info, files)
    if files:
        found = shown_rows(newest_rows(found, snapshot.info))
    return found.slice(0, n), found.num_rows > n


def read_files(store: Store, info: TableInfo, files: Sequence[DataFile]) -> pa.Table:
    """Returns the rows of the given data files, in the table's schema. Rows of an upsert table include their hidden
    columns.

    Raises CorruptionError or NotFoundError for a damaged or lost file.
    """
    if not files:
        return info.arrow_schema.empty_table()
    return pa.concat_tables([read_rows(store, info, file) for file in files]).unify_dictionaries()


def delete_unreferenced(store: Store, job_id: JobId, before_attempt: int | None) -> int:
    """Deletes a job's data files to which no log entry refers, except compacted files. Returns the number of deleted
    files.

    Only files of attempts below `before_attempt` are deleted, or of all attempts if it is None. These attempts must
    have ended: a file that is not committed yet looks the same as one that will never be committed.
    """
    referenced = TableLog(store).referenced_paths()
    folder = f"{DATA_FOLDER}/{job_id}"
    count = 0
    for attempt in store.list(folder):
        if not attempt.isdigit() or (before_attempt is not None and int(attempt) >= before_attempt):
            continue
        paths = _data_files(store, f"{folder}/{attempt}")
        unreferenced = [path for path in paths if path not in referenced]
        for path in unreferenced:
            store.delete(path)
        count += len(unreferenced)
        if isinstance(store, FileSystemStore):
            count += store.delete_temporary(f"{folder}/{attempt}")
        if len(unreferenced) == len(paths):
            store.delete_tree(f"{folder}/{attempt}")
    return count


def compacted_name(mark: int, step: int) -> str:
    """Returns the prefix of the file names that one step of a compaction writes. `mark` identifies the process."""
    return f"{mark:0{_MARK_DIGITS}d}-{step:06d}-"


def delete_unfinished(store: Store, job_id: JobId, before_mark: int) -> int:
    """Deletes files that compactions of a job have written and to which no log entry refers. Returns the number of
    deleted files.

    Only files of marks below `before_mark` are deleted. Processes with such a mark can no longer append to the log.
    """
    paths = _data_files(store, compacted_dir(job_id))
    earlier = [path for path in paths if int(path.rpartition("/")[2][:_MARK_DIGITS]) < before_mark]
    if not earlier:
        return 0
    referenced = TableLog(store).referenced_paths()
    unreferenced = [path for path in earlier if path not in referenced]
    store.delete_all(unreferenced)
    return len(unreferenced)


def _data_files(store: Store, folder: str) -> list[str]:
    """Returns the paths of the data files in a folder and its partition folders."""
    found = []
    for name in store.list(folder):
        path = f"{folder}/{name}"
        found += [path] if name.endswith(DATA_FILE_SUFFIX) else _data_files(store, path)
    return found


def _decoded_file(data: Buffer) -> pa.Table:
    """Decodes all rows of a Parquet file. Raises pa.ArrowException, OSError or ValueError for malformed bytes."""
    # One file per call, without the dataset layer, which would take folder names for partitions.
    file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
    stored = (file.metadata.metadata or {}).get(_ARROW_SCHEMA)
    if stored is None:
        return _rows_of(file)
    written = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(stored)))
    widened = widened_schema(written)
    try:
        table = _rows_of(file)
    except pa.ArrowInvalid:
        if widened.equals(written):
            raise
        # Written before dictionaries were widened, with more values than its indexes can count.
        metadata = _without_arrow_schema(data)
        table = _rows_of(pq.ParquetFile(pa.BufferReader(data), metadata=metadata, pre_buffer=False))
    return table if table.schema.equals(widened) else table.cast(widened)


def _rows_of(file: pq.ParquetFile) -> pa.Table:
    """Returns all rows of a Parquet file, read by this thread alone.

    Does not use Arrow's threads, or threads that read ahead (`pre_buffer`), because such threads keep the Python buffer
    for a moment after a read has returned. A thread that releases the buffer while the interpreter ends aborts the
    process.
    """
    return file.read(use_threads=False)


def _without_arrow_schema(data: Buffer) -> pq.FileMetaData:
    """Returns a Parquet file's metadata without the embedded Arrow schema, so that columns get Parquet's own types."""
    whole = memoryview(data)
    footer_bytes = int.from_bytes(whole[-8:-4], "little") + 8
    footer = bytes(whole[-footer_bytes:]).replace(_ARROW_SCHEMA, _ARROW_SCHEMA.lower())
    return pq.read_metadata(pa.BufferReader(_PARQUET_MAGIC + footer))


def with_added(table: pa.Table, schema: pa.Schema, added: Collection[str]) -> pa.Table:
    """Returns the rows of a data file, with null columns for columns of `schema` that the table gained later
    (`added`).
    """
    for name in added:
        if name in schema.names and name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, schema.field(name).type))
    return table


def stored_schema(info: TableInfo) -> pa.Schema:
    """Returns the schema of a table's data files: its columns, and the hidden columns of an upsert table."""
    schema = info.arrow_schema
    schema = schema.append(pa.field(VERSION_COLUMN, pa.int64())) if info.mode == "upsert" else schema
    return schema.append(pa.field(DELETED_COLUMN, pa.bool_())) if info.deletes else schema


def read_rows(store: Store, info: TableInfo, file: DataFile) -> pa.Table:
    """Returns the rows of a data file, with the columns of `stored_schema`. Raises CorruptionError, NotFoundError."""
    schema = stored_schema(info)
    table = with_added(read_data_file(store, file), schema, info.added)
    try:
        return table.select(schema.names).cast(schema)
    except (KeyError, pa.ArrowException, ValueError) as error:
        where = join_url(store.url, file.path)
        raise CorruptionError(
            f"{where} does not have the columns of its table: {error}; restore the file from a copy of the table"
        ) from error


def newest_rows(table: pa.Table, info: TableInfo) -> pa.Table:
    """Returns the current row of each key of an upsert table, in the order of the rows. The table must have its hidden
    columns.

    The current row is the row with the highest version. In a table with an `order_by` column it is the row with the
    greatest value there, and among equal values the one with the highest version. A null is less than any value, NaN is
    greater.
    """
    # Imported late: every task imports this module, and only readers of upsert tables need polars.
    import polars as pl

    order = [] if info.order_by is None else [info.order_by]
    columns = table.select(list(dict.fromkeys([*info.keys, *order, VERSION_COLUMN])))
    # Polars treats nulls, and equal floats, as equal keys. Only these columns pass through it: types stay Arrow's.
    # Columns are named by their numbers, because polars would take a name such as "*" for a pattern.
    number = {name: str(at) for at, name in enumerate(columns.column_names)}
    frame = pl.from_arrow(pa.table({number[name]: _comparable(columns.column(name)) for name in number}))
    assert isinstance(frame, pl.DataFrame)
    newest = (
        frame.with_row_index("row")
        .sort(*(number[name] for name in (*order, VERSION_COLUMN)), "row")
        .unique(subset=[number[key] for key in info.keys], keep="last", maintain_order=False)
        .get_column("row")
        .sort()
    )
    return table.take(newest.to_arrow())


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Returns the column in a type that polars sorts in the same order as Arrow would."""
    kind = decoded_type(column.type)
    column = column.cast(kind)
    if polars_has(kind):
        return column
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp(kind.unit, "UTC"))
    # For a type that polars lacks, such as decimal256, the rank of each value is enough.
    return pc.rank(column, sort_keys="ascending", null_placement="at_start", tiebreaker="dense")


def shown_rows(table: pa.Table) -> pa.Table:
    """Returns the rows of an upsert table that readers see: without rows that mark deletions, and without hidden
    columns.
    """
    if DELETED_COLUMN in table.column_names:
        table = table.filter(pc.invert(table.column(DELETED_COLUMN))).drop_columns([DELETED_COLUMN])
    return table.drop_columns([VERSION_COLUMN])


def files_there(store: Store, paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths among `paths` at which the store has a file. Raises StorageError."""
    wanted = set(paths)
    folders = sorted({path.rpartition("/")[0] for path in wanted})
    return tuple(path for folder in folders for name in store.list(folder) if (path := f"{folder}/{name}") in wanted)
