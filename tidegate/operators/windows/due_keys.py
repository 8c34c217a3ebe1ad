"""`CountTimeouts`: the time-outs of windows of rows: which keys have an open window, and when to look at it.

Both operators of such windows have them, with aggregates and with functions. Rules:

- The moment itself is in the state of the window. An entry is only a reason to look: its window may have become full
  meanwhile, and its key may have another one with an entry of its own.
- After a restore the entries are made anew from the state. A few keys then share an entry at the earliest of their
  moments, and those that are not due yet are put back.
- Keys whose windows become full early leave entries behind. When there are more than twice as many keys as there were
  open windows (`is_crowded`), the operator makes the entries anew from the state, as after a restore.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.operator import Emit, Operator

Moments = NDArray[np.int64]
_SHARED = 256
_SPARE = 4_096
"""Up to this many keys more than twice those that `restore` gave are in entries."""


class CountTimeouts(Operator):
    """An operator of windows with a time-out, or without one. `timeout_ms`: how long after its first row."""

    def __init__(self, timeout_ms: int | None) -> None:
        self._timeout_ms = timeout_ms
        self._due = DueKeys()

    @abstractmethod
    def open_windows(self) -> Iterator[tuple[pa.RecordBatch, Moments]]:
        """The distinct keys that have an open window, in batches, and when its time-out comes."""

    @abstractmethod
    def fire_due(self, keys: pa.RecordBatch, now_ms: int, emit: Emit) -> None:
        """Fire the windows of some distinct keys, where their time-out has come."""

    def next_processing_time_ms(self) -> int | None:
        """When the next time-out comes, or came for a window that is full by now."""
        return self._due.next_ms

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Fire the windows whose time-out has come."""
        for keys in self._due.due(now_ms):
            self.fire_due(keys, now_ms, emit)
            yield

    def find_timeouts(self) -> None:
        """Find the time-outs of the windows that the state has."""
        self._due = DueKeys()
        if self._timeout_ms is not None:
            for keys, dues in self.open_windows():
                self._due.restore(keys, dues)

    def wait_for(self, due_ms: int, keys: pa.RecordBatch) -> None:
        """Look at distinct keys at a moment. Without key columns there is one key, of all rows."""
        self._due.add(due_ms, keys)

    def forget_full(self) -> None:
        """Find the time-outs anew, if most of those known may be of windows that are full by now."""
        if self._due.is_crowded:
            self.find_timeouts()


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
