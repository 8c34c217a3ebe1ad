"""`ClaimHistory`: computes from a table's log which entries a checkpoint covers, and on which entries a job's claim
builds.

A job that is restored from a checkpoint of another job continues the *line* of that job. The newest job of a line that
has committed defines the visible rows of the line: the rows that its checkpoint covered, and its own. Rows of other
lines do not change. Only a job that was started with `if_exists="overwrite"` hides them.

A compaction belongs to a line like a job of it. A job that continues from a checkpoint which covers everything that a
compaction replaced gets the compacted files. From any other checkpoint it gets the files that were replaced, unless a
vacuum has deleted them.

Where a log was cut, the first claim of every job is kept, so that every job stays known. A checkpoint from before the
cut can be restored only if the cut has a base for it; any other one is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tidegate.storage.errors import FencedError, TableError
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.entries import (
    TableClaim,
    TableEntry,
    TableEntryKind,
    TableFold,
    covers,
    members_of,
    ranges_of,
)
from tidegate.storage.tables.log.versions import LogRewrites
from tidegate.storage.tables.table_info import IfExists

Restored = tuple[JobId, CheckpointId]


class ClaimHistory:
    """The claims and commits of all jobs in a table's log, from its entries and the table state `fold`.

    `url` is for error texts.
    """

    def __init__(self, url: str, entries: Sequence[TableEntry], fold: TableFold) -> None:
        self._url = url
        self._entries = entries
        self._by_seq = {entry.seq: entry for entry in entries}
        self._claims_of: dict[JobId, list[TableEntry]] = {}
        self._commits_of: dict[JobId, list[TableEntry]] = {}
        for entry in entries:
            if entry.job_id is not None and entry.kind is TableEntryKind.CLAIMED:
                self._claims_of.setdefault(entry.job_id, []).append(entry)
            elif entry.job_id is not None and entry.kind is TableEntryKind.COMMITTED:
                self._commits_of.setdefault(entry.job_id, []).append(entry)
        self._fold = fold
        self._cut_at = -1 if fold.cut is None else fold.cut.seq
        self._bases = {} if fold.cut is None else {base.job_id: base for base in fold.cut.bases}
        self._bearing = [entry.seq for entry in entries if entry.files]
        self._rewrites = LogRewrites(entries, fold.cut)

    def covered(self, job_id: JobId, checkpoint_id: CheckpointId) -> frozenset[int]:
        """Returns the log entries whose rows a checkpoint covers: entries of its job, and of the earlier jobs that it
        continues.

        Raises TableError if the log was cut after the checkpoint.
        """
        claim = self._period(job_id, checkpoint_id)
        if claim is not None:
            assert claim.claim is not None
            own, since = claim.claim.own, claim.seq
        else:
            base = self._bases.get(job_id)
            if base is None or checkpoint_id < base.checkpoint_id:
                raise self._before_the_cut(f"checkpoint {checkpoint_id} of job {job_id!r}")
            own, since = base.own, self._cut_at
        found = members_of(own, self._bearing)
        # Only entries with files: the ranges of deleted entries may span entries without files.
        commits = (e for e in self._commits(job_id, since) if e.files)
        return frozenset((*found, *(e.seq for e in commits if _number(e) <= checkpoint_id)))

    def uncommitted(
        self, job_id: JobId, checkpoint_id: CheckpointId, candidates: Iterable[CheckpointId]
    ) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints in `candidates` that `checkpoint_id` covers and that were not committed to the table,
        ascending.

        `candidates` are completed checkpoints of the job.
        """
        if not self._claims(job_id):
            return ()
        covered = self.covered(job_id, checkpoint_id)
        committed = [_number(e) for e in self._commits(job_id, 0) if e.seq in covered or not e.files]
        if job_id in self._bases:
            committed.append(self._bases[job_id].checkpoint_id)
        newest = max((number for number in committed if number <= checkpoint_id), default=-1)
        found = [number for number in candidates if newest < number <= checkpoint_id]
        claim = self._period(job_id, checkpoint_id)
        while claim is not None and claim.claim is not None and claim.claim.falls_back_to is not None:
            # The job had skipped the checkpoints in between.
            first, back_to = claim.claim.next_checkpoint_id, claim.claim.falls_back_to
            found = [number for number in found if not back_to < number < first]
            claim = self._period(job_id, back_to)
        return tuple(sorted(found))

    def knows(self, job_id: JobId) -> bool:
        """Returns whether a job has ever claimed the table."""
        return bool(self._claims(job_id))

    def claim(
        self, job_id: JobId, restored_from: Restored | None, if_exists: IfExists, next_checkpoint_id: int | None
    ) -> TableClaim | None:
        """Returns the claim that a starting job must write, or None if the job already owns the table with the right
        content.

        Raises FencedError if another job has taken the table over.
        """
        if self._claims(job_id):
            if self._fold.owner != job_id:
                raise FencedError(owned_by(self._url, self._fold.owner, job_id))
            return None if restored_from is None else self._fallback(job_id, restored_from, next_checkpoint_id)
        if restored_from is None or not self._claims(restored_from[0]):
            return self._fresh(job_id, if_exists)
        first = self._claims(restored_from[0])[0].claim
        assert first is not None
        return self._goes_on(first.line, self.covered(*restored_from))

    def shown_by_line(self) -> dict[JobId, list[int]]:
        """Returns the numbers of the visible log entries, grouped by the line of jobs that wrote them.

        A line is a sequence of jobs, each restored from the one before.
        """
        line_of = {e.job_id: e.claim.line for e in self._entries if e.claim is not None}
        found: dict[JobId, list[int]] = {}
        for seq in self._bearing:
            if covers(self._fold.shown, seq):
                found.setdefault(line_of[self._by_seq[seq].job_id], []).append(seq)
        return found

    def compaction(self, line: JobId) -> TableClaim:
        """Returns the claim for compacting the visible rows that one line of jobs wrote. Raises TableError if a pending
        claim will change these rows.
        """
        fold = self._fold
        # Equal sets may have different ranges, because entries without files are ignored.
        hides = members_of(fold.shown, self._bearing) != members_of(fold.shown_next, self._bearing)
        if hides and not (fold.claim is not None and fold.claim.replaces):
            raise TableError(
                f"job {fold.owner!r} has claimed the table at {self._url}, and will hide rows of it with its first "
                "commit. Compact the table after that commit; if the job does not run, restore it first"
            )
        by_line = self.shown_by_line()
        replaced = set(by_line.pop(line, ()))
        shows = {seq for seqs in by_line.values() for seq in seqs}
        return TableClaim(
            line, (), ranges_of(shows, self._bearing), sum(self._by_seq[seq].rows for seq in shows),
            replaces=ranges_of(replaced, self._bearing),
        )  # fmt: skip

    def _fresh(self, job_id: JobId, if_exists: IfExists) -> TableClaim:
        fold = self._fold
        if not fold.rows or if_exists == "append":
            return TableClaim(job_id, (), fold.shown, fold.rows)
        if if_exists == "overwrite":
            return TableClaim(job_id, (), (), 0, overwrites=True)
        raise TableError(
            f"the table at {self._url} shows {fold.rows} rows already; "
            'give if_exists="overwrite" to replace them, or another url. if_exists="append" adds to them, and repeats '
            "rows that an earlier run of this job has written"
        )

    def _fallback(self, job_id: JobId, restored_from: Restored, next_checkpoint_id: int | None) -> TableClaim | None:
        fold = self._fold
        assert fold.claim is not None
        if restored_from[0] == job_id:
            back_to = restored_from[1]
            own = self.covered(job_id, back_to)
        else:
            # Back to the checkpoint from which the job itself was started.
            back_to = CheckpointId(0)
            first = self._claims(job_id)[0]
            if first.seq <= self._cut_at:
                raise self._before_the_cut(f"the checkpoint that job {job_id!r} was started from")
            assert first.claim is not None
            own = frozenset(seq for seq in self._bearing if covers(first.claim.own, seq))
        claim = self._goes_on(fold.claim.line, own)
        if next_checkpoint_id is None:
            if claim.shows == fold.shown_next:
                return None
            next_checkpoint_id = fold.newest_commit or 0
        next_checkpoint_id = max(next_checkpoint_id, (fold.newest_commit or 0) + 1, back_to + 1)
        before = (fold.claim.falls_back_to, fold.claim.next_checkpoint_id)
        if claim.shows == fold.shown_next and before == (back_to, next_checkpoint_id):
            return None
        return TableClaim(
            claim.line, claim.own, claim.shows, claim.shows_rows,
            falls_back_to=back_to, next_checkpoint_id=next_checkpoint_id,
            overwrites=claim.overwrites, home=fold.claim.home,
        )  # fmt: skip

    def _goes_on(self, line: JobId, own: frozenset[int]) -> TableClaim:
        """Returns the claim of a job that continues a line of jobs, from a checkpoint that covers the log entries
        `own`.

        A line is a sequence of jobs, each restored from the one before.
        """
        claims = [e for e in self._entries if e.claim is not None and e.claim.line == line]
        jobs = {entry.job_id for entry in claims}
        root = claims[0]
        assert root.claim is not None
        own = self._whole(own, line)
        shown = {seq for seq in self._bearing if covers(self._fold.shown, seq)}
        committed = jobs & self._bases.keys() or any(
            e.kind is TableEntryKind.COMMITTED and e.job_id in jobs for e in self._entries
        )
        overwrites = root.claim.overwrites and not committed
        if overwrites:
            # A compaction that came later may hold rows that were there before.
            shown = set(self._whole({seq for seq in self._rewrites.originals(shown) if seq > root.seq}, None))
        shows = own | {seq for seq in shown if self._by_seq[seq].job_id not in jobs}
        rows = sum(self._by_seq[seq].rows for seq in shows)
        return TableClaim(
            line, ranges_of(own, self._bearing), ranges_of(shows, self._bearing), rows, overwrites=overwrites
        )

    def restorable(self, job_id: JobId, checkpoint_id: CheckpointId) -> frozenset[int]:
        """Returns the log entries with the rows that a checkpoint covers.

        Empty if a vacuum has deleted some of the rows, or the log was cut after the checkpoint.
        """
        if not self.reaches(job_id, checkpoint_id):
            return frozenset()
        line = self._claims(job_id)[0].claim
        assert line is not None
        covered = self.covered(job_id, checkpoint_id)
        return frozenset(self._rewrites.whole(covered, self._fold.vacuum.gone, line.line) or ())

    def reaches(self, job_id: JobId, checkpoint_id: CheckpointId) -> bool:
        """Returns whether the log still has the entries of a checkpoint of a job that has claimed the table."""
        if self._period(job_id, checkpoint_id) is not None:
            return True
        base = self._bases.get(job_id)
        return base is not None and base.checkpoint_id <= checkpoint_id

    def _before_the_cut(self, what: str) -> TableError:
        cut = self._fold.cut
        assert cut is not None
        return TableError(
            f"a vacuum has cut the log of the table at {self._url} before its commit {cut.commit}, and {what} is older "
            "than that, or belongs to a job that another job has replaced since. Restore a newer checkpoint, or write "
            "to another url"
        )

    def _whole(self, members: Collection[int], line: JobId | None) -> frozenset[int]:
        """Returns entries that contain the rows of the entries `members`. Compacted entries are preferred.

        Raises TableError if a vacuum has deleted some of the rows.
        """
        found = self._rewrites.whole(members, self._fold.vacuum.gone, line)
        if found is None:
            raise TableError(
                f"a vacuum has deleted rows of the table at {self._url} that the restored checkpoint covers. Restore a "
                f"newer one (rows since commit {self._fold.vacuum.readable_from} of the table exist), or write to "
                "another url"
            )
        return frozenset(found)

    def _claims(self, job_id: JobId) -> list[TableEntry]:
        return self._claims_of.get(job_id, [])

    def _commits(self, job_id: JobId, after: int) -> list[TableEntry]:
        return [entry for entry in self._commits_of.get(job_id, ()) if entry.seq > after]

    def _period(self, job_id: JobId, checkpoint_id: CheckpointId) -> TableEntry | None:
        """Returns the claim that was in force when a checkpoint of a job was taken, or None if the log was cut after
        that time.
        """
        claims = self._claims(job_id)
        since = [e for e in claims if e.seq > self._cut_at]
        first = since[0] if since == claims and since else None
        return next(
            (e for e in reversed(since) if e.claim is not None and e.claim.next_checkpoint_id <= checkpoint_id),
            first,
        )


def owned_by(url: str, owner: JobId | None, job_id: JobId | None) -> str:
    """Returns the error text for a job that may not write to the table because another job owns it."""
    return f"the table at {url} is owned by {repr(owner) if owner else 'no job'}, not by {job_id!r}"


def _number(entry: TableEntry) -> CheckpointId:
    assert entry.checkpoint_id is not None
    return entry.checkpoint_id
