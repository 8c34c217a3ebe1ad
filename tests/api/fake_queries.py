"""A streaming DataFrame and its query without Spark: what Spark promises about micro-batches, and no JVM.

Spark writes down what a batch reads before it begins, and that it is done afterwards; what was not done it does again.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from tidegate.spark_bridge.dataframes.manifest import StagedFile
from tidegate.spark_bridge.dataframes.parquet_writer import FileLimits, write_files
from tidegate.spark_bridge.streams import stream_feed
from tidegate.spark_bridge.streams.streaming_query import MicroBatch
from tidegate.storage.files.store import Store

LOOK_S = 0.002
"""The pace of a query that has nothing to do."""


class FakeStream:
    """A streaming DataFrame: tests put batches into it, each a list of the values of its files.

    Its `checkpoints` are those that Spark would have on disk: by their place, the query and how many batches are done.
    """

    isStreaming = True

    def __init__(self, column: str = "x") -> None:
        self.schema = StructType([StructField(column, LongType())])
        self.batches: list[list[list[int]]] = []
        self.checkpoints: dict[str, tuple[str, int]] = {}
        self.broken: Exception | None = None
        self.active: list[FakeQuery] = []
        self._lock = threading.Lock()

    def put(self, *files: list[int]) -> None:
        """One more micro-batch."""
        self.batches.append(list(files))

    @property
    def values(self) -> list[int]:
        """Of all batches."""
        return sorted(value for batch in self.batches for file in batch for value in file)

    def done(self, place: str, batch_id: int) -> None:
        """A query has done a batch; one that is slower than another one of the same place takes nothing back."""
        with self._lock:
            query, done = self.checkpoints[place]
            self.checkpoints[place] = (query, max(done, batch_id + 1))

    def forget_last(self) -> None:
        """Spark's driver died after it had written the last batch, and before it wrote down that it was done."""
        self.checkpoints = {place: (query, done - 1) for place, (query, done) in self.checkpoints.items()}


class FakeQuery:
    """What `StreamingQuery` is to a feed. Batches are written when somebody waits for the end of the query."""

    def __init__(self, df: FakeStream, write: Callable[[MicroBatch], None]) -> None:
        self._df = df
        self._write = write
        self._place = ""
        self._stopped = threading.Event()

    def start(self, name: str, checkpoint: str, trigger_ms: int | None) -> None:
        """A query with a checkpoint goes on where it was."""
        self._place = checkpoint
        self._df.checkpoints.setdefault(checkpoint, (uuid.uuid4().hex, 0))
        self._df.active.append(self)

    def ended(self, timeout_s: float) -> bool:
        """Do the next batch, if there is one."""
        query_id, done = self._df.checkpoints[self._place]
        if self._df.broken is not None:
            raise self._df.broken
        if done < len(self._df.batches):
            self._write(MicroBatch(self._df.batches[done], done, query_id, "group"))  # type: ignore[arg-type]
            self._df.done(self._place, done)
            return False
        return self._stopped.wait(LOOK_S)

    def reason(self, error: BaseException) -> str:
        """Why it failed."""
        return f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        """Nothing is written any more."""
        self._stopped.set()
        if self in self._df.active:
            self._df.active.remove(self)


def stage_rows(
    rows: list[list[int]], store: Store, folder: str, schema: pa.Schema, *, timeout_s: float, job_group: str
) -> tuple[StagedFile, ...]:
    """What executors do."""
    return tuple(
        staged
        for number, values in enumerate(rows)
        for staged in write_files(
            store,
            f"{folder}/part-{number:06d}",
            [pa.record_batch({schema.names[0]: values}, schema)],
            schema,
            FileLimits(rows_per_group=4),
        )
    )


@contextmanager
def without_spark() -> Iterator[None]:
    """Feeds run these queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_feed, "StreamingQuery", FakeQuery)
        patch.setattr(stream_feed, "stage_files", stage_rows)
        yield
