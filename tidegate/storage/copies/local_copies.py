"""Keeps copies of a task's checkpoint files on its own node, so that a restart there need not ask primary storage.

    <folder>/<job>/<vertex>-<subtask>/chk-17/<path in the primary storage>

Rules:

- The primary storage alone decides: a copy that cannot be written is dropped, with one warning for each task, and
  never fails or changes what is written to the primary. A copy is there when the primary has the file.
- Copies are bounded in bytes. Those of an aborted checkpoint go, and when a checkpoint is confirmed those of older ones
  go, but for what it still refers to. An earlier attempt that was taken for dead may go on writing: what lies on the
  disk counts then, not what is known.
- Nothing is synced: a copy is verified before it is read, and there is the primary.
- The folder is this user's alone (`private_folders.py`). Where it is not, no copies are kept and none are deleted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from tidegate.storage.checkpoints.layout import CheckpointLayout, checkpoint_name, escape, parse_checkpoint_name
from tidegate.storage.copies.node_folder import NodeFolder, UnfinishedFile
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.files.wrapped_store import WrappedStore
from tidegate.storage.ids import CheckpointId, JobId, SubtaskIndex, VertexId

_logger = logging.getLogger(__name__)


class LocalCopies:
    """The copies of one task, this attempt's and what earlier ones left. Thread-safe; no method raises."""

    def __init__(
        self, folder: NodeFolder, job_id: JobId, vertex: VertexId, subtask: SubtaskIndex, *, size_bytes_max: int
    ) -> None:
        """`folder` is the node's, for all jobs; at most `size_bytes_max` bytes are kept for this task."""
        self._task = f"{vertex} subtask {subtask}"
        self._folder = folder
        self._below = f"{CheckpointLayout(job_id).job_dir()}/{escape(vertex)}-{subtask}"
        self._size_bytes_max = size_bytes_max
        self._lock = threading.Lock()
        self._kept: dict[CheckpointId, dict[str, int]] = {}
        """Bytes of each copy, by checkpoint and path."""
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
        """A store for what is written for one checkpoint: to the primary, and here as well."""
        return DuplicatingStore(primary, self, checkpoint_id)

    def confirmed(self, checkpoint_id: CheckpointId, still_needed: Collection[str] = ()) -> None:
        """A checkpoint is complete: delete what is older, but for the paths that it still needs."""
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
        """A checkpoint was given up: delete its copies, also one that is still being written."""
        with self._lock:
            self._aborted.add(checkpoint_id)
            self._size_bytes -= sum(self._kept.pop(checkpoint_id, {}).values())
            self._clear()

    @property
    def size_bytes(self) -> int:
        """Bytes of all copies, unfinished ones included."""
        with self._lock:
            return self._size_bytes

    def _begin(self, checkpoint_id: CheckpointId, path: str) -> _Copy:
        copy = _Copy(checkpoint_id, path)
        try:
            # Under the lock: the folder of an aborted checkpoint must not vanish between its making and the file's.
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
        """The primary has the file."""
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
        """Forget an unfinished copy; `reason` is why the local disk did not take it, if it did not."""
        if copy.file is not None:
            copy.file.drop()
            copy.file = None
        with self._lock:
            self._size_bytes -= copy.size_bytes
            copy.size_bytes = 0
            self._clear()
            tell = reason is not None and not self._warned
            self._warned |= tell
        if tell:
            _logger.warning(
                "Local copies of the state of %s cannot be kept in %s: %s. Checkpoints go on without them, and a "
                "restart reads from the checkpoint storage; this is said once",
                self._task,
                f"{self._folder.name}/{self._below}",
                reason,
            )

    def _checkpoint_folder(self, checkpoint_id: CheckpointId) -> str:
        """That of one checkpoint, from the node's folder on."""
        return f"{self._below}/{checkpoint_name(checkpoint_id)}"

    def _is_over(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._aborted or checkpoint_id < self._confirmed

    def _clear(self) -> None:
        """Delete folders of checkpoints that are over and of which nothing is kept."""
        for name in self._folder.list(self._below):
            number = parse_checkpoint_name(name)
            if number is not None and self._is_over(number) and number not in self._kept:
                self._folder.remove(f"{self._below}/{name}")


@dataclass(slots=True)
class _Copy:
    """One file on its way to the local disk; without `file` once it was dropped."""

    checkpoint_id: CheckpointId
    path: str
    file: UnfinishedFile | None = None
    size_bytes: int = 0


class DuplicatingStore(WrappedStore):
    """The primary storage, but what is written goes to the local disk too, as far as that can take it."""

    def __init__(self, primary: Store, copies: LocalCopies, checkpoint_id: CheckpointId) -> None:
        """What `LocalCopies.store_for` makes."""
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
    """Where in its folder a node keeps the copies of one job."""
    return CheckpointLayout(job_id).job_dir()


def copies_below(folder: NodeFolder, task_folder: str) -> Iterator[tuple[CheckpointId, str, int]]:
    """Checkpoint, path in the primary storage, and bytes of every copy of one task. Nothing if it cannot be read."""
    for name in folder.list(task_folder):
        if (checkpoint_id := parse_checkpoint_name(name)) is not None:
            for path, size_bytes in folder.files(f"{task_folder}/{name}"):
                yield checkpoint_id, path, size_bytes


def remove_copies(folder: NodeFolder, job_id: JobId) -> None:
    """Delete all copies of a job that is over; what cannot be deleted is left for `remove_stale_copies`."""
    if folder.usable():
        folder.remove(job_folder(job_id))


def remove_stale_copies(folder: NodeFolder, older_than_ms: int) -> list[JobId]:
    """Delete the copies of jobs in which nothing was written since a time (ms since the epoch); returns which.

    They are those of jobs that ended without a chance to clear up. A job that lives loses no more than a short cut.
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
