"""Reads a checkpoint from the copies that a node has of it, and from the primary storage where it has none.

Rules:

- The checkpoint's metadata says what each file must be. A copy is read as a whole and verified once, before its first
  byte is used. Then it is mapped into memory rather than read again.
- A copy that is missing or not right is passed over for the primary, with a line in the log that says why. So is one
  that vanishes later. While copies are right the primary is not asked for them.
- Copies count only in a folder that is this user's alone, and links in it do not count: state may hold pickles, which
  run code when they are read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from tidegate.storage.checkpoints.layout import checkpoint_name
from tidegate.storage.checkpoints.metadata import NativeFile, StateHandle, SubtaskState
from tidegate.storage.copies.local_copies import copies_below, job_folder
from tidegate.storage.copies.node_folder import MappedStore, NodeFolder
from tidegate.storage.errors import StorageError
from tidegate.storage.files.store import Store
from tidegate.storage.files.wrapped_store import WrappedStore
from tidegate.storage.ids import JobId
from tidegate.storage.state.verification import verified_native, verified_state

T = TypeVar("T", bytes, memoryview)
F = TypeVar("F", bytes | None, memoryview | None, str | None)

_PART_BYTES = 512 * 1024
"""So little is verified at a time that it stays in the cache, and that its memory is used again and again."""

_logger = logging.getLogger(__name__)


class LocalFirstStore(WrappedStore):
    """The primary storage, but files of one checkpoint are read from local copies that are right. Thread-safe."""

    def __init__(self, primary: Store, folder: NodeFolder, job_id: JobId, subtasks: Iterable[SubtaskState]) -> None:
        """`folder` is the node's, as for `LocalCopies`; `subtasks` are those of whom something may be read.

        The copies of every task of the job count, because tasks may have changed places.
        """
        super().__init__(primary)
        self._used: set[bool] = set()
        roots = _roots_by_path(folder, job_id)
        self._copies = {
            path: _LocalCopy(primary, folder, roots.get(path), file)
            for subtask in subtasks
            for path, file in _files_of(subtask).items()
        }

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        copy = self._copies.get(path)
        data = None if copy is None else self._noted(copy.read(offset, length))
        return super().read(path, offset, length) if data is None else data

    def view(self, path: str, offset: int, length: int) -> memoryview | None:
        """A range of the copy of a file, mapped into memory; None if there is none that is right."""
        copy = self._copies.get(path)
        return None if copy is None else self._noted(copy.view(offset, length))

    def local_file(self, path: str) -> str | None:
        """Name of the copy of a file, verified, for who wants to link rather than to read; None if there is none."""
        copy = self._copies.get(path)
        return None if copy is None else self._noted(copy.name())

    @property
    def sufficed(self) -> bool:
        """Whether files of the checkpoint were asked for, and a copy was right each time."""
        return self._used == {True}

    def _noted(self, found: F) -> F:
        self._used.add(found is not None)
        return found


class _LocalCopy:
    """What is known of the copy of one file."""

    def __init__(self, primary: Store, folder: NodeFolder, root: str | None, file: StateHandle | NativeFile) -> None:
        assert file.path is not None
        self._folder = folder
        self._root = root
        self._primary_url = primary.url
        self._path = file.path
        self._file = file
        self._store = None if root is None else folder.store(root)
        self._lock = threading.Lock()
        self._verified = False

    def read(self, offset: int, length: int | None) -> bytes | None:
        """The bytes, or None if the primary has to be asked."""
        return self._taken(offset, length, lambda store: store.read(self._path, offset, length))

    def view(self, offset: int, length: int) -> memoryview | None:
        """The same where it lies."""
        return self._taken(offset, length, lambda store: store.mapped(self._path, offset, length))

    def _taken(self, offset: int, length: int | None, take: Callable[[MappedStore], T]) -> T | None:
        store = self._usable()
        if store is None:
            return None
        there_bytes = max(0, self._file.size_bytes - max(0, offset))
        wanted_bytes = there_bytes if length is None else min(length, there_bytes)
        try:
            data = take(store)
        except StorageError as error:
            self._pass_over(str(error))
            return None
        if len(data) != wanted_bytes:
            self._pass_over("it has changed since it was verified")
            return None
        return data

    def name(self) -> str | None:
        """Name of the file, if it can be used."""
        store = self._usable()
        return None if store is None else self._folder.local_name(f"{self._root}/{self._path}")

    def _usable(self) -> MappedStore | None:
        with self._lock:
            if not self._verified:
                self._verified = True
                self._verify()
            return self._store

    def _verify(self) -> None:
        if self._store is None:
            _logger.info("No local copy of %s: it is read from %s", self._path, self._primary_url)
            return
        file = self._file
        try:
            if isinstance(file, StateHandle):
                parts = verified_state(self._store, file, _PART_BYTES)
            else:
                parts = verified_native(self._store, file, _PART_BYTES)
            for _ in parts:
                pass
        except StorageError as error:
            self._store = None
            self._tell(str(error))

    def _pass_over(self, reason: str) -> None:
        with self._lock:
            if self._store is None:
                return
            self._store = None
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        _logger.warning(
            "The local copy of %s is passed over, it is read from %s: %s", self._path, self._primary_url, reason
        )


def _files_of(subtask: SubtaskState) -> dict[str, StateHandle | NativeFile]:
    handles = {handle.path: handle for handle in subtask.handles if handle.path is not None}
    return handles | {file.path: file for file in subtask.native_files}


def _roots_by_path(folder: NodeFolder, job_id: JobId) -> dict[str, str]:
    """The folder in the node's below which there is a copy of each path."""
    if not folder.usable():
        return {}
    job = job_folder(job_id)
    tasks = [f"{job}/{name}" for name in folder.list(job)]
    return {
        path: f"{task}/{checkpoint_name(number)}" for task in tasks for number, path, _ in copies_below(folder, task)
    }
