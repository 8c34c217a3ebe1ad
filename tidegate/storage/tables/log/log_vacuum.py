"""Which entries of a table's log give up their files in a vacuum; pure.

Rules:

- Whatever the table has shown since some moment is kept: readers that began then go on, every commit since can be read,
  and every checkpoint since restored. So are the newest commits, what shows now, and what the next commit shows.
- So is what the owner may still go back to: those of its checkpoints that are there, or else where it was started.
- Everything else that is hidden goes, for good. The entry of the vacuum names all that has gone, in it and in earlier
  ones. It comes before anything is deleted, and every claim and every reader looks at it: nobody builds on what has
  gone.
- What has gone is gone entry by entry. A file goes when none of the entries that name it is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.ids import CheckpointId
from tidegate.storage.tables.log.log_entries import (
    TableEntry,
    TableEntryKind,
    TableVacuum,
    covers,
    members_of,
    ranges_of,
)
from tidegate.storage.tables.log.log_fold import TableFold
from tidegate.storage.tables.log.log_lineage import TableLineage
from tidegate.storage.tables.log.log_rewrites import LogRewrites
from tidegate.storage.tables.log.log_versions import TableVersions


@dataclass(frozen=True, slots=True)
class Retention:
    """What a vacuum keeps: what has shown since `since_ms`, the newest commits, and the owner's checkpoints."""

    since_ms: int
    commits: int = 1
    checkpoints: tuple[CheckpointId, ...] = ()


def vacuum_of(url: str, entries: Sequence[TableEntry], fold: TableFold, retention: Retention) -> TableVacuum:
    """What has gone after a vacuum of the table at `url`."""
    assert retention.commits >= 1
    commits = [entry.seq for entry in entries if entry.kind is TableEntryKind.COMMITTED][-retention.commits :]
    if not commits:
        return fold.vacuum
    start = start_of(entries, fold, retention.since_ms)
    if fold.cut is not None:
        commits = [commit for commit in commits if commit >= fold.cut.commit]
    bearing = [entry.seq for entry in entries if entry.files]
    versions, rewrites = TableVersions(url, entries, fold), LogRewrites(entries, fold.cut)
    kept = {seq for seq in bearing if seq > start}
    kept.update(members_of(versions.shown_after(start), bearing), members_of(fold.shown, bearing))
    for commit in commits:
        # Of those before that moment the rows are kept, in whatever files they are.
        if commit < start:
            kept.update(rewrites.whole(members_of(versions.shown_after(commit), bearing), fold.vacuum.gone) or ())
    for entry in entries:
        claim = entry.claim
        if claim is None:
            continue
        starts_there = entry.job_id == fold.owner and not retention.checkpoints
        if entry.seq > start or starts_there:
            kept.update(members_of(claim.own, bearing))
        if entry.seq > start:
            kept.update(members_of(claim.shows, bearing))
    if fold.owner is not None:
        lineage = TableLineage(url, entries, fold)
        for checkpoint_id in retention.checkpoints:
            kept.update(lineage.restorable(fold.owner, checkpoint_id))
    gone = [seq for seq in bearing if seq not in kept or covers(fold.vacuum.gone, seq)]
    return TableVacuum(ranges_of(set(gone), bearing), max(min(start, *commits), fold.vacuum.readable_from))


def deletable_files(entries: Iterable[TableEntry], vacuum: TableVacuum) -> dict[str, DataFile]:
    """The files that no entry names any more which is left, by path."""
    gone: dict[str, DataFile] = {}
    left: set[str] = set()
    for entry in entries:
        if covers(vacuum.gone, entry.seq):
            gone |= {file.path: file for file in entry.files}
        else:
            left.update(file.path for file in entry.files)
    return {path: file for path, file in gone.items() if path not in left}


def start_of(entries: Sequence[TableEntry], fold: TableFold, since_ms: int) -> int:
    """The newest commit or compaction that was made by then, or else the oldest one of which the log knows all."""
    start = 0
    for entry in reversed(entries):
        if fold.cut is not None and entry.seq <= fold.cut.seq:
            return fold.cut.seq
        if entry.kind in (TableEntryKind.COMMITTED, TableEntryKind.COMPACTED):
            start = entry.seq
            if (entry.at_ms or 0) <= since_ms:
                break
    return start
