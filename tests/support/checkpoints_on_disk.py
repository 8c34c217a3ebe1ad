"""Makes small but complete checkpoints in a store, as a job would."""

from __future__ import annotations

import pyarrow as pa
from frozen_tables import FrozenKeyedTable

from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    OperatorInfo,
    SplitPool,
    StoredSplit,
    SubtaskState,
    create_metadata,
)
from tidegate.storage.files.store import Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import StateChunk
from tidegate.storage.state.state_file import write_state

MAX_PARALLELISM = 8
UID = OperatorUid("counts")
_VERTEX = VertexId("counts")


def keyed_state(groups: range, rows_per_group: int) -> FrozenKeyedTable:
    """State of one subtask that owns these key groups: each row says which group it belongs to."""
    owned = [group for group in groups for _ in range(rows_per_group)]
    rows = pa.record_batch({"group": pa.array(owned, pa.int64())})
    sums = tuple(range(0, len(owned) + 1, rows_per_group))
    return FrozenKeyedTable("n", lambda: StateChunk(rows, groups.start, sums))


def complete(
    store: Store,
    job: str,
    number: int,
    *,
    at_ms: int = 0,
    parallelism: int = 2,
    inline_bytes_max: int = 0,
    void: bool = False,
    restored_from: str | None = None,
    pools: tuple[SplitPool, ...] = (),
    read_splits: tuple[StoredSplit, ...] = (),
) -> CheckpointMetadata:
    """Write the state of `parallelism` subtasks and of a source without state, and complete the checkpoint.

    `read_splits`: the source had finished, and had read these to their end.
    """
    job_id = JobId(job)
    layout = CheckpointLayout(job_id)
    source = VertexId("source")
    subtasks = [
        SubtaskState(source, SubtaskIndex(0), None, finished=bool(read_splits), read_splits=read_splits),
    ]
    for index in map(SubtaskIndex, range(parallelism)):
        states = [(UID, keyed_state(key_group_range(index, MAX_PARALLELISM, parallelism), 2))]
        path = layout.state_file(CheckpointId(number), _VERTEX, index)
        handle = write_state(store, path, states, inline_bytes_max=inline_bytes_max)
        subtasks.append(SubtaskState(_VERTEX, index, handle))
    metadata = CheckpointMetadata(
        version=METADATA_VERSION,
        job_id=job_id,
        job_name=job.rpartition("-")[0],
        checkpoint_id=CheckpointId(number),
        attempt=AttemptNumber(0),
        triggered_at_ms=at_ms,
        operators=(
            OperatorInfo(UID, "count", _VERTEX, parallelism, MAX_PARALLELISM),
            *((OperatorInfo(OperatorUid("files"), "files", source, 1, MAX_PARALLELISM),) if read_splits else ()),
        ),
        subtasks=tuple(subtasks),
        void=void,
        restored_from=restored_from,
        pools=pools,
    )
    create_metadata(store, metadata)
    return metadata


def flip_bit(store: Store, path: str, position: int) -> None:
    """Damage one bit of a file."""
    content = bytearray(store.read(path))
    content[position] ^= 1 << position % 8
    store.write(path, [content])
