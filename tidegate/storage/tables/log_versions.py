"""`TableVersions`: what a table showed after each of its commits, as its whole log tells.

Rules:

- A commit is known by the number of its entry: no other commit of the table ever gets it, whichever jobs are restored.
  Checkpoints would not do, since a restored job counts them from 1 again.
- What a table shows with a commit is what the newest claim before it was built on, and all commits since.
- Rows that were hidden later showed then: as of that commit they do.
- As of a time, the newest commit that was made by then counts. Times never go back along the log. Commits that were
  made before entries had times are found by their number.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log_entries import Ranges, TableEntry, TableEntryKind, covers

AsOf = int | dt.datetime
"""The number of a commit, or a time with a time zone."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class TableCommit:
    """A commit of a table.

    `number` tells it from all others, and may be given as `as_of`. `at` is when it was made; None in a table that is
    older than these times. `rows_added` and `files_added` are its own; `rows` are those of all files that the table
    showed with it. `shown`: whether its rows show now; not where a restored job has written them again.
    """

    number: int
    at: dt.datetime | None
    job_id: JobId
    checkpoint_id: CheckpointId
    rows_added: int
    files_added: int
    rows: int
    shown: bool


class TableVersions:
    """All entries of the log of the table at `url`, the first one first, and what the table shows now."""

    def __init__(self, url: str, entries: Sequence[TableEntry], shown: Ranges) -> None:
        self._url = url
        self._entries = entries
        self._shown = shown
        self._commits = [entry for entry in entries if entry.kind is TableEntryKind.COMMITTED]

    def commits(self) -> tuple[TableCommit, ...]:
        """Every commit, oldest first."""
        found, rows = [], 0
        for entry in self._entries:
            if entry.claim is not None:
                rows = entry.claim.shows_rows
            elif entry.kind is TableEntryKind.COMMITTED:
                rows += entry.rows
                found.append(self._commit(entry, rows))
        return tuple(found)

    def shown_at(self, as_of: AsOf) -> tuple[int, Ranges]:
        """The number of the commit that counts, and the entries whose files the table showed with it.

        Raises TableError if there is none, ConfigurationError for what is neither a number nor a time.
        """
        number = self._found(as_of).seq
        claim = next(entry for entry in reversed(self._entries[:number]) if entry.claim is not None)
        assert claim.claim is not None
        # Between a claim and the next one there are commits of its job, and nothing else.
        return number, (*claim.claim.shows, (claim.seq + 1, number))

    def shown_after(self, seq: int) -> Ranges:
        """The entries whose files the table showed when `seq` was its newest entry; none before the first commit."""
        commits = [commit.seq for commit in self._commits if commit.seq <= seq]
        return self.shown_at(commits[-1])[1] if commits else ()

    def _found(self, as_of: AsOf) -> TableEntry:
        if isinstance(as_of, bool) or not isinstance(as_of, int | dt.datetime):
            raise ConfigurationError(f"as_of={as_of!r}: give the number of a commit, or a datetime with a time zone")
        if isinstance(as_of, dt.datetime) and as_of.utcoffset() is None:
            raise ConfigurationError(
                f"as_of={as_of.isoformat()} has no time zone, so it is no certain moment; give tzinfo=datetime.UTC"
            )
        if not self._commits:
            raise TableError(f"nothing was committed to the table at {self._url} yet, so there is no as_of={as_of}")
        return self._by_number(as_of) if isinstance(as_of, int) else self._by_time(as_of)

    def _by_number(self, number: int) -> TableEntry:
        oldest, newest = self._commits[0].seq, self._commits[-1].seq
        if not oldest <= number <= newest:
            raise TableError(
                f"the table at {self._url} never had a commit {number}: they are {oldest} to {newest}; see history()"
            )
        entry = self._entries[number]
        if entry.kind is TableEntryKind.COMMITTED:
            return entry
        before = max(commit.seq for commit in self._commits if commit.seq < number)
        raise TableError(
            f"{number} is no commit of the table at {self._url}: a job became its owner there. What it showed then is "
            f"as_of={before}; see history()"
        )

    def _by_time(self, time: dt.datetime) -> TableEntry:
        for entry in reversed(self._commits):
            if entry.at_ms is None:
                raise TableError(
                    f"as_of={time.isoformat()}: commits up to {entry.seq} of the table at {self._url} were made by a "
                    "tidegate that noted no times; give the number of one of them, see history()"
                )
            if _time(entry.at_ms) <= time:
                return entry
        oldest = self._commits[0]
        assert oldest.at_ms is not None
        raise TableError(
            f"nothing had been committed to the table at {self._url} by {time.isoformat()}: its first commit, "
            f"{oldest.seq}, was made at {_time(oldest.at_ms).isoformat()}"
        )

    def _commit(self, entry: TableEntry, rows: int) -> TableCommit:
        assert entry.job_id is not None and entry.checkpoint_id is not None
        return TableCommit(
            entry.seq,
            None if entry.at_ms is None else _time(entry.at_ms),
            entry.job_id,
            entry.checkpoint_id,
            entry.rows,
            len(entry.files),
            rows,
            not entry.files or covers(self._shown, entry.seq),
        )


def _time(at_ms: int) -> dt.datetime:
    return _EPOCH + dt.timedelta(milliseconds=at_ms)
