"""`Files`: the operations that `FileSystemStore` needs from a file system. Local files, S3 and memory implement them.

Rules of an implementation: keys are absolute; every fault is an OSError; a file appears complete or not at all;
`create` never replaces a file and returns whether it won; a name that begins with `TEMPORARY_PREFIX` is an unfinished
file, which nothing else reads.
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
    """A file below a folder: its path relative to the folder, its size, and its modification time (None if unknown)."""

    path: str
    size_bytes: int
    modified_at_ms: int | None = None
    tag: str = ""
    """The storage's identifier of the file's content (S3's ETag). Empty if the storage has none, and in listings."""


class Files(Protocol):
    """Operations on files by absolute key. A failure raises OSError (FileNotFoundError from `read`). Thread-safe."""

    repeats_requests: bool
    """True if the implementation retries transient errors for some seconds before an operation fails."""

    def place(self, key: str) -> str:
        """Returns a text that identifies the disk or server on which creates under the key exclude each other. Never
        raises.
        """
        ...

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Writes or replaces a whole file. Returns its size in bytes."""
        ...

    def create(self, key: str, data: Buffer) -> bool:
        """Creates a file if none has this key, and returns True. Returns False, and changes nothing, if one exists."""
        ...

    def read(self, key: str, offset: int, length: int | None) -> bytes:
        """Returns bytes `[offset, offset + length)`, or fewer if the file ends before.

        `length` None reads to the end.
        """
        ...

    def read_with_info(self, key: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        """Returns a range of at least one byte as `read` does, and the `info` of the very file that was read."""
        ...

    def exists(self, key: str) -> bool:
        """Returns whether there is a file (not a folder) with this key."""
        ...

    def list(self, key: str) -> list[str]:
        """Returns the names of files and folders directly under a folder, in any order."""
        ...

    def delete(self, key: str) -> None:
        """Deletes a file if it exists."""
        ...

    def delete_all(self, keys: Sequence[str]) -> None:
        """Deletes files that exist, in their order where possible."""
        ...

    def delete_tree(self, key: str) -> None:
        """Deletes a folder with its contents if it exists."""
        ...

    def delete_temporary(self, key: str) -> int:
        """Deletes the unfinished files under a folder, and returns their number. Their writers must be dead."""
        ...

    def walk(self, key: str, *, follow_links: bool = False) -> Iterator[FileInfo]:
        """Yields all finished files at any depth below a folder, in any order.

        With `follow_links`, also the files in folders that are symbolic links, if the storage supports links.
        """
        ...

    def info(self, key: str) -> FileInfo:
        """Returns size and modification time of a file; the `path` of the result is the key.

        Raises FileNotFoundError.
        """
        ...


class MemoryFiles:
    """Files in memory: the process-wide `memory` file system of fsspec. All stores of a process see the same files."""

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


class RequestCounts:
    """Counts the requests of this process to S3, and its retries on any storage. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.s3_requests = 0
        """Number of requests to S3, including retries."""
        self.retries = 0
        """Number of retries, on any storage."""

    def s3_request(self, again: bool) -> None:
        """Counts a request to S3. `again` is True if the request is a retry."""
        with self._lock:
            self.s3_requests += 1
            self.retries += again

    def tried_again(self) -> None:
        """Counts one retry of an operation on storage other than S3."""
        with self._lock:
            self.retries += 1


OF_THIS_PROCESS = RequestCounts()
