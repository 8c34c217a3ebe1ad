"""`ChangeHistory`: what has changed in one state since each of its last snapshots.

The backend collects changes, as slots or as keys. Rules:
- A freeze files what was collected since the last one, under the number of its checkpoint.
- A snapshot with base B contains what was filed after B. What was filed up to B is dropped then, because no later
  snapshot has an older base.
- To hold too many changes is always safe. Beyond `COLLECTIONS_MAX` collections the two oldest are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tidegate.state.common.options import COLLECTIONS_MAX
from tidegate.storage.ids import CheckpointId

C = TypeVar("C")


class ChangeHistory(Generic[C]):
    """Filed collections, oldest first. `merge` makes a new collection of two; the older one is given first."""

    __slots__ = ("_filed", "_merge")

    def __init__(self, merge: Callable[[C, C], C]) -> None:
        self._filed: list[tuple[CheckpointId, C]] = []
        self._merge = merge

    def __iter__(self) -> Iterator[C]:
        return (collection for _, collection in self._filed)

    def since(self, base: CheckpointId) -> Iterator[C]:
        """What was filed after this checkpoint."""
        return (collection for number, collection in self._filed if number > base)

    def drop(self, base: CheckpointId) -> list[C]:
        """Drop what was filed up to this checkpoint, and return it."""
        dropped = [collection for number, collection in self._filed if number <= base]
        self._filed = [entry for entry in self._filed if entry[0] > base]
        return dropped

    def file(self, checkpoint_id: CheckpointId, collection: C) -> None:
        """File what was collected up to the freeze for this checkpoint."""
        self._filed.append((checkpoint_id, collection))
        if len(self._filed) > COLLECTIONS_MAX:
            (_, oldest), (number, second) = self._filed[:2]
            self._filed[:2] = [(number, self._merge(oldest, second))]

    def replace(self, change: Callable[[C], C]) -> None:
        """Put what `change` makes of each collection in its place."""
        self._filed = [(number, change(collection)) for number, collection in self._filed]
