"""Fixed-width Arrow types in NumPy: the dtype of their values, and Arrow arrays over such values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# Keyed by type id: to hash the type itself takes longer than a kernel takes for a batch.
_NUMBERS: dict[int, np.dtype[Any]] = {
    pa.from_numpy_dtype(name).id: np.dtype(name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}


def storage_dtype(data_type: pa.DataType) -> np.dtype[Any] | None:
    """NumPy dtype of the values buffer of a fixed-width Arrow type of 1 to 8 bytes.

    None for any other type.
    """
    number = _NUMBERS.get(data_type.id)
    if number is not None:
        return number
    if pa.types.is_temporal(data_type) and not pa.types.is_interval(data_type):
        return np.dtype(np.int32 if data_type.bit_width == 32 else np.int64)
    return None


def array_of(values: NDArray[Any], valid: NDArray[np.uint8] | None, data_type: pa.DataType) -> pa.Array:
    """Arrow array over the memory of `values` (raw, in `storage_dtype`). Entries with `valid` 0 are null."""
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(data_type, len(values), [bitmap, pa.py_buffer(values)])
