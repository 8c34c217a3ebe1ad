"""What RocksDB keeps of changes: bounded in memory, whole with what went to disk, and no more than was asked for."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from backend_model import (
    BACKENDS,
    KEYS,
    LIST,
    MAP,
    MAX_PARALLELISM,
    ObjectState,
    Snapshots,
    Table,
    composed,
    key_batch,
    tables,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rocksdb_backends import LoggedBackend, rocks_backend

from tidegate.state.common.backend import StateDescriptor
from tidegate.state.common.options import COLLECTIONS_MAX
from tidegate.state.rocksdb import frozen_rows as rocks_changes
from tidegate.state.rocksdb.frozen_rows import RocksChanges
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable

LOGGED = BACKENDS["rocksdb with changelog"]
_CHANGES = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.sampled_from(("put", "remove", "extend", "replace", "clear", "set", "discard", "empty")),
        st.integers(0, 5),
    ),
    max_size=8,
)


def kept(backend: Any) -> list[RocksChanges]:
    """What the states of a backend keep of changes."""
    assert isinstance(backend, RocksBackend)
    found = [table.cold.changes for table in backend._tables.values()] + [
        objects.changes for objects in backend._objects.values()
    ]
    return [changes for changes in found if changes is not None]


def keys_in_memory(changes: RocksChanges) -> int:
    """Keys of all collections that are not on disk."""
    return sum(c.keys for c in [changes._current, *changes._history])


@settings(max_examples=40, deadline=None)
@given(rounds=st.lists(st.tuples(_CHANGES, st.sampled_from(("complete", "abort", "keep", "go on"))), max_size=12))
def test_changes_on_disk_are_as_good_as_those_in_memory(rounds: list[tuple[Any, str]]) -> None:
    """With room for three keys of each state: snapshots that were built on, given up, or written later hold their
    moment, and never are more keys in memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rocks_changes, "KEYS_MAX", 3)
        cells = ObjectState(LOGGED, True)
        snapshots = Snapshots(cells)
        for changes, then in rounds:
            cells.batch(changes)
            assert all(keys_in_memory(changes) <= 3 for changes in kept(cells.backend))
            if then != "go on":
                snapshots.freeze(True)
            if then in ("complete", "abort"):
                getattr(snapshots, then)(-1)
        snapshots.freeze(True)
        snapshots.complete_all()
        cells.check()
        cells.backend.close()


def test_many_snapshots_without_room_on_one_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many snapshots in a row are given up: what they held is in the next one, wherever it was kept; and what
    is built on no more leaves the disk."""
    monkeypatch.setattr(rocks_changes, "KEYS_MAX", 3)
    table = Table(LOGGED, True)
    snapshots = Snapshots(table)
    table.batch([(0, 1.0)])
    snapshots.freeze(False)
    snapshots.complete(0)
    for key in range(1, 40):
        table.batch([(key, 1.0), (key + 1, 1.0)])
        snapshots.freeze(True)
        snapshots.abort(0)
    (changes,) = kept(table.backend)
    assert keys_in_memory(changes) <= 3
    assert len(list(changes._history)) == COLLECTIONS_MAX
    assert marks(table.backend) > 30
    for _ in range(2):
        table.batch([(key, 1.0) for key in range(10)])
        snapshots.freeze(True)
        snapshots.complete(0)
    snapshots.freeze(True)
    assert marks(table.backend) == 0
    table.backend.close()


def marks(backend: Any) -> int:
    """Keys that are in the database only because they have changed."""
    assert isinstance(backend, RocksBackend)
    cursor = backend._session.database.iter()
    cursor.seek(b"\xff\xff")
    found = 0
    while cursor.valid():
        found += 1
        cursor.next()
    return found


def test_without_a_changelog_nothing_is_kept() -> None:
    """A backend that has its files for increments pays nothing, and gives whole states whatever the base is."""
    cells = ObjectState(BACKENDS["rocksdb"], True)
    cells.batch([(1, "put", 1), (2, "put", 1)])
    assert kept(cells.backend) == []
    cells.backend.freeze(Cut(CheckpointId(1)))
    cells.batch([(2, "put", 2)])
    assert composed(tables(cells.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))))) == cells.expected()
    cells.backend.close()


def test_what_is_restored_has_not_changed() -> None:
    """The layers that a backend was restored from are those that it builds on: the first increment leaves them out."""
    cells = ObjectState(LOGGED, True)
    cells.batch([(key, what, 1) for key in range(50) for what in ("put", "extend", "set")])
    stored = tables(cells.backend.freeze(Cut(CheckpointId(1))))
    again = ObjectState(LOGGED, True, stored)
    assert tables(again.backend.freeze(Cut(CheckpointId(1), CheckpointId(0)))) == []
    again.batch([(7, "extend", 5), (8, "discard", 1)])
    changed = composed(tables(again.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))), layer=1))
    assert changed == {"l": {(7, "key-2"): {"l": [1, 2, 5, 6]}}}
    for backend in (cells.backend, again.backend):
        backend.close()


def test_increments_come_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large changed values make small chunks, cut within key groups, and so do many keys that are gone."""
    big = "x" * 3_000_000
    backend = rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, kind=LoggedBackend)
    cells = ObjectState(lambda _: backend, True, files={})
    keys = key_batch(range(6))
    rows = pa.RecordBatch.from_arrays([*keys.columns, pa.array(["y"] * 6)], names=[*KEYS.names, "v"])
    backend.load(StateTable("v", StateKind.KEYED, rows))
    for ref in backend.enter(keys):
        cells.values.put(ref, big)
    backend.leave()
    (changed,) = backend.freeze(Cut(CheckpointId(2), CheckpointId(1)))
    assert [table.rows.num_rows for table in tables([changed], layer=1)] == [3, 3]
    for ref in backend.enter(keys):
        cells.values.remove(ref)
    backend.leave()
    monkeypatch.setattr("tidegate.storage.state.rocksdb.scan.CHUNK_ROWS", 4)
    frozen = backend.freeze(Cut(CheckpointId(3), CheckpointId(2)))
    assert [table.rows.num_rows for table in tables(frozen, layer=2) if table.removed] == [4, 2]
    backend.close()


@pytest.mark.parametrize("what", ["remove", "clear", "empty", "discard"])
def test_what_follows_a_removal_does_not_hide_it(what: str) -> None:
    """A key that is gone is told of, though something that left no row was done to it later."""
    cells = ObjectState(LOGGED, True)
    snapshots = Snapshots(cells)
    cells.batch([(1, "put", 0), (1, "replace", 1), (1, "set", 0)])
    snapshots.freeze(False)
    snapshots.complete(0)
    cells.batch([(1, what, 0)])
    refs = cells.backend.enter(key_batch([1]))
    cells.lists.extend(refs[0], [])
    cells.maps.discard(refs[0], "entry-2")
    cells.backend.leave()
    snapshots.freeze(True)
    snapshots.complete(0)
    cells.backend.close()


def test_a_sweep_ends_before_what_is_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that have changed lie behind all rows, and are none."""
    monkeypatch.setattr(rocks_changes, "KEYS_MAX", 3)
    backend = LOGGED(True)
    values = backend.values(StateDescriptor("v", pa.int64(), has_expired=lambda value: value < 10))
    lists = backend.lists(StateDescriptor("l", pa.list_(pa.int64()), has_expired=lambda value: value < 10))
    backend.fix_keys(KEYS)
    for ref, number in zip(backend.enter(key_batch(range(20))), range(20), strict=True):
        values.put(ref, number)
        lists.extend(ref, [number])
    backend.leave()

    for _ in range(3):
        backend.sweep(30)
    refs = backend.enter(key_batch(range(20)))
    assert [values.get(ref) for ref in refs] == [None] * 10 + [*range(10, 20)]
    assert [list(lists.get(ref)) for ref in refs] == [[]] * 10 + [[n] for n in range(10, 20)]
    backend.leave()
    backend.close()


@pytest.mark.parametrize("keys_max", [1, 65_536])
def test_what_a_sweep_leaves_of_a_key_has_changed(monkeypatch: pytest.MonkeyPatch, keys_max: int) -> None:
    """Of a list and a map that expire in part the rest is in the next increment; keys that expire whole are gone."""
    monkeypatch.setattr(rocks_changes, "KEYS_MAX", keys_max)
    limit = 0
    backend = LOGGED(True)

    def spec(of: StateDescriptor) -> StateDescriptor:
        return StateDescriptor(of.name, of.column_type, lambda value: value < limit)

    lists, maps = backend.lists(spec(LIST)), backend.maps(spec(MAP))
    backend.fix_keys(KEYS)
    for number, ref in enumerate(backend.enter(key_batch(range(4)))):
        for value in (number, number + 2):
            lists.extend(ref, [value])
            maps.put(ref, f"entry-{value}", value)
    backend.leave()
    stored = tables(backend.freeze(Cut(CheckpointId(1))))
    limit = 3
    backend.sweep(10)
    stored += tables(backend.freeze(Cut(CheckpointId(2), CheckpointId(1))), layer=1)
    found = composed(stored)
    assert {key[0]: row["l"] for key, row in found["l"].items()} == {1: [3], 2: [4], 3: [3, 5]}
    assert {key[0]: [n for _, n in row["m"]] for key, row in found["m"].items()} == {1: [3], 2: [4], 3: [3, 5]}
    assert {key for table in stored if table.removed for key in table.rows.column("k").to_pylist()} == {0}
    backend.close()
