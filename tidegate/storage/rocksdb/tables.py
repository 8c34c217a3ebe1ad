"""`TableLayout`: packs and unpacks rows of vectorised states in RocksDB, a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import CorruptionError


@dataclass(frozen=True, slots=True)
class TableLayout:
    """How the values of a TABLE row lie: validity bits, then each column in its width."""

    schema: pa.Schema
    dtype: np.dtype[Any]

    def columns(self, packed: Sequence[bytes]) -> list[pa.Array]:
        """The columns of some rows. CorruptionError for rows of another size."""
        data = b"".join(packed)
        if len(data) != len(packed) * self.dtype.itemsize:
            raise CorruptionError(f"stored rows of the columns {self.schema.names} have another size than they should")
        rows = np.frombuffer(data, dtype=self.dtype)
        bits = np.unpackbits(rows["valid"], axis=1, count=len(self.schema), bitorder="little")
        return [self._column(rows, bits[:, position], position) for position in range(len(self.schema))]

    def packed(self, columns: Sequence[pa.Array]) -> list[bytes]:
        """Rows out of columns of these types."""
        rows = np.zeros(len(columns[0]), dtype=self.dtype)
        valid = np.ones((len(rows), len(columns)), dtype=np.uint8)
        for position, column in enumerate(columns):
            name = f"c{position}"
            if column.null_count:
                valid[:, position] = column.is_valid().to_numpy(zero_copy_only=False)
            if len(column):
                width = self.dtype[name].itemsize
                values = np.frombuffer(column.buffers()[1], dtype=self.dtype[name], offset=column.offset * width)
                rows[name] = values[: len(column)]
        rows["valid"] = np.packbits(valid, axis=1, bitorder="little")
        data, width = rows.tobytes(), self.dtype.itemsize
        return [data[start : start + width] for start in range(0, len(data), width)]

    def _column(self, rows: NDArray[Any], valid: NDArray[np.uint8], position: int) -> pa.Array:
        values = np.ascontiguousarray(rows[f"c{position}"])
        bitmap = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
        return pa.Array.from_buffers(self.schema.field(position).type, len(rows), [bitmap, pa.py_buffer(values)])


def table_layout(schema: pa.Schema) -> TableLayout:
    """The layout of value columns, all of fixed-width types of 1 to 8 bytes. Values are bits: their kind is Arrow's."""
    columns = [(f"c{i}", f"<i{field.type.bit_width // 8}") for i, field in enumerate(schema)]
    return TableLayout(schema, np.dtype([("valid", "u1", ((len(schema) + 7) // 8,)), *columns]))
