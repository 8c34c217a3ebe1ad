"""Rules of state with values of any width, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from broken_rules import Patch

from tidegate.state.columnar.vector_table import ColumnarTable
from tidegate.state.common.table_columns import VaryingColumn

_extend = VaryingColumn.begin_extend


def _without_values(self: VaryingColumn, first_slot: int, values: pa.Array) -> Callable[[], None]:
    return _extend(self, first_slot, pa.nulls(len(values), values.type))


def _careless(self: ColumnarTable) -> None:
    """Values go to which only the undo log refers."""
    for column in self._columns.values():
        if isinstance(column.paged, VaryingColumn):
            slots = np.arange(self._space.slots, dtype=np.int32)
            column.paged.collect([column.paged.raw(slots[self.live(slots)])])


AGGREGATE_PATCHES: dict[str, tuple[int, Patch]] = {
    "aggregates: values of any width are lost at a restore": (
        6,
        lambda: patch.object(VaryingColumn, "begin_extend", _without_values),
    ),
    "aggregates: what the undo log refers to is let go": (
        6,
        lambda: patch.object(ColumnarTable, "_collect", _careless),
    ),
}
"""Every such break: its invariant, and the patch."""

_TEXTS: Mapping[str, Hashable] = {"topology": "texts", "mode": "exactly-once", "faults": "tasks", "ending": "finish"}
AGGREGATE_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    "aggregates: values of any width are lost at a restore": {**_TEXTS, "survivors": "read"},
    "aggregates: what the undo log refers to is let go": {**_TEXTS, "survivors": "keep", "state": "incremental"},
}
"""Fixed values of the scenarios for these breaks."""
