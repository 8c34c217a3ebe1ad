"""Columns of vectorised tables: `BatchColumn` for kernels, and `VaryingColumn` for values of any Arrow type.

`BatchColumn` is the `ValueColumn` that both backends give to kernels. `BatchColumns` are such columns without a table,
for the groups of one batch at a time.

`VaryingColumn` has a value of any Arrow type for each slot: its pages contain numbers of values in a `ValueHeap`. To
pages it is a column of int64 like any other: frozen, copied before a change, noted in the undo log and renumbered.
Values are set and taken as Arrow arrays, a batch at a time, and kernels do not touch them. Rules of the heap:

- A value never changes and its number is never used again. A page of numbers therefore keeps its meaning: snapshots,
  the undo log and renumbering of slots need only the pages. Setting a value appends a new one.
- Number 0 is null, and needs no memory.
- Values are stored in chunks, ascending by number. A snapshot has the chunks of its moment. Any thread may read them.
- `collect` drops values that are not used any more. It is due when the heap has doubled since the last time. Garbage is
  then at most as large as the live values and `GARBAGE_BYTES_MIN`, and a value is copied about as often as a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import FrozenColumn, PagedColumn, pages_for
from tidegate.state.kernels.columns import plain, storage_dtype
from tidegate.state.kernels.paged import Pages, scatter
from tidegate.state.kernels.partition import Places

GARBAGE_BYTES_MIN = 1 << 20
"""A heap that has grown by less than this is left alone."""
_CHUNK_BYTES_MAX = 1 << 26
Numbers = NDArray[np.int64]


class BatchTable(Protocol):
    """The table of a column, as the column sees it."""

    new_slots: NDArray[np.int32]
    """Slots that get a row in this batch."""


class BatchColumn:
    """A `ValueColumn` of a table. The table may replace `paged`."""

    __slots__ = ("_table", "paged")

    def __init__(self, table: BatchTable, spec: ValueSpec) -> None:
        self._table = table
        self.paged: PagedColumn = paged_column(spec)

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

    def put(self, slots: NDArray[Any], values: pa.Array) -> None:
        """Set these slots, each given once, from an Arrow array of the column's type."""
        if values.null_count > 0 and self.is_fixed:
            self.track_nulls()
        self.paged.put(slots, values)

    @property
    def is_fixed(self) -> bool:
        """Whether its values have a fixed width, so that kernels may change them."""
        return not isinstance(self.paged, VaryingColumn)

    @property
    def value_bytes(self) -> int:
        """About how many bytes a value takes."""
        return self.paged.value_bytes

    def raw(self, slots: NDArray[Any]) -> NDArray[Any]:
        """The same as plain values. Undefined under a null."""
        return self.paged.raw(slots)


class BatchColumns:
    """Columns that accumulators write to as to those of a table, for groups that are numbered from 0."""

    def __init__(self, specs: Sequence[ValueSpec]) -> None:
        self.new_slots: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._columns = {spec.name: BatchColumn(self, spec) for spec in specs}

    def column(self, name: str) -> BatchColumn:
        """A column by name."""
        return self._columns[name]

    def begin(self, slots_end: int) -> None:
        """Begin another batch, whose groups have slots below `slots_end`. What was there is gone."""
        self.new_slots = np.arange(slots_end, dtype=np.int32)
        for column in self._columns.values():
            column.paged.grow(pages_for(slots_end))
            column.paged.begin_batch()
            column.paged.reset(self.new_slots)

    def filled(self, slots_end: int) -> None:
        """All groups below `slots_end` have values: only the others are still empty when a first null comes."""
        self.new_slots = self.new_slots[np.searchsorted(self.new_slots, slots_end) :]

    def values(self, slots: NDArray[np.int32] | None = None) -> dict[str, pa.Array]:
        """What the groups with some slots hold, by column. None: all slots."""
        slots = self.new_slots if slots is None else slots
        return {name: column.take(slots) for name, column in self._columns.items()}


class VaryingColumn(PagedColumn):
    """A column whose type is of no fixed width. New slots are null."""

    __slots__ = ("_heap", "_value_spec")

    def __init__(self, spec: ValueSpec, heap: ValueHeap | None = None) -> None:
        super().__init__(ValueSpec(spec.name, pa.int64(), 0))
        self._value_spec = spec
        self._heap = ValueHeap(spec.data_type) if heap is None else heap

    @property
    def value_bytes(self) -> int:
        """About how many bytes a value takes."""
        return self.dtype.itemsize + self._heap.value_bytes

    @property
    def heap_bytes(self) -> int:
        """Bytes of all values, those that nobody needs included."""
        return self._heap.size_bytes

    def take(self, slots: NDArray[Any]) -> pa.Array:
        """Values of these slots (a copy)."""
        return self._heap.take(self.raw(slots))

    def put(self, slots: NDArray[np.int32], values: pa.Array) -> None:
        """Set these slots, each given once."""
        scatter(self.pages, slots, self._heap.append(values))

    def begin_extend(self, first_slot: int, values: pa.Array) -> Callable[[], None]:
        """As of all columns."""
        return super().begin_extend(first_slot, pa.array(self._heap.append(values)))

    def begin_batch(self) -> None:
        """All slots are about to be set: nothing of the batch before is needed."""
        self._heap.clear()

    def freeze(self) -> FrozenColumn:
        """References to the current pages and values. The caller pins the pages."""
        return _FrozenVarying(super().freeze(), self._heap.chunks, self._value_spec)

    @property
    def wants_collection(self) -> bool:
        """Whether it is time for `collect`."""
        return self._heap.is_due

    def collect(self, referred: Iterable[Numbers]) -> None:
        """Let go of the values to which none of these numbers refers: those of all living slots, and noted ones."""
        self._heap.collect(referred)

    def _another(self) -> PagedColumn:
        return VaryingColumn(self._value_spec, self._heap)


class _FrozenVarying(FrozenColumn):
    """Numbers at the time of a freeze, and the values that there were."""

    __slots__ = ("_chunks",)

    def __init__(self, numbers: FrozenColumn, chunks: HeapChunks, spec: ValueSpec) -> None:
        super().__init__(spec, *numbers.parts())
        self._chunks = chunks

    def take(self, slots: NDArray[Any], places: Places | None = None) -> pa.Array:
        """Values of these slots. Their pages must still be held."""
        return values_of(self._chunks, self.raw(slots, places), self.spec.data_type)


def paged_column(spec: ValueSpec) -> PagedColumn:
    """The column for a spec."""
    return PagedColumn(spec) if storage_dtype(spec.data_type) is not None else VaryingColumn(spec)


@dataclass(frozen=True, slots=True)
class HeapChunk:
    """Neighbouring values that own their memory, and their numbers, ascending."""

    numbers: Numbers
    values: pa.Array
    size_bytes: int

    @staticmethod
    def of(numbers: Numbers, values: pa.Array) -> HeapChunk:
        """A chunk of values that are no slice."""
        return HeapChunk(numbers, values, values.nbytes + numbers.nbytes)

    def take(self, numbers: Numbers) -> pa.Array:
        """The values with these numbers, all of which it has."""
        first = self.numbers[0]
        if int(self.numbers[-1]) - int(first) == len(self.numbers) - 1:
            return self.values.take(pa.array(numbers - first))
        return self.values.take(pa.array(np.searchsorted(self.numbers, numbers)))

    def only(self, numbers: Numbers) -> HeapChunk | None:
        """What is left of it with these numbers alone, ascending; it need not have all of them. None: nothing."""
        first, last = np.searchsorted(numbers, [self.numbers[0], self.numbers[-1] + 1])
        places = np.flatnonzero(np.isin(self.numbers, numbers[first:last], assume_unique=True))
        if len(places) == len(self.numbers):
            return self
        return HeapChunk.of(self.numbers[places], self.values.take(pa.array(places))) if len(places) else None


HeapChunks = Sequence[HeapChunk]
"""Chunks, ascending."""


def values_of(chunks: HeapChunks, numbers: Numbers, data_type: pa.DataType) -> pa.Array:
    """The values with these numbers, in their order. Each number but 0 is one of the chunks'."""
    if not len(numbers):
        return pa.array([], data_type)
    firsts = np.array([0, *(chunk.numbers[0] for chunk in chunks)], dtype=np.int64)
    of_chunk = (np.searchsorted(firsts, numbers, side="right") - 1).astype(np.int16)
    if int(of_chunk[0]) > 0 and bool((of_chunk == of_chunk[0]).all()):
        return chunks[int(of_chunk[0]) - 1].take(numbers)
    order = np.argsort(of_chunk, kind="stable")  # a radix sort of 16-bit integers
    bounds = np.searchsorted(of_chunk[order], np.arange(len(firsts) + 1))
    parts = [pa.nulls(int(bounds[1]), data_type)]
    for chunk, start, stop in zip(chunks, bounds[1:-1], bounds[2:], strict=True):
        if stop > start:
            parts.append(chunk.take(numbers[order[start:stop]]))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    return pa.concat_arrays(parts).take(pa.array(ranks))


class ValueHeap:
    """The values of one column. One thread uses it; who has its `chunks` reads them on any."""

    __slots__ = ("_chunks", "_kept_bytes", "_next", "data_type", "size_bytes")

    def __init__(self, data_type: pa.DataType) -> None:
        self.data_type = data_type
        self.size_bytes = 0
        self._chunks: list[HeapChunk] = []
        self._next = 1
        self._kept_bytes = 0
        """How large it was when it was last collected."""

    @property
    def chunks(self) -> HeapChunks:
        """All values as they are now."""
        return tuple(self._chunks)

    @property
    def value_bytes(self) -> int:
        """About how many bytes a value takes."""
        values = sum(len(chunk.numbers) for chunk in self._chunks)
        return self.size_bytes // values if values else 0

    def append(self, values: pa.Array) -> Numbers:
        """Add values, and return the number of each; 0 for nulls."""
        values = plain(values)
        if values.type != self.data_type:
            values = values.cast(self.data_type)
        numbers = np.zeros(len(values), dtype=np.int64)
        # `take` also makes sure that they own their memory: a slice would keep its whole parent alive.
        valid = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        if not len(valid):
            return numbers
        found = np.arange(self._next, self._next + len(valid), dtype=np.int64)
        self._next += len(valid)
        numbers[valid] = found
        self._add(HeapChunk.of(found, values.take(pa.array(valid))))
        return numbers

    def take(self, numbers: Numbers) -> pa.Array:
        """The values with these numbers, null for 0."""
        return values_of(self._chunks, numbers, self.data_type)

    @property
    def is_due(self) -> bool:
        """Whether so much has come since the last time that `collect` pays."""
        return self.size_bytes > 2 * self._kept_bytes + GARBAGE_BYTES_MIN

    def collect(self, referred: Iterable[Numbers]) -> None:
        """Let go of all values but those with these numbers, which may come in any order, and several times."""
        alive = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *referred]))
        chunks, self._chunks, self.size_bytes = self._chunks, [], 0
        for chunk in chunks:
            left = chunk.only(alive)
            if left is not None:
                self._add(left)
        self._kept_bytes = self.size_bytes

    def clear(self) -> None:
        """Let go of all values."""
        self._chunks, self.size_bytes, self._kept_bytes = [], 0, 0

    def _add(self, chunk: HeapChunk) -> None:
        """Neighbours are put together unless the former is at least twice as long, or they would become too large."""
        self._chunks.append(chunk)
        self.size_bytes += chunk.size_bytes
        while len(self._chunks) > 1 and _is_joinable(*self._chunks[-2:]):
            latter, former = self._chunks.pop(), self._chunks.pop()
            joined = HeapChunk.of(
                np.concatenate((former.numbers, latter.numbers)), pa.concat_arrays([former.values, latter.values])
            )
            self._chunks.append(joined)
            self.size_bytes += joined.size_bytes - former.size_bytes - latter.size_bytes


def _is_joinable(former: HeapChunk, latter: HeapChunk) -> bool:
    if former.size_bytes + latter.size_bytes > _CHUNK_BYTES_MAX:
        return False
    return len(former.numbers) < 2 * len(latter.numbers)
