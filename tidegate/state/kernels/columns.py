"""Converts Arrow columns to plain arrays for kernels, and back, without a copy where possible.

Rules:

- For a slice, the array has only the rows of the slice.
- The value of a null entry is undefined, and kernels do not use it.
- Every type that may be a key has one canonical form: a 64-bit word, or a string of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.storage.errors import ConfigurationError

NO_MASK: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
"""Passed to a kernel as validity mask, it means that there are no nulls."""

_NO_BYTES: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
_CANONICAL_NAN = np.float64(np.nan)


@dataclass(frozen=True, slots=True)
class Words:
    """A fixed-width key column, as one int64 for each row.

    `valid` has one byte for each row, or is `NO_MASK` without nulls.
    """

    words: NDArray[np.int64]
    valid: NDArray[np.uint8]

    def __post_init__(self) -> None:
        _read_only(self.words)


@dataclass(frozen=True, slots=True)
class Strings:
    """A variable-width key column: row i has the bytes `data[offsets[i]:offsets[i + 1]]`. There are rows + 1
    offsets.
    """

    offsets: NDArray[np.int64]
    data: NDArray[np.uint8]
    valid: NDArray[np.uint8]

    def __post_init__(self) -> None:
        _read_only(self.offsets)
        _read_only(self.data)


def key_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Returns a column by name, without dictionary and other encodings (see `plain`). Raises ConfigurationError unless
    exactly one column has the name.
    """
    position = batch.schema.get_field_index(name)
    if position < 0:
        raise ConfigurationError(
            f"key column {name!r} is not in the batch, or occurs twice; name a column that occurs once in "
            f"{batch.schema.names}"
        )
    return plain(batch.column(position))


def plain(column: pa.Array) -> pa.Array:
    """Returns the column with its values decoded: without dictionary, run-end, view and extension encodings."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    data_type = column.type
    if pa.types.is_dictionary(data_type):
        return plain(column.dictionary_decode())
    if pa.types.is_run_end_encoded(data_type):
        return plain(pc.run_end_decode(column))
    if data_type == pa.string_view():
        return column.cast(pa.large_string())
    if data_type == pa.binary_view():
        return column.cast(pa.large_binary())
    return column


def valid_mask(column: pa.Array) -> NDArray[np.uint8]:
    """Returns 1 for each row with a value, 0 for each null, or `NO_MASK` if there are no nulls."""
    if column.null_count == 0:
        return NO_MASK
    bitmap = column.buffers()[0]
    if bitmap is None:  # the null type has no bitmap: everything is null
        return np.zeros(len(column), dtype=np.uint8)
    return _bits(bitmap, column.offset, len(column))


def fixed_values(column: pa.Array) -> NDArray[Any]:
    """Returns the raw values of a column whose type has a `storage_dtype`. The array is read-only and not a copy."""
    dtype = storage_dtype(column.type)
    assert dtype is not None, f"{column.type} has no fixed-width storage"
    buffer = column.buffers()[1]
    if len(column) == 0 or buffer is None:
        return _read_only(np.zeros(len(column), dtype=dtype))
    offset_bytes = column.offset * dtype.itemsize
    return _read_only(np.frombuffer(buffer, dtype=dtype, count=len(column), offset=offset_bytes))


def key_form(column: pa.Array, name: str) -> Words | Strings:
    """Returns the canonical form of a key column that is already `plain`.

    Integers, booleans, dates, times, timestamps and durations are widened to int64; uint64 values are reinterpreted bit
    by bit. Floats are widened to float64, and all NaN become one NaN, -0.0 becomes 0.0. Decimals and fixed-size binary
    values become byte strings. Raises ConfigurationError for a type that cannot be a key.
    """
    data_type = column.type
    if pa.types.is_null(data_type):
        return Words(np.zeros(len(column), dtype=np.int64), np.zeros(len(column), dtype=np.uint8))
    if pa.types.is_boolean(data_type):
        bits = _bits(column.buffers()[1], column.offset, len(column)) if len(column) else NO_MASK
        return Words(bits.astype(np.int64), valid_mask(column))
    if pa.types.is_floating(data_type):
        return Words(_canonical_floats(fixed_values(column)), valid_mask(column))
    if storage_dtype(data_type) is not None:
        values = fixed_values(column)
        words = values.view(np.int64) if values.dtype.itemsize == 8 else values.astype(np.int64)
        return Words(words, valid_mask(column))
    if pa.types.is_string(data_type) or pa.types.is_binary(data_type):
        return _strings(column, np.dtype(np.int32))
    if pa.types.is_large_string(data_type) or pa.types.is_large_binary(data_type):
        return _strings(column, np.dtype(np.int64))
    if pa.types.is_fixed_size_binary(data_type) or pa.types.is_decimal(data_type):
        return _fixed_strings(column, data_type.byte_width)
    raise ConfigurationError(
        f"column {name!r} of type {data_type} cannot be a key; use numbers, booleans, strings, binary, "
        f"decimals, dates or times (derive such a column with with_columns before key_by)"
    )


def key_forms(batch: pa.RecordBatch, columns: Sequence[str]) -> list[Words | Strings]:
    """Returns the canonical forms of several key columns of a batch."""
    return [key_form(key_column(batch, name), name) for name in columns]


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    """Makes an array read-only and returns it.

    numba compiles every kernel separately for writable and read-only arrays.
    """
    values.flags.writeable = False
    return values


def _bits(buffer: pa.Buffer, offset: int, length: int) -> NDArray[np.uint8]:
    first_byte = offset // 8
    count = (offset + length + 7) // 8 - first_byte
    packed = np.frombuffer(buffer, dtype=np.uint8, count=count, offset=first_byte)
    bits = np.unpackbits(packed, bitorder="little")
    return bits[offset - 8 * first_byte : offset - 8 * first_byte + length]


def _canonical_floats(values: NDArray[Any]) -> NDArray[np.int64]:
    floats = values.astype(np.float64)  # a copy, also of float64
    floats += 0.0  # -0.0 + 0.0 is 0.0
    floats[np.isnan(floats)] = _CANONICAL_NAN
    return floats.view(np.int64)


def _strings(column: pa.Array, offset_dtype: np.dtype[Any]) -> Strings:
    rows = len(column)
    _, offset_buffer, data_buffer = column.buffers()
    if rows == 0 or offset_buffer is None:
        return Strings(np.zeros(rows + 1, dtype=np.int64), _NO_BYTES, valid_mask(column))
    start = column.offset * offset_dtype.itemsize
    offsets = np.frombuffer(offset_buffer, dtype=offset_dtype, count=rows + 1, offset=start)
    data = _NO_BYTES if data_buffer is None else np.frombuffer(data_buffer, dtype=np.uint8)
    return Strings(offsets.astype(np.int64, copy=False), data, valid_mask(column))


def _fixed_strings(column: pa.Array, width: int) -> Strings:
    rows = len(column)
    offsets = np.arange(column.offset, column.offset + rows + 1, dtype=np.int64) * width
    buffer = column.buffers()[1]
    data = _NO_BYTES if buffer is None else np.frombuffer(buffer, dtype=np.uint8)
    return Strings(offsets, data, valid_mask(column))


# Keyed by type id, because hashing the type itself takes longer than a kernel takes for a batch.
_NUMBERS: dict[int, np.dtype[Any]] = {
    pa.from_numpy_dtype(name).id: np.dtype(name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}


def storage_dtype(data_type: pa.DataType) -> np.dtype[Any] | None:
    """Returns the NumPy dtype of the values of a fixed-width Arrow type of 1 to 8 bytes, or None for other types."""
    number = _NUMBERS.get(data_type.id)
    if number is not None:
        return number
    if pa.types.is_temporal(data_type) and not pa.types.is_interval(data_type):
        return np.dtype(np.int32 if data_type.bit_width == 32 else np.int64)
    return None


def array_of(values: NDArray[Any], valid: NDArray[np.uint8] | None, data_type: pa.DataType) -> pa.Array:
    """Returns an Arrow array over the memory of `values` (in `storage_dtype`). Entries with `valid` 0 are null."""
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(data_type, len(values), [bitmap, pa.py_buffer(values)])
