"""Jobs for the tests of the Ray runtime: rows per key into an upsert table, and a gate that keeps a job running."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidegate.actors.coordinator.spec import CheckpointSettings, JobSpec
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.memory_source import MemorySource
from tidegate.actors.operators import aggregates
from tidegate.actors.operators.keyed_aggregate import KeyedAggregate
from tidegate.actors.operators.partitioning import Partitioning, PartitioningKind
from tidegate.actors.operators.stateless import MapBatches
from tidegate.actors.operators.table_sink import TableSink
from tidegate.actors.runtimes.context import DataPlaneOptions, JobContext
from tidegate.actors.runtimes.job import JobProgress, Submission
from tidegate.actors.task.source import SplitPosition
from tidegate.recovery.restart import RestartStrategy
from tidegate.storage.filesystem import open_store
from tidegate.storage.ids import JobId, OperatorUid
from tidegate.storage.table_files import read_table
from tidegate.storage.table_log import TableInfo, TableLog

KEYS = 101
ROWS_A_BATCH = 100
POLL_S = 0.02
GATE_S = 0.05
UNTIL_TIMEOUT_S = 90.0

_SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("total", pa.int64())])

Function = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True)
class KeyedJob:
    """A submission, and what its table must hold in the end."""

    submission: Submission
    table_url: str
    expected: pa.Table

    def table(self) -> pa.Table:
        """What the table shows, by key."""
        return read_table(open_store(self.table_url)).select(_SCHEMA.names).sort_by("k")


def gated(gate: Path) -> Function:
    """A function that is slow as long as a file is missing, so that the job cannot end before a test lets it."""

    def wait(batch: pa.RecordBatch) -> pa.RecordBatch:
        if not gate.exists():
            time.sleep(GATE_S)
        return batch

    return wait


def keyed_job(
    folder: Path,
    function: Function,
    *,
    name: str,
    rows: int = 80_000,
    parallelism: int = 2,
    interval_ms: int | None = 150,
    restart: RestartStrategy | None = None,
    root: str | None = None,
) -> KeyedJob:
    """source -> `function` | key by k | count and sum -> upsert table; checkpoints and table under `folder`."""
    data = _data(rows)
    table_url = str(folder / "table")
    graph = translate(_nodes(MemorySource(data, 2 * parallelism), function, table_url, parallelism))
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
    )
    expected = data.group_by("k").aggregate([("v", "count"), ("v", "sum")]).sort_by("k")
    return KeyedJob(Submission(spec, context), table_url, expected.rename_columns(_SCHEMA.names))


def until(what: str, look: Callable[[], JobProgress], condition: Callable[[JobProgress], bool]) -> JobProgress:
    """Wait for a condition of a job's progress, for a bounded time."""
    deadline = time.monotonic() + UNTIL_TIMEOUT_S
    while True:
        progress = look()
        if condition(progress):
            return progress
        assert time.monotonic() < deadline, f"waited in vain for {what}; the job is at {progress}"
        time.sleep(POLL_S)


def _data(rows: int) -> pa.Table:
    random = np.random.default_rng(7)
    return pa.table({"k": random.integers(0, KEYS, rows), "v": random.integers(-1000, 1000, rows)})


def _nodes(source: MemorySource, function: Function, table_url: str, parallelism: int) -> Sequence[StreamNode]:
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
