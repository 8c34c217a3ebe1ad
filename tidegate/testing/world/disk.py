"""The storage of a simulation, and the local disks of its nodes. Both keep their files in memory and inject faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from errno import ENOSPC

from tidegate.storage.checkpoints.layout import METADATA_NAME
from tidegate.storage.errors import AlreadyExistsError, NotFoundError, StorageError
from tidegate.storage.files.store import Buffer
from tidegate.testing.world.virtual_time import World

DECISIVE_TRIES = 4
"""Operations on files that decide what is complete or visible fail this many times as often as other operations.

There are few of these files among many others.
"""
TABLE_LOG = "_tidegate/log/"


class SimulatedDisk:
    """Stores all files of a simulation by full name, and calls listeners when files change."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.files: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, None]] = {}
        self.creating: list[Callable[[str, bytes], None]] = []
        """Called with name and data before a file is created conditionally."""
        self.created: list[Callable[[str, bytes], None]] = []
        self.deleted: list[Callable[[str], None]] = []
        self.past: Mapping[str, bytes] = {}
        """Files that the current operation has read earlier. They may have been deleted since then."""
        self.reliable = False
        """True: operations never fail. Oracles set it while they read."""

    def put(self, name: str, data: bytes) -> None:
        """Adds a complete file and calls the listeners."""
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
        """Deletes a file, if it exists, and calls the listeners."""
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
        """Returns the names of files and folders directly in a folder, sorted."""
        return sorted(self._folders.get(folder, ()))

    def below(self, folder: str) -> list[str]:
        """Returns the full names of all files in a folder and its subfolders."""
        found: list[str] = []
        for name in self.names(folder):
            path = f"{folder}/{name}"
            found += self.below(path) if path in self._folders else [path]
        return found

    @property
    def size_bytes(self) -> int:
        """Returns the total size of all files in bytes."""
        return sum(map(len, self.files.values()))


class SimulatedStore:
    """The store for the part of the disk under one URL. Operations fail with the probability `storage`."""

    for_one_thread = True
    """True, because operations from several threads could not be replayed."""

    def __init__(self, disk: SimulatedDisk, url: str) -> None:
        self.disk = disk
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        """Returns the URL without a slash at its end."""
        return self._url

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Writes a complete file and returns its size in bytes."""
        data = b"".join(bytes(chunk) for chunk in chunks)
        fails_after = self._maybe_fail("write", path)
        self.disk.put(self._name(path), data)
        self._fail_if(fails_after, "write", path)
        return len(data)

    def create(self, path: str, data: Buffer) -> None:
        """Creates a file. Raises AlreadyExistsError if it exists."""
        fails_after = self._maybe_fail("create", path)
        name = self._name(path)
        if not self.disk.reliable:
            for listener in self.disk.creating:
                listener(name, bytes(data))
        if name in self.disk.files:
            raise AlreadyExistsError(f"{name} exists")
        self.disk.put(name, bytes(data))
        self._fail_if(fails_after, "create", path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns bytes of a file. Raises NotFoundError if it does not exist."""
        self._fail_if(self._maybe_fail("read", path), "read", path)
        name = self._name(path)
        data = self.disk.files.get(name, self.disk.past.get(name))
        if data is None:
            raise NotFoundError(f"{self._name(path)} does not exist")
        return data[offset:] if length is None else data[offset : offset + length]

    def exists(self, path: str) -> bool:
        """Returns whether a file exists."""
        self._fail_if(self._maybe_fail("exists", path), "exists", path)
        return self._name(path) in self.disk.files

    def list(self, prefix: str) -> list[str]:
        """Returns the names of files and folders directly in a folder, sorted."""
        self._fail_if(self._maybe_fail("list", prefix), "list", prefix)
        return self.disk.names(self._name(prefix))

    def delete(self, path: str) -> None:
        """Deletes one file, if it exists."""
        fails_after = self._maybe_fail("delete", path)
        self.disk.remove(self._name(path))
        self._fail_if(fails_after, "delete", path)

    def delete_all(self, paths: Iterable[str]) -> None:
        """Deletes files, one after the other."""
        for path in paths:
            self.delete(path)

    def delete_tree(self, prefix: str) -> None:
        """Deletes a folder with all its files and subfolders."""
        fails_after = self._maybe_fail("delete_tree", prefix)
        for name in self.disk.below(self._name(prefix)):
            self.disk.remove(name)
        self._fail_if(fails_after, "delete_tree", prefix)

    def _name(self, path: str) -> str:
        path = path.strip("/")
        return f"{self._url}/{path}" if path else self._url

    def _maybe_fail(self, operation: str, path: str) -> bool:
        """Raises StorageError before an operation, or returns whether it must fail afterwards."""
        world = self.disk.world
        if self.disk.reliable:
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


REFUSED = 0.05
"""Probability that the disk is full when a file is written, while faults happen."""
WRONG = 0.1
"""Probability that a file is stored with wrong bytes, while faults happen."""


class SimulatedNodeFolder:
    """The folder of one node on its local disk, for copies of state. It is lost with the node.

    As on a real node, nothing is synced. A copy may therefore be truncated or contain a wrong byte, and readers must
    check it. The folder has its own random generator, with `seed`.
    """

    def __init__(self, world: World, node: str, seed: str) -> None:
        self._world = world
        self._disk = SimulatedDisk(world)
        self._disk.reliable = True
        self._name = node
        self._random = random.Random(seed)
        self._written_ms: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self._name

    def usable(self) -> bool:
        return True

    def list(self, path: str = "") -> list[str]:
        return self._disk.names(self._full(path))

    def files(self, path: str) -> Iterator[tuple[str, int]]:
        root = self._full(path)
        for name in self._disk.below(root):
            yield name.removeprefix(f"{root}/"), len(self._disk.files[name])

    def begin(self, path: str) -> _SimulatedFile:
        if self._happens(REFUSED):
            raise OSError(ENOSPC, "simulated: no space left", path)
        return _SimulatedFile(self, path)

    def keep(self, path: str, data: bytes) -> None:
        """Stores a finished file under its name."""
        self._written_ms[path] = self._world.wall_ms
        self._disk.put(self._full(path), self._damaged(data) if self._happens(WRONG) else data)

    def remove(self, path: str) -> None:
        for name in [self._full(path), *self._disk.below(self._full(path))]:
            self._disk.remove(name)

    def remove_unfinished(self, path: str) -> None:
        """Does nothing, because a process that dies has either finished a write or not started it."""

    def newest_ms(self, path: str) -> int | None:
        below = [at_ms for name, at_ms in self._written_ms.items() if name.startswith(f"{path}/")]
        return max(below, default=None) if self._disk.names(self._full(path)) else None

    def store(self, path: str) -> _MappedStore:
        return _MappedStore(self._disk, self._full(path))

    def local_name(self, path: str) -> str | None:
        """Returns None, because these files do not exist on the real machine."""
        return None

    def _full(self, path: str) -> str:
        return f"{self._name}/{path}" if path else self._name

    def _happens(self, probability: float) -> bool:
        return self._world.faulty and self._random.random() < probability

    def _damaged(self, data: bytes) -> bytes:
        place = self._random.randrange(len(data)) if data else 0
        if self._random.random() < 0.5:
            return data[:place]
        return (
            data[:place] + bytes([data[place] ^ 1 << self._random.randrange(8)]) + data[place + 1 :] if data else b"x"
        )


class _SimulatedFile:
    """A file that is being written."""

    def __init__(self, folder: SimulatedNodeFolder, path: str) -> None:
        self._folder = folder
        self._path = path
        self._data = bytearray()

    def write(self, chunk: memoryview) -> None:
        self._data += chunk

    def finish(self) -> None:
        self._folder.keep(self._path, bytes(self._data))

    def drop(self) -> None:
        self._data.clear()


class _MappedStore(SimulatedStore):
    """A store whose files are in memory, so that mapping a file reads it."""

    def mapped(self, path: str, offset: int, length: int) -> memoryview:
        return memoryview(self.read(path, offset, length))
