"""Decides which data files a table no longer needs (vacuum), and which entries its log no longer needs (cut). Pure
functions.

Rules of a vacuum:

- Everything that the table has shown since a given moment is kept: readers that began then can continue, every commit
  since can be read, and every checkpoint since can be restored. The newest commits are kept too, and all files that are
  visible now or with the next commit.
- The rows of checkpoints to which the owner may still fall back are kept: its existing checkpoints, or else the
  checkpoint from which it was started.
- The files of all other hidden entries are deleted. The vacuum's entry in the log lists all entries that have ever lost
  their files. It is written before any file is deleted, and claims and readers do not use these entries any more.
- Entries lose their files one by one. A file is deleted when no remaining entry names it.

A vacuum leaves the entries that named deleted files. A cut drops these entries, so that the length of a log depends on
the retained history of its table, and not on the table's age. Rules of a cut:

- The log is cut at the oldest version that has to be readable. Of the entries up to there the cut keeps what the table
  showed then, the newest commit among them, the entries that define the table, and the first claim of each job, so that
  every job stays known.
- The entry of the cut names the entries that are kept. Every reader of the log ignores all other entries from then on,
  also where they are still in a part. The content of the log therefore does not depend on which parts were already
  rewritten.
- The cut stores what the rest of the log builds on: the visible entries, and for each line of jobs with visible rows
  the newest job and checkpoint that covered exactly these rows. A job that restores that checkpoint, or a later one,
  finds its rows.
- An entry is dropped only if a vacuum has declared its files deleted. If a claim, or a checkpoint of the owner, could
  still go back behind the cut, the log is not cut.
- The log is cut only if it saves enough: at least `DROPPED_MIN` entries are dropped, and at least half the number of
  kept entries.
- Each job keeps an entry, so a cut grows with the number of jobs. A cut that would be too large is not made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.codec import encode
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.claims import ClaimHistory
from tidegate.storage.tables.log.entries import (
    TableBase,
    TableCut,
    TableEntry,
    TableEntryKind,
    TableFold,
    TableVacuum,
    covers,
    joined,
    members_of,
    ranges_of,
)
from tidegate.storage.tables.log.versions import LogRewrites, TableVersions


@dataclass(frozen=True, slots=True)
class Retention:
    """The files that a vacuum must keep: files visible since `since_ms`, in the newest `commits`, or in the owner's
    `checkpoints`.
    """

    since_ms: int
    commits: int = 1
    checkpoints: tuple[CheckpointId, ...] = ()


def vacuum_of(url: str, entries: Sequence[TableEntry], fold: TableFold, retention: Retention) -> TableVacuum:
    """Returns the entries without files after a vacuum of the table at `url`, including entries of earlier vacuums."""
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
        # The rows of commits before that moment are kept, in the original or in compacted files.
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
        history = ClaimHistory(url, entries, fold)
        for checkpoint_id in retention.checkpoints:
            kept.update(history.restorable(fold.owner, checkpoint_id))
    gone = [seq for seq in bearing if seq not in kept or covers(fold.vacuum.gone, seq)]
    return TableVacuum(ranges_of(set(gone), bearing), max(min(start, *commits), fold.vacuum.readable_from))


def deletable_files(entries: Iterable[TableEntry], vacuum: TableVacuum) -> dict[str, DataFile]:
    """Returns the data files, by path, that only entries removed by vacuums name."""
    gone: dict[str, DataFile] = {}
    left: set[str] = set()
    for entry in entries:
        if covers(vacuum.gone, entry.seq):
            gone |= {file.path: file for file in entry.files}
        else:
            left.update(file.path for file in entry.files)
    return {path: file for path, file in gone.items() if path not in left}


def start_of(entries: Sequence[TableEntry], fold: TableFold, since_ms: int) -> int:
    """Returns the number of the newest commit or compaction at or before `since_ms`, or else of the oldest one that
    the log fully covers.
    """
    start = 0
    for entry in reversed(entries):
        if fold.cut is not None and entry.seq <= fold.cut.seq:
            return fold.cut.seq
        if entry.kind in (TableEntryKind.COMMITTED, TableEntryKind.COMPACTED):
            start = entry.seq
            if (entry.at_ms or 0) <= since_ms:
                break
    return start


DROPPED_MIN = 10
CUT_BYTES_MAX = 256 * 1024
"""Limit in bytes of an encoded cut.

Every snapshot contains the cut, with the kept entries and a base for each line of jobs.
"""


def cut_of(url: str, entries: Sequence[TableEntry], fold: TableFold, retention: Retention) -> TableCut | None:
    """Returns the cut to make in the log of the table at `url` after a vacuum with the same retention.

    Returns None if the log stays whole.
    """
    at = _place(entries, fold, retention)
    if at is None:
        return None
    seq, commit = at
    before = [entry for entry in entries if entry.seq <= seq]
    bearing = [entry.seq for entry in entries if entry.files]
    versions = TableVersions(url, entries, fold)
    shown = set(members_of(versions.shown_after(seq), bearing))
    if any((number in shown) == covers(fold.vacuum.gone, number) for number in bearing if number <= seq):
        return None  # Something else can still be shown again, or a vacuum has gone further.
    bases = _bases(url, before, fold, shown)
    if not _is_settled(entries, fold, retention.checkpoints, seq, {base.job_id: base for base in bases}):
        return None
    kept = {*shown, commit, *_always_kept(before)}
    dropped = len(before) - len(kept)
    if dropped < max(DROPPED_MIN, len(kept) // 2):
        return None
    commit_rows = next(known.rows for known in versions.commits() if known.number == commit)
    rows, holder, since = commit_rows, commit, commit
    if fold.cut is not None and commit == fold.cut.commit:
        rows, holder, since = fold.cut.rows, fold.cut.commit_holder, fold.cut.seq
    rows += sum(e.rows - e.rewrite.rows_before for e in before if e.seq > since and e.rewrite is not None)
    holder = LogRewrites(before, fold.cut).holders(shown).get(holder, holder)
    left = [number for number in bearing if number > seq or number in kept]
    shown_now, shown_next = (
        ranges_of(set(members_of(ranges, bearing)), left) for ranges in (fold.shown, fold.shown_next)
    )
    cut = TableCut(
        seq, joined(kept), joined(shown), rows, commit, commit_rows, holder, tuple(bases),
        shown_now=shown_now, shown_next=shown_next, newest_bearing=left[-1] if left else 0,
    )  # fmt: skip
    return cut if len(encode(cut)) <= CUT_BYTES_MAX else None


def dropped_files(entries: Sequence[TableEntry], cut: TableCut) -> dict[str, DataFile]:
    """Returns the data files, by path, that are named only by entries that a cut drops."""
    left = {file.path for entry in entries if cut.keeps(entry.seq) for file in entry.files}
    return {f.path: f for e in entries if not cut.keeps(e.seq) for f in e.files if f.path not in left}


def _place(entries: Sequence[TableEntry], fold: TableFold, retention: Retention) -> tuple[int, int] | None:
    """Returns the number of the entry at which to cut the log, and the number of the newest commit up to it. Returns
    None for no cut.
    """
    oldest = -1 if fold.cut is None else fold.cut.commit
    commits = [e.seq for e in entries if e.kind is TableEntryKind.COMMITTED and e.seq >= oldest]
    seq = start_of(entries, fold, retention.since_ms)
    commit = max((number for number in commits if number <= seq), default=None)
    if commit is None:
        return None
    # Versions that the vacuum promised to keep stay readable, even if there are more commits by now.
    oldest_kept = min(commits[-retention.commits :][0], fold.vacuum.readable_from)
    if oldest_kept < commit:
        seq = commit = max((number for number in commits if number <= oldest_kept), default=-1)
    # A commit without files may have changed nothing. The newest commit of a Delta table is then an earlier one.
    has_files = any(entry.files for entry in entries if entry.seq == commit)
    return (seq, commit) if has_files and seq > (0 if fold.cut is None else fold.cut.seq) else None


def _always_kept(before: Sequence[TableEntry]) -> Iterator[int]:
    """Yields the numbers of entries that a cut never drops: entries that define the table, and the first claim of
    each job.
    """
    jobs: set[JobId] = set()
    for entry in before:
        if entry.info is not None:
            yield entry.seq
        elif entry.claim is not None and entry.job_id is not None and entry.job_id not in jobs:
            jobs.add(entry.job_id)
            yield entry.seq


def _bases(url: str, before: Sequence[TableEntry], fold: TableFold, shown: set[int]) -> list[TableBase]:
    """Returns, for each line of jobs (each restored from the one before), its newest job that had committed.

    A line is omitted if its visible rows are not exactly the rows of that job's commit.
    """
    history, rewrites = ClaimHistory(url, before, fold), LogRewrites(before, fold.cut)
    lines = {e.job_id: e.claim.line for e in before if e.claim is not None and e.job_id is not None}
    # A compaction of a table at rest commits too, but is never restored.
    compactions = {e.job_id for e in before if e.claim is not None and e.claim.replaces}
    claimed = {entry.job_id: entry.seq for entry in before if entry.claim is not None}
    newest: dict[JobId, tuple[JobId, CheckpointId, int]] = {}
    if fold.cut is not None:
        newest = {lines[base.job_id]: (base.job_id, base.checkpoint_id, fold.cut.seq) for base in fold.cut.bases}
    for entry in before:
        is_commit = entry.kind is TableEntryKind.COMMITTED and (fold.cut is None or entry.seq > fold.cut.seq)
        if is_commit and entry.job_id not in compactions:
            assert entry.job_id is not None and entry.checkpoint_id is not None
            newest[lines[entry.job_id]] = (entry.job_id, entry.checkpoint_id, entry.seq)
    shown_by_line: dict[JobId, set[int]] = {}
    for entry in before:
        if entry.seq in shown and entry.job_id in lines:
            shown_by_line.setdefault(lines[entry.job_id], set()).add(entry.seq)
    found = []
    for line, (job_id, checkpoint_id, at) in newest.items():
        own = shown_by_line.get(line, set())
        # A job that fell back after its last commit took later checkpoints from other rows.
        if claimed[job_id] <= at and history.reaches(job_id, checkpoint_id):
            covered = history.covered(job_id, checkpoint_id)
            if rewrites.originals(covered) == rewrites.originals(own):
                found.append(TableBase(job_id, checkpoint_id, joined(own)))
    return found


def _is_settled(
    entries: Sequence[TableEntry],
    fold: TableFold,
    checkpoints: Sequence[CheckpointId],
    seq: int,
    bases: dict[JobId, TableBase],
) -> bool:
    """Returns whether neither the owner nor any later claim needs an entry that a cut at entry `seq` drops."""
    claims = [entry for entry in entries if entry.claim is not None]
    earlier = {entry.job_id for entry in claims if entry.seq <= seq}
    later = [entry for entry in claims if entry.seq > seq]
    owner = fold.owner
    if owner in earlier:
        base = bases.get(owner) if owner is not None else None
        at_rest = any(e.job_id == owner and e.claim is not None and e.claim.replaces for e in claims)
        if base is None and not at_rest:
            return False
        if base is not None and any(checkpoint < base.checkpoint_id for checkpoint in checkpoints):
            return False
    for entry in later:
        claim = entry.claim
        assert claim is not None and entry.job_id is not None
        if entry.job_id in earlier and claim.falls_back_to is not None:
            base = bases.get(entry.job_id)
            if base is None or claim.falls_back_to < base.checkpoint_id:
                return False
        root = next(e for e in claims if e.claim is not None and e.claim.line == claim.line)
        line_jobs = {e.job_id for e in claims if e.claim is not None and e.claim.line == claim.line}
        overwrites = root.claim is not None and root.claim.overwrites
        if root.seq <= seq and overwrites and not line_jobs & bases.keys():
            return False
    return True
