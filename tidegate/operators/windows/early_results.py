"""`EarlyResults`: what has changed in windows since their results last came out, and when they come out next.

Rules:

- It is remembered by slice and key, in memory: not a result, but whose result there is to make.
- After a restore nobody knows, so all keys count as changed once.
- Moments, of processing time or of event time, are multiples of the interval, the same ones in all subtasks. If nothing
  changes there is none. Results come out before, at once, when as many keys have changed as are remembered.
- What is being emitted counts as changed until it is done: the end of the input may cut an emission short.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from tidegate.operators.windows.window_specs import Times
from tidegate.state.key_index.key_index import KeyIndex

CHANGED_MAX = 1 << 20
"""Changed keys that are remembered, each once for each slice. With so many results come out, whatever the time."""


class ChangedKeys:
    """Keys by slice; each slice has a key once. Without key columns a slice is just there or not."""

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything
        """Whether all keys of all slices count as changed."""
        self._index: dict[int, KeyIndex] = {}
        self._keys: dict[int, list[pa.RecordBatch]] = {}
        self.rows = 0
        """Keys that are remembered, each once for each slice."""

    def __bool__(self) -> bool:
        return self.everything or bool(self._keys)

    @property
    def slices(self) -> Times:
        """The slices with changed keys, ascending."""
        return np.array(sorted(self._keys), dtype=np.int64)

    def add(self, slices: Times, keys: pa.RecordBatch) -> None:
        """These keys have changed in these slices: of each row one."""
        if self.everything:
            return
        for node in np.unique(slices).tolist():
            if not keys.num_columns:
                if node not in self._keys:
                    self._keys[node] = [keys.slice(0, 0)]
                    self.rows += 1
                continue
            rows = keys.filter(pa.array(slices == node))
            index = self._index.setdefault(node, KeyIndex(tuple(keys.schema.names)))
            new = index.upsert(rows).new_rows
            if len(new):
                self._keys.setdefault(node, []).append(rows.take(pa.array(new)))
                self.rows += len(new)

    def of(self, slices: Iterable[int]) -> list[pa.RecordBatch]:
        """The changed keys of some slices; a key may be in several."""
        return [keys for node in slices for keys in self._keys.get(node, ())]

    def forget(self, slices: Iterable[int]) -> None:
        """Slices that are over."""
        for node in slices:
            self._index.pop(node, None)
            # Without columns a batch has no rows, and stands for one.
            self.rows -= sum(keys.num_rows or 1 for keys in self._keys.pop(node, ()))


class EarlyResults:
    """Changes and moments of one operator."""

    def __init__(self, every_ms: int, *, restored: bool, at_once_ms: int = 0) -> None:
        """`at_once_ms`: a moment that has come for certain."""
        self._every_ms, self._at_once_ms = every_ms, at_once_ms
        self._changed = ChangedKeys(everything=restored)
        self._emitting = ChangedKeys()
        self._due_ms: int | None = at_once_ms if restored else None

    def note(self, slices: Times, keys: pa.RecordBatch, now_ms: int) -> None:
        """Rows of these keys were added to these slices."""
        self._changed.add(slices, keys)
        if self._changed.rows >= CHANGED_MAX:
            self._due_ms = self._at_once_ms
        elif self._due_ms is None:
            self._due_ms = self._next_ms(now_ms)

    def due_ms(self, now_ms: int) -> int | None:
        """When results come out next. None: nothing has changed. A clock that was set back does not delay them."""
        return None if self._due_ms is None else min(self._due_ms, self._next_ms(now_ms))

    @property
    def is_emitting(self) -> bool:
        """Whether what `begin` gave is not out yet."""
        return bool(self._emitting)

    @property
    def is_full(self) -> bool:
        """Whether results are to come out at once, whatever the time."""
        return self._changed.rows >= CHANGED_MAX

    def begin(self) -> ChangedKeys:
        """Results come out now. Returns what they are of; `done` when they are out."""
        assert not self._emitting, "results come out already"
        self._emitting, self._changed, self._due_ms = self._changed, ChangedKeys(), None
        return self._emitting

    def done(self) -> None:
        """All that `begin` gave is out."""
        self._emitting = ChangedKeys()

    @property
    def not_out(self) -> tuple[ChangedKeys, ChangedKeys]:
        """All changes that may not have come out."""
        return self._emitting, self._changed

    def forget(self, slices: Iterable[int]) -> None:
        """Slices that are over."""
        for node in slices:
            self._emitting.forget([node])
            self._changed.forget([node])

    def _next_ms(self, now_ms: int) -> int:
        return now_ms - now_ms % self._every_ms + self._every_ms
