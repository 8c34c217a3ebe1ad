"""`TableLog`: the commit log of an output table, which defines the data files that are its content. Entries are
conditional creates.

The store is rooted at the table's url. Rules:

- Entry 0 describes the table. A claim makes a job the table's owner. Only the owner commits, and a job that has lost
  the table gets FencedError. A commit shows the files of one checkpoint, and the entries on which its job's claim was
  built.
- If two writers try to create the same entry, the conditional create lets one win.
- A table that is a Delta Lake table too is mirrored after each commit (`delta_mirror.py`), by the writer that commits
  or finds that a commit exists. A commit that is repeated therefore repairs a mirror.
- The visible files are computed from all entries of the log (`log/entries.py`). `log/claims.py` computes on which
  entries a claim builds. `log/tail.py` describes how the log is stored and kept short.
- Every read first reads new entries up to the end of the log, and returns the state at that point.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from tidegate.storage.checkpoints.metadata import DataFile, TableHead
from tidegate.storage.clock import now_ms as wall_clock_ms
from tidegate.storage.errors import FencedError, StorageError, TableError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.delta_mirror import LogMirror
from tidegate.storage.tables.log.claims import ClaimHistory, Restored, owned_by
from tidegate.storage.tables.log.entries import (
    TableClaim,
    TableEntry,
    TableEntryKind,
    TableFold,
    TableRewrite,
    added,
    in_order,
    joined,
)
from tidegate.storage.tables.log.tail import RACES_MAX, TableTail
from tidegate.storage.tables.log.vacuum import Retention, cut_of, deletable_files, dropped_files, vacuum_of
from tidegate.storage.tables.log.versions import AsOf, TableCommit, TableVersions
from tidegate.storage.tables.table_info import IfExists, TableInfo

ENTRIES_PER_SNAPSHOT = 25


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """The content of a table: its visible data files in commit order, as of entry `seq`."""

    info: TableInfo
    files: tuple[DataFile, ...]
    seq: int

    @property
    def rows(self) -> int:
        """Returns the number of rows in the files. In an upsert table several rows may have the same key."""
        return sum(file.rows for file in self.files)


@dataclass(frozen=True, slots=True)
class TableOwner:
    """The job that may commit to a table, and the checkpoint root of that job (None if unknown)."""

    job_id: JobId
    home: str | None


class TableLog:
    """The commit log of the table at the store's root. Thread-safe. Caches the end of the log."""

    def __init__(
        self,
        store: Store,
        *,
        entries_per_snapshot: int = ENTRIES_PER_SNAPSHOT,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._tail = TableTail(store, entries_per_snapshot)
        self._nonce = uuid.uuid4().hex[:8]
        self._mirror: LogMirror | None = None
        self._known_commits: dict[JobId, CheckpointId] = {}
        """The newest checkpoint of each job that is certainly committed to this table."""

    # --- reading --------------------------------------------------------------------------------------------------

    def snapshot(self, as_of: AsOf | None = None) -> TableSnapshot:
        """Returns the visible files, now or as of an earlier commit or time. See `TableVersions`.

        Raises TableError if there is no table, or no commit by then.
        """
        with self._lock:
            return self._tail.with_parts(self._shown if as_of is None else lambda: self._shown_at(as_of))

    def history(self) -> tuple[TableCommit, ...]:
        """Returns every commit that can be read, oldest first. Raises TableError if there is no table."""
        with self._lock:
            return self._tail.with_parts(lambda: self._versions().commits())

    def files_by_line(self) -> dict[JobId, tuple[DataFile, ...]]:
        """Returns the visible files, grouped by the line of jobs that wrote them.

        Raises TableError if there is no table.
        """
        with self._lock:
            return self._tail.with_parts(self._files_by_line)

    def rows(self) -> int:
        """Returns the number of rows in the visible files. Raises TableError if there is no table."""
        with self._lock:
            self._tail.refresh()
            return self._existing().rows

    def exists(self) -> bool:
        """Returns whether there is a table at the store's root."""
        with self._lock:
            self._tail.refresh()
            return self._tail.fold is not None

    def owner(self) -> TableOwner | None:
        """Returns the job that may commit, or None if no job has claimed the table or there is no table."""
        with self._lock:
            self._tail.refresh()
            fold = self._tail.fold
            if fold is None or fold.owner is None or fold.claim is None:
                return None
            return TableOwner(fold.owner, fold.claim.home)

    def claims(self) -> int:
        """Returns the number of claims so far. The number increases when another job becomes the owner."""
        with self._lock:
            self._tail.refresh()
            return 0 if self._tail.fold is None else self._tail.fold.claims

    def uncommitted(
        self, job_id: JobId, checkpoint_id: CheckpointId, candidates: Iterable[CheckpointId]
    ) -> tuple[CheckpointId, ...] | None:
        """Returns the checkpoints in `candidates` that `checkpoint_id` covers and that were not committed, ascending.

        `candidates` are completed checkpoints of the job. None if the job never claimed this table.
        """
        with self._lock:
            self._tail.refresh()
            if self._tail.fold is None:
                return None
            history = self._tail.with_parts(self._claim_history)
            return history.uncommitted(job_id, checkpoint_id, candidates) if history.knows(job_id) else None

    def state(self) -> TableFold | None:
        """Returns the current state of the table, computed from its log, or None if there is no table."""
        with self._lock:
            self._tail.refresh()
            return self._tail.fold

    def entries_of(self, members: Collection[int]) -> tuple[TableEntry, ...]:
        """Returns the log entries with these numbers, ascending. Reads only the parts of the log that have them."""
        with self._lock:
            return tuple(self._tail.with_parts(lambda: self._tail.entries_of(members)))

    def has_one_line(self) -> bool:
        """Returns whether all jobs that have ever claimed the table are of one line (each restored from an earlier
        one).

        Reads the whole log.
        """
        with self._lock:
            return self._tail.with_parts(
                lambda: len({e.claim.line for e in self._tail.entries_after(-1) if e.claim is not None}) == 1
            )

    def shown_entries(self) -> tuple[TableFold, tuple[TableEntry, ...]]:
        """Returns the current state of the table, and the entries whose files are visible, in the order of the
        table's rows.
        """
        with self._lock:
            return self._tail.with_parts(
                lambda: (self._existing(), tuple(self._tail.entries_in(self._existing().shown)))
            )

    def entries(self) -> tuple[TableEntry, ...]:
        """Returns all entries of the log, read from its beginning. Empty without a table."""
        with self._lock:
            self._tail.refresh()
            return () if self._tail.fold is None else tuple(self._tail.with_parts(lambda: self._tail.entries_after(-1)))

    def whole(self) -> tuple[TableFold | None, tuple[TableEntry, ...]]:
        """Returns the current state of the table and all entries of the log, from one consistent read.

        Returns None and () without a table.
        """
        with self._lock:
            self._tail.refresh()
            if self._tail.fold is None:
                return None, ()
            return self._tail.with_parts(lambda: (self._existing(), tuple(self._tail.entries_after(-1))))

    def entries_after(self, seq: int) -> tuple[TableEntry, ...]:
        """Returns the log entries after entry `seq`. Older parts of the log are not read."""
        with self._lock:
            self._tail.refresh()
            if self._tail.fold is None or self._tail.fold.seq <= seq:
                return ()
            return tuple(self._tail.with_parts(lambda: self._tail.entries_after(seq)))

    def referenced_paths(self) -> frozenset[str]:
        """Returns the paths of all files that any log entry names, also hidden ones: a later restore may show them
        again.

        Entries that a cut has dropped are not included, because their files are deleted.
        """
        return frozenset(file.path for entry in self.entries() for file in entry.files)

    # --- writing --------------------------------------------------------------------------------------------------

    def create(self, info: TableInfo, *, evolves: bool = False, history_ms: int | None = None) -> None:
        """Creates the table, or checks that the existing one matches `info`. With `evolves`, missing columns are added.

        `history_ms` is how long a new Delta table keeps its versions and their files. None: Delta's default.

        Raises TableError, naming the difference, if the table exists with another schema, mode or keys, and
        ConfigurationError if `info` requests a Delta table that cannot be at this URL.
        """
        with self._lock:
            self._tail.refresh()
            if self._tail.fold is not None:
                self._alter(info, evolves)
                info = self._existing().info
            if info.delta_id is not None:
                # Before the first entry, so that no table is left behind if there can be no Delta table.
                LogMirror(self._store.url, info, self._tail).create(history_ms)
            if self._tail.fold is None:
                self._tail.append(TableEntry(0, TableEntryKind.CREATED, info=info, nonce=self._nonce))
            self._existing().info.check_same(info, self._store.url)

    def check_claim(
        self,
        info: TableInfo,
        job_id: JobId,
        restored_from: Restored | None = None,
        if_exists: IfExists = "error",
        *,
        evolves: bool = False,
    ) -> None:
        """Raises the errors that `create` and `claim` would raise now. Changes nothing."""
        with self._lock:
            self._tail.refresh()
            claim: TableClaim | None = None
            if self._tail.fold is not None:
                info = self._described(info, evolves)
                claim = self._tail.with_parts(self._claim_history).claim(job_id, restored_from, if_exists, None)
            if info.delta_id is not None:
                mirror = LogMirror(self._store.url, info, self._tail)
                mirror.check(if_exists if restored_from is None else "append", claim)

    def check_description(self, info: TableInfo, *, evolves: bool) -> None:
        """Raises TableError if the table exists and does not match the job's description `info`."""
        with self._lock:
            self._tail.refresh()
            if self._tail.fold is not None:
                self._described(info, evolves)

    def check_delta(self) -> None:
        """Raises TableError if the table is also a Delta table that does not accept tidegate's transactions now."""
        with self._lock:
            self._tail.refresh()
            info = self._existing().info
            if info.delta_id is not None:
                LogMirror(self._store.url, info, self._tail).check()

    def delta_retention_ms(self) -> int:
        """Returns how long, in ms, the Delta table in the same folder keeps files that it does not show. 0 without a
        Delta table.

        Raises StorageError, and TableError for a property that cannot be parsed.
        """
        with self._lock:
            self._tail.refresh()
            info = self._existing().info
            return 0 if info.delta_id is None else LogMirror(self._store.url, info, self._tail).retention_ms()

    def expect(self, job_id: JobId, head: TableHead) -> None:
        """Records up to where a job has read the log. A later read of a log without these entries raises TableError."""
        with self._lock:
            self._tail.expect(head.seq)
            if head.commit is not None:
                self._known_commits[job_id] = max(head.commit, self._known_commits.get(job_id, head.commit))

    def check_commits(
        self,
        restored: Restored,
        expected: Collection[CheckpointId],
        retained: Collection[CheckpointId],
    ) -> None:
        """Raises TableError if the log has lost a commit that a restored checkpoint needs and that cannot be repeated.

        `expected` are checkpoints of the job that were committed, or about to be. `retained` are checkpoints whose
        metadata still exists, from which the restore commits missing ones.
        """
        with self._lock:
            job_id, checkpoint_id = restored
            if not expected:
                return
            history = self._tail.with_parts(self._claim_history)
            known = history.knows(job_id)
            missing = set(history.uncommitted(job_id, checkpoint_id, expected) if known else expected)
            if missing := missing - set(retained):
                first = min(missing)
                raise self._tail.lost(f"checkpoint {first} of {job_id!r} was committed", "its commit is missing")

    def head(self, job_id: JobId) -> TableHead:
        """Returns the number of the last entry of the log, and the newest committed checkpoint of a job.

        Raises TableError if the log has lost entries that a job has seen.
        """
        with self._lock:
            self._tail.refresh()
            return self._head(job_id)

    def _head(self, job_id: JobId) -> TableHead:
        if self._tail.fold is None:
            self._tail.refresh()
        fold = self._existing()
        self._check_known(fold, job_id)
        return TableHead(self._store.url, fold.seq, fold.newest_commit if fold.owner == job_id else None)

    def _check_known(self, fold: TableFold, job_id: JobId) -> None:
        known = self._known_commits.get(job_id)
        if known is not None and fold.owner == job_id and (fold.newest_commit is None or fold.newest_commit < known):
            raise self._tail.lost(f"checkpoint {known} of {job_id!r} was committed", "its commit is missing now")

    def claim(
        self,
        job_id: JobId,
        restored_from: Restored | None = None,
        if_exists: IfExists = "error",
        *,
        home: str | None = None,
        uncommitted: tuple[DataFile, ...] = (),
        next_checkpoint_id: int | None = None,
    ) -> TableHead:
        """Makes a job the owner of the table. Each job claims once, when it is submitted. Safe to repeat.

        The owner changes at once, the visible rows with the job's first commit. A job restored from a checkpoint of an
        earlier owner starts from the rows that this checkpoint covered: rows that the same line of jobs committed later
        are then hidden, rows of other lines never. For any other job `if_exists` decides, if the table has visible
        rows: TableError, adding to the rows, or replacing them.

        An owner that falls back to an older checkpoint claims again, with `restored_from=(job_id, checkpoint)`, or with
        the checkpoint from which it was started itself. `next_checkpoint_id` is then the first checkpoint that it can
        still take: checkpoints in between are never committed any more, even if their commit is in progress.

        `home` is the root of the job's checkpoints. `uncommitted` are files that the restored checkpoint covers and
        that were not committed; the first commit shows them too. Returns the end of the log. Raises FencedError if
        another job has claimed the table since.
        """
        with self._lock:
            for _ in range(RACES_MAX):
                self._check_not_gone(uncommitted)
                claim = self._tail.with_parts(self._claim_history).claim(
                    job_id, restored_from, if_exists, next_checkpoint_id
                )
                self._check_known(self._existing(), job_id)
                if claim is None or self._tail.append(self._claim_entry(job_id, claim, home, uncommitted)):
                    return self._head(job_id)
            raise self._lost_races("claim")

    def commit(self, job_id: JobId, checkpoint_id: CheckpointId, files: tuple[DataFile, ...]) -> TableHead:
        """Makes the files of a completed checkpoint visible. Repeated calls have no further effect. Returns the end of
        the log.

        Without files an entry is written only if the job's claim has not yet changed the visible rows.

        Raises FencedError if another job owns the table. Raises TableError if there is no owner, if the log has lost
        entries, or if the checkpoint was committed before with other files. Raises StorageError if it is unknown
        whether the commit exists: repeat the call then.
        """
        with self._lock:
            if self._tail.fold is None or self._tail.fold.owner != job_id or not files or self._tail.is_behind():
                self._tail.refresh()
            for _ in range(RACES_MAX):
                fold = self._existing()
                if fold.owner is None:
                    raise TableError(
                        f"the table at {self._store.url} is not the one that job {job_id!r} has claimed, because no "
                        "job has claimed it. The table or a part of its log was deleted while the job was running; "
                        "restore the job to write the table again"
                    )
                if fold.owner != job_id:
                    raise FencedError(owned_by(self._store.url, fold.owner, job_id))
                self._check_known(fold, job_id)
                if fold.is_decided(self._store.url, checkpoint_id, files):
                    self._follow()
                    return self._head(job_id)
                # Clocks of machines differ, but the time of a commit must not be before the previous commit's.
                at_ms = max(self._now_ms(), fold.newest_at_ms or 0)
                entry = TableEntry(
                    fold.seq + 1, TableEntryKind.COMMITTED, job_id, checkpoint_id, files, nonce=self._nonce, at_ms=at_ms
                )
                if self._tail.append(entry):
                    self._follow()
                    return self._head(job_id)
            raise self._lost_races("commit")

    def claim_compaction(self, job_id: JobId, line: JobId, owner: JobId | None) -> tuple[DataFile, ...]:
        """Makes the compaction `job_id` the owner of the table, if `owner` owns it now. Its only commit will replace
        the visible files of a line of jobs.

        Returns the files that it replaces, in order. Until it commits, or another job claims the table, nothing else is
        committed. Raises TableError if the first commit of the present owner will hide rows, FencedError if the table
        has another owner by now.
        """
        with self._lock:
            for _ in range(RACES_MAX):
                claim = self._tail.with_parts(self._claim_history).compaction(line)
                if self._existing().owner != owner:
                    raise FencedError(owned_by(self._store.url, self._existing().owner, owner))
                if self._tail.append(self._claim_entry(job_id, claim, None, ())):
                    return self._tail.with_parts(lambda claim=claim: self._tail.files_of(claim.replaces))  # type: ignore[misc]
            raise self._lost_races("claim")

    def take_compacting(self, job_id: JobId, nonce: str) -> int | None:
        """Registers the process with this nonce as the only one that may compact while its job owns the table.

        Returns a number that no other process gets, or None if the job is not the owner. Files that another process of
        the job has written for a compaction can no longer become part of the table.
        """
        with self._lock:
            for _ in range(RACES_MAX):
                self._tail.refresh()
                fold = self._existing()
                if fold.owner != job_id:
                    return None
                if fold.compactor == nonce:
                    return fold.compactor_seq
                self._tail.append(TableEntry(fold.seq + 1, TableEntryKind.COMPACTING, job_id, nonce=nonce))
            raise self._lost_races("claim")

    def compact(
        self, job_id: JobId, nonce: str, members: Collection[int], level: int, files: tuple[DataFile, ...]
    ) -> bool:
        """Replaces the owner's entries `members` by `files`, which have the same rows. Returns whether it did.

        Returns False if one of the entries is hidden or about to be, or if another process compacts. Raises
        StorageError if the outcome is unknown.
        """
        with self._lock:
            for _ in range(RACES_MAX):
                replaced = self._tail.with_parts(lambda: self._tail.entries_of(members))
                fold = self._existing()
                if not fold.may_compact(job_id, nonce, members):
                    return False
                rewrite = TableRewrite(
                    joined(members), sum(e.rows for e in replaced), max(e.position for e in replaced), level
                )
                at_ms = max(self._now_ms(), fold.newest_at_ms or 0)
                entry = TableEntry(
                    fold.seq + 1, TableEntryKind.COMPACTED, job_id, files=files, nonce=self._nonce, at_ms=at_ms,
                    rewrite=rewrite,
                )  # fmt: skip
                if self._tail.append(entry):
                    self._follow()
                    return True
            raise self._lost_races("commit")

    def vacuum(self, retention: Retention, *, dry_run: bool = False) -> tuple[dict[str, DataFile], int]:
        """Records in the log which entries lose their files. Returns the files that may then be deleted, by path.

        Also returns the oldest commit from which on every commit can be read. Files of earlier vacuums are included.
        `dry_run` writes nothing. Files that may be deleted are in no version that can still be read, neither here nor
        in a Delta table. Raises TableError if there is no table.
        """
        with self._lock:
            for _ in range(RACES_MAX):
                entries = self._tail.with_parts(lambda: self._tail.entries_after(-1))
                fold = self._existing()
                vacuum = vacuum_of(self._store.url, entries, fold, retention)
                if not dry_run and vacuum.gone != fold.vacuum.gone:
                    at_ms = max(self._now_ms(), fold.newest_at_ms or 0)
                    if not self._tail.append(
                        TableEntry(fold.seq + 1, TableEntryKind.VACUUMED, nonce=self._nonce, at_ms=at_ms, vacuum=vacuum)
                    ):
                        continue
                if not dry_run:
                    self._follow()
                deletable = deletable_files(entries, vacuum)
                if fold.info.delta_id is not None and deletable:
                    # If others have changed files, the Delta table still has files that a compaction here replaced.
                    needed = LogMirror(self._store.url, fold.info, self._tail).needed_files(retention.since_ms)
                    deletable = {path: file for path, file in deletable.items() if path not in needed}
                return deletable, vacuum.readable_from
            raise self._lost_races("vacuum")

    def cut(self, retention: Retention, files_there: Callable[[Iterable[str]], Collection[str]]) -> bool:
        """Drops entries from the log whose files a vacuum with this retention has deleted. Returns whether it did.

        `files_there` returns the paths that exist: while a file exists, its entry is kept. Raises TableError if there
        is no table.
        """
        with self._lock:
            for _ in range(RACES_MAX):
                entries = self._tail.with_parts(lambda: self._tail.entries_after(-1))
                fold = self._existing()
                cut = cut_of(self._store.url, entries, fold, retention)
                if cut is None or files_there(dropped_files(entries, cut)):
                    return False
                # Mirror first: afterwards the log no longer has what the Delta table shows.
                self._follow()
                if self._existing().seq != fold.seq:
                    continue  # Others have appended meanwhile, maybe enough for the cut to fill a hole.
                at_ms = max(self._now_ms(), fold.newest_at_ms or 0)
                entry = TableEntry(fold.seq + 1, TableEntryKind.CUT, nonce=self._nonce, at_ms=at_ms, cut=cut)
                if self._tail.append(entry):
                    return True
            raise self._lost_races("cut the log")

    def _follow(self) -> None:
        if self._tail.fold is None:
            # Another writer has truncated the log beyond what this one has read.
            self._tail.refresh()
        info = self._existing().info
        if info.delta_id is None:
            return
        if self._mirror is None or self._mirror.info != info:
            self._mirror = LogMirror(self._store.url, info, self._tail)
        self._mirror.follow()

    def _described(self, info: TableInfo, evolves: bool) -> TableInfo:
        """Returns the table's description, after comparing it with the job's description `info`. With `evolves`, new
        columns of `info` are added.

        Raises TableError if they conflict.
        """
        found = self._existing().info
        if evolves:
            return found.evolved(info, self._store.url)
        found.check_same(info, self._store.url)
        return found

    def _alter(self, info: TableInfo, evolves: bool) -> None:
        for _ in range(RACES_MAX):
            fold = self._existing()
            wanted = self._described(info, evolves)
            if wanted == fold.info:
                return
            self._tail.append(TableEntry(fold.seq + 1, TableEntryKind.ALTERED, info=wanted, nonce=self._nonce))
            self._tail.refresh()
        raise self._lost_races("alter the table")

    def _check_not_gone(self, files: Collection[DataFile]) -> None:
        """Raises TableError if a vacuum has deleted any of the files `files` of a restored checkpoint.

        Another job that was restored from the same checkpoint may have committed the files, and later jobs may have
        hidden them.
        """
        if not files or self._tail.fold is None or not self._tail.fold.vacuum.gone:
            return
        entries = self._tail.with_parts(lambda: self._tail.entries_after(-1))
        gone = deletable_files(entries, self._existing().vacuum)
        if lost := [file for file in files if file.path in gone]:
            raise TableError(
                f"a vacuum has deleted {len(lost)} files of the table at {self._store.url} that the restored "
                f"checkpoint covers (the first is {lost[0].path}): restore a newer one, or write to another url"
            )

    def _claim_entry(
        self, job_id: JobId, claim: TableClaim, home: str | None, files: tuple[DataFile, ...]
    ) -> TableEntry:
        fold = self._existing()
        seq = fold.seq + 1
        claim = replace(claim, home=claim.home if home is None else home)
        if files:
            rows = sum(file.rows for file in files)
            claim = replace(
                claim,
                own=added(claim.own, seq, fold.newest_bearing),
                shows=added(claim.shows, seq, fold.newest_bearing),
                shows_rows=claim.shows_rows + rows,
            )
        return TableEntry(seq, TableEntryKind.CLAIMED, job_id, files=files, claim=claim, nonce=self._nonce)

    def _lost_races(self, what: str) -> StorageError:
        return StorageError(
            f"could not {what} at {self._store.url}: another writer was first "
            f"{RACES_MAX} times. Try again, or let fewer jobs write to this table at a time"
        )

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
            for line, seqs in self._claim_history().shown_by_line().items()
        }

    def _versions(self) -> TableVersions:
        fold = self._existing()
        return TableVersions(self._store.url, self._tail.entries_after(-1), fold)

    def _claim_history(self) -> ClaimHistory:
        fold = self._existing()
        return ClaimHistory(self._store.url, self._tail.entries_after(-1), fold)
