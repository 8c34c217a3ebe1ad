"""`StateSize`: about how much a backend holds, which it knows without looking at its rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateSize:
    """`rows`: a key that has two states counts twice, and in RocksDB timers and what is overwritten count as well.

    None: the backend would have to look at each row to tell.
    """

    rows: int
    timers: int | None = None
    size_bytes: int | None = None
