"""`RowSlots`: which slots have a row of a row table. Its keys, numbers and values are columns of the key space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.dirty_slots import Bitmaps
from tidegate.state.columnar.frozen_slots import FrozenSlots
from tidegate.state.columnar.key_columns import FrozenKeys
from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.sorted_slots import SortedSlots, by_bytes
from tidegate.state.columnar.vector_table import ColumnarTable


class RowSlots(ColumnarTable):
    """A table without value columns. `identity` are key and number, which tell rows apart."""

    def __init__(self, space: KeySpace, name: str, identity: tuple[str, ...], incremental: bool) -> None:
        self._identity = identity
        super().__init__(space, name, (), incremental)

    def put_behind(self, rows: pa.RecordBatch) -> NDArray[np.int32]:
        """Give the next slots to new rows. They do not count as changed."""
        first = self._space.slots
        self._append(rows, rows)
        return np.arange(first, self._space.slots, dtype=np.int32)

    def _frozen(self, dirty: Bitmaps | None, removed: bool) -> FrozenSlots:
        frozen = super()._frozen(dirty, removed)
        return replace(frozen, keys=_selected(frozen.keys, self._identity)) if removed else frozen

    def _sorted(self) -> SortedSlots:
        return replace(
            super()._sorted(), order=lambda rows, groups: by_bytes(rows.select(list(self._identity)), groups)
        )


def _selected(keys: FrozenKeys, names: Sequence[str]) -> FrozenKeys:
    """Some of the columns."""
    schema = pa.schema([keys.schema.field(name) for name in names])
    return FrozenKeys(schema, tuple(chunk.select(list(names)) for chunk in keys.chunks), keys.bounds)
