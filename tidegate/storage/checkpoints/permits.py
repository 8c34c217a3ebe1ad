"""Permits: an irreversible action requires a permit as an argument, and only the code that makes the decision can
create one.

Such actions are completing a checkpoint, exporting it, committing sink files and deleting. Each of them takes a permit.
Two modules decide, and only they make permits, after they have checked the rules: `invariants.py` of the coordinator
for a running job, `tidegate/recovery/deletion_permits.py` for files of jobs that do not run. A caller that forgets the
check has no permit, and a call without one has the wrong type. mypy therefore reports the mistake. The code that
receives a permit checks that it is for the action at hand.

Permits are never stored or sent to another process: a new coordinator examines its own state, and makes its own
permits.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Final, NoReturn, final

from tidegate.storage.checkpoints.metadata import TableHead
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import CheckpointId, JobId


@final
class _Decision:
    """The type of the token that is needed to create a permit. There is one instance, which only the invariants module
    uses.
    """


_DECIDED: Final = _Decision()


@dataclass(frozen=True, slots=True)
class _Permit:
    decision: InitVar[_Decision]

    def __post_init__(self, decision: _Decision) -> None:
        if decision is not _DECIDED:
            raise InvariantError(
                f"a {type(self).__name__} may only be made by the decision about it; this is a bug in tidegate, "
                "please report it"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it is valid only in the process that made it"
            "; use it in that process"
        )


@dataclass(frozen=True, slots=True)
class _CheckpointPermit(_Permit):
    checkpoint_id: CheckpointId

    def check(self, checkpoint_id: CheckpointId) -> None:
        """Raises InvariantError if the permit is for another checkpoint. Call this before using the permit."""
        if checkpoint_id != self.checkpoint_id:
            name = type(self).__name__
            raise InvariantError(
                f"the {name} of checkpoint {self.checkpoint_id} is used for checkpoint {checkpoint_id}; this is a bug "
                "in tidegate, please report it"
            )


@final
class ExportPermit(_CheckpointPermit):
    """Permits copying a savepoint.

    Granted when all files of the savepoint exist, and no other process is copying it.
    """

    __slots__ = ()


@final
class CompletionPermit(_CheckpointPermit):
    """Permits creating the `_metadata` file of a checkpoint.

    Granted when every task has acknowledged the checkpoint, and all earlier checkpoints are completed or aborted.
    """

    __slots__ = ()


@final
class CommitPermit(_CheckpointPermit):
    """Permits committing the sink files of a checkpoint.

    Granted when it is complete, and earlier ones are committed.
    """

    __slots__ = ()


@final
class DeletePermit(_CheckpointPermit):
    """Permits deleting a checkpoint.

    Granted when the checkpoint was aborted or subsumed, or its job is dead, and nothing refers to its files.
    """

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class EndPermit(_Permit):
    """Permits deleting the files that an ended job does not retain.

    Granted when no process writes for the job any more.
    """

    retained: frozenset[CheckpointId]
    """The ids of the checkpoints that are kept, with all files that they refer to."""
    tables_settled: bool
    """True if all commits to the job's tables are done, so that other files in the tables' folders may be deleted."""
    undecided: frozenset[CheckpointId] = frozenset()
    """Checkpoints of which it is unknown whether they will complete.

    These are kept too, with all files that they may refer to.
    """
    heads: tuple[TableHead, ...] = ()
    """The position up to which the job has read the log of each table.

    If a log has lost entries, the data files are the only copy of the rows, and are kept.
    """


@final
@dataclass(frozen=True, slots=True)
class OrphanPermit(_Permit):
    """Permits deleting files of a dead job that no checkpoint refers to."""

    job_id: JobId
