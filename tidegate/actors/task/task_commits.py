"""`SubtaskCommits`: decides when one subtask commits rows of a `CommittingSink`, and which rows a checkpoint stores.

`SnapshotTracker` has one for each such sink of the task. The driver writes, prepares and commits. Rules:

- Writes are numbered. A checkpoint covers the writes that were started before its barrier. The last of them prepares
  the rows, so the rows of a checkpoint are prepared when all of these writes have ended.
- Prepared rows are committed only after a checkpoint that covers them has completed (invariant 6). If their own
  checkpoint was aborted, the next one covers them.
- Every checkpoint stores all prepared rows that are not confirmed as committed, also while their commit is running. So
  a restore commits them again, and never misses any.
- One commit runs at a time, in the order of the checkpoints. It has the rows of all checkpoints that are due, so a slow
  system gets fewer and larger commits.
- At most `COMMITS_BEHIND_MAX` commits may be outstanding. While there are more, the task processes no input (invariant
  10).
- A restored task first commits the prepared rows of its checkpoint, before it opens its operators. So rows of an
  earlier attempt are visible before any later ones, and a checkpoint never contains rows of another job.
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
    """The prepared rows of one sink in one subtask, and their commits."""

    def __init__(self, uid: OperatorUid, job_id: JobId) -> None:
        self._uid = uid
        self._job_id = job_id
        self.next_index = 0
        self._writing: dict[int, CheckpointId | None] = {}
        """Running writes by number, each with the checkpoint for which it prepares rows, or None."""
        self._prepared: dict[int, PreparedRows] = {}
        """Prepared rows that no completed checkpoint covers, by the number of the write that prepared them."""
        self._due: deque[PreparedRows] = deque()
        """Prepared rows to commit, oldest first. The first `_committing` entries are being committed."""
        self._committing = 0

    @property
    def in_flight(self) -> int:
        """Returns the number of running writes of the sink."""
        return len(self._writing)

    @property
    def behind(self) -> int:
        """Number of outstanding commits, one for each checkpoint with prepared rows. The metric `pendingCommits`."""
        return len(self._due)

    @property
    def confirmed(self) -> bool:
        """Returns whether all prepared rows of the sink are committed."""
        return not self._due and not self._prepared

    def start(self, prepares: CheckpointId | None) -> int:
        """Returns the number of a new write. `prepares`: the checkpoint for which the write prepares rows, or
        None.
        """
        index = self.next_index
        self.next_index += 1
        self._writing[index] = prepares
        return index

    def written(self, index: int, parts: tuple[PreparedPart, ...]) -> None:
        """Records the end of a write, and the rows that it has prepared, if any."""
        if index not in self._writing:
            raise ProtocolError(
                f"write {index} of sink {self._uid!r} was answered twice, or never ordered; this is a bug in "
                "tidegate, please report it"
            )
        checkpoint_id = self._writing.pop(index)
        if parts:
            assert checkpoint_id is not None, "rows are prepared for a checkpoint"
            self._prepared[index] = PreparedRows(self._uid, self._job_id, checkpoint_id, parts)

    def covered(self, end: int) -> tuple[PreparedRows, ...] | None:
        """Returns the uncommitted prepared rows that a checkpoint has to store, from the first `end` writes.

        None while one of these writes is running.
        """
        if any(index < end for index in self._writing):
            return None
        return (*self._due, *(rows for index, rows in sorted(self._prepared.items()) if index < end))

    def complete(self, end: int) -> None:
        """Queues the prepared rows of the first `end` writes for commit, because their checkpoint is complete."""
        for index in sorted(index for index in self._prepared if index < end):
            self._due.append(self._prepared.pop(index))

    def restored(self, rows: Iterable[PreparedRows]) -> None:
        """Queues the prepared rows of the restored checkpoint for commit."""
        self._due.extend(rows)

    def next_commit(self) -> CommitPrepared | None:
        """Returns the commit to order now, or None if a commit is running or none is due."""
        if self._committing or not self._due:
            return None
        self._committing = len(self._due)
        return CommitPrepared(self._uid, tuple(self._due))

    def committed(self, rows: tuple[PreparedRows, ...]) -> None:
        """Records that the rows of the running commit are committed."""
        running = tuple(self._due.popleft() for _ in range(self._committing))
        self._committing = 0
        if not running or running != rows:
            reported = ", ".join(str(each.checkpoint_id) for each in rows)
            raise ProtocolError(
                f"sink {self._uid!r}: checkpoints {reported} were reported as committed, and the running commit has "
                f"{[int(each.checkpoint_id) for each in running]}; this is a bug in "
                "tidegate, please report it"
            )
