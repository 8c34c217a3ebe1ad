"""`RunningCompaction`: puts the small files of a table together while the job that owns it goes on committing.

The process of the coordinator that commits does it, beside its commits (`docs/decisions/0025`). Rules:

- A compaction is an entry of its own in the log: files in the place of entries that show, with the same rows. Whoever
  reads sees the one or the other. Nothing is deleted: earlier versions, and any checkpoint, find their files.
- It takes rows of the owner's line alone, and only what shows. If any of that is hidden before the entry is there (the
  job has gone back to an older checkpoint, or lost the table), the entry is not made.
- One step after a commit, one compaction a step, of bounded size. Commits do not wait for it: they append to the same
  log, and the compaction looks again.
- One process at a time: it says so in the log first, in an entry whose number its files bear. So files of a process
  that was killed at it, and of one that only seems dead, are known for leftovers, and deleted by a later one.
- What was read of the log is remembered as one small record for each unit. Files are read again when they are needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from tidegate.storage.files.store import Store
from tidegate.storage.ids import JobId
from tidegate.storage.tables.compaction.compaction_plan import CompactionSettings, Unit, next_compaction
from tidegate.storage.tables.compaction.small_files import is_small, rewrites_of, rewritten
from tidegate.storage.tables.log.log_entries import TableEntry, covers, in_order
from tidegate.storage.tables.log.log_fold import TableFold
from tidegate.storage.tables.table_files import compacted_dir, compacted_name, delete_unfinished
from tidegate.storage.tables.table_log import TableLog


class RunningCompaction:
    """The compaction of the table at the store's root, which one job owns, by one process of it. Not thread-safe.

    `log` is the one with which the process commits.
    """

    def __init__(self, store: Store, log: TableLog, job_id: JobId, settings: CompactionSettings) -> None:
        assert settings.file_bytes > 0 and settings.fan_in >= 2
        self._store = store
        self._log = log
        self._job_id = job_id
        self._settings = settings
        self._nonce = uuid.uuid4().hex[:8]
        self._units: list[Unit] | None = None
        """What shows of the line, in order, after entry `_read_to`; None: to be read anew."""
        self._read_to = -1
        self._mark: int | None = None
        """The number under which this process compacts; None: it has not said that it does."""
        self._steps = 0

    def step(self, may_go_on: Callable[[], None] = lambda: None) -> bool:
        """Put together what is due, once; whether anything was. `may_go_on` may raise to end the work, at any file.

        Raises StorageError, to be called again later; CorruptionError or NotFoundError where a file is damaged or lost.
        """
        fold = self._log.state()
        if fold is None or fold.owner != self._job_id or fold.pending:
            self._units = None
            return False
        known = self._known()
        level, units = next_compaction(known, self._settings)
        mark = self._take_charge() if units else None
        if mark is None:
            return False
        members = {unit.seq for unit in units}
        files = [file for entry in sorted(self._log.entries_of(members), key=in_order) for file in entry.files]
        self._steps += 1
        # No other process ever writes files of these names, however long it takes to notice that it is not in charge.
        prefix, folder = compacted_name(mark, self._steps), compacted_dir(self._job_id)
        rewrites = rewrites_of(files, self._settings.file_bytes)
        # The second reads the whole log, through one of its own as in `_known`: seldom, for the first units alone.
        begins = fold.info.deletes and units[0] is known[0] and TableLog(self._store).has_one_line()
        new = rewritten(self._store, fold.info, folder, prefix, rewrites, may_go_on, from_beginning=begins)
        if not self._log.compact(self._job_id, self._nonce, members, level, new):
            self._units, self._mark = None, None
            return False
        return True

    def close(self) -> None:
        """The job is over: delete what was written for nothing. StorageError."""
        fold = self._log.state()
        if fold is None or fold.owner != self._job_id or not fold.compactor:
            return  # Where nobody has ever said that he compacts there is nothing.
        mark = self._log.take_compacting(self._job_id, self._nonce)
        if mark is not None:
            delete_unfinished(self._store, self._job_id, mark + 1)

    def _take_charge(self) -> int | None:
        if self._mark is None:
            self._mark = self._log.take_compacting(self._job_id, self._nonce)
            if self._mark is not None:
                delete_unfinished(self._store, self._job_id, self._mark)
        return self._mark

    def _known(self) -> list[Unit]:
        if self._units is not None:
            entries = self._log.entries_after(self._read_to)
            if not any(entry.claim is not None for entry in entries):
                self._units = self._with(self._units, entries)
                self._read_to = max([self._read_to, *(entry.seq for entry in entries)])
                return self._units
        # Read through a log of its own: the other one would keep all of it in memory.
        fold, shown = TableLog(self._store).shown_entries()
        if fold.owner != self._job_id or fold.pending:
            self._units = None
            return []
        self._units = [self._unit(entry) for entry in shown if self._is_own(fold, entry)]
        self._read_to = fold.seq
        return self._units

    def _with(self, units: list[Unit], entries: Iterable[TableEntry]) -> list[Unit]:
        """The units after these entries, all of which are the owner's."""
        for entry in entries:
            if entry.rewrite is not None:
                replaced = [n for n, unit in enumerate(units) if covers(entry.rewrite.replaces, unit.seq)]
                units = [*units[: replaced[0]], self._unit(entry), *units[replaced[-1] + 1 :]]
            elif entry.files:
                units = [*units, self._unit(entry)]
        return units

    def _is_own(self, fold: TableFold, entry: TableEntry) -> bool:
        """Whether an entry that shows is of the owner's line."""
        assert fold.claim is not None
        return entry.job_id == self._job_id or covers(fold.claim.own, entry.seq)

    def _unit(self, entry: TableEntry) -> Unit:
        small_bytes = sum(file.size_bytes for file in entry.files if is_small(file, self._settings.file_bytes))
        return Unit(entry.seq, 0 if entry.rewrite is None else entry.rewrite.level, len(entry.files), small_bytes)
