"""Decodes keys in RocksDB: from the bytes of rows back into key columns.

A row is its columns in order: a byte 0 for null, or a byte 1 and then 8 bytes (the canonical word of a type of fixed
width, little-endian), or 8 bytes of length and the bytes themselves. So no row is the beginning of another one, and
rows are equal exactly when the keys are. `tidegate/state/kernels/row_encoding.py` makes them; this module reads them.

Canonical words: integers, booleans, dates and times as int64, floats as the bits of float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import ConfigurationError, CorruptionError

_WORD_BYTES = 8
_COPIED_BYTES = 1 << 20
COLUMN_BYTES_MAX = (1 << 31) - 1
"""Of a column of `string` or `binary`: its offsets are int32."""

RowLength = Callable[[bytes, int], int]
"""Where the row ends that begins at a position of some bytes."""


def decode_rows(rows: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """The key columns of rows that consist of nothing else.

    CorruptionError for bytes that are no such rows, ConfigurationError where they are too many for a column.
    """
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    ends = np.cumsum(sizes)
    cursor = ends - sizes
    # Room behind the end, so that a word may be read where a torn row has none.
    data = np.frombuffer(b"".join((*rows, bytes(_WORD_BYTES + 1))), dtype=np.uint8)
    arrays = []
    for field in schema:
        if np.any(cursor >= ends):
            raise _damaged(schema)
        valid = data[cursor] == 1
        cursor = cursor + 1
        if has_words(field.type):
            arrays.append(_words(data, cursor, valid, field.type))
            cursor = cursor + np.where(valid, _WORD_BYTES, 0)
        else:
            lengths = np.where(valid, _words_at(data, cursor), 0)
            starts = cursor + np.where(valid, _WORD_BYTES, 0)
            if np.any((lengths < 0) | (lengths > ends - starts)):
                raise _damaged(schema)
            arrays.append(_strings(data, starts, lengths, valid, field.type))
            cursor = starts + lengths
        if np.any(cursor > ends):
            raise _damaged(schema)
    if np.any(cursor != ends):
        raise _damaged(schema)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def row_end(schema: pa.Schema) -> RowLength:
    """Finds the end of the row with which bytes go on from a position; more may follow it."""
    words = [has_words(field.type) for field in schema]

    def end(data: bytes, position: int) -> int:
        for is_word in words:
            if data[position] == 0:
                position += 1
            elif is_word:
                position += 1 + _WORD_BYTES
            else:
                length = int.from_bytes(data[position + 1 : position + 1 + _WORD_BYTES], "little")
                position += 1 + _WORD_BYTES + length
        return position

    return end


def has_words(data_type: pa.DataType) -> bool:
    """Whether values of a key column's type are words, and not strings of bytes."""
    kinds = pa.types
    temporal = kinds.is_temporal(data_type) and not kinds.is_interval(data_type)
    number = kinds.is_integer(data_type) or kinds.is_floating(data_type)
    return number or temporal or kinds.is_boolean(data_type) or kinds.is_null(data_type)


def _words_at(data: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    within = np.minimum(positions, len(data) - _WORD_BYTES)
    return np.ascontiguousarray(data[within[:, None] + np.arange(_WORD_BYTES)]).view("<i8").reshape(-1)


def _words(data: NDArray[np.uint8], cursor: NDArray[np.int64], valid: NDArray[Any], data_type: pa.DataType) -> pa.Array:
    kinds = pa.types
    if kinds.is_null(data_type):
        return pa.nulls(len(cursor))
    words = np.where(valid, _words_at(data, cursor), 0)
    if kinds.is_boolean(data_type):
        bits = pa.py_buffer(np.packbits(words & 1, bitorder="little"))
        return pa.Array.from_buffers(data_type, len(words), [_bitmap(valid), bits])
    if kinds.is_floating(data_type):
        values: NDArray[Any] = words.view("<f8").astype(f"<f{data_type.bit_width // 8}")
    else:
        values = words.astype(f"<i{data_type.bit_width // 8}")
    return pa.Array.from_buffers(data_type, len(words), [_bitmap(valid), pa.py_buffer(values)])


def _strings(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    valid: NDArray[Any],
    data_type: pa.DataType,
) -> pa.Array:
    rows = len(starts)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    content = _content(data, starts, offsets)
    if pa.types.is_fixed_size_binary(data_type) or pa.types.is_decimal(data_type):
        # A null has no bytes in the row, but its width in the column.
        width = data_type.byte_width
        if np.any(lengths[valid] != width):
            raise CorruptionError(f"a stored key of type {data_type} has a value of another width")
        values = np.zeros((rows, width), dtype=np.uint8)
        values[valid] = content.reshape(-1, width)
        return pa.Array.from_buffers(data_type, rows, [_bitmap(valid), pa.py_buffer(values)])
    large = pa.types.is_large_string(data_type) or pa.types.is_large_binary(data_type)
    if len(content) > COLUMN_BYTES_MAX and not large:
        raise ConfigurationError(
            f"{rows:,} rows of keyed state are needed at once, and have {len(content):,} bytes in a column of type "
            f"{data_type}, which can have {COLUMN_BYTES_MAX:,}; cast it to large_{data_type}, or see to it that "
            "batches have fewer rows"
        )
    shaped = offsets if large else offsets.astype(np.int32)
    return pa.Array.from_buffers(data_type, rows, [_bitmap(valid), pa.py_buffer(shaped), pa.py_buffer(content)])


def _content(data: NDArray[np.uint8], starts: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The bytes from each start on, one string behind the other; string i is from offset i to the next one.

    A few rows at a time, because places of bytes take many times as much as the bytes.
    """
    content = np.empty(int(offsets[-1]), dtype=np.uint8)
    lengths = np.diff(offsets)
    row, rows = 0, len(starts)
    while row < rows:
        begin = int(offsets[row])
        stop = max(row + 1, int(np.searchsorted(offsets, begin + _COPIED_BYTES, side="right")) - 1)
        end = int(offsets[stop])
        if stop == row + 1:
            content[begin:end] = data[starts[row] : starts[row] + end - begin]
        else:
            places = np.repeat(starts[row:stop] - offsets[row:stop], lengths[row:stop])
            places += np.arange(begin, end)
            content[begin:end] = data[places]
        row = stop
    return content


def _bitmap(valid: NDArray[Any]) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _damaged(schema: pa.Schema) -> CorruptionError:
    return CorruptionError(f"stored keys are no rows of the key columns {schema.names}")
