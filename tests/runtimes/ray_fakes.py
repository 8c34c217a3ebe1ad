"""What stands in for Ray: calls of actors that end when a test says so, and a job of two tasks."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.identity import TaskId
from tidegate.actors.memory_source import MemorySource
from tidegate.actors.operators.partitioning import Partitioning, PartitioningKind
from tidegate.actors.operators.stateless import MapBatches
from tidegate.storage.ids import OperatorUid, SubtaskIndex, VertexId

SOURCE, SINK = (TaskId(VertexId(name), SubtaskIndex(0)) for name in ("source", "sink"))
ROWS = pa.record_batch({"k": pa.array(range(1_000), pa.int64())})


@dataclass
class Reference:
    """An object reference whose call ends when the test says so."""

    call: Future[Any] = field(default_factory=Future)

    def future(self) -> Future[Any]:
        return self.call


@dataclass
class Method:
    """A method of an actor: calls are kept, with their arguments."""

    calls: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]]] = field(default_factory=queue.SimpleQueue)
    answers: bool = False

    def options(self, num_returns: int) -> Method:
        return self

    def remote(self, *arguments: object) -> Reference:
        reference = Reference()
        if self.answers:
            reference.call.set_result(None)
        self.calls.put((reference.call, arguments))
        return reference


def source_to_sink() -> tuple[MemorySource, JobGraph]:
    """A source of `ROWS`, and a graph in which it sends them to a sink by key; one task each."""
    source = MemorySource.of(ROWS, 1)
    rows = StreamNode(OperatorUid("source"), "source", 1, source.schema, source=source)
    by_key = Partitioning(PartitioningKind.HASH, ("k",))
    sink = StreamNode(
        OperatorUid("sink"), "sink", 1, None, factory=lambda: MapBatches(lambda b: b), inputs=((rows, by_key),)
    )
    return source, translate([rows, sink])
