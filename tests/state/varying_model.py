"""A vectorised table with columns of varying width, beside what it should hold."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from backend_model import COLUMNS, Table, key_of

from tidegate.state.common.backend import ValueSpec
from tidegate.state.key_index.hash_table import Upserted

_LATELY = 3
_LISTS = pa.list_(pa.float64())


class VaryingTable(Table):
    """A table that has, beside the columns of `Table`, the last value of each key as a text, and its last three."""

    columns = (*COLUMNS, ValueSpec("text", pa.string()), ValueSpec("lately", _LISTS))

    def _put_more(self, changes: Sequence[tuple[int, float | None]], upserted: Upserted) -> None:
        """Texts and lists, made anew of what the table holds and the rows of the batch."""
        slots = upserted.slots[upserted.first_rows]
        came: dict[int, list[float | None]] = {}
        for number, value in changes:
            came.setdefault(number, []).append(value)
        texts = [None if values[-1] is None else f"value {values[-1]}" for values in came.values()]
        lately = self.table.column("lately")
        held = lately.take(slots).to_pylist()
        lists = [[*(old or ()), *values][-_LATELY:] for old, values in zip(held, came.values(), strict=True)]
        self.table.column("text").put(slots, pa.array(texts, pa.string()))
        lately.put(slots, pa.array(lists, _LISTS))
        for row, text in zip(upserted.first_rows, texts, strict=True):
            number = changes[row][0]
            model = self._model[key_of(number)]
            model["text"] = text
            model["lately"] = [*(model.get("lately") or ()), *came[number]][-_LATELY:]
