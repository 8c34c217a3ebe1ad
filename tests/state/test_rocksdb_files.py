"""Which files a checkpoint of RocksDB has: what is told of them is so, and none is stored that nobody reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import rocksdict
from backend_model import KEYS, MAX_PARALLELISM, Table
from native_checkpoints import frozen, opened
from rocksdb_backends import rocks_backend

from tidegate.state.rocksdb import frozen_database as frozen_files
from tidegate.state.rocksdb.frozen_database import FrozenRocks
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut

MANY = 3_000


def table_of(cache_bytes: int) -> Table:
    """A table with so much memory for rows."""
    return Table(lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, cache_bytes=cache_bytes), True)


def freeze(table: Table, number: int) -> FrozenRocks:
    """A snapshot as files, not written yet."""
    assert isinstance(table.backend, RocksBackend)
    snapshot = table.backend.freeze_native(Cut(CheckpointId(number)))
    assert snapshot is not None
    return snapshot


def compact(table: Table) -> None:
    """Have one table of each key range, in the last level."""
    assert isinstance(table.backend, RocksBackend)
    table.backend._session.database.compact_range(None, None)


class _WithCompaction:
    """A checkpoint of RocksDB's with a compaction behind it."""

    make = rocksdict.Checkpoint

    def __init__(self, database: rocksdict.Rdict) -> None:
        self._database = database

    def create_checkpoint(self, target: str) -> None:
        """Link the files, and put others in their place."""
        self.make(self._database).create_checkpoint(target)
        self._database.compact_range(None, None)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 24])
def test_files_are_told_as_they_would_be_if_they_were_opened(monkeypatch: pytest.MonkeyPatch, cache_bytes: int) -> None:
    """In the first level, and below it; and so they are if RocksDB has changed them meanwhile."""
    table = table_of(cache_bytes)
    for number in range(3):
        table.batch([(key, float(number)) for key in range(MANY)])
        if number == 2:
            compact(table)
        snapshot = freeze(table, number + 1)
        snapshot.ensure_files()
        told = snapshot._live_files()
        assert told
        found = snapshot.files()
        monkeypatch.setattr(snapshot, "_live_files", lambda: None)
        assert snapshot.files() == found
        snapshot.release()
    table.backend.close()


def test_files_are_not_opened_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs a millisecond and a half. They are if a compaction has ended while they were linked."""
    table = table_of(1 << 24)
    seen: list[str] = []
    open_files = frozen_files.open_files

    def noted(folder: str, memory_bytes: int) -> object:
        seen.append(folder)
        return open_files(folder, memory_bytes)

    monkeypatch.setattr(frozen_files, "open_files", noted)
    table.batch([(key, 1.0) for key in range(MANY)])
    snapshot = freeze(table, 1)
    tables = {name for name in snapshot.files() if name.endswith(".sst")}
    assert tables
    assert not seen
    snapshot.release()
    monkeypatch.setattr(rocksdict, "Checkpoint", _WithCompaction)
    table.batch([(key, 2.0) for key in range(MANY)])
    snapshot = freeze(table, 2)
    assert tables < {name for name in snapshot.files() if name.endswith(".sst")}
    assert seen == [snapshot.folder]
    snapshot.release()
    table.backend.close()


def test_settings_are_not_stored(tmp_path: Path) -> None:
    """Who opens the files has settings: a checkpoint has a manifest, its name, and tables, and goes on from these."""
    store = open_store(str(tmp_path / "store"))
    table = table_of(1 << 24)
    table.batch([(key, 1.0) for key in range(MANY)])
    native = frozen(table, store, 1)
    kinds = {"sst" if file.name.endswith(".sst") else file.name.split("-")[0] for file in native.files}
    assert kinds == {"sst", "MANIFEST", "CURRENT"}
    again = opened(Table, store, native, tmp_path / "again", table.expected(), 1 << 24)
    again.batch([(key, 2.0) for key in range(MANY // 2, 2 * MANY)])
    again.check()
    table.backend.close()
    again.backend.close()
