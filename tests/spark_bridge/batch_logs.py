"""What tests of batch logs share: logs that are written as Spark would, without Spark."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pyarrow as pa
from staged_values import stage_values

from tidegate.connectors.source import SourceReader, SourceSplit
from tidegate.connectors.staged_parquet import StagedFile
from tidegate.spark_bridge.streams.batch_log import BatchLog, LogBatch, LogHeader, batch_after, data_folder
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store

SCHEMA = pa.schema([pa.field("x", pa.int64(), nullable=False)])
QUERY = "query-1"


def new_log(url: str, lanes: int = 2) -> BatchLog:
    """An empty log."""
    log = BatchLog(open_store(url))
    log.create(LogHeader("log", SCHEMA, lanes))
    return log


def stage_rows(store: Store, folder: str, files: Sequence[Sequence[int]]) -> tuple[StagedFile, ...]:
    """Stage values of `x`, a sequence for each part."""
    return stage_values(store, folder, files, SCHEMA)


def append(log: BatchLog, *files: Sequence[int], previous: LogBatch | None = None) -> LogBatch:
    """Write the next batch, a file for each sequence of values."""
    ids = log.batch_ids()
    if previous is None and ids:
        previous = log.read(ids[-1])
    batch_id = 0 if previous is None else previous.batch_id + 1
    staged = stage_rows(log.store, data_folder(batch_id, uuid.uuid4().hex[:8]), files)
    batch = batch_after(previous, batch_id, QUERY, staged, log.header().lanes)
    log.commit(batch)
    return batch


def read_on(
    reader: SourceReader, split: SourceSplit, offset: int = 0, rows_max: int = 1000, tries: int = 200
) -> list[int]:
    """Values of a lane from an offset on, until nothing comes any more."""
    values: list[int] = []
    for _ in range(tries):
        result = reader.read(split, offset, rows_max)
        assert not result.at_end
        offset = result.next_offset
        if result.batch is not None:
            values += result.batch.column("x").to_pylist()
    return values


class Clock:
    """Time that passes when a test says so, or by so much with every look at it."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s = 0.0
        self._step_s = step_s

    def __call__(self) -> float:
        """The time now."""
        self.now_s += self._step_s
        return self.now_s
