"""`MergedGroups`: accumulators of the windows that a batch touches, in memory: of what was stored, and of its rows.

For windows whose bounds depend on rows (sessions, count windows). They take what a key has out of the state,
put it together with the rows of the batch here, and write back what is left.

A group is filled in several calls. A table takes all slots that are new in a batch for empty when the first null comes:
so it is told after each call which groups are still empty, or values would go that an earlier call has put in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.windows.window_state import Parts, WindowState
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.schemas.reserved_names import own_name

_SLOT = own_name("slot")


class MergedGroups:
    """Empty accumulators like those of a state, for `count` groups that are numbered from 0."""

    def __init__(self, state: WindowState, count: int) -> None:
        backend = ColumnarBackend(1, (_SLOT,), incremental=False)
        self._state, self._fields = state, state.fields
        self._table = backend.table("merged", state.specs())
        backend.fix_keys(pa.schema({_SLOT: pa.int64()}))
        self._accumulators = state.accumulators_of(self._table)
        self._slots = self._table.upsert(pa.record_batch({_SLOT: np.arange(count)})).slots
        self._empty = np.ones(count, dtype=np.bool_)

    def merge(self, numbers: NDArray[Any], parts: Parts) -> None:
        """Merge stored parts into groups."""
        for accumulator, columns in zip(self._accumulators, parts, strict=True):
            accumulator.merge(self._slots[numbers], columns)
        self._filled(numbers)

    def update(self, batch: pa.RecordBatch, numbers: NDArray[Any]) -> None:
        """Add rows to groups."""
        for accumulator in self._accumulators:
            accumulator.update(batch, self._slots[numbers])
        self._filled(numbers)

    def _filled(self, numbers: NDArray[Any]) -> None:
        """These groups have something."""
        self._empty[numbers] = False
        self._table.new_slots = self._slots[self._empty]

    def done(self) -> None:
        """Everything is in. Only results are asked for from now on."""
        self._table.done()

    def parts(self, numbers: NDArray[Any]) -> Parts:
        """What some groups hold, as it is stored."""
        slots = self._slots[numbers]
        return [[self._table.column(field.name).take(slots) for field in group] for group in self._fields.values()]

    def results(self, numbers: NDArray[Any]) -> list[pa.Array]:
        """The results of some groups."""
        return self._state.results_of(self._accumulators, self._slots[numbers])


def codes_of(keys: pa.RecordBatch, rows: int) -> tuple[NDArray[np.int64], pa.RecordBatch, int]:
    """A number for the key of each row, from 0 without gaps; the distinct keys in their order, and how many.

    Without key columns all rows have one key.
    """
    if not keys.num_columns:
        return np.zeros(rows, dtype=np.int64), keys, 1
    found = KeyIndex(tuple(keys.schema.names)).upsert(keys)
    distinct = keys if len(found.first_rows) == rows else keys.take(pa.array(found.first_rows))
    return found.slots.astype(np.int64), distinct, len(found.first_rows)
