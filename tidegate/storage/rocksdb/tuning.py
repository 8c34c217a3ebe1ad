"""`DatabaseTuning`: what users may choose of RocksDB itself. Without RocksDB, for processes that have none."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.argument_checks import check_whole

THREADS = 2
BLOCK_BYTES = 8 * 1024
OPEN_FILES_MAX = 512
_INT32_MAX = 2**31 - 1
"""The largest number that RocksDB takes for these settings."""


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

    def __post_init__(self) -> None:
        check_whole(self, "threads", "block_bytes", "open_files_max", least=1, most=_INT32_MAX)
        check_whole(self, "write_buffer_bytes", least=1, none=True)
