"""Files that checkpoints share: where they are written, what is deleted with a checkpoint, what the sweep leaves."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from any_permit import ANY_PERMIT
from restored_graphs import BY_KEY, JOB, checkpoint_of, complete, graph_of

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as coordinator_do
from tidegate.actors.drivers.coordinator_effects import CoordinatorEffects
from tidegate.actors.drivers.job_context import DataPlaneOptions, JobContext
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.incremental_base import LAYERS_MAX, IncrementalBase
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    NativeFile,
    NativeState,
    StateHandle,
    StateKind,
    create_metadata,
)
from tidegate.storage.checkpoints.permits import _DECIDED, EndPermit
from tidegate.storage.errors import AlreadyExistsError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.files.store import Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.snapshot import FrozenTable, OperatorSnapshot
from tidegate.storage.state.state_file import read_state

UID = OperatorUid("count")
COUNT = TaskId(VertexId("count"), SubtaskIndex(1))
GRAPH = graph_of({"source": 1, "count": 2}, ("source", "count", BY_KEY))
LAYOUT = CheckpointLayout(JOB)
FIVE, SIX = CheckpointId(5), CheckpointId(6)


@pytest.fixture
def store() -> Iterator[FileSystemStore]:
    """A store in memory."""
    opened = open_store(f"memory://{uuid.uuid4().hex}")
    yield opened
    opened.delete_tree("")


def context(root: str, inline_bytes_max: int = 0, job_id: JobId = JOB) -> JobContext:
    """A job that inlines nothing unless told."""
    return JobContext(job_id, "demo", root, GRAPH, {}, DataPlaneOptions(inline_bytes_max=inline_bytes_max))


def task_effects(
    root: str, inline_bytes_max: int = 0, opened: type[FileSystemStore] = FileSystemStore, job_id: JobId = JOB
) -> TaskEffects:
    """The I/O of one task."""
    job = context(root, inline_bytes_max, job_id)
    return TaskEffects(job, job.describe(COUNT, AttemptNumber(0)), opened, lambda: 7)


def coordinator_effects(store: Store) -> CoordinatorEffects:
    """The I/O of the coordinator."""
    return CoordinatorEffects(context(store.url), open_store, lambda: 7)


def leaving(*retained: CheckpointId) -> EndPermit:
    """What is known when a job is over: these checkpoints stay, and its tables are left alone."""
    return EndPermit(_DECIDED, frozenset(retained), tables_settled=False)


def frozen(value: int) -> FrozenTable:
    """One state of one row."""
    return FrozenTable("total", StateKind.UNION, lambda: pa.record_batch({"total": [value]}))


def snapshot(number: CheckpointId, base: IncrementalBase | None = None) -> do.PersistSnapshot:
    """One state in the file of the checkpoint, and one in a layer."""
    return do.PersistSnapshot(number, (OperatorSnapshot(UID, (frozen(1),), (frozen(2),)),), (), (), base)


def files_in(store: FileSystemStore) -> set[str]:
    """Everything that is there."""
    return {info.path for info in store.walk("")}


def put(store: Store, *paths: str) -> None:
    """Files with something in them."""
    for path in paths:
        store.write(path, (b"x",))


# --- written ------------------------------------------------------------------------------------------------------


def test_a_layer_is_a_file_apart_from_what_belongs_to_the_checkpoint_alone(store: FileSystemStore) -> None:
    """One is deleted with its checkpoint, the other stays as long as any checkpoint needs it."""
    event = task_effects(store.url).persist(snapshot(FIVE), 0)

    assert isinstance(event, ev.SnapshotPersisted)
    assert event.handle is not None
    assert event.layer is not None
    own, shared = f"{JOB}/chk-5/count-1", f"{JOB}/shared/chk-5/count-1"
    assert (event.handle.path, event.layer.path) == (own, shared)
    assert files_in(store) == {own, shared}
    values = [read_state(store, h, UID)[0].rows.column("total").to_pylist() for h in (event.handle, event.layer)]
    assert values == [[1], [2]]


def test_layers_are_inlined_only_if_a_stack_of_them_is_no_more_than_one_file_may_be(store: FileSystemStore) -> None:
    """Every checkpoint has all layers in its metadata, so each of them may have a part of the limit."""
    event = task_effects(store.url, inline_bytes_max=5_000).persist(snapshot(FIVE), 0)
    assert isinstance(event, ev.SnapshotPersisted)
    assert event.handle is not None
    assert event.layer is not None
    assert 5_000 // LAYERS_MAX < event.layer.size_bytes < 5_000
    assert (event.handle.path, event.layer.path) == (None, f"{JOB}/shared/chk-5/count-1")

    small = task_effects(store.url, inline_bytes_max=5_000 * LAYERS_MAX).persist(snapshot(SIX), 0)
    assert isinstance(small, ev.SnapshotPersisted)
    assert small.layer is not None
    assert small.layer.path is None


class HalfFull(FileSystemStore):
    """Has no room for shared files."""

    def write(self, path: str, chunks: object) -> int:
        if "/shared/" in path:
            raise StorageError("disk full")
        return super().write(path, chunks)  # type: ignore[arg-type]


def test_what_cannot_be_written_whole_leaves_nothing_behind(store: FileSystemStore) -> None:
    """The file that was written before the layer failed is deleted; what it is built on is not touched."""
    base = IncrementalBase(FIVE, (StateHandle(f"{JOB}/shared/chk-5/count-1", None, 1, "sum", ()),))
    put(store, f"{JOB}/shared/chk-5/count-1")

    event = task_effects(store.url, opened=HalfFull).persist(snapshot(SIX, base), 0)

    assert event == ev.SnapshotFailed(7, SIX, "disk full", away=True)
    assert files_in(store) == {f"{JOB}/shared/chk-5/count-1"}


def test_what_is_written_after_the_task_was_closed_is_deleted(store: FileSystemStore) -> None:
    """Nobody will ever refer to it, and the sweep may have been there."""
    effects = task_effects(store.url)
    effects.close()

    assert effects.persist(snapshot(FIVE), 0) is None
    assert files_in(store) == set()


# --- restored -----------------------------------------------------------------------------------------------------


def with_layer(store: Store) -> CheckpointMetadata:
    """A checkpoint whose second counting subtask has a layer."""
    event = task_effects(store.url).persist(snapshot(FIVE), 0)
    assert isinstance(event, ev.SnapshotPersisted)
    assert event.layer is not None
    metadata = checkpoint_of(GRAPH)
    layers = {(COUNT.vertex, COUNT.subtask): (event.layer,)}
    subtasks = (replace(s, layers=layers.get((s.vertex, s.subtask), ())) for s in metadata.subtasks)
    return replace(metadata, subtasks=tuple(subtasks))


def test_a_task_may_build_on_what_it_is_restored_from(store: FileSystemStore) -> None:
    """A checkpoint of its own job: the coordinator counts who refers to its files."""
    metadata = with_layer(store)
    restored = task_effects(store.url).restore(complete(store, metadata))

    assert restored.lineage == IncrementalBase.of(FIVE, metadata.subtasks[2])
    assert restored.lineage is not None
    assert restored.lineage.layers


@pytest.mark.parametrize("reason", ["another job", "a savepoint", "finished"])
def test_a_task_builds_on_nothing_that_others_may_delete(store: FileSystemStore, reason: str) -> None:
    """The files of another job and of a savepoint are not this job's, and what had finished has no state."""
    metadata = with_layer(store)
    if reason == "finished":
        subtasks = (*metadata.subtasks[:2], replace(metadata.subtasks[2], finished=True))
        metadata = replace(metadata, subtasks=subtasks)
    point = complete(store, metadata)
    if reason == "a savepoint":
        store.write("_metadata", (store.read(LAYOUT.metadata(FIVE)),))
        point = replace(point, savepoint=True)
    job_id = JobId("other-1a2b3c4d") if reason == "another job" else JOB

    assert task_effects(store.url, job_id=job_id).restore(point).lineage is None


# --- deleted ------------------------------------------------------------------------------------------------------

NATIVE = LAYOUT.native_dir(FIVE, COUNT.vertex, COUNT.subtask, UID)
OF_FIVE = (f"{JOB}/chk-5/count-0", LAYOUT.layer_file(FIVE, COUNT.vertex, COUNT.subtask), f"{NATIVE}/1.sst")
OF_SIX = (f"{JOB}/chk-6/count-0", LAYOUT.layer_file(SIX, COUNT.vertex, COUNT.subtask))


@pytest.mark.parametrize(
    ("shared", "left"),
    [
        (None, set()),
        ((), set(OF_FIVE[1:])),
        ((OF_FIVE[1],), {OF_FIVE[2]}),
        ((OF_FIVE[2], "gone-already"), {OF_FIVE[1]}),
    ],
)
def test_a_checkpoint_takes_along_the_shared_files_that_are_named(
    store: FileSystemStore, shared: tuple[str, ...] | None, left: set[str]
) -> None:
    """Those, or all of its own if it never completed; nothing of other checkpoints."""
    put(store, *OF_FIVE, *OF_SIX, LAYOUT.metadata(FIVE))

    event = coordinator_effects(store).discard_checkpoint(
        coordinator_do.DiscardCheckpoint(FIVE, False, shared, permit=ANY_PERMIT)
    )

    assert event == co.CheckpointDiscarded(7, FIVE)
    assert files_in(store) == left | set(OF_SIX)


def test_of_a_voided_checkpoint_the_tombstone_stays(store: FileSystemStore) -> None:
    """Its shared files go with the others."""
    put(store, *OF_FIVE, LAYOUT.metadata(FIVE))

    coordinator_effects(store).discard_checkpoint(
        coordinator_do.DiscardCheckpoint(FIVE, voided=True, permit=ANY_PERMIT)
    )

    assert files_in(store) == {LAYOUT.metadata(FIVE)}


def test_files_of_a_refused_acknowledgement_are_deleted_one_by_one(
    store: FileSystemStore, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cannot be deleted is left to the sweep, the others go all the same."""
    put(store, *OF_FIVE)

    class Stubborn(FileSystemStore):
        def delete(self, path: str) -> None:
            if path == OF_FIVE[1]:
                raise StorageError("read-only")
            super().delete(path)

    effects = CoordinatorEffects(context(store.url), Stubborn, lambda: 7)
    effects.discard_files(coordinator_do.DiscardFiles(CheckpointId(5), OF_FIVE, permit=ANY_PERMIT))

    assert files_in(store) == {OF_FIVE[1]}
    assert f"left {OF_FIVE[1]} behind for the sweep: read-only" in caplog.text


# --- swept --------------------------------------------------------------------------------------------------------


def retained(store: Store, *layers: str, native: tuple[str, ...] = ()) -> CheckpointMetadata:
    """The completed checkpoint 6, one subtask of which refers to these shared files."""
    handles = tuple(StateHandle(path, None, 1, "sum", ()) for path in layers)
    files = tuple(NativeFile(path.rpartition("/")[2], path, 1, "sum") for path in native)
    states = (NativeState(UID, "rocksdb", (0, 16), b"", files),) if files else ()
    metadata = replace(checkpoint_of(GRAPH), checkpoint_id=SIX)
    subtasks = (*metadata.subtasks[:2], replace(metadata.subtasks[2], layers=handles, native=states))
    metadata = replace(metadata, subtasks=subtasks)
    complete(store, metadata)
    return metadata


def test_the_sweep_leaves_what_retained_checkpoints_refer_to(store: FileSystemStore) -> None:
    """In whichever folder of shared files that lies; beside it everything goes."""
    needed = (OF_FIVE[1], OF_FIVE[2], OF_SIX[1])
    retained(store, OF_FIVE[1], OF_SIX[1], native=(OF_FIVE[2],))
    put(store, *needed, OF_FIVE[0], f"{NATIVE}/2.sst", f"{JOB}/shared/chk-5/count-0", f"{JOB}/shared/chk-4/count-0")
    put(store, f"{LAYOUT.native_dir(SIX, COUNT.vertex, COUNT.subtask, UID)}/3.sst", f"{JOB}/taskowned/kept")

    coordinator_effects(store).sweep(leaving(SIX))

    assert files_in(store) == {*needed, LAYOUT.metadata(SIX), f"{JOB}/taskowned/kept"}


def test_the_sweep_of_a_job_that_keeps_nothing_takes_all_shared_files(store: FileSystemStore) -> None:
    """Its event log stays."""
    retained(store, OF_FIVE[1])
    put(store, *OF_FIVE, *OF_SIX, f"{JOB}/events/000000")

    coordinator_effects(store).sweep(leaving())

    assert files_in(store) == {f"{JOB}/events/000000"}


def test_no_shared_file_is_swept_where_a_retained_checkpoint_cannot_be_read(
    store: FileSystemStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows what it refers to."""
    retained(store, OF_FIVE[1])
    put(store, *OF_FIVE, LAYOUT.metadata(FIVE))

    coordinator_effects(store).sweep(leaving(FIVE, SIX))

    assert {OF_FIVE[1], OF_FIVE[2]} <= files_in(store)
    assert "Shared files of demo-1a2b3c4d stay" in caplog.text


def test_a_tombstone_outlives_its_job(store: FileSystemStore) -> None:
    """A coordinator that was cut off may still be about to complete a checkpoint that its successor has voided."""
    graph = graph_of({"source": 1, "count": 2}, ("source", "count", BY_KEY))
    tombstone = replace(checkpoint_of(graph), void=True)
    create_metadata(store, tombstone)
    put(store, f"{JOB}/chk-5/count-1", f"{JOB}/chk-6/_metadata")

    coordinator_effects(store).sweep(leaving())

    assert files_in(store) == {f"{JOB}/chk-5/_metadata"}
    with pytest.raises(AlreadyExistsError):
        create_metadata(store, checkpoint_of(graph))
