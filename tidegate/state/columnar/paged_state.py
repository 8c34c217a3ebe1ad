"""`PagedState`: the base of every state over a `KeySpace`, and its frozen forms for storage.

It tracks changes for incremental snapshots and for the undo log. A freeze takes one reference per page: the pages are
pinned, and the owner copies a page before it writes to it.

`FrozenSlots` is frozen state on its way to storage: rows or removed keys, a block of slots at a time. The asynchronous
part of a snapshot draws the chunks. Rules:
- A block has as many rows as `BlockSize` allows. They are sorted by key group and cut between key groups into chunks of
  at least `CHUNK_ROWS_MIN` rows and `CHUNK_BYTES_MIN` bytes.
- The pages of a block are released as soon as it is encoded. The owner need not copy them any more, and if it already
  has, their memory is free.
- If only a few slots have changed, their rows are gathered at the freeze, and no page stays pinned.
- A snapshot that is dropped unwritten keeps its pins. That costs one copy of each page, at its next change.

`SortedSlots` has all rows in canonical order, for canonical savepoints: by key group and then by key, as RocksDB sorts
them. Slots are in the order in which keys first came, so the rows of a key group are scattered over all pages. Rows are
gathered a run of key groups at a time, which takes memory for one run, and 12 bytes per slot to sort by key group. All
pages are held until the last row is gathered, so each page that changes before that is copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.state.columnar.change_tracking import Bitmaps, DirtySlots, flags, live_or_marked, marked, slots_in
from tidegate.state.columnar.key_space import BLOCK_ROWS, BlockSize, FrozenKeys, KeySpace
from tidegate.state.columnar.undo_log import Notes
from tidegate.state.common.pages import FrozenColumn, Pinned, Pins, pages_for
from tidegate.state.kernels.columns import key_forms
from tidegate.state.kernels.paged import PAGE_BITS
from tidegate.state.kernels.partition import Places, places_by_group
from tidegate.state.kernels.row_encoding import encode_rows
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, FrozenState, StateChunk

N = TypeVar("N", bound=Notes)
GATHERED_ROWS_MAX = 8192
"""Up to this many rows are gathered at the freeze. That takes a few ms; pinned pages would be copied one by one."""
GATHERED_BYTES_MAX = 1 << 22
CHUNK_ROWS_MIN = 8192
CHUNK_BYTES_MIN = 1 << 19
"""A chunk costs about 0.1 ms, and a restore at another parallelism reads whole chunks."""


class PagedState(ABC, Generic[N]):
    """Base class of states in pages, indexed by slot, with an undo log.

    `N` is the type of the undo data. `columns` are the names of the value columns.
    """

    def __init__(self, space: KeySpace, name: str, columns: Iterable[str], incremental: bool) -> None:
        self.name = name
        self._space = space
        self._value_names = tuple(columns)
        self._pins = Pins()
        self.dirty = DirtySlots() if incremental else None
        self._notes: N | None = None
        """The undo log's current notes of this state, or None if changes are not noted."""
        self._rows = 0

    @property
    def used_slots(self) -> int:
        """Returns the number of slots that have the state."""
        return self._rows

    @property
    def rows(self) -> int:
        """Returns the number of keys that have the state."""
        return self._rows

    @abstractmethod
    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns a mask: True for each of these slots that has the state."""

    def grow(self, slots: int) -> None:
        """Makes room for `slots` slots of the state."""
        self._pins.grow(pages_for(slots))
        if self.dirty is not None:
            self.dirty.grow(slots)

    def needed(self, slots: int) -> NDArray[np.bool_]:
        """Returns a mask of slots: True if the slot has the state, or if a later snapshot may record its removal."""
        return live_or_marked(self.live(np.arange(slots, dtype=np.int32)), self.dirty)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of the state: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        self._pins = Pins()
        self._pins.grow(pages_for(len(kept)))
        if self.dirty is not None:
            self.dirty.rebuild(kept, slots)

    def freeze(self, cut: Cut) -> tuple[FrozenSlots | SortedSlots, ...]:
        """Returns snapshots of all rows or, with a base, of the changes since the base. Only references to pages are
        copied.
        """
        if cut.in_order:
            return (self._sorted(),) if self._rows else ()
        dirty = None if self.dirty is None else self.dirty.close(cut.checkpoint_id, cut.base)
        if self._space.schema is None:
            return ()
        if cut.base is None:
            return (self._frozen(None, False),) if self._rows else ()
        assert dirty is not None, "an incremental snapshot of a state that keeps no changes"
        self._space.look_again()
        return self._frozen(dirty, False), self._frozen(dirty, True)

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Returns two numbers of rows: the rows that have changed since the checkpoint `base`, and all rows."""
        return 0 if self.dirty is None else self.dirty.changed_since(base, self._space.slots), self.rows

    @abstractmethod
    def begin_notes(self) -> N:
        """Starts to record the former contents of slots before they change. Returns the object that collects them."""

    def end_notes(self) -> None:
        """Stops recording the former contents of slots."""
        self._notes = None

    @abstractmethod
    def undo(self, notes: Notes) -> None:
        """Restores the contents that the state had when `notes` (undo data) began."""

    @abstractmethod
    def _frozen_values(self, removed: bool) -> FrozenValues:
        """Returns the current values for a snapshot. With `removed`, the snapshot records removed keys, so the caller
        only uses `live`.
        """

    def _sorted_values(self) -> FrozenValues:
        """Returns the current values for a canonical savepoint, in which they have a defined order."""
        return self._frozen_values(removed=False)

    def _went_back(self, rows: int) -> None:
        """Resets the counters after a rewind: the state has `rows` rows again, and no row has changed since that
        checkpoint.
        """
        self._rows = rows
        if self.dirty is not None:
            self.dirty = DirtySlots.none_of(self._space.slots)

    def _frozen(self, dirty: Bitmaps | None, removed: bool) -> FrozenSlots:
        keys, groups = self._space.freeze()
        values, slots = self._frozen_values(removed), self._space.slots
        pinned, all_live = self._pins.pin(), self._rows == slots
        return FrozenSlots(
            self.name, self._value_names, keys, groups, slots, values, pinned, dirty, removed, all_live=all_live
        )

    def _sorted(self) -> SortedSlots:
        """Returns the rows for a canonical savepoint.

        No later snapshot is based on such a savepoint, so the collected changes are not dropped.
        """
        keys, groups = self._space.freeze()
        values, slots = self._sorted_values(), self._space.slots
        return SortedSlots(self.name, self._value_names, keys, groups, slots, values, self._pins.pin())


class FrozenValues(Protocol):
    """The values of a state at the time of a snapshot."""

    @property
    def row_bytes(self) -> int | None:
        """Returns the estimated size of a row's values in bytes, or None if unknown."""
        ...

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns a mask: True for each of these slots that had the state at the snapshot."""
        ...

    def columns(self, slots: NDArray[np.int32], places: Places | None = None) -> Sequence[pa.Array]:
        """Returns the value columns of these slots, all of which had the state at the snapshot.

        With `places`, the values of `slots[i]` are at index `places[i]`. Otherwise they are in the order of `slots`.
        """
        ...

    def drop_pages(self, start: int, stop: int) -> None:
        """Releases the pages from `start` to `stop` (exclusive), because their rows are written."""
        ...


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    """A `FrozenState` of all slots, or of the slots that are marked in `dirty`.

    With `removed`, the snapshot has the keys of marked slots that no longer have the state. Otherwise it has rows. With
    `all_live`, every slot has the state, so `live` is not read.
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
        """Yields the snapshot: its rows (or the removed keys), block by block. Can be called once."""
        try:
            pages_done, size = 0, BlockSize(self.keys, self.values.row_bytes)
            for slots, pages in self._blocks(size):
                if len(slots):
                    yield from _cut(self._encoded(slots, size))
                self._release(pages_done, pages)
                pages_done = pages
        finally:
            self.pinned.release(pages_for(self.slots))

    def now(self) -> FrozenState:
        """Returns this snapshot. If it has few rows, they are copied now, so that the state can change its pages in
        place again.
        """
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
        """Yields blocks of slots to write, ascending, each with the number of pages that are finished after the
        block.
        """
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
        """Returns the slots among `slots` that belong to the snapshot: slots with the state or, with `removed`, slots
        without it.
        """
        if not len(slots):
            return slots
        if self.all_live:
            return slots[:0] if self.removed else slots
        live = self.values.live(slots)
        return slots[~live] if self.removed else slots if live.all() else slots[live]

    def _encoded(self, slots: NDArray[np.int32], size: BlockSize) -> StateChunk:
        """Returns the rows of these ascending slots, sorted by key group. Each value is copied once. Passes the
        measured size of values to `size`.
        """
        places = places_by_group(self.groups.raw_ascending(slots))
        keys = self.keys.placed(slots, places)
        columns = () if self.removed else self.values.columns(slots, places)
        size.learn(columns)
        names = keys.schema.names + ([] if self.removed else list(self.names))
        rows = pa.RecordBatch.from_arrays([*keys.columns, *columns], names=names)
        return StateChunk(rows, places.first, places.bounds)

    def _release(self, start: int, stop: int) -> None:
        self.pinned.release(stop)
        self.values.drop_pages(start, stop)


@dataclass(frozen=True, slots=True)
class GatheredSlots:
    """A snapshot (`FrozenState`) of few rows, which were copied when it was taken."""

    state: str
    gathered: list[StateChunk]
    removed: bool
    kind: StateKind = StateKind.KEYED

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the snapshot: its copied rows (or the removed keys)."""
        return iter(self.gathered)


def _cut(chunk: StateChunk) -> Iterator[StateChunk]:
    """Divides a chunk between key groups into chunks with at least `CHUNK_ROWS_MIN` rows and `CHUNK_BYTES_MIN` bytes
    each.
    """
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


def by_bytes(keys: pa.RecordBatch, groups: NDArray[np.uint16]) -> pa.Array:
    """Returns the indices that sort these keys by key group and then by their bytes. `groups` are their key groups."""
    return pc.sort_indices(sortable_keys(keys, groups))


@dataclass(frozen=True, slots=True)
class SortedSlots:
    """A snapshot (`FrozenState`) for a canonical savepoint: the sorted rows of all slots that have the state."""

    state: str
    names: tuple[str, ...]
    keys: FrozenKeys
    groups: FrozenColumn
    slots: int
    values: FrozenValues
    pinned: Pinned
    order: Callable[[pa.RecordBatch, NDArray[np.uint16]], pa.Array] = by_bytes
    """Returns the positions of keys in canonical order. It gets the keys of whole key groups."""
    removed: bool = False
    kind: StateKind = StateKind.KEYED

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the rows of the snapshot, several key groups at a time. Can be called once."""
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
            self.values.drop_pages(0, pages)

    def _live(self) -> NDArray[np.int32]:
        found = [np.zeros(0, dtype=np.int32)]
        for start in range(0, self.slots, BLOCK_ROWS):
            slots = np.arange(start, min(start + BLOCK_ROWS, self.slots), dtype=np.int32)
            found.append(slots[self.values.live(slots)])
        return np.concatenate(found)

    def _encoded(self, slots: NDArray[np.int32], size: BlockSize) -> StateChunk:
        """Returns the rows of these ascending slots, which are all slots of some key groups. Passes the measured size
        of values to `size`.
        """
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
    """Yields ranges of whole key groups, as start and end index in `live`.

    Each range except the last has at least one block. `groups` are the ascending key groups of the slots `live`.
    """
    start = 0
    while start < len(groups):
        last = groups[min(start + size.rows(live[start:]), len(groups)) - 1]
        stop = int(np.searchsorted(groups, last, side="right"))
        yield start, stop
        start = stop


def sortable_keys(keys: pa.RecordBatch, groups: NDArray[np.uint16]) -> pa.Array:
    """Returns, for each row of stored key columns, bytes that sort in the order of the keys.

    `groups` are the key groups of the rows.
    """
    rows = keys.num_rows
    heads = groups.astype(">u2").view(np.uint8).reshape(rows, 2)
    encoded = encode_rows(key_forms(keys, keys.schema.names), rows, heads)
    buffers = [None, pa.py_buffer(encoded.offsets), pa.py_buffer(encoded.data)]
    return pa.Array.from_buffers(pa.large_binary(), rows, buffers)
