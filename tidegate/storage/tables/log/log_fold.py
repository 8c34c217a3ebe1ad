"""`TableFold`: what a table's log says so far: who owns the table, what it shows, and what the next commit changes.

Rules:

- A claim changes the owner at once, and what is shown with the first commit after it, in that one entry: what the
  claim was built on, its files, and the files of the commit. Until then readers see what they saw.
- Only the owner commits, each checkpoint once, in the order of their numbers. What it has left behind when it fell
  back to an older checkpoint is never committed, whoever still asks for it.
- A compaction beside a running job puts files in the place of entries that are shown, and of nothing else. It is
  refused while a claim is about to change what is shown, and to all processes of the owner but one: the newest that has
  said so. So whoever has said so may delete what the others have left unfinished.
- A vacuum changes nothing that is shown. What it has taken away is never shown again. A cut changes nothing at all for
  readers: what it leaves out is not shown, and cannot be shown again.
- The fold does not grow with commits: only hidden commits make another range, and what compactions have left apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.codec import encode, wire
from tidegate.storage.errors import CorruptionError, TableError
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.log_entries import (
    Ranges,
    TableClaim,
    TableCut,
    TableEntry,
    TableEntryKind,
    TableVacuum,
    added,
    covers,
    without,
)
from tidegate.storage.tables.table_info import TableInfo

log = logging.getLogger(__name__)


@wire
@dataclass(frozen=True, slots=True)
class TableFold:
    """The fold of all entries up to `seq`, whose file has the checksum `entry_checksum`."""

    seq: int
    entry_checksum: str
    info: TableInfo
    shown: Ranges = ()
    rows: int = 0
    newest_bearing: int = 0
    """The newest entry that bears files."""
    claims: int = 0
    owner: JobId | None = None
    claim: TableClaim | None = None
    pending: bool = False
    """Whether nothing was committed since the newest claim."""
    newest_commit: CheckpointId | None = None
    """The newest checkpoint that the owner has committed."""
    newest_files: str = ""
    newest_at_ms: int | None = None
    """When what is shown has changed last."""
    compactor: str = ""
    """The nonce of the process that may compact for the owner."""
    compactor_seq: int = 0
    """The entry in which it has said so."""
    vacuum: TableVacuum = field(default_factory=TableVacuum)
    """What has been deleted for good."""
    cut: TableCut | None = None
    """Where the log begins; None: with its first entry."""

    @staticmethod
    def first(entry: TableEntry, checksum: str) -> TableFold:
        """The fold of the first entry."""
        assert entry.info is not None
        return TableFold(entry.seq, checksum, entry.info)

    def after(self, entry: TableEntry, checksum: str) -> TableFold:
        """The fold with the next entry."""
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
        """What is shown with the next commit, besides its files."""
        return self.claim.shows if self.pending and self.claim is not None else self.shown

    @property
    def switches(self) -> bool:
        """Whether the next commit changes what is shown even if it has no files."""
        return self.shown_next != self.shown

    def may_compact(self, job_id: JobId, nonce: str, replaced: Iterable[int]) -> bool:
        """Whether a process of a job may put files in the place of these entries."""
        in_charge = self.owner == job_id and self.compactor == nonce and not self.pending
        return in_charge and all(covers(self.shown, seq) for seq in replaced)

    def is_decided(self, url: str, checkpoint_id: CheckpointId, files: tuple[DataFile, ...]) -> bool:
        """Whether a checkpoint of the owner needs no commit any more; TableError if it was one of other files."""
        assert self.claim is not None and self.owner is not None
        if checkpoint_id == self.newest_commit and self.newest_files != fingerprint(files):
            raise TableError(
                f"checkpoint {checkpoint_id} of {self.owner!r} was committed to {url} with other files than it is now"
            )
        if self.newest_commit is not None and checkpoint_id <= self.newest_commit:
            return True
        back_to = self.claim.falls_back_to
        if back_to is not None and back_to < checkpoint_id < self.claim.next_checkpoint_id:
            log.warning(
                "checkpoint %d of %s is not committed to %s: the job has gone on from checkpoint %d",
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
            raise CorruptionError(f"entry {entry.seq} of a table's log is of {entry.job_id!r}, not of {self.owner!r}")
        shown, rows = self.shown_next, self.claim.shows_rows if self.pending else self.rows
        return replace(
            self,
            shown=added(shown, entry.seq, self.newest_bearing) if entry.files else shown,
            rows=rows + entry.rows,
            newest_bearing=entry.seq if entry.files else self.newest_bearing,
            pending=False,
            newest_commit=entry.checkpoint_id,
            newest_files=fingerprint(entry.files),
            newest_at_ms=entry.at_ms if entry.at_ms is not None else self.newest_at_ms,
        )

    def _after_cut(self, cut: TableCut) -> TableFold:
        claim = self.claim
        if claim is not None and self.pending:
            claim = replace(claim, shows=cut.shown_next)
        return replace(self, cut=cut, shown=cut.shown_now, claim=claim, newest_bearing=cut.newest_bearing)

    def _compacted(self, entry: TableEntry) -> TableFold:
        rewrite = entry.rewrite
        if rewrite is None or self.pending or entry.job_id != self.owner:
            raise CorruptionError(f"entry {entry.seq} of a table's log is a compaction that could not be made there")
        shown = without(self.shown, rewrite.replaces)
        return replace(
            self,
            shown=added(shown, entry.seq, self.newest_bearing) if entry.files else shown,
            rows=self.rows - rewrite.rows_before + entry.rows,
            newest_bearing=entry.seq if entry.files else self.newest_bearing,
            newest_at_ms=entry.at_ms,
        )


def fingerprint(files: tuple[DataFile, ...]) -> str:
    """Tells the files of one commit from those of another."""
    return checksum_of(encode(files))
