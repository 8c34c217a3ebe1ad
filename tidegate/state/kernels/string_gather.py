"""Gathers rows of a string column: their bytes lie one behind the other in new buffers.

Arrow does so row by row with a copy of so many bytes, and words of many lengths are what a processor cannot guess. Here
16 bytes are moved for each short string: what is too much is overwritten by the next one. Only near the end of a
buffer, of those that are read and those that are written, bytes are moved one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel, load64, store64

_OFFSETS: dict[int, np.dtype[Any]] = {
    pa.string().id: np.dtype(np.int32),
    pa.binary().id: np.dtype(np.int32),
    pa.large_string().id: np.dtype(np.int64),
    pa.large_binary().id: np.dtype(np.int64),
}


def has_strings(column: pa.Array) -> bool:
    """Whether `gather_strings` takes the column: strings or bytes of any length, without nulls."""
    return column.type.id in _OFFSETS and column.null_count == 0 and len(column) > 0


def gather_strings(column: pa.Array, rows: NDArray[np.int32]) -> pa.Array | None:
    """The given rows of a column for which `has_strings`. None if they are more bytes than its offsets can say."""
    dtype = _OFFSETS[column.type.id]
    _, offset_buffer, data_buffer = column.buffers()
    start_bytes = column.offset * dtype.itemsize
    offsets = np.frombuffer(offset_buffer, dtype=dtype, count=len(column) + 1, offset=start_bytes)
    data: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
    if data_buffer is not None:
        data = np.frombuffer(data_buffer, dtype=np.uint8)
    gathered_offsets = np.empty(len(rows) + 1, dtype=dtype)
    size_bytes = int(_gather_offsets(offsets, rows, gathered_offsets))
    if size_bytes > np.iinfo(dtype).max:
        return None
    gathered = np.empty(size_bytes, dtype=np.uint8)
    _gather_bytes(offsets, data, rows, gathered_offsets, gathered)
    buffers = [None, pa.py_buffer(gathered_offsets), pa.py_buffer(gathered)]
    return pa.Array.from_buffers(column.type, len(rows), buffers)


@kernel
def _gather_offsets(offsets: NDArray[Any], rows: NDArray[np.int32], gathered: NDArray[Any]) -> np.int64:
    """Where each row begins and the last one ends. Returns that end, also if it is more than fits."""
    end = np.int64(0)
    gathered[0] = 0
    for j in range(rows.shape[0]):
        row = rows[j]
        end += np.int64(offsets[row + 1]) - np.int64(offsets[row])
        gathered[j + 1] = end
    return end


@kernel
def _gather_bytes(
    offsets: NDArray[Any],
    data: NDArray[np.uint8],
    rows: NDArray[np.int32],
    gathered_offsets: NDArray[Any],
    gathered: NDArray[np.uint8],
) -> None:
    read_end, written_end = data.shape[0] - 16, gathered.shape[0] - 16
    for j in range(rows.shape[0]):
        start = np.int64(offsets[rows[j]])
        at = np.int64(gathered_offsets[j])
        length = np.int64(gathered_offsets[j + 1]) - at
        if length <= 16 and start <= read_end and at <= written_end:
            store64(gathered, at, load64(data, start))
            store64(gathered, at + 8, load64(data, start + 8))
        elif length < 8:
            for position in range(length):
                gathered[at + position] = data[start + position]
        else:
            last = length - 8
            for position in range(0, last, 8):
                store64(gathered, at + position, load64(data, start + position))
            store64(gathered, at + last, load64(data, start + last))
