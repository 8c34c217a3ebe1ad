"""`DueKeys`: which keys have an open window that a time-out ends, in the order of these moments, in memory.

Rules:

- The moment itself is in the state of the window. An entry is only a reason to look: its window may have become full
  meanwhile, and its key may have another one with an entry of its own.
- After a restore the entries are made anew from the state. A few keys then share an entry at the earliest of their
  moments, and those that are not due yet are put back.
- Keys whose windows become full early leave entries behind. When there are more than twice as many keys as there were
  open windows (`is_crowded`), the operator makes the entries anew from the state, as after a restore.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Moments = NDArray[np.int64]
_SHARED = 256
_SPARE = 4_096
"""Up to this many keys more than twice those that `restore` gave are in entries."""


class DueKeys:
    """Keys by the moment at which to look at them."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, pa.RecordBatch]] = []
        self._count = 0
        self._keys = 0
        self._restored = 0

    @property
    def next_ms(self) -> int | None:
        """When to look at a key next; None if there is none."""
        return self._entries[0][0] if self._entries else None

    @property
    def is_crowded(self) -> bool:
        """Whether there are so many more keys than after the restore that most may have no window any more."""
        return self._keys > 2 * self._restored + _SPARE

    def add(self, due_ms: int, keys: pa.RecordBatch) -> None:
        """Look at these distinct keys at this moment."""
        self._count += 1
        self._keys += _keys_in(keys)
        heapq.heappush(self._entries, (due_ms, self._count, keys))

    def restore(self, keys: pa.RecordBatch, dues: Moments) -> None:
        """Add distinct keys of the state with their moments."""
        order = np.argsort(dues, kind="stable")
        for start in range(0, len(order), _SHARED):
            rows = order[start : start + _SHARED]
            self.add(int(dues[rows[0]]), keys.take(pa.array(rows)) if keys.num_columns else keys)
        self._restored += len(order)

    def due(self, now_ms: int) -> Iterator[pa.RecordBatch]:
        """The keys to look at now, entry by entry."""
        while self._entries and self._entries[0][0] <= now_ms:
            keys = heapq.heappop(self._entries)[2]
            self._keys -= _keys_in(keys)
            yield keys


def _keys_in(keys: pa.RecordBatch) -> int:
    """The number of keys. Without key columns there is one, of all rows."""
    return keys.num_rows if keys.num_columns else 1
