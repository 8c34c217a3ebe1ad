"""`LogRewrites`: all compactions of a log: which entries hold the rows of which others.

Rules:

- The files of a compaction have the rows of the entries that it replaces, all of them and no others. So a set of
  entries shows the same rows with the compaction in their place, and the other way round.
- A compaction stands for what it replaces only where all of that is in a set: rows that a restored job takes back never
  stay in a large file.
- Compactions replace earlier ones. Oldest first, one after the other is put in the place of what it replaces; newest
  first, each is undone.
- A vacuum takes away small files that a large one stands for, or large ones that nobody shows any more.
- A compaction before the cut of a log counts as a commit: what it has replaced is no part of the log any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tidegate.storage.ids import JobId
from tidegate.storage.tables.log.log_entries import Ranges, TableCut, TableEntry, TableEntryKind, covers, members_of


class LogRewrites:
    """The compactions among all entries of a log."""

    def __init__(self, entries: Sequence[TableEntry], cut: TableCut | None) -> None:
        bearing = [entry.seq for entry in entries if entry.files]
        self._line_of: dict[int, JobId] = {}
        self._replaced: dict[int, tuple[int, ...]] = {}
        """By the entry that has the files, oldest first."""
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
        """What each compaction replaces, by its entry, oldest first."""
        return self._replaced

    def compacted(self, members: Collection[int], line: JobId | None = None) -> set[int]:
        """A set of entries, with compactions (None: of all lines) in the place of what they replace."""
        found = set(members)
        for seq, replaced in self._replaced.items():
            if (line is None or self._line_of[seq] == line) and found.issuperset(replaced):
                found.difference_update(replaced)
                found.add(seq)
        return found

    def whole(self, members: Collection[int], gone: Ranges, line: JobId | None = None) -> set[int] | None:
        """A set of entries with the same rows, with compactions where that is possible, and without what has gone.

        None if rows have gone: they are in no entry that is left.
        """
        found = self.compacted(members, line)
        for seq in reversed(self._replaced):
            if seq in found and covers(gone, seq):
                found.remove(seq)
                found.update(self._replaced[seq])
        return None if any(covers(gone, seq) for seq in found) else found

    def holders(self, members: Collection[int]) -> dict[int, int]:
        """By each entry whose rows a set of entries has, the member that has them."""
        found = {seq: seq for seq in members}
        for seq in reversed(self._replaced):
            if seq in found:
                found |= dict.fromkeys(self._replaced[seq], found[seq])
        return found

    def originals(self, members: Collection[int]) -> set[int]:
        """A set of entries, with what was replaced in the place of compactions."""
        found = set(members)
        for seq in reversed(self._replaced):
            if seq in found:
                found.remove(seq)
                found.update(self._replaced[seq])
        return found
