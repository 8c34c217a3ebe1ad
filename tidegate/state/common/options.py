"""`StateBackendOptions`: which backend stores the keyed state of a job, and how it writes checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from tidegate.storage.argument_checks import check_choice, check_folder, check_kind, check_switch, check_whole
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.rocksdb.tuning import DatabaseTuning
from tidegate.storage.state.state_file import Compression

BackendKind = Literal["columnar", "rocksdb"]

MEMORY_BYTES = 64 * 1024 * 1024
CACHE_BYTES = 128 * 1024 * 1024
SEGMENT_BYTES = 1024 * 1024
UNDO_BYTES = 256 * 1024 * 1024
COLLECTIONS_MAX = 16
"""How many collections of changes a backend keeps for one state.

Each collection covers the time between two snapshots.
"""


@dataclass(frozen=True, slots=True)
class StateBackendOptions:
    """The settings of a job's keyed state. For operators, `directory` is the folder of their task."""

    kind: BackendKind = "columnar"
    incremental: bool = False
    """True: a checkpoint writes only the changes since its base."""
    changelog: bool = False
    """True: changes are written continuously, so that a checkpoint has little left to write."""
    segment_bytes: int = SEGMENT_BYTES
    """With a changelog, a segment is written after about this many bytes of changes."""
    compression: Compression | None = None
    """The compression of the chunks of state files."""
    directory: str | None = None
    """Local folder for the files of a backend. They are deleted when the task ends."""
    memory_bytes: int = MEMORY_BYTES
    """How many bytes of memory a backend on disk may use for each operator of a task."""
    cache_bytes: int = CACHE_BYTES
    """Memory in bytes for cached rows of each vectorised state or row table of a backend on disk.

    0 disables the cache.
    """
    database: DatabaseTuning = field(default_factory=DatabaseTuning)
    """Settings of RocksDB itself."""
    undo_bytes: int = UNDO_BYTES
    """How many bytes a backend in memory may use, for each operator of a task, to be able to go back to a
    checkpoint.
    """
    restore_threads: int = 1
    """How many threads load a large state, in addition to one for the key index.

    With 1, the task's own thread does both.
    """

    def __post_init__(self) -> None:
        check_choice(self, "kind", get_args(BackendKind))
        check_switch(self, "incremental", "changelog")
        check_whole(self, "segment_bytes", least=1)
        check_choice(self, "compression", (*get_args(Compression), None))
        check_folder(self, "directory")
        check_whole(self, "memory_bytes", "cache_bytes", "undo_bytes", least=0)
        check_kind(self, "database", DatabaseTuning)
        check_whole(self, "restore_threads", least=1)


@dataclass(frozen=True, slots=True)
class BackendPlace:
    """Identifies the owner of a backend: the operator, its key columns, and the subtask's key groups.

    With `namespace`, the first key column is an int64 that does not influence the key group, such as the slice of a
    window. Tables are then `NamespacedTable`s.
    """

    uid: OperatorUid
    key_names: tuple[str, ...]
    max_parallelism: int
    key_groups: range
    namespace: bool = False
