"""`Store`: the interface of a place that stores files. `WrappedStore`: the base of stores that wrap another store.

`file_system_store.py` implements the interface over fsspec. The simulator has an implementation of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview


class Store(Protocol):
    """Files under one root, addressed by `/`-separated relative paths. Thread-safe.

    Every method raises StorageError (or a subclass) and nothing else for a fault of the storage. After a
    StorageError from `write` or `create` the effect is unknown: the file may or may not be there.
    """

    @property
    def url(self) -> str:
        """URL of the root. Another process can open the same store by this URL."""
        ...

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Writes or replaces a whole file, which appears complete or not at all. Returns its size in bytes."""
        ...

    def create(self, path: str, data: Buffer) -> None:
        """Creates a file atomically. Raises AlreadyExistsError, and changes nothing, if the path exists."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns the bytes of a file, or `length` bytes from `offset` on.

        Raises NotFoundError if there is no such file.
        """
        ...

    def exists(self, path: str) -> bool:
        """Returns whether a file exists at the path."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Returns the sorted names (not paths) of files and folders directly under a folder; empty without a folder.

        A folder whose files were all deleted may still be named: some S3 servers keep it for a while.
        """
        ...

    def delete(self, path: str) -> None:
        """Deletes one file. A missing file is not an error."""
        ...

    def delete_all(self, paths: Iterable[str]) -> None:
        """Deletes files, in the given order, in few requests. A missing file is not an error."""
        ...

    def delete_tree(self, prefix: str) -> None:
        """Deletes everything under a folder. A missing folder is not an error."""
        ...


@runtime_checkable
class ViewedStore(Protocol):
    """A store that can return file content as a view of shared memory on this machine, without a copy."""

    def view(self, path: str, offset: int, length: int) -> memoryview | None:
        """Returns a view of a byte range of a file, or None if only `read` can return the bytes."""
        ...


OpenStore = Callable[[str], Store]
"""A function that opens the store at a URL. The default is `open_store`. The simulator, Ray and tests pass other
functions.
"""


class WrappedStore:
    """Passes every call to a wrapped store. Subclasses override some methods. As thread-safe as the wrapped store."""

    def __init__(self, store: Store) -> None:
        """Wraps the store `store`."""
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        return self._store.write(path, chunks)

    def create(self, path: str, data: Buffer) -> None:
        self._store.create(path, data)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._store.read(path, offset, length)

    def exists(self, path: str) -> bool:
        return self._store.exists(path)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)

    def delete(self, path: str) -> None:
        self._store.delete(path)

    def delete_all(self, paths: Iterable[str]) -> None:
        self._store.delete_all(paths)

    def delete_tree(self, prefix: str) -> None:
        self._store.delete_tree(prefix)
