"""Stores of a process that dies at one of its operations on storage, for tests that try all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.store import Buffer

_T = TypeVar("_T")
OPERATIONS_MAX = 10_000


class DiedError(StorageError):
    """The process is gone: whatever it asks for after this fails as well."""


@dataclass(slots=True)
class Death:
    """Dies at operation `at`. `in_effect`: what it asks for there is done, and it does not hear so."""

    at: int
    in_effect: bool
    operations: int = 0

    @property
    def came(self) -> bool:
        """Whether there were as many operations."""
        return self.operations > self.at

    def open_store(self, url: str) -> FileSystemStore:
        """A store of this process."""
        store = DyingStore(url)
        store.death = self
        return store

    def during(self, operation: Callable[[], _T]) -> _T:
        """Carry an operation out, or die."""
        number, self.operations = self.operations, self.operations + 1
        if number > self.at or (number == self.at and not self.in_effect):
            raise DiedError("the process died here")
        done = operation()
        if number == self.at:
            raise DiedError("the process died here, and has not heard of what it did last")
        return done


def deaths() -> Iterator[Death]:
    """At every operation, before it and after it. Ends when there are no more of them."""
    for at in range(OPERATIONS_MAX):
        for in_effect in (False, True):
            death = Death(at, in_effect)
            yield death
            if not death.came:
                return
    raise AssertionError(f"more than {OPERATIONS_MAX} operations")


class DyingStore(FileSystemStore):
    """A store whose operations count. Deleting a folder is as many as it has files: it may be half done."""

    death: Death

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Write, or die."""
        return self.death.during(lambda: super(DyingStore, self).write(path, chunks))

    def create(self, path: str, data: Buffer) -> None:
        """Create, or die."""
        self.death.during(lambda: super(DyingStore, self).create(path, data))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read, or die."""
        return self.death.during(lambda: super(DyingStore, self).read(path, offset, length))

    def exists(self, path: str) -> bool:
        """Look, or die."""
        return self.death.during(lambda: super(DyingStore, self).exists(path))

    def list(self, prefix: str) -> list[str]:
        """List, or die."""
        return self.death.during(lambda: super(DyingStore, self).list(prefix))

    def walk(self, prefix: str) -> Sequence[FileInfo]:
        """List everything, or die."""
        return self.death.during(lambda: super(DyingStore, self).walk(prefix))

    def delete(self, path: str) -> None:
        """Delete, or die."""
        self.death.during(lambda: super(DyingStore, self).delete(path))

    def delete_all(self, paths: Iterable[str]) -> None:
        """Delete file by file, or die between two of them."""
        for path in paths:
            self.delete(path)

    def delete_tree(self, prefix: str) -> None:
        """Delete file by file, or die between two of them: `_metadata` comes last, as it may."""
        for file in reversed(super().walk(prefix)):
            self.delete(f"{prefix}/{file.path}" if prefix else file.path)
        self.death.during(lambda: super(DyingStore, self).delete_tree(prefix))

    def delete_temporary(self, prefix: str) -> int:
        """Clean, or die."""
        return self.death.during(lambda: super(DyingStore, self).delete_temporary(prefix))


class LostAnswers(FileSystemStore):
    """A store whose creates take effect, and seem to fail. `away`: so does what is read next, once."""

    away = False
    _goes_away = False

    def create(self, path: str, data: Buffer) -> None:
        """Create, and say that it failed."""
        super().create(path, data)
        self._goes_away = self.away
        raise StorageError("the connection broke before the answer came")

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read, unless storage is away."""
        goes_away, self._goes_away = self._goes_away, False
        if goes_away:
            raise StorageError("storage is away")
        return super().read(path, offset, length)
