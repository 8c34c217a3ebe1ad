"""Makes checkpoints whose keyed state lies in layers and in files of a backend, which they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
from checkpoints_on_disk import MAX_PARALLELISM, UID, complete
from frozen_tables import FrozenKeyedTable

from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    NativeFile,
    NativeState,
    StateHandle,
    SubtaskState,
    create_metadata,
)
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import FrozenState, StateChunk, StateTable, sorted_by_group
from tidegate.storage.state.state_file import write_state

STATE = "total"
NATIVE_UID = OperatorUid("rocks")


def group_of(key: int) -> int:
    """These keys are partitioned by themselves."""
    return key % MAX_PARALLELISM


def changes(put: Mapping[int, int], removed: Iterable[int], groups: range) -> list[tuple[OperatorUid, FrozenState]]:
    """What a subtask writes of changed and removed keys: those of its key groups."""

    def chunk(rows: dict[str, list[int]]) -> StateChunk:
        batch = pa.record_batch({name: pa.array(values, pa.int64()) for name, values in rows.items()})
        return sorted_by_group(batch, np.array([group_of(key) for key in rows["k"]], dtype=np.uint16))

    own = {key: value for key, value in put.items() if group_of(key) in groups}
    gone = [key for key in removed if group_of(key) in groups]
    return [
        (UID, FrozenKeyedTable(STATE, lambda: chunk({"k": gone}), removed=True)),
        (UID, FrozenKeyedTable(STATE, lambda: chunk({"k": list(own), "v": list(own.values())}))),
    ]


def applied(tables: Iterable[StateTable]) -> dict[int, int]:
    """What an operator has after it was restored from tables; no key may come twice where nothing may override."""
    found: dict[int, int] = {}
    layer = 0
    for table in tables:
        if table.state != STATE:
            continue
        assert table.layer >= layer, "layers are out of order"
        layer = table.layer
        keys = table.rows.column("k").to_pylist()
        if table.removed:
            assert table.rows.schema.names == ["k"]
            for key in keys:
                found.pop(key, None)
            continue
        assert layer > 0 or not found.keys() & set(keys), "a key is there twice"
        found |= dict(zip(keys, table.rows.column("v").to_pylist(), strict=True))
    return found


def complete_layer(
    store: Store,
    job: str,
    number: int,
    put: Mapping[int, int],
    removed: Iterable[int] = (),
    base: CheckpointMetadata | None = None,
    *,
    parallelism: int = 2,
    inline_bytes_max: int = 0,
) -> CheckpointMetadata:
    """A checkpoint that is built on another one, or on none: each subtask adds a layer and a native file."""
    layout = CheckpointLayout(JobId(job))
    metadata = complete(store, job, number, at_ms=number * 100, parallelism=parallelism)
    store.delete(layout.metadata(metadata.checkpoint_id))
    before = {s.subtask: s for s in base.subtasks if s.handle is not None} if base is not None else {}

    def layered(subtask: SubtaskState) -> SubtaskState:
        if subtask.handle is None:
            return subtask
        groups = key_group_range(subtask.subtask, MAX_PARALLELISM, parallelism)
        path = layout.layer_file(metadata.checkpoint_id, subtask.vertex, subtask.subtask)
        handle = write_state(store, path, changes(put, removed, groups), inline_bytes_max=inline_bytes_max)
        old = before.get(subtask.subtask)
        layers: tuple[StateHandle, ...] = () if old is None else old.layers
        return replace(
            subtask,
            layers=layers if handle is None else (*layers, handle),
            native=(_native(store, layout, metadata.checkpoint_id, subtask, groups, old),),
        )

    found = replace(metadata, subtasks=tuple(map(layered, metadata.subtasks)))
    create_metadata(store, found)
    return found


def _native(
    store: Store,
    layout: CheckpointLayout,
    number: CheckpointId,
    subtask: SubtaskState,
    groups: range,
    base: SubtaskState | None,
) -> NativeState:
    content = f"{number} of {subtask.subtask}".encode() * 100
    path = f"{layout.native_dir(number, subtask.vertex, subtask.subtask, NATIVE_UID)}/{number}.sst"
    store.write(path, [content])
    kept = () if base is None else base.native[0].files
    file = NativeFile(f"{number}.sst", path, len(content), checksum_of(content))
    return NativeState(NATIVE_UID, "test", (groups.start, groups.stop), b"", (*kept, file))
