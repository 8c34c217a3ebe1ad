"""`DatabaseTuning`: the settings of RocksDB that users may choose. Importing it does not load RocksDB."""

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
    """The settings of the database of one operator in one subtask."""

    threads: int = THREADS
    """The number of flushes and compactions that may run at the same time."""
    write_buffer_bytes: int | None = None
    """How many bytes a write buffer collects before they become a file. None: a sixth of the database's memory."""
    block_bytes: int = BLOCK_BYTES
    """The approximate size of a block, which is read, compressed and cached as a whole."""
    open_files_max: int = OPEN_FILES_MAX
    """The maximum number of files that are kept open."""

    def __post_init__(self) -> None:
        check_whole(self, "threads", "block_bytes", "open_files_max", least=1, most=_INT32_MAX)
        check_whole(self, "write_buffer_bytes", least=1, none=True)
