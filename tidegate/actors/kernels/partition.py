"""Which rows go to which subtask: hash → key group → subtask, then a stable counting sort of row numbers.

Rules: rows keep their order within a subtask (per-key order depends on it), and what is gathered owns its
memory: no slice of a batch that would drag its parent along into a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.columns import fixed_values
from tidegate.actors.kernels.fixed_width import array_of, storage_dtype
from tidegate.actors.kernels.jit import kernel
from tidegate.storage.state.key_groups import subtask_of_key_group

_SLACK_BYTES = 4096


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


def by_group(groups: NDArray[np.uint16]) -> tuple[int, Partition]:
    """Group rows, at least one, by their key groups. Returns the first group, and the rows of it and those after it."""
    first, last = int(groups.min()), int(groups.max())
    rows = np.empty(len(groups), dtype=np.int32)
    bounds = np.zeros(last - first + 2, dtype=np.int64)
    _by_group(groups, first, np.empty(last - first + 1, dtype=np.int64), rows, bounds)
    return first, Partition(rows, tuple(bounds.tolist()))


def gather(batch: pa.RecordBatch, rows: NDArray[np.int32]) -> pa.RecordBatch:
    """The given rows of a batch, in new buffers."""
    selection = pa.array(rows)
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
    return column.take(selection)


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
def _by_group(
    groups: NDArray[np.uint16],
    first: int,
    positions: NDArray[np.int64],
    rows: NDArray[np.int32],
    bounds: NDArray[np.int64],
) -> None:
    for i in range(groups.shape[0]):
        bounds[np.int64(groups[i]) - first + 1] += 1
    for g in range(positions.shape[0]):
        positions[g] = bounds[g]
        bounds[g + 1] += bounds[g]
    for i in range(groups.shape[0]):
        group = np.int64(groups[i]) - first
        rows[positions[group]] = i
        positions[group] += 1


@kernel
def _gather(values: NDArray[Any], rows: NDArray[np.int32], gathered: NDArray[Any]) -> None:
    for j in range(rows.shape[0]):
        gathered[j] = values[rows[j]]
