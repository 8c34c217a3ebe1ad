"""What the task's machine calls in flight is written where the acknowledgement says, and is read by a restore."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from restored_graphs import BY_KEY, JOB, REBALANCE, checkpoint_of, complete, graph_of

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.job_context import DataPlaneOptions, JobContext
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.files.store import Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, SubtaskIndex, VertexId

COUNT = TaskId(VertexId("count"), SubtaskIndex(1))
GRAPH = graph_of({"source": 2, "count": 2, "sink": 1}, ("source", "count", REBALANCE), ("count", "sink", BY_KEY))
FROM_SOURCE = ChannelId(0, SubtaskIndex(0), SubtaskIndex(1))
TO_SINK = ChannelId(1, SubtaskIndex(1), SubtaskIndex(0))


def rows(*values: int) -> pa.RecordBatch:
    """One column, the key."""
    return pa.record_batch({"k": pa.array(values, pa.int64())})


STORED = do.PersistChannelState(
    CheckpointId(5),
    (
        do.InFlight(FROM_SOURCE, do.Direction.INPUT, (rows(1, 2), rows(3)), recovered=1),
        do.InFlight(TO_SINK, do.Direction.OUTPUT, (rows(4),)),
    ),
)


@pytest.fixture
def store() -> Iterator[FileSystemStore]:
    """A store in memory."""
    opened = open_store(f"memory://{uuid.uuid4().hex}")
    yield opened
    opened.delete_tree("")


def effects(
    root: str, graph: JobGraph = GRAPH, task: TaskId = COUNT, opened: Callable[[str], Store] = open_store
) -> TaskEffects:
    """The I/O of one task that inlines nothing."""
    context = JobContext(JOB, "demo", root, graph, {}, DataPlaneOptions(inline_bytes_max=0))
    return TaskEffects(context, context.describe(task, AttemptNumber(0)), opened, lambda: 7)


def test_what_is_written_is_restored(store: FileSystemStore) -> None:
    """Both ends by the names of their edges: in a graph that numbers its edges otherwise, each goes its own way."""
    persisted = effects(store.url).persist_channel_state(STORED)

    assert isinstance(persisted, ev.ChannelStatePersisted)
    assert persisted.checkpoint_id == 5
    assert persisted.handle is not None
    assert persisted.handle.path == f"{JOB}/chk-5/count-1-channels"
    point = complete(store, checkpoint_of(GRAPH, in_flight={("count", 1): persisted.handle}))
    other = graph_of(
        {"source": 2, "new": 1, "count": 2, "sink": 1},
        ("new", "sink", BY_KEY),
        ("count", "sink", BY_KEY),
        ("source", "count", REBALANCE),
    )
    assert in_flight(store, point, other, COUNT) == {(2, 0, 1): [1, 2, 3]}
    assert in_flight(store, point, other, TaskId(VertexId("count"), SubtaskIndex(0))) == {}
    assert in_flight(store, point, other, TaskId(VertexId("sink"), SubtaskIndex(0))) == {(1, 1, 0): [4]}


def in_flight(
    store: FileSystemStore, point: RestorePoint, graph: JobGraph, task: TaskId
) -> dict[tuple[int, int, int], list[int]]:
    """What a task is told that it starts with, by channel."""
    restored = effects(store.url, graph, task).restore(point)
    return {
        (channel.edge, channel.upstream, channel.downstream): [k for b in batches for k in b["k"].to_pylist()]
        for channel, batches in restored.in_flight
    }


def test_nothing_in_flight_is_no_handle(store: FileSystemStore) -> None:
    """An unaligned checkpoint of a task whose queues were empty."""
    persisted = effects(store.url).persist_channel_state(do.PersistChannelState(CheckpointId(5), ()))

    assert persisted == ev.ChannelStatePersisted(7, CheckpointId(5), None)


def test_a_storage_that_fails_fails_the_snapshot(store: FileSystemStore) -> None:
    """The task is told which snapshot, which part of it and why; it does not fail itself."""

    class Full(FileSystemStore):
        def write(self, path: str, chunks: object) -> int:
            raise StorageError("disk full")

    failed = effects(store.url, opened=Full).persist_channel_state(STORED)

    assert failed == ev.SnapshotFailed(7, CheckpointId(5), "disk full", channels=True, away=True)


def test_what_a_closed_task_still_writes_is_deleted(store: FileSystemStore) -> None:
    """The sweep may have been there already."""
    closed = effects(store.url)
    closed.close()

    assert closed.persist_channel_state(STORED) is None
    assert not store.exists(f"{JOB}/chk-5/count-1-channels")
