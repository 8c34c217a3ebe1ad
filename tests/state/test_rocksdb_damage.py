"""Files of RocksDB that are damaged, cannot be written, or are not what they seem: found, and never used."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from backend_model import BACKENDS, KEYS, MAX_PARALLELISM, ObjectState, Table, composed
from native_checkpoints import CountingReads, frozen
from rocksdb_backends import rocks_backend

from tidegate.state.rocksdb import database_session
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.checkpoints.metadata import SubtaskState
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId, JobId, SubtaskIndex, VertexId
from tidegate.storage.state.backend_files import fetch_native, read_native, write_native
from tidegate.storage.state.local_copies import LocalCopies, LocalFirstStore, PrivateFolder
from tidegate.storage.state.snapshot import Cut


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """Where checkpoints go."""
    return open_store(str(tmp_path / "store"))


def test_a_bit_that_flips_on_the_local_disk_is_found(store: FileSystemStore, tmp_path: Path) -> None:
    """RocksDB's own checksums: what was damaged after it was fetched is no row."""
    table = Table(BACKENDS["rocksdb"], True)
    table.batch([(key, 1.0) for key in range(2000)])
    native = frozen(table, store, 1)
    table.backend.close()
    fetch_native(store, native, str(tmp_path / "db"))
    (name,) = (file.name for file in native.files if file.name.endswith(".sst"))
    data = bytearray((tmp_path / "db" / name).read_bytes())
    data[len(data) // 3] ^= 1
    (tmp_path / "db" / name).write_bytes(data)
    with pytest.raises(CorruptionError, match=r"local folder .*Corruption"):
        Table(lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, folder=str(tmp_path / "db")), True).check()


def test_a_bit_that_flips_in_storage_is_found(store: FileSystemStore, tmp_path: Path) -> None:
    """In any file: neither a restore nor a reader of rows takes it."""
    cells = ObjectState(BACKENDS["rocksdb"], True)
    cells.batch([(key, "put", key % 5) for key in range(100)])
    native = frozen(cells, store, 1)
    cells.backend.close()
    for file in native.files:
        data = store.read(file.path)
        store.write(file.path, [data[:-1], bytes([data[-1] ^ 128])])
        with pytest.raises(CorruptionError, match=f"{file.name} is damaged"):
            fetch_native(store, native, str(tmp_path / "db"))
        with pytest.raises(CorruptionError, match=f"{file.name} is damaged"):
            list(read_native(store, native))
        store.write(file.path, [data])
    assert len(composed(list(read_native(store, native)))["v"]) == 100


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    """The error names it."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"local folder .*file/db"):
        rocks_backend(("k",), MAX_PARALLELISM, folder=str(tmp_path / "file" / "db"))


@pytest.mark.slow
def test_a_snapshot_that_finds_no_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has gone (a disk that was unmounted, say): who writes it is told, and nothing half-made stays.

    Nobody waits until a write is over that has failed: here that would be for ever.
    """
    monkeypatch.setattr(database_session, "_POLLS_MAX", 10**9)
    folder = tmp_path / "work" / "db"
    cells = ObjectState(lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, folder=str(folder)), True)
    cells.batch([(1, "put", 1)])
    os.rename(tmp_path / "work", tmp_path / "elsewhere")
    backend = cells.backend
    assert isinstance(backend, RocksBackend)
    snapshot = backend.freeze_native(Cut(CheckpointId(1)))
    assert snapshot is not None
    with pytest.raises(StorageError, match=r"cannot take a snapshot of RocksDB in the local folder .*chk-1"):
        snapshot.files()
    assert os.listdir(tmp_path) == ["elsewhere"]
    backend.close()


def test_a_database_is_closed_before_its_folder_goes(tmp_path: Path) -> None:
    """Also where both end together, as parts of a cycle: a database that is open would write to it for a second."""

    class Watched:
        there_at_the_end: bool | None = None

        def close(self) -> None:
            Watched.there_at_the_end = os.path.exists(tmp_path / "db")

    (tmp_path / "db").mkdir()
    cycle: list[Any] = [database_session.OwnedFolder(str(tmp_path / "db")), Watched()]
    cycle[0].has(cycle[1])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert (Watched.there_at_the_end, os.listdir(tmp_path)) == (True, [])


def test_what_an_earlier_attempt_left_is_not_taken(tmp_path: Path) -> None:
    """A folder without a description was not fetched to its end, or somebody died there: the backend begins empty."""
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "CURRENT").write_bytes(b"MANIFEST-000099\n")
    cells = ObjectState(
        lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, folder=str(tmp_path / "db")), True, files={}
    )
    cells.check()
    cells.backend.close()


def test_tables_are_linked_from_local_copies(tmp_path: Path) -> None:
    """A restart on the same node copies no table: it links the copy that is there, and asks the storage for nothing."""
    counting = CountingReads(str(tmp_path / "primary"))
    job, vertex = JobId("job-1"), VertexId("v")
    copies = LocalCopies(PrivateFolder(str(tmp_path / "node")), job, vertex, SubtaskIndex(0), size_bytes_max=10**9)
    cells = ObjectState(BACKENDS["rocksdb"], True)
    cells.batch([(key, "put", key % 5) for key in range(100)])
    expected = cells.expected()
    backend = cells.backend
    assert isinstance(backend, RocksBackend)
    snapshot = backend.freeze_native(Cut(CheckpointId(1)))
    assert snapshot is not None
    target = copies.store_for(counting, CheckpointId(1))
    native = write_native(target, "job-1/shared/chk-1/v-0=op", snapshot, None)
    backend.close()
    part = SubtaskState(vertex, SubtaskIndex(0), None, native=(native,))
    local = LocalFirstStore(counting, PrivateFolder(str(tmp_path / "node")), job, [part])
    fetch_native(local, native, str(tmp_path / "db"))
    assert counting.bytes_read == 0
    names = [file.name for file in native.files if file.name.endswith(".sst")]
    assert [os.stat(tmp_path / "db" / name).st_nlink for name in names] == [2] * len(names)
    again = ObjectState(
        lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, folder=str(tmp_path / "db")), True, files=expected
    )
    again.check()
    again.backend.close()
