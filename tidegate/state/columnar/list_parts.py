"""`ListInParts`: a list of a key in memory that grows without a copy, although a snapshot may hold it.

`ColumnarLists` keeps them. A freeze ends an epoch; what is appended in the next one goes into a part of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any


class ListInParts(list[Any]):
    """The last part of a list, which alone may grow, the parts before it, and the epoch in which it was made.

    Values are appended in an epoch without a copy of what is there. Parts are merged unless the former is at least
    twice as long, so there are about log2(values) of them, and a value is copied about as often.
    """

    __slots__ = ("before", "epoch")

    def __init__(self, last: Iterable[Any], epoch: int, before: tuple[list[Any], ...] = ()) -> None:
        super().__init__(last)
        self.before = before
        self.epoch = epoch

    def extended(self, values: Sequence[Any], epoch: int) -> ListInParts:
        """A list with more values, in another epoch; this one does not change."""
        last: list[Any] = list(values)
        parts = [*self.before, self]
        while parts and len(parts[-1]) < 2 * len(last):
            last = list.__add__(parts.pop(), last)
        return ListInParts(last, epoch, tuple(parts))

    def whole(self) -> Collection[Any]:
        """All values, without a copy."""
        return Parts((*self.before, self)) if self.before else self


class Parts(Collection[Any]):
    """The values of several lists, one after the other."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[list[Any]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts)

    def __contains__(self, value: object) -> bool:
        return any(value in part for part in self._parts)
