"""`MemoryStorage`: checkpoint storage in memory with a limit for each state, for jobs with little state and for tests.

These checkpoints are lost when the process that holds them ends.

The state of one subtask has a limit in bytes, because the coordinator holds all checkpoints in its memory. The error
for a larger state names the subtask and what to do. Below the limit this store behaves as the store that it wraps.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from tidegate.storage.checkpoints.layout import (
    CHANGELOG_NAME,
    METADATA_NAME,
    NATIVE_MARK,
    SINKS_NAME,
    parse_changelog_file_name,
    parse_channels_file_name,
    parse_checkpoint_name,
    parse_sink_file_name,
    parse_state_file_name,
)
from tidegate.storage.errors import StateTooLargeError
from tidegate.storage.files.store import Buffer, Store, WrappedStore

STATE_BYTES_MAX_DEFAULT = 5 * 1024 * 1024


class MemoryStorage(WrappedStore):
    """An in-memory store with a size limit for the state of each subtask. As thread-safe as the store that it wraps."""

    def __init__(self, store: Store, state_bytes_max: int = STATE_BYTES_MAX_DEFAULT) -> None:
        """`store` holds the bytes. `state_bytes_max` is the size limit of one state file."""
        super().__init__(store)
        self.state_bytes_max = state_bytes_max

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Writes a file to the wrapped store.

        Raises StateTooLargeError, a StorageError, for a state file above the limit.
        """
        owner = _owner_of(path)
        if owner is None:
            return self._store.write(path, chunks)
        parts: list[Buffer] = []
        size_bytes = 0
        for chunk in chunks:
            size_bytes += memoryview(chunk).nbytes
            if size_bytes > self.state_bytes_max:
                # From here on the bytes are only counted, for the error text.
                parts.clear()
            else:
                parts.append(bytes(chunk))
        if size_bytes > self.state_bytes_max:
            raise StateTooLargeError(
                f"the state of {owner} has {size_bytes:,} bytes, and checkpoint storage in memory ({self.url}) allows "
                f"at most {self.state_bytes_max:,} bytes for a state. Keep checkpoints in a file system: "
                'storage="/folder" or "s3://bucket/prefix"'
            )
        return self._store.write(path, parts)


def _owner_of(path: str) -> str | None:
    """Returns a text that names the subtask (or sink file) to which a state file belongs, or None for other files."""
    parts = path.split("/")
    for part, below in pairwise(parts):
        logged = parse_changelog_file_name(below) if part == CHANGELOG_NAME else None
        if logged is not None:
            return f"{logged[0]!r} subtask {logged[1]}"
        if part == SINKS_NAME and parse_sink_file_name(below) is not None:
            return f"prepared rows in {below}"
        if parse_checkpoint_name(part) is None or below == METADATA_NAME:
            continue
        name = below.partition(NATIVE_MARK)[0]
        found = parse_state_file_name(name) or parse_channels_file_name(name)
        if found is not None:
            vertex, subtask = found
            what = "in-flight rows of " if parse_state_file_name(name) is None else ""
            return f"{what}{vertex!r} subtask {subtask}"
    return None
