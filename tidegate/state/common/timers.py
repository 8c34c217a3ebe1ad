"""The contract of timers in a state backend: what operators ask of it, a batch at a time.

Rules:
- Timers are keyed state. There is one for each key, clock and moment, however often it was registered
  (`tidegate/storage/state/timer_rows.py` has the numbers of the clocks).
- To register a timer costs O(log n). A snapshot costs what has changed.
- Due timers come in order of moment, then of key. Values of a key column ascend, then NaN, then null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class DueTimers:
    """The first due timers, in order. Row i of `keys` (stored key columns) is the key of timer i."""

    moments: Sequence[int]
    keys: pa.RecordBatch
    more: bool
    """Whether more timers may be due after these."""


class KeyedTimers(Protocol):
    """The timers of one operator in one subtask."""

    def count(self, limit: int) -> int:
        """The number of timers, but at most `limit`: a backend on disk must look at each."""
        ...

    def change(
        self, keys: pa.RecordBatch, domains: Sequence[int], moments: Sequence[int], registered: Sequence[bool]
    ) -> None:
        """Register or delete timers. If one timer is changed several times, the last change counts.

        Change i is for the key of row i, the clock `domains[i]` and the moment `moments[i]`.
        """
        ...

    def first_ms(self, domain: int) -> int | None:
        """The moment of a clock's first timer; None without one."""
        ...

    def due(self, domain: int, time_ms: int, timers_max: int) -> DueTimers:
        """A clock's first timers up to a moment, at least one if any is due. They stay registered."""
        ...
