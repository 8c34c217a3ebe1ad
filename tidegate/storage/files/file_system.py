"""`Files`: what `FileSystemStore` needs of a kind of file system. Local files, S3 and memory implement it.

A `Files` works on absolute keys, raises OSError for every fault, and says of a conditional create whether it
won. Rules: a file appears complete or not at all; `create` never replaces; a name that starts with
`TEMPORARY_PREFIX` is an unfinished file and belongs to nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import fsspec

from tidegate.storage.files.store import Buffer

TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file below a folder: its path from there, its size, and when it was written, where the storage knows."""

    path: str
    size_bytes: int
    modified_at_ms: int | None = None
    tag: str = ""
    """What the storage calls these bytes (S3's ETag); empty where it has no such name, and in listings."""


class Files(Protocol):
    """Operations by absolute key. Raises OSError (FileNotFoundError from `read`) for faults. Thread-safe."""

    repeats_requests: bool
    """Whether what can pass has been tried again for some seconds before an operation fails."""

    def place(self, key: str) -> str:
        """Name of the disk or server that decides who wins a create under a root. Never raises."""
        ...

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write or replace a whole file; returns its bytes."""
        ...

    def create(self, key: str, data: Buffer) -> bool:
        """Create a file if its name is free: True if it was, False (nothing changed) if it was not."""
        ...

    def read(self, key: str, offset: int, length: int | None) -> bytes:
        """Bytes `[offset, offset + length)`, fewer where the file ends before."""
        ...

    def read_with_info(self, key: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        """A range of at least one byte as of `read`, and `info` of the very file that it is of."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is a file (not a folder) of this name."""
        ...

    def list(self, key: str) -> list[str]:
        """Names directly under a folder, in any order."""
        ...

    def delete(self, key: str) -> None:
        """Delete a file if it is there."""
        ...

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete files that are there, in their order where that can be."""
        ...

    def delete_tree(self, key: str) -> None:
        """Delete a folder with all that is in it if it is there."""
        ...

    def delete_temporary(self, key: str) -> int:
        """Delete what interrupted writes left under a folder; its writers must be dead. Returns how many."""
        ...

    def walk(self, key: str, *, follow_links: bool = False) -> Iterator[FileInfo]:
        """All files at any depth below a folder, in any order, unfinished ones left out.

        With `follow_links` those in folders that are symbolic links too, where a storage has such.
        """
        ...

    def info(self, key: str) -> FileInfo:
        """Size and time of change of a file; its path is the key. FileNotFoundError if there is none."""
        ...


class MemoryFiles:
    """The process-wide `memory` file system of fsspec; all stores of a process see the same files."""

    repeats_requests = False

    # One lock for all instances: the files are the process's, and check-then-write must be atomic among them.
    _lock = threading.RLock()

    def __init__(self) -> None:
        self._fs: Any = fsspec.filesystem("memory")

    def place(self, key: str) -> str:
        return "memory"

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        data = b"".join(chunks)
        with self._lock:
            self._fs.pipe_file(key, data)
        return len(data)

    def create(self, key: str, data: Buffer) -> bool:
        with self._lock:
            if self._fs.exists(key):
                return False
            self._fs.pipe_file(key, bytes(data))
            return True

    def read(self, key: str, offset: int, length: int | None) -> bytes:
        end = None if length is None else offset + length
        with self._lock:
            data = self._fs.cat_file(key, start=offset, end=end)
        assert isinstance(data, bytes)
        return data

    def read_with_info(self, key: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        with self._lock:
            return self.read(key, offset, length), self.info(key)

    def exists(self, key: str) -> bool:
        with self._lock:
            return bool(self._fs.isfile(key))

    def list(self, key: str) -> list[str]:
        prefix = key.rstrip("/") + "/"
        with self._lock:
            found: list[str] = self._fs.find(key)
        return list({path[len(prefix) :].split("/", 1)[0] for path in found if path.startswith(prefix)})

    def delete(self, key: str) -> None:
        with self._lock:
            if self._fs.isfile(key):
                self._fs.rm_file(key)

    def delete_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def delete_tree(self, key: str) -> None:
        prefix = key.rstrip("/") + "/"
        with self._lock:
            for path in self._fs.find(key):
                if path.startswith(prefix):
                    self._fs.rm_file(path)

    def delete_temporary(self, key: str) -> int:
        return 0

    def walk(self, key: str, *, follow_links: bool = False) -> Iterator[FileInfo]:
        prefix = key.rstrip("/") + "/"
        with self._lock:
            found = [path for path in self._fs.find(key) if path.startswith(prefix)]
            infos = [(path, self._fs.size(path), self._fs.modified(path)) for path in found]
        for path, size_bytes, modified in infos:
            yield FileInfo(path[len(prefix) :], size_bytes, int(modified.timestamp() * 1000))

    def info(self, key: str) -> FileInfo:
        with self._lock:
            return FileInfo(key, self._fs.size(key), int(self._fs.modified(key).timestamp() * 1000))
