"""`TableLayout`: packs and unpacks rows of vectorised states in RocksDB, a whole batch at once.

Rows with a column of varying width lie as those of row tables do (`row_values.py`): `VaryingLayout` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import CorruptionError
from tidegate.storage.rocksdb.row_values import unpacked


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
        data, width = self.encoded(columns).tobytes(), self.dtype.itemsize
        return [data[start : start + width] for start in range(0, len(data), width)]

    def encoded(self, columns: Sequence[pa.Array]) -> NDArray[np.uint8]:
        """The same, of shape (rows, bytes)."""
        rows = np.empty(len(columns[0]), dtype=self.dtype)
        for position, column in enumerate(columns):
            name = f"c{position}"
            if len(column):
                width = self.dtype[name].itemsize
                values = np.frombuffer(column.buffers()[1], dtype=self.dtype[name], offset=column.offset * width)
                rows[name] = values[: len(column)]
        # Of most columns no value is null, and then all rows have the same bits.
        nulls = any(column.null_count for column in columns)
        valid = np.ones((len(rows) if nulls else 1, len(columns)), dtype=np.uint8)
        for position, column in enumerate(columns):
            if column.null_count:
                valid[:, position] = column.is_valid().to_numpy(zero_copy_only=False)
        rows["valid"] = np.packbits(valid, axis=1, bitorder="little")
        return rows.view(np.uint8).reshape(len(rows), self.dtype.itemsize)

    def _column(self, rows: NDArray[Any], valid: NDArray[np.uint8], position: int) -> pa.Array:
        values = np.ascontiguousarray(rows[f"c{position}"])
        bitmap = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
        return pa.Array.from_buffers(self.schema.field(position).type, len(rows), [bitmap, pa.py_buffer(values)])


@dataclass(frozen=True, slots=True)
class VaryingLayout:
    """The values of a TABLE row that has a column of varying width: all columns in the encoding of keys."""

    schema: pa.Schema

    def columns(self, packed: Sequence[bytes]) -> list[pa.Array]:
        """The columns of some rows. CorruptionError for bytes that are no such rows."""
        return unpacked(packed, self.schema)


def is_varying(schema: pa.Schema) -> bool:
    """Whether any value column is of no fixed width of 1 to 8 bytes."""
    return not all(_is_fixed(field.type) for field in schema)


def _is_fixed(data_type: pa.DataType) -> bool:
    kinds = pa.types
    temporal = kinds.is_temporal(data_type) and not kinds.is_interval(data_type)
    return bool(temporal or kinds.is_integer(data_type) or kinds.is_floating(data_type))


def table_layout(schema: pa.Schema) -> TableLayout | VaryingLayout:
    """The layout of value columns. Where all are of fixed width, values are bits: their kind is Arrow's."""
    if is_varying(schema):
        return VaryingLayout(schema)
    columns = [(f"c{i}", f"<i{field.type.bit_width // 8}") for i, field in enumerate(schema)]
    return TableLayout(schema, np.dtype([("valid", "u1", ((len(schema) + 7) // 8,)), *columns]))
