"""The contract of timers in a state backend: what operators ask of it, a batch at a time.

Rules: timers are keyed state. There is one for each key, clock (`storage/state/timer_rows.py` has their numbers) and
moment, however often it was registered. To register one costs O(log n), and a snapshot what has changed. What is due
comes in the order of the moment, then of the key: values of a key column ascend, NaN after them, null last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class DueTimers:
    """The first timers that are due, in order; timer i is that of row i of `keys` (stored key columns)."""

    moments: Sequence[int]
    keys: pa.RecordBatch
    more: bool
    """Whether others may be due, after these."""


class KeyedTimers(Protocol):
    """The timers of one operator in one subtask."""

    def count(self, limit: int) -> int:
        """How many timers there are, or the limit: a backend on disk looks at each."""
        ...

    def change(
        self, keys: pa.RecordBatch, domains: Sequence[int], moments: Sequence[int], registered: Sequence[bool]
    ) -> None:
        """Register timers, or delete them; of several changes of one timer the last counts.

        Change i is about the key of row i, a clock and a moment.
        """
        ...

    def first_ms(self, domain: int) -> int | None:
        """The moment of the first timer of a clock."""
        ...

    def due(self, domain: int, time_ms: int, timers_max: int) -> DueTimers:
        """The first timers of a clock up to a moment, at least one if any is due; they stay registered."""
        ...
