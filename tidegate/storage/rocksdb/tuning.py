"""`DatabaseTuning`: what users may choose of RocksDB itself. Without RocksDB, for processes that have none."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 2
BLOCK_BYTES = 8 * 1024
OPEN_FILES_MAX = 512


@dataclass(frozen=True, slots=True)
class DatabaseTuning:
    """Settings of the database of one operator in one subtask."""

    threads: int = THREADS
    """Flushes and compactions that may run at the same time."""
    write_buffer_bytes: int | None = None
    """What is collected in memory before it becomes a file. None: a sixth of the database's memory."""
    block_bytes: int = BLOCK_BYTES
    """About what is read, compressed and cached together."""
    open_files_max: int = OPEN_FILES_MAX
    """Files that are kept open."""
