"""`WrappedStore`: a store in front of another one, the base of stores that add something.

Rule: whatever a store in front does not change is the business of the one behind it. What it changes it overrides.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.storage.files.store import Buffer, Store


class WrappedStore:
    """The store that it wraps, unchanged. As thread-safe as that."""

    def __init__(self, store: Store) -> None:
        """`store` is the one behind."""
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
