"""`StateBackendOptions`: which backend holds the keyed state of a job, and how it writes its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.chunk import Compression

BackendKind = Literal["columnar", "rocksdb"]

MEMORY_BYTES = 64 * 1024 * 1024
SEGMENT_BYTES = 1024 * 1024
UNDO_BYTES = 256 * 1024 * 1024
COLLECTIONS_MAX = 16
"""Collections of what has changed, one between two checkpoints, that a backend keeps for one state."""


@dataclass(frozen=True, slots=True)
class StateBackendOptions:
    """Settings of the keyed state of a job; `directory` becomes that of one task before operators see it."""

    kind: BackendKind = "columnar"
    incremental: bool = False
    """Whether a checkpoint writes only what has changed since the one that it is built on."""
    changelog: bool = False
    """Whether changes are written all the time, so that a checkpoint has little left to write."""
    segment_bytes: int = SEGMENT_BYTES
    """With a changelog: about so many bytes of changes are written without waiting for a checkpoint."""
    compression: Compression | None = None
    """How the chunks of state files are compressed."""
    directory: str | None = None
    """Local folder in which a backend may work. Nothing in it outlives the task."""
    memory_bytes: int = MEMORY_BYTES
    """What a backend that works on disk may keep in memory for each operator of a task."""
    undo_bytes: int = UNDO_BYTES
    """What a backend in memory may keep for each operator of a task to go back to a checkpoint without reading."""
    restore_threads: int = 1
    """Threads that take a large state in, besides one for the index of its keys; the host of a task sets it. With 1 it
    is the task's own thread that does both."""


@dataclass(frozen=True, slots=True)
class BackendPlace:
    """Whose state it is: the operator, its key columns, and the key groups of the subtask."""

    uid: OperatorUid
    key_names: tuple[str, ...]
    max_parallelism: int
    key_groups: range
