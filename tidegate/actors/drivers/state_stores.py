"""`StateStores`: where one task writes and reads its state: checkpoint storage, and what the job asked for beside it.

With local copies everything that is written goes to the node's disk too, and what a restart reads comes from there as
long as it is right. With storage in the coordinator's memory a state has a limit.
"""

from __future__ import annotations

import threading

from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.task.incremental.changelog import Chain
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.memory_limit import MemoryStorage
from tidegate.storage.copies.local_copies import LocalCopies, remove_stale_copies
from tidegate.storage.copies.node_folder import NodeFolder
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import CheckpointId

COPIES_BYTES_MAX = 64 * 1024**3
"""Local copies of a task never take more, whatever is retained."""
STALE_MS = 7 * 24 * 3600 * 1000
"""Copies of a job that has written none for so long are over: their node was not there when the job ended."""
REMEMBERED_MAX = 64
"""Checkpoints of which it is remembered which files they need; older ones were given up long ago."""


class StateStores:
    """The stores of one task of one attempt. Thread-safe."""

    def __init__(
        self, context: JobContext, task: TaskId, open_store: OpenStore, now_ms: int, folder: NodeFolder | None
    ) -> None:
        """`folder`: that of this node, if copies are kept."""
        self._context = context
        self._open_store = open_store
        self._lock = threading.Lock()
        if folder is not None:
            remove_stale_copies(folder, now_ms - STALE_MS)
        self._needed: dict[CheckpointId, tuple[frozenset[str], Chain | None]] = {}
        self._completed = CheckpointId(1)
        self._copies = (
            None
            if folder is None
            else LocalCopies(folder, context.job_id, task.vertex, task.subtask, size_bytes_max=COPIES_BYTES_MAX)
        )

    @property
    def keeps_copies(self) -> bool:
        """Whether it matters what became of a checkpoint."""
        return self._copies is not None

    def to_write(self, checkpoint_id: CheckpointId | None) -> Store:
        """Where the files of one checkpoint go, or with None those of the changelog."""
        store = self._open_store(self._context.root)
        limit = self._context.options.state_bytes_max
        if limit is not None:
            store = MemoryStorage(store, limit)
        if self._copies is None:
            return store
        # Copies of the changelog count as those of the last checkpoint: the next one says which of them it needs.
        return self._copies.store_for(store, self._completed if checkpoint_id is None else checkpoint_id)

    def wrote(self, checkpoint_id: CheckpointId, needed: frozenset[str], chain: Chain | None = None) -> None:
        """The task's part of a checkpoint is durable, and consists of these files, and of layers of the changelog."""
        if self._copies is not None:
            with self._lock:
                before, chain_before = self._needed.get(checkpoint_id, (frozenset(), None))
                self._needed[checkpoint_id] = before | needed, chain or chain_before
                while len(self._needed) > REMEMBERED_MAX:
                    del self._needed[min(self._needed)]

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """The checkpoint is complete: copies that it does not need are over."""
        if self._copies is None:
            return
        with self._lock:
            known = self._needed.get(checkpoint_id)
            self._needed = {n: needed for n, needed in self._needed.items() if n > checkpoint_id}
            self._completed = max(self._completed, checkpoint_id)
        if known is not None:
            needed, chain = known
            layers = () if chain is None else chain.handles
            self._copies.confirmed(checkpoint_id, needed | {h.path for h in layers if h.path is not None})

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        """The checkpoint was given up, and its copies with it."""
        if self._copies is not None:
            with self._lock:
                self._needed.pop(checkpoint_id, None)
                with_changelog = checkpoint_id == self._completed
            if not with_changelog:
                # Before any is complete the copies of the changelog lie with those of the first one: that may fail.
                self._copies.aborted(checkpoint_id)
