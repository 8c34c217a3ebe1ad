"""Permits: what may only happen after a decision asks for a value that only this decision can make.

Completing a checkpoint, exporting it, committing sink files and deleting: none of it can be taken back. So whatever
does one of these takes a permit. Two modules decide, and they alone make permits, after they have looked whether the
rules hold: the `invariants.py` of the coordinator for a job that lives, `tidegate/recovery/deletion_permits.py` for
what rests.
Whoever forgets to ask there has no permit, and a call without one has the wrong type: mypy says so, long before a test
has to hit the one order of events in which it matters. Whoever is given one looks whether it is for what is to be done.

Permits stay in the process of the decision. They are not written anywhere: the coordinator that comes next looks at its
own state, and gives permits of its own.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Final, NoReturn, final

from tidegate.storage.checkpoints.metadata import TableHead
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import CheckpointId, JobId


@final
class _Decision:
    """What a decision shows to make a permit. There is one of it."""


_DECIDED: Final = _Decision()


@dataclass(frozen=True, slots=True)
class _Permit:
    decision: InitVar[_Decision]

    def __post_init__(self, decision: _Decision) -> None:
        if decision is not _DECIDED:
            raise InvariantError(f"a {type(self).__name__} is made by the decision about it, and nowhere else")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is of no use in another process, or later")


@dataclass(frozen=True, slots=True)
class _CheckpointPermit(_Permit):
    checkpoint_id: CheckpointId

    def check(self, checkpoint_id: CheckpointId) -> None:
        """Before it is used for a checkpoint. InvariantError if it is the permit of another one."""
        if checkpoint_id != self.checkpoint_id:
            name = type(self).__name__
            raise InvariantError(
                f"the {name} of checkpoint {self.checkpoint_id} is used for checkpoint {checkpoint_id}"
            )


@final
class ExportPermit(_CheckpointPermit):
    """All of a savepoint is there, and nobody else is copying it."""

    __slots__ = ()


@final
class CompletionPermit(_CheckpointPermit):
    """Every task has acknowledged, and it is this checkpoint's turn: its `_metadata` may be created."""

    __slots__ = ()


@final
class CommitPermit(_CheckpointPermit):
    """The checkpoint is complete, and those before it are committed: its sink files may become visible."""

    __slots__ = ()


@final
class DeletePermit(_CheckpointPermit):
    """The checkpoint was given up or subsumed, or its job is dead, and nobody refers to what is to be deleted."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class EndPermit(_Permit):
    """The job is over, and nobody writes for it any more: what it does not leave behind may go."""

    retained: frozenset[CheckpointId]
    """The checkpoints that stay, with all that they refer to."""
    tables_settled: bool
    """Whether all that its tables are to show is committed, so that other files in them may go."""
    undecided: frozenset[CheckpointId] = frozenset()
    """Checkpoints of which nobody knows whether they complete: they stay too, with all that they may refer to."""
    heads: tuple[TableHead, ...] = ()
    """What the job knows to be in the log of each table. Where that is lost, the files are all that is left of rows."""


@final
@dataclass(frozen=True, slots=True)
class OrphanPermit(_Permit):
    """The job is dead: files of it that nothing refers to may go."""

    job_id: JobId
