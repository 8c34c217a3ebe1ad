"""Jobs for the tests of the Ray runtime: rows per key into an upsert table, and a gate that keeps a job running."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import patient_ray
import pyarrow as pa
import waiting
from ray import cloudpickle
from watched_jobs import watch_jobs

from tidegate.actors.coordinator.job_spec import ADOPTION_TIMEOUT_MS, CheckpointSettings, JobSpec
from tidegate.actors.drivers.job_context import DataPlaneOptions, HeartbeatSettings, JobContext
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.runtimes.running_job import JobProgress, Submission
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.source import ReadResult, Source, SourceReader, SourceSplit
from tidegate.operators.aggregates import aggregate as aggregates
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.functions.batch_functions import MapBatches
from tidegate.operators.sinks.table_sink import TableSink
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import JobId, OperatorUid
from tidegate.storage.tables.table_files import read_table
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

ROWS, KEYS = 20_000, 101
ROWS_A_BATCH = 100
PACE_S = 0.05

_SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("total", pa.int64())])

Function = Callable[[pa.RecordBatch], pa.RecordBatch]

# Programs that tests start wait as tests do, and have no fixture that puts their jobs under watch.
watch_jobs()
patient_ray.await_nodes()

# Processes of the job cannot import the modules of the tests: they are sent by value.
for _module in (waiting, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(_module)


@dataclass(frozen=True)
class KeyedJob:
    """A submission, and what its table must hold in the end."""

    submission: Submission
    table_url: str
    expected: pa.Table

    def table(self) -> pa.Table:
        """What the table shows, by key."""
        return shown_table(self.table_url)


@dataclass(frozen=True)
class Gated:
    """A source that gives a row now and then while a file is missing, and never the last of a split.

    So the job cannot end before a test lets it, however long that takes.
    """

    source: Source
    gate: Path

    @property
    def schema(self) -> pa.Schema:
        """That of the source."""
        return self.source.schema

    def splits(self) -> Sequence[SourceSplit]:
        """Those of the source."""
        return self.source.splits()

    def reader(self) -> SourceReader:
        """A reader that looks at the gate before each read."""
        return GatedReader(self.source.reader(), self.gate)


class GatedReader:
    """See `Gated`."""

    def __init__(self, reader: SourceReader, gate: Path) -> None:
        self._reader = reader
        self._gate = gate

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """One row or none as long as the gate is closed."""
        if not self._gate.exists():
            waiting.pause(PACE_S)
            if offset + 1 >= split.rows:
                return ReadResult(None, offset, False)
            rows_max = 1
        return self._reader.read(split, offset, rows_max)

    def close(self) -> None:
        """Of the source."""
        self._reader.close()


def keyed_job(
    folder: Path,
    gate: Path,
    *,
    name: str,
    function: Function = lambda batch: batch,
    parallelism: int = 2,
    interval_ms: int | None = 150,
    restart: RestartStrategy | None = None,
    root: str | None = None,
    heartbeats: HeartbeatSettings | None = None,
) -> KeyedJob:
    """gated source -> `function` | key by k | count and sum -> upsert table; checkpoints and table under `folder`."""
    data = _data()
    table_url = str(folder / "table")
    graph = translate(_nodes(Gated(MemorySource(data, 2 * parallelism), gate), function, table_url, parallelism))
    job_id = JobId(f"{name}-{uuid.uuid4().hex[:8]}")
    table_log = TableLog(open_store(table_url))
    table_log.create(TableInfo.of(_SCHEMA, "upsert", ("k",)))
    table_log.claim(job_id, None, "error")
    sources = [v.source for v in graph.vertices if v.source is not None]
    context = JobContext(
        job_id,
        name,
        root or str(folder / "checkpoints"),
        graph,
        {s.uid: tuple(SplitPosition(split) for split in s.source.splits()) for s in sources},
        DataPlaneOptions(source_rows_max=ROWS_A_BATCH),
        heartbeats=heartbeats or HeartbeatSettings(),
    )
    spec = JobSpec(
        job_id,
        name,
        context.root,
        graph.tasks(),
        tuple(task for task in graph.tasks() if graph.vertex(task.vertex).source is not None),
        graph.operator_infos(),
        CheckpointSettings(interval_ms),
        restart or RestartStrategy.none(),
        adoption_timeout_ms=ADOPTION_TIMEOUT_MS,
    )
    return KeyedJob(Submission(spec, context), table_url, expected_table())


def expected_table() -> pa.Table:
    """What the table of such a job holds in the end, by key."""
    counted = _data().group_by("k").aggregate([("v", "count"), ("v", "sum")])
    return counted.rename_columns(_SCHEMA.names).sort_by("k")


def shown_table(url: str | Path) -> pa.Table:
    """What such a table shows, by key."""
    return read_table(open_store(str(url))).select(_SCHEMA.names).sort_by("k")


def until(what: str, look: Callable[[], JobProgress], condition: Callable[[JobProgress], bool]) -> JobProgress:
    """Wait for a condition of a job's progress; the progress that fulfils it."""
    seen = look()

    def happened() -> bool:
        nonlocal seen
        seen = look()
        return condition(seen)

    def failure() -> str | None:
        return f"the job has failed: {seen.reason}" if seen.status == "failed" else None

    waiting.watched.add(failure)
    try:
        waiting.until(what, happened, lambda: seen)
    finally:
        waiting.watched.remove(failure)
    return seen


def _data() -> pa.Table:
    random = np.random.default_rng(7)
    return pa.table({"k": random.integers(0, KEYS, ROWS), "v": random.integers(-1000, 1000, ROWS)})


def _nodes(source: Source, function: Function, table_url: str, parallelism: int) -> Sequence[StreamNode]:
    rows = StreamNode(OperatorUid("rows"), "rows", parallelism, source.schema, source=source)
    mapped = StreamNode(
        OperatorUid("map"), "check", parallelism, None, factory=lambda: MapBatches(function), inputs=((rows, None),)
    )
    by_key = Partitioning(PartitioningKind.HASH, ("k",))
    keyed = StreamNode(
        OperatorUid("totals"),
        "totals",
        parallelism,
        None,
        factory=lambda: KeyedAggregate(("k",), {"n": aggregates.count(), "total": aggregates.sum("v")}),
        inputs=((mapped, by_key),),
    )
    table = StreamNode(
        OperatorUid("table"),
        "table",
        parallelism,
        None,
        factory=lambda: TableSink("upsert", ("k",)),
        table=table_url,
        inputs=((keyed, None),),
    )
    return [rows, mapped, keyed, table]
