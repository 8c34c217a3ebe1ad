"""`BatchColumn`: the `ValueColumn` that both backends give to kernels, over the pages of a `PagedColumn`.

`BatchColumns` are such columns without a table, for the groups of one batch at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import PagedColumn, pages_for
from tidegate.state.common.varying_column import VaryingColumn, paged_column
from tidegate.state.kernels.paged import Pages


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
