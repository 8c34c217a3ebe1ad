"""Keeps copies of a task's checkpoint files on its own node, and reads a checkpoint from them after a restart.

    <folder>/<job>/<vertex>-<subtask>/chk-17/<path in the primary storage>

`LocalCopies` writes the copies, `LocalFirstStore` reads them, and `NodeFolder` is the local folder that both use.
`PrivateFolder` is the folder of a real machine. The simulator has its own disks, which are lost with their node, fill
up, and lose data that was not synced.

Rules of writing:

- Only the primary storage (the checkpoint storage) matters for correctness. A copy that cannot be written is dropped,
  with one warning per task, and never fails a write to the primary. A copy is kept once the primary has the file.
- Copies are bounded in bytes. Copies of an aborted checkpoint are deleted. When a checkpoint is confirmed, copies of
  older ones are deleted, except files that it still refers to. A process of an earlier attempt may still write copies.
  Deletion therefore lists the disk, and does not rely on what this process has written.
- Nothing is synced: a copy is verified before it is read, and the primary has the same bytes.

Rules of reading:

- The checkpoint's metadata has the size and the checksum of each file. A copy is read as a whole and verified once,
  before its first byte is used. After that it is mapped into memory instead of read again.
- A copy that is missing or damaged is skipped, and the primary is read instead, with a log line that gives the reason.
  The same holds for a copy that vanishes later. While all copies are valid, the primary is not read.

Rules of the folder:

- It belongs to this user alone (`private_folders.py`), and links in it are ignored, because state may contain pickles,
  which run code when they are read. If other users can change the folder, no copy is kept, read or deleted there.
- A file gets its name when it is finished. Unfinished files are deleted by the next process that uses the folder.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import Protocol, TypeVar

from tidegate.storage.checkpoints.layout import CheckpointLayout, checkpoint_name, escape, parse_checkpoint_name
from tidegate.storage.checkpoints.metadata import NativeFile, StateHandle, SubtaskState
from tidegate.storage.errors import ConfigurationError, StorageError
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
from tidegate.storage.files.store import Buffer, Store, WrappedStore
from tidegate.storage.ids import CheckpointId, JobId, SubtaskIndex, VertexId
from tidegate.storage.state.state_file import verified_native, verified_state

_logger = logging.getLogger(__name__)


class LocalCopies:
    """Writes and deletes the local copies of one task's checkpoint files, including copies from earlier attempts.

    Thread-safe; no method raises.
    """

    def __init__(
        self, folder: NodeFolder, job_id: JobId, vertex: VertexId, subtask: SubtaskIndex, *, size_bytes_max: int
    ) -> None:
        """`folder` is the node's folder for copies of all jobs.

        At most `size_bytes_max` bytes are kept for this task.
        """
        self._task = f"{vertex} subtask {subtask}"
        self._folder = folder
        self._below = f"{CheckpointLayout(job_id).job_dir()}/{escape(vertex)}-{subtask}"
        self._size_bytes_max = size_bytes_max
        self._lock = threading.Lock()
        self._kept: dict[CheckpointId, dict[str, int]] = {}
        """Size in bytes of each copy, by checkpoint and path."""
        self._size_bytes = 0
        self._confirmed = CheckpointId(0)
        self._aborted: set[CheckpointId] = set()
        self._warned = False
        if not folder.usable() or not folder.list(self._below):
            return
        folder.remove_unfinished(self._below)
        for checkpoint_id, path, size_bytes in copies_below(folder, self._below):
            self._kept.setdefault(checkpoint_id, {})[path] = size_bytes
            self._size_bytes += size_bytes

    def store_for(self, primary: Store, checkpoint_id: CheckpointId) -> DuplicatingStore:
        """Returns a store for the files of one checkpoint that writes to the primary storage and keeps local copies."""
        return DuplicatingStore(primary, self, checkpoint_id)

    def confirmed(self, checkpoint_id: CheckpointId, still_needed: Collection[str] = ()) -> None:
        """Deletes the local copies of checkpoints older than a completed one, except the files with the paths
        `still_needed`.
        """
        with self._lock:
            self._confirmed = max(self._confirmed, checkpoint_id)
            self._aborted = {number for number in self._aborted if number > checkpoint_id}
            for number in [number for number in self._kept if number < checkpoint_id]:
                folder, paths = self._checkpoint_folder(number), self._kept[number]
                there = {path for path, _ in self._folder.files(folder)} | paths.keys()
                for path in sorted(there.difference(still_needed)):
                    self._size_bytes -= paths.pop(path, 0)
                    self._folder.remove(f"{folder}/{path}")
                if not paths:
                    del self._kept[number]
            self._clear()

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        """Deletes the copies of an aborted checkpoint, including a copy that is still being written."""
        with self._lock:
            self._aborted.add(checkpoint_id)
            self._size_bytes -= sum(self._kept.pop(checkpoint_id, {}).values())
            self._clear()

    @property
    def size_bytes(self) -> int:
        """Returns the total size of the task's copies in bytes, including unfinished copies."""
        with self._lock:
            return self._size_bytes

    def _begin(self, checkpoint_id: CheckpointId, path: str) -> _Copy:
        copy = _Copy(checkpoint_id, path)
        try:
            # Under the lock, so that the folder is not deleted between its creation and the creation of the file.
            with self._lock:
                if not self._is_over(checkpoint_id):
                    copy.file = self._folder.begin(f"{self._checkpoint_folder(checkpoint_id)}/{path}")
        except (ConfigurationError, OSError) as error:
            self._drop(copy, str(error))
        return copy

    def _append(self, copy: _Copy, chunk: Buffer) -> None:
        if copy.file is None:
            return
        view = memoryview(chunk).cast("B")
        with self._lock:
            fits = self._size_bytes + len(view) <= self._size_bytes_max
            if fits:
                self._size_bytes += len(view)
                copy.size_bytes += len(view)
        if not fits:
            self._drop(copy, f"they would take more than the {self._size_bytes_max:,} bytes that are allowed")
            return
        try:
            copy.file.write(view)
        except OSError as error:
            self._drop(copy, str(error))

    def _keep(self, copy: _Copy) -> None:
        """Makes a local copy final, because the primary storage now has the file."""
        if copy.file is None:
            return
        try:
            with self._lock:
                over = self._is_over(copy.checkpoint_id)
                if not over:
                    copy.file.finish()
                    paths = self._kept.setdefault(copy.checkpoint_id, {})
                    self._size_bytes -= paths.get(copy.path, 0)
                    paths[copy.path] = copy.size_bytes
        except OSError as error:
            self._drop(copy, str(error))
            return
        if over:
            self._drop(copy, None)

    def _drop(self, copy: _Copy, reason: str | None) -> None:
        """Deletes an unfinished copy.

        `reason` is the error of the local disk, or None if another cause made the copy useless.
        """
        if copy.file is not None:
            copy.file.drop()
            copy.file = None
        with self._lock:
            self._size_bytes -= copy.size_bytes
            copy.size_bytes = 0
            self._clear()
            warn = reason is not None and not self._warned
            self._warned |= warn
        if warn:
            _logger.warning(
                "Local copies of the state of %s cannot be kept in %s: %s. Checkpoints continue without copies, and a "
                "restart reads from the checkpoint storage. Later failures are not logged",
                self._task,
                f"{self._folder.name}/{self._below}",
                reason,
            )

    def _checkpoint_folder(self, checkpoint_id: CheckpointId) -> str:
        """Returns the folder with the copies of one checkpoint, relative to the folder of the node."""
        return f"{self._below}/{checkpoint_name(checkpoint_id)}"

    def _is_over(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._aborted or checkpoint_id < self._confirmed

    def _clear(self) -> None:
        """Deletes the folders of old and aborted checkpoints from which no copy is kept."""
        for name in self._folder.list(self._below):
            number = parse_checkpoint_name(name)
            if number is not None and self._is_over(number) and number not in self._kept:
                self._folder.remove(f"{self._below}/{name}")


@dataclass(slots=True)
class _Copy:
    """The state of a file that is being copied to the local disk.

    `file` is None before the copy is started, and after it was dropped.
    """

    checkpoint_id: CheckpointId
    path: str
    file: UnfinishedFile | None = None
    size_bytes: int = 0


class DuplicatingStore(WrappedStore):
    """A store that writes to the primary storage, and copies the same bytes to the local disk if there is space."""

    def __init__(self, primary: Store, copies: LocalCopies, checkpoint_id: CheckpointId) -> None:
        """Creates the store. Use `LocalCopies.store_for` to create this store."""
        super().__init__(primary)
        self._copies = copies
        self._checkpoint_id = checkpoint_id

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        copy = self._copies._begin(self._checkpoint_id, path)

        def duplicated() -> Iterator[Buffer]:
            for chunk in chunks:
                self._copies._append(copy, chunk)
                yield chunk

        try:
            size_bytes = super().write(path, duplicated())
        except BaseException:
            self._copies._drop(copy, None)
            raise
        self._copies._keep(copy)
        return size_bytes


def job_folder(job_id: JobId) -> str:
    """Returns the folder of one job's copies, relative to the folder of the node."""
    return CheckpointLayout(job_id).job_dir()


def copies_below(folder: NodeFolder, task_folder: str) -> Iterator[tuple[CheckpointId, str, int]]:
    """Yields, for every local copy of one task, the checkpoint, the path in the primary storage, and the size in bytes.

    Skips unreadable folders.
    """
    for name in folder.list(task_folder):
        if (checkpoint_id := parse_checkpoint_name(name)) is not None:
            for path, size_bytes in folder.files(f"{task_folder}/{name}"):
                yield checkpoint_id, path, size_bytes


def remove_copies(folder: NodeFolder, job_id: JobId) -> None:
    """Deletes all local copies of a job that has ended.

    `remove_stale_copies` later deletes copies that could not be deleted.
    """
    if folder.usable():
        folder.remove(job_folder(job_id))


def remove_stale_copies(folder: NodeFolder, older_than_ms: int) -> list[JobId]:
    """Deletes the copies of jobs that have written no copy since `older_than_ms` (ms since the epoch), and returns
    these jobs.

    Such jobs have usually ended without a chance to clean up. A job that still runs only restores more slowly.
    """
    if not folder.usable():
        return []
    removed = []
    for job in folder.list():
        newest_ms = folder.newest_ms(job)
        if newest_ms is not None and newest_ms < older_than_ms:
            folder.remove(job)
            removed.append(JobId(job))
    return removed


T = TypeVar("T", bytes, memoryview)
F = TypeVar("F", bytes | None, memoryview | None, str | None)

_PART_BYTES = 512 * 1024
"""Number of bytes that are verified at a time. This many bytes fit into the CPU cache."""


class LocalFirstStore(WrappedStore):
    """A store that reads the files of one checkpoint from verified local copies, and falls back to the primary storage.

    Thread-safe.
    """

    def __init__(self, primary: Store, folder: NodeFolder, job_id: JobId, subtasks: Iterable[SubtaskState]) -> None:
        """`folder` is the node's folder for copies. `subtasks` list the files that may be read from copies.

        The copies of every task of the job are used, because tasks may have moved between nodes.
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
        """Returns a byte range of a file, memory-mapped from its verified local copy, or None if there is no such
        copy.
        """
        copy = self._copies.get(path)
        return None if copy is None else self._noted(copy.view(offset, length))

    def local_file(self, path: str) -> str | None:
        """Returns the local path of the verified copy of a file, for a hard link, or None if there is no such copy."""
        copy = self._copies.get(path)
        return None if copy is None else self._noted(copy.name())

    @property
    def sufficed(self) -> bool:
        """Returns True if at least one file of the checkpoint was requested, and every requested file had a verified
        copy.
        """
        return self._used == {True}

    def _noted(self, found: F) -> F:
        self._used.add(found is not None)
        return found


class _LocalCopy:
    """The local copy of one file of a checkpoint. The first use verifies the copy."""

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
        """Returns the bytes from the local copy, or None if they must be read from the primary storage."""
        return self._taken(offset, length, lambda store: store.read(self._path, offset, length))

    def view(self, offset: int, length: int) -> memoryview | None:
        """Returns the bytes memory-mapped from the local copy, or None if they must be read from the primary
        storage.
        """
        return self._taken(offset, length, lambda store: store.mapped(self._path, offset, length))

    def _taken(self, offset: int, length: int | None, take: Callable[[MappedStore], T]) -> T | None:
        store = self._usable()
        if store is None:
            return None
        available_bytes = max(0, self._file.size_bytes - max(0, offset))
        expected_bytes = available_bytes if length is None else min(length, available_bytes)
        try:
            data = take(store)
        except StorageError as error:
            self._pass_over(str(error))
            return None
        if len(data) != expected_bytes:
            self._pass_over("it has changed since it was verified")
            return None
        return data

    def name(self) -> str | None:
        """Returns the local path of the copy, or None if the copy is missing or damaged."""
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
            self._warn(str(error))

    def _pass_over(self, reason: str) -> None:
        with self._lock:
            if self._store is None:
                return
            self._store = None
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        _logger.warning(
            "The local copy of %s is skipped, the file is read from %s: %s", self._path, self._primary_url, reason
        )


def _files_of(subtask: SubtaskState) -> dict[str, StateHandle | NativeFile]:
    handles = {handle.path: handle for handle in subtask.handles if handle.path is not None}
    return handles | {file.path: file for file in subtask.native_files}


def _roots_by_path(folder: NodeFolder, job_id: JobId) -> dict[str, str]:
    """Returns, by the path in the primary storage, the folder (relative to the node's folder) that has a copy of the
    file.
    """
    if not folder.usable():
        return {}
    job = job_folder(job_id)
    tasks = [f"{job}/{name}" for name in folder.list(job)]
    return {
        path: f"{task}/{checkpoint_name(number)}" for task in tasks for number, path, _ in copies_below(folder, task)
    }


class MappedStore(Store, Protocol):
    """A store that can also map a byte range of a file into memory. `mapped` raises as `Store.read` does."""

    def mapped(self, path: str, offset: int, length: int) -> memoryview: ...


class UnfinishedFile(Protocol):
    """A file that is being written under a temporary name."""

    def write(self, chunk: memoryview) -> None:
        """Appends bytes to the file. Raises OSError."""
        ...

    def finish(self) -> None:
        """Renames the file to its final name, replacing an existing file. Raises OSError."""
        ...

    def drop(self) -> None:
        """Deletes the unfinished file. Ignores failures."""
        ...


class NodeFolder(Protocol):
    """A folder on one node for local copies.

    Paths are relative, with `/` between parts; "" is the folder itself. Thread-safe.
    """

    @property
    def name(self) -> str:
        """Returns the path of the folder, for log lines."""
        ...

    def usable(self) -> bool:
        """Returns whether the folder exists and no other user of the machine can change it."""
        ...

    def list(self, path: str = "") -> list[str]:
        """Returns the sorted names of files and folders directly under `path`. Empty if the folder does not exist."""
        ...

    def files(self, path: str) -> Iterator[tuple[str, int]]:
        """Yields path and size in bytes of each finished file at any depth below a folder, in order.

        Paths are relative to `path`.
        """
        ...

    def begin(self, path: str) -> UnfinishedFile:
        """Starts writing a file at `path`.

        Raises ConfigurationError if other users can change the folder, and OSError.
        """
        ...

    def remove(self, path: str) -> None:
        """Deletes a file or a folder. Ignores failures."""
        ...

    def remove_unfinished(self, path: str) -> None:
        """Deletes unfinished files at any depth below a folder. Ignores failures."""
        ...

    def newest_ms(self, path: str) -> int | None:
        """Returns the newest modification time at any depth below a folder, in ms since the epoch.

        None if the folder does not exist.
        """
        ...

    def store(self, path: str) -> MappedStore:
        """Returns a store that reads the files below a folder."""
        ...

    def local_name(self, path: str) -> str | None:
        """Returns the absolute path of a file on this machine, for a hard link, or None if the file has none (in
        simulations).
        """
        ...


OpenNodeFolder = Callable[[str], NodeFolder]
"""A function that opens a folder by its path on the node on which it is called."""


class PrivateFolder:
    """A `NodeFolder` on the disk of this machine that only one user can change."""

    def __init__(self, name: str) -> None:
        """`name` is the path of the folder. The folder need not exist."""
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def usable(self) -> bool:
        try:
            return is_private(self._name)
        except (ConfigurationError, OSError) as error:
            _logger.info("Local copies of state are not used: %s", error)
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
    """A file in a private folder that is being written.

    The file is not synced, because copies are verified before use.
    """

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
