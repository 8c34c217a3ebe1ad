"""Columns of vectorised tables: `BatchColumn` for kernels, and `VaryingColumn` for values of any Arrow type.

`BatchColumn` is the `ValueColumn` that both backends give to kernels. `BatchColumns` are such columns without a table,
for the groups of one batch at a time.

`VaryingColumn` has a value of any Arrow type for each slot. Its pages contain numbers of values in a `ValueHeap`, so
the pages are an int64 column like any other: frozen, copied before a change, noted in the undo log and renumbered.
Values are set and taken as Arrow arrays, a batch at a time, and kernels do not touch them. Rules of the heap:

- A value never changes and its number is never used again. A page of numbers therefore keeps its meaning: snapshots,
  the undo log and renumbering of slots need only the pages. Setting a value appends a new one.
- Number 0 is null, and needs no memory.
- Values are stored in chunks, ascending by number. A snapshot references the chunks of its moment. Any thread may read
  them.
- `collect` drops values that are not used any more. It is due when the heap has doubled since the last collection.
  Garbage is then at most as large as the live values plus `GARBAGE_BYTES_MIN`, and a value is copied about as often as
  a key.
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
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.paged import Pages, scatter
from tidegate.state.kernels.partition import Places

GARBAGE_BYTES_MIN = 1 << 20
"""A heap that has grown by less than this, in bytes, is not collected."""
_CHUNK_BYTES_MAX = 1 << 26
Numbers = NDArray[np.int64]


class BatchTable(Protocol):
    """The methods of a vectorised table that its columns call."""

    new_slots: NDArray[np.int32]
    """The slots that get a row in this batch."""


class BatchColumn:
    """A `ValueColumn` of a vectorised table, over the stored column `paged`, which the table may replace."""

    __slots__ = ("_table", "paged")

    def __init__(self, table: BatchTable, spec: ValueSpec) -> None:
        self._table = table
        self.paged: PagedColumn = paged_column(spec)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Returns the type of the values in the pages."""
        return self.paged.dtype

    @property
    def pages(self) -> Pages:
        """Returns the addresses of the memory pages with the column's values."""
        return self.paged.pages

    @property
    def valid_pages(self) -> Pages:
        """Returns the addresses of the validity pages. Empty if there has never been a null."""
        return self.paged.valid_pages

    def track_nulls(self) -> Pages:
        """Starts to track validity. New rows of this batch are null, all other rows are valid. Returns
        `valid_pages`.
        """
        if not len(self.paged.valid_pages):
            self.paged.start_nulls()
            self.paged.reset_valid(self._table.new_slots)
        return self.paged.valid_pages

    def take(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the values of these slots as an Arrow array (a copy)."""
        return self.paged.take(slots)

    def put(self, slots: NDArray[Any], values: pa.Array) -> None:
        """Stores values in these distinct slots, from an Arrow array of the column's type."""
        if values.null_count > 0 and self.is_fixed:
            self.track_nulls()
        self.paged.put(slots, values)

    @property
    def is_fixed(self) -> bool:
        """Returns whether values have a fixed width, so that kernels may change them."""
        return not isinstance(self.paged, VaryingColumn)

    @property
    def value_bytes(self) -> int:
        """Returns the estimated size of a value in bytes."""
        return self.paged.value_bytes

    def raw(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Returns the values of these slots as a NumPy array (a copy). Values of nulls are undefined."""
        return self.paged.raw(slots)


class BatchColumns:
    """Columns in memory to which accumulators write the groups of one batch, without a state table. Groups are numbered
    from 0.
    """

    def __init__(self, specs: Sequence[ValueSpec]) -> None:
        self.new_slots: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._columns = {spec.name: BatchColumn(self, spec) for spec in specs}

    def column(self, name: str) -> BatchColumn:
        """Returns a column by name."""
        return self._columns[name]

    def begin(self, slots_end: int) -> None:
        """Begins a batch whose groups have numbers below `slots_end`. Drops the values of the previous batch."""
        self.new_slots = np.arange(slots_end, dtype=np.int32)
        for column in self._columns.values():
            column.paged.grow(pages_for(slots_end))
            column.paged.begin_batch()
            column.paged.reset(self.new_slots)

    def filled(self, slots_end: int) -> None:
        """Records that all groups with numbers below `slots_end` have values.

        If the first null arrives later, these groups stay valid.
        """
        self.new_slots = self.new_slots[np.searchsorted(self.new_slots, slots_end) :]

    def values(self, slots: NDArray[np.int32] | None = None) -> dict[str, pa.Array]:
        """Returns the values of the groups `slots`, by column name. None means all groups."""
        slots = self.new_slots if slots is None else slots
        return {name: column.take(slots) for name, column in self._columns.items()}


class VaryingColumn(PagedColumn):
    """A column of a type without a fixed width, such as strings. Slots store the numbers of values in a heap. New slots
    are null.
    """

    __slots__ = ("_heap", "_value_spec")

    def __init__(self, spec: ValueSpec, heap: ValueHeap | None = None) -> None:
        super().__init__(ValueSpec(spec.name, pa.int64(), 0))
        self._value_spec = spec
        self._heap = ValueHeap(spec.data_type) if heap is None else heap

    @property
    def value_bytes(self) -> int:
        """Returns the estimated size of a value in bytes, including the number by which its slot refers to it."""
        return self.dtype.itemsize + self._heap.value_bytes

    @property
    def heap_bytes(self) -> int:
        """Returns the size of all stored values in bytes, including values that no slot refers to any more."""
        return self._heap.size_bytes

    def take(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the values of these slots as an Arrow array (a copy)."""
        return self._heap.take(self.raw(slots))

    def put(self, slots: NDArray[np.int32], values: pa.Array) -> None:
        """Stores values in these distinct slots."""
        scatter(self.pages, slots, self._heap.append(values))

    def begin_extend(self, first_slot: int, values: pa.Array) -> Callable[[], None]:
        """Begins `extend` by adding the values and the pages. Returns a function that fills the pages, which any thread
        may call.
        """
        return super().begin_extend(first_slot, pa.array(self._heap.append(values)))

    def begin_batch(self) -> None:
        """Drops the values of the previous batch, because the caller will set all slots."""
        self._heap.clear()

    def freeze(self) -> FrozenColumn:
        """Returns a snapshot of the column: references to the current pages and values. The caller must pin the
        pages.
        """
        return _FrozenVarying(super().freeze(), self._heap.chunks, self._value_spec)

    @property
    def needs_collection(self) -> bool:
        """Returns whether there may be enough unused values for `collect` to be worth its cost."""
        return self._heap.is_due

    def collect(self, referred: Iterable[Numbers]) -> None:
        """Drops unused values. `referred` has the value numbers that all live slots and the undo log refer to."""
        self._heap.collect(referred)

    def _another(self) -> PagedColumn:
        return VaryingColumn(self._value_spec, self._heap)


class _FrozenVarying(FrozenColumn):
    """The value numbers and the values of a column at the time of a snapshot."""

    __slots__ = ("_chunks",)

    def __init__(self, numbers: FrozenColumn, chunks: HeapChunks, spec: ValueSpec) -> None:
        super().__init__(spec, *numbers.parts())
        self._chunks = chunks

    def take(self, slots: NDArray[Any], places: Places | None = None) -> pa.Array:
        """Returns the values of these slots. Their pages must still be held."""
        return values_of(self._chunks, self.raw(slots, places), self.spec.data_type)


def paged_column(spec: ValueSpec) -> PagedColumn:
    """Creates the column for a spec, with fixed or variable width depending on its type."""
    return PagedColumn(spec) if storage_dtype(spec.data_type) is not None else VaryingColumn(spec)


@dataclass(frozen=True, slots=True)
class HeapChunk:
    """A part of a value heap: consecutive values, which own their memory, and their ascending numbers."""

    numbers: Numbers
    values: pa.Array
    size_bytes: int

    @staticmethod
    def of(numbers: Numbers, values: pa.Array) -> HeapChunk:
        """Returns a chunk with its size. `values` must own their memory, and not be a slice."""
        return HeapChunk(numbers, values, values.nbytes + numbers.nbytes)

    def take(self, numbers: Numbers) -> pa.Array:
        """Returns the values with these numbers, all of which must be in the chunk."""
        first = self.numbers[0]
        if int(self.numbers[-1]) - int(first) == len(self.numbers) - 1:
            return self.values.take(pa.array(numbers - first))
        return self.values.take(pa.array(np.searchsorted(self.numbers, numbers)))

    def only(self, numbers: Numbers) -> HeapChunk | None:
        """Returns a chunk with only the values with these ascending numbers, or None if it contains none of them."""
        first, last = np.searchsorted(numbers, [self.numbers[0], self.numbers[-1] + 1])
        places = np.flatnonzero(np.isin(self.numbers, numbers[first:last], assume_unique=True))
        if len(places) == len(self.numbers):
            return self
        return HeapChunk.of(self.numbers[places], self.values.take(pa.array(places))) if len(places) else None


HeapChunks = Sequence[HeapChunk]
"""Chunks, ascending by number."""


def values_of(chunks: HeapChunks, numbers: Numbers, data_type: pa.DataType) -> pa.Array:
    """Returns the values with these numbers, in the order of `numbers`. Each number is 0 or in one of the chunks."""
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
    """Stores the values of a column of variable width, and numbers them.

    One thread changes the heap. Any thread may read the chunks that it has returned.
    """

    __slots__ = ("_chunks", "_kept_bytes", "_next", "data_type", "size_bytes")

    def __init__(self, data_type: pa.DataType) -> None:
        self.data_type = data_type
        self.size_bytes = 0
        self._chunks: list[HeapChunk] = []
        self._next = 1
        self._kept_bytes = 0
        """The size in bytes after the last collection."""

    @property
    def chunks(self) -> HeapChunks:
        """Returns the current chunks, for a snapshot."""
        return tuple(self._chunks)

    @property
    def value_bytes(self) -> int:
        """Returns the estimated size of a value in bytes."""
        values = sum(len(chunk.numbers) for chunk in self._chunks)
        return self.size_bytes // values if values else 0

    def append(self, values: pa.Array) -> Numbers:
        """Adds values. Returns the number of each value, which is 0 for null."""
        values = plain(values)
        if values.type != self.data_type:
            values = values.cast(self.data_type)
        numbers = np.zeros(len(values), dtype=np.int64)
        # `take` also copies: a slice would keep its whole parent alive.
        valid = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        if not len(valid):
            return numbers
        found = np.arange(self._next, self._next + len(valid), dtype=np.int64)
        self._next += len(valid)
        numbers[valid] = found
        self._add(HeapChunk.of(found, values.take(pa.array(valid))))
        return numbers

    def take(self, numbers: Numbers) -> pa.Array:
        """Returns the values with these numbers as an Arrow array, null for the number 0."""
        return values_of(self._chunks, numbers, self.data_type)

    @property
    def is_due(self) -> bool:
        """Returns whether the heap has doubled since the last `collect`, so that the next one is worth its cost."""
        return self.size_bytes > 2 * self._kept_bytes + GARBAGE_BYTES_MIN

    def collect(self, referred: Iterable[Numbers]) -> None:
        """Drops all values whose number is not in `referred`, which may have any order and duplicates."""
        alive = distinct_integers(np.concatenate([np.zeros(1, dtype=np.int64), *referred]))
        chunks, self._chunks, self.size_bytes = self._chunks, [], 0
        for chunk in chunks:
            left = chunk.only(alive)
            if left is not None:
                self._add(left)
        self._kept_bytes = self.size_bytes

    def clear(self) -> None:
        """Drops all values of the heap."""
        self._chunks, self.size_bytes, self._kept_bytes = [], 0, 0

    def _add(self, chunk: HeapChunk) -> None:
        """Appends a chunk. Then merges the last two chunks, unless the second-last one is twice as long as the last
        one, or the result would be too large.
        """
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
