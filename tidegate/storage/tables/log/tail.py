"""`TableTail`: the end of a table's commit log as one process has read it. It reads new entries, appends entries, and
compacts the log.

`TableParts` reads and writes the files of the log:

    _tidegate/log/<seq>               one entry
    _tidegate/log/snapshot-<seq>      the fold of all entries up to `seq`, and the list of the parts with these entries
    _tidegate/parts/<first>-<last>    entries `first` to `last`, in columns; a part is never changed
    _tidegate/parts/<first>-<last>-<cut>    the entries of the range that a cut has kept

Rules of reading and appending:

- A created entry counts only after its writer has seen that the entry before it still exists. If it does not, the log
  was truncated and the writer was behind. The writer then deletes its entry.
- After reading new entries, a reader checks that the last entry it had read before still exists, and starts again with
  the newest snapshot if not. It therefore does not mistake the hole that truncation leaves for the end of the log, or
  an entry that was written into the hole for a part of the log.
- A listing may show an entry without the one before it while entries are created. An entry that a listing lacks is
  looked up by its own name before it counts as lost.
- A process remembers the newest entry that it has appended or read. A log that ends before it, or has another entry
  there, has lost a write that the storage had acknowledged. That is damage and raises TableError, because truncation
  never removes the newest entry. Otherwise committed rows would be missing, and the next commit would hide that.
- Readers of a cut ignore the entries that it drops, wherever they are still stored.
- Every `entries_per_snapshot` entries the writer that appends writes a snapshot and truncates the log. A failure of
  this does not affect the entry just appended.

Rules of the files:

- Their content depends only on the log: two writers of a part or a snapshot write the same bytes.
- `FAN_IN` parts of one level are merged into one part of the next level, so their number stays small, and an entry is
  rewritten a few times in all. Parts are not merged if the result would name more than `FILES_MAX` data files.
- With the snapshot after a cut (`vacuum.py`) the parts that begin before it are written again, without the entries that
  the cut drops. Such parts are not merged any more, except by the next cut.
- The newest snapshot and the one before it stay, with their parts and every entry from the older one on. A damaged
  newest snapshot is skipped, and a reader notices that the log was truncated, because the entry that it read last is
  gone.
- Entries are deleted in ascending order, so an existing entry proves that all later entries exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import (
    AlreadyExistsError,
    CodecError,
    CorruptionError,
    NotFoundError,
    StorageError,
    TableError,
    TidegateError,
)
from tidegate.storage.files.envelope import checksum_of, seal, unseal
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.entries import (
    Ranges,
    TableCut,
    TableEntry,
    TableEntryKind,
    TableFold,
    covers,
    in_order,
)

log = logging.getLogger(__name__)

RACES_MAX = 32
T = TypeVar("T")
PARTS_WEIGHT_MAX = 20_000
"""Limit of entries and files, in total, in the cached parts. One part is cached even if it is larger."""


class _OvertakenError(Exception):
    """Raised when the log was truncated beyond the last entry that this reader has read."""


class TableTail:
    """The end of one table's log: the newest snapshot, the entries appended since, and the table state.

    Not thread-safe.
    """

    def __init__(self, store: Store, entries_per_snapshot: int) -> None:
        assert entries_per_snapshot >= 2, "the entry before the newest one is never truncated"
        self.fold: TableFold | None = None
        """State of the table after the newest entry. None before the first read, or if there is no table."""
        self.loose: list[TableEntry] = []
        """The entries after the newest snapshot."""
        self._url = store.url
        self._files = TableParts(store)
        self._every = entries_per_snapshot
        self._state: TableState | None = None
        self._due: list[TableFold] = []
        """The folds for which a snapshot has to be written."""
        self._columns: dict[TablePart, PartColumns] = {}
        """Parts that were read recently, the latest one last. Their number is limited, because a writer may live for
        years.
        """
        self._newest: tuple[int, str] | None = None
        """Number and checksum of the newest entry that was part of the log."""

    def refresh(self) -> None:
        """Reads entries that were appended since the last read. Starts again from the newest snapshot if the log was
        truncated.

        Raises TableError if the log has lost entries that were part of it.
        """
        for _ in range(RACES_MAX):
            try:
                if self.fold is None:
                    self._load()
                    self._check_nothing_lost()
                else:
                    self._read_on()
                    if self.is_behind():
                        self._check_nothing_lost()
                self._remember()
                return
            except _OvertakenError:
                self._forget()
            except TidegateError:
                # It is not verified yet that the entries which were read are not in a hole.
                self._forget()
                raise
        where = join_url(self._url, LOG_FOLDER)
        raise CorruptionError(
            f"{where} cannot be read: entries that the newest snapshot needs are missing"
            "; restore these files from a copy of the table"
        )

    def expect(self, seq: int) -> None:
        """Records that entry `seq` is part of the log, because another process of the job has seen it."""
        if seq >= 0 and (self._newest is None or self._newest[0] < seq):
            self._newest = seq, ""

    def is_behind(self) -> bool:
        """Returns whether the log is known to have more entries than were read."""
        return self._newest is not None and (self.fold is None or self.fold.seq < self._newest[0])

    def _remember(self) -> None:
        if self.fold is not None and (self._newest is None or self._newest[0] <= self.fold.seq):
            self._newest = self.fold.seq, self.fold.entry_checksum

    def _check_nothing_lost(self) -> None:
        """Raises TableError if the newest known entry of the log is not part of the loaded log."""
        if self._newest is None:
            return
        seq, checksum = self._newest
        ends = -1 if self.fold is None else self.fold.seq
        if ends < seq:
            found = "the log is gone" if self.fold is None else f"the log ends with entry {ends}"
        elif checksum and self._files.has_entry(seq) and not self._is_there(seq, checksum):
            found = "another entry is there now"
        else:
            return
        raise self.lost(f"this job has seen entry {seq}", found)

    def lost(self, known: str, found: str) -> TableError:
        """Returns the error for lost entries. `known` describes the log as it was before, `found` as it is now."""
        return TableError(
            f"the log of the table at {self._url} has lost entries: {known}, and {found}. The storage "
            "has lost acknowledged writes or was reset to an older state, or the table was deleted and created "
            "again. Committed rows are missing, so nothing is written to the table. Bring the folder back from "
            "a copy, or restore the job from a checkpoint that is older than the loss"
        )

    def _forget(self) -> None:
        self._state, self.fold = None, None
        self.loose, self._due = [], []

    def _load(self) -> None:
        """Loads the newest undamaged snapshot."""
        numbers, snapshots = self._files.listing()
        damage: CorruptionError | None = None
        for seq in reversed(snapshots):
            try:
                self._state = self._files.read_state(seq)
                self.fold = self._state.fold
                break
            except NotFoundError:
                raise _OvertakenError from None
            except CorruptionError as error:
                log.warning("a damaged snapshot is skipped: %s", error)
                damage = error
        else:
            if damage is not None:
                raise damage
        first = 0 if self.fold is None else self.fold.seq + 1
        self._check_no_hole(first, [number for number in numbers if number >= first], snapshots)
        self._read_on()
        if numbers and (self.fold is None or self.fold.seq < numbers[-1]):
            raise _OvertakenError  # Entries that existed a moment ago are gone.

    def _check_no_hole(self, first: int, numbers: Sequence[int], snapshots: Sequence[int]) -> None:
        # Reading on until nothing is found would take a lost entry for the end; a listing does not.
        expected = first
        for number in numbers:
            while expected < number:
                if not self._files.has_entry(expected):
                    if self._files.listing()[1] != snapshots:
                        raise _OvertakenError
                    where = join_url(self._url, LOG_FOLDER)
                    name = entry_path(expected).rpartition("/")[2]
                    raise CorruptionError(
                        f"{where} has lost entries: {name} is missing, and later ones are there"
                        "; restore these files from a copy of the table"
                    )
                expected += 1
            expected += 1

    def _read_on(self) -> None:
        """Reads all further entries of the log.

        Then checks that the last entry read before (or else the first entry) still exists. Raises _OvertakenError if
        the log was truncated meanwhile.
        """
        known = self.fold
        while True:
            try:
                entry, checksum = self._files.read_entry(0 if self.fold is None else self.fold.seq + 1)
                self._apply(entry, checksum)
            except NotFoundError:
                break
            except CorruptionError:
                if known is not None and not self._is_there(known.seq, known.entry_checksum):
                    raise _OvertakenError from None
                raise
            known = known if known is not None else self.fold
        if known is not None and not self._is_there(known.seq, known.entry_checksum):
            raise _OvertakenError

    def _is_there(self, seq: int, checksum: str) -> bool:
        try:
            return self._files.entry_checksum(seq) == checksum
        except NotFoundError:
            return False

    def _apply(self, entry: TableEntry, checksum: str) -> None:
        self.fold = TableFold.first(entry, checksum) if self.fold is None else self.fold.after(entry, checksum)
        self.loose.append(entry)
        if entry.seq and entry.seq % self._every == 0:
            self._due.append(self.fold)

    def append(self, entry: TableEntry) -> bool:
        """Appends an entry and returns True.

        If an entry with this number exists, reads the new entries and returns False.
        """
        before = self.fold
        try:
            checksum = self._files.create_entry(entry)
        except AlreadyExistsError:
            self.refresh()
            return False
        follows = not self._files.listing()[1] if before is None else self._is_there(before.seq, before.entry_checksum)
        if not follows:
            # The entry is in the hole of a truncated log, whose entries are part of a snapshot.
            self._files.delete_entry(entry.seq)
            self._forget()
            self.refresh()
            return False
        self._apply(entry, checksum)
        self._remember()
        self._compact()
        return True

    def _compact(self) -> None:
        """Writes the snapshots that are due. A failure is not raised, because the entries are committed already."""
        try:
            while self._due:
                fold = self._due[0]
                count = next(n for n, entry in enumerate(self.loose, start=1) if entry.seq == fold.seq)
                before, self._state = self._state, self._files.compact(self._state, fold, self.loose[:count])
                self.loose, self._due = self.loose[count:], self._due[1:]
                if before is not None:
                    self._files.truncate(before, self._state)
        except NotFoundError:
            # Another process has compacted further, and deleted parts that were to be joined.
            self._forget()
        except StorageError as error:
            log.warning("the log of %s is compacted later: %s", self._url, error)

    def with_parts(self, read: Callable[[], T]) -> T:
        """Refreshes the log and returns the result of `read`, which reads the log and its parts.

        Repeats both if a part was replaced by a merged part meanwhile.
        """
        missing: NotFoundError | None = None
        for _ in range(RACES_MAX):
            self.refresh()
            try:
                return read()
            except NotFoundError as error:
                missing = error
                self._forget()
        raise CorruptionError(
            f"a part of the log of {self._url} is missing: {missing}; restore this file from a copy of the table"
        ) from missing

    @property
    def parts(self) -> tuple[TablePart, ...]:
        """Returns the parts with the entries up to the newest snapshot, in order."""
        return () if self._state is None else self._state.parts

    def read_part(self, part: TablePart) -> PartColumns:
        """Returns the entries of a part, from memory if the part was read recently.

        Raises NotFoundError, CorruptionError.
        """
        if (columns := self._columns.pop(part, None)) is None:
            columns, known = self._files.read_part(part), self.parts
            self._columns = {old: kept for old, kept in self._columns.items() if old in known}
        self._columns[part] = columns
        weight = sum(_weight(each) for each in self._columns)
        while weight > PARTS_WEIGHT_MAX and len(self._columns) > 1:
            oldest = next(iter(self._columns))
            weight -= _weight(oldest)
            del self._columns[oldest]
        return columns

    def entries_after(self, seq: int) -> list[TableEntry]:
        """Returns all entries with a number greater than `seq`, in order. Call this inside `with_parts`.

        Raises NotFoundError, CorruptionError.
        """
        return [entry for entry in self._entries(part for part in self.parts if part.last > seq) if entry.seq > seq]

    def entries_in(self, shown: Ranges) -> list[TableEntry]:
        """Returns the entries of the set `shown` that have files, in the order of the table's rows. Call this inside
        `with_parts`.
        """
        parts = [part for part in self.parts if any(first <= part.last and part.first <= last for first, last in shown)]
        return sorted((e for e in self._entries(parts) if e.files and covers(shown, e.seq)), key=in_order)

    def entries_of(self, members: Collection[int]) -> list[TableEntry]:
        """Returns the entries with the numbers `members`, ascending. Call this inside `with_parts`."""
        parts = [part for part in self.parts if any(part.first <= seq <= part.last for seq in members)]
        return [entry for entry in self._entries(parts) if entry.seq in members]

    def _entries(self, parts: Iterable[TablePart]) -> list[TableEntry]:
        """Returns the entries of some parts and the entries after the snapshot, without entries that a cut drops."""
        entries = [*(e for part in parts for e in self.read_part(part).entries()), *self.loose]
        cut = None if self.fold is None else self.fold.cut
        return entries if cut is None else [entry for entry in entries if cut.keeps(entry.seq)]

    def files_of(self, shown: Ranges) -> tuple[DataFile, ...]:
        """Returns the data files of the entries in a set, in the order of the table's rows. Call this inside
        `with_parts`.

        Reads only parts that have such entries.
        """
        cut = None if self.fold is None else self.fold.cut
        files = [
            numbered
            for part in self.parts
            if any(first <= part.last and part.first <= last for first, last in shown)
            for numbered in self.read_part(part).files(shown, cut)
        ]
        loose = (e for e in self.loose if covers(shown, e.seq) and (cut is None or cut.keeps(e.seq)))
        files += [(e.position, file) for e in loose for file in e.files]
        return tuple(file for _, file in sorted(files, key=lambda numbered: numbered[0]))


def _weight(part: TablePart) -> int:
    return part.last - part.first + 1 + part.files


TABLE_LOG_VERSION = 3
LOG_FOLDER = "_tidegate/log"
PARTS_FOLDER = "_tidegate/parts"
FAN_IN = 10
FILES_MAX = 50_000
_ENTRY_MAGIC, _SNAPSHOT_MAGIC, _PART_MAGIC = b"TGTABLE", b"TGTABSN", b"TGTABPT"
_SNAPSHOT_PREFIX = "snapshot-"
_DIGITS = 12
_LEVEL_CUT = 1_000
"""Level of parts that are never merged with other parts."""


@wire
@dataclass(frozen=True, slots=True)
class TablePart:
    """Describes a file with log entries `first` to `last`, which name `files` data files.

    `cut` is the number of the cut whose dropped entries the part lacks, or None if it has all entries.
    """

    first: int
    last: int
    level: int
    files: int
    cut: int | None = None

    @property
    def path(self) -> str:
        """Returns the path of the part's file."""
        cut = "" if self.cut is None else f"-{self.cut:0{_DIGITS}d}"
        return f"{PARTS_FOLDER}/{self.first:0{_DIGITS}d}-{self.last:0{_DIGITS}d}{cut}"


@wire
@dataclass(frozen=True, slots=True)
class TableState:
    """The content of a snapshot: the table state, and the list of the parts with all entries up to it."""

    fold: TableFold
    parts: tuple[TablePart, ...]


@wire
@dataclass(frozen=True, slots=True)
class PartColumns:
    """The content of a log part: the fields of commits as columns (tuples), and all other entries unchanged."""

    jobs: tuple[JobId, ...] = ()
    seqs: tuple[int, ...] = ()
    job_of: tuple[int, ...] = ()
    checkpoints: tuple[CheckpointId, ...] = ()
    counts: tuple[int, ...] = ()
    """Number of files of each commit."""
    paths: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    checksums: tuple[str, ...] = ()
    others: tuple[TableEntry, ...] = ()
    times: tuple[int, ...] = ()
    """Time of each commit, in ms since the epoch."""

    @staticmethod
    def of(entries: Sequence[TableEntry]) -> PartColumns:
        """Builds the content of a part with these entries."""
        commits = [e for e in entries if e.kind is TableEntryKind.COMMITTED]
        jobs = tuple(dict.fromkeys(e.job_id for e in commits if e.job_id is not None))
        number = {job: at for at, job in enumerate(jobs)}
        files = [file for e in commits for file in e.files]
        return PartColumns(
            jobs,
            tuple(e.seq for e in commits),
            tuple(number[e.job_id] for e in commits if e.job_id is not None),
            tuple(e.checkpoint_id for e in commits if e.checkpoint_id is not None),
            tuple(len(e.files) for e in commits),
            tuple(f.path for f in files),
            tuple(f.rows for f in files),
            tuple(f.size_bytes for f in files),
            tuple(f.checksum for f in files),
            tuple(e for e in entries if e.kind is not TableEntryKind.COMMITTED),
            tuple(e.at_ms for e in commits if e.at_ms is not None),
        )

    @staticmethod
    def joined(parts: Sequence[PartColumns]) -> PartColumns:
        """Merges the contents of adjacent parts into one."""
        jobs = tuple(dict.fromkeys(job for part in parts for job in part.jobs))
        number = {job: at for at, job in enumerate(jobs)}
        return PartColumns(
            jobs,
            tuple(seq for part in parts for seq in part.seqs),
            tuple(number[part.jobs[at]] for part in parts for at in part.job_of),
            tuple(checkpoint for part in parts for checkpoint in part.checkpoints),
            tuple(count for part in parts for count in part.counts),
            tuple(path for part in parts for path in part.paths),
            tuple(rows for part in parts for rows in part.rows),
            tuple(size for part in parts for size in part.sizes),
            tuple(checksum for part in parts for checksum in part.checksums),
            tuple(entry for part in parts for entry in part.others),
            tuple(at_ms for part in parts for at_ms in part.times),
        )

    def entries(self) -> list[TableEntry]:
        """Returns all entries of the part, in the order of their numbers."""
        commits = (
            TableEntry(
                seq,
                TableEntryKind.COMMITTED,
                self.jobs[job],
                checkpoint,
                self._files(start, start + count),
                at_ms=at_ms,
            )
            for seq, job, checkpoint, count, at_ms, start in zip(
                self.seqs, self.job_of, self.checkpoints, self.counts, self.times, self._starts(), strict=False
            )
        )
        return sorted((*commits, *self.others), key=lambda entry: entry.seq)

    def files(self, shown: Ranges, cut: TableCut | None = None) -> list[tuple[int, DataFile]]:
        """Returns the data files of the entries that are in `shown` and that `cut` keeps, each with its position in
        the table.
        """

        def shows(seq: int) -> bool:
            return covers(shown, seq) and (cut is None or cut.keeps(seq))

        found = [(entry.position, file) for entry in self.others if shows(entry.seq) for file in entry.files]
        for seq, count, start in zip(self.seqs, self.counts, self._starts(), strict=False):
            if count and shows(seq):
                found += [(seq, file) for file in self._files(start, start + count)]
        return found

    def _starts(self) -> Iterable[int]:
        return accumulate(self.counts, initial=0)

    def _files(self, start: int, end: int) -> tuple[DataFile, ...]:
        columns = (self.paths, self.rows, self.sizes, self.checksums)
        return tuple(DataFile(*values) for values in zip(*(c[start:end] for c in columns), strict=True))


class TableParts:
    """Reads and writes the files of one table's log: entries, parts and snapshots."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # --- entries --------------------------------------------------------------------------------------------------

    def create_entry(self, entry: TableEntry) -> str:
        """Creates the file of an entry and returns its checksum. Raises AlreadyExistsError, StorageError."""
        data = encoded_entry(entry)
        self._store.create(entry_path(entry.seq), data)
        return checksum_of(data)

    def read_entry(self, seq: int) -> tuple[TableEntry, str]:
        """Returns the entry with the number `seq`, and the checksum of its file.

        Raises NotFoundError, CorruptionError, CodecError.
        """
        path = entry_path(seq)
        where = join_url(self._store.url, path)
        data = self._store.read(path)
        entry = _decoded(_ENTRY_MAGIC, data, where)
        if not isinstance(entry, TableEntry) or entry.seq != seq:
            raise CorruptionError(
                f"{where} does not hold entry {seq} of the table's log; restore this file from a copy of the table"
            )
        if (entry.kind is TableEntryKind.CREATED) != (seq == 0):
            only = "which only entry 0 may be" if seq else f"and entry 0 must be {TableEntryKind.CREATED.value!r}"
            raise CorruptionError(
                f"{where} is damaged: entry {seq} is of kind {entry.kind.value!r}, {only}; restore this file from a "
                "copy of the table"
            )
        return entry, checksum_of(data)

    def entry_checksum(self, seq: int) -> str:
        """Returns the checksum of the file of an entry. Raises NotFoundError."""
        return checksum_of(self._store.read(entry_path(seq)))

    def has_entry(self, seq: int) -> bool:
        """Returns whether the file of an entry exists.

        Does not list the folder, because a listing may lack new files.
        """
        return self._store.exists(entry_path(seq))

    def listing(self) -> tuple[list[int], list[int]]:
        """Returns the numbers of the existing entries and snapshots, ascending."""
        names = self._store.list(LOG_FOLDER)
        snapshots = (n.removeprefix(_SNAPSHOT_PREFIX) for n in names if n.startswith(_SNAPSHOT_PREFIX))
        return sorted(map(int, filter(_is_number, names))), sorted(map(int, filter(_is_number, snapshots)))

    # --- parts and snapshots --------------------------------------------------------------------------------------

    def read_state(self, seq: int) -> TableState:
        """Returns the snapshot at entry `seq`. Raises NotFoundError, CorruptionError, CodecError."""
        path = _snapshot_path(seq)
        where = join_url(self._store.url, path)
        state = _decoded(_SNAPSHOT_MAGIC, self._store.read(path), where)
        if not isinstance(state, TableState) or state.fold.seq != seq:
            raise CorruptionError(
                f"{where} does not hold the table's state at entry {seq}; restore this file from a copy of the table"
            )
        return state

    def read_part(self, part: TablePart) -> PartColumns:
        """Reads the content of a part. Raises NotFoundError, CorruptionError, CodecError."""
        where = join_url(self._store.url, part.path)
        columns = _decoded(_PART_MAGIC, self._store.read(part.path), where)
        if not isinstance(columns, PartColumns):
            raise CorruptionError(
                f"{where} does not hold a part of the table's log; restore this file from a copy of the table"
            )
        return columns

    def compact(self, before: TableState | None, fold: TableFold, entries: Sequence[TableEntry]) -> TableState:
        """Writes `entries` (which follow the snapshot `before`) as parts, and a new snapshot with the table state
        `fold`.

        Returns the content of the new snapshot.
        """
        parts = () if before is None else before.parts
        fresh = TablePart(entries[0].seq, entries[-1].seq, 0, sum(len(e.files) for e in entries))
        columns = {fresh.path: PartColumns.of(entries)}
        parts = (*parts, fresh)
        self._write_part(fresh, columns[fresh.path])
        while _joinable(parts):
            last = parts[-FAN_IN:]
            joined = TablePart(last[0].first, last[-1].last, last[0].level + 1, sum(part.files for part in last))
            columns[joined.path] = PartColumns.joined(
                [columns[part.path] if part.path in columns else self.read_part(part) for part in last]
            )
            parts = (*parts[:-FAN_IN], joined)
            self._write_part(joined, columns[joined.path])
        if fold.cut is not None:
            parts = self._after_cut(fold.cut, parts)
        state = TableState(fold, parts)
        data = seal(_SNAPSHOT_MAGIC, TABLE_LOG_VERSION, encode(state))
        self._store.write(_snapshot_path(fold.seq), (data,))
        return state

    def _after_cut(self, cut: TableCut, parts: Sequence[TablePart]) -> tuple[TablePart, ...]:
        """Returns the parts without entries that a cut drops. Rewrites the parts that have such entries."""
        count = sum(part.first <= cut.seq for part in parts)
        if all(part.cut == cut.seq for part in parts[:count]):
            return tuple(parts)
        written: list[TablePart] = []
        entries: list[TableEntry] = []
        first = 0
        for at, part in enumerate(parts[:count]):
            entries += [entry for entry in self.read_part(part).entries() if cut.keeps(entry.seq)]
            files = sum(len(entry.files) for entry in entries)
            if at == count - 1 or files + parts[at + 1].files > FILES_MAX:
                new = TablePart(first, part.last, _LEVEL_CUT, files, cut.seq)
                self._write_part(new, PartColumns.of(entries))
                written.append(new)
                first, entries = part.last + 1, []
        return (*written, *parts[count:])

    def truncate(self, before: TableState, state: TableState) -> None:
        """Deletes log files that neither of two consecutive snapshots needs. May be interrupted and repeated."""
        entries, snapshots = self.listing()
        for seq in entries:
            if seq < before.fold.seq:
                self._store.delete(entry_path(seq))
        for seq in snapshots:
            if seq < before.fold.seq:
                self._store.delete(_snapshot_path(seq))
        needed = {part.path for part in (*before.parts, *state.parts)}
        cut = -1 if state.fold.cut is None else state.fold.cut.seq
        for name in self._store.list(PARTS_FOLDER):
            numbers = name.split("-")
            if f"{PARTS_FOLDER}/{name}" in needed or not all(map(_is_number, numbers)) or len(numbers) < 2:
                continue
            # Parts that end later, or that were cut later, belong to a process that is ahead of this one.
            if int(numbers[1]) <= state.fold.seq and (len(numbers) == 2 or int(numbers[2]) <= cut):
                self._store.delete(f"{PARTS_FOLDER}/{name}")

    def delete_entry(self, seq: int) -> None:
        """Deletes an entry file whose number had already been removed by a truncation when the file was created."""
        self._store.delete(entry_path(seq))

    def _write_part(self, part: TablePart, columns: PartColumns) -> None:
        try:
            self._store.create(part.path, seal(_PART_MAGIC, TABLE_LOG_VERSION, encode(columns)))
        except AlreadyExistsError:
            return  # The same entries make the same part.


def encoded_cut_log(fold: TableFold, entries: Sequence[TableEntry]) -> list[tuple[str, bytes]]:
    """Returns paths and contents of the files of a cut log with these entries, in the order in which to write them.

    The log is written as a part, the newest entry, and a snapshot, because single entry files would have holes.
    """
    assert fold.cut is not None
    files = sum(len(entry.files) for entry in entries)
    part = TablePart(0, fold.seq, _LEVEL_CUT, files, fold.cut.seq)
    newest = encoded_entry(entries[-1])
    # Parts have no nonces of commits, so the entry may have other bytes than at the source.
    fold = replace(fold, entry_checksum=checksum_of(newest))
    return [
        (part.path, seal(_PART_MAGIC, TABLE_LOG_VERSION, encode(PartColumns.of(entries)))),
        (entry_path(fold.seq), newest),
        (_snapshot_path(fold.seq), seal(_SNAPSHOT_MAGIC, TABLE_LOG_VERSION, encode(TableState(fold, (part,))))),
    ]


def encoded_entry(entry: TableEntry) -> bytes:
    """Returns the content of the file of a log entry."""
    return seal(_ENTRY_MAGIC, TABLE_LOG_VERSION, encode(entry))


def entry_path(seq: int) -> str:
    """Returns the path of the file of the log entry with this number."""
    return f"{LOG_FOLDER}/{seq:0{_DIGITS}d}"


def _snapshot_path(seq: int) -> str:
    return f"{LOG_FOLDER}/{_SNAPSHOT_PREFIX}{seq:0{_DIGITS}d}"


def _joinable(parts: Sequence[TablePart]) -> bool:
    last = parts[-FAN_IN:]
    return (
        len(last) == FAN_IN
        and len({part.level for part in last}) == 1
        and sum(part.files for part in last) <= FILES_MAX
    )


def _decoded(magic: bytes, data: bytes, where: str) -> object:
    payload = unseal(magic, TABLE_LOG_VERSION, data, where)
    try:
        return decode(payload)
    except CodecError as error:
        raise CodecError(f"{where} cannot be read: {error}") from error


def _is_number(name: str) -> bool:
    return len(name) >= _DIGITS and name.isascii() and name.isdigit()
