"""`TableReads`: what a table's log tells. `TableLog`, which also writes it, inherits these.

Whatever is read begins with reading on to the log's end, and is of that one moment.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import TableError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.log_entries import TableEntry, in_order
from tidegate.storage.tables.log.log_fold import TableFold
from tidegate.storage.tables.log.log_lineage import TableLineage
from tidegate.storage.tables.log.log_tail import TableTail
from tidegate.storage.tables.log.log_versions import AsOf, TableCommit, TableVersions
from tidegate.storage.tables.table_info import TableInfo

ENTRIES_PER_SNAPSHOT = 25


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """What a table shows: its committed, visible files in commit order, as of entry `seq`."""

    info: TableInfo
    files: tuple[DataFile, ...]
    seq: int

    @property
    def rows(self) -> int:
        """Rows in the files; in an upsert table several may be versions of one."""
        return sum(file.rows for file in self.files)


@dataclass(frozen=True, slots=True)
class TableOwner:
    """The job that may commit, and where it has its checkpoints, if it has said so."""

    job_id: JobId
    home: str | None


class TableReads:
    """The log of the table at the store's root. Thread-safe; remembers what it has read of the log's end."""

    def __init__(self, store: Store, *, entries_per_snapshot: int = ENTRIES_PER_SNAPSHOT) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._tail = TableTail(store, entries_per_snapshot)

    def snapshot(self, as_of: AsOf | None = None) -> TableSnapshot:
        """What the table shows now, or what it showed with an earlier commit: see `TableVersions`.

        TableError if there is no table, or nothing was committed by then.
        """
        with self._lock:
            return self._tail.with_parts(self._shown if as_of is None else lambda: self._shown_at(as_of))

    def history(self) -> tuple[TableCommit, ...]:
        """Every commit that can be read, oldest first. TableError if there is no table."""
        with self._lock:
            return self._tail.with_parts(lambda: self._versions().commits())

    def files_by_line(self) -> dict[JobId, tuple[DataFile, ...]]:
        """The files that are shown, by the line of jobs that has written them. TableError if there is no table."""
        with self._lock:
            return self._tail.with_parts(self._files_by_line)

    def rows(self) -> int:
        """Rows in the files that are shown. TableError if there is no table."""
        with self._lock:
            self._tail.refresh()
            return self._existing().rows

    def exists(self) -> bool:
        """Whether there is a table."""
        with self._lock:
            self._tail.refresh()
            return self._tail.fold is not None

    def owner(self) -> TableOwner | None:
        """The job that may commit; None before the first claim, or where there is no table."""
        with self._lock:
            self._tail.refresh()
            fold = self._tail.fold
            if fold is None or fold.owner is None or fold.claim is None:
                return None
            return TableOwner(fold.owner, fold.claim.home)

    def claims(self) -> int:
        """How many claims there were: a later owner finds more."""
        with self._lock:
            self._tail.refresh()
            return 0 if self._tail.fold is None else self._tail.fold.claims

    def uncommitted(
        self, job_id: JobId, checkpoint_id: CheckpointId, candidates: Iterable[CheckpointId]
    ) -> tuple[CheckpointId, ...] | None:
        """Those of a job's completed checkpoints which `checkpoint_id` covers and nobody has committed, ascending.

        None if the job never claimed this table.
        """
        with self._lock:
            self._tail.refresh()
            if self._tail.fold is None:
                return None
            lineage = self._tail.with_parts(self._lineage)
            return lineage.uncommitted(job_id, checkpoint_id, candidates) if lineage.knows(job_id) else None

    def state(self) -> TableFold | None:
        """What the log says now; None where there is no table."""
        with self._lock:
            self._tail.refresh()
            return self._tail.fold

    def entries_of(self, members: Collection[int]) -> tuple[TableEntry, ...]:
        """These entries, ascending; parts of the log with none of them are not read."""
        with self._lock:
            return tuple(self._tail.with_parts(lambda: self._tail.entries_of(members)))

    def has_one_line(self) -> bool:
        """Whether all jobs that have ever claimed the table go on from one another; the whole log is read for it."""
        with self._lock:
            return self._tail.with_parts(
                lambda: len({e.claim.line for e in self._tail.entries_after(-1) if e.claim is not None}) == 1
            )

    def shown_entries(self) -> tuple[TableFold, tuple[TableEntry, ...]]:
        """What the log says now, and the entries whose files are shown, in the order of the table."""
        with self._lock:
            return self._tail.with_parts(
                lambda: (self._existing(), tuple(self._tail.entries_in(self._existing().shown)))
            )

    def entries(self) -> tuple[TableEntry, ...]:
        """All entries that are part of the log, read from its beginning; empty if there is no table."""
        with self._lock:
            self._tail.refresh()
            return () if self._tail.fold is None else tuple(self._tail.with_parts(lambda: self._tail.entries_after(-1)))

    def whole(self) -> tuple[TableFold | None, tuple[TableEntry, ...]]:
        """All entries that are part of the log, and their fold, of the same moment; None and none without a table."""
        with self._lock:
            self._tail.refresh()
            if self._tail.fold is None:
                return None, ()
            return self._tail.with_parts(lambda: (self._existing(), tuple(self._tail.entries_after(-1))))

    def entries_after(self, seq: int) -> tuple[TableEntry, ...]:
        """What was appended after an entry; older parts of the log are not read."""
        with self._lock:
            self._tail.refresh()
            if self._tail.fold is None or self._tail.fold.seq <= seq:
                return ()
            return tuple(self._tail.with_parts(lambda: self._tail.entries_after(seq)))

    def referenced_paths(self) -> frozenset[str]:
        """Every path that any entry refers to, hidden ones included: a later restore may show them again.

        What a cut has left out is not among them: its files are deleted.
        """
        return frozenset(file.path for entry in self.entries() for file in entry.files)

    def _existing(self) -> TableFold:
        if self._tail.fold is None:
            raise TableError(f"there is no table at {self._store.url}; check the url, or run a job that writes it")
        return self._tail.fold

    def _shown(self) -> TableSnapshot:
        fold = self._existing()
        return TableSnapshot(fold.info, self._tail.files_of(fold.shown), fold.seq)

    def _shown_at(self, as_of: AsOf) -> TableSnapshot:
        versions = self._versions()
        number, shown = versions.shown_at(as_of)
        return TableSnapshot(versions.info_at(number), self._tail.files_of(shown), number)

    def _files_by_line(self) -> dict[JobId, tuple[DataFile, ...]]:
        entries = {entry.seq: entry for entry in self._tail.entries_after(-1)}
        return {
            line: tuple(file for entry in sorted(map(entries.__getitem__, seqs), key=in_order) for file in entry.files)
            for line, seqs in self._lineage().shown_by_line().items()
        }

    def _versions(self) -> TableVersions:
        fold = self._existing()
        return TableVersions(self._store.url, self._tail.entries_after(-1), fold)

    def _lineage(self) -> TableLineage:
        fold = self._existing()
        return TableLineage(self._store.url, self._tail.entries_after(-1), fold)
