"""The history of a table. `TableVersions`: the rows after each commit. `LogRewrites`: the effect of compactions.

Rules of versions:

- A commit is identified by the number of its log entry. No other commit of the table ever gets this number, whichever
  jobs are restored. Checkpoint numbers are not unique, since a restored job counts them from 1 again.
- The visible entries after a commit are the entries on which the newest claim before it was built, and all entries
  added since, except entries that a compaction since then has replaced.
- Rows that were hidden later were visible then, so the version of that commit has them.
- Where a vacuum has deleted files of a version, large files stand in for the small files that they were made of, if
  they still exist.
- Where a log was cut, the newest commit from before the cut is the oldest version. The cut stores what it showed.
- A time selects the newest commit made at or before it. Times never decrease along the log.

Rules of compactions:

- The files of a compaction have exactly the rows of the entries that it replaces. Replacing the entries by the
  compaction, or the reverse, therefore does not change the visible rows.
- A compaction replaces its original entries in a set only if the set contains all of them. Rows that a restored job
  hides are therefore never in a visible compacted file.
- Compactions replace earlier ones. To compact a set, they are applied oldest first; to undo them, newest first.
- A vacuum deletes small files whose rows are in a large one, or large files that are not shown any more.
- A compaction before the cut of a log counts as a commit: the entries that it replaced are no longer part of the log.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.entries import (
    Ranges,
    TableCut,
    TableEntry,
    TableEntryKind,
    TableFold,
    covers,
    members_of,
    ranges_of,
    without,
)
from tidegate.storage.tables.table_info import TableInfo

AsOf = int | dt.datetime
"""A version of a table: the number of a commit, or a time with a time zone."""

_CHANGES = (TableEntryKind.COMMITTED, TableEntryKind.COMPACTED)
"""Kinds of entries that change what a table shows."""
_WHAT = {
    TableEntryKind.CLAIMED: "a job became its owner there",
    TableEntryKind.COMPACTING: "a job began to compact small files there",
    TableEntryKind.ALTERED: "the table gained columns there",
    TableEntryKind.VACUUMED: "old files were deleted there",
    TableEntryKind.COMPACTED: "small files were compacted there",
    TableEntryKind.CUT: "older entries were dropped from the log there",
}
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class TableCommit:
    """A commit of a table.

    - `number` identifies the commit, and may be given as `as_of`.
    - `at` is the time of the commit, in UTC.
    - `job_id` and `checkpoint_id` name the checkpoint whose rows were committed.
    - `rows_added` and `files_added` count the rows and files of this commit. `rows` counts all rows that the table
      showed after it.
    - `shown` is whether the commit's rows are visible now, in its own files or in compacted files. It is False if a
      restored job has written them again.
    """

    number: int
    at: dt.datetime
    job_id: JobId
    checkpoint_id: CheckpointId
    rows_added: int
    files_added: int
    rows: int
    shown: bool


class TableVersions:
    """The versions of the table at `url`, computed from all entries of its log (oldest first) and the current table
    state.
    """

    def __init__(self, url: str, entries: Sequence[TableEntry], fold: TableFold) -> None:
        self._url = url
        self._entries = entries
        self._fold = fold
        self._cut = cut = fold.cut
        self._cut_at, self._oldest = (-1, 0) if cut is None else (cut.seq, cut.commit)
        self._since = [entry for entry in entries if entry.seq > self._cut_at]
        self._by_seq = {entry.seq: entry for entry in entries}
        self._bearing = [entry.seq for entry in entries if entry.files]
        self._commits = [
            entry for entry in entries if entry.kind is TableEntryKind.COMMITTED and entry.seq >= self._oldest
        ]
        self._changes = [entry.seq for entry in self._since if entry.kind in _CHANGES]

    def commits(self) -> tuple[TableCommit, ...]:
        """Returns every commit that is part of the log, oldest first."""
        found, rows = [], 0
        # A compaction of a table at rest is a commit, and may itself be compacted by now.
        visible = LogRewrites(self._entries, self._cut).holders(members_of(self._fold.shown, self._bearing))
        if self._cut is not None:
            oldest, rows = self._by_seq[self._cut.commit], self._cut.rows
            shows = not oldest.files or self._cut.commit_holder in visible
            found.append(self._commit(oldest, self._cut.commit_rows, shows))
        for entry in self._since:
            if entry.claim is not None:
                rows = entry.claim.shows_rows
            elif entry.rewrite is not None:
                rows += entry.rows - entry.rewrite.rows_before
            elif entry.kind is TableEntryKind.COMMITTED:
                rows += entry.rows
                found.append(self._commit(entry, rows, not entry.files or entry.seq in visible))
        return tuple(found)

    def shown_at(self, as_of: AsOf) -> tuple[int, Ranges]:
        """Returns the number of the commit that `as_of` selects, and the entries with the rows visible after that
        commit.

        Entries whose files a vacuum has deleted are replaced by entries with the same rows. Raises TableError if there
        is no such commit or some of its rows are gone, ConfigurationError for an invalid `as_of`.
        """
        number = self._found(as_of).seq
        return number, self._left_of(number, self._after_change(number))

    def info_at(self, number: int) -> TableInfo:
        """Returns the columns and settings of the table as they were at entry `number`."""
        earlier = (entry for entry in reversed(self._entries) if entry.seq <= number)
        info = next(entry.info for entry in earlier if entry.info is not None)
        assert info is not None
        return info

    def shown_after(self, seq: int) -> Ranges:
        """Returns the entries whose files were visible after log entry `seq`. Empty before the first commit.

        Raises TableError if a cut has dropped that part of the log.
        """
        if seq < self._oldest:
            raise self._too_old(f"what the table at {self._url} showed at entry {seq} of its log")
        at = bisect_right(self._changes, seq)
        if not at:
            return () if self._cut is None else self._cut.shown
        return self._after_change(self._changes[at - 1])

    def _left_of(self, number: int, shown: Ranges) -> Ranges:
        vacuum = self._fold.vacuum
        members = members_of(shown, self._bearing) if vacuum.gone else []
        if not any(covers(vacuum.gone, seq) for seq in members):
            return shown
        found = LogRewrites(self._entries, self._cut).whole(members, vacuum.gone)
        if found is None:
            raise TableError(
                f"rows of commit {number} of the table at {self._url} were deleted by a vacuum. Every commit from "
                f"{vacuum.readable_from} on can be read; see history()"
            )
        return ranges_of(found, self._bearing)

    def _after_change(self, number: int) -> Ranges:
        """Returns the entries that were visible after the commit or compaction `number`."""
        if self._cut is not None and number <= self._cut_at:
            return self._cut.shown  # Compactions since then have the same rows.
        earlier = (entry for entry in reversed(self._since) if entry.seq < number)
        claim = next((entry for entry in earlier if entry.claim is not None), None)
        if claim is not None:
            assert claim.claim is not None
            shown, since = claim.claim.shows, claim.seq
        else:
            assert self._cut is not None, "nothing is committed before the first claim"
            shown, since = self._cut.shown, self._cut_at
        # Between a claim and the next one there are commits and compactions of its job, and nothing else with files.
        shown = (*shown, (since + 1, number))
        for entry in self._since:
            if since < entry.seq <= number and entry.rewrite is not None:
                shown = without(shown, entry.rewrite.replaces)
        return shown

    def _found(self, as_of: AsOf) -> TableEntry:
        if isinstance(as_of, bool) or not isinstance(as_of, int | dt.datetime):
            raise ConfigurationError(f"as_of={as_of!r}: give the number of a commit, or a datetime with a time zone")
        if isinstance(as_of, dt.datetime) and as_of.utcoffset() is None:
            raise ConfigurationError(
                f"as_of={as_of.isoformat()} has no time zone, so it is ambiguous; give tzinfo=datetime.UTC"
            )
        if not self._commits:
            raise TableError(
                f"nothing was committed to the table at {self._url} yet, so there is no as_of={as_of}; remove as_of="
            )
        return self._by_number(as_of) if isinstance(as_of, int) else self._by_time(as_of)

    def _by_number(self, number: int) -> TableEntry:
        oldest, newest = self._commits[0].seq, self._commits[-1].seq
        if self._cut is not None and 0 < number < oldest:
            raise self._too_old(f"commit {number} of the table at {self._url}")
        if not oldest <= number <= newest:
            raise TableError(
                f"the table at {self._url} never had a commit {number}: give one of {oldest} to {newest}; see history()"
            )
        entry = self._by_seq.get(number)
        if entry is not None and entry.kind is TableEntryKind.COMMITTED:
            return entry
        before = max(commit.seq for commit in self._commits if commit.seq < number)
        # A cut may have dropped the entry.
        what = "the entry was no commit, and was dropped since" if entry is None else _WHAT[entry.kind]
        raise TableError(
            f"{number} is not a commit of the table at {self._url}: {what}. For the version at that point "
            f"give as_of={before}; see history()"
        )

    def _by_time(self, time: dt.datetime) -> TableEntry:
        for entry in reversed(self._commits):
            if _time_of(entry) <= time:
                return entry
        if self._cut is not None:
            raise self._too_old(f"what the table at {self._url} showed at {time.isoformat()}")
        oldest = self._commits[0]
        raise TableError(
            f"nothing had been committed to the table at {self._url} by {time.isoformat()}: its first commit, "
            f"{oldest.seq}, was made at {_time_of(oldest).isoformat()}; give a later time"
        )

    def _too_old(self, what: str) -> TableError:
        return TableError(
            f"{what} was deleted by a vacuum. Every commit from {self._oldest} on can be read; see history()"
        )

    def _commit(self, entry: TableEntry, rows: int, shown: bool) -> TableCommit:
        assert entry.job_id is not None and entry.checkpoint_id is not None
        return TableCommit(
            entry.seq,
            _time_of(entry),
            entry.job_id,
            entry.checkpoint_id,
            entry.rows,
            len(entry.files),
            rows,
            shown,
        )


def _time_of(commit: TableEntry) -> dt.datetime:
    assert commit.at_ms is not None, "every commit has a time"
    return _EPOCH + dt.timedelta(milliseconds=commit.at_ms)


class LogRewrites:
    """The compactions in a table's log: which entries each compaction replaces."""

    def __init__(self, entries: Sequence[TableEntry], cut: TableCut | None) -> None:
        bearing = [entry.seq for entry in entries if entry.files]
        self._line_of: dict[int, JobId] = {}
        self._replaced: dict[int, tuple[int, ...]] = {}
        """The replaced entries, by the entry of the compaction, oldest compaction first."""
        lines: dict[JobId, JobId] = {}
        at_rest: dict[JobId, TableEntry] = {}
        """Compactions of a table at rest claim it, and then commit."""
        for entry in entries:
            job_id = entry.job_id
            if entry.claim is not None and job_id is not None:
                lines[job_id] = entry.claim.line
                if entry.claim.replaces and (cut is None or entry.seq > cut.seq):
                    at_rest[job_id] = entry
            elif cut is not None and entry.seq <= cut.seq:
                continue
            elif entry.rewrite is not None and job_id is not None:
                self._replaced[entry.seq] = tuple(members_of(entry.rewrite.replaces, bearing))
                self._line_of[entry.seq] = lines[job_id]
            elif entry.kind is TableEntryKind.COMMITTED and job_id in at_rest:
                claim = at_rest[job_id].claim
                assert claim is not None
                self._replaced[entry.seq] = tuple(members_of(claim.replaces, bearing))
                self._line_of[entry.seq] = claim.line

    @property
    def replaced(self) -> Mapping[int, tuple[int, ...]]:
        """The entries that each compaction replaces, by the number of the compaction's entry, oldest first."""
        return self._replaced

    def compacted(self, members: Collection[int], line: JobId | None = None) -> set[int]:
        """Returns the set of entries in which entries that were compacted are replaced by the compacted entry. `line`
        limits this to the compactions of one line of jobs.
        """
        found = set(members)
        for seq, replaced in self._replaced.items():
            if (line is None or self._line_of[seq] == line) and found.issuperset(replaced):
                found.difference_update(replaced)
                found.add(seq)
        return found

    def whole(self, members: Collection[int], gone: Ranges, line: JobId | None = None) -> set[int] | None:
        """Returns entries with the same rows as `members`, compacted if possible, and without entries in `gone`.

        Returns None if some of the rows were deleted, so that no remaining entry has them.
        """
        found = self.compacted(members, line)
        for seq in reversed(self._replaced):
            if seq in found and covers(gone, seq):
                found.remove(seq)
                found.update(self._replaced[seq])
        return None if any(covers(gone, seq) for seq in found) else found

    def holders(self, members: Collection[int]) -> dict[int, int]:
        """Returns, for each original entry whose rows are in the set `members`, the member of the set that has these
        rows.
        """
        found = {seq: seq for seq in members}
        for seq in reversed(self._replaced):
            if seq in found:
                found |= dict.fromkeys(self._replaced[seq], found[seq])
        return found

    def originals(self, members: Collection[int]) -> set[int]:
        """Returns the set of entries in which each compaction is replaced by the entries that it compacted."""
        found = set(members)
        for seq in reversed(self._replaced):
            if seq in found:
                found.remove(seq)
                found.update(self._replaced[seq])
        return found
