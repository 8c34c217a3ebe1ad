"""Frozen keyed state in canonical order: all slots, by key group and then by key.

Canonical savepoints have this order. Slots are in the order in which keys first came, so the rows of a key group are
scattered over all pages. They are gathered a run of key groups at a time. That takes memory for one run, and 12 bytes a
slot to sort by key group. All pages are held until the last row is gathered, so each page that changes meanwhile is
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.state.columnar.block_size import BLOCK_ROWS, BlockSize
from tidegate.state.columnar.frozen_slots import FrozenValues
from tidegate.state.columnar.key_columns import FrozenKeys
from tidegate.state.common.key_order import sortable_keys
from tidegate.state.common.pages import FrozenColumn, pages_for
from tidegate.state.common.pins import Pinned
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.snapshot import StateChunk


def by_bytes(keys: pa.RecordBatch, groups: NDArray[np.uint16]) -> pa.Array:
    """Positions of these keys, ordered by key group and then by their bytes."""
    return pc.sort_indices(sortable_keys(keys, groups))


@dataclass(frozen=True, slots=True)
class SortedSlots:
    """A `FrozenState` with the rows of all slots that have the state."""

    state: str
    names: tuple[str, ...]
    keys: FrozenKeys
    groups: FrozenColumn
    slots: int
    values: FrozenValues
    pinned: Pinned
    order: Callable[[pa.RecordBatch, NDArray[np.uint16]], pa.Array] = by_bytes
    """Gives the positions of keys in canonical order. The keys are those of whole key groups."""
    removed: bool = False
    kind: StateKind = StateKind.KEYED

    def chunks(self) -> Iterator[StateChunk]:
        """Rows, a run of key groups at a time. Can be called once."""
        pages = pages_for(self.slots)
        try:
            live = self._live()
            groups = self.groups.raw(live)
            order = np.argsort(groups, kind="stable")
            live, groups = live[order], groups[order]
            size = BlockSize(self.keys, self.values.row_bytes)
            for start, stop in _runs(live, groups, size):
                yield self._encoded(np.sort(live[start:stop]), size)
        finally:
            self.pinned.release(pages)
            self.values.let_go(0, pages)

    def _live(self) -> NDArray[np.int32]:
        found = [np.zeros(0, dtype=np.int32)]
        for start in range(0, self.slots, BLOCK_ROWS):
            slots = np.arange(start, min(start + BLOCK_ROWS, self.slots), dtype=np.int32)
            found.append(slots[self.values.live(slots)])
        return np.concatenate(found)

    def _encoded(self, slots: NDArray[np.int32], size: BlockSize) -> StateChunk:
        """Rows of these ascending slots, which are all of some key groups. `size` learns from them."""
        keys, groups = self.keys.take(slots), self.groups.raw(slots)
        order = self.order(keys, groups)
        keys, sorted_slots = keys.take(order), slots[order.to_numpy()]
        first = int(groups.min())
        starts = np.concatenate(([0], np.cumsum(np.bincount(groups - first))))
        names = [*keys.schema.names, *self.names]
        columns = self.values.columns(sorted_slots)
        size.learn(columns)
        rows = pa.RecordBatch.from_arrays([*keys.columns, *columns], names=names)
        return StateChunk(rows, first, tuple(starts.tolist()))


def _runs(live: NDArray[np.int32], groups: NDArray[np.uint16], size: BlockSize) -> Iterator[tuple[int, int]]:
    """Bounds of runs of whole key groups, each of a block at least but the last. `groups`, those of slots, ascend."""
    start = 0
    while start < len(groups):
        last = groups[min(start + size.rows(live[start:]), len(groups)) - 1]
        stop = int(np.searchsorted(groups, last, side="right"))
        yield start, stop
        start = stop
