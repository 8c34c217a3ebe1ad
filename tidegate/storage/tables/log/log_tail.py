"""`TableTail`: the end of a table's log as one process knows it: reading on, appending, and compacting.

Rules:

- An entry that was created counts once the one before it is seen to be there still: where it is not, the log was
  truncated, the writer was behind, and takes its entry back.
- Whoever has read on looks whether the entry that it had read last is there, and begins again with the newest snapshot
  if not. So nobody takes the hole that truncation leaves for the end of the log, or what somebody else has put there
  for a part of it.
- A listing may show an entry without the one before it, where entries are created meanwhile. What it does not name is
  looked for by its own name before it counts as lost.
- A process remembers the newest entry that it has appended or read. A log that ends before it, or has another entry
  there, has lost what storage had acknowledged. That is damage, a TableError: truncation never goes so far. Otherwise
  rows that were committed would be missing, and the next commit would hide that.
- What a cut leaves out is no part of the log for anybody who has read the cut, wherever it still lies.
- A snapshot is written, and the log truncated, every so many entries by whoever appends. The entry that made it due
  stands, whatever becomes of that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import (
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    StorageError,
    TableError,
    TidegateError,
)
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store
from tidegate.storage.tables.log.log_entries import Ranges, TableEntry, covers, in_order
from tidegate.storage.tables.log.log_fold import TableFold
from tidegate.storage.tables.log.log_parts import LOG_FOLDER, PartColumns, TablePart, TableParts, TableState, entry_path

log = logging.getLogger(__name__)

RACES_MAX = 32
T = TypeVar("T")
PARTS_WEIGHT_MAX = 20_000
"""Entries and files of the parts that stay in memory once they were read, if that is more than one part."""


class _OvertakenError(Exception):
    """The log was truncated beyond what this reader knows."""


class TableTail:
    """The newest snapshot, what was appended since, and the fold of it all. Not thread-safe."""

    def __init__(self, store: Store, entries_per_snapshot: int) -> None:
        assert entries_per_snapshot >= 2, "the entry before the newest one is never truncated"
        self.fold: TableFold | None = None
        """None where nothing was read yet, or where there is no table."""
        self.loose: list[TableEntry] = []
        """The entries after the snapshot."""
        self._url = store.url
        self._files = TableParts(store)
        self._every = entries_per_snapshot
        self._state: TableState | None = None
        self._due: list[TableFold] = []
        """Folds that snapshots should be made of."""
        self._columns: dict[TablePart, PartColumns] = {}
        """Parts that were read lately, the latest one last: a writer that lives for years keeps a bounded number."""
        self._newest: tuple[int, str] | None = None
        """Number and checksum of the newest entry that was part of the log."""

    def refresh(self) -> None:
        """Read what has been appended; begin anew where the log was truncated meanwhile.

        TableError where the log has lost entries that were part of it.
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
                # Nobody has seen yet that what was read is not of a hole.
                self._forget()
                raise
        where = join_url(self._url, LOG_FOLDER)
        raise CorruptionError(f"{where} cannot be read: entries that the newest snapshot needs are missing")

    def expect(self, seq: int) -> None:
        """Take it as known that entry `seq` was part of the log, as another process of the job has reported."""
        if seq >= 0 and (self._newest is None or self._newest[0] < seq):
            self._newest = seq, ""

    def is_behind(self) -> bool:
        """Whether more is known of the log than was read."""
        return self._newest is not None and (self.fold is None or self.fold.seq < self._newest[0])

    def _remember(self) -> None:
        if self.fold is not None and (self._newest is None or self._newest[0] <= self.fold.seq):
            self._newest = self.fold.seq, self.fold.entry_checksum

    def _check_nothing_lost(self) -> None:
        """Raise TableError if the newest entry that was part of the log is not a part of what was loaded."""
        if self._newest is None:
            return
        seq, checksum = self._newest
        ends = -1 if self.fold is None else self.fold.seq
        if ends < seq:
            found = "there is no log any more" if self.fold is None else f"it ends with entry {ends}"
        elif checksum and self._files.has_entry(seq) and not self._is_there(seq, checksum):
            found = "another entry is there now"
        else:
            return
        raise self.lost(f"this job knows entry {seq} of it", found)

    def lost(self, known: str, found: str) -> TableError:
        """The error that the log has lost entries: what is known of it, and what is found there."""
        return TableError(
            f"the log of the table at {self._url} has lost entries: {known}, and {found}. The storage "
            "has lost what it had acknowledged or was taken back to an older state, or the table was deleted and "
            "created again. Rows that were committed are missing, so nothing is written to it. Bring the folder "
            "back from a copy, or restore the job from a checkpoint that is older than the loss"
        )

    def _forget(self) -> None:
        self._state, self.fold = None, None
        self.loose, self._due = [], []

    def _load(self) -> None:
        """Begin with the newest snapshot that is whole."""
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
                log.warning("a snapshot is passed over: %s", error)
                damage = error
        else:
            if damage is not None:
                raise damage
        first = 0 if self.fold is None else self.fold.seq + 1
        self._check_no_hole(first, [number for number in numbers if number >= first], snapshots)
        self._read_on()
        if numbers and (self.fold is None or self.fold.seq < numbers[-1]):
            raise _OvertakenError  # Entries that were there a moment ago are not any more.

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
                    raise CorruptionError(f"{where} has lost entries: {name} is missing, and later ones are there")
                expected += 1
            expected += 1

    def _read_on(self) -> None:
        """Read entries to the end. What was known before, or else the first entry, must be there afterwards."""
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
        """Whether the entry is part of the log now; if not, what the log says instead has been read."""
        before = self.fold
        try:
            checksum = self._files.create_entry(entry)
        except AlreadyExistsError:
            self.refresh()
            return False
        follows = not self._files.listing()[1] if before is None else self._is_there(before.seq, before.entry_checksum)
        if not follows:
            # It fills a hole of the truncated log: what is there, or was, is part of a snapshot.
            self._files.delete_entry(entry.seq)
            self._forget()
            self.refresh()
            return False
        self._apply(entry, checksum)
        self._remember()
        self._compact()
        return True

    def _compact(self) -> None:
        """Write the snapshots that are due. The entry that made them due stands, whatever happens here."""
        try:
            while self._due:
                fold = self._due[0]
                count = next(n for n, entry in enumerate(self.loose, start=1) if entry.seq == fold.seq)
                before, self._state = self._state, self._files.compact(self._state, fold, self.loose[:count])
                self.loose, self._due = self.loose[count:], self._due[1:]
                if before is not None:
                    self._files.truncate(before, self._state)
        except NotFoundError:
            # Somebody has compacted further, and deleted parts that were to be joined.
            self._forget()
        except StorageError as error:
            log.warning("the log of %s is compacted later: %s", self._url, error)

    def with_parts(self, read: Callable[[], T]) -> T:
        """What `read` makes of the log and its parts; again where parts were joined to a larger one meanwhile."""
        missing: NotFoundError | None = None
        for _ in range(RACES_MAX):
            self.refresh()
            try:
                return read()
            except NotFoundError as error:
                missing = error
                self._forget()
        raise CorruptionError(f"a part of the log of {self._url} is missing: {missing}") from missing

    @property
    def parts(self) -> tuple[TablePart, ...]:
        """What holds the entries before the loose ones, in order."""
        return () if self._state is None else self._state.parts

    def read_part(self, part: TablePart) -> PartColumns:
        """A part, from memory if it was read lately. NotFoundError, CorruptionError."""
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
        """All entries after `seq`, in order. Call it in `with_parts`: NotFoundError, CorruptionError."""
        return [entry for entry in self._entries(part for part in self.parts if part.last > seq) if entry.seq > seq]

    def entries_in(self, shown: Ranges) -> list[TableEntry]:
        """The entries of a set that bear files, in the order of the table. Call it in `with_parts`, as above."""
        parts = [part for part in self.parts if any(first <= part.last and part.first <= last for first, last in shown)]
        return sorted((e for e in self._entries(parts) if e.files and covers(shown, e.seq)), key=in_order)

    def entries_of(self, members: Collection[int]) -> list[TableEntry]:
        """These entries, ascending. Call it in `with_parts`, as above."""
        parts = [part for part in self.parts if any(part.first <= seq <= part.last for seq in members)]
        return [entry for entry in self._entries(parts) if entry.seq in members]

    def _entries(self, parts: Iterable[TablePart]) -> list[TableEntry]:
        """The entries of parts, and the loose ones, without what a cut leaves out."""
        entries = [*(e for part in parts for e in self.read_part(part).entries()), *self.loose]
        cut = None if self.fold is None else self.fold.cut
        return entries if cut is None else [entry for entry in entries if cut.keeps(entry.seq)]

    def files_of(self, shown: Ranges) -> tuple[DataFile, ...]:
        """The files of these entries, in order; other parts are not read. Call it in `with_parts`, as above."""
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
