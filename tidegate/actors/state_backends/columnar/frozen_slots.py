"""Frozen keyed state on its way to storage: its rows, or the keys that are gone, by blocks of slots.

Rules: what is produced is taken from `BLOCK_ROWS` slots or more at a time, at most twice as many rows, sorted by key
group and cut between two groups into chunks of `CHUNK_ROWS_MIN` rows or more. As soon as a block is encoded its pages
are let go of, so that the owner need not copy them and their memory is free if it did. A few changes are gathered when
they are frozen, and pin nothing. A snapshot that is given up without being written keeps its pins: a page then is
copied once at its next change, and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.paged import PAGE_ROWS
from tidegate.actors.state_backends.columnar.dirty_slots import Bitmaps, flags, marked, slots_in
from tidegate.actors.state_backends.columnar.key_space import FrozenKeys
from tidegate.actors.state_backends.common.pages import FrozenColumn, Pinned, pages_for
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.snapshot import FrozenState, StateChunk

BLOCK_ROWS = 16 * PAGE_ROWS
GATHERED_ROWS_MAX = 8192
"""So few rows are gathered at once: that takes a few ms, where pinned pages would be copied one by one."""
CHUNK_ROWS_MIN = 8192


class FrozenValues(Protocol):
    """What a state held in its pages."""

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of some slots had the state."""
        ...

    def columns(self, slots: NDArray[np.int32]) -> Sequence[pa.Array]:
        """Their value columns; all of them had the state."""
        ...

    def let_go(self, start: int, stop: int) -> None:
        """Hold some pages no longer."""
        ...


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    """A `FrozenState`. `dirty` None: of all slots; otherwise of those that are marked."""

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

    def chunks(self) -> Iterator[StateChunk]:
        """Rows (or keys that are gone) by blocks. Called once."""
        try:
            pages_done = 0
            for slots, pages in self._blocks():
                if len(slots):
                    yield from _cut(self._encoded(slots))
                self._let_go(pages_done, pages)
                pages_done = pages
        finally:
            self.pinned.release(pages_for(self.slots))

    def now(self) -> FrozenState:
        """The same; what is little is gathered at once, so that no page stays pinned."""
        if self.dirty is None or marked(self.dirty) > GATHERED_ROWS_MAX:
            return self
        slots = self._wanted(slots_in(self.dirty, self.slots))
        chunks = list(_cut(self._encoded(slots))) if len(slots) else []
        self.pinned.release(pages_for(self.slots))
        return GatheredSlots(self.state, chunks, self.removed)

    def _blocks(self) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Slots to write, ascending, and the page up to which everything is done then."""
        collected: list[NDArray[np.int32]] = []
        for start in range(0, self.slots, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self.slots)
            slots = np.arange(start, stop, dtype=np.int32)
            if self.dirty is not None:
                slots = slots[flags(self.dirty, start, stop)]
            slots = self._wanted(slots)
            if len(slots):
                collected.append(slots)
            if stop == self.slots or not collected or sum(map(len, collected)) >= BLOCK_ROWS:
                none = np.zeros(0, dtype=np.int32)
                yield np.concatenate(collected) if collected else none, pages_for(stop)
                collected = []

    def _wanted(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of some slots that have the state, or of keys that are gone those that have not."""
        if not len(slots):
            return slots
        live = self.values.live(slots)
        return slots[~live] if self.removed else slots if live.all() else slots[live]

    def _encoded(self, slots: NDArray[np.int32]) -> StateChunk:
        """Rows of some slots, ascending, sorted by key group; each value is moved once."""
        groups = self.groups.raw(slots)
        first = int(groups.min())
        starts = np.concatenate(([0], np.cumsum(np.bincount(groups - first))))
        # NumPy's stable sort of 16-bit integers is a radix sort.
        order = np.argsort(groups, kind="stable")
        keys = self.keys.take(slots).take(pa.array(order))
        columns = () if self.removed else self.values.columns(slots[order])
        names = keys.schema.names + ([] if self.removed else list(self.names))
        rows = pa.RecordBatch.from_arrays([*keys.columns, *columns], names=names)
        return StateChunk(rows, first, tuple(starts.tolist()))

    def _let_go(self, start: int, stop: int) -> None:
        self.pinned.release(stop)
        self.values.let_go(start, stop)


@dataclass(frozen=True, slots=True)
class GatheredSlots:
    """A `FrozenState` whose rows are there already."""

    state: str
    gathered: list[StateChunk]
    removed: bool
    kind: StateKind = StateKind.KEYED

    def chunks(self) -> Iterator[StateChunk]:
        """Rows, or keys that are gone."""
        return iter(self.gathered)


def _cut(chunk: StateChunk) -> Iterator[StateChunk]:
    """Chunks of `CHUNK_ROWS_MIN` rows or more, cut between two key groups."""
    starts = np.array(chunk.group_rows)
    groups, first = len(starts) - 1, 0
    while first < groups:
        stop = min(int(np.searchsorted(starts, starts[first] + CHUNK_ROWS_MIN)), groups)
        if starts[groups] - starts[stop] < CHUNK_ROWS_MIN:
            stop = groups
        rows = chunk.rows.slice(int(starts[first]), int(starts[stop] - starts[first]))
        bounds = starts[first : stop + 1] - starts[first]
        yield StateChunk(rows, chunk.first_group + first, tuple(bounds.tolist()))
        first = stop
