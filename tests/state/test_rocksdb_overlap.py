"""Snapshots whose files are made beside processing: what is written meanwhile is not in them, and need not wait."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from backend_model import KEYS, MAX_PARALLELISM, ObjectState, composed, key_batch
from native_checkpoints import frozen
from rocksdb_backends import rocks_backend

from tidegate.state.common.backend import InternalValueState, StateDescriptor
from tidegate.state.rocksdb import database_session
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.frozen_database import FrozenRocks
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import read_native, write_native
from tidegate.storage.state.snapshot import Cut


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """Where checkpoints go."""
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[ObjectState]:
    """State of a function."""
    folder = str(tmp_path / "work" / "db")
    subject = ObjectState(lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, folder=folder), True)
    yield subject
    subject.backend.close()


def freeze(backend: object, number: int) -> FrozenRocks:
    """A snapshot as files, not written yet."""
    assert isinstance(backend, RocksBackend)
    snapshot = backend.freeze_native(Cut(CheckpointId(number)))
    assert snapshot is not None
    return snapshot


def test_a_freeze_and_what_comes_after_it_wait_for_no_file(
    cells: ObjectState, store: FileSystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches go on before anybody has linked the files, which have the moment of the freeze."""
    cells.batch([(key, "put", key) for key in range(40)])
    expected = cells.expected()
    with monkeypatch.context() as patched:
        patched.delattr(RocksSession, "link")
        snapshot = freeze(cells.backend, 1)
        for number in range(20):
            cells.batch([(key, "put", number) for key in range(number, 40)])
        cells.batch([(key, "remove", 0) for key in range(3)])
        cells.check()
    native = write_native(store, "chk-1", snapshot, None)
    assert composed(list(read_native(store, native))) == expected
    cells.check()
    expected = cells.expected()
    assert composed(list(read_native(store, frozen(cells, store, 2, native)))) == expected


def test_who_writes_more_than_there_is_room_for_sees_to_the_files_first(store: FileSystemStore) -> None:
    """They have the moment of the freeze, though RocksDB's memory was full many times before they were asked for."""
    backend = rocks_backend(tuple(KEYS.names), MAX_PARALLELISM)
    state = backend.values(StateDescriptor("v", pa.string()))
    backend.fix_keys(KEYS)

    def put(text: str) -> None:
        for start in range(0, 2_000, 100):
            _put(backend, state, range(start, start + 100), text)

    put("before")
    snapshot = freeze(backend, 1)
    for _ in range(5):
        put("after" + "x" * 1_000)
    native = write_native(store, "chk-1", snapshot, None)
    found = [text for table in read_native(store, native) for text in table.rows.column("v").to_pylist()]
    assert found == ["before"] * 2_000
    backend.close()


def _put(backend: RocksBackend, state: InternalValueState, keys: range, text: str) -> None:
    for ref in backend.enter(key_batch(keys)):
        state.put(ref, text)
    backend.leave()


def test_snapshots_are_written_beside_batches(cells: ObjectState, store: FileSystemStore) -> None:
    """On another thread, as in a task: every one has the rows of its freeze."""
    base = None
    with ThreadPoolExecutor(1) as threads:
        for number in range(1, 8):
            cells.batch([(key, "put", number) for key in range(number, 40)])
            cells.batch([(number, "extend", number), (number, "set", number)])
            expected = cells.expected()
            writing = threads.submit(write_native, store, f"chk-{number}", freeze(cells.backend, number), base)
            for key in range(20):
                cells.batch([(key, "remove", 0), (key + 1, "put", number + 100), (key, "clear", 0)])
            base = writing.result()
            assert composed(list(read_native(store, base))) == expected
    cells.check()


def test_a_snapshot_that_would_have_more_fails(cells: ObjectState, store: FileSystemStore) -> None:
    """If RocksDB has made a file of what came after the freeze, its writer is told; the next one is whole."""
    cells.batch([(1, "put", 1)])
    snapshot = freeze(cells.backend, 1)
    cells.batch([(2, "put", 2)])
    assert isinstance(cells.backend, RocksBackend)
    cells.backend._session.database.flush()
    with pytest.raises(StorageError, match="would contain later changes"):
        snapshot.files()
    expected = cells.expected()
    assert composed(list(read_native(store, frozen(cells, store, 2)))) == expected


def test_files_that_a_compaction_deletes_are_looked_for_again(
    cells: ObjectState, store: FileSystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then one is gone before it is linked; if that goes on, the snapshot fails and the next one is whole."""
    cells.batch([(key, "put", key) for key in range(9)])
    expected, tries = cells.expected(), []
    link = RocksSession._link_files

    def gone(session: RocksSession, target: str) -> None:
        tries.append(target)
        if len(tries) < 3:
            raise StorageError("no such file")
        link(session, target)

    with monkeypatch.context() as patched:
        patched.setattr(RocksSession, "_link_files", gone)
        assert composed(list(read_native(store, frozen(cells, store, 1)))) == expected
        tries.clear()
        patched.setattr(database_session, "_LINK_ATTEMPTS", 2)
        with pytest.raises(StorageError, match="no such file"):
            frozen(cells, store, 2)
    assert composed(list(read_native(store, frozen(cells, store, 3)))) == expected


def test_a_slow_disk_fails_no_snapshot(
    cells: ObjectState, store: FileSystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB may take minutes to write its memory to files: they are waited for."""
    cells.batch([(1, "put", 1)])
    expected = cells.expected()
    snapshot = freeze(cells.backend, 1)
    cells.batch([(2, "put", 2)])
    waited_s = 0.0

    def paused(seconds: float) -> None:
        nonlocal waited_s
        waited_s += seconds
        if waited_s > 300:
            monkeypatch.setattr(database_session, "_UNWRITTEN", unwritten)

    unwritten = database_session._UNWRITTEN
    monkeypatch.setattr(database_session, "_UNWRITTEN", "rocksdb.num-entries-active-mem-table")  # never 0 here
    monkeypatch.setattr(f"{database_session.__name__}.time.sleep", paused)
    native = write_native(store, "chk-1", snapshot, None)
    assert waited_s > 300
    assert composed(list(read_native(store, native))) == expected
