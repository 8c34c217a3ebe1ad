"""The local disk of a simulated node, as far as copies of state go: it gets full, and what it has kept may be wrong.

Nothing here is ever synced, as on a real node. So a copy may be cut short or have another byte in it when it is read,
and whoever reads it has to look. The disk draws from a generator of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from errno import ENOSPC

from tidegate.testing.world.disk import SimulatedDisk, SimulatedStore
from tidegate.testing.world.virtual_time import World

REFUSED = 0.05
"""Part of the files for which there is no room while faults happen."""
WRONG = 0.1
"""Part of those whose bytes are not what was written."""


class SimulatedNodeFolder:
    """The folder of one node. With the node it is lost: who still writes to it writes to nowhere."""

    def __init__(self, world: World, node: str, seed: str) -> None:
        """`seed`: of the generator."""
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
        """A file gets its name."""
        self._written_ms[path] = self._world.wall_ms
        self._disk.put(self._full(path), self._damaged(data) if self._happens(WRONG) else data)

    def remove(self, path: str) -> None:
        for name in [self._full(path), *self._disk.below(self._full(path))]:
            self._disk.remove(name)

    def remove_unfinished(self, path: str) -> None:
        """There are none: a process that dies is done with its write, or has not begun it."""

    def newest_ms(self, path: str) -> int | None:
        below = [at_ms for name, at_ms in self._written_ms.items() if name.startswith(f"{path}/")]
        return max(below, default=None) if self._disk.names(self._full(path)) else None

    def store(self, path: str) -> _MappedStore:
        return _MappedStore(self._disk, self._full(path))

    def local_name(self, path: str) -> str | None:
        """No kernel knows of files of a simulation."""
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
    """Its files lie in memory anyway."""

    def mapped(self, path: str, offset: int, length: int) -> memoryview:
        return memoryview(self.read(path, offset, length))
