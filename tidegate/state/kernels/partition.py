"""Which rows go to which subtask: hash → key group → subtask, then a stable counting sort of row numbers.

Rules: rows keep their order within a subtask (per-key order depends on it), and what is gathered owns its
memory: no slice of a batch that would drag its parent along into a message. Where all rows are wanted, sorted by key
group, each is put to its place instead (`Places`): what is read once from memory is read in the order in which it lies,
and the places that come next, one a group, stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.columns import fixed_values
from tidegate.state.kernels.fixed_width import array_of, storage_dtype
from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.string_gather import gather_strings, has_strings
from tidegate.storage.state.key_groups import subtask_of_key_group

_SLACK_BYTES = 4096
_FEW_ROWS = 4096
"""So many rows Arrow gathers in less time than it takes to call a kernel for each column."""


def subtask_table(max_parallelism: int, parallelism: int) -> NDArray[np.uint16]:
    """Subtask of each key group, shape (max_parallelism,)."""
    groups = range(max_parallelism)
    subtasks = [subtask_of_key_group(group, max_parallelism, parallelism) for group in groups]
    return np.array(subtasks, dtype=np.uint16)


@dataclass(frozen=True, slots=True)
class Partition:
    """Row numbers grouped by subtask: those of subtask t are `rows[bounds[t]:bounds[t + 1]]`, ascending."""

    rows: NDArray[np.int32]
    bounds: tuple[int, ...]


def partition(hashes: NDArray[np.uint64], table: NDArray[np.uint16], parallelism: int) -> Partition:
    """Group rows by the subtask that owns their key group. `table` is that of `subtask_table`."""
    rows = np.empty(len(hashes), dtype=np.int32)
    bounds = np.zeros(parallelism + 1, dtype=np.int64)
    subtasks, positions = np.empty(len(hashes), dtype=np.uint16), np.empty(parallelism, dtype=np.int64)
    _partition(hashes, table, subtasks, positions, rows, bounds)
    return Partition(rows, tuple(bounds.tolist()))


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows go if they are sorted by key group: row i to `places[i]`. Rows of a group keep their order.

    Those of group `first + g` lie in the places from `bounds[g]` to `bounds[g + 1]`.
    """

    first: int
    places: NDArray[np.int32]
    bounds: tuple[int, ...]

    def rows(self) -> NDArray[np.int32]:
        """The row of each place."""
        rows = np.empty(len(self.places), dtype=np.int32)
        _place(np.arange(len(rows), dtype=np.int32), self.places.view(np.uint32), rows)
        return rows


def places_by_group(groups: NDArray[np.uint16]) -> Places:
    """The places of rows, at least one, of these key groups."""
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
    """The rows of some batches of one schema, at least one, at their places; in buffers that `empty` makes."""
    schema = parts[0].schema
    columns = [[part.column(name) for part in parts] for name in range(len(schema))]
    return pa.RecordBatch.from_arrays([_placed_column(column, places, empty) for column in columns], schema=schema)


def gather(batch: pa.RecordBatch, rows: NDArray[np.int32]) -> pa.RecordBatch:
    """The given rows of a batch, in new buffers."""
    selection = pa.array(rows)
    if len(rows) <= _FEW_ROWS:
        return batch.take(selection)
    return pa.RecordBatch.from_arrays(
        [_gather_column(column, rows, selection) for column in batch.columns], schema=batch.schema
    )


def compact(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch itself if its buffers hold hardly more than its rows, otherwise a copy of its rows."""
    if batch.get_total_buffer_size() <= batch.nbytes + batch.nbytes // 8 + _SLACK_BYTES:
        return batch
    return gather(batch, np.arange(batch.num_rows, dtype=np.int32))


def _gather_column(column: pa.Array, rows: NDArray[np.int32], selection: pa.Array) -> pa.Array:
    if column.null_count == 0 and storage_dtype(column.type) is not None:
        values = fixed_values(column)
        gathered = np.empty(len(rows), dtype=values.dtype)
        # Kernels know integers of each width: bits are all that is moved.
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
    # Kernels know integers of each width: bits are all that is moved.
    word, start = np.dtype(f"i{found.dtype.itemsize}"), 0
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
    # Without a sign nobody need ask whether a place counts from the end.
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
