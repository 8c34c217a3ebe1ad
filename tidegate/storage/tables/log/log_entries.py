"""`TableEntry`: an entry of a table's log; and sets of entries as ranges of their numbers.

Only entries with files matter to a set, so a range may span entries without files, such as claims. What a table shows
is then one range, however many jobs have added to it. Only what is hidden makes another range.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.table_info import TableInfo

Ranges = tuple[tuple[int, int], ...]
"""Ascending, both ends included."""


@wire
class TableEntryKind(enum.Enum):
    """What an entry of the log says."""

    CREATED = "created"
    CLAIMED = "claimed"
    COMMITTED = "committed"
    COMPACTING = "compacting"
    """A process of the owner's begins to compact: no other one can until the table has another owner."""
    COMPACTED = "compacted"
    VACUUMED = "vacuumed"
    ALTERED = "altered"
    """The table has got columns."""
    CUT = "cut"
    """Older entries that nothing needs any more are no part of the log from here on."""


@wire
@dataclass(frozen=True, slots=True)
class TableClaim:
    """What the first commit after a claim is built on.

    `line`: the first of the jobs that go on from one another; rows of a line are versions of one output. `own`: what
    the line has shown at the checkpoint that the job starts from. `shows`: what the table shows with the first commit
    besides the files of that commit, `shows_rows` rows. Files of the claim itself are in both.
    """

    line: JobId
    own: Ranges
    shows: Ranges
    shows_rows: int
    home: str | None = None
    """Where the job has its checkpoints, and so where it can be asked whether it lives."""
    overwrites: bool = False
    """Whether the line replaces what the table showed when it came."""
    falls_back_to: CheckpointId | None = None
    """Of an owner that goes on from an older checkpoint of its own."""
    next_checkpoint_id: int = 0
    """Checkpoints of the job below this one, and after the one that it falls back to, are never committed any more."""
    replaces: Ranges = ()
    """Of a compaction: what the line showed, the rows of which are in the files of its one commit."""


@wire
@dataclass(frozen=True, slots=True)
class TableRewrite:
    """What the files of a compaction stand for: the entries that it `replaces`, which had `rows_before` rows.

    `position`: where these rows are in the order of the table, as the newest entry that has brought any of them.
    `level`: how many compactions the rows have been through, at most.
    """

    replaces: Ranges
    rows_before: int
    position: int
    level: int


@wire
@dataclass(frozen=True, slots=True)
class TableVacuum:
    """What vacuums have taken away: the entries that have `gone`, and from which commit on each can be read."""

    gone: Ranges = ()
    readable_from: int = 0


@wire
@dataclass(frozen=True, slots=True)
class TableBase:
    """What a job goes on with that is restored from a checkpoint of `job_id`, `checkpoint_id` or a later one."""

    job_id: JobId
    checkpoint_id: CheckpointId
    own: Ranges


@wire
@dataclass(frozen=True, slots=True)
class TableCut:
    """What is left of a log up to entry `seq`, a commit or a compaction.

    Of these entries only those in `kept` are part of the log. Entries in `shown` are what the table showed with `seq`,
    `rows` rows. What a compaction among them has replaced does not matter any more.
    """

    seq: int
    kept: Ranges
    shown: Ranges
    rows: int
    commit: int
    """The newest commit up to `seq`. It is the oldest that can be read."""
    commit_rows: int
    """What the table showed with it."""
    commit_holder: int
    """The entry in `shown` with its rows."""
    bases: tuple[TableBase, ...]
    """The jobs that can be restored from checkpoints of then. From those of other jobs with older claims none can."""
    shown_now: Ranges
    shown_next: Ranges
    """What the table shows at the cut's own entry, and with the next commit: the same sets as before it, as ranges of
    the entries that are left. Otherwise equal sets would not have equal ranges."""
    newest_bearing: int
    """The newest entry that bears files and is left."""

    def keeps(self, seq: int) -> bool:
        """Whether an entry is part of the log."""
        return seq > self.seq or covers(self.kept, seq)


@wire
@dataclass(frozen=True, slots=True)
class TableEntry:
    """One entry.

    The first and alterations have `info`, commits have a checkpoint, claims a `claim`, compactions a `rewrite`, vacuums
    a `vacuum`, and cuts a `cut`.

    Files of a claim are those that the restored checkpoint covers and nobody had committed. `nonce` is the
    writer's own. `at_ms`: when what is shown has changed, since the epoch; never before the time of an earlier entry.
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
        """Rows in its files."""
        return sum(file.rows for file in self.files)

    @property
    def position(self) -> int:
        """Where its rows are in the order of the table."""
        return self.seq if self.rewrite is None else self.rewrite.position


def in_order(entry: TableEntry) -> int:
    """What entries are sorted by, so that their rows are in the order of the table."""
    return entry.position


def covers(ranges: Ranges, seq: int) -> bool:
    """Whether an entry that bears files is in the set."""
    at = bisect_right(ranges, seq, key=lambda bounds: bounds[0])
    return at > 0 and seq <= ranges[at - 1][1]


def ranges_of(members: Collection[int], bearing: Iterable[int]) -> Ranges:
    """The set of `members`; `bearing` are all entries that bear files, ascending."""
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
    """The set of `members`, where nobody knows which entries between them bear files."""
    found: list[tuple[int, int]] = []
    for seq in sorted(members):
        if found and found[-1][1] == seq - 1:
            found[-1] = (found[-1][0], seq)
        else:
            found.append((seq, seq))
    return tuple(found)


def added(ranges: Ranges, seq: int, newest_bearing: int) -> Ranges:
    """The set with an entry that is newer than all that bear files, of which `newest_bearing` was the newest."""
    if ranges and newest_bearing <= ranges[-1][1]:
        return (*ranges[:-1], (ranges[-1][0], seq))
    return (*ranges, (seq, seq))


def without(ranges: Ranges, gone: Ranges) -> Ranges:
    """The set without the members of another one."""
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
    """The members of a set, ascending; `bearing` are all entries that bear files, ascending."""
    return [seq for first, last in ranges for seq in bearing[bisect_left(bearing, first) : bisect_right(bearing, last)]]
