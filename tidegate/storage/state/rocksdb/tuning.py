"""`DatabaseTuning`: the settings of RocksDB that users may choose. Importing this module does not load RocksDB."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.argument_checks import check_whole

THREADS = 2
BLOCK_BYTES = 8 * 1024
OPEN_FILES_MAX = 512
_INT32_MAX = 2**31 - 1
"""The largest number that RocksDB accepts for these settings."""


@dataclass(frozen=True, slots=True)
class DatabaseTuning:
    """Settings of the RocksDB database of one operator in one subtask."""

    threads: int = THREADS
    """Number of flushes and compactions that may run at the same time."""
    write_buffer_bytes: int | None = None
    """Size in bytes of a write buffer, which is written to a file when it is full.

    None for a sixth of the database's memory.
    """
    block_bytes: int = BLOCK_BYTES
    """Approximate size of a block in bytes. A block is read, compressed and cached as a whole."""
    open_files_max: int = OPEN_FILES_MAX
    """Maximum number of files that RocksDB keeps open."""

    def __post_init__(self) -> None:
        check_whole(self, "threads", "block_bytes", "open_files_max", least=1, most=_INT32_MAX)
        check_whole(self, "write_buffer_bytes", least=1, none=True)
