"""How much of a checkpoint a rescaled task reads: about the part that it has the key groups of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from restored_graphs import BY_KEY, MAX_PARALLELISM, checkpoint_of, complete, graph_of
from small_tables import rewrite_in_small_tables

from tidegate.actors.restore.restore_task import restore_task
from tidegate.protocol.identity import TaskId
from tidegate.state.columnar import paged_state
from tidegate.state.common.backend import InternalValueState, KeyedBackend, StateDescriptor
from tidegate.state.common.options import BackendPlace, StateBackendOptions
from tidegate.state.factory import open_backend
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SubtaskState
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.backend_files import DESCRIPTION_NAME, fetch_native, write_native
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, StateTable
from tidegate.storage.state.state_file import write_state

UID = OperatorUid("count")
EDGE = ("source", "count", BY_KEY)
OLD = 2
KEYS = 80_000
CHANGED, REMOVED = 30_000, 20_000
"""Of the keys of a subtask, how many have changed since the base, and how many more are gone."""


def groups_of(keys: pa.Array) -> np.ndarray:
    """The key group of each key."""
    return (hash_columns(pa.record_batch({"k": keys}), ["k"]) % np.uint64(MAX_PARALLELISM)).astype(np.int64)


def opened(options: StateBackendOptions, groups: range) -> tuple[KeyedBackend, InternalValueState]:
    """A backend with one number for each key."""
    backend = open_backend(options, BackendPlace(UID, ("k",), MAX_PARALLELISM, groups))
    cells = backend.values(StateDescriptor("total", pa.int64()))
    backend.fix_keys(pa.schema({"k": pa.int64()}))
    return backend, cells


def put(backend: KeyedBackend, cells: InternalValueState, keys: pa.Array, value: int | None) -> None:
    """The same number for some keys, or none any more."""
    for ref in backend.enter(pa.record_batch({"k": keys})):
        if value is None:
            cells.remove(ref)
        else:
            cells.put(ref, value)
    backend.leave()


def own_keys(groups: range, count: int) -> pa.Array:
    """As many keys of some key groups."""
    keys = np.arange(count * MAX_PARALLELISM // len(groups) * 2)
    found = groups_of(pa.array(keys))
    return pa.array(keys[(found >= groups.start) & (found < groups.stop)][:count])


def layered(store: FileSystemStore, part: SubtaskState, groups: range, folder: Path) -> SubtaskState:
    """A base, and a layer that changes some keys and removes others."""
    keys = own_keys(groups, KEYS)
    backend, cells = opened(StateBackendOptions(incremental=True), groups)
    put(backend, cells, keys, 0)
    handles = []
    for number in (1, 2):
        cut = Cut(CheckpointId(number), CheckpointId(number - 1) if number > 1 else None)
        frozen = [(UID, state) for state in backend.freeze(cut)]
        handle = write_state(store, f"{part.subtask}/layer-{number}", frozen, inline_bytes_max=0)
        assert handle is not None
        handles.append(handle)
        put(backend, cells, keys.slice(0, CHANGED), 1)
        put(backend, cells, keys.slice(CHANGED, REMOVED), None)
    backend.close()
    return replace(part, layers=tuple(handles))


def in_small_tables(store: FileSystemStore, part: SubtaskState, groups: range, folder: Path) -> SubtaskState:
    """Files of RocksDB, compacted to a level of small tables, as a large database is one of large tables."""
    options = StateBackendOptions("rocksdb", directory=str(folder / "first"))
    backend, cells = opened(options, groups)
    put(backend, cells, own_keys(groups, KEYS // 4), 1)
    frozen = backend.freeze_native(Cut(CheckpointId(1)))
    assert frozen is not None
    native = write_native(store, f"{part.subtask}/first", frozen, None)
    backend.close()

    fetch_native(store, native, str(folder / "whole"))
    rewritten = folder / "second" / UID
    rewrite_in_small_tables(folder / "whole", rewritten, 16_000)
    (rewritten / DESCRIPTION_NAME).write_bytes(native.description)

    backend, _ = opened(replace(options, directory=str(folder / "second")), groups)
    frozen = backend.freeze_native(Cut(CheckpointId(2)))
    assert frozen is not None
    native = write_native(store, f"{part.subtask}/second", frozen, None)
    backend.close()
    return replace(part, native=(native,))


Make = Callable[[FileSystemStore, SubtaskState, range, Path], SubtaskState]


def checkpoint(make: Make, store: FileSystemStore, folder: Path) -> CheckpointMetadata:
    """A checkpoint of two subtasks with keyed state."""
    metadata = checkpoint_of(graph_of({"source": 1, "count": OLD}, EDGE))
    subtasks = []
    for part in metadata.subtasks:
        if part.vertex == "count":
            groups = key_group_range(part.subtask, MAX_PARALLELISM, OLD)
            part = make(store, part, groups, folder / str(part.subtask))
        subtasks.append(part)
    return replace(metadata, subtasks=tuple(subtasks))


class CountingReads(FileSystemStore):
    """Counts the bytes of state that are read."""

    bytes_read = 0

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read, and count."""
        data = super().read(path, offset, length)
        if not path.endswith("_metadata"):
            self.bytes_read += len(data)
        return data


def applied(tables: list[StateTable]) -> dict[int, int]:
    """The keys that tables leave, with their numbers."""
    found: dict[int, int] = {}
    for table in tables:
        keys = table.rows.column("k").to_pylist()
        if table.removed:
            for key in keys:
                del found[key]
        else:
            found.update(zip(keys, table.rows.column("total").to_pylist(), strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [layered, in_small_tables])
def test_a_rescaled_task_reads_about_its_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Make) -> None:
    """With more tasks each reads a smaller part, and every key comes once.

    What lies at an edge, a chunk or a table, is read by two. With chunks of 8,192 rows that is up to a fifth of this
    small state; those of half a megabyte would be most of it.
    """
    monkeypatch.setattr(paged_state, "CHUNK_BYTES_MIN", 1)
    store = open_store(str(tmp_path / "store"))
    metadata = checkpoint(make, store, tmp_path)
    point = complete(store, metadata)
    keys = {subtask: own_keys(key_group_range(subtask, MAX_PARALLELISM, OLD), KEYS) for subtask in range(OLD)}
    for new in (1, 2, 3, 4, 8):
        graph = graph_of({"source": 1, "count": new}, EDGE)
        found: dict[int, int] = {}
        parts = []
        for subtask in range(new):
            counting = CountingReads(store.url)
            task = restore_task(counting, point, graph, TaskId(VertexId("count"), SubtaskIndex(subtask)))
            mine = applied(list(dict(task.tables)[UID]))
            assert set(groups_of(pa.array(mine, pa.int64())).tolist()) <= set(
                key_group_range(subtask, MAX_PARALLELISM, new)
            )
            assert not found.keys() & mine.keys()
            found |= mine
            parts.append(counting.bytes_read / metadata.size_bytes)
        if make is layered:
            changed = {key: 1 for of in keys.values() for key in of[:CHANGED].to_pylist()}
            kept = {key: 0 for of in keys.values() for key in of[CHANGED + REMOVED :].to_pylist()}
            assert changed | kept == found
        else:
            assert {key: 1 for of in keys.values() for key in of[: KEYS // 4].to_pylist()} == found
        assert max(parts) < 1 / new + 0.2, (new, parts)
        assert sum(parts) < 2, (new, parts)
