"""`TakenSplits`: which splits of its source one subtask has, as far as the coordinator assigns them."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.codec import wire


@wire
@dataclass(slots=True)
class TakenSplits:
    """Splits are known by their place in the source. The subtask has taken what it was restored with, and is given the
    others in this order. How many of these it has taken, only its snapshots say.
    """

    restored: tuple[int, ...] = ()
    restored_count: int = 0
    """How many it was restored with, those included that the source does not have any more."""
    given: tuple[int, ...] = ()
    told_all: bool = False
    """Whether it was told that there are no more for it, or had finished in the checkpoint."""

    @property
    def all(self) -> tuple[int, ...]:
        """Every split that nobody else may be given."""
        return self.restored + self.given

    @property
    def last(self) -> int:
        """The one furthest back in the source; -1 if it has none."""
        return max(self.all, default=-1)
