"""`NodeFolder`: the folder of a node in which the tasks of many jobs keep copies. `PrivateFolder` is that of a machine.

All that copies need of a local disk goes through it, so that the simulator can have disks of its own, which are lost
with their node, get full, and forget what was never synced.

Rules of a folder:

- It is this user's alone (`private_folders.py`), and links in it do not count. Where it is not, nothing is kept in it,
  read from it, or deleted.
- A file gets its name when it is finished. What was not finished is nobody's, and is deleted by the next who looks.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from typing import Protocol

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import TEMPORARY_PREFIX
from tidegate.storage.files.local_files import LocalFiles
from tidegate.storage.files.private_folders import (
    PrivateStore,
    is_private,
    list_inside,
    make_inside,
    make_private,
    open_private,
    remove_inside,
)
from tidegate.storage.files.store import Store

_logger = logging.getLogger(__name__)


class MappedStore(Store, Protocol):
    """A store that shows a range of a file where it lies. Raises as `Store.read`."""

    def mapped(self, path: str, offset: int, length: int) -> memoryview: ...


class UnfinishedFile(Protocol):
    """A file that is being written, and has no name yet."""

    def write(self, chunk: memoryview) -> None:
        """Append bytes. OSError."""
        ...

    def finish(self) -> None:
        """Give it its name, in place of what had it. OSError."""
        ...

    def drop(self) -> None:
        """Delete it, whether or not that can be done."""
        ...


class NodeFolder(Protocol):
    """Files of one node. Paths are relative, with `/` between their parts; "" is the folder itself. Thread-safe."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def usable(self) -> bool:
        """Whether it is there, and this user's alone."""
        ...

    def list(self, path: str = "") -> list[str]:
        """Sorted names directly under a folder; empty if there is none."""
        ...

    def files(self, path: str) -> Iterator[tuple[str, int]]:
        """Path and bytes of each finished file at any depth below a folder, in order; paths are relative to that."""
        ...

    def begin(self, path: str) -> UnfinishedFile:
        """Start a file. ConfigurationError if the folder is not this user's alone; OSError."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file or a folder, as far as that can be done."""
        ...

    def remove_unfinished(self, path: str) -> None:
        """Delete what was never finished at any depth below a folder, as far as that can be done."""
        ...

    def newest_ms(self, path: str) -> int | None:
        """When something was last written at any depth below a folder, in ms since the epoch; None if it is none."""
        ...

    def store(self, path: str) -> MappedStore:
        """The files below a folder, to be read."""
        ...

    def local_name(self, path: str) -> str | None:
        """The name under which the kernel knows a file, for who wants to link it; None where there is no such name."""
        ...


OpenNodeFolder = Callable[[str], NodeFolder]
"""Opens the folder of the node on which it is called, by its name there."""


class PrivateFolder:
    """A folder of this machine."""

    def __init__(self, name: str) -> None:
        """`name` is its path. It need not be there."""
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def usable(self) -> bool:
        try:
            return is_private(self._name)
        except (ConfigurationError, OSError) as error:
            _logger.info("Local copies of state are left alone: %s", error)
            return False

    def list(self, path: str = "") -> list[str]:
        return list_inside(self._name, path)

    def files(self, path: str) -> Iterator[tuple[str, int]]:
        root = self._path(path)
        if os.path.islink(root):
            return
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                if not name.startswith(TEMPORARY_PREFIX):
                    file = os.path.join(folder, name)
                    with suppress(OSError):
                        yield os.path.relpath(file, root), os.path.getsize(file)

    def begin(self, path: str) -> UnfinishedFile:
        make_private(self._name)
        folder = make_inside(self._name, os.path.dirname(path))
        return _PrivateFile(os.path.join(folder, f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"), self._path(path))

    def remove(self, path: str) -> None:
        remove_inside(self._name, path)

    def remove_unfinished(self, path: str) -> None:
        with suppress(OSError):
            LocalFiles().delete_temporary(self._path(path))

    def newest_ms(self, path: str) -> int | None:
        root = self._path(path)
        if not os.path.isdir(root) or os.path.islink(root):
            return None
        newest_ns = 0
        for folder, _, names in os.walk(root):
            for each in (folder, *(os.path.join(folder, name) for name in names)):
                with suppress(OSError):
                    newest_ns = max(newest_ns, os.lstat(each).st_mtime_ns)
        return newest_ns // 1_000_000

    def store(self, path: str) -> MappedStore:
        return PrivateStore(self._path(path))

    def local_name(self, path: str) -> str | None:
        return self._path(path)

    def _path(self, path: str) -> str:
        return os.path.join(self._name, path)


class _PrivateFile:
    """A file of a private folder that is being written. Nothing is synced: a copy is verified before it is used."""

    def __init__(self, temporary: str, target: str) -> None:
        self._temporary = temporary
        self._target = target
        self._file = FileIO(temporary, "x", opener=open_private)

    def write(self, chunk: memoryview) -> None:
        while chunk:
            chunk = chunk[self._file.write(chunk) :]

    def finish(self) -> None:
        self._file.close()
        os.replace(self._temporary, self._target)

    def drop(self) -> None:
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            os.unlink(self._temporary)
