"""`HandedRows`: records which commits of a table were handed on (passed to a consumer outside the table), and which
commit is next.

    _tidegate/handed/<n>    the n-th mark: the log entries that were handed on so far
    _tidegate/hold-<job>    exists while the job must not read more input, because too many commits wait

Rules:

- Commits are handed on in the order of the log. Each is the next one until it is marked, and never again after that.
  The number of its entry distinguishes its rows from all others, also from rows of jobs that were restored and write to
  this table.
- Commits that a claim has taken back are not handed on: their rows are written again, under other numbers. Such a
  commit is handed on after all if a job is restored from a checkpoint that covers it.
- A claim adds the files that a restored checkpoint covers and that were not committed. Another job that is restored
  from there adds the same files: they are handed on once.
- A mark is durable before the rows are deleted. They are never read again, whatever is restored.
- A log that ends before the last commit that was handed on has lost entries. Later commits would get numbers that are
  marked already. Therefore nothing more is handed on.
- If two drivers write the same mark, the conditional create lets one of them win.
"""

from __future__ import annotations

import logging
import threading
import uuid
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.storage.checkpoints.metadata import DataFile, TableHead
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import AlreadyExistsError, CorruptionError, FencedError, NotFoundError, StorageError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store
from tidegate.storage.ids import JobId
from tidegate.storage.tables.log.entries import Ranges, TableEntry, TableEntryKind, added, covers, ranges_of
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)

HANDED_FOLDER = "_tidegate/handed"
_DATA_FOLDER = "data"
_MAGIC, _VERSION = b"TGHANDED", 1
_DIGITS = 12
_READS_MAX = 8
ENTRIES_REMEMBERED_MAX = 500
"""Number of remembered entries after which reading starts again from a snapshot, because a log that is only read keeps
all its entries.
"""


@wire
@dataclass(frozen=True, slots=True)
class HandedMark:
    """The content of a mark file, which records the log entries whose rows were handed on to the reader so far. `nonce`
    identifies the writer.
    """

    entries: Ranges
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class WaitingCommit:
    """A commit whose files were not handed on to the reader yet, with the number of its log entry."""

    number: int
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        """Returns the number of rows in the commit's files."""
        return sum(file.rows for file in self.files)


def hold_path(job_id: JobId) -> str:
    """Returns the path, below the table, of a file that makes the sources of the job pause while it exists."""
    return f"_tidegate/hold-{job_id}"


def newest_mark(store: Store) -> tuple[int, HandedMark]:
    """Returns the number and the content of the newest mark file of the table at the store's root.

    Without mark files, returns 0 and an empty mark. Raises CorruptionError, CodecError, StorageError.
    """
    for _ in range(_READS_MAX):
        numbers = [int(name) for name in store.list(HANDED_FOLDER) if name.isascii() and name.isdigit()]
        if not numbers:
            return 0, HandedMark(())
        path = mark_path(max(numbers))
        try:
            return max(numbers), _decoded(store.read(path), join_url(store.url, path))
        except NotFoundError:
            continue  # Newer ones were made meanwhile.
    raise CorruptionError(
        f"{join_url(store.url, HANDED_FOLDER)} cannot be read: files that it lists are missing"
        "; restore them from a copy"
    )


def encoded_mark(mark: HandedMark) -> bytes:
    """Returns the bytes of a mark file."""
    return seal(_MAGIC, _VERSION, encode(mark))


def mark_path(number: int) -> str:
    """Returns the path of the mark file with this number."""
    return f"{HANDED_FOLDER}/{number:0{_DIGITS}d}"


def _decoded(data: bytes, where: str) -> HandedMark:
    mark = decode(unseal(_MAGIC, _VERSION, data, where))
    if not isinstance(mark, HandedMark):
        raise CorruptionError(
            f"{where} does not contain a mark of rows that were handed on; restore the file from a copy of the table"
        )
    return mark


class HandedRows:
    """Hands the commits of an append table on to a reader, one by one, for the driver of one job. Thread-safe.

    The table is at the store's root.
    """

    def __init__(self, store: Store, job_id: JobId, *, remembered_max: int = ENTRIES_REMEMBERED_MAX) -> None:
        self.store = store
        self._job_id = job_id
        self._remembered_max = remembered_max
        self._nonce = uuid.uuid4().hex[:8]
        self._lock = threading.Lock()
        self._log_from = 0
        self._read_to = -1
        self._marks, mark = newest_mark(store)
        self._handed = mark.entries
        self._log = self._whole_log()
        self._info: TableInfo | None = None
        self._claim: TableEntry | None = None
        self._bearing: list[int] = []
        """Numbers of the entries with files, ascending."""
        self._pending: dict[int, tuple[DataFile, ...]] = {}
        """Files of the entries that were not handed on, including entries that a claim has taken back."""
        self._brought: set[str] = set()
        """Files that were handed on and that claims have added."""
        self._held = False
        self._hold_lock = threading.Lock()

    @property
    def info(self) -> TableInfo:
        """Returns the columns and settings of the table. Call `refresh` first."""
        assert self._info is not None, "the job creates its table before its rows are handed on"
        return self._info

    @property
    def owned(self) -> bool:
        """Returns True if the job owns the table, according to the log entries that were read."""
        return self._claim is not None and self._claim.job_id == self._job_id

    def refresh(self) -> bool:
        """Reads new log entries and returns whether there were any.

        The first call also deletes files of commits that were handed on earlier.
        """
        with self._lock:
            if self._read_to - self._log_from >= self._remembered_max:
                self._log, self._log_from = self._whole_log(), self._read_to
            entries = self._log.entries_after(self._read_to)
            first = self._read_to < 0
            for entry in entries:
                self._take(entry)
            if first:
                self._delete_left({f.path for e in entries if covers(self._handed, e.seq) for f in e.files})
            return bool(entries)

    def _whole_log(self) -> TableLog:
        """Returns a log that starts from its newest snapshot.

        Reading it raises TableError if the log lacks entries that were read or handed on before.
        """
        newest = max((last for _, last in self._handed), default=-1)
        table_log = TableLog(self.store)
        table_log.expect(self._job_id, TableHead(self.store.url, max(newest, self._read_to)))
        return table_log

    def waiting(self) -> tuple[WaitingCommit, ...]:
        """Returns the commits that were not handed on yet, the next one first."""
        with self._lock:
            return tuple(WaitingCommit(n, files) for n, files in sorted(self._pending.items()) if self._counts(n))

    def done(self, commit: WaitingCommit) -> None:
        """Records durably that a commit was handed on, and deletes its data files.

        Raises FencedError if another driver hands on the rows of this table, StorageError if it is unknown whether the
        mark was written.
        """
        with self._lock:
            self._handed = self._with(commit.number)
            self._make_mark()
            files = self._pending.pop(commit.number, commit.files)
            if self._claim is not None and commit.number <= self._claim.seq:
                self._brought |= {file.path for file in files}
            self._delete(file.path for file in commit.files)

    def hold(self, held: bool) -> None:
        """Pauses the sources of the job (`held`), or resumes them. Has no effect if they are paused, or running,
        already.
        """
        with self._hold_lock:
            if held and not self._held:
                self.store.write(hold_path(self._job_id), (b"",))
            elif self._held and not held:
                self.store.delete(hold_path(self._job_id))
            self._held = held

    @property
    def held(self) -> bool:
        """Returns True while the sources of the job are paused."""
        return self._held

    def _take(self, entry: TableEntry) -> None:
        self._read_to = entry.seq
        if entry.info is not None:
            self._info = entry.info
        if not entry.files:
            files: tuple[DataFile, ...] = ()
        else:
            self._bearing.append(entry.seq)
            files = entry.files
        if entry.kind is TableEntryKind.CLAIMED:
            self._claim = entry
            if covers(self._handed, entry.seq):
                self._brought |= {file.path for file in files}
            files = tuple(file for file in files if file.path not in self._brought)
        if files and not covers(self._handed, entry.seq):
            self._pending[entry.seq] = files

    def _counts(self, number: int) -> bool:
        """Returns whether the log entry is part of the table's present content: it is newer than the newest claim, or
        the claim builds on it.
        """
        claim = self._claim
        return claim is not None and claim.claim is not None and (number > claim.seq or covers(claim.claim.own, number))

    def _with(self, number: int) -> Ranges:
        if self._handed and number <= self._handed[-1][1]:
            members = {seq for seq in self._bearing if covers(self._handed, seq)} | {number}
            return ranges_of(members, self._bearing)
        at = bisect_left(self._bearing, number)
        return added(self._handed, number, self._bearing[at - 1] if at else -1)

    def _make_mark(self) -> None:
        data, path = encoded_mark(HandedMark(self._handed, self._nonce)), mark_path(self._marks + 1)
        try:
            self.store.create(path, data)
        except AlreadyExistsError:
            if self.store.read(path) != data:
                raise FencedError(
                    f"{join_url(self.store.url, path)} exists already: another driver hands on the rows of this "
                    "table, so this one has to stop"
                ) from None
        self._marks += 1
        # The mark before the newest stays: a reader that has listed it may be about to read it.
        if self._marks > 2:
            self._delete([mark_path(self._marks - 2)])

    def _delete_left(self, handed: set[str]) -> None:
        """Deletes data files of commits that were handed on and that an earlier driver could not delete before it died.

        `handed` has the paths of these files.
        """
        for job in self.store.list(_DATA_FOLDER):
            for attempt in self.store.list(f"{_DATA_FOLDER}/{job}"):
                folder = f"{_DATA_FOLDER}/{job}/{attempt}"
                self._delete(path for name in self.store.list(folder) if (path := f"{folder}/{name}") in handed)

    def _delete(self, paths: Iterable[str]) -> None:
        try:
            self.store.delete_all(paths)
        except StorageError as error:
            log.warning("rows that were handed on stay in %s for now: %s", self.store.url, error)
