"""Shows the committed rows of a tidegate table as a `ray.data.Dataset`, read lazily by tasks of Ray Data.

Rules:

- A dataset shows the files of one snapshot of the table's log, whatever is committed later.
- Each file is checked against the checksum in the log, as everywhere (`read_rows`).
- Append mode: a read task reads a run of files one after the other, in commit order. Its rows are counted already.
- Upsert mode: the newest row of a key may be in any file. A read task reads all files and keeps the keys whose hash is
  its own, so its memory is bounded by its share. There are more tasks only as tables grow (`BUCKET_BYTES`).
- Hidden columns are not shown. A table without rows gives a dataset that has columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import ray.data
from fsspec.utils import get_protocol
from numpy.typing import NDArray
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store
from tidegate.storage.schemas.one_batch import one_batch
from tidegate.storage.tables.log.log_versions import AsOf
from tidegate.storage.tables.partition_filters import PartitionFilter, matching_files
from tidegate.storage.tables.table_files import newest_rows, read_rows, shown_rows
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

BUCKET_BYTES = 128 * 2**20
"""Bytes of compressed files for which one read task of an upsert table keeps the keys."""


def table_to_dataset(
    store: Store, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()
) -> ray.data.Dataset:
    """The rows of the table at the store's root as committed now, or at `as_of`; only matching partitions are read.

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
    """The files of one snapshot of a table, for Ray Data."""

    def __init__(self, store: Store, info: TableInfo, files: Sequence[DataFile]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store
        self._info = info
        self._files = tuple(files)

    def get_name(self) -> str:
        """Name of the read in Ray Data's plans and progress bars."""
        return "TidegateTable"

    def estimate_inmemory_data_size(self) -> int | None:
        """Bytes of the files, compressed: what Ray Data chooses the number of read tasks by."""
        return sum(file.size_bytes for file in self._files)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        """At most `parallelism` tasks in append mode; in upsert mode as many as the size of the files needs."""
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
        """Number of tasks that share the keys: one if a key is of a type without a hash."""
        size_bytes = sum(file.size_bytes for file in self._files)
        try:
            _hashes(self._info.arrow_schema.empty_table(), self._info)
        except ConfigurationError:
            return 1
        return max(1, -(-size_bytes // BUCKET_BYTES))


def _no_rows(store: Store, info: TableInfo, files: Sequence[DataFile]) -> Iterator[pa.Table]:
    yield info.arrow_schema.empty_table()


def _appended(store: Store, info: TableInfo, files: Sequence[DataFile]) -> Iterator[pa.Table]:
    """The rows of files of an append table, a block for each file."""
    for file in files:
        yield read_rows(store, info, file)


def _newest(
    store: Store, info: TableInfo, files: Sequence[DataFile], *, bucket: int, buckets: int
) -> Iterator[pa.Table]:
    """The newest rows of those keys of an upsert table whose hash is in the bucket, in one block."""
    kept = []
    for file in files:
        rows = read_rows(store, info, file)
        kept.append(rows if buckets == 1 else rows.filter(pa.array(_hashes(rows, info) % buckets == bucket)))
    yield shown_rows(newest_rows(pa.concat_tables(kept).unify_dictionaries(), info))


def _hashes(rows: pa.Table, info: TableInfo) -> NDArray[np.uint64]:
    """The hash of the key of each row."""
    return hash_columns(one_batch(rows.select(list(info.keys)), "table.to_ray"), info.keys)
