"""The storage of a simulation: one flat name space in memory, with faults, watched by the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tidegate.storage.checkpoints.layout import METADATA_NAME
from tidegate.storage.errors import AlreadyExistsError, NotFoundError, StorageError
from tidegate.storage.files.store import Buffer
from tidegate.testing.world.virtual_time import World

DECISIVE_TRIES = 4
"""The files that decide what is complete and what is visible are few among many: they fail that much more often."""
TABLE_LOG = "_tidegate/log/"


class SimulatedDisk:
    """All files of a simulation by full name, and who wants to know of changes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.files: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, None]] = {}
        self.creating: list[Callable[[str, bytes], None]] = []
        """Whoever acts before a file is created conditionally."""
        self.created: list[Callable[[str, bytes], None]] = []
        self.deleted: list[Callable[[str], None]] = []
        self.past: Mapping[str, bytes] = {}
        """Files that somebody has read who acts now, and that may be deleted since."""
        self.reliable = False
        """Set by those who look from outside, so that their looks never fail."""

    def put(self, name: str, data: bytes) -> None:
        """A file appears, whole."""
        self.files[name] = data
        child = name
        while "/" in child:
            folder, _, last = child.rpartition("/")
            children = self._folders.setdefault(folder, {})
            if last in children:
                break
            children[last] = None
            child = folder
        for listener in self.created:
            listener(name, data)

    def remove(self, name: str) -> None:
        """A file goes away."""
        if self.files.pop(name, None) is None:
            return
        child = name
        while "/" in child:
            folder, _, last = child.rpartition("/")
            children = self._folders[folder]
            del children[last]
            if children:
                break
            del self._folders[folder]
            child = folder
        for listener in self.deleted:
            listener(name)

    def names(self, folder: str) -> list[str]:
        """Names directly under a folder, in order."""
        return sorted(self._folders.get(folder, ()))

    def below(self, folder: str) -> list[str]:
        """Full names of all files in a folder and its folders."""
        found: list[str] = []
        for name in self.names(folder):
            path = f"{folder}/{name}"
            found += self.below(path) if path in self._folders else [path]
        return found

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))


class SimulatedStore:
    """The part of the disk under one url."""

    for_one_thread = True
    """What threads of its user would do here could not be replayed."""

    def __init__(self, disk: SimulatedDisk, url: str) -> None:
        self._disk = disk
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        """The root."""
        return self._url

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Write a whole file."""
        data = b"".join(bytes(chunk) for chunk in chunks)
        fails_after = self._maybe_fail("write", path)
        self._disk.put(self._name(path), data)
        self._fail_if(fails_after, "write", path)
        return len(data)

    def create(self, path: str, data: Buffer) -> None:
        """Conditional create."""
        fails_after = self._maybe_fail("create", path)
        name = self._name(path)
        if not self._disk.reliable:
            for listener in self._disk.creating:
                listener(name, bytes(data))
        if name in self._disk.files:
            raise AlreadyExistsError(f"{name} exists")
        self._disk.put(name, bytes(data))
        self._fail_if(fails_after, "create", path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file."""
        self._fail_if(self._maybe_fail("read", path), "read", path)
        name = self._name(path)
        data = self._disk.files.get(name, self._disk.past.get(name))
        if data is None:
            raise NotFoundError(f"{self._name(path)} does not exist")
        return data[offset:] if length is None else data[offset : offset + length]

    def exists(self, path: str) -> bool:
        """Whether a file is there."""
        self._fail_if(self._maybe_fail("exists", path), "exists", path)
        return self._name(path) in self._disk.files

    def list(self, prefix: str) -> list[str]:
        """Names directly under a folder."""
        self._fail_if(self._maybe_fail("list", prefix), "list", prefix)
        return self._disk.names(self._name(prefix))

    def delete(self, path: str) -> None:
        """Delete one file."""
        fails_after = self._maybe_fail("delete", path)
        self._disk.remove(self._name(path))
        self._fail_if(fails_after, "delete", path)

    def delete_all(self, paths: Iterable[str]) -> None:
        """Delete files, one after the other."""
        for path in paths:
            self.delete(path)

    def delete_tree(self, prefix: str) -> None:
        """Delete a folder."""
        fails_after = self._maybe_fail("delete_tree", prefix)
        for name in self._disk.below(self._name(prefix)):
            self._disk.remove(name)
        self._fail_if(fails_after, "delete_tree", prefix)

    def _name(self, path: str) -> str:
        path = path.strip("/")
        return f"{self._url}/{path}" if path else self._url

    def _maybe_fail(self, operation: str, path: str) -> bool:
        """Fail before the operation, or return whether it has to fail after it."""
        world = self._disk.world
        if self._disk.reliable:
            return False
        if world.storage_away:
            raise StorageError(f"simulated outage: {operation} {path}")
        tries = DECISIVE_TRIES if path.endswith(METADATA_NAME) or TABLE_LOG in path else 1
        if not any(world.chance("storage") for _ in range(tries)):
            return False
        after = world.random.random() < 0.5
        world.note("storage fails", "after" if after else "before", operation, path)
        self._fail_if(not after, operation, path)
        return after

    @staticmethod
    def _fail_if(fails: bool, operation: str, path: str) -> None:
        if fails:
            raise StorageError(f"simulated fault: {operation} {path}")
