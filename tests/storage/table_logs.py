"""Small tables of a few jobs, and what they show."""

from __future__ import annotations

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
INFO = TableInfo.of(SCHEMA, "append")
A, B, C = JobId("a-1"), JobId("b-1"), JobId("c-1")
X, Y = JobId("x-1"), JobId("y-1")


def file_of(name: str, rows: int = 1) -> DataFile:
    """A data file."""
    return DataFile(f"data/{name}.parquet", rows, 10, "xxh3:0")


def table_at(store: FileSystemStore) -> TableLog:
    """The log of a table that is there."""
    log = TableLog(store)
    log.create(INFO)
    return log


def shown_at(store: FileSystemStore) -> list[str]:
    """Names of the files that a new reader sees."""
    return [file.path.removeprefix("data/").removesuffix(".parquet") for file in TableLog(store).snapshot().files]


def commit(log: TableLog, job: JobId, number: int, *names: str) -> None:
    """A job commits files with a checkpoint."""
    log.commit(job, CheckpointId(number), tuple(map(file_of, names)))


def owner_of(log: TableLog) -> JobId | None:
    """Who may commit."""
    owner = log.owner()
    return None if owner is None else owner.job_id
