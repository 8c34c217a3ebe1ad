"""`ColumnarTable`: a vectorised state in memory, in fixed-width columns that kernels change in place, or of any width.

When a batch begins, three things happen to its slots before kernels may change them: pages that a snapshot still reads
are copied, the old contents go into the undo log (by page or by slot), and the slots are marked as changed. One more
column, of one byte per slot, stores which slots have a row. A row that is added and removed between two snapshots
appears in neither, so a snapshot costs only the difference between the two.

`ColumnarNamespaces` also finds the rows of a namespace without a scan of all rows. It keeps the slots of each namespace
in memory, four bytes per row. This index is derived: it is extended as rows come, and rebuilt from the keys after a
restore. It may still contain removed rows, so readers check which rows are live.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace, key_pieces
from tidegate.state.columnar.paged_state import FrozenSlots, PagedState, SortedSlots
from tidegate.state.columnar.undo_log import KeptPage, NotedRows, Notes, TableNotes
from tidegate.state.common.backend import ValueSpec, duplicate_key
from tidegate.state.common.pages import FrozenColumn, PagedColumn, pages_for
from tidegate.state.common.table_columns import BatchColumn, VaryingColumn
from tidegate.state.kernels.columns import fixed_values
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.paged import PAGE_ROWS, Bitmap, revive, scatter, touched_pages
from tidegate.state.kernels.partition import Places
from tidegate.state.key_index.hash_table import Upserted
from tidegate.storage.state.snapshot import Cut

_LIVE = ValueSpec("live", pa.uint8(), 0)
_NO_SLOTS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
_FOUND_ROWS = 1 << 20
"""How many keys at a time are read to rebuild the namespace index."""


class ColumnarTable(PagedState[TableNotes]):
    """A `VectorTable` in memory, whose rows are indexed by the slots of a `KeySpace`."""

    def __init__(self, space: KeySpace, name: str, specs: Sequence[ValueSpec], incremental: bool) -> None:
        super().__init__(space, name, (spec.name for spec in specs), incremental)
        self.specs = tuple(specs)
        self.new_slots: NDArray[np.int32] = _NO_SLOTS
        """Slots that got a row in this batch."""
        self._in_snapshot_below = 0
        """Slots below this one may be in an earlier snapshot."""
        self._columns = {spec.name: BatchColumn(self, spec) for spec in specs}
        self._live = PagedColumn(_LIVE)
        space.add(self)

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch of keys, and returns their slots. Adds a row for each key that has none."""
        upserted = self._space.upsert(keys)
        new_rows = self._begin(upserted, new_only=new_only)
        return Upserted(upserted.slots, upserted.first_rows, new_rows)

    def column(self, name: str) -> BatchColumn:
        """Returns the value column called `name`."""
        return self._columns[name]

    def remove(self, slots: NDArray[Any]) -> None:
        """Removes the rows of these slots, which belong to the batch that `upsert` began."""
        slots = distinct_integers(slots).astype(np.int32, copy=False)
        slots = slots[self.live(slots)]
        scatter(self._live.pages, slots, np.zeros(len(slots), dtype=np.uint8))
        self._rows -= len(slots)
        self._unmark_new(slots)

    def done(self) -> None:
        """Ends the batch that `upsert` began."""
        self.new_slots = _NO_SLOTS
        self._collect()
        self._space.settle()

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all keys that have a row, in slot order, in batches, each with the slots of its keys."""
        return key_pieces(self._space, self.live, rows_max)

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns a mask: True for each of these slots that has a row."""
        return self._live.raw(slots).view(np.bool_)

    def grow(self, slots: int) -> None:
        """Makes room for `slots` slots of the state."""
        pages = pages_for(slots)
        for column in self._columns.values():
            column.paged.grow(pages)
        self._live.grow(pages)
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of the state: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        for column in self._columns.values():
            column.paged = column.paged.rebuilt(kept)
        self._live = self._live.rebuilt(kept)
        # After a restore `kept` may be unordered; then all slots are in a snapshot.
        self._in_snapshot_below = int(np.count_nonzero(kept < self._in_snapshot_below))
        super().rebuild(kept, slots)

    def freeze(self, cut: Cut) -> tuple[FrozenSlots | SortedSlots, ...]:
        """Returns snapshots of all rows or, with a base, of the changes since the base."""
        frozen = super().freeze(cut)
        if not cut.in_order:
            self._in_snapshot_below = self._space.slots
        return frozen

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Stores rows of a checkpoint layer. Raises CorruptionError for a key of layer 0 (the base) that has a row
        already.
        """
        keys = rows.select(self._key_names())
        if layer == 0 and self._space.can_append(self):
            self._append(keys, rows)
        else:
            self._put(keys, rows, layer)
        self._in_snapshot_below = self._space.slots

    def _put(self, keys: pa.RecordBatch, rows: pa.RecordBatch, layer: int) -> None:
        """Stores rows of a checkpoint layer, which replace existing rows of the same keys."""
        upserted = self._space.upsert(keys)
        known = len(upserted.slots) - len(self._begin(upserted, mark=False))
        if layer == 0 and known:
            raise duplicate_key(self.name)
        for name, column in self._columns.items():
            column.paged.put(upserted.slots, rows.column(name))
        self.new_slots = _NO_SLOTS

    def set_live(self, slots: NDArray[np.int32], live: NDArray[np.bool_]) -> None:
        """Adds or removes the rows of these distinct slots. Rows can only be added to a table without value columns."""
        self._own(slots)
        if self._notes is not None:
            self._note(self._notes, slots)
        self._rows += int(live.sum()) - int(self.live(slots).sum())
        scatter(self._live.pages, slots, live.view(np.uint8))
        if self.dirty is not None:
            self.dirty.mark(slots)
        self._unmark_new(slots[~live])

    def begin_notes(self) -> TableNotes:
        """Starts to record the former contents of rows before they change. Returns the object that collects them."""
        self._notes = TableNotes(self._space.slots, self._rows, self._still_read)
        return self._notes

    def undo(self, notes: Notes) -> None:
        """Restores the contents that the state had when `notes` (undo data) began."""
        assert isinstance(notes, TableNotes)
        self._notes = None  # the changes of the undo itself are not noted
        self._put_back(notes.kept)
        for noted in notes.noted:
            self._own(noted.slots)
            scatter(self._live.pages, noted.slots, noted.live)
            for column, values, valid in zip(self._columns.values(), noted.values, noted.valid, strict=True):
                column.paged.put_raw(noted.slots, values, valid)
        later = np.arange(notes.slots_below, self._space.slots, dtype=np.int32)
        self._clear(later[self.live(later)])
        self.new_slots = _NO_SLOTS
        self._in_snapshot_below = self._space.slots
        self._went_back(notes.rows)

    def _append(self, keys: pa.RecordBatch, rows: pa.RecordBatch) -> None:
        """Stores the rows of keys that are new in the key space."""
        first_slot = self._space.slots
        live = pa.array(np.ones(rows.num_rows, dtype=np.uint8))
        columns = [(column.paged, rows.column(name)) for name, column in self._columns.items()]
        self._space.side_by_side(
            [column.begin_extend(first_slot, values) for column, values in (*columns, (self._live, live))]
        )
        self._rows += rows.num_rows
        self._space.append(self, keys)

    def forget(self, keys: pa.RecordBatch) -> None:
        """Removes the rows of these keys, given as stored key columns. Keys without a row are ignored."""
        slots = self._space.upsert(keys).slots
        slots = distinct_integers(slots[self.live(slots)])
        self._own(slots)
        if self._notes is not None:
            self._note(self._notes, slots)
        self._clear(slots)
        self._rows -= len(slots)
        self._in_snapshot_below = self._space.slots

    def _collect(self) -> None:
        """Drops values of varying width to which neither a row nor the undo log refers."""
        for position, column in enumerate(self._columns.values()):
            if isinstance(column.paged, VaryingColumn) and column.paged.needs_collection:
                slots = np.arange(self._space.slots, dtype=np.int32)
                notes = [each for each in self._space.undo.notes_of(self.name) if isinstance(each, TableNotes)]
                noted = (each.numbers_in(position) for each in notes)
                column.paged.collect([column.paged.raw(slots[self.live(slots)]), *chain.from_iterable(noted)])

    def _unmark_new(self, slots: NDArray[np.int32]) -> None:
        """Removes the marks of removed rows that are in no snapshot, because later snapshots need not record their
        removal.
        """
        if self.dirty is not None:
            self.dirty.unmark(slots[slots >= self._in_snapshot_below])

    def _clear(self, slots: NDArray[np.int32]) -> None:
        """Removes the rows of these slots from the table."""
        self._own(slots)
        scatter(self._live.pages, slots, np.zeros(len(slots), dtype=np.uint8))

    def _begin(
        self, upserted: Upserted, mark: bool = True, stored: int = 0, new_only: bool = False
    ) -> NDArray[np.int32]:
        """Prepares the slots of a batch for changes. Returns the rows whose key had no row.

        `stored` is the number of new keys whose row was written to their slot before.
        """
        if self._rows - stored == self._space.slots - len(upserted.new_rows):
            candidates = upserted.new_rows  # every older slot has a row
        else:
            candidates = upserted.first_rows
        changing = upserted.slots
        if new_only:
            changing = changing[candidates]
            changing = changing[~self.live(changing)]
        self._own(changing)
        if self._notes is not None:
            self._note(self._notes, changing)
        if mark and self.dirty is not None:
            self.dirty.mark(changing)
        revived = np.empty(len(candidates), dtype=np.int32)
        found = revive(self._live.pages, upserted.slots, candidates, revived)
        new_rows = revived[:found]
        self._rows += found
        self.new_slots = upserted.slots[new_rows]
        if found > len(upserted.new_rows) - stored:
            for column in self._columns.values():
                column.paged.reset(self.new_slots)
        elif found:
            for column in self._columns.values():
                column.paged.reset_valid(self.new_slots)
        return new_rows

    def _note(self, notes: TableNotes, slots: NDArray[np.int32]) -> None:
        """Records the former contents of these slots in `notes`, unless they are recorded already."""
        slots = notes.first(slots)
        if not len(slots):
            return
        pages = notes.dense(slots)
        if len(pages) and self._space.undo.has_room(len(pages) * PAGE_ROWS * self._row_bytes):
            self._copy(pages, notes.noted_before(slots, pages))
            slots = notes.not_kept(slots)
        if not len(slots):
            return
        self._make_room(len(slots))
        columns = [column.paged for column in self._columns.values()]
        values, valid = tuple(c.raw(slots) for c in columns), tuple(c.raw_valid(slots) for c in columns)
        notes.add(NotedRows(slots, self._live.raw(slots), values, valid, len(slots) * self._beyond_bytes()))

    def _own(self, slots: NDArray[np.int32]) -> None:
        """Copies the pages of these slots that a snapshot still reads."""
        if self._pins.any():
            self._copy(touched_pages(slots, self._pins.counts))

    def _copy(self, pages: NDArray[np.int32], noted: Sequence[Bitmap] = ()) -> None:
        """Replaces pages by copies, and records the former pages in the undo log.

        `noted` has, for each page, the slots that were recorded one by one.
        """
        if self._notes is not None:
            self._make_room(len(pages) * PAGE_ROWS)
        columns = [column.paged.copy_pages(pages) for column in self._columns.values()]
        live, versions = self._live.copy_pages(pages), self._pins.replaced(pages).tolist()
        if self._notes is not None:
            beyond = PAGE_ROWS * self._beyond_bytes()
            formers = zip(*columns, strict=True) if columns else repeat(())
            of_pages = zip(versions, live, formers, noted or repeat(None), strict=False)
            self._notes.keep(pages, [KeptPage(v, one, former, beyond, bits) for v, one, former, bits in of_pages])
            # Marks only serve to exchange pages. With plenty of memory, they would cost time for nothing.
            if self._notes.may_mark_all and self._space.undo.has_plenty(self._notes.size_bytes):
                self._notes.mark_all()

    def _still_read(self, pages: NDArray[np.int32], versions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns a mask: True for each of these pages that a snapshot still reads. Never true for pages recorded
        before a rebuild.
        """
        return self._pins.still_read(pages, versions)

    @property
    def _row_bytes(self) -> int:
        return 1 + sum(column.value_bytes for column in self._columns.values())

    def _make_room(self, rows: int) -> None:
        """Reduces older undo data, before `rows` rows are recorded one by one or with their pages."""
        self._space.undo.make_room(rows * self._row_bytes, self._space.slots * self._row_bytes)

    def _beyond_bytes(self) -> int:
        """Returns the estimated size in bytes, for each row, of values of variable width, which are stored outside of
        the pages.
        """
        return sum(column.value_bytes - column.paged.dtype.itemsize for column in self._columns.values())

    def _put_back(self, kept: Mapping[int, KeptPage]) -> None:
        """Restores the former pages `kept` of the undo log."""
        for page, former in kept.items():
            self._live.put_back(page, former.live)
            for column, of_column in zip(self._columns.values(), former.columns, strict=True):
                column.paged.put_back(page, of_column)
        versions = np.array([former.version for former in kept.values()], dtype=np.int64)
        self._pins.put_back(np.array(list(kept), dtype=np.int32), versions)

    def _frozen_values(self, removed: bool) -> _FrozenTable:
        columns = () if removed else tuple(column.paged.freeze() for column in self._columns.values())
        size = 0 if removed else sum(column.value_bytes for column in self._columns.values())
        return _FrozenTable(self._live.freeze(), columns, size)

    def _key_names(self) -> list[str]:
        schema = self._space.schema
        assert schema is not None
        return list(schema.names)


class _FrozenTable:
    """The values of a vectorised state at a snapshot (a `FrozenValues`)."""

    __slots__ = ("_columns", "_live", "row_bytes")

    def __init__(self, live: FrozenColumn, columns: tuple[FrozenColumn, ...], row_bytes: int) -> None:
        self._live = live
        self._columns = columns
        self.row_bytes = row_bytes

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self._live.raw_ascending(slots).view(np.bool_)

    def columns(self, slots: NDArray[np.int32], places: Places | None = None) -> list[pa.Array]:
        return [column.take(slots, places) for column in self._columns]

    def drop_pages(self, start: int, stop: int) -> None:
        for column in (self._live, *self._columns):
            column.drop_pages(start, stop)


class ColumnarNamespaces(ColumnarTable):
    """A `NamespacedTable` in memory, whose rows are indexed by the slots of a `KeySpace`."""

    def __init__(self, space: KeySpace, name: str, specs: Sequence[ValueSpec], incremental: bool) -> None:
        self._noted: dict[int, list[NDArray[np.int32]]] | None = {}
        """Slots of each namespace, which may contain duplicates and removed rows. None if it must be rebuilt."""
        super().__init__(space, name, specs, incremental)

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch of keys, and returns their slots. Adds a row for each key that has none."""
        upserted = super().upsert(keys, new_only)
        if len(upserted.new_rows) and self._noted is not None:
            note(self._noted, fixed_values(keys.column(0))[upserted.new_rows], upserted.slots[upserted.new_rows])
        return upserted

    def namespaces(self) -> NDArray[np.int64]:
        """Returns the namespaces that have a row, ascending."""
        return np.array([name for name in sorted(self._found()) if len(self._slots(name))], dtype=np.int64)

    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of a namespace, in slot order, in batches, each with the slots of its keys."""
        return self.scan_namespaces((namespace,), rows_max, groups)

    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of a namespace like `scan_namespace`, and removes the rows of each batch when it is yielded.

        The values of removed rows can be read until the next batch is requested.
        """
        return self.drain_namespaces((namespace,), rows_max, groups)

    def scan_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of several namespaces in batches, each with the slots of its keys.

        Namespaces come one after the other, and their keys are in slot order.
        """
        with self._space.reading():
            slots = self._slots_of(namespaces)
            if groups is not None:
                of = self._space.groups_of(slots)
                slots = slots[(of >= groups.start) & (of < groups.stop)]
            if len(slots):
                keys, _ = self._space.freeze()
                for start in range(0, len(slots), rows_max):
                    piece = slots[start : start + rows_max]
                    yield keys.take(piece), piece

    def drain_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of several namespaces like `scan_namespaces`, and removes the rows of each batch when it is
        yielded.

        The values of removed rows can be read until the next batch is requested.
        """
        for keys, slots in self.scan_namespaces(namespaces, rows_max, groups):
            self.set_live(slots, np.zeros(len(slots), dtype=np.bool_))
            yield keys, slots
        self._space.settle()

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Stores the rows of a checkpoint layer. `layer` is the number of the layer."""
        self._noted = None
        super().load(rows, layer)

    def undo(self, notes: Notes) -> None:
        """Restores the contents that the state had when `notes` (undo data) began."""
        self._noted = None
        super().undo(notes)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of the state: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        if self._noted is not None:
            names = list(self._noted)
            parts = [part for name in names for part in self._noted[name]]
            noted = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
            of_parts = [number for number, name in enumerate(names) for _ in self._noted[name]]
            of = np.repeat(np.array(of_parts, dtype=np.int64), [len(part) for part in parts])
            # The distinct live slots of each namespace, ascending.
            living = distinct_integers((of[self.live(noted)] << 32) + noted[self.live(noted)])
            moved = np.searchsorted(kept, living & 0xFFFFFFFF).astype(np.int32)
            bounds = np.searchsorted(living >> 32, np.arange(len(names) + 1)).tolist()
            ranges = zip(names, bounds, bounds[1:], strict=False)
            self._noted = {name: [moved[start:stop]] for name, start, stop in ranges if stop > start}
        super().rebuild(kept, slots)

    def _slots(self, namespace: int) -> NDArray[np.int32]:
        """Returns the ascending slots of a namespace that have a row."""
        noted = self._found()
        parts = noted.get(namespace)
        if parts is None:
            return np.zeros(0, dtype=np.int32)
        slots = distinct_integers(np.concatenate(parts)) if len(parts) > 1 else parts[0]
        living = slots[self.live(slots)]
        if len(living):
            noted[namespace] = [living]
        else:
            del noted[namespace]
        return living

    def _slots_of(self, namespaces: Sequence[int]) -> NDArray[np.int32]:
        """Returns the slots of several namespaces that have a row.

        Checks the slots of all namespaces in one call, which costs as much as for one namespace.
        """
        if len(namespaces) == 1:
            return self._slots(namespaces[0])
        noted = self._found()
        found = {name: parts for name in namespaces if (parts := noted.get(name)) is not None}
        if not found:
            return np.zeros(0, dtype=np.int32)
        slots = np.concatenate([part for parts in found.values() for part in parts])
        if all(len(parts) == 1 for parts in found.values()) and bool(self.live(slots).all()):
            return slots
        return np.concatenate([self._slots(name) for name in found])

    def _found(self) -> dict[int, list[NDArray[np.int32]]]:
        if self._noted is None:
            noted: dict[int, list[NDArray[np.int32]]] = {}
            for keys, slots in key_pieces(self._space, self.live, _FOUND_ROWS):
                note(noted, fixed_values(keys.column(0)), slots)
            self._noted = noted
        return self._noted


def note(noted: dict[int, list[NDArray[np.int32]]], namespaces: NDArray[np.int64], slots: NDArray[np.int32]) -> None:
    """Adds distinct slots to the index `noted`, which has a list of slots for each namespace."""
    first = int(namespaces[0])
    if first == int(namespaces[-1]) and bool((namespaces == first).all()):
        noted.setdefault(first, []).append(np.sort(slots))  # unordered if old slots got a row again
        return
    order = np.lexsort((slots, namespaces))
    ordered, of = namespaces[order], slots[order]
    bounds = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(of)]
    for name, (start, stop) in zip(ordered[bounds[:-1]].tolist(), pairwise(bounds), strict=True):
        noted.setdefault(name, []).append(of[start:stop])
