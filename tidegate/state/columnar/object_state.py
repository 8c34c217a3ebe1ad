"""Values, lists and maps of row-wise functions in memory: as Python objects in pages, or as fixed-width columns.

A slot without state contains None. Rules of objects:
- A page that a snapshot still reads is copied (only its references) before the first write to it.
- Each list or map stores the epoch in which it was made, and every freeze begins the next epoch. An object of an older
  epoch may be in a snapshot. A map is therefore copied before its first change, and a list (`SegmentedList`) gets a new
  part for appended values. Values are never changed in place.
- The undo log can therefore store the object of a slot without a copy.

`ValueColumns` stores values that a program reads and writes by the batch (`StateDescriptor.by_batch`). The type must be
a number, boolean, date or time, or a struct of these. With a time to live, the value and its update time are columns.
- It is a `ColumnarTable` in which a slot has a row if it has a value. Snapshots, increments and the undo log work as
  for any such table.
- A checkpoint contains it like any value state: one column, which may be a struct. Programs may therefore switch
  between rows and batches, and between backends.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.paged_state import FrozenSlots, FrozenValues, PagedState, SortedSlots
from tidegate.state.columnar.undo_log import Notes, ObjectNotes
from tidegate.state.columnar.vector_table import ColumnarTable
from tidegate.state.common.backend import StateDescriptor, ValueSpec, duplicate_key
from tidegate.state.common.pages import pages_for
from tidegate.state.kernels.columns import array_of, storage_dtype
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.paged import PAGE_BITS, PAGE_ROWS, scatter
from tidegate.state.kernels.partition import Places
from tidegate.storage.state.rocksdb.value_layout import map_key_codec
from tidegate.storage.state.snapshot import Cut

_IN_PAGE = PAGE_ROWS - 1


class _Map(dict[Any, Any]):
    """The map of one key, with the number of the epoch (between two snapshots) in which it was created."""

    __slots__ = ("epoch",)

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]], epoch: int) -> None:
        super().__init__(entries)
        self.epoch = epoch


class ObjectState(PagedState[ObjectNotes]):
    """Base class of value, list and map states that store Python objects. The reference to a key (`ref`) is its
    slot.
    """

    def __init__(self, space: KeySpace, spec: StateDescriptor, incremental: bool) -> None:
        super().__init__(space, spec.name, (spec.name,), incremental)
        self.spec = spec
        self._pages: list[list[Any]] = []
        self._changed: list[int] = []
        """Slots that have changed since `flush`."""
        self._epoch = 0
        space.add(self)

    def remove(self, ref: int) -> None:
        """Removes the value, list or map of a key."""
        if self._held(ref) is not None:
            self._set(ref, None)

    @abstractmethod
    def expire(self, ref: int) -> None:
        """Removes the part of a key's state whose time to live is over."""

    def expire_many(self, slots: NDArray[np.int32]) -> None:
        """Removes the expired part of the state of these slots. Slots without the state are ignored."""
        for slot in slots[self.live(slots)].tolist():
            self.expire(slot)
        self.flush()

    @abstractmethod
    def _loaded(self, stored: Any) -> Any:
        """Returns the Python object for a stored value, or None for an empty list or map."""

    @abstractmethod
    def stored(self, held: Any) -> Any:
        """Converts a Python object of this state to its stored value."""

    def stored_in_order(self, held: Any) -> Any:
        """Converts a Python object of this state to its stored value, with map entries in the order that all backends
        share.
        """
        return self.stored(held)

    def flush(self) -> None:
        """Marks the slots that were changed in this batch as dirty, so that later snapshots contain them."""
        if self._changed:
            if self.dirty is not None:
                self.dirty.mark(np.array(self._changed, dtype=np.int32))
            self._changed = []

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns a mask: True for each of these slots that has the state."""
        return _live(self._pages, slots)

    def grow(self, slots: int) -> None:
        """Makes room for `slots` slots of the state."""
        self._pages += [[None] * PAGE_ROWS for _ in range(pages_for(slots) - len(self._pages))]
        super().grow(slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of the state: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        old, self._pages = self._pages, []
        for start in range(0, len(kept), PAGE_ROWS):
            page = [old[slot >> PAGE_BITS][slot & _IN_PAGE] for slot in kept[start : start + PAGE_ROWS].tolist()]
            self._pages.append(page + [None] * (PAGE_ROWS - len(page)))
        super().rebuild(kept, slots)

    def freeze(self, cut: Cut) -> tuple[FrozenSlots | SortedSlots, ...]:
        """Returns snapshots of all objects or, with a base, of the changes since the base. Only references to pages are
        copied.
        """
        self.flush()
        self._epoch += 1
        return super().freeze(cut)

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Stores rows of a checkpoint layer. Raises CorruptionError for a key of layer 0 (the base) that has the state
        already.
        """
        schema = self._space.schema
        assert schema is not None
        keys = rows.select(schema.names)
        if layer == 0 and self._space.can_append(self):
            self._append(keys, rows.column(self.spec.name).to_pylist())
            return
        slots = self._space.upsert(keys).slots.tolist()
        for slot, value in zip(slots, rows.column(self.spec.name).to_pylist(), strict=True):
            if layer == 0 and self._held(slot) is not None:
                raise duplicate_key(self.name)
            self._set(slot, self._loaded(value))
        self._changed = []  # loaded rows are no changes

    def begin_notes(self) -> ObjectNotes:
        """Starts to record former contents for the undo log.

        From now on, existing lists and maps are copied before a change.
        """
        self._epoch += 1
        self._notes = ObjectNotes(self._space.slots, self._rows)
        return self._notes

    def undo(self, notes: Notes) -> None:
        """Restores the contents that the state had when `notes` (undo data) began."""
        assert isinstance(notes, ObjectNotes)
        later = np.arange(notes.slots_below, self._space.slots, dtype=np.int32)
        for slot, held in (notes.held | dict.fromkeys(later[self.live(later)].tolist())).items():
            self._own_page(slot)[slot & _IN_PAGE] = held
        self._changed = []
        self._went_back(notes.rows)

    def _append(self, keys: pa.RecordBatch, stored: list[Any]) -> None:
        """Stores the values of keys that are new in the key space."""
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
        """Removes the state of these keys, given as stored key columns."""
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
        """Returns the page of a slot for writing. Copies the page first if a snapshot still reads it."""
        number = ref >> PAGE_BITS
        if self._pins.shared[number]:
            self._pages[number] = list(self._pages[number])
            self._pins.replaced(np.array([number], dtype=np.int32))
        return self._pages[number]

    def _frozen_values(self, removed: bool) -> _FrozenObjects:
        return _FrozenObjects(self, list(self._pages), self.stored)

    def _sorted_values(self) -> _FrozenObjects:
        return _FrozenObjects(self, list(self._pages), self.stored_in_order)


class ColumnarValues(ObjectState):
    """The `InternalValueState` of the columnar backend: Python values by slot."""

    def get(self, ref: int) -> Any:
        """Returns the value of a key, or None if it has none."""
        return self._pages[ref >> PAGE_BITS][ref & _IN_PAGE]

    def put(self, ref: int, value: Any) -> None:
        """Stores a value, which must not be None, for a key."""
        number, offset = ref >> PAGE_BITS, ref & _IN_PAGE
        if self._notes is not None or self._pins.shared[number]:
            self._set(ref, value)
            return
        page = self._pages[number]  # `_set` inlined: a row-wise function calls this once per row
        if page[offset] is None:
            self._rows += 1
        page[offset] = value
        self._changed.append(ref)

    def get_many(self, refs: NDArray[np.int32]) -> pa.Array:
        """Returns the value of each key as an Arrow array, null where there is none."""
        return pa.array([self._held(ref) for ref in refs.tolist()], type=self.spec.column_type)

    def put_many(self, refs: NDArray[np.int32], values: pa.Array) -> None:
        """Stores a value for each key. Null removes the value."""
        for ref, value in zip(refs.tolist(), values.to_pylist(), strict=True):
            if value is None:
                self.remove(ref)
            else:
                self._set(ref, value)

    def remove_many(self, refs: NDArray[np.int32]) -> None:
        """Removes the values of these keys, if they have any."""
        for ref in refs.tolist():
            self.remove(ref)

    def expire(self, ref: int) -> None:
        """Removes the value of a key if its time to live is over."""
        value = self._held(ref)
        if value is not None and self.spec.has_expired is not None and self.spec.has_expired(value):
            self._set(ref, None)

    def _loaded(self, stored: Any) -> Any:
        return stored

    def stored(self, held: Any) -> Any:
        """Returns the value unchanged, because values are held in stored form."""
        return held


class ColumnarLists(ObjectState):
    """The `InternalListState` of the columnar backend: Python lists by slot."""

    def get(self, ref: int) -> Collection[Any]:
        """Returns the elements of a key's list. Empty if there is no list."""
        held = self._pages[ref >> PAGE_BITS][ref & _IN_PAGE]
        return () if held is None else held.whole()

    def extend(self, ref: int, values: Sequence[Any]) -> None:
        """Appends elements to the list of a key."""
        if values:
            held = self._pages[ref >> PAGE_BITS][ref & _IN_PAGE]
            if held is None:
                self._set(ref, SegmentedList(values, self._epoch))
            elif held.epoch == self._epoch:
                held.extend(values)
                self._changed.append(ref)
            else:
                self._set(ref, held.extended(values, self._epoch))

    def put(self, ref: int, values: Sequence[Any]) -> None:
        """Replaces the list of a key."""
        if values:
            self._set(ref, SegmentedList(values, self._epoch))
        else:
            self.remove(ref)

    def expire(self, ref: int) -> None:
        """Removes the elements of a key's list whose time to live is over."""
        values, has_expired = self.get(ref), self.spec.has_expired
        if has_expired is not None:
            left = [value for value in values if not has_expired(value)]
            if len(left) < len(values):
                self.put(ref, left)

    def _loaded(self, stored: Any) -> Any:
        return SegmentedList(stored, self._epoch) if stored else None

    def stored(self, held: Any) -> Any:
        """Returns the elements of a list in a form that Arrow can convert."""
        return list(held.whole()) if held.before else held


class ColumnarMaps(ObjectState):
    """The `InternalMapState` of the columnar backend: Python dicts by slot.

    Entries are in the order in which their map keys were first added.
    """

    def __init__(self, space: KeySpace, spec: StateDescriptor, incremental: bool) -> None:
        super().__init__(space, spec, incremental)
        self._key_codec = map_key_codec(spec.column_type.key_type)

    def get(self, ref: int, map_key: Any) -> Any:
        """Returns the value at a map key in the map of a key, or None if there is none."""
        held = self._held(ref)
        return None if held is None else held.get(map_key)

    def put(self, ref: int, map_key: Any, value: Any) -> None:
        """Stores one entry in the map of a key."""
        self._own(ref)[map_key] = value

    def discard(self, ref: int, map_key: Any) -> None:
        """Removes one entry from the map of a key, if it exists."""
        held = self._held(ref)
        if held is None or map_key not in held:
            return
        if len(held) == 1:
            self._set(ref, None)
        else:
            del self._own(ref)[map_key]

    def items(self, ref: int) -> Mapping[Any, Any] | Iterable[tuple[Any, Any]]:
        """Returns the entries of the map of a key."""
        held = self._held(ref)
        return () if held is None else list(held.items())

    def expire(self, ref: int) -> None:
        """Removes the entries of a key's map whose time to live is over."""
        held, has_expired = self._held(ref), self.spec.has_expired
        if held is not None and has_expired is not None:
            for map_key in [key for key, value in held.items() if has_expired(value)]:
                self.discard(ref, map_key)

    def _own(self, ref: int) -> dict[Any, Any]:
        """Returns the map of a key for changes in place. Creates the map, or copies it if a snapshot or the undo log
        uses it.
        """
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
        """Returns the entries of a map in a form that Arrow can convert."""
        return list(held.items())

    def stored_in_order(self, held: Any) -> Any:
        """Returns the entries of a map, sorted by the bytes of their map keys."""
        codec = self._key_codec
        entries = sorted(((codec.encode(key), value) for key, value in held.items()), key=itemgetter(0))
        return [(codec.decode(key), value) for key, value in entries]


class _FrozenObjects:
    """The values of an object state at a snapshot (a `FrozenValues`)."""

    __slots__ = ("_objects", "_pages", "_stored")
    row_bytes = None
    """The size of Python objects is unknown."""

    def __init__(self, objects: ObjectState, pages: list[list[Any]], stored: Callable[[Any], Any]) -> None:
        self._objects = objects
        self._pages = pages
        self._stored = stored

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        return _live(self._pages, slots)

    def columns(self, slots: NDArray[np.int32], places: Places | None = None) -> list[pa.Array]:
        slots = slots if places is None else slots[places.rows()]
        pages, stored = self._pages, self._stored
        values = [stored(pages[slot >> PAGE_BITS][slot & _IN_PAGE]) for slot in slots.tolist()]
        return [pa.array(values, type=self._objects.spec.column_type)]

    def drop_pages(self, start: int, stop: int) -> None:
        self._pages[start:stop] = [[] for _ in range(stop - start)]


def _live(pages: list[list[Any]], slots: NDArray[np.int32]) -> NDArray[np.bool_]:
    flags: Iterator[bool] = (pages[slot >> PAGE_BITS][slot & _IN_PAGE] is not None for slot in slots.tolist())
    return np.fromiter(flags, dtype=np.bool_, count=len(slots))


class SegmentedList(list[Any]):
    """A list that is stored in several parts. Only the last part may grow.

    After a snapshot has begun a new epoch, values are appended without copying the existing ones. Two parts are merged
    unless the former is at least twice as long as the latter, so there are about log2(values) parts, and a value is
    copied about as often.
    """

    __slots__ = ("before", "epoch")

    def __init__(self, last: Iterable[Any], epoch: int, before: tuple[list[Any], ...] = ()) -> None:
        super().__init__(last)
        self.before = before
        self.epoch = epoch

    def extended(self, values: Sequence[Any], epoch: int) -> SegmentedList:
        """Returns a new list for the epoch `epoch` with `values` appended. This list does not change."""
        last: list[Any] = list(values)
        parts = [*self.before, self]
        while parts and len(parts[-1]) < 2 * len(last):
            last = list.__add__(parts.pop(), last)
        return SegmentedList(last, epoch, tuple(parts))

    def whole(self) -> Collection[Any]:
        """Returns all values of the list as one sequence, without a copy."""
        return Parts((*self.before, self)) if self.before else self


class Parts(Collection[Any]):
    """A read-only sequence of the values of several lists, one list after the other."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[list[Any]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._parts)

    def __contains__(self, value: object) -> bool:
        return any(value in part for part in self._parts)


def flat_specs(spec: StateDescriptor) -> tuple[ValueSpec, ...]:
    """Returns the specs of the columns that can store values of this type. Empty if such values cannot be stored in
    columns.
    """
    fields = _leaves(spec.column_type, 1 if spec.has_expired is None else 2)
    kept = [_kept_type(each) for each in fields]
    if not all(storage_dtype(each) is not None for each in kept):
        return ()
    return tuple(ValueSpec(f"{spec.name}\0{number}", each, 0) for number, each in enumerate(kept))


class ValueColumns(ColumnarTable):
    """An `InternalValueState` that stores values in columns instead of Python objects. The reference to a key (`ref`)
    is its slot.
    """

    def __init__(self, space: KeySpace, spec: StateDescriptor, incremental: bool) -> None:
        super().__init__(space, spec.name, flat_specs(spec), incremental)
        self._value_names = (spec.name,)
        self.spec = spec

    def get(self, ref: int) -> Any:
        """Returns the value of a key, or None if it has none."""
        return self.get_many(np.array([ref], dtype=np.int32))[0].as_py()

    def put(self, ref: int, value: Any) -> None:
        """Stores a value, which must not be None, for a key."""
        self.put_many(np.array([ref], dtype=np.int32), pa.array([value], self.spec.column_type))

    def remove(self, ref: int) -> None:  # type: ignore[override]  # one slot instead of several
        """Removes the value of a key."""
        self.remove_many(np.array([ref], dtype=np.int32))

    def get_many(self, refs: NDArray[np.int32]) -> pa.Array:
        """Returns the value of each key as an Arrow array, null where there is none."""
        live = self.live(refs)
        columns = [column.take(refs) for column in self._columns.values()]
        return _assembled(self.spec.column_type, columns, None if live.all() else live)

    def put_many(self, refs: NDArray[np.int32], values: pa.Array) -> None:
        """Stores a value for each key. Null removes the value."""
        if values.null_count:
            refs, values = _last_of_each(refs, values)
            kept = values.is_valid()
            given = kept.to_numpy(zero_copy_only=False)
            self.remove_many(refs[~given])
            refs, values = refs[given], values.filter(kept)
        self._own(refs)
        if self._notes is not None:
            self._note(self._notes, refs)
        if self.dirty is not None:
            self.dirty.mark(refs)
        new = refs[~self.live(refs)]
        if len(new):
            self._rows += len(distinct_integers(new))
            scatter(self._live.pages, new, np.ones(len(new), dtype=np.uint8))
        for column, part in zip(self._columns.values(), self._flattened(values), strict=True):
            column.paged.put(refs, part)

    def remove_many(self, refs: NDArray[np.int32]) -> None:
        """Removes the values of these keys, if they have any."""
        slots = distinct_integers(refs[self.live(refs)])
        if len(slots):
            self.set_live(slots, np.zeros(len(slots), dtype=np.bool_))

    def expire_many(self, slots: NDArray[np.int32]) -> None:
        """Removes the values of these slots whose time to live is over."""
        assert self.spec.expired_ms is not None, "values without a time to live do not expire"
        slots = slots[self.live(slots)]
        updated_ms = next(reversed(self._columns.values())).raw(slots)
        self.remove_many(slots[updated_ms <= self.spec.expired_ms()])

    def flush(self) -> None:
        """Does nothing, because changes are marked at once."""

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Stores rows of a checkpoint layer. Raises CorruptionError for a key of layer 0 (the base) that has a value
        already.
        """
        keys = rows.columns[: rows.num_columns - 1]
        columns = self._flattened(rows.column(rows.num_columns - 1))
        names = [*rows.schema.names[: len(keys)], *self._columns]
        super().load(pa.RecordBatch.from_arrays([*keys, *columns], names=names), layer)

    def _flattened(self, values: pa.Array) -> list[pa.Array]:
        """Divides values, none of which is null, into the columns that store them. A struct has a column for each
        field.
        """
        parts = [values]
        for _ in range(1 if self.spec.has_expired is None else 2):
            parts = [leaf for part in parts for leaf in (part.flatten() if _is_struct(part.type) else [part])]
        return [part.cast(pa.uint8()) if pa.types.is_boolean(part.type) else part for part in parts]

    def _frozen_values(self, removed: bool) -> FrozenValues:  # type: ignore[override]  # one column of several
        return _FrozenColumns(super()._frozen_values(removed), self.spec.column_type)


class _FrozenColumns:
    """The values of a `ValueColumns` state at a snapshot (a `FrozenValues`)."""

    __slots__ = ("_table", "_type")

    def __init__(self, table: FrozenValues, column_type: pa.DataType) -> None:
        self._table = table
        self._type = column_type

    @property
    def row_bytes(self) -> int | None:
        return self._table.row_bytes

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self._table.live(slots)

    def columns(self, slots: NDArray[np.int32], places: Places | None = None) -> list[pa.Array]:
        return [_assembled(self._type, list(self._table.columns(slots, places)), None)]

    def drop_pages(self, start: int, stop: int) -> None:
        self._table.drop_pages(start, stop)


def _is_struct(data_type: pa.DataType) -> bool:
    return pa.types.is_struct(data_type) and not isinstance(data_type, pa.BaseExtensionType)


def _leaves(data_type: pa.DataType, depth: int) -> list[pa.DataType]:
    """Returns the types of the columns that store a type.

    Structs are divided into their fields up to the nesting depth `depth`. Deeper structs are stored whole.
    """
    if not (depth and _is_struct(data_type)):
        return [data_type]
    return [leaf for field in data_type for leaf in _leaves(field.type, depth - 1)] or [data_type]


def _kept_type(data_type: pa.DataType) -> pa.DataType:
    """Returns the type of a column in memory. Booleans are stored as bytes, because Arrow packs them into bits."""
    return pa.uint8() if pa.types.is_boolean(data_type) else data_type


def _assembled(data_type: pa.DataType, columns: list[pa.Array], live: NDArray[np.bool_] | None) -> pa.Array:
    """Builds values of type `data_type` from the columns that store them.

    `live` is False for missing values. It is None if all values are present.
    """
    return _next(data_type, iter(columns), live)


def _next(data_type: pa.DataType, columns: Iterator[pa.Array], live: NDArray[np.bool_] | None) -> pa.Array:
    if _is_struct(data_type):
        parts = [_next(field.type, columns, None) for field in data_type]
        mask = None if live is None else pa.array(~live)
        return pa.StructArray.from_arrays(parts, fields=list(data_type), mask=mask)
    column = next(columns)
    if live is not None:
        valid = live if not column.null_count else live & column.is_valid().to_numpy(zero_copy_only=False)
        raw = np.frombuffer(column.buffers()[1], dtype=storage_dtype(column.type))
        column = array_of(raw, valid.view(np.uint8), column.type)
    return column.cast(pa.bool_()) if pa.types.is_boolean(data_type) else column


def _last_of_each(refs: NDArray[np.int32], values: pa.Array) -> tuple[NDArray[np.int32], pa.Array]:
    """Returns the distinct keys in `refs`, and for each key its last value in `values`."""
    distinct, from_end = np.unique(refs[::-1], return_index=True)
    return distinct, values.take(pa.array(len(refs) - 1 - from_end))
