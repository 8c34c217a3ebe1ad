"""The canonical file format of keyed state: equal rows give equal bytes, whichever state backend wrote them.

Rules:

- Rows are sorted by key group, then by the bytes of the key, which `tidegate/storage/state/rocksdb/keys.py` defines.
  Entries of a map are sorted by the bytes of the map key.
- A chunk ends at the first row with which it has `CHUNK_ROWS` rows or `CHUNK_BYTES` bytes, however the backend has
  split the rows. Arrays are normalized by `canonical_array`. A savepoint can therefore be compared byte by byte with
  the savepoint of another backend, and a state that is larger than memory is written a chunk at a time.
- The code that makes the `FrozenState` sorts the rows: only a backend can do that within its memory.

Equal Arrow arrays can differ in memory: in the bytes beneath a null, where the offsets begin, the order of a
dictionary, whether there is a bitmap although nothing is null. Arrow writes all of that into its streams.
`canonical_array` turns equal values into equal buffers, so that equal rows become equal files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import CorruptionError
from tidegate.storage.state.snapshot import FrozenChanged, StateChunk

CHUNK_ROWS = 16_384
CHUNK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FrozenCanonical(FrozenChanged):
    """A snapshot (`FrozenState`) that converts the sorted keyed rows of `frozen` to the canonical format of
    savepoints.
    """

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the rows in chunks whose bounds depend only on the rows."""
        return canonical_chunks(self.frozen.chunks())


def canonical_chunks(chunks: Iterable[StateChunk]) -> Iterator[StateChunk]:
    """Divides sorted rows again into chunks whose bounds depend only on the rows.

    Raises CorruptionError if the key groups of the rows do not ascend.
    """
    held: list[_Piece] = []
    rows = size_bytes = 0
    for chunk in chunks:
        left = _Piece.of(chunk)
        while len(left.groups):
            ends_bytes = size_bytes + np.cumsum(left.sizes)
            full_at = int(np.searchsorted(ends_bytes, CHUNK_BYTES)) + 1
            count = min(full_at, CHUNK_ROWS - rows, len(left.groups))
            taken, left = left.cut(count)
            held.append(taken)
            rows, size_bytes = rows + count, int(ends_bytes[count - 1])
            if rows == CHUNK_ROWS or size_bytes >= CHUNK_BYTES:
                yield _joined(held)
                held, rows, size_bytes = [], 0, 0
    if held:
        yield _joined(held)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of keyed state, with the key group and the approximate size in bytes of each row."""

    rows: pa.RecordBatch
    groups: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @staticmethod
    def of(chunk: StateChunk) -> _Piece:
        ends = np.asarray(chunk.group_rows, dtype=np.int64)
        counts = ends[1:] - ends[:-1]
        groups = np.repeat(chunk.first_group + np.arange(len(counts)), counts)
        rows = _canonical(chunk.rows)
        sizes = sum((row_bytes(column) for column in rows.columns), start=np.zeros(rows.num_rows, dtype=np.int64))
        return _Piece(rows, groups, sizes)

    def cut(self, count: int) -> tuple[_Piece, _Piece]:
        first = _Piece(self.rows.slice(0, count), self.groups[:count], self.sizes[:count])
        return first, _Piece(self.rows.slice(count), self.groups[count:], self.sizes[count:])


def _joined(pieces: Sequence[_Piece]) -> StateChunk:
    groups = np.concatenate([piece.groups for piece in pieces])
    if np.any(groups[1:] < groups[:-1]):
        raise CorruptionError(
            f"rows of a canonical snapshot of state are not in the order of their key groups ({groups[:3]} and more); "
            "the file is damaged: choose another checkpoint"
        )
    rows = _canonical(pa.concat_batches([piece.rows for piece in pieces]))
    first, last = int(groups[0]), int(groups[-1])
    starts = np.searchsorted(groups, np.arange(first, last + 2))
    return StateChunk(rows, first, tuple(starts.tolist()))


def _canonical(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(map(canonical_array, rows.columns)), schema=rows.schema)


_UNKNOWN_BYTES = 16
"""Assumed size in bytes of a value whose type has no known width."""


def canonical_array(array: pa.Array) -> pa.Array:
    """Returns an equal array of the same type whose buffers depend only on the values. The array owns its buffers."""
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
    """Returns the approximate size in bytes of each value of a canonical array. The size depends only on that value."""
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
    """Returns the array with its dictionary in order of first use, without unused values."""
    data_type = array.type
    encoded = canonical_array(array.dictionary_decode()).dictionary_encode()
    indices = canonical_array(encoded.indices.cast(data_type.index_type))
    return pa.DictionaryArray.from_arrays(indices, canonical_array(encoded.dictionary), ordered=data_type.ordered)


def _list(array: pa.Array, valid: NDArray[Any] | None) -> pa.Array:
    """Returns lists or maps without child values that belong to null entries."""
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
    """Returns the child array of a struct, with null wherever the struct is null (`valid` False)."""
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
    """Returns the size in bytes of values of a fixed-width type, or None for other types."""
    try:
        bits = data_type.bit_width
    except ValueError:
        return None
    return bits // 8 if bits % 8 == 0 else None
