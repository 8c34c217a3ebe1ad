"""Keyed state in layers is restored at any parallelism, and from no more files than have some of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from frozen_tables import FrozenKeyedTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from restored_graphs import BY_KEY, MAX_PARALLELISM, check_fits, checkpoint_of, complete, graph_of

from tidegate.actors.restore.restore_task import restore_task
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, NativeState, StateHandle
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import StateChunk, StateTable, sorted_by_group
from tidegate.storage.state.state_file import write_state

UID = OperatorUid("count")
EDGE = ("source", "count", BY_KEY)
KEYS = 40

Layer = tuple[dict[int, int], set[int]]
"""Keys that are put, and keys that are removed."""


@pytest.fixture
def store() -> Iterator[FileSystemStore]:
    """A store in memory."""
    opened = open_store(f"memory://{uuid.uuid4().hex}")
    yield opened
    opened.delete_tree("")


def chunk(rows: dict[str, list[int]], groups: range) -> StateChunk:
    """The rows of some key groups; a key is partitioned by itself."""
    batch = pa.record_batch({name: pa.array(values, pa.int64()) for name, values in rows.items()})
    found = np.array(rows["k"], dtype=np.int64) % MAX_PARALLELISM
    own = (found >= groups.start) & (found < groups.stop)
    return sorted_by_group(batch.filter(pa.array(own)), found[own].astype(np.uint16))


def written(store: FileSystemStore, path: str, layer: Layer, groups: range) -> StateHandle | None:
    """One layer of one subtask."""
    put, removed = layer
    states = [
        (UID, FrozenKeyedTable("total", lambda: chunk({"k": list(put), "v": list(put.values())}, groups))),
        (UID, FrozenKeyedTable("total", lambda: chunk({"k": list(removed)}, groups), removed=True)),
    ]
    return write_state(store, path, states, inline_bytes_max=0)


def checkpoint(store: FileSystemStore, layers: Sequence[Layer], parallelism: int) -> CheckpointMetadata:
    """Layers of each subtask, from the base up, and state that is written whole."""
    metadata = checkpoint_of(graph_of({"source": 1, "count": parallelism}, EDGE))
    subtasks = []
    for subtask in metadata.subtasks:
        if subtask.vertex != "count":
            subtasks.append(subtask)
            continue
        groups = key_group_range(subtask.subtask, MAX_PARALLELISM, parallelism)
        handles = [written(store, f"{n}/{subtask.subtask}", layer, groups) for n, layer in enumerate(layers)]
        timers = FrozenKeyedTable("_tidegate_timers", lambda groups=groups: chunk({"k": list(range(KEYS))}, groups))  # type: ignore[misc]
        handle = write_state(store, f"whole/{subtask.subtask}", [(UID, timers)], inline_bytes_max=0)
        kept = tuple(handle for handle in handles if handle is not None)
        subtasks.append(replace(subtask, handle=handle, layers=kept))
    return replace(metadata, subtasks=tuple(subtasks))


def restored(store: FileSystemStore, metadata: CheckpointMetadata, parallelism: int) -> list[tuple[StateTable, ...]]:
    """The tables of each new subtask."""
    graph = graph_of({"source": 1, "count": parallelism}, EDGE)
    point = complete(store, metadata)
    found = []
    for subtask in map(SubtaskIndex, range(parallelism)):
        task = restore_task(store, point, graph, TaskId(VertexId("count"), subtask))
        found.append(dict(task.tables)[UID])
    return found


def applied(tables: Sequence[StateTable]) -> dict[int, int]:
    """What an operator makes of tables that come one after the other."""
    total: dict[int, int] = {}
    for table in tables:
        if table.state != "total":
            continue
        keys = table.rows.column("k").to_pylist()
        if table.removed:
            total = {key: value for key, value in total.items() if key not in keys}
        else:
            assert table.layer > 0 or not total.keys() & set(keys)
            total |= dict(zip(keys, table.rows.column("v").to_pylist(), strict=True))
    return total


@st.composite
def stacks(draw: st.DrawFn) -> list[Layer]:
    """A base, and layers each of which puts some keys and removes others."""
    keys = st.integers(0, KEYS - 1)
    found: list[Layer] = [(draw(st.dictionaries(keys, st.just(0), max_size=KEYS)), set())]
    for number in range(1, draw(st.integers(1, 4))):
        put = draw(st.dictionaries(keys, st.just(number), max_size=10))
        found.append((put, draw(st.sets(keys, max_size=10)) - put.keys()))
    return found


@given(layers=stacks(), old=st.integers(1, 5), new=st.integers(1, 5))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_key_has_what_the_newest_layer_says(
    store: FileSystemStore, layers: list[Layer], old: int, new: int
) -> None:
    """In the subtask that owns its key group, and nowhere else; and so it is with state that was written whole."""
    store.delete_tree("")
    expected: dict[int, int] = {}
    for put, removed in layers:
        expected = {key: value for key, value in expected.items() if key not in removed} | put

    found = restored(store, checkpoint(store, layers, old), new)

    for subtask, tables in enumerate(found):
        groups = key_group_range(subtask, MAX_PARALLELISM, new)
        owned = {key for key in range(KEYS) if key % MAX_PARALLELISM in groups}
        assert {key: value for key, value in expected.items() if key in owned} == applied(tables)
        numbers = [table.layer for table in tables]
        assert sorted(numbers) == numbers
        timers = [
            k for table in tables if table.state == "_tidegate_timers" for k in table.rows.column("k").to_pylist()
        ]
        assert sorted(owned) == sorted(timers)


class _Reading(FileSystemStore):
    """Notes which files of state are read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.paths: set[str] = set()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Note the file, then read it."""
        if not path.endswith("_metadata"):
            self.paths.add(path)
        return super().read(path, offset, length)


@pytest.mark.parametrize(("old", "new", "read"), [(4, 4, [1]), (4, 2, [2, 3]), (2, 4, [0]), (3, 2, [1, 2])])
def test_only_files_of_subtasks_with_common_key_groups_are_read(
    store: FileSystemStore, old: int, new: int, read: list[int]
) -> None:
    """Not even the directory of another one's: with many subtasks that would be most of all requests."""
    base: Layer = (dict.fromkeys(range(KEYS), 0), set())
    point = complete(store, checkpoint(store, [base, base], old))
    reading = _Reading(store.url)
    graph = graph_of({"source": 1, "count": new}, EDGE)

    restore_task(reading, point, graph, TaskId(VertexId("count"), SubtaskIndex(1)))

    assert {f"{folder}/{subtask}" for folder in ("0", "1", "whole") for subtask in read} == reading.paths


@pytest.mark.parametrize("native", [False, True])
def test_state_in_layers_or_files_of_a_backend_needs_its_operator(store: FileSystemStore, native: bool) -> None:
    """A job without the operator would lose it, as any other state."""
    metadata = checkpoint(store, [({1: 1}, set())], 1)
    *others, last = metadata.subtasks
    files = (NativeState(UID, "rocksdb", (0, MAX_PARALLELISM), b"", ()),) if native else ()
    last = replace(last, handle=None, layers=() if native else last.layers, native=files)
    metadata = replace(metadata, subtasks=(*others, last))

    check_fits(metadata, graph_of({"source": 1, "count": 1}, EDGE))
    with pytest.raises(
        ConfigurationError, match=r"has state of operator 'count' .*, and the job has no operator of that"
    ):
        check_fits(metadata, graph_of({"source": 1, "other": 1}, ("source", "other", BY_KEY)))
