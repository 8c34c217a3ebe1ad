"""Permits: what may only happen after a decision asks for a value that only this decision can make.

Completing a checkpoint, exporting it, committing sink files and deleting: none of it can be taken back. So each
instruction that does one of these has a field for a permit. A permit is made in `invariants.py` alone, by the function
that has looked whether the rules hold. Whoever forgets to ask there has no permit, and a call without one has the wrong
type: mypy says so, long before a test has to hit the one order of events in which it matters.

Permits stay in the process of their coordinator. They are not written anywhere: the coordinator that comes next looks
at its own state, and gives permits of its own.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Final, NoReturn, final

from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import CheckpointId


@final
class _Decision:
    """What `invariants.py` shows to make a permit. There is one of it."""


_DECIDED: Final = _Decision()


@dataclass(frozen=True, slots=True)
class _Permit:
    checkpoint_id: CheckpointId
    decision: InitVar[_Decision]

    def __post_init__(self, decision: _Decision) -> None:
        if decision is not _DECIDED:
            raise InvariantError(f"a {type(self).__name__} is made by the decision, in invariants.py, and nowhere else")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is of no use in another process, or later")


@final
class ExportPermit(_Permit):
    """All of a savepoint is there, and nobody else is copying it."""

    __slots__ = ()


@final
class CompletionPermit(_Permit):
    """Every task has acknowledged, and it is this checkpoint's turn: its `_metadata` may be created."""

    __slots__ = ()


@final
class CommitPermit(_Permit):
    """The checkpoint is complete, and those before it are committed: its sink files may become visible."""

    __slots__ = ()


@final
class DeletePermit(_Permit):
    """The checkpoint was given up or subsumed, and nobody refers to what is to be deleted."""

    __slots__ = ()
