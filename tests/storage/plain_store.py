"""A store that is a dictionary: fast enough for ten thousand commits, counts requests, lets others act in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from tidegate.storage.errors import AlreadyExistsError, NotFoundError
from tidegate.storage.files.store import Buffer


class PlainStore:
    """A view of some files. `requests` counts by kind; `before` is called, with the kind, before each."""

    def __init__(self, files: dict[str, bytes] | None = None, before: Callable[[str], None] | None = None) -> None:
        self.files = {} if files is None else files
        self.requests: Counter[str] = Counter()
        self.written_bytes = 0
        self.read_bytes = 0
        self.before = before

    @property
    def url(self) -> str:
        """Where it is."""
        return "plain://table"

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Write a whole file."""
        self._asked("write")
        data = b"".join(bytes(chunk) for chunk in chunks)
        self.files[path] = data
        self.written_bytes += len(data)
        return len(data)

    def create(self, path: str, data: Buffer) -> None:
        """Conditional create."""
        self._asked("create")
        if path in self.files:
            raise AlreadyExistsError(path)
        self.files[path] = bytes(data)
        self.written_bytes += len(self.files[path])

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file."""
        self._asked("read")
        if path not in self.files:
            raise NotFoundError(path)
        data = self.files[path]
        self.read_bytes += len(data)
        return data[offset:] if length is None else data[offset : offset + length]

    def exists(self, path: str) -> bool:
        """Whether a file is there."""
        self._asked("exists")
        return path in self.files

    def list(self, prefix: str) -> list[str]:
        """Names under a folder."""
        self._asked("list")
        start = f"{prefix}/"
        return sorted({name.removeprefix(start).partition("/")[0] for name in self.files if name.startswith(start)})

    def delete(self, path: str) -> None:
        """Delete one file."""
        self._asked("delete")
        self.files.pop(path, None)

    def delete_all(self, paths: Iterable[str]) -> None:
        """Delete files, one after the other."""
        for path in paths:
            self.delete(path)

    def delete_tree(self, prefix: str) -> None:
        """Delete a folder."""
        self._asked("delete_tree")
        for name in [name for name in self.files if name.startswith(f"{prefix}/")]:
            del self.files[name]

    def _asked(self, kind: str) -> None:
        self.requests[kind] += 1
        if self.before is not None:
            self.before(kind)
