"""`CommitsOracle` checks the commits of sinks whose tasks commit (invariant 6). Rules:

- Only rows that a completed checkpoint stores are committed.
- At the end of a job that has finished, or was stopped with a savepoint, all of these rows are committed.

A job that restores an older checkpoint, because newer ones are damaged, drops the rows of the newer ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidegate.storage.checkpoints.metadata import CheckpointMetadata, PreparedRows
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.coverage import Coverage

_Key = tuple[str, str, int, int]
"""Uid of the sink, job id, checkpoint id and bucket of prepared rows."""


class CommitsOracle:
    """Checks the commits of one job."""

    def __init__(self, coverage: Coverage, restored: CheckpointMetadata | None) -> None:
        """`restored`: the checkpoint that the job starts from, or None."""
        self._coverage = coverage
        self._covered: dict[_Key, int] = {}
        """The prepared rows of completed checkpoints, each with the first checkpoint that has them; 0 for a
        checkpoint of another job.
        """
        self._confirmed: set[_Key] = set()
        if restored is not None:
            self._add(restored, 0)

    def completed(self, metadata: CheckpointMetadata) -> None:
        """Records that a checkpoint is complete."""
        self._add(metadata, int(metadata.checkpoint_id))

    def ordered(self, rows: Sequence[PreparedRows]) -> None:
        """Records that a task starts to commit these rows.

        Raises InvariantViolated if no completed checkpoint has one of them.
        """
        unknown = [key for key in _keys(rows) if key not in self._covered]
        if unknown:
            raise InvariantViolated(6, f"a task commits {unknown[0]}, but no completed checkpoint has it")
        if self._confirmed.issuperset(_keys(rows)):
            self._coverage.saw("commit_repeated")
        if len({each.checkpoint_id for each in rows}) > 1:
            self._coverage.saw("committed_together")

    def confirmed(self, rows: Sequence[PreparedRows]) -> None:
        """Records that a commit of a task succeeded."""
        self._confirmed.update(_keys(rows))
        self._coverage.saw("committed_in_task")

    def deployed(self, number: int) -> None:
        """Records that tasks start from this checkpoint of the job.

        Newer checkpoints may be damaged, and their rows are dropped.
        """
        dropped = [key for key, first in self._covered.items() if first > number and key not in self._confirmed]
        for key in dropped:
            del self._covered[key]

    def ended(self, status: str) -> None:
        """Checks at the end of the job that all rows of completed checkpoints are committed."""
        left = self._covered.keys() - self._confirmed
        if left and status in ("finished", "suspended"):
            raise InvariantViolated(
                6, f"the job {status}, but {len(left)} commits are missing; the first is {min(left)}"
            )

    def _add(self, metadata: CheckpointMetadata, number: int) -> None:
        for subtask in metadata.subtasks:
            for key in _keys(subtask.prepared):
                self._covered.setdefault(key, number)


def _keys(prepared: Iterable[PreparedRows]) -> list[_Key]:
    return [
        (str(rows.uid), str(rows.job_id), int(rows.checkpoint_id), part.bucket)
        for rows in prepared
        for part in rows.parts
    ]
