"""`TableEntry`: an entry of a table's commit log. `TableFold`: the state of a table, computed from the entries of its
log.

Sets of entries are stored as ranges of their numbers. Only entries with data files matter to a set, so a range may span
entries without files, such as claims. The visible entries of a table are then one range, unless hidden entries split
it.

Rules of the fold:

- A claim changes the owner at once. It changes what the table shows together with the first commit after it, in that
  one entry: what the claim was built on, its files, and the files of the commit. Until then readers see the old rows.
- Only the owner commits, each checkpoint once, in the order of their numbers. When the owner falls back to an older
  checkpoint, later checkpoints of the time before are never committed, also if a late request for one arrives.
- A compaction next to a running job replaces only visible entries. It is refused while a claim is about to change what
  is shown. Of the owner's processes only one may compact: the newest one that wrote a COMPACTING entry. That process
  may therefore delete unfinished files of earlier ones.
- A vacuum does not change the visible rows. Entries that it removed are never shown again. A cut changes nothing for
  readers: the entries that it drops are not shown, and cannot be shown again.
- The fold does not grow with the number of commits. Only hidden commits, and the gaps that compactions leave, split a
  range.
"""

from __future__ import annotations

import enum
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.codec import encode, wire
from tidegate.storage.errors import CorruptionError, TableError
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.table_info import TableInfo

Ranges = tuple[tuple[int, int], ...]
"""A set of entry numbers as ascending ranges, both ends included."""


@wire
class TableEntryKind(enum.Enum):
    """The kinds of entries in a table's log."""

    CREATED = "created"
    CLAIMED = "claimed"
    COMMITTED = "committed"
    COMPACTING = "compacting"
    """A process of the owner starts to compact. Other processes cannot compact until the table has another owner."""
    COMPACTED = "compacted"
    VACUUMED = "vacuumed"
    ALTERED = "altered"
    """The table has gained columns."""
    CUT = "cut"
    """Older entries that are no longer needed are not part of the log from this entry on."""


@wire
@dataclass(frozen=True, slots=True)
class TableClaim:
    """A job's claim on a table: it defines the table content on which the job's first commit builds.

    - `line` is the first of a series of jobs, each of which was restored from a checkpoint of an earlier one. It
      identifies the series, whose jobs write one output.
    - `own` are the entries of the line that were visible at the checkpoint from which the job starts.
    - `shows` are the entries that are visible after the first commit, in addition to that commit. They have
      `shows_rows` rows. Files of the claim's own entry are in both sets.
    """

    line: JobId
    own: Ranges
    shows: Ranges
    shows_rows: int
    home: str | None = None
    """URL of the job's checkpoint storage, whose lease shows whether the job is alive. None if unknown."""
    overwrites: bool = False
    """True if the line replaces all rows that were visible before."""
    falls_back_to: CheckpointId | None = None
    """The job's own older checkpoint from which the owner continues, or None if it does not fall back."""
    next_checkpoint_id: int = 0
    """After a fallback: checkpoints between `falls_back_to` and this number are never committed."""
    replaces: Ranges = ()
    """For a compaction: the visible entries of the line that its one commit replaces. The commit has the same rows."""


@wire
@dataclass(frozen=True, slots=True)
class TableRewrite:
    """The entries that a compaction replaces, which had `rows_before` rows.

    `position` is where these rows are in the order of the table, given as the newest entry that originally added any of
    them. `level` is the greatest number of compactions that any of the rows has been through.
    """

    replaces: Ranges
    rows_before: int
    position: int
    level: int


@wire
@dataclass(frozen=True, slots=True)
class TableVacuum:
    """The result of all vacuums so far: the entries whose files were deleted (`gone`), and the first commit that can
    still be read.
    """

    gone: Ranges = ()
    readable_from: int = 0


@wire
@dataclass(frozen=True, slots=True)
class TableBase:
    """The entries (`own`) with which a job continues that is restored from this checkpoint of `job_id` or a later
    one.
    """

    job_id: JobId
    checkpoint_id: CheckpointId
    own: Ranges


@wire
@dataclass(frozen=True, slots=True)
class TableCut:
    """The remainder of a log up to entry `seq`, which is a commit or a compaction.

    Of these entries only those in `kept` are part of the log. The entries in `shown` were visible at entry `seq`, and
    had `rows` rows. Entries that compactions among them replaced are dropped.
    """

    seq: int
    kept: Ranges
    shown: Ranges
    rows: int
    commit: int
    """The newest commit up to `seq`, which is the oldest commit that can be read."""
    commit_rows: int
    """Number of rows that the table showed after that commit."""
    commit_holder: int
    """The entry in `shown` that contains the rows of that commit."""
    bases: tuple[TableBase, ...]
    """The jobs that can be restored from checkpoints of that time. Other jobs with older claims cannot be restored."""
    shown_now: Ranges
    shown_next: Ranges
    """The entries shown at the cut's own entry (`shown_now`), and with the next commit (`shown_next`).

    These are the same sets as before the cut, as ranges of the remaining entries. Otherwise equal sets would not have
    equal ranges.
    """
    newest_bearing: int
    """The newest remaining entry with files."""

    def keeps(self, seq: int) -> bool:
        """Returns whether the entry with number `seq` is still part of the log."""
        return seq > self.seq or covers(self.kept, seq)


@wire
@dataclass(frozen=True, slots=True)
class TableEntry:
    """An entry of a table's log.

    The first entry and alterations have `info`, commits a checkpoint, claims have a `claim`, compactions a `rewrite`,
    vacuums a `vacuum`, and cuts a `cut`.

    - Files of a claim are files that the restored checkpoint covers and that were not committed.
    - `nonce` identifies the writer.
    - `at_ms` is when the visible rows changed, in ms since the epoch. It is never before the time of an earlier entry.
      Commits, compactions, vacuums and cuts have it.
    """

    seq: int
    kind: TableEntryKind
    job_id: JobId | None = None
    checkpoint_id: CheckpointId | None = None
    files: tuple[DataFile, ...] = ()
    claim: TableClaim | None = None
    info: TableInfo | None = None
    nonce: str = ""
    at_ms: int | None = None
    rewrite: TableRewrite | None = None
    vacuum: TableVacuum | None = None
    cut: TableCut | None = None

    @property
    def rows(self) -> int:
        """Returns the number of rows in the entry's files."""
        return sum(file.rows for file in self.files)

    @property
    def position(self) -> int:
        """Returns the position of the entry's rows in the order of the table."""
        return self.seq if self.rewrite is None else self.rewrite.position


def in_order(entry: TableEntry) -> int:
    """Returns a sort key that sorts entries by the position of their rows in the table."""
    return entry.position


def covers(ranges: Ranges, seq: int) -> bool:
    """Returns whether a set of ranges contains an entry number. The entry must have files."""
    at = bisect_right(ranges, seq, key=lambda bounds: bounds[0])
    return at > 0 and seq <= ranges[at - 1][1]


def ranges_of(members: Collection[int], bearing: Iterable[int]) -> Ranges:
    """Returns a set of entry numbers as ranges. `bearing` are the numbers of all entries with files, ascending."""
    found: list[tuple[int, int]] = []
    joined = False
    for seq in bearing:
        if seq not in members:
            joined = False
        elif joined:
            found[-1] = (found[-1][0], seq)
        else:
            found.append((seq, seq))
            joined = True
    return tuple(found)


def joined(members: Iterable[int]) -> Ranges:
    """Returns a set of entry numbers as ranges of consecutive numbers.

    Used if it is unknown which entries between them have files.
    """
    found: list[tuple[int, int]] = []
    for seq in sorted(members):
        if found and found[-1][1] == seq - 1:
            found[-1] = (found[-1][0], seq)
        else:
            found.append((seq, seq))
    return tuple(found)


def added(ranges: Ranges, seq: int, newest_bearing: int) -> Ranges:
    """Returns a set of ranges with the new entry `seq` added.

    `newest_bearing` was the newest entry with files before.
    """
    if ranges and newest_bearing <= ranges[-1][1]:
        return (*ranges[:-1], (ranges[-1][0], seq))
    return (*ranges, (seq, seq))


def without(ranges: Ranges, gone: Ranges) -> Ranges:
    """Returns a set of ranges without the entries of the set `gone`."""
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        at = max(0, bisect_right(gone, first, key=lambda bounds: bounds[0]) - 1)
        while at < len(gone) and gone[at][0] <= last:
            if gone[at][1] >= first:
                if gone[at][0] > first:
                    found.append((first, gone[at][0] - 1))
                first = gone[at][1] + 1
            at += 1
        if first <= last:
            found.append((first, last))
    return tuple(found)


def members_of(ranges: Ranges, bearing: Sequence[int]) -> list[int]:
    """Returns the entry numbers in a set of ranges, ascending.

    `bearing` are the numbers of all entries with files, ascending.
    """
    return [seq for first, last in ranges for seq in bearing[bisect_left(bearing, first) : bisect_right(bearing, last)]]


log = logging.getLogger(__name__)


@wire
@dataclass(frozen=True, slots=True)
class TableFold:
    """State of a table, computed from all log entries up to `seq`.

    `entry_checksum` is the checksum of that entry's file.
    """

    seq: int
    entry_checksum: str
    info: TableInfo
    shown: Ranges = ()
    rows: int = 0
    newest_bearing: int = 0
    """Number of the newest entry with files."""
    claims: int = 0
    owner: JobId | None = None
    claim: TableClaim | None = None
    pending: bool = False
    """True if no checkpoint was committed since the newest claim."""
    newest_commit: CheckpointId | None = None
    """The newest checkpoint that the owner has committed."""
    newest_files: str = ""
    newest_at_ms: int | None = None
    """Time, in ms, at which the visible rows last changed."""
    compactor: str = ""
    """The nonce of the owner's process that may compact; empty if there is none."""
    compactor_seq: int = 0
    """Number of the COMPACTING entry in which that process announced that it compacts."""
    vacuum: TableVacuum = field(default_factory=TableVacuum)
    """The entries whose files were deleted by vacuums."""
    cut: TableCut | None = None
    """The cut with which the log begins, or None if it begins with its first entry."""

    @staticmethod
    def first(entry: TableEntry, checksum: str) -> TableFold:
        """Returns the table state after the first entry of the log."""
        assert entry.info is not None
        return TableFold(entry.seq, checksum, entry.info)

    def after(self, entry: TableEntry, checksum: str) -> TableFold:
        """Returns the table state after one more entry of the log."""
        assert entry.seq == self.seq + 1
        fold = replace(self, seq=entry.seq, entry_checksum=checksum)
        match entry.kind:
            case TableEntryKind.CLAIMED:
                return fold._claimed(entry)
            case TableEntryKind.COMPACTING:
                return replace(fold, compactor=entry.nonce, compactor_seq=entry.seq)
            case TableEntryKind.ALTERED:
                assert entry.info is not None
                return replace(fold, info=entry.info)
            case TableEntryKind.VACUUMED:
                assert entry.vacuum is not None
                return replace(fold, vacuum=entry.vacuum)
            case TableEntryKind.CUT:
                assert entry.cut is not None
                return fold._after_cut(entry.cut)
            case TableEntryKind.COMPACTED:
                return fold._compacted(entry)
            case _:
                return fold._committed(entry)

    @property
    def shown_next(self) -> Ranges:
        """Returns the entries that will be visible after the next commit, besides the commit itself."""
        return self.claim.shows if self.pending and self.claim is not None else self.shown

    @property
    def switches(self) -> bool:
        """Returns whether the next commit changes the visible rows even if it has no files."""
        return self.shown_next != self.shown

    def may_compact(self, job_id: JobId, nonce: str, replaced: Iterable[int]) -> bool:
        """Returns whether the process `nonce` of a job may replace the entries `replaced` by a compaction."""
        in_charge = self.owner == job_id and self.compactor == nonce and not self.pending
        return in_charge and all(covers(self.shown, seq) for seq in replaced)

    def is_decided(self, url: str, checkpoint_id: CheckpointId, files: tuple[DataFile, ...]) -> bool:
        """Returns whether a checkpoint of the owner needs no commit to the table.

        True if the checkpoint was committed before, can never be committed, or would change nothing. Raises TableError
        if the checkpoint was committed with other files.
        """
        assert self.claim is not None and self.owner is not None
        if checkpoint_id == self.newest_commit and self.newest_files != fingerprint(files):
            raise TableError(
                f"checkpoint {checkpoint_id} of {self.owner!r} was committed to {url} with other files before"
                "; write to another url"
            )
        if self.newest_commit is not None and checkpoint_id <= self.newest_commit:
            return True
        back_to = self.claim.falls_back_to
        if back_to is not None and back_to < checkpoint_id < self.claim.next_checkpoint_id:
            log.warning(
                "checkpoint %d of %s is not committed to %s: the job has continued from checkpoint %d",
                checkpoint_id, self.owner, url, back_to,
            )  # fmt: skip
            return True
        return not files and not self.switches

    def _claimed(self, entry: TableEntry) -> TableFold:
        assert entry.claim is not None
        same = entry.job_id == self.owner
        return replace(
            self,
            claims=self.claims + 1,
            owner=entry.job_id,
            claim=entry.claim,
            pending=True,
            newest_bearing=entry.seq if entry.files else self.newest_bearing,
            newest_commit=self.newest_commit if same else None,
            newest_files=self.newest_files if same else "",
            compactor=self.compactor if same else "",
        )

    def _committed(self, entry: TableEntry) -> TableFold:
        if self.claim is None or entry.job_id != self.owner:
            raise CorruptionError(
                f"entry {entry.seq} of a table's log is by {entry.job_id!r}, not by {self.owner!r}"
                "; restore the log from a copy of the table"
            )
        shown, rows = self.shown_next, self.claim.shows_rows if self.pending else self.rows
        return replace(
            self,
            shown=added(shown, entry.seq, self.newest_bearing) if entry.files else shown,
            rows=rows + entry.rows,
            newest_bearing=entry.seq if entry.files else self.newest_bearing,
            pending=False,
            newest_commit=entry.checkpoint_id,
            newest_files=fingerprint(entry.files),
            newest_at_ms=entry.at_ms,
        )

    def _after_cut(self, cut: TableCut) -> TableFold:
        claim = self.claim
        if claim is not None and self.pending:
            claim = replace(claim, shows=cut.shown_next)
        return replace(self, cut=cut, shown=cut.shown_now, claim=claim, newest_bearing=cut.newest_bearing)

    def _compacted(self, entry: TableEntry) -> TableFold:
        rewrite = entry.rewrite
        if rewrite is None or self.pending or entry.job_id != self.owner:
            raise CorruptionError(
                f"entry {entry.seq} of a table's log is a compaction that is not allowed there"
                "; restore the log from a copy of the table"
            )
        shown = without(self.shown, rewrite.replaces)
        return replace(
            self,
            shown=added(shown, entry.seq, self.newest_bearing) if entry.files else shown,
            rows=self.rows - rewrite.rows_before + entry.rows,
            newest_bearing=entry.seq if entry.files else self.newest_bearing,
            newest_at_ms=entry.at_ms,
        )


def fingerprint(files: tuple[DataFile, ...]) -> str:
    """Returns a checksum that distinguishes the files of one commit from the files of another."""
    return checksum_of(encode(files))
