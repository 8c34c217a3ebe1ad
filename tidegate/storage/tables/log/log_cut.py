"""Which entries a table's log does not need any more, so that it is as long as its history and not as its life; pure.

A vacuum deletes files, and leaves the entries that named them. A cut leaves these entries out. Rules:

- The log is cut at the oldest version that has to be readable. Of the entries up to there only those are kept that the
  table showed then, the newest commit among them, what the table is, and the first claim of each job, so that every job
  stays known.
- The entry of the cut names what is kept. From then on everybody who reads the log leaves the others out, also where
  they are still in a part. So what the log says never depends on how far files were rewritten.
- The cut stores what the rest of the log builds on: what was shown, and for each line of jobs whose rows were shown,
  the newest job and checkpoint that covered just them. Whoever restores these, or later ones, finds their rows.
- An entry is left out only where a vacuum has declared its files gone. If a claim, or a checkpoint of the owner, could
  still go back behind the cut, the log is not cut.
- It is cut where that is worth it: at least `DROPPED_MIN` entries go, and half as many as stay.
- Each job keeps an entry, so a cut grows with the number of jobs. One that has grown too large is not made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.codec import encode
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.log_entries import (
    TableBase,
    TableCut,
    TableEntry,
    TableEntryKind,
    covers,
    joined,
    members_of,
    ranges_of,
)
from tidegate.storage.tables.log.log_fold import TableFold
from tidegate.storage.tables.log.log_lineage import TableLineage
from tidegate.storage.tables.log.log_rewrites import LogRewrites
from tidegate.storage.tables.log.log_vacuum import Retention, start_of
from tidegate.storage.tables.log.log_versions import TableVersions

DROPPED_MIN = 10
CUT_BYTES_MAX = 256 * 1024
"""Every snapshot of the log has its cut, with what is kept and a base for each line of jobs, so it must be small."""


def cut_of(url: str, entries: Sequence[TableEntry], fold: TableFold, retention: Retention) -> TableCut | None:
    """The cut to make in the log of the table at `url` after a vacuum with the same retention; None: it stays whole."""
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
    """The files that only entries name which a cut leaves out, by path."""
    left = {file.path for entry in entries if cut.keeps(entry.seq) for file in entry.files}
    return {f.path: f for e in entries if not cut.keeps(e.seq) for f in e.files if f.path not in left}


def _place(entries: Sequence[TableEntry], fold: TableFold, retention: Retention) -> tuple[int, int] | None:
    """The entry to cut at, and the newest commit up to it."""
    oldest = -1 if fold.cut is None else fold.cut.commit
    commits = [e.seq for e in entries if e.kind is TableEntryKind.COMMITTED and e.seq >= oldest]
    seq = start_of(entries, fold, retention.since_ms)
    commit = max((number for number in commits if number <= seq), default=None)
    if commit is None:
        return None
    # What the vacuum has promised stays, also where there are more commits by now.
    oldest_kept = min(commits[-retention.commits :][0], fold.vacuum.readable_from)
    if oldest_kept < commit:
        seq = commit = max((number for number in commits if number <= oldest_kept), default=-1)
    # A commit without files may have changed nothing, and a Delta table then knows an earlier one as its newest.
    has_files = any(entry.files for entry in entries if entry.seq == commit)
    return (seq, commit) if has_files and seq > (0 if fold.cut is None else fold.cut.seq) else None


def _always_kept(before: Sequence[TableEntry]) -> Iterator[int]:
    """What the table is, and the first claim of each job."""
    jobs: set[JobId] = set()
    for entry in before:
        if entry.info is not None:
            yield entry.seq
        elif entry.claim is not None and entry.job_id is not None and entry.job_id not in jobs:
            jobs.add(entry.job_id)
            yield entry.seq


def _bases(url: str, before: Sequence[TableEntry], fold: TableFold, shown: set[int]) -> list[TableBase]:
    """For each line of jobs the newest that had committed, where what it had written is what showed of the line."""
    lineage, rewrites = TableLineage(url, before, fold), LogRewrites(before, fold.cut)
    lines = {e.job_id: e.claim.line for e in before if e.claim is not None and e.job_id is not None}
    # A compaction of a table at rest commits too; nobody restores it.
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
        if claimed[job_id] <= at and lineage.reaches(job_id, checkpoint_id):
            covered = lineage.covered(job_id, checkpoint_id)
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
    """Whether the owner and the claims after entry `seq` need nothing that a cut there leaves out."""
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
