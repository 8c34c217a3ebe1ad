"""Writes, reads and deletes the data files of output tables.

    data/<job>/<attempt>/[<column>=<value>/…]part-<subtask>-<number>-<uid>.parquet     under the table's url
    data/<job>/compacted/[<column>=<value>/…]<name>.parquet     of compactions while the job runs

Rules: a file is part of the table only through the commit log; its bytes are checked against the checksum in
the log before they are decoded; a file that no entry refers to may be deleted once its attempt is over. In an
upsert table the row of a key with the highest version counts, or with the greatest value in the column of its order;
hidden columns are not shown to readers. What is read has the types that were written, dictionaries widened, whatever
Parquet makes of them.
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
from tidegate.storage.schemas.polars_frames import polars_has
from tidegate.storage.tables.log.versions import AsOf
from tidegate.storage.tables.partitions import DATA_FILE_SUFFIX, PartitionFilter, matching_files
from tidegate.storage.tables.table_info import DELETED_COLUMN, VERSION_COLUMN, TableInfo
from tidegate.storage.tables.table_log import TableLog

DATA_FOLDER = "data"
_COMPACTED = "compacted"
_MARK_DIGITS = 12
_COMPRESSION: Literal["zstd"] = "zstd"
_GROUP_BYTES = 32 << 20
"""Of a row group of a file that many are joined to, in memory."""
_GROUP_ROWS = 1 << 17
"""Of a row group at most: a reader decodes one at a time, and passes over those of which a filter drops all rows."""
_CALENDAR = {"org.apache.spark.version": "3.5.0"}
"""Spark takes the dates and times of a file for those of the old calendar, or fails, unless the file names a version
of Spark from 3.0 on as its writer. Arrow writes the Gregorian calendar, as these do."""
_ARROW_SCHEMA = b"ARROW:schema"
_PARQUET_MAGIC = b"PAR1"


def data_dir(job_id: JobId, attempt: AttemptNumber) -> str:
    """Folder of the files that one attempt of a job writes."""
    return f"{DATA_FOLDER}/{job_id}/{attempt:06d}"


def data_file_name(subtask: SubtaskIndex, index: int, uid: OperatorUid) -> str:
    """Name of the `index`-th file that a subtask of a sink writes in an attempt.

    The name begins with a constant: Spark and others pass over names that begin with `_` or `.`, and a uid may. The
    uid is escaped, so that no uid adds a folder or a wildcard to the path, and two uids never share a name.
    """
    return f"part-{subtask}-{index:06d}-{escape(uid)}{DATA_FILE_SUFFIX}"


def compacted_dir(job_id: JobId) -> str:
    """Folder of the files that compactions beside a running job write."""
    return f"{DATA_FOLDER}/{job_id}/{_COMPACTED}"


def write_data_file(store: Store, path: str, batches: Sequence[pa.RecordBatch]) -> DataFile:
    """Write batches of one schema as one Parquet file. Raises StorageError. `batches` must not be empty."""
    assert batches, "a data file needs at least one batch, for its schema"
    table = pa.Table.from_batches(batches)
    sink = pa.BufferOutputStream()
    with _writer(sink, table.schema) as writer:
        writer.write_table(table, row_group_size=_GROUP_ROWS)
    return _stored(store, path, table.num_rows, memoryview(sink.getvalue()))


def write_joined_file(store: Store, path: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> DataFile:
    """Write the rows of tables of one schema, one after the other, as one Parquet file. Raises StorageError.

    Few rows are in memory at once: those of a row group, and the one table that makes it full.
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
    """All columns of a data file, hidden ones included, dictionaries widened. Raises CorruptionError, NotFoundError."""
    where = join_url(store.url, file.path)
    data = store.read(file.path)
    if len(data) != file.size_bytes or checksum_of(data) != file.checksum:
        raise CorruptionError(f"{where} is damaged: its checksum does not match the table's log")
    try:
        return _decoded_file(data)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptionError(f"{where} cannot be decoded: {error}") from error


def read_table(store: Store, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pa.Table:
    """The rows of the table at the store's root, in the table's schema: those that are committed now, or as of then.

    Append mode: in commit order. Upsert mode: one row a key, the newest. With `filters` only files of partitions that
    match are read. Raises TableError if there is no table, or no such commit, ConfigurationError for a filter that is
    none, CorruptionError or NotFoundError for a damaged or lost file.
    """
    snapshot = TableLog(store).snapshot(as_of)
    files = matching_files(snapshot.info, snapshot.files, filters)
    table = read_files(store, snapshot.info, files)
    if files and snapshot.info.mode == "upsert":
        table = shown_rows(newest_rows(table, snapshot.info))
    return table


def read_head(store: Store, n: int) -> tuple[pa.Table, bool]:
    """The first `n` rows that are committed now, and whether there are more. Raises as `read_table`.

    Of a table in append mode no more files are read than hold them.
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
    """The rows of some files of a table, in its schema; in an upsert table with their versions, if there are any.

    Raises CorruptionError or NotFoundError for a damaged or lost file.
    """
    if not files:
        return info.arrow_schema.empty_table()
    return pa.concat_tables([read_rows(store, info, file) for file in files]).unify_dictionaries()


def delete_unreferenced(store: Store, job_id: JobId, before_attempt: int | None) -> int:
    """Delete a job's data files that no log entry refers to; returns how many. Those of compactions stay.

    Only attempts below `before_attempt` are touched, or all of them if it is None. These attempts must be
    over: a file that is written but not yet committed looks just like one that never will be.
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
    """How the names of files begin that a step of a compaction writes; `mark` is its process's own."""
    return f"{mark:0{_MARK_DIGITS}d}-{step:06d}-"


def delete_unfinished(store: Store, job_id: JobId, before_mark: int) -> int:
    """Delete what compactions beside a running job have written and no log entry refers to; returns how many files.

    Only files of marks below `before_mark` are touched. Nobody who has such a mark can add to the log any more.
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
    """Paths of the data files below a folder, those of partitions too."""
    found = []
    for name in store.list(folder):
        path = f"{folder}/{name}"
        found += [path] if name.endswith(DATA_FILE_SUFFIX) else _data_files(store, path)
    return found


def _decoded_file(data: Buffer) -> pa.Table:
    """The rows of a Parquet file. pa.ArrowException, OSError or ValueError if it is none."""
    # One file per call, without the dataset layer: the folder names are no partitions.
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
    """All rows, read by this thread alone.

    Arrow's threads hold the Python buffer for a moment after a read has returned, as those that read ahead do
    (`pre_buffer`). One that lets go of it while the interpreter ends aborts the process.
    """
    return file.read(use_threads=False)


def _without_arrow_schema(data: Buffer) -> pq.FileMetaData:
    """What the footer of a Parquet file says, but for the Arrow schema, which decides what columns are decoded to."""
    whole = memoryview(data)
    footer_bytes = int.from_bytes(whole[-8:-4], "little") + 8
    footer = bytes(whole[-footer_bytes:]).replace(_ARROW_SCHEMA, _ARROW_SCHEMA.lower())
    return pq.read_metadata(pa.BufferReader(_PARQUET_MAGIC + footer))


def with_added(table: pa.Table, schema: pa.Schema, added: Collection[str]) -> pa.Table:
    """The rows of a file, with nulls in columns of `schema` that were added to the table after the file was written."""
    for name in added:
        if name in schema.names and name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, schema.field(name).type))
    return table


def stored_schema(info: TableInfo) -> pa.Schema:
    """The table's columns and types, and in an upsert table the hidden ones besides."""
    schema = info.arrow_schema
    schema = schema.append(pa.field(VERSION_COLUMN, pa.int64())) if info.mode == "upsert" else schema
    return schema.append(pa.field(DELETED_COLUMN, pa.bool_())) if info.deletes else schema


def read_rows(store: Store, info: TableInfo, file: DataFile) -> pa.Table:
    """A file's rows, with the columns of `stored_schema`. CorruptionError, NotFoundError for a damaged or lost file."""
    schema = stored_schema(info)
    table = with_added(read_data_file(store, file), schema, info.added)
    try:
        return table.select(schema.names).cast(schema)
    except (KeyError, pa.ArrowException, ValueError) as error:
        where = join_url(store.url, file.path)
        raise CorruptionError(f"{where} does not have the columns of its table: {error}") from error


def newest_rows(table: pa.Table, info: TableInfo) -> pa.Table:
    """Of the rows of an upsert table, with their hidden columns, one a key, in their order: that which counts.

    It has the highest version, or the greatest value in the column by which the table is ordered and of such the
    highest version. A null is less than any value, NaN is greater.
    """
    # Imported late: every task imports this module, and only readers of upsert tables need polars.
    import polars as pl

    order = [] if info.order_by is None else [info.order_by]
    columns = table.select(list(dict.fromkeys([*info.keys, *order, VERSION_COLUMN])))
    # Polars groups nulls and equal floats as one key; only key columns go through it, so types stay Arrow's.
    # Columns are called by their numbers: polars would take a name such as "*" for a pattern.
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
    """A column whose values polars compares as Arrow would compare those of this one."""
    kind = decoded_type(column.type)
    column = column.cast(kind)
    if polars_has(kind):
        return column
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp(kind.unit, "UTC"))
    # Of a type that polars lacks, such as decimal256, the order of its values is enough.
    return pc.rank(column, sort_keys="ascending", null_placement="at_start", tiebreaker="dense")


def shown_rows(table: pa.Table) -> pa.Table:
    """The newest rows of an upsert table as readers see them: without those that delete, and without hidden columns."""
    if DELETED_COLUMN in table.column_names:
        table = table.filter(pc.invert(table.column(DELETED_COLUMN))).drop_columns([DELETED_COLUMN])
    return table.drop_columns([VERSION_COLUMN])


def files_there(store: Store, paths: Iterable[str]) -> tuple[str, ...]:
    """Those of the files that are there. StorageError."""
    wanted = set(paths)
    folders = sorted({path.rpartition("/")[0] for path in wanted})
    return tuple(path for folder in folders for name in store.list(folder) if (path := f"{folder}/{name}") in wanted)
