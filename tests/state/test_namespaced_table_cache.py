"""Namespaces whose hot rows are in memory in front of RocksDB: snapshots have the rows of their moment, whoever writes
them and when; a namespace that is drained is removed as a range, or leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from namespaces_model import KEYS, NAMES, ROOM, Namespaces, check, group_of

from tidegate.state.rocksdb import vector_table
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.frozen_database import FrozenRocks
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.state.rocksdb.vector_table import RocksNamespaces
from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import fetch_native, read_native, write_native
from tidegate.storage.state.snapshot import Cut, StateTable

Model = dict[tuple[int, int], int]
PUT = st.tuples(st.sampled_from(["put", "remove"]), st.lists(KEYS, min_size=1, max_size=30, unique=True))
DRAIN = st.tuples(st.just("drain"), st.tuples(st.integers(-3, 3), st.none() | st.integers(0, 7)))
OTHERS = st.tuples(st.sampled_from(["freeze", "freeze", "write", "restart", "rows", "look"]), st.none())


class Running:
    """Namespaces in RocksDB, and their snapshots."""

    def __init__(self, kind: str, folder: Path, store: FileSystemStore) -> None:
        self.subject = Namespaces(kind, str(folder / "0"))
        self._kind, self._folder, self._store = kind, folder, store
        self._frozen: tuple[FrozenRocks, Model] | None = None
        self._written: tuple[NativeState, Model] | None = None
        self._number = 0

    def freeze(self) -> None:
        """Another snapshot. The one before is written now at the latest, as in a task."""
        self.write()
        self._number += 1
        backend = self.subject.backend
        assert isinstance(backend, RocksBackend)
        native = backend.freeze_native(Cut(CheckpointId(self._number)))
        assert native is not None
        self._frozen = native, dict(self.subject.model)

    def write(self) -> None:
        """Write the last snapshot: it has the rows of its moment."""
        if self._frozen is not None:
            native, model = self._frozen
            written = write_native(self._store, f"chk-{self._number}", native, self._written and self._written[0])
            assert model_of(list(read_native(self._store, written))) == model
            self._frozen, self._written = None, (written, model)

    def rows(self) -> None:
        """A savepoint of rows has those that there are."""
        frozen = self.subject.backend.freeze(Cut(CheckpointId(99), canonical=True))
        assert model_of([table for state in frozen for table in tables_of(state)]) == self.subject.model

    def restart(self) -> None:
        """Go on from the files of the last snapshot that is written."""
        if self._written is not None:
            self.subject.backend.close()
            native, model = self._written
            self._number += 1
            folder = self._folder / str(self._number)
            fetch_native(self._store, native, str(folder / "op"))
            numbers, self.subject = self.subject.numbers, Namespaces(self._kind, str(folder / "op"))
            self.subject.model, self.subject.numbers = dict(model), numbers
            self._frozen = self._written = None


def model_of(tables: list[StateTable]) -> Model:
    """What stored tables hold."""
    columns = [table.rows.to_pydict() for table in tables]
    rows = [row for of in columns for row in zip(*(of[name] for name in (*NAMES, "n")), strict=True)]
    assert len({row[:2] for row in rows}) == len(rows), "a key twice"
    return {(namespace, k): n for namespace, k, n in rows}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ROOM])
@settings(max_examples=25, deadline=None)
@given(steps=st.lists(PUT | DRAIN | OTHERS, max_size=14))
def test_snapshots_have_the_rows_of_their_moment(
    kind: str, steps: list[tuple[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever comes, goes and is drained before they are written; and what goes on from them has the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector_table, "_RANGE_ROWS", 1)
        patch.setattr(vector_table, "_RUN_ROWS", 1)
        _run(kind, steps, tmp_path_factory)


def _run(kind: str, steps: list[tuple[str, object]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("db")
    running = Running(kind, folder, open_store(str(folder / "store")))
    running.subject.put([(0, 0)])
    for what, value in steps:
        if what in ("put", "remove"):
            running.subject.put(value, removed=what == "remove")  # type: ignore[arg-type]
        elif what == "drain":
            drain(running.subject, *value)  # type: ignore[misc]
        elif what == "look":
            check(running.subject)
        else:
            getattr(running, what)()
    running.freeze()
    check(running.subject)
    running.write()
    running.restart()
    check(running.subject)
    running.subject.backend.close()


def drain(subject: Namespaces, namespace: int, first: int | None) -> None:
    """Drain a namespace, or some key groups of it."""
    groups = None if first is None else range(first, 8)
    expected = subject.expected(namespace, groups)
    assert subject.of(namespace, groups, drained=True) == expected
    for k, _ in expected:
        del subject.model[namespace, k]


@pytest.fixture
def running(tmp_path: Path) -> Running:
    """Namespaces all of whose rows fit into memory."""
    return Running("rocksdb in cache", tmp_path, open_store(str(tmp_path / "store")))


def test_what_no_snapshot_has_seen_leaves_no_trace(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that begin and end between two snapshots are neither read from the database nor written to it."""
    monkeypatch.delattr(RocksSession, "fetch")
    running.subject.put([(7, 1)])
    running.freeze()
    running.write()
    with monkeypatch.context() as patched:
        for name in ("apply", "apply_ranges", "write"):
            patched.delattr(RocksSession, name)
        for namespace in range(3):
            running.subject.put([(namespace, k) for k in range(50)])
            drain(running.subject, namespace, None)
        running.freeze()
        running.write()
    running.subject.backend.close()


def test_a_namespace_that_the_database_has_is_removed_as_ranges(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each key group, with the next snapshot; no row is removed by itself. Few rows are."""
    running.subject.put([(0, k) for k in range(100)] + [(1, k) for k in range(3)])
    running.freeze()
    running.write()
    ranges: list[tuple[bytes, bytes]] = []
    removed: list[bytes] = []

    def apply_ranges(self: RocksSession, found: object) -> None:
        ranges.extend(found)  # type: ignore[arg-type]

    def apply(self: RocksSession, keys: list[bytes], values: object) -> None:
        assert values is None
        removed.extend(keys)

    for namespace in (0, 1):
        drain(running.subject, namespace, None)
    with monkeypatch.context() as patched:
        patched.setattr(RocksSession, "apply_ranges", apply_ranges)
        patched.setattr(RocksSession, "apply", apply)
        native = running.subject.backend.freeze_native(Cut(CheckpointId(9)))
        assert native is not None
        native.files()
    assert len(ranges) == len({group_of(k) for k in range(100)})
    assert len(removed) == 3
    running.subject.backend.close()


def cached(running: Running) -> RocksNamespaces:
    """Its table."""
    table = running.subject.table
    assert isinstance(table, RocksNamespaces)
    return table


def test_rows_that_make_room_for_others_of_their_namespace_are_read(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they leave memory between two runs of key groups, and no row of their group had left it before."""
    monkeypatch.setattr(vector_table, "_RUN_ROWS", 1)
    table = cached(running)
    first, second, last = sorted({group_of(k): k for k in range(40)}.items())[:3]
    running.subject.put([(0, first[1]), (0, second[1])])
    monkeypatch.setattr(table, "cache_bytes", 1)
    running.subject.put([(1, 0)])
    monkeypatch.setattr(table, "cache_bytes", 1 << 24)
    running.subject.put([(0, last[1])])
    monkeypatch.setattr(table, "cache_bytes", 1)
    drain(running.subject, 0, None)
    running.freeze()
    running.write()
    check(running.subject)
    running.subject.backend.close()


def test_nothing_is_kept_of_namespaces_that_are_gone(running: Running) -> None:
    """A job has a new one every few seconds for years, also if each has few rows."""
    for namespace in range(20):
        running.subject.put([(namespace, k) for k in range(3)])
        running.freeze()
        drain(running.subject, namespace, None)
    running.freeze()
    table = cached(running)
    assert {**table._in_database, **table._cold, **table._removed} == {}
    running.write()
    running.subject.backend.close()


def test_a_row_that_comes_while_its_namespace_is_drained_stays(running: Running) -> None:
    """In memory and in the next snapshot: who is given the former row may put another one."""
    running.subject.put([(0, k) for k in range(100)])
    running.freeze()
    running.write()
    for _ in running.subject.table.drain_namespace(0, 1_000):
        running.subject.model.clear()
        running.subject.put([(0, 5)])
    running.freeze()
    check(running.subject)
    running.write()
    running.restart()
    check(running.subject)
    running.subject.backend.close()
