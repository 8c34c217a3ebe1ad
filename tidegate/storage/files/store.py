"""`Store`: the interface of a place where bytes rest.

`file_system_store.py` implements it over fsspec; the simulator has its own.
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
        """The root, in a form that opens the same store again from another process."""
        ...

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Write a whole file, replacing what was there; it appears complete or not at all. Returns its bytes."""
        ...

    def create(self, path: str, data: Buffer) -> None:
        """Create a file atomically if nothing has that name, else raise AlreadyExistsError and change nothing."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, or of a range of it. NotFoundError if there is no such file."""
        ...

    def exists(self, path: str) -> bool:
        """Whether a file of this name is there."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Names (not paths) directly under a folder, files and folders, sorted. Empty when there is no folder.

        A folder whose files were all deleted may still be named: some S3 servers keep it for a while.
        """
        ...

    def delete(self, path: str) -> None:
        """Delete one file. Deleting what is not there is no error."""
        ...

    def delete_all(self, paths: Iterable[str]) -> None:
        """Delete files, in the order in which they come, in few requests. One that is not there is no error."""
        ...

    def delete_tree(self, prefix: str) -> None:
        """Delete everything under a folder. Deleting what is not there is no error."""
        ...


@runtime_checkable
class ViewedStore(Protocol):
    """A store that can show bytes where they lie, in memory of this machine, so that nobody has to copy them."""

    def view(self, path: str, offset: int, length: int) -> memoryview | None:
        """As `Store.read` of a range; None where that has to be asked."""
        ...


OpenStore = Callable[[str], Store]
"""Opens the store at a url. The default is `filesystem.open_store`; the simulator, Ray and tests pass their own."""
