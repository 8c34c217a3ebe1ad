"""A store that counts what is asked of the one behind it, and can be made to fail."""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.store import Buffer


class CountingStore(FileSystemStore):
    """Like the store of its url; `reads` and `writes` are the paths of all calls so far."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.fails = False

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read, and note it."""
        self.reads.append(path)
        return super().read(path, offset, length)

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Write, and note it; when it `fails`, after all chunks were taken."""
        self.writes.append(path)
        size_bytes = super().write(path, chunks)
        if self.fails:
            raise StorageError("the connection broke before the answer came")
        return size_bytes
