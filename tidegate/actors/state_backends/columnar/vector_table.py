"""`ColumnarTable`: a vectorised state in memory, in fixed-width columns that kernels change in place.

Rules: when a batch begins, three things happen to its slots before kernels may change them. Pages that a snapshot still
reads are copied, what the slots hold goes into the undo log, and the slots are marked as changed. One more column, of
one byte a slot, tells which slots have a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.key_index.entries import Upserted
from tidegate.actors.kernels.paged import Pages, revive, scatter, touched_pages
from tidegate.actors.state_backends.columnar.dirty_slots import Bitmaps, DirtySlots, live_or_marked
from tidegate.actors.state_backends.columnar.frozen_slots import FrozenSlots
from tidegate.actors.state_backends.columnar.key_space import KeySpace, key_pieces
from tidegate.actors.state_backends.columnar.notes import NotedRows, TableNotes
from tidegate.actors.state_backends.columnar.sorted_slots import SortedSlots
from tidegate.actors.state_backends.columnar.undo_log import Notes
from tidegate.actors.state_backends.common.backend import ValueSpec
from tidegate.actors.state_backends.common.pages import FrozenColumn, PagedColumn, Pins, pages_for
from tidegate.storage.errors import CorruptionError
from tidegate.storage.state.snapshot import Cut

_LIVE = ValueSpec("live", pa.uint8(), 0)
_NO_SLOTS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class TableColumn:
    """A `ValueColumn` over pages. A rebuild of the key space replaces the pages."""

    __slots__ = ("_table", "paged")

    def __init__(self, table: ColumnarTable, spec: ValueSpec) -> None:
        self._table = table
        self.paged = PagedColumn(spec)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values in the pages."""
        return self.paged.dtype

    @property
    def pages(self) -> Pages:
        """Addresses of the pages of values."""
        return self.paged.pages

    @property
    def valid_pages(self) -> Pages:
        """Addresses of the pages of validity; empty if nothing has ever been null."""
        return self.paged.valid_pages

    def track_nulls(self) -> Pages:
        """Start to track validity: new rows of this batch are null, all others valid. Returns `valid_pages`."""
        if not len(self.paged.valid_pages):
            self.paged.start_nulls()
            self.paged.reset_valid(self._table.new_slots)
        return self.paged.valid_pages

    def take(self, slots: NDArray[Any]) -> pa.Array:
        """Values of these slots (a copy)."""
        return self.paged.take(slots)

    def raw(self, slots: NDArray[Any]) -> NDArray[Any]:
        """The same as plain values. Undefined under a null."""
        return self.paged.raw(slots)


class ColumnarTable:
    """A `VectorTable` over the slots of a `KeySpace`."""

    def __init__(self, space: KeySpace, name: str, specs: Sequence[ValueSpec], incremental: bool) -> None:
        self._name = name
        self.specs = tuple(specs)
        self.new_slots: NDArray[np.int32] = _NO_SLOTS
        """Slots that got a row in this batch."""
        self._space = space
        self._columns = {spec.name: TableColumn(self, spec) for spec in specs}
        self._live = PagedColumn(_LIVE)
        self._pins = Pins()
        self.dirty = DirtySlots() if incremental else None
        self._notes: TableNotes | None = None
        """The undo log's notes: what slots held before they changed."""
        self._rows = 0
        space.add(self)

    @property
    def name(self) -> str:
        """Name of the state."""
        return self._name

    @property
    def rows(self) -> int:
        """Keys that have a row."""
        return self._rows

    def upsert(self, keys: pa.RecordBatch) -> Upserted:
        """Begin a batch. Keys without a row get one."""
        upserted = self._space.upsert(keys)
        new_rows = self._begin(upserted)
        return Upserted(upserted.slots, upserted.first_rows, new_rows)

    def column(self, name: str) -> TableColumn:
        """A value column."""
        return self._columns[name]

    def done(self) -> None:
        """End the batch."""
        self.new_slots = _NO_SLOTS
        self._space.settle()

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All keys that have a row, in slot order, in batches, with their slots."""
        return key_pieces(self._space, self.live, rows_max)

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of these slots have a row."""
        return self._live.raw(slots).view(np.bool_)

    def grow(self, slots: int) -> None:
        """Grow to this many slots."""
        pages = pages_for(slots)
        for column in self._columns.values():
            column.paged.grow(pages)
        self._live.grow(pages)
        self._pins.grow(pages)
        if self.dirty is not None:
            self.dirty.grow(slots)

    def needed(self, slots: int) -> NDArray[np.bool_]:
        """Which slots have a row, or lost it and a later snapshot may have to say so."""
        return live_or_marked(self.live(np.arange(slots, dtype=np.int32)), self.dirty)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        for column in self._columns.values():
            column.paged = column.paged.rebuilt(kept)
        self._live = self._live.rebuilt(kept)
        self._pins = Pins()
        self._pins.grow(pages_for(len(kept)))
        if self.dirty is not None:
            self.dirty.rebuild(kept, slots)

    def freeze(self, cut: Cut) -> tuple[FrozenSlots | SortedSlots, ...]:
        """All rows, or what has changed since the base. Takes one reference a page."""
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

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Put stored rows. In layer 0 raises CorruptionError for a key that has a row already."""
        keys = rows.select(self._key_names())
        if layer == 0 and self._space.can_append(self):
            self._append(keys, rows)
            return
        upserted = self._space.upsert(keys)
        known = len(upserted.slots) - len(self._begin(upserted, mark=False))
        if layer == 0 and known:
            raise CorruptionError(
                f"state {self.name!r} holds a key twice: the key groups of the checkpoint's tables overlap"
            )
        for name, column in self._columns.items():
            column.paged.put(upserted.slots, rows.column(name))
        self.new_slots = _NO_SLOTS

    def set_live(self, slots: NDArray[np.int32], live: NDArray[np.bool_]) -> None:
        """Give or take away the rows of these slots, each given once. For a table without value columns."""
        self._own(slots)
        if self._notes is not None:
            self._note(self._notes, slots)
        self._rows += int(live.sum()) - int(self.live(slots).sum())
        scatter(self._live.pages, slots, live.view(np.uint8))
        if self.dirty is not None:
            self.dirty.mark(slots)

    def begin_notes(self) -> TableNotes:
        """Note changes from now on."""
        self._notes = TableNotes(self._space.slots, self._rows)
        return self._notes

    def end_notes(self) -> None:
        """Stop noting changes."""
        self._notes = None

    def undo(self, notes: Notes) -> None:
        """Restore what the state held when these notes began."""
        assert isinstance(notes, TableNotes)
        for noted in notes.noted:
            self._own(noted.slots)
            scatter(self._live.pages, noted.slots, noted.live)
            for column, values, valid in zip(self._columns.values(), noted.values, noted.valid, strict=True):
                column.paged.put_raw(noted.slots, values, valid)
        later = np.arange(notes.slots_below, self._space.slots, dtype=np.int32)
        self._clear(later[self.live(later)])
        self._rows = notes.rows
        self.new_slots = _NO_SLOTS
        if self.dirty is not None:
            self.dirty = DirtySlots.none_of(self._space.slots)

    def _append(self, keys: pa.RecordBatch, rows: pa.RecordBatch) -> None:
        """Put stored rows of new keys."""
        first_slot = self._space.slots
        live = pa.array(np.ones(rows.num_rows, dtype=np.uint8))
        columns = [(column.paged, rows.column(name)) for name, column in self._columns.items()]
        self._space.side_by_side(
            [column.begin_extend(first_slot, values) for column, values in (*columns, (self._live, live))]
        )
        self._rows += rows.num_rows
        self._space.append(self, keys)

    def forget(self, keys: pa.RecordBatch) -> None:
        """Remove the rows of stored keys, where there are any."""
        slots = self._space.upsert(keys).slots
        slots = np.unique(slots[self.live(slots)])
        if self._notes is not None:
            self._note(self._notes, slots)
        self._clear(slots)
        self._rows -= len(slots)

    def _clear(self, slots: NDArray[np.int32]) -> None:
        """Take away the rows of these slots."""
        self._own(slots)
        scatter(self._live.pages, slots, np.zeros(len(slots), dtype=np.uint8))

    def _begin(self, upserted: Upserted, mark: bool = True) -> NDArray[np.int32]:
        """Make the slots of a batch ready to be changed. Returns the rows whose key had no row."""
        self._own(upserted.slots)
        if self._notes is not None:
            self._note(self._notes, upserted.slots)
        if mark and self.dirty is not None:
            self.dirty.mark(upserted.slots)
        if self._rows == self._space.slots - len(upserted.new_rows):
            candidates = upserted.new_rows  # every older slot has a row
        else:
            candidates = upserted.first_rows
        revived = np.empty(len(candidates), dtype=np.int32)
        found = revive(self._live.pages, upserted.slots, candidates, revived)
        new_rows = revived[:found]
        self._rows += found
        self.new_slots = upserted.slots[new_rows]
        if found > len(upserted.new_rows):
            for column in self._columns.values():
                column.paged.reset(self.new_slots)
        elif found:
            for column in self._columns.values():
                column.paged.reset_valid(self.new_slots)
        return new_rows

    def _note(self, notes: TableNotes, slots: NDArray[np.int32]) -> None:
        """Note what these slots hold, if they are not noted yet."""
        slots = notes.first(slots)
        if len(slots):
            columns = [column.paged for column in self._columns.values()]
            values, valid = tuple(c.raw(slots) for c in columns), tuple(c.raw_valid(slots) for c in columns)
            notes.add(NotedRows(slots, self._live.raw(slots), values, valid))

    def _own(self, slots: NDArray[np.int32]) -> None:
        """Copy the pages of these slots that a snapshot still reads."""
        if not self._pins.any():
            return
        for page in touched_pages(slots, self._pins.counts).tolist():
            for column in self._columns.values():
                column.paged.copy_page(page)
            self._live.copy_page(page)
            self._pins.replaced(page)

    def _frozen(self, dirty: Bitmaps | None, removed: bool) -> FrozenSlots:
        keys, groups = self._space.freeze()
        columns = () if removed else tuple(column.paged.freeze() for column in self._columns.values())
        return FrozenSlots(
            self.name,
            tuple(self._columns),
            keys,
            groups,
            self._space.slots,
            _FrozenTable(self._live.freeze(), columns),
            self._pins.pin(),
            dirty,
            removed,
        )

    def _sorted(self) -> SortedSlots:
        """For a canonical savepoint. No later snapshot builds on it, so the collected changes stay."""
        keys, groups = self._space.freeze()
        values = _FrozenTable(self._live.freeze(), tuple(column.paged.freeze() for column in self._columns.values()))
        pinned = self._pins.pin()
        return SortedSlots(self.name, tuple(self._columns), keys, groups, self._space.slots, values, pinned)

    def _key_names(self) -> list[str]:
        schema = self._space.schema
        assert schema is not None
        return list(schema.names)


class _FrozenTable:
    """The `FrozenValues` of a table."""

    __slots__ = ("_columns", "_live")

    def __init__(self, live: FrozenColumn, columns: tuple[FrozenColumn, ...]) -> None:
        self._live = live
        self._columns = columns

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self._live.raw(slots).view(np.bool_)

    def columns(self, slots: NDArray[np.int32]) -> list[pa.Array]:
        return [column.take(slots) for column in self._columns]

    def let_go(self, start: int, stop: int) -> None:
        for column in (self._live, *self._columns):
            column.let_go(start, stop)
