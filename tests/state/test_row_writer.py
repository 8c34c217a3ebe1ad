"""Many rows on their way to the database are a file, and few are not: what it costs differs, and not what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from backend_model import KEYS, MAX_PARALLELISM, Table, composed
from native_checkpoints import frozen
from rocksdb_backends import rocks_backend

from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.state.rocksdb.vector_table import RocksTable
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import read_native
from tidegate.storage.state.snapshot import Cut

MANY = 3_000


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """Where checkpoints go."""
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def table() -> Table:
    """A table with room in memory for all its rows."""
    return Table(lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, cache_bytes=1 << 24), True)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How rows get into a database from now on."""
    seen: list[str] = []

    def noted(how: str, method: Callable[..., None]) -> Callable[..., None]:
        def write(self: RocksSession, *what: object) -> None:
            seen.append(how)
            method(self, *what)

        return write

    monkeypatch.setattr(RocksSession, "apply", noted("batch", RocksSession.apply))
    monkeypatch.setattr(RocksSession, "ingest", noted("file", RocksSession.ingest))
    return seen


def session_of(table: Table) -> RocksSession:
    """Its database."""
    assert isinstance(table.backend, RocksBackend)
    return table.backend._session


def make_room(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nearly all rows go to the database."""
    assert isinstance(table.table, RocksTable)
    with monkeypatch.context() as patched:
        patched.setattr(table.table, "cache_bytes", 1)
        table.batch([(0, 1.0)])


def test_a_snapshot_of_many_rows_is_a_file(table: Table, store: FileSystemStore, written: list[str]) -> None:
    """So are those that it removes. Few rows are none."""
    table.batch([(key, 1.0) for key in range(MANY)])
    frozen(table, store, 1)
    assert written == ["file"]
    table.batch([(key, 2.0) for key in range(10)])
    frozen(table, store, 2)
    assert written == ["file", "batch"]
    table.batch([(key, "remove") for key in range(MANY - 10)])
    expected = table.expected()
    native = frozen(table, store, 3)
    assert written == ["file", "batch", "file"]
    assert composed(list(read_native(store, native))) == expected
    table.check()
    table.backend.close()


def test_rows_that_make_room_wait_in_memory_for_others(
    table: Table, store: FileSystemStore, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many small files each key would have to be looked for in all. A snapshot adds its rows to what waits there."""
    table.batch([(key, 1.0) for key in range(MANY)])
    make_room(table, monkeypatch)
    assert written == ["batch"]
    assert not session_of(table).memory_is_empty
    table.batch([(key, 2.0) for key in range(MANY)])
    expected = table.expected()
    native = frozen(table, store, 1)
    assert set(written) == {"batch"}
    assert composed(list(read_native(store, native))) == expected
    table.backend.close()


def test_as_many_as_a_write_buffer_has_are_a_file(
    table: Table, store: FileSystemStore, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits in memory becomes a file before them: they are over it."""
    table.batch([(key, 1.0) for key in range(MANY)])
    make_room(table, monkeypatch)
    session_of(table).write_buffer_bytes = 60 * MANY
    table.batch([(key, 2.0) for key in range(MANY)])
    written.clear()
    make_room(table, monkeypatch)
    assert written == ["file"]
    assert session_of(table).memory_is_empty
    expected = table.expected()
    native = frozen(table, store, 1)
    assert composed(list(read_native(store, native))) == expected
    table.check()
    table.backend.close()


def test_a_file_that_cannot_be_taken_in(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database lacks its rows: the writer of the snapshot is told, and then the task, which may not go on."""

    def broken(session: RocksSession, file: Iterable[object]) -> None:
        raise StorageError("the disk is full")

    table.batch([(key, 1.0) for key in range(MANY)])
    assert isinstance(table.backend, RocksBackend)
    snapshot = table.backend.freeze_native(Cut(CheckpointId(1)))
    assert snapshot is not None
    with monkeypatch.context() as patched:
        patched.setattr(RocksSession, "ingest", broken)
        with pytest.raises(StorageError, match="the disk is full"):
            snapshot.files()
    with pytest.raises(StorageError, match="the disk is full"):
        table.backend.freeze_native(Cut(CheckpointId(2)))
    table.backend.close()


def test_no_file_is_left_beside_the_database(table: Table, store: FileSystemStore, written: list[str]) -> None:
    """It is one of the database's own from then on."""
    for number in range(1, 4):
        table.batch([(key, float(number)) for key in range(MANY)])
        frozen(table, store, number)
    assert written == ["file"] * 3
    assert not [path for path in Path(session_of(table).folder).iterdir() if path.suffix == ".ingested"]
    table.backend.close()
