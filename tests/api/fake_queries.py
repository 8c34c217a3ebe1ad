"""A streaming DataFrame and its query without Spark, in a program: what Spark promises about batches, and no JVM.

Spark writes down what a batch reads before it begins, and that it is done afterwards; what was not done it does again.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, config
from pyspark.sql.types import LongType, StructField, StructType
from staged_values import stage_values
from waiting import until

import tidegate as tg
from tidegate.connectors.staged_parquet import StagedFile
from tidegate.spark_bridge.streams import stream_feed
from tidegate.spark_bridge.streams.batch_log import BatchLog, log_at
from tidegate.spark_bridge.streams.stream_feed import MicroBatch
from tidegate.storage.files.store import Store

SETTINGS = {"interval": "20ms"}
LOOK_S = 0.002
"""The pace of a query that has nothing to do."""


class FakeStream:
    """A streaming DataFrame: tests put batches into it, each a list of the values of its files.

    Its `checkpoints` are those that Spark would have on disk: by their place, the query and how many batches are done.
    """

    isStreaming = True
    sparkSession = SimpleNamespace(sparkContext=SimpleNamespace(master="fake"))

    def __init__(self, column: str = "x") -> None:
        self.schema = StructType([StructField(column, LongType())])
        self.batches: list[list[list[int]]] = []
        self.checkpoints: dict[str, tuple[str, int]] = {}
        self.broken: Exception | None = None
        self.active: list[FakeQuery] = []
        self.most_active = 0
        """How many queries were active at a time."""
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
        self._df.most_active = max(self._df.most_active, len(self._df.active))

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
    rows: list[list[int]],
    store: Store,
    folder: str,
    schema: pa.Schema,
    *,
    timeout_s: float,
    job_group: str,
    marks: bool,
) -> tuple[StagedFile, ...]:
    """What executors do."""
    return stage_values(store, folder, rows, schema)


@contextmanager
def without_spark() -> Iterator[None]:
    """Feeds run these queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_feed, "StreamingQuery", FakeQuery)
        patch.setattr(stream_feed, "stage_files", stage_rows)
        yield


class Streaming:
    """A program over a stream, and where it keeps its things. It ends in a table, where a test says nothing else."""

    def __init__(self, folder: Path) -> None:
        self.stream = FakeStream()
        self.root, self.out, self.savepoints = folder / "checkpoints", folder / "out", folder / "savepoints"
        self.table: tg.OutputTable | None = None
        self.row: Callable[[dict[str, int]], dict[str, int]] = lambda row: row
        """What becomes of a row."""
        self.end: Callable[[tg.Stream], object] = self._to_table
        """What becomes of the stream."""

    def execute(self, env: tg.StreamEnvironment, name: str = "job", **options: object) -> tg.Job:
        """Run it, with a checkpoint every 20 ms."""
        rows = env.from_dataframe(self.stream, uid="stream")  # type: ignore[arg-type]
        self.end(rows.map(self.row, schema=rows.schema, uid="row"))
        settings = {**SETTINGS, **options.pop("settings", {})}  # type: ignore[dict-item]
        options = {"restart": NO_RESTART, **options}
        return env.execute(name, checkpoints=config(self.root, **settings), **options)  # type: ignore[arg-type]

    def values(self) -> list[int]:
        """What the table shows."""
        assert self.table is not None
        return sorted(self.table.to_arrow().column("x").to_pylist())

    def until_all_are_there(self) -> None:
        """Every row of the stream, once."""
        until("all rows", lambda: len(self.values()) >= len(self.stream.values), self.values)
        assert self.values() == self.stream.values

    def log_of(self, job: tg.Job) -> BatchLog:
        """The log that a job reads."""
        return BatchLog(log_at(f"{self.root}/{job.job_id}/taskowned/source-stream"))

    def _to_table(self, rows: tg.Stream) -> None:
        self.table = rows.to_table(str(self.out), uid="table")
