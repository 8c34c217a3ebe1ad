"""Permits: an action that cannot be undone requires a value that only the code which makes the decision can create.

Such actions are completing a checkpoint, exporting it, committing sink files and deleting. Each of them takes a permit.
Two modules decide, and only they make permits, after they have checked the rules: `invariants.py` of the coordinator
for a job that lives, `tidegate/recovery/deletion_permits.py` for files of jobs that do not run. A caller that forgets
the check has no permit, and a call without one has the wrong type. mypy therefore reports the mistake, long before a
test hits the one order of events in which it matters. The code that receives a permit checks that it is for the action
at hand.

Permits stay in the process of the decision. They are not stored: the next coordinator examines its own state, and makes
its own permits.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Final, NoReturn, final

from tidegate.storage.checkpoints.metadata import TableHead
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import CheckpointId, JobId


@final
class _Decision:
    """A token without which no permit can be created. It has a single instance."""


_DECIDED: Final = _Decision()


@dataclass(frozen=True, slots=True)
class _Permit:
    decision: InitVar[_Decision]

    def __post_init__(self, decision: _Decision) -> None:
        if decision is not _DECIDED:
            raise InvariantError(f"a {type(self).__name__} may only be made by the decision about it")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it is valid only in the process that made it"
            "; use it in that process"
        )


@dataclass(frozen=True, slots=True)
class _CheckpointPermit(_Permit):
    checkpoint_id: CheckpointId

    def check(self, checkpoint_id: CheckpointId) -> None:
        """Raises InvariantError if this is the permit of another checkpoint. Call it before using the permit."""
        if checkpoint_id != self.checkpoint_id:
            name = type(self).__name__
            raise InvariantError(
                f"the {name} of checkpoint {self.checkpoint_id} is used for checkpoint {checkpoint_id}"
            )


@final
class ExportPermit(_CheckpointPermit):
    """Granted when all files of a savepoint exist, and no other process is copying it."""

    __slots__ = ()


@final
class CompletionPermit(_CheckpointPermit):
    """Granted when every task has acknowledged, and it is this checkpoint's turn: its `_metadata` may be created."""

    __slots__ = ()


@final
class CommitPermit(_CheckpointPermit):
    """Granted when the checkpoint is complete, and earlier ones are committed: its sink files may become visible."""

    __slots__ = ()


@final
class DeletePermit(_CheckpointPermit):
    """Granted when the checkpoint was aborted or subsumed, or its job is dead, and nothing refers to its files."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class EndPermit(_Permit):
    """Granted when the job is over, and no process writes for it: files that it does not retain may be deleted."""

    retained: frozenset[CheckpointId]
    """The checkpoints that stay, with all files that they refer to."""
    tables_settled: bool
    """True if all commits to the job's tables are done, so that other files in the tables' folders may be deleted."""
    undecided: frozenset[CheckpointId] = frozenset()
    """Checkpoints of which it is unknown whether they will complete. They are kept too, with all files that they may
    refer to.
    """
    heads: tuple[TableHead, ...] = ()
    """How much of the log of each table the job has seen.

    If a log has lost entries, the files are the only copy of rows.
    """


@final
@dataclass(frozen=True, slots=True)
class OrphanPermit(_Permit):
    """Granted when the job is dead: files of it to which nothing refers may be deleted."""

    job_id: JobId
