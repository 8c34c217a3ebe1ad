"""Files of a backend are brought to the task that owns their key groups still; any other one gets rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from restored_graphs import BY_KEY, MAX_PARALLELISM, checkpoint_of, complete, graph_of

from tidegate.actors.restore.restore_task import restore_task
from tidegate.protocol.identity import TaskId
from tidegate.state.common.backend import InternalValueState, KeyedBackend, StateDescriptor
from tidegate.state.common.options import BackendPlace, StateBackendOptions
from tidegate.state.factory import open_backend
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.backend_files import write_native
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, StateTable

UID = OperatorUid("count")
EDGE = ("source", "count", BY_KEY)
KEYS = pa.schema({"k": pa.int64()})
VALUE = StateDescriptor("total", pa.int64())

GROUP_OF = {
    key: int(key_hash) % MAX_PARALLELISM
    for key, key_hash in enumerate(hash_columns(pa.record_batch({"k": range(64)}), ["k"]))
}
KEY_OF = [
    next(key for key, group in GROUP_OF.items() if group in key_group_range(subtask, MAX_PARALLELISM, 2))
    for subtask in range(2)
]
"""A key of each of two subtasks."""


def opened(folder: Path, subtask: int, parallelism: int) -> tuple[KeyedBackend, InternalValueState]:
    """A RocksDB backend with one value for each key."""
    place = BackendPlace(UID, ("k",), MAX_PARALLELISM, key_group_range(subtask, MAX_PARALLELISM, parallelism))
    backend = open_backend(StateBackendOptions("rocksdb", directory=str(folder)), place)
    cells = backend.values(VALUE)
    backend.fix_keys(KEYS)
    return backend, cells


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """Where the checkpoint is."""
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def metadata(store: FileSystemStore, tmp_path: Path) -> CheckpointMetadata:
    """A checkpoint of two subtasks, each of which has one key."""
    metadata = checkpoint_of(graph_of({"source": 1, "count": 2}, EDGE))
    subtasks = []
    for part in metadata.subtasks:
        if part.vertex == "count":
            backend, cells = opened(tmp_path / f"old-{part.subtask}", part.subtask, 2)
            batch = pa.record_batch({"k": [KEY_OF[part.subtask]]})
            cells.put(backend.enter(batch)[0], 10 + part.subtask)
            backend.leave()
            native = backend.freeze_native(Cut(CheckpointId(5)))
            assert native is not None
            part = replace(part, native=(write_native(store, f"files/{part.subtask}", native, None),))
            backend.close()
        subtasks.append(part)
    return replace(metadata, subtasks=tuple(subtasks))


def restored(
    store: FileSystemStore, metadata: CheckpointMetadata, subtask: int, parallelism: int, folder: Path | None
) -> tuple[StateTable, ...]:
    """The tables of one new subtask."""
    graph = graph_of({"source": 1, "count": parallelism}, EDGE)
    point = complete(store, metadata)
    place = None if folder is None else str(folder)
    task = restore_task(store, point, graph, TaskId(VertexId("count"), SubtaskIndex(subtask)), None, place)
    return dict(task.tables)[UID]


@pytest.mark.parametrize("subtask", [0, 1])
def test_the_owner_of_the_key_groups_goes_on_with_the_files(
    store: FileSystemStore, metadata: CheckpointMetadata, tmp_path: Path, subtask: int
) -> None:
    """The operator gets tables without rows, which tell columns; its backend has the rows already."""
    (table,) = restored(store, metadata, subtask, 2, tmp_path / "new")
    assert table.rows.schema == pa.schema({"k": pa.int64(), "total": pa.int64()})
    assert table.rows.num_rows == 0
    backend, cells = opened(tmp_path / "new", subtask, 2)
    backend.load(table)
    refs = backend.enter(pa.record_batch({"k": [KEY_OF[subtask]]}))
    assert cells.get(refs[0]) == 10 + subtask
    backend.leave()
    backend.close()


@pytest.mark.parametrize(("subtask", "parallelism", "folder"), [(0, 1, "new"), (0, 2, None), (2, 3, "new")])
def test_others_get_rows(
    store: FileSystemStore,
    metadata: CheckpointMetadata,
    tmp_path: Path,
    subtask: int,
    parallelism: int,
    folder: str | None,
) -> None:
    """With other key groups, or without a folder, the rows of the key groups come, and no file stays."""
    tables = restored(store, metadata, subtask, parallelism, None if folder is None else tmp_path / folder)
    found = {key for table in tables for key in table.rows.column("k").to_pylist()}
    groups = key_group_range(subtask, MAX_PARALLELISM, parallelism)
    assert found == {key for key in KEY_OF if GROUP_OF[key] in groups}
    assert not (tmp_path / "new").exists()


def test_damage_leaves_no_folder(store: FileSystemStore, metadata: CheckpointMetadata, tmp_path: Path) -> None:
    """A file that is not what it was fails the restore, as any other state does."""
    (native,) = metadata.subtasks[1].native
    path = native.files[0].path
    store.write(path, [store.read(path)[:-1] + b"\0"])
    with pytest.raises(CorruptionError, match="is damaged"):
        restored(store, metadata, 0, 2, tmp_path / "new")
    assert not list((tmp_path / "new").glob("*"))
