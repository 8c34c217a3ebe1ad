"""A store in which chosen things happen: something runs just before a create, or its answer is lost."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.store import Buffer


class FaultyStore(FileSystemStore):
    """Like the store of its url; the faults happen once: two at the next create, one in the next listing."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.before_create: Callable[[], None] | None = None
        self.lose_next_answer = False
        self.unlisted: str | None = None
        """A name that the next listing leaves out, as one may that is made while files are created."""

    def list(self, prefix: str) -> list[str]:
        """List, as told."""
        unlisted, self.unlisted = self.unlisted, None
        return [name for name in super().list(prefix) if name != unlisted]

    def create(self, path: str, data: Buffer) -> None:
        """Create, as told."""
        intruder, self.before_create = self.before_create, None
        if intruder is not None:
            intruder()
        super().create(path, data)
        if self.lose_next_answer:
            self.lose_next_answer = False
            raise StorageError("the connection broke before the answer came")
