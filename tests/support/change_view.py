"""`ChangeView`: what a stream of changes comes to, checked row by row: only what is there can be taken back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tidegate.operators.changes import CHANGE


class ChangeView:
    """The rows that are there, as a multiset of tuples."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[Any, ...]] = Counter()

    def apply(self, changes: Iterable[dict[str, Any]]) -> None:
        """Take changes in, in order."""
        for change in changes:
            row = tuple(value for name, value in change.items() if name != CHANGE)
            if change[CHANGE] in ("+I", "+U"):
                self.rows[row] += 1
            else:
                assert change[CHANGE] in ("-U", "-D"), change
                assert self.rows[row] > 0, f"{change} takes back what is not there: {dict(self.rows)}"
                self.rows[row] -= 1
                if not self.rows[row]:
                    del self.rows[row]
