"""`SubtaskCommits` decides when one subtask commits rows of a `CommittingSink`, and which of them a checkpoint stores.

`SnapshotTracker` has one for each such sink of the task. The driver writes, prepares and commits. Rules:

- Writes are numbered. A checkpoint covers the writes that were started before its barrier. The last of them prepares,
  so the rows of a checkpoint are prepared when all of these writes are over.
- Prepared rows are committed only after a checkpoint that covers them has completed (invariant 6). If their own
  checkpoint was aborted, the next one covers them.
- Every checkpoint stores all prepared rows that are not confirmed as committed, whether or not their commit is under
  way. So a restore commits them again, and never misses any.
- One commit is under way at a time, in the order of the checkpoints.
- At most `COMMITS_BEHIND_MAX` commits may wait. While there are more, the task processes nothing (invariant 10).
- A restored task commits first what its checkpoint holds, before it opens its operators. So rows of an earlier attempt
  are visible before any later ones, and a checkpoint never holds rows of another job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tidegate.actors.task.instructions import CommitPrepared
from tidegate.storage.checkpoints.metadata import PreparedPart, PreparedRows
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid

COMMITS_BEHIND_MAX = 10


class SubtaskCommits:
    """Tracks the prepared rows of one sink in one subtask."""

    def __init__(self, uid: OperatorUid, job_id: JobId) -> None:
        self._uid = uid
        self._job_id = job_id
        self.next_index = 0
        self._writing: dict[int, CheckpointId | None] = {}
        """Writes under way, each with the checkpoint for which it prepares rows, if any."""
        self._prepared: dict[int, PreparedRows] = {}
        """Rows that no completed checkpoint covers, by the number of the write that prepared them."""
        self._due: deque[PreparedRows] = deque()
        """Rows to commit, oldest first. If `_committing`, the first ones are being committed."""
        self._committing = False

    @property
    def in_flight(self) -> int:
        """Returns the number of writes under way."""
        return len(self._writing)

    @property
    def behind(self) -> int:
        """Commits that are due, one for each checkpoint that has prepared rows. The metric `pendingCommits`."""
        return len(self._due)

    @property
    def confirmed(self) -> bool:
        """Returns whether all rows that were ever prepared are committed."""
        return not self._due and not self._prepared

    def start(self, prepares: CheckpointId | None) -> int:
        """Returns the number of a new write. `prepares`: the checkpoint that begins after it, or None."""
        index = self.next_index
        self.next_index += 1
        self._writing[index] = prepares
        return index

    def written(self, index: int, parts: tuple[PreparedPart, ...]) -> None:
        """Handles the end of a write. `parts` is empty if it has prepared no rows."""
        if index not in self._writing:
            raise ProtocolError(f"write {index} of sink {self._uid!r} was answered twice, or never ordered")
        checkpoint_id = self._writing.pop(index)
        if parts:
            assert checkpoint_id is not None, "rows are prepared for a checkpoint"
            self._prepared[index] = PreparedRows(self._uid, self._job_id, checkpoint_id, parts)

    def covered(self, end: int) -> tuple[PreparedRows, ...] | None:
        """Returns the prepared rows that a checkpoint stores, from the first `end` writes, if they are not committed.
        Returns None while one of these writes is under way.
        """
        if any(index < end for index in self._writing):
            return None
        return (*self._due, *(rows for index, rows in sorted(self._prepared.items()) if index < end))

    def complete(self, end: int) -> None:
        """Makes the rows of the first `end` writes due for commit, because their checkpoint is complete."""
        for index in sorted(index for index in self._prepared if index < end):
            self._due.append(self._prepared.pop(index))

    def restored(self, rows: Iterable[PreparedRows]) -> None:
        """Sets the rows to commit that the restored checkpoint holds."""
        self._due.extend(rows)

    def next_commit(self) -> CommitPrepared | None:
        """Returns the commit to order now, or None if one is under way, or none is due."""
        if self._committing or not self._due:
            return None
        self._committing = True
        return CommitPrepared(self._due[0])

    def committed(self, rows: PreparedRows) -> None:
        """Handles the end of a commit."""
        if not self._committing or self._due[0] != rows:
            raise ProtocolError(f"checkpoint {rows.checkpoint_id} of sink {self._uid!r} was committed out of turn")
        self._committing = False
        self._due.popleft()
