"""`Lane`: one split of a folder that grows. It records which files it has read, and its position in the current file.

A folder that grows is read by a fixed number of lanes (splits). Rules:

- The hash of a file's path determines its lane. Two subtasks therefore never read the same file, wherever they run, and
  need no coordination.
- A lane reads its files in the order of modification time, then path, one file at a time.
- A modification time may be wrong: before 1970, or in the future. The newest time that a lane has seen is never later
  than the clock, so a file with a future date does not make all later files too old.
- The payload of a lane lists the files that it has read, and is stored in each checkpoint together with their rows.
  Each file is therefore read once, whatever restarts.
- A lane remembers files up to `age` older than the newest file that it has read (Spark's maxFileAge). A file that is
  already older when it appears is skipped, because it is unknown whether it was read. This bounds the payload. Files
  are forgotten many at a time, up to an eighth of `age` later, so that the cost of one more file does not depend on
  their number.
- A file is never read twice, even if it changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import xxhash

from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import FileInfo

DIGEST_BYTES = 16
TIME_BYTES = 8
_ENTRY_BYTES = DIGEST_BYTES + TIME_BYTES
_LATER = 8
FILES_MAX = 1_000_000
"""Limit of files that a lane remembers. Each needs 24 bytes in the checkpoint."""


@wire
@dataclass(frozen=True, slots=True)
class FileAt:
    """A file to read, with its size and modification time when reading began, and the index of the first row that was
    not read yet.
    """

    path: str
    size_bytes: int
    modified_at_ms: int
    row: int = 0
    tag: str = ""
    """The ETag of the file. Empty if a listing found the file, or if the storage has no ETags."""

    @staticmethod
    def of(file: FileInfo) -> FileAt:
        """Returns a position at the first row of a file, with the file's present size and modification time."""
        return FileAt(file.path, file.size_bytes, file.modified_at_ms or 0, tag=file.tag)


@wire
@dataclass(frozen=True, slots=True)
class LaneState:
    """The state of a lane (a hash partition of a folder's files) in a checkpoint.

    `read` has, for each file that was read, the hash of its path (16 bytes) and its modification time in ms (8 bytes).
    """

    lanes: int
    newest_ms: int | None = None
    """The latest modification time among the files that were read, in ms since the epoch, but at most the clock's time.

    None before the first file.
    """
    read: bytes = b""
    file: FileAt | None = None


def digest_of(path: str) -> bytes:
    """Returns the 16-byte hash of a file's path, which identifies the file and determines its lane (hash partition)."""
    return xxhash.xxh3_128_digest(path.encode("utf-8", "surrogateescape"))


def lane_of(digest: bytes, lanes: int) -> int:
    """Returns the number of the lane (hash partition) that reads a file with this hash."""
    return int.from_bytes(digest[:8], "big") % lanes


def _entry(digest: bytes, at_ms: int) -> bytes:
    return digest + at_ms.to_bytes(TIME_BYTES, "big", signed=True)


@dataclass(slots=True)
class Lane:
    """One split of a growing folder while it is read: the files whose path hash is in one lane (hash partition).

    `payload` is its encoded state, for checkpoints.
    """

    payload: bytes
    state: LaneState
    known: dict[bytes, int] = field(default_factory=dict)
    """Hash of the path, and modification time in ms, of every file that was read and is still remembered."""
    oldest_ms: int = field(init=False)
    """The earliest modification time (ms) in `known`. Without files in `known`: the newest time so far, or 0."""

    def __post_init__(self) -> None:
        self.oldest_ms = min(self.known.values(), default=self.state.newest_ms or 0)

    @classmethod
    def of(cls, payload: bytes) -> Lane:
        """Restores a lane from its payload in a checkpoint."""
        state = decode(payload)
        assert isinstance(state, LaneState)
        entries = (state.read[at : at + _ENTRY_BYTES] for at in range(0, len(state.read), _ENTRY_BYTES))
        known = {e[:DIGEST_BYTES]: int.from_bytes(e[DIGEST_BYTES:], "big", signed=True) for e in entries}
        return cls(payload, state, known)

    def is_too_old(self, file: FileInfo, age_ms: int) -> bool:
        """Returns whether a file is older than the files that the lane still records as read, so that it may have been
        read before.
        """
        newest_ms = self.state.newest_ms
        return newest_ms is not None and (file.modified_at_ms or 0) < newest_ms - age_ms

    def choose(self, files: Iterable[tuple[bytes, FileInfo]], age_ms: int) -> list[FileInfo]:
        """Returns the files of this lane that were not read yet, with the next file at the end of the list. Called
        between two files.
        """
        assert self.state.file is None, "a lane reads one file at a time"
        chosen = [file for digest, file in files if digest not in self.known and not self.is_too_old(file, age_ms)]
        return sorted(chosen, key=lambda file: (file.modified_at_ms or 0, file.path), reverse=True)

    def take(self, file: FileInfo) -> None:
        """Starts reading a file at its first row."""
        self._become(replace(self.state, file=FileAt.of(file)))

    def advance(self, rows: int) -> None:
        """Records that `rows` more rows of the current file have been read."""
        assert self.state.file is not None
        self._become(replace(self.state, file=replace(self.state.file, row=self.state.file.row + rows)))

    def leave(self, age_ms: int, now_ms: int) -> None:
        """Records that the current file has been read completely, and forgets files that are too old.

        Raises ConfigurationError if too many files remain.
        """
        file = self.state.file
        assert file is not None
        seen_ms = min(file.modified_at_ms, now_ms)
        newest_ms = seen_ms if self.state.newest_ms is None else max(self.state.newest_ms, seen_ms)
        digest = digest_of(file.path)
        self.oldest_ms = min(self.oldest_ms, file.modified_at_ms) if self.known else file.modified_at_ms
        self.known[digest] = file.modified_at_ms
        read = self.state.read + _entry(digest, file.modified_at_ms)
        if self.oldest_ms < newest_ms - age_ms - age_ms // _LATER or len(self.known) > FILES_MAX:
            self.known = {digest: at for digest, at in self.known.items() if at >= newest_ms - age_ms}
            self.oldest_ms = min(self.known.values(), default=newest_ms)
            read = b"".join(_entry(digest, at) for digest, at in self.known.items())
        if len(self.known) > FILES_MAX:
            raise ConfigurationError(
                f"from_files: {len(self.known):,} files of one split are younger than max_file_age, and at most "
                f"{FILES_MAX:,} can be remembered; make max_file_age shorter, or give more splits to a new job"
            )
        self._become(LaneState(self.state.lanes, newest_ms, read))

    def _become(self, state: LaneState) -> None:
        self.state, self.payload = state, encode(state)
