"""Arrow arrays as bytes that depend on nothing but their values: `canonical_array`.

Two arrays can be equal and lie in memory in different ways: what is beneath a null, where the offsets begin, which
values of a dictionary come first, whether there is a bitmap that says that nothing is null. Arrow writes all of that
into its streams. Here equal values become equal buffers, so that equal rows become equal files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_UNKNOWN_BYTES = 16
"""What a value counts for whose type has no width that is known here."""


def canonical_array(array: pa.Array) -> pa.Array:
    """An equal array of the same type that owns its buffers, the same ones for the same values."""
    kinds, data_type = pa.types, array.type
    if isinstance(data_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(data_type, canonical_array(array.storage))
    if kinds.is_dictionary(data_type):
        return _dictionary(array)
    if kinds.is_null(data_type):
        return pa.nulls(len(array))
    valid = None if array.null_count == 0 else array.is_valid().to_numpy(zero_copy_only=False)
    if kinds.is_struct(data_type):
        children = [_without(array.field(number), valid) for number in range(data_type.num_fields)]
        return _rebuilt(array, valid, [], list(map(canonical_array, children)))
    if kinds.is_fixed_size_list(data_type):
        return _fixed_size_list(array, valid)
    if kinds.is_list(data_type) or kinds.is_large_list(data_type) or kinds.is_map(data_type):
        return _list(array, valid)
    if _has_offsets(data_type):
        return _strings(array, valid)
    if kinds.is_boolean(data_type):
        flags = array.fill_null(False).to_numpy(zero_copy_only=False)
        return _rebuilt(array, valid, [np.packbits(flags, bitorder="little")])
    width = _width(data_type)
    if width is None:
        return pa.array(array.to_pylist(), type=data_type)
    start = array.offset * width
    data = np.frombuffer(array.buffers()[1] or b"", dtype=np.uint8)[start : start + len(array) * width].copy()
    if valid is not None:
        data.reshape(-1, width)[~valid] = 0
    return _rebuilt(array, valid, [data])


def row_bytes(array: pa.Array) -> NDArray[np.int64]:
    """About how many bytes each value of a canonical array takes; it depends on that value alone."""
    kinds, data_type, rows = pa.types, array.type, len(array)
    if isinstance(data_type, pa.BaseExtensionType):
        return row_bytes(array.storage)
    if kinds.is_dictionary(data_type):
        return row_bytes(canonical_array(array.dictionary_decode()))
    if kinds.is_struct(data_type):
        children = (row_bytes(array.field(number)) for number in range(data_type.num_fields))
        return sum(children, start=np.ones(rows, dtype=np.int64))
    if kinds.is_fixed_size_list(data_type):
        summed: NDArray[np.int64] = row_bytes(array.values).reshape(rows, data_type.list_size).sum(axis=1)
        return summed
    if kinds.is_list(data_type) or kinds.is_large_list(data_type) or kinds.is_map(data_type):
        before = np.concatenate(([0], np.cumsum(row_bytes(array.values))))
        ends: NDArray[np.int64] = before[_offsets(array)]
        return ends[1:] - ends[:-1] + 4
    if _has_offsets(data_type):
        return np.diff(_offsets(array)).astype(np.int64) + 4
    width = 1 if kinds.is_boolean(data_type) else _width(data_type)
    return np.full(rows, _UNKNOWN_BYTES if width is None else width, dtype=np.int64)


def _dictionary(array: pa.DictionaryArray) -> pa.Array:
    """Values in the order in which they first come, and none that does not."""
    data_type = array.type
    encoded = canonical_array(array.dictionary_decode()).dictionary_encode()
    indices = canonical_array(encoded.indices.cast(data_type.index_type))
    return pa.DictionaryArray.from_arrays(indices, canonical_array(encoded.dictionary), ordered=data_type.ordered)


def _list(array: pa.Array, valid: NDArray[Any] | None) -> pa.Array:
    """Lists and maps, without what lies beneath nulls."""
    offsets = _offsets(array)
    values = array.values
    if valid is None:
        ends = offsets - offsets[0]
        values = values.slice(int(offsets[0]), int(ends[-1]))
    else:
        lengths = np.where(valid, np.diff(offsets), 0)
        ends = np.concatenate(([0], np.cumsum(lengths)))
        places = np.repeat(offsets[:-1] - ends[:-1], lengths) + np.arange(int(ends[-1]))
        values = values.take(pa.array(places, pa.int64()))
    return _rebuilt(array, valid, [ends.astype(offsets.dtype)], [canonical_array(values)])


def _fixed_size_list(array: pa.FixedSizeListArray, valid: NDArray[Any] | None) -> pa.Array:
    size = array.type.list_size
    values = array.values.slice(array.offset * size, len(array) * size)
    child = _without(values, None if valid is None else np.repeat(valid, size))
    return _rebuilt(array, valid, [], [canonical_array(child)])


def _strings(array: pa.Array, valid: NDArray[Any] | None) -> pa.Array:
    if valid is not None:
        array = array.fill_null(b"" if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type) else "")
    offsets = _offsets(array)
    data = np.frombuffer(array.buffers()[2] or b"", dtype=np.uint8)[offsets[0] : offsets[-1]].copy()
    return _rebuilt(array, valid, [offsets - offsets[0], data])


def _without(child: pa.Array, valid: NDArray[Any] | None) -> pa.Array:
    """The child with nulls where its parent is null."""
    if valid is None:
        return child
    return child.take(pa.array(np.arange(len(child), dtype=np.int64), mask=~valid))


def _rebuilt(
    array: pa.Array, valid: NDArray[Any] | None, buffers: list[NDArray[Any]], children: list[pa.Array] | None = None
) -> pa.Array:
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    data = [bitmap, *(pa.py_buffer(np.ascontiguousarray(buffer)) for buffer in buffers)]
    return pa.Array.from_buffers(array.type, len(array), data, children=children)


def _offsets(array: pa.Array) -> NDArray[Any]:
    dtype = np.int64 if _is_large(array.type) else np.int32
    buffer = array.buffers()[1]
    if buffer is None or not buffer.size:
        return np.zeros(1, dtype=dtype)
    return np.frombuffer(buffer, dtype=dtype)[array.offset : array.offset + len(array) + 1]


def _is_large(data_type: pa.DataType) -> bool:
    kinds = pa.types
    return bool(kinds.is_large_list(data_type) or kinds.is_large_string(data_type) or kinds.is_large_binary(data_type))


def _has_offsets(data_type: pa.DataType) -> bool:
    kinds = pa.types
    small = kinds.is_string(data_type) or kinds.is_binary(data_type)
    return bool(small or kinds.is_large_string(data_type) or kinds.is_large_binary(data_type))


def _width(data_type: pa.DataType) -> int | None:
    """Bytes of a value of fixed width; None for types that are none."""
    try:
        bits = data_type.bit_width
    except ValueError:
        return None
    return bits // 8 if bits % 8 == 0 else None
