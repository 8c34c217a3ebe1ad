"""What tests of restoring share: job graphs without code, and checkpoints of them that are made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorSpec, SourceSpec
from tidegate.actors.restore.restore_checks import misfits, refuse
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.operator import Operator
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    StateHandle,
    StoredSplit,
    SubtaskState,
    create_metadata,
)
from tidegate.storage.files.store import Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.in_flight import ChannelEnd, InFlightRows, write_in_flight

JOB, FIVE = JobId("demo-1a2b3c4d"), CheckpointId(5)
MAX_PARALLELISM = 16

FORWARD = Partitioning(PartitioningKind.FORWARD)
REBALANCE = Partitioning(PartitioningKind.REBALANCE)
BROADCAST = Partitioning(PartitioningKind.BROADCAST)
BY_KEY = Partitioning(PartitioningKind.HASH, ("k",))

Edge = tuple[str, str, Partitioning]


def graph_of(
    parallelism: Mapping[str, int],
    *edges: Edge,
    chains: Mapping[str, Sequence[str]] | None = None,
    max_parallelism: int = MAX_PARALLELISM,
) -> JobGraph:
    """Vertices in the order given; one without an input has a source. `chains` names the operators of a vertex."""
    fed = {downstream for _, downstream, _ in edges}
    vertices = []
    for name, subtasks in parallelism.items():
        uids = (chains or {}).get(name, [name])
        source = None
        if name not in fed:
            rows = pa.table({"x": pa.array([], pa.int64())})
            source = SourceSpec(OperatorUid(uids[0]), uids[0], MemorySource(rows, 1))
            uids = uids[1:]
        operators = tuple(OperatorSpec(OperatorUid(uid), uid, Operator) for uid in uids)
        vertices.append(JobVertex(VertexId(name), name, subtasks, operators, source))
    numbered = tuple(JobEdge(n, VertexId(up), VertexId(down), p) for n, (up, down, p) in enumerate(edges))
    return JobGraph(tuple(vertices), numbered, max_parallelism)


def check_fits(metadata: CheckpointMetadata, graph: JobGraph, *, ignore_in_flight: bool = False) -> None:
    """As `check_restorable`, but that the sources of these graphs, which read nothing, are not asked."""
    refuse(metadata, misfits(metadata, graph, ignore_in_flight=ignore_in_flight))


def checkpoint_of(
    graph: JobGraph,
    *,
    finished: Mapping[str, Sequence[int]] | None = None,
    handles: Mapping[tuple[str, int], StateHandle | None] | None = None,
    in_flight: Mapping[tuple[str, int], StateHandle | None] | None = None,
    read_splits: Mapping[tuple[str, int], tuple[StoredSplit, ...]] | None = None,
) -> CheckpointMetadata:
    """A checkpoint that a job with this graph might have made."""
    subtasks = tuple(
        SubtaskState(
            task.vertex,
            task.subtask,
            (handles or {}).get((task.vertex, task.subtask)),
            finished=task.subtask in (finished or {}).get(task.vertex, ()),
            in_flight=(in_flight or {}).get((task.vertex, task.subtask)),
            read_splits=(read_splits or {}).get((task.vertex, task.subtask), ()),
        )
        for task in graph.tasks()
    )
    return CheckpointMetadata(
        METADATA_VERSION, JOB, "demo", FIVE, AttemptNumber(0), 0, graph.operator_infos(), subtasks
    )


def store_in_flight(
    store: Store,
    upstream: str,
    downstream: str,
    channels: Mapping[tuple[str, int, int], Sequence[pa.RecordBatch | int]],
    edge: str | None = None,
) -> dict[tuple[str, int], StateHandle | None]:
    """Handles by subtask for what lies at (direction, upstream, downstream) of the channels of an edge.

    Numbers are watermarks.
    """
    held: dict[tuple[str, int], list[InFlightRows]] = {}
    name = edge or f"{upstream}->{downstream}#0"
    for (direction, up, down), elements in channels.items():
        assert direction in ("input", "output")
        end = ChannelEnd(name, direction, SubtaskIndex(up), SubtaskIndex(down))  # type: ignore[arg-type]
        owner = (downstream, down) if direction == "input" else (upstream, up)
        held.setdefault(owner, []).append(InFlightRows.of(end, elements))
    return {owner: write_in_flight(store, f"{owner[0]}-{owner[1]}-channels", rows) for owner, rows in held.items()}


def complete(store: Store, metadata: CheckpointMetadata, **options: bool) -> RestorePoint:
    """Create the checkpoint; where to restore it from."""
    create_metadata(store, metadata)
    return RestorePoint(store.url, metadata.job_id, metadata.checkpoint_id, metadata.final, **options)
