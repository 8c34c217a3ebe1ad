"""States of row-wise functions in memory: a value, list or map for each slot, in pages of Python objects.

A slot without state holds None. Rules:
- A page that a snapshot still reads is copied (its references only) before the first write to it.
- Each list or map knows the epoch in which it was made, and every freeze begins the next epoch. One from an older epoch
  may be in a snapshot: a map is copied before its first change, and a list gets a part of its own for what is appended.
  Values are never changed in place.
- So the undo log can note the object in a slot itself.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.frozen_slots import FrozenSlots
from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.list_parts import ListInParts
from tidegate.state.columnar.notes import CellNotes
from tidegate.state.columnar.paged_state import PagedState
from tidegate.state.columnar.sorted_slots import SortedSlots
from tidegate.state.columnar.undo_log import Notes
from tidegate.state.common.cells import CellSpec
from tidegate.state.common.pages import pages_for
from tidegate.state.common.refusals import held_twice
from tidegate.state.kernels.paged import PAGE_BITS, PAGE_ROWS
from tidegate.state.kernels.partition import Places
from tidegate.storage.rocksdb.values import map_key_codec
from tidegate.storage.state.snapshot import Cut

_IN_PAGE = PAGE_ROWS - 1


class _Map(dict[Any, Any]):
    """A map and the epoch in which it was made."""

    __slots__ = ("epoch",)

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]], epoch: int) -> None:
        super().__init__(entries)
        self.epoch = epoch


class Cells(PagedState[CellNotes]):
    """What value, list and map states share. A ref is a slot."""

    def __init__(self, space: KeySpace, spec: CellSpec, incremental: bool) -> None:
        super().__init__(space, spec.name, (spec.name,), incremental)
        self.spec = spec
        self._pages: list[list[Any]] = []
        self._changed: list[int] = []
        """Slots that have changed since `flush`."""
        self._epoch = 0
        space.add(self)

    def remove(self, ref: int) -> None:
        """Remove the state of a key."""
        if self._held(ref) is not None:
            self._set(ref, None)

    @abstractmethod
    def expire(self, ref: int) -> None:
        """Remove what has expired of a key's state."""

    def expire_many(self, slots: NDArray[np.int32]) -> None:
        """The same for some slots, whether they have the state or not."""
        for slot in slots[self.live(slots)].tolist():
            self.expire(slot)
        self.flush()

    @abstractmethod
    def _loaded(self, stored: Any) -> Any:
        """The object to hold for a stored value; None for nothing."""

    @abstractmethod
    def stored(self, held: Any) -> Any:
        """The value to store for a held object."""

    def stored_in_order(self, held: Any) -> Any:
        """The same, in the order that all backends share."""
        return self.stored(held)

    def flush(self) -> None:
        """Mark the changed slots as dirty, for later snapshots."""
        if self._changed:
            if self.dirty is not None:
                self.dirty.mark(np.array(self._changed, dtype=np.int32))
            self._changed = []

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of these slots have the state."""
        return _live(self._pages, slots)

    def grow(self, slots: int) -> None:
        """Grow to this many slots."""
        self._pages += [[None] * PAGE_ROWS for _ in range(pages_for(slots) - len(self._pages))]
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        old, self._pages = self._pages, []
        for start in range(0, len(kept), PAGE_ROWS):
            page = [old[slot >> PAGE_BITS][slot & _IN_PAGE] for slot in kept[start : start + PAGE_ROWS].tolist()]
            self._pages.append(page + [None] * (PAGE_ROWS - len(page)))
        super().rebuild(kept, slots)

    def freeze(self, cut: Cut) -> tuple[FrozenSlots | SortedSlots, ...]:
        """All cells, or what has changed since the base. Takes one reference a page."""
        self.flush()
        self._epoch += 1
        return super().freeze(cut)

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Put stored rows. In layer 0 raises CorruptionError for a key that has the state already."""
        schema = self._space.schema
        assert schema is not None
        keys = rows.select(schema.names)
        if layer == 0 and self._space.can_append(self):
            self._append(keys, rows.column(self.spec.name).to_pylist())
            return
        slots = self._space.upsert(keys).slots.tolist()
        for slot, value in zip(slots, rows.column(self.spec.name).to_pylist(), strict=True):
            if layer == 0 and self._held(slot) is not None:
                raise held_twice(self.name)
            self._set(slot, self._loaded(value))
        self._changed = []  # loaded rows are no changes

    def begin_notes(self) -> CellNotes:
        """Note changes from now on. Existing lists and maps are no longer changed in place."""
        self._epoch += 1
        self._notes = CellNotes(self._space.slots, self._rows)
        return self._notes

    def undo(self, notes: Notes) -> None:
        """Restore what the state held when these notes began."""
        assert isinstance(notes, CellNotes)
        later = np.arange(notes.slots_below, self._space.slots, dtype=np.int32)
        for slot, held in (notes.held | dict.fromkeys(later[self.live(later)].tolist())).items():
            self._own_page(slot)[slot & _IN_PAGE] = held
        self._changed = []
        self._went_back(notes.rows)

    def _append(self, keys: pa.RecordBatch, stored: list[Any]) -> None:
        """Put stored values of new keys."""
        slot = self._space.slots
        self._space.append(self, keys)
        held = list(map(self._loaded, stored))
        self._rows += sum(each is not None for each in held)
        done = 0
        while done < len(held):
            offset = slot & _IN_PAGE
            count = min(PAGE_ROWS - offset, len(held) - done)
            self._pages[slot >> PAGE_BITS][offset : offset + count] = held[done : done + count]
            done, slot = done + count, slot + count

    def forget(self, keys: pa.RecordBatch) -> None:
        """Remove the state of stored keys."""
        for slot in self._space.upsert(keys).slots.tolist():
            self.remove(slot)
        self._changed = []

    def _held(self, ref: int) -> Any:
        return self._pages[ref >> PAGE_BITS][ref & _IN_PAGE]

    def _set(self, ref: int, held: Any) -> None:
        number, offset = ref >> PAGE_BITS, ref & _IN_PAGE
        page = self._own_page(ref) if self._pins.shared[number] else self._pages[number]
        if self._notes is not None:
            self._notes.add(ref, page[offset])
        self._rows += (held is not None) - (page[offset] is not None)
        page[offset] = held
        self._changed.append(ref)

    def _own_page(self, ref: int) -> list[Any]:
        """The page of a slot, to write to. A copy if a snapshot still reads it."""
        number = ref >> PAGE_BITS
        if self._pins.shared[number]:
            self._pages[number] = list(self._pages[number])
            self._pins.replaced(np.array([number], dtype=np.int32))
        return self._pages[number]

    def _frozen_values(self, removed: bool) -> _FrozenCells:
        return _FrozenCells(self, list(self._pages), self.stored)

    def _sorted_values(self) -> _FrozenCells:
        return _FrozenCells(self, list(self._pages), self.stored_in_order)


class ColumnarValues(Cells):
    """`ValueCells` over slots."""

    def get(self, ref: int) -> Any:
        """The value; None if there is none."""
        return self._pages[ref >> PAGE_BITS][ref & _IN_PAGE]

    def put(self, ref: int, value: Any) -> None:
        """Set the value, which is not None."""
        number, offset = ref >> PAGE_BITS, ref & _IN_PAGE
        if self._notes is not None or self._pins.shared[number]:
            self._set(ref, value)
            return
        page = self._pages[number]  # as `_set`: a function by row calls this once a row
        if page[offset] is None:
            self._rows += 1
        page[offset] = value
        self._changed.append(ref)

    def get_many(self, refs: NDArray[np.int32]) -> pa.Array:
        """The values of these keys."""
        return pa.array([self._held(ref) for ref in refs.tolist()], type=self.spec.column_type)

    def put_many(self, refs: NDArray[np.int32], values: pa.Array) -> None:
        """Set the values of these keys."""
        for ref, value in zip(refs.tolist(), values.to_pylist(), strict=True):
            if value is None:
                self.remove(ref)
            else:
                self._set(ref, value)

    def remove_many(self, refs: NDArray[np.int32]) -> None:
        """Remove the values of these keys."""
        for ref in refs.tolist():
            self.remove(ref)

    def expire(self, ref: int) -> None:
        """Remove the value if it has expired."""
        value = self._held(ref)
        if value is not None and self.spec.has_expired is not None and self.spec.has_expired(value):
            self._set(ref, None)

    def _loaded(self, stored: Any) -> Any:
        return stored

    def stored(self, held: Any) -> Any:
        """The value itself."""
        return held


class ColumnarLists(Cells):
    """`ListCells` over slots."""

    def get(self, ref: int) -> Collection[Any]:
        """The values; empty if there are none."""
        held = self._pages[ref >> PAGE_BITS][ref & _IN_PAGE]
        return () if held is None else held.whole()

    def extend(self, ref: int, values: Sequence[Any]) -> None:
        """Append values."""
        if values:
            held = self._pages[ref >> PAGE_BITS][ref & _IN_PAGE]
            if held is None:
                self._set(ref, ListInParts(values, self._epoch))
            elif held.epoch == self._epoch:
                held.extend(values)
                self._changed.append(ref)
            else:
                self._set(ref, held.extended(values, self._epoch))

    def put(self, ref: int, values: Sequence[Any]) -> None:
        """Replace the list."""
        if values:
            self._set(ref, ListInParts(values, self._epoch))
        else:
            self.remove(ref)

    def expire(self, ref: int) -> None:
        """Remove the elements that have expired."""
        values, has_expired = self.get(ref), self.spec.has_expired
        if has_expired is not None:
            left = [value for value in values if not has_expired(value)]
            if len(left) < len(values):
                self.put(ref, left)

    def _loaded(self, stored: Any) -> Any:
        return ListInParts(stored, self._epoch) if stored else None

    def stored(self, held: Any) -> Any:
        """The values, as Arrow takes them."""
        return list(held.whole()) if held.before else held


class ColumnarMaps(Cells):
    """`MapCells` over slots. Entries keep the order in which their map keys first came."""

    def __init__(self, space: KeySpace, spec: CellSpec, incremental: bool) -> None:
        super().__init__(space, spec, incremental)
        self._key_codec = map_key_codec(spec.column_type.key_type)

    def get(self, ref: int, map_key: Any) -> Any:
        """The value at a map key; None if there is none."""
        held = self._held(ref)
        return None if held is None else held.get(map_key)

    def put(self, ref: int, map_key: Any, value: Any) -> None:
        """Set one entry."""
        self._own(ref)[map_key] = value

    def discard(self, ref: int, map_key: Any) -> None:
        """Remove one entry, if it is there."""
        held = self._held(ref)
        if held is None or map_key not in held:
            return
        if len(held) == 1:
            self._set(ref, None)
        else:
            del self._own(ref)[map_key]

    def items(self, ref: int) -> Mapping[Any, Any] | Iterable[tuple[Any, Any]]:
        """The current entries."""
        held = self._held(ref)
        return () if held is None else list(held.items())

    def expire(self, ref: int) -> None:
        """Remove the entries that have expired."""
        held, has_expired = self._held(ref), self.spec.has_expired
        if held is not None and has_expired is not None:
            for map_key in [key for key, value in held.items() if has_expired(value)]:
                self.discard(ref, map_key)

    def _own(self, ref: int) -> dict[Any, Any]:
        """The map of a key, to change in place. Copied or created if need be."""
        held = self._held(ref)
        if held is not None and held.epoch == self._epoch:
            self._changed.append(ref)
        else:
            held = _Map(held or {}, self._epoch)
            self._set(ref, held)
        entries: dict[Any, Any] = held
        return entries

    def _loaded(self, stored: Any) -> Any:
        # A dictionary finds a NaN key by identity alone, so all NaN keys are the one object math.nan.
        entries = [(math.nan if key != key else key, value) for key, value in stored or ()]
        return _Map(entries, self._epoch) if entries else None

    def stored(self, held: Any) -> Any:
        """The entries, as Arrow takes them."""
        return list(held.items())

    def stored_in_order(self, held: Any) -> Any:
        """The entries, sorted by the bytes of their map keys."""
        codec = self._key_codec
        entries = sorted(((codec.encode(key), value) for key, value in held.items()), key=itemgetter(0))
        return [(codec.decode(key), value) for key, value in entries]


class _FrozenCells:
    """The `FrozenValues` of cells."""

    __slots__ = ("_cells", "_pages", "_stored")
    row_bytes = None
    """Nobody knows."""

    def __init__(self, cells: Cells, pages: list[list[Any]], stored: Callable[[Any], Any]) -> None:
        self._cells = cells
        self._pages = pages
        self._stored = stored

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        return _live(self._pages, slots)

    def columns(self, slots: NDArray[np.int32], places: Places | None = None) -> list[pa.Array]:
        slots = slots if places is None else slots[places.rows()]
        pages, stored = self._pages, self._stored
        values = [stored(pages[slot >> PAGE_BITS][slot & _IN_PAGE]) for slot in slots.tolist()]
        return [pa.array(values, type=self._cells.spec.column_type)]

    def let_go(self, start: int, stop: int) -> None:
        self._pages[start:stop] = [[] for _ in range(stop - start)]


def _live(pages: list[list[Any]], slots: NDArray[np.int32]) -> NDArray[np.bool_]:
    flags: Iterator[bool] = (pages[slot >> PAGE_BITS][slot & _IN_PAGE] is not None for slot in slots.tolist())
    return np.fromiter(flags, dtype=np.bool_, count=len(slots))
