"""Ray Data integration: `RayDatasetSource` reads a `ray.data.Dataset`, and `table_to_dataset` returns an output table
as a dataset.

A dataset is lazy, and its blocks are Ray objects that are lost with their owner. A job must be able to read its input
again after a failure, in a restored job, and after the end of its driver, so Ray Data's tasks first write the rows to
Parquet files, as Spark does for a DataFrame. `ParquetSource` reads them. Rules of the source:

- A Ray task writes each block as files with unique names. Only files whose task result arrived are used. Other files in
  the staging folder are deleted.
- At the end, the manifest is created with a conditional create. From then on the folder can be read.
- Files are in the order of the dataset's blocks, and rows keep their order within a block.
- A block with other columns than the dataset's schema is refused. It is cast only if no value can change.
- Tasks return problems as rows, because Ray Data would convert an exception of a task to text.
- Ray Data bounds memory and time: a block has up to a few hundred megabytes, and without progress it gives up after
  `execution_no_progress_timeout_s` of its context.

Rules of a table as a dataset:

- A dataset shows the files of one snapshot of the table's log. Later commits do not change it.
- Each file is verified against the checksum in the log (`read_rows`).
- Append mode: a read task reads a run of files in commit order. Its rows are counted without reading.
- Upsert mode: the newest row of a key may be in any file. A read task reads all files and keeps the keys whose hash
  selects it, so its memory is bounded. Larger tables have more tasks (`BUCKET_BYTES`).
- Hidden columns are not shown. A table without rows is a dataset with columns.
"""

from __future__ import annotations

import itertools
import logging
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
import ray.exceptions
from fsspec.utils import get_protocol
from numpy.typing import NDArray
from ray.data import Dataset, Datasource, ReadTask
from ray.data.block import BlockMetadata

from tidegate.connectors.source import Source, SourceReader, SourceSplit
from tidegate.connectors.staged_parquet import (
    MANIFEST_PATH,
    FileLimits,
    ParquetSource,
    StagedFile,
    already_staged,
    write_files,
    write_manifest,
)
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, StorageError, TidegateError
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.files.store import Store
from tidegate.storage.schemas.batches import one_batch
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.tables.log.versions import AsOf
from tidegate.storage.tables.partitions import PartitionFilter, matching_files
from tidegate.storage.tables.table_files import newest_rows, read_rows, shown_rows
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)

_RESULT = pa.schema(
    [
        ("path", pa.string()),
        ("rows", pa.int64()),
        ("size_bytes", pa.int64()),
        ("checksum", pa.string()),
        ("problem", pa.string()),
    ]
)
"""Schema of the result of a task for one block: a row for each file, or one row with a problem."""


_NAMES_CAUSE = re.compile(r"[\w.]*(Error|Exception): ")


class RayDataError(TidegateError):
    """Raised if Ray Data could not compute a dataset: a function or task failed, or it made no progress."""


def _check_whole(ds: Dataset) -> None:
    """Raises ConfigurationError if the dataset's context allows Ray Data to skip failed blocks."""
    if ds.context.max_errored_blocks:
        raise ConfigurationError(
            f"from_ray_dataset: max_errored_blocks is {ds.context.max_errored_blocks} in the context of the dataset, "
            "so Ray Data may skip blocks: set it to 0"
        )


class RayDatasetSource:
    """A source over a dataset that must be staged (written to files) before it is read."""

    def __init__(self, ds: Dataset, schema: pa.Schema | None = None) -> None:
        """`schema` replaces the schema of the dataset, which Ray Data computes from the first block if it is unknown.

        Raises ConfigurationError for anything but a dataset, and for columns that streams do not have.
        """
        if not isinstance(ds, Dataset):
            raise ConfigurationError(f"from_ray_dataset takes a ray.data.Dataset, and not a {type(ds).__name__}")
        _check_whole(ds)
        self._ds = ds
        self._schema = _checked(_schema_of(ds) if schema is None else schema)

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of the dataset."""
        return self._schema

    def stage(self, url: str) -> Source:
        """Writes the rows under `url` and returns the source that reads them.

        Raises ConfigurationError for blocks with other columns and for a URL in memory, AlreadyExistsError if `url` has
        staged data, RayDataError if Ray Data fails or makes no progress.
        """
        _check_whole(self._ds)  # its context can be changed until here
        if get_protocol(url) == "memory":
            raise ConfigurationError(
                f"cannot stage a dataset to {url}: Ray's tasks are other processes and do not see this one's memory. "
                "Give a folder or a bucket."
            )
        store = open_store(url)
        if store.exists(MANIFEST_PATH):
            raise already_staged(store.url)
        folder = f"data-{uuid.uuid4().hex[:8]}"
        try:
            files = self._files(store, folder)
            _delete_leftovers(store, folder, files)
        except BaseException:
            _delete_abandoned(store, folder)
            raise
        try:
            write_manifest(store, self._schema, files)
        except AlreadyExistsError:
            # After any other error the manifest may have been created, and needs its files.
            _delete_abandoned(store, folder)
            raise
        return ParquetSource(store.url, files, self._schema)

    def reopen(self, url: str) -> Source:
        """Returns the source over rows that an earlier job staged under `url`.

        Raises NotFoundError if there are none.
        """
        return ParquetSource.open(url)

    def splits(self) -> Sequence[SourceSplit]:
        """Raises an error, because only the staged source has splits."""
        raise ConfigurationError(
            "a ray.data.Dataset cannot be read by tasks before it is staged as Parquet files: use "
            "env.from_ray_dataset(ds)"
        )

    def reader(self) -> SourceReader:
        """Raises an error, because only the staged source can be read."""
        raise ConfigurationError(
            "a ray.data.Dataset cannot be read by tasks before it is staged as Parquet files: use "
            "env.from_ray_dataset(ds)"
        )

    def _files(self, store: Store, folder: str) -> tuple[StagedFile, ...]:
        """Runs the dataset, and returns the files that its tasks wrote, in the order of the blocks."""
        if ray.is_initialized() and ray.available_resources().get("CPU", 0.0) < 1.0:
            log.warning(
                "from_ray_dataset: no CPU is free in the Ray cluster, and Ray Data's tasks need one each. Without any "
                "progress Ray Data gives up after %g s (execution_no_progress_timeout_s)",
                self._ds.context.execution_no_progress_timeout_s,
            )
        written = self._ds.map_batches(
            partial(_write_block, store=store, folder=folder, schema=self._schema),
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
        )
        try:
            rows = _rows_in_order(written)
        except Exception as error:
            raise RayDataError(
                f"Ray Data could not compute the dataset: {_reason(error)}. Nothing was staged; correct the cause and "
                "execute the job again"
            ) from error
        problem = next((row["problem"] for row in rows if row["problem"] is not None), None)
        if problem is not None:
            raise ConfigurationError(f"from_ray_dataset: {problem}")
        return tuple(StagedFile(row["path"], row["rows"], row["size_bytes"], row["checksum"]) for row in rows)


def _rows_in_order(written: Dataset) -> list[dict[str, Any]]:
    """Returns all rows of a dataset in block order. Restores the setting of the user's context afterwards."""
    options = written.context.execution_options
    before = options.preserve_order
    options.preserve_order = True
    try:
        rows: list[dict[str, Any]] = written.take_all()
        return rows
    finally:
        options.preserve_order = before


def _write_block(block: pa.Table, *, store: Store, folder: str, schema: pa.Schema) -> pa.Table:
    """Writes a block and returns the written files (schema `_RESULT`). Runs in a task of Ray Data."""
    try:
        table = _in_schema(block, schema)
        name = f"{folder}/block-{uuid.uuid4().hex}"
        files = list(write_files(store, name, table.to_batches(), schema, FileLimits()))
    except (TidegateError, pa.ArrowException) as error:
        return pa.Table.from_pylist([{"problem": str(error)}], schema=_RESULT)
    return pa.Table.from_pylist([asdict(file) for file in files], schema=_RESULT)


def _in_schema(block: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns a block cast to the columns of the dataset.

    Raises ConfigurationError if its columns or types do not fit.
    """
    if sorted(block.column_names) != sorted(schema.names):
        raise ConfigurationError(
            f"a block of the dataset has columns {columns_text(block.schema)}, and not {columns_text(schema)}. All "
            "blocks need the same columns; give schema= if the columns of the first block are not right"
        )
    table = block.select(schema.names)
    for field, found in zip(schema, table.schema, strict=True):
        if not _fits(found, field):
            raise ConfigurationError(
                f"column {field.name!r} is {field.type} in the dataset and {found.type} in one of its blocks. Convert "
                "it with map_batches, or give schema="
            )
    try:
        return table.cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise ConfigurationError(
            f"a block of the dataset does not fit {columns_text(schema)}: {error}"
            "; give schema= with the types of all blocks"
        ) from error


def _fits(found: pa.Field, wanted: pa.Field) -> bool:
    """Returns whether every value of the type of `found` can be cast exactly to the type of `wanted`.

    Decimals do not fit floats, because Arrow would round them.
    """
    try:
        wider = pa.unify_schemas(
            [pa.schema([pa.field("c", found.type)]), pa.schema([pa.field("c", wanted.type)])],
            promote_options="permissive",
        )
    except pa.ArrowException:
        return False
    return bool(wider.field("c").type.equals(wanted.type)) and not _rounds(found.type, wanted.type)


def _rounds(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Returns whether a cast from `found` to `wanted` would convert decimals, at any depth, to floats.

    Both have the same nesting.
    """
    if pa.types.is_decimal(found):
        return bool(pa.types.is_floating(wanted))
    return any(_rounds(found.field(at).type, wanted.field(at).type) for at in range(found.num_fields))


def _schema_of(ds: Dataset) -> pa.Schema:
    """Returns the columns of a dataset, from its first block if necessary.

    Raises ConfigurationError if there are none.
    """
    try:
        found = ds.schema()
        if found is not None and not isinstance(found.base_schema, pa.Schema):
            # Blocks of pandas: columns of objects have a type only once Ray Data has made Arrow of them.
            found = ds.map_batches(_same, batch_size=None, batch_format="pyarrow").schema()
    except Exception as error:
        raise RayDataError(
            f"Ray Data could not compute the schema of the dataset: {_reason(error)}"
            "; correct the cause, or give schema="
        ) from error
    if found is None or not isinstance(found.base_schema, pa.Schema):
        raise ConfigurationError(
            "from_ray_dataset: the dataset has no rows and no columns; give schema=, such as schema={'n': int}"
        )
    return found.base_schema


def _same(block: pa.Table) -> pa.Table:
    return block


def _checked(schema: pa.Schema) -> pa.Schema:
    """Returns the schema without metadata.

    Raises ConfigurationError, naming the column, for types that streams do not support.
    """
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"from_ray_dataset: the dataset has several columns called {', '.join(twice)}; rename them"
        )
    for field in schema:
        if _has_null(field.type):
            raise ConfigurationError(
                f"from_ray_dataset: column {field.name!r} has only nulls in the first block, and no type "
                f"({field.type}): give schema="
            )
        name = _extension_of(field.type)
        if not name:
            continue
        if "tensor" in name:
            advice = f"make lists of it: ds.map(lambda row: {{**row, {field.name!r}: row[{field.name!r}].tolist()}})"
        elif "pickled_object" in name:
            advice = "it has pickled Python objects: make numbers, text, lists or structs of them with ds.map"
        else:
            advice = "cast it to its storage type with ds.map_batches(..., batch_format='pyarrow')"
        raise ConfigurationError(
            f"from_ray_dataset: streams have no columns of type {field.type}, which {field.name!r} is; {advice}"
        )
    return schema.remove_metadata()


def _has_null(kind: pa.DataType) -> bool:
    """Returns whether a type, or a type inside it, is the null type."""
    return bool(pa.types.is_null(kind)) or any(_has_null(kind.field(at).type) for at in range(kind.num_fields))


def _extension_of(kind: pa.DataType) -> str:
    """Returns the name of the extension type in a type, at any depth, or "" if there is none."""
    if isinstance(kind, pa.BaseExtensionType):
        return str(kind.extension_name)
    inner = (_extension_of(kind.field(at).type) for at in range(kind.num_fields))
    return next((name for name in inner if name), "")


def _reason(error: BaseException) -> str:
    """Returns why Ray Data failed, without stack traces.

    The text of a task's error begins with a stack trace, in which the first line that begins with an error name is the
    cause. Texts of other errors are used completely.
    """
    named = [line.rstrip(". ") for line in str(error).splitlines() if _NAMES_CAUSE.match(line)]
    if named and isinstance(error, ray.exceptions.RayError):
        return named[0]
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _delete_leftovers(store: Store, folder: str, files: tuple[StagedFile, ...]) -> None:
    """Deletes files of failed or repeated tasks. A failure is logged and ignored."""
    wanted = {file.path for file in files}
    try:
        store.delete_all([f"{folder}/{name}" for name in store.list(folder) if f"{folder}/{name}" not in wanted])
    except StorageError as error:
        log.warning("could not delete leftovers of failed Ray tasks in %s: %s", folder, error)


def _delete_abandoned(store: Store, folder: str) -> None:
    """Deletes the files of a failed staging. An error here is only logged, so that the original error is raised."""
    try:
        store.delete_tree(folder)
    except StorageError as error:
        log.warning("could not delete the files of a failed staging in %s: %s", folder, error)


BUCKET_BYTES = 128 * 2**20
"""Size in bytes of the compressed files of an upsert table for which one read task is used."""


def table_to_dataset(
    store: Store, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()
) -> ray.data.Dataset:
    """Returns the rows of the table at the store's root as a dataset: now or as of `as_of`, limited to matching
    partitions.

    Raises TableError if there is no table or no such commit, ConfigurationError for a table in memory or an invalid
    filter.
    """
    if get_protocol(store.url) == "memory":
        raise ConfigurationError(
            f"Ray's tasks cannot read {store.url}: they are other processes and do not see this one's memory. Read it "
            "with to_arrow, or write the table to a folder or a bucket."
        )
    snapshot = TableLog(store).snapshot(as_of)
    files = matching_files(snapshot.info, snapshot.files, filters)
    dataset: ray.data.Dataset = ray.data.read_datasource(_TableFiles(store, snapshot.info, files))
    return dataset


class _TableFiles(Datasource):
    """Ray Data's datasource over the data files of one snapshot of a table."""

    def __init__(self, store: Store, info: TableInfo, files: Sequence[DataFile]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store
        self._info = info
        self._files = tuple(files)

    def get_name(self) -> str:
        """Returns the name of this read in Ray Data's plans and progress bars."""
        return "TidegateTable"

    def estimate_inmemory_data_size(self) -> int | None:
        """Returns the compressed bytes of the files, from which Ray Data chooses the number of read tasks."""
        return sum(file.size_bytes for file in self._files)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        """Returns the tasks that read the files: up to `parallelism` in append mode, and as many as the files need in
        upsert mode.
        """
        if not self._files:
            return [self._task(_no_rows, (), 0, per_task_row_limit)]
        if self._info.mode == "upsert":
            buckets = self._buckets()
            return [
                self._task(partial(_newest, bucket=at, buckets=buckets), self._files, None, per_task_row_limit)
                for at in range(buckets)
            ]
        count = max(1, min(parallelism, len(self._files)))
        ends = [len(self._files) * at // count for at in range(count + 1)]
        runs = [self._files[start:end] for start, end in itertools.pairwise(ends)]
        return [self._task(_appended, run, sum(file.rows for file in run), per_task_row_limit) for run in runs]

    def _task(
        self,
        read: Callable[[Store, TableInfo, Sequence[DataFile]], Iterator[pa.Table]],
        files: Sequence[DataFile],
        rows: int | None,
        row_limit: int | None,
    ) -> ReadTask:
        metadata = BlockMetadata(
            num_rows=rows,
            size_bytes=sum(file.size_bytes for file in files),
            exec_stats=None,
            input_files=tuple(join_url(self._store.url, file.path) for file in files),
        )
        read_fn = partial(read, self._store, self._info, files)
        return ReadTask(read_fn, metadata, schema=self._info.arrow_schema, per_task_row_limit=row_limit)

    def _buckets(self) -> int:
        """Returns the number of tasks over which keys are divided by hash: 1 if a key column's type has no hash."""
        size_bytes = sum(file.size_bytes for file in self._files)
        try:
            _hashes(self._info.arrow_schema.empty_table(), self._info)
        except ConfigurationError:
            return 1
        return max(1, -(-size_bytes // BUCKET_BYTES))


def _no_rows(store: Store, info: TableInfo, files: Sequence[DataFile]) -> Iterator[pa.Table]:
    yield info.arrow_schema.empty_table()


def _appended(store: Store, info: TableInfo, files: Sequence[DataFile]) -> Iterator[pa.Table]:
    """Yields the rows of an append table's files, one block for each file."""
    for file in files:
        yield read_rows(store, info, file)


def _newest(
    store: Store, info: TableInfo, files: Sequence[DataFile], *, bucket: int, buckets: int
) -> Iterator[pa.Table]:
    """Yields one block with the newest rows of an upsert table whose key hash is in bucket `bucket`."""
    kept = []
    for file in files:
        rows = read_rows(store, info, file)
        kept.append(rows if buckets == 1 else rows.filter(pa.array(_hashes(rows, info) % buckets == bucket)))
    yield shown_rows(newest_rows(pa.concat_tables(kept).unify_dictionaries(), info))


def _hashes(rows: pa.Table, info: TableInfo) -> NDArray[np.uint64]:
    """Returns the hash of the key columns of each row."""
    return hash_columns(one_batch(rows.select(list(info.keys)), "table.to_ray"), info.keys)
