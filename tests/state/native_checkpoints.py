"""Checkpoints of the files of a RocksDB backend, and backends that go on from them."""

from __future__ import annotations

from pathlib import Path

from backend_model import KEYS, MAX_PARALLELISM, Rows, Subject
from rocksdb_backends import rocks_backend

from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import fetch_native, write_native
from tidegate.storage.state.snapshot import Cut


def frozen(subject: Subject, store: FileSystemStore, number: int, base: NativeState | None = None) -> NativeState:
    """A checkpoint of the backend's files."""
    backend = subject.backend
    assert isinstance(backend, RocksBackend)
    native = backend.freeze_native(Cut(CheckpointId(number)))
    assert native is not None
    return write_native(store, f"chk-{number}", native, base)


def opened(
    kind: type[Subject], store: FileSystemStore, native: NativeState, folder: Path, rows: Rows, cache_bytes: int = 0
) -> Subject:
    """A backend that goes on with the files of a checkpoint."""
    fetch_native(store, native, str(folder))

    def make(_: bool) -> RocksBackend:
        return rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, folder=str(folder), cache_bytes=cache_bytes)

    return kind(make, True, files=rows)


class CountingReads(FileSystemStore):
    """Counts the bytes that are read."""

    bytes_read = 0

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Counted."""
        data = super().read(path, offset, length)
        self.bytes_read += len(data)
        return data
