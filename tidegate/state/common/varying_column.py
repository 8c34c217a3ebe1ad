"""`VaryingColumn`: a value of any Arrow type for each slot: its pages hold numbers of values in a `ValueHeap`.

To pages it is a column of int64 as others are: they are frozen, copied before they change, noted in the undo log and
renumbered alike. Values are set and taken as Arrow arrays, a batch at a time; kernels have nothing to do here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import FrozenColumn, PagedColumn
from tidegate.state.common.value_heap import HeapChunks, Numbers, ValueHeap, values_of
from tidegate.state.kernels.columns import storage_dtype
from tidegate.state.kernels.paged import scatter
from tidegate.state.kernels.partition import Places


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
