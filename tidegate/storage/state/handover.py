"""`Handover`: stored tables on their way to the operator that is restored from them.

Rule: a table is held until it has been taken in, and no longer, so that a restore never holds a state twice: what is
left of the tables shrinks as the backend grows. Whoever takes tables in goes through `taken`, once, and looks before
that at what it needs of all of them; nobody beside it keeps a reference to one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from tidegate.storage.state.snapshot import StateTable


class Handover(Sequence[StateTable]):
    """The tables that have not been taken in yet."""

    __slots__ = ("_left",)

    def __init__(self, tables: Iterable[StateTable] = ()) -> None:
        self._left = deque(tables)

    def __len__(self) -> int:
        return len(self._left)

    @overload
    def __getitem__(self, index: int) -> StateTable: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StateTable]: ...
    def __getitem__(self, index: int | slice) -> StateTable | Sequence[StateTable]:
        return tuple(self._left)[index] if isinstance(index, slice) else self._left[index]

    def __iter__(self) -> Iterator[StateTable]:
        return iter(self._left)

    def __repr__(self) -> str:
        return f"Handover({list(self._left)!r})"

    def take(self) -> Iterator[StateTable]:
        """Each table in its order, let go of when the next one is asked for."""
        while self._left:
            yield self._left.popleft()


def taken(tables: Sequence[StateTable]) -> Iterator[StateTable]:
    """Tables to take in: of a `Handover` each is gone afterwards; other sequences stay what they are."""
    return tables.take() if isinstance(tables, Handover) else iter(tables)
