"""Assigns rows to subtasks (hash → key group → subtask) with a stable counting sort, and gathers or places rows.

Rules:

- Rows keep their order within a subtask; the order for each key depends on it.
- Gathered rows own their memory. A slice would keep its whole batch in memory while it is in a message.
- If all rows are needed, sorted by key group, each row is written to its place (`Places`) instead of gathered. Then
  memory is read sequentially, and the next place of each group stays in the cache.
- Arrow gathers strings row by row with a copy of variable length, which processors mispredict. Here 16 bytes are copied
  for each short string; the next string overwrites the excess bytes. Bytes are copied one by one only near the end of a
  buffer that is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.columns import array_of, fixed_values, storage_dtype
from tidegate.state.kernels.jit import kernel, load64, store64
from tidegate.storage.state.key_groups import subtask_of_key_group

_SLACK_BYTES = 4096
_FEW_ROWS = 4096
"""Up to this many rows, gathering with Arrow is faster than calling a kernel for each column."""


def subtask_table(max_parallelism: int, parallelism: int) -> NDArray[np.uint16]:
    """Returns the subtask of each key group, shape (max_parallelism,)."""
    groups = range(max_parallelism)
    subtasks = [subtask_of_key_group(group, max_parallelism, parallelism) for group in groups]
    return np.array(subtasks, dtype=np.uint16)


@dataclass(frozen=True, slots=True)
class Partition:
    """Row indices grouped by subtask: subtask t has `rows[bounds[t]:bounds[t + 1]]`, ascending."""

    rows: NDArray[np.int32]
    bounds: tuple[int, ...]


def partition(hashes: NDArray[np.uint64], table: NDArray[np.uint16], parallelism: int) -> Partition:
    """Groups rows by the subtask that owns their key group. `table` is the result of `subtask_table`."""
    rows = np.empty(len(hashes), dtype=np.int32)
    bounds = np.zeros(parallelism + 1, dtype=np.int64)
    subtasks, positions = np.empty(len(hashes), dtype=np.uint16), np.empty(parallelism, dtype=np.int64)
    _partition(hashes, table, subtasks, positions, rows, bounds)
    return Partition(rows, tuple(bounds.tolist()))


@dataclass(frozen=True, slots=True)
class Places:
    """The target positions of rows that are sorted by key group: row i goes to position `places[i]`.

    Rows of a group keep their order. The rows of group `first + g` have the positions from `bounds[g]` to `bounds[g +
    1]`.
    """

    first: int
    places: NDArray[np.int32]
    bounds: tuple[int, ...]

    def rows(self) -> NDArray[np.int32]:
        """Returns the index of the row that goes to each position: the inverse of `places`."""
        rows = np.empty(len(self.places), dtype=np.int32)
        _place(np.arange(len(rows), dtype=np.int32), self.places.view(np.uint32), rows)
        return rows


def places_by_group(groups: NDArray[np.uint16]) -> Places:
    """Returns the target positions of rows (at least one) that are sorted by these key groups."""
    first, last = int(groups.min()), int(groups.max())
    places = np.empty(len(groups), dtype=np.int32)
    bounds = np.zeros(last - first + 2, dtype=np.int64)
    _places_by_group(groups, first, np.empty(last - first + 1, dtype=np.int64), places, bounds)
    return Places(first, places, tuple(bounds.tolist()))


def placed(
    parts: Sequence[pa.RecordBatch],
    places: Places,
    empty: Callable[[int, np.dtype[Any]], NDArray[Any]] = np.empty,
) -> pa.RecordBatch:
    """Returns the rows of several batches in one batch, with each row at its target position `places`.

    `empty` allocates the buffers. The batches (at least one) have the same schema.
    """
    schema = parts[0].schema
    columns = [[part.column(name) for part in parts] for name in range(len(schema))]
    return pa.RecordBatch.from_arrays([_placed_column(column, places, empty) for column in columns], schema=schema)


def gather(batch: pa.RecordBatch, rows: NDArray[np.int32]) -> pa.RecordBatch:
    """Returns the rows of a batch with the indices `rows`, in new buffers."""
    selection = pa.array(rows)
    if len(rows) <= _FEW_ROWS:
        return batch.take(selection)
    return pa.RecordBatch.from_arrays(
        [_gather_column(column, rows, selection) for column in batch.columns], schema=batch.schema
    )


def compact(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the batch itself if its buffers contain little more than its rows, otherwise a copy of its rows."""
    if batch.get_total_buffer_size() <= batch.nbytes + batch.nbytes // 8 + _SLACK_BYTES:
        return batch
    return gather(batch, np.arange(batch.num_rows, dtype=np.int32))


def _gather_column(column: pa.Array, rows: NDArray[np.int32], selection: pa.Array) -> pa.Array:
    if column.null_count == 0 and storage_dtype(column.type) is not None:
        values = fixed_values(column)
        gathered = np.empty(len(rows), dtype=values.dtype)
        # Integers of each width suffice, because only bits are copied.
        word = np.dtype(f"i{values.dtype.itemsize}")
        _gather(values.view(word), rows, gathered.view(word))
        return array_of(gathered, None, column.type)
    if has_strings(column) and (strings := gather_strings(column, rows)) is not None:
        return strings
    return column.take(selection)


def _placed_column(
    parts: Sequence[pa.Array], places: Places, empty: Callable[[int, np.dtype[Any]], NDArray[Any]]
) -> pa.Array:
    data_type = parts[0].type
    if storage_dtype(data_type) is None or any(part.null_count for part in parts):
        rows = places.rows()
        return _gather_column(parts[0] if len(parts) == 1 else pa.concat_arrays(parts), rows, pa.array(rows))
    values = [fixed_values(part) for part in parts]
    found = empty(len(places.places), values[0].dtype)
    # Integers of each width suffice, because only bits are copied.
    word = np.dtype(f"i{found.dtype.itemsize}")
    start = 0
    for part in values:
        _place(part.view(word), places.places[start : start + len(part)].view(np.uint32), found.view(word))
        start += len(part)
    return array_of(found, None, data_type)


@kernel
def _partition(
    hashes: NDArray[np.uint64],
    table: NDArray[np.uint16],
    subtasks: NDArray[np.uint16],
    positions: NDArray[np.int64],
    rows: NDArray[np.int32],
    bounds: NDArray[np.int64],
) -> None:
    groups = np.uint64(table.shape[0])
    if groups & (groups - np.uint64(1)) == np.uint64(0):
        mask = groups - np.uint64(1)
        for i in range(hashes.shape[0]):
            subtask = table[hashes[i] & mask]
            subtasks[i] = subtask
            bounds[subtask + 1] += 1
    else:
        for i in range(hashes.shape[0]):
            subtask = table[hashes[i] % groups]
            subtasks[i] = subtask
            bounds[subtask + 1] += 1
    for t in range(positions.shape[0]):
        positions[t] = bounds[t]
        bounds[t + 1] += bounds[t]
    for i in range(hashes.shape[0]):
        subtask = subtasks[i]
        rows[positions[subtask]] = i
        positions[subtask] += 1


@kernel
def _places_by_group(
    groups: NDArray[np.uint16],
    first: int,
    following: NDArray[np.int64],
    places: NDArray[np.int32],
    bounds: NDArray[np.int64],
) -> None:
    # Unsigned, so that numba does not check for indexes from the end.
    before, one = np.uint64(first), np.uint64(1)
    for i in range(groups.shape[0]):
        bounds[np.uint64(groups[i]) - before + one] += 1
    for g in range(following.shape[0]):
        following[g] = bounds[g]
        bounds[g + 1] += bounds[g]
    for i in range(groups.shape[0]):
        group = np.uint64(groups[i]) - before
        place = following[group]
        places[i] = place
        following[group] = place + 1


@kernel
def _place(values: NDArray[Any], places: NDArray[np.uint32], found: NDArray[Any]) -> None:
    for i in range(places.shape[0]):
        found[places[i]] = values[i]


@kernel
def _gather(values: NDArray[Any], rows: NDArray[np.int32], gathered: NDArray[Any]) -> None:
    for j in range(rows.shape[0]):
        gathered[j] = values[rows[j]]


_OFFSETS: dict[int, np.dtype[Any]] = {
    pa.string().id: np.dtype(np.int32),
    pa.binary().id: np.dtype(np.int32),
    pa.large_string().id: np.dtype(np.int64),
    pa.large_binary().id: np.dtype(np.int64),
}


def has_strings(column: pa.Array) -> bool:
    """Returns whether `gather_strings` supports the column: strings or bytes of variable length, without nulls."""
    return column.type.id in _OFFSETS and column.null_count == 0 and len(column) > 0


def gather_strings(column: pa.Array, rows: NDArray[np.int32]) -> pa.Array | None:
    """Returns the rows of a string column with the indices `rows`, or None if their bytes exceed the range of the
    column's offsets.
    """
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
    """Stores the offset at which each gathered row begins, and the end of the last one. Returns this end even if it
    exceeds the range of the offsets.
    """
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
