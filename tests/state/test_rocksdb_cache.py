"""Hot rows in front of RocksDB: what is in memory alone comes into every snapshot, whoever writes it and when, and goes
to the database when it makes room; a fault on the way is told to those whom it concerns."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from backend_model import KEYS, MAX_PARALLELISM, REMOVE, Table, composed, key_of, tables
from native_checkpoints import frozen
from rocksdb_backends import CACHE_BYTES, rocks_backend

from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.frozen_database import FrozenRocks
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.state.rocksdb.vector_table import RocksTable
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import fetch_native, read_native, tables_of_fetched, write_native
from tidegate.storage.state.snapshot import Cut


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """Where checkpoints go."""
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """A table with few rows in memory, in the folder `work/db`."""
    return opened(tmp_path, CACHE_BYTES)


def opened(tmp_path: Path, cache_bytes: int) -> Table:
    """A table with so much memory for rows, in the folder `work/db`."""
    folder = str(tmp_path / "work" / "db")
    return Table(
        lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, None, folder, cache_bytes=cache_bytes), True
    )


def backend_of(table: Table) -> RocksBackend:
    """Its backend."""
    assert isinstance(table.backend, RocksBackend)
    return table.backend


def freeze(table: Table, number: int) -> FrozenRocks:
    """A snapshot as files, not written yet."""
    snapshot = backend_of(table).freeze_native(Cut(CheckpointId(number)))
    assert snapshot is not None
    return snapshot


def in_memory(table: Table) -> int:
    """How many rows are in memory."""
    assert isinstance(table.table, RocksTable)
    return table.table.used_slots


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Sequence[bytes]]:
    """What the database is asked for, or told, by a method of the session's, from now on."""
    seen: list[Sequence[bytes]] = []
    method: Callable[..., Any] = getattr(RocksSession, name)

    def noted(session: RocksSession, keys: Sequence[bytes], *rest: Any) -> Any:
        seen.append(keys)
        return method(session, keys, *rest)

    monkeypatch.setattr(RocksSession, name, noted)
    return seen


def test_rows_in_memory_are_neither_read_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they fit: batches of known keys leave the database alone, and a snapshot writes each changed row
    once, and no other."""
    table = opened(tmp_path, 10 * CACHE_BYTES)
    written, read = calls_of(monkeypatch, "apply"), calls_of(monkeypatch, "fetch")
    table.batch([(key, 1.0) for key in range(100)])
    freeze(table, 1).files()
    assert sum(map(len, written)) == 100
    assert not read
    written.clear()
    for _ in range(3):
        table.batch([(key, 2.0) for key in range(7)])
    assert not written
    assert not read
    freeze(table, 2).files()
    assert sum(map(len, written)) == 7
    table.backend.close()


def test_new_keys_are_looked_for_once_others_may_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as long as all rows are in memory, whatever was written and removed; but once rows have left."""
    table = opened(tmp_path, 10 * CACHE_BYTES)
    read = calls_of(monkeypatch, "fetch")
    table.batch([(key, 1.0) for key in range(100)])
    freeze(table, 1).files()
    table.batch([(key, REMOVE) for key in range(50)])
    freeze(table, 2).files()
    table.batch([(key, 2.0) for key in range(40, 130)])
    assert not read
    assert isinstance(table.table, RocksTable)
    with monkeypatch.context() as patched:
        patched.setattr(table.table, "cache_bytes", 1)
        table.batch([(0, 3.0)])
    table.batch([(key, 4.0) for key in range(200)])
    assert read
    table.check()
    table.backend.close()


@pytest.mark.parametrize("native", [False, True])
def test_rows_that_were_restored_are_found(tmp_path: Path, store: FileSystemStore, native: bool) -> None:
    """By the first batch: of keys that are not in memory, whether rows were loaded or files were opened."""
    table = opened(tmp_path, 10 * CACHE_BYTES)
    table.batch([(key, 1.0) for key in range(100)])
    stored = frozen(table, store, 1)
    table.backend.close()
    folder = str(tmp_path / "again" / "db")
    if native:
        fetch_native(store, stored, folder)
    tables_of = tables_of_fetched(stored) if native else list(read_native(store, stored))
    again = Table(
        lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, None, folder, cache_bytes=10 * CACHE_BYTES),
        True,
        tables_of,
        table.expected(),
    )
    again.batch([(key, 2.0) for key in range(50, 150)])
    again.check()
    again.backend.close()


def test_memory_stays_bounded(table: Table) -> None:
    """Rows beyond the bound go to the database; keys that come again and again stay, whatever else comes by."""
    for start in range(0, 600, 6):
        table.batch([(key, float(start)) for key in (0, 1, 2, *range(start, start + 6))])
        assert in_memory(table) <= 40
    assert in_memory(table) >= 8
    table.check()
    table.backend.close()


def test_keys_that_come_again_stay(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not read once they are known, though hundreds of others pass by."""
    for start in range(10, 40, 3):
        table.batch([(key, 1.0) for key in (0, 1, 2, *range(start, start + 3))])
    freeze(table, 1).files()
    read = calls_of(monkeypatch, "fetch")
    for start in range(40, 200, 3):
        table.batch([(key, 1.0) for key in (0, 1, 2, *range(start, start + 3))])
    assert sum(map(len, read)) == 3 * len(range(40, 200, 3))
    table.backend.close()


def test_a_snapshot_that_was_given_up_loses_no_row(table: Table, store: FileSystemStore, tmp_path: Path) -> None:
    """Its rows come into the next one, its folder never comes; neither if it is dropped."""
    table.batch([(key, 1.0) for key in range(9)])
    freeze(table, 1).release()
    table.batch([(3, 2.0), (4, REMOVE)])
    dropped = freeze(table, 2)
    del dropped
    table.batch([(5, 3.0)])
    expected = table.expected()
    native = frozen(table, store, 3)
    assert os.listdir(tmp_path / "work") == ["db"]
    assert composed(list(read_native(store, native))) == expected
    table.backend.close()


def test_a_snapshot_is_written_though_the_backend_is_closed(table: Table, store: FileSystemStore) -> None:
    """As files and as rows."""
    table.batch([(key, 1.0) for key in range(9)])
    expected = table.expected()
    rows = table.backend.freeze(Cut(CheckpointId(1), canonical=True))
    table.batch([(3, 2.0)])
    after = table.expected()
    files = freeze(table, 2)
    table.batch([(4, 2.0)])
    table.backend.close()
    assert composed(tables(rows)) == expected
    assert composed(list(read_native(store, write_native(store, "chk-2", files, None)))) == after


@pytest.mark.slow
def test_rows_that_make_room_do_not_get_into_an_older_snapshot(table: Table, store: FileSystemStore) -> None:
    """They are written after those of the snapshot, and after its files are linked."""
    table.batch([(key, 1.0) for key in range(15)])
    expected = table.expected()
    snapshot = freeze(table, 1)
    for start in range(0, 900, 60):
        table.batch([(key, 2.0) for key in range(start, start + 60)])
    assert in_memory(table) < 600, "no room was made before the snapshot was written"
    native = write_native(store, "chk-1", snapshot, None)
    assert composed(list(read_native(store, native))) == expected
    table.check()
    table.backend.close()


def test_a_snapshot_is_written_beside_batches(table: Table, store: FileSystemStore) -> None:
    """On another thread, as in a task: every one has the rows of its freeze, and no row is lost."""
    base = None
    with ThreadPoolExecutor(1) as threads:
        for number in range(1, 6):
            table.batch([(key, float(number)) for key in range(40)])
            expected = table.expected()
            writing = threads.submit(write_native, store, f"chk-{number}", freeze(table, number), base)
            for start in range(0, 80, 8):
                table.batch([(key, 0.5) for key in range(start, start + 8)])
            base = writing.result()
            assert composed(list(read_native(store, base))) == expected
    table.check()
    table.backend.close()


def test_files_that_cannot_be_linked(table: Table, store: FileSystemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes the snapshot is told; the task goes on, and the next snapshot has every row."""

    def full(session: RocksSession, target: str, beside: bool) -> None:
        raise StorageError("the disk is full")

    table.batch([(key, 1.0) for key in range(9)])
    with monkeypatch.context() as patched:
        patched.setattr(RocksSession, "link", full)
        failed = [freeze(table, 1), freeze(table, 2)]
        table.batch([(1, 2.0)])
        for snapshot in failed:
            with pytest.raises(StorageError, match="the disk is full"):
                snapshot.files()
    expected = table.expected()
    assert composed(list(read_native(store, frozen(table, store, 3)))) == expected
    table.backend.close()


def test_rows_that_cannot_be_written(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database lacks them now: the writer of the snapshot is told, and then the task, which may not go on."""

    def broken(session: RocksSession, keys: Sequence[bytes], values: Sequence[bytes] | None) -> None:
        raise StorageError("the disk is broken")

    table.batch([(key, 1.0) for key in range(9)])
    with monkeypatch.context() as patched:
        patched.setattr(RocksSession, "apply", broken)
        snapshot = freeze(table, 1)
        with pytest.raises(StorageError, match="the disk is broken"):
            snapshot.files()
    for _ in range(2):
        with pytest.raises(StorageError, match="the disk is broken"):
            freeze(table, 2)
    with pytest.raises(StorageError, match="the disk is broken"):
        list(table.table.scan(10))
    table.backend.close()


def test_a_row_that_was_read_and_removed_is_gone(table: Table, store: FileSystemStore) -> None:
    """Also if it came into memory after the last snapshot: the database has it still."""
    table.batch([(key, 1.0) for key in range(60)])
    freeze(table, 1).files()
    table.batch([(3, REMOVE), (70, 1.0), (70, REMOVE)])
    assert key_of(3) not in table.expected()["t"]
    expected = table.expected()
    assert composed(list(read_native(store, frozen(table, store, 2)))) == expected
    table.check()
    table.backend.close()


def test_a_scan_shows_rows_as_they_are_when_they_are_drawn(table: Table) -> None:
    """Not as they were when it began: what a batch has changed or removed meanwhile, and memory has let go of, does not
    come back as it was."""
    table.batch([(key, 1.0) for key in range(60)])
    scanned = table.table.scan(5)
    next(scanned)
    table.batch([(key, 2.0) if key % 2 else (key, REMOVE) for key in range(60)])
    for start in range(100, 400, 60):
        table.batch([(key, 1.0) for key in range(start, start + 60)])
    expected = table.expected()["t"]
    for keys, slots in scanned:
        found = zip(keys.to_pylist(), table.table.column("n").take(slots).to_pylist(), strict=True)
        for key, n in found:
            assert expected[key["k"], key["s"]]["n"] == n
    table.check()
    table.backend.close()
