"""Frozen keyed state on its way to storage: rows, or the keys that are gone, a block of slots at a time.

The asynchronous part of a snapshot draws the chunks. Rules:
- A block has as many rows as `BlockSize` says. They are sorted by key group and cut between key groups into chunks of
  at least `CHUNK_ROWS_MIN` rows and `CHUNK_BYTES_MIN` bytes.
- The pages of a block are released as soon as it is encoded. Then the owner need not copy them any more, and if it has,
  their memory is free.
- If only a few slots have changed, their rows are gathered at the freeze, and no page stays pinned.
- A snapshot that is dropped unwritten keeps its pins. That costs one copy of each page, at its next change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.block_size import BLOCK_ROWS, BlockSize
from tidegate.state.columnar.dirty_slots import Bitmaps, flags, marked, slots_in
from tidegate.state.columnar.key_columns import FrozenKeys
from tidegate.state.common.pages import FrozenColumn, pages_for
from tidegate.state.common.pins import Pinned
from tidegate.state.kernels.paged import PAGE_BITS
from tidegate.state.kernels.partition import Places, places_by_group
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.snapshot import FrozenState, StateChunk

GATHERED_ROWS_MAX = 8192
"""Up to so many rows are gathered at the freeze. It takes a few ms; pinned pages would be copied one by one."""
GATHERED_BYTES_MAX = 1 << 22
CHUNK_ROWS_MIN = 8192
CHUNK_BYTES_MIN = 1 << 19
"""A chunk costs some 0.1 ms, and a restore at another parallelism reads whole ones."""


class FrozenValues(Protocol):
    """What the pages of a state held at the freeze."""

    @property
    def row_bytes(self) -> int | None:
        """About how many bytes the values of a row take. None: nobody knows."""
        ...

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of these slots had the state."""
        ...

    def columns(self, slots: NDArray[np.int32], places: Places | None = None) -> Sequence[pa.Array]:
        """The value columns of these slots, all of which had the state: in their order, or each at its place."""
        ...

    def let_go(self, start: int, stop: int) -> None:
        """Drop the pages from `start` to `stop`."""
        ...


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    """A `FrozenState` of all slots, or if `dirty` is set, of those that are marked in it.

    `all_live`: every slot has the state, so that nobody need look.
    """

    state: str
    names: tuple[str, ...]
    keys: FrozenKeys
    groups: FrozenColumn
    slots: int
    values: FrozenValues
    pinned: Pinned
    dirty: Bitmaps | None = None
    removed: bool = False
    kind: StateKind = StateKind.KEYED
    all_live: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """Rows, or keys that are gone, block by block. Can be called once."""
        try:
            pages_done, size = 0, BlockSize(self.keys, self.values.row_bytes)
            for slots, pages in self._blocks(size):
                if len(slots):
                    yield from _cut(self._encoded(slots, size))
                self._let_go(pages_done, pages)
                pages_done = pages
        finally:
            self.pinned.release(pages_for(self.slots))

    def now(self) -> FrozenState:
        """The same state; a few rows are gathered right here, so that no page stays pinned."""
        if self.dirty is None or (rows := marked(self.dirty)) > GATHERED_ROWS_MAX:
            return self
        if rows * (self.values.row_bytes or 0) > GATHERED_BYTES_MAX:
            return self
        slots, size = self._wanted(slots_in(self.dirty, self.slots)), BlockSize(self.keys, self.values.row_bytes)
        if int(size.bytes_of(slots).sum()) > GATHERED_BYTES_MAX:
            return self
        chunks = list(_cut(self._encoded(slots, size))) if len(slots) else []
        self.pinned.release(pages_for(self.slots))
        return GatheredSlots(self.state, chunks, self.removed)

    def _blocks(self, size: BlockSize) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Slots to write, ascending. With each block, the page below which everything is then done."""
        left = np.zeros(0, dtype=np.int32)
        for start in range(0, self.slots, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self.slots)
            slots = np.arange(start, stop, dtype=np.int32)
            if self.dirty is not None:
                slots = slots[flags(self.dirty, start, stop)]
            wanted = self._wanted(slots)
            left = np.concatenate((left, wanted)) if len(left) else wanted
            while len(left) >= (rows := size.rows(left)) or stop == self.slots or not len(left):
                block, left = left[:rows], left[rows:]
                yield block, int(left[0]) >> PAGE_BITS if len(left) else pages_for(stop)
                if not len(left):
                    break

    def _wanted(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of these slots that have the state; if we look for keys that are gone, those that lack it."""
        if not len(slots):
            return slots
        if self.all_live:
            return slots[:0] if self.removed else slots
        live = self.values.live(slots)
        return slots[~live] if self.removed else slots if live.all() else slots[live]

    def _encoded(self, slots: NDArray[np.int32], size: BlockSize) -> StateChunk:
        """Rows of these ascending slots, sorted by key group. Each value is moved once. `size` learns from them."""
        places = places_by_group(self.groups.raw_ascending(slots))
        keys = self.keys.placed(slots, places)
        columns = () if self.removed else self.values.columns(slots, places)
        size.learn(columns)
        names = keys.schema.names + ([] if self.removed else list(self.names))
        rows = pa.RecordBatch.from_arrays([*keys.columns, *columns], names=names)
        return StateChunk(rows, places.first, places.bounds)

    def _let_go(self, start: int, stop: int) -> None:
        self.pinned.release(stop)
        self.values.let_go(start, stop)


@dataclass(frozen=True, slots=True)
class GatheredSlots:
    """A `FrozenState` whose rows were gathered at the freeze."""

    state: str
    gathered: list[StateChunk]
    removed: bool
    kind: StateKind = StateKind.KEYED

    def chunks(self) -> Iterator[StateChunk]:
        """The gathered rows, or keys that are gone."""
        return iter(self.gathered)


def _cut(chunk: StateChunk) -> Iterator[StateChunk]:
    """Cut between key groups into chunks of at least so many rows and bytes."""
    starts = np.array(chunk.group_rows)
    rows_min = max(CHUNK_ROWS_MIN, CHUNK_BYTES_MIN * chunk.rows.num_rows // max(1, chunk.rows.nbytes))
    groups, first = len(starts) - 1, 0
    while first < groups:
        stop = min(int(np.searchsorted(starts, starts[first] + rows_min)), groups)
        if starts[groups] - starts[stop] < rows_min:
            stop = groups
        rows = chunk.rows.slice(int(starts[first]), int(starts[stop] - starts[first]))
        bounds = starts[first : stop + 1] - starts[first]
        yield StateChunk(rows, chunk.first_group + first, tuple(bounds.tolist()))
        first = stop
