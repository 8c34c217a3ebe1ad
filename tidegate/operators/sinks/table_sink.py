"""`TableSink` decides which rows are staged as one file of a table, and when. The task driver writes the file.

Rules:

- In mode `append` every row is staged once.
- In mode `upsert` a file holds the last row of each key, and each row has a version in the hidden column
  `_tidegate_version`. A later file with a key has a greater version. All rows of a key are processed by one subtask, so
  each subtask has its own version counter. Keys move between subtasks when the parallelism changes, so after a restore
  every subtask continues from the greatest counter of all subtasks (UNION state).
- With an order (`order_by`) the file holds the row of each key that is greatest in that column. Of several such rows it
  holds the last.
- A sink of changes (`deletes`) does not store the kind of a change in the table. If the last row of a key is retracted,
  the hidden column `_tidegate_deleted` marks the key as deleted.
- A barrier empties the buffer before the snapshot, so a snapshot never contains rows.
- Dictionary columns are converted to plain columns on arrival (`tidegate/storage/schemas/arrow_types.py`), because the
  batches of one file may together have more distinct values than the indexes of one batch can count.

`PartitionedTableSink` writes one file for each partition, and `table_sink` creates the sink of any table:

- Rows of all partitions share one buffer. They are divided when they are taken, into one file for each partition that
  has rows. The buffer is therefore bounded in bytes for any number of partitions.
- Rows of a partition keep their order.
- More than `PARTITIONS_MAX` partitions at once are refused, because they would produce that many small files at each
  checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.changes import CHANGE, rows_that_come
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.operator_errors import blame
from tidegate.operators.output_schema import PinnedSchema
from tidegate.operators.sinks.sink import StagedRows, StagingSink
from tidegate.state.kernels.columns import key_forms, plain
from tidegate.state.kernels.partition import compact, gather
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.schemas.arrow_types import widened
from tidegate.storage.schemas.column_names import DELETED_COLUMN, VERSION_COLUMN
from tidegate.storage.state.snapshot import Cut, FrozenTable, OperatorSnapshot, StateTable
from tidegate.storage.tables.partitions import check_texts, partition_folders
from tidegate.storage.tables.table_info import TableInfo, TableMode, check_seconds

FILE_BYTES_MAX = 64 << 20

_STATE_NAME = "version"
_STATE_SCHEMA = pa.schema([pa.field("version", pa.int64())])


class TableSink(StagingSink):
    """Buffers the rows of a table until the task takes them. Emits nothing.

    `first_version` must exceed every version that another job has written to the table, so that the rows of this job
    replace them. Raises ConfigurationError for an unknown mode, for `upsert` without keys, and for `append` with keys.
    """

    def __init__(
        self,
        mode: Literal["append", "upsert"] = "append",
        keys: tuple[str, ...] = (),
        file_bytes_max: int = FILE_BYTES_MAX,
        first_version: int = 0,
        deletes: bool = False,
        order_by: str | None = None,
    ) -> None:
        if mode not in ("append", "upsert"):
            raise ConfigurationError(
                f'a table is written in mode "append" or "upsert", not {mode!r}; give one of these'
            )
        if (mode == "upsert") != bool(keys):
            raise ConfigurationError(
                f"mode {mode!r} with keys {list(keys)}: upsert needs the columns that identify a row, append takes "
                "none. Change one of them"
            )
        if file_bytes_max <= 0:
            raise ConfigurationError(f"file_bytes_max must be positive, not {file_bytes_max}; give a number of bytes")
        self._mode = mode
        self._keys = tuple(keys)
        self._file_bytes_max = file_bytes_max
        self._pinned = PinnedSchema()
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._deletes = deletes
        self._order_by = order_by
        self._first_version = first_version
        self._version = first_version

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the version counter: continues from the greatest counter of any earlier subtask."""
        super().open(context, restored)
        versions = [version for table in restored for version in table.rows.column("version").to_pylist()]
        self._version = max([self._first_version, *versions])

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Buffers a batch.

        Raises OperatorError if its schema differs from earlier batches, or if a key column is missing.
        """
        with blame(self.context, batch):
            for hidden in {VERSION_COLUMN, DELETED_COLUMN} & set(batch.schema.names):
                raise ConfigurationError(
                    f"column {hidden!r} has a name that tidegate reserves for its tables; rename the column in a "
                    "step before"
                )
            if self._deletes:
                comes = rows_that_come(batch)
                batch = batch.drop_columns([CHANGE]).append_column(DELETED_COLUMN, pa.array(~comes))
            key_forms(batch.slice(0, 0), self._keys)
            kept = compact(self._pinned.conform(widened(batch)))
            check_seconds(kept)
        self._pending.append(kept)
        self._pending_bytes += kept.nbytes

    def take_pending(self, force: bool) -> list[pa.RecordBatch] | None:
        """Removes and returns the buffered batches to stage as one file, if they fill a file or, with `force`, if there
        are any.

        Else returns None.
        """
        if not self._pending or not (force or self._pending_bytes >= self._file_bytes_max):
            return None
        # An early batch may have a column of type null that has found its type since.
        pending = [self._pinned.conform(batch) for batch in self._pending]
        self._pending = []
        self._pending_bytes = 0
        self._version += 1
        return pending if self._mode == "append" else [self._last_rows(pending)]

    def take_files(self, force: bool) -> list[StagedRows]:
        """Removes and returns the rows to stage now, one entry for each file.

        Empty if they do not fill a file, unless `force` is True.
        """
        pending = self.take_pending(force)
        return [StagedRows("", tuple(pending))] if pending else []

    def snapshot(self, cut: Cut) -> OperatorSnapshot | None:
        """Returns a snapshot of the version counter in mode `upsert`, else None.

        The buffer must have been emptied before, by `take_pending(force=True)`.
        """
        assert not self._pending, "a barrier must take what is pending before the snapshot"
        if self._mode == "append":
            return None
        rows = pa.RecordBatch.from_pylist([{"version": self._version}], _STATE_SCHEMA)
        return OperatorSnapshot(self.context.uid, (FrozenTable(_STATE_NAME, StateKind.UNION, lambda: rows),))

    def _last_rows(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        batch = pa.concat_batches(batches)
        if self._deletes:  # the hidden columns come last, in the order of `stored_schema`
            deleted = batch.column(DELETED_COLUMN)
            batch = self._versioned(batch.drop_columns([DELETED_COLUMN])).append_column(DELETED_COLUMN, deleted)
        else:
            batch = self._versioned(batch)
        index = KeyIndex(self._keys)
        slots = index.upsert(batch).slots
        last = np.empty(index.size, dtype=np.int32)
        order = np.arange(batch.num_rows, dtype=np.int32) if self._order_by is None else self._ordered(batch)
        last[slots[order]] = order  # NumPy assigns in order: the last row stays
        last.sort()
        return batch if len(last) == batch.num_rows else gather(batch, last)

    def _versioned(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        versions = pa.array(np.full(rows.num_rows, self._version, dtype=np.int64))
        return rows.append_column(VERSION_COLUMN, versions)

    def _ordered(self, rows: pa.RecordBatch) -> NDArray[np.int32]:
        """Returns the indices of the rows, sorted by the order column: nulls first, then values, then NaN.

        Rows with equal values keep their order.
        """
        column = plain(rows.column(self._order_by))
        order = pc.sort_indices(pa.table({"value": column}), [("value", "ascending", "at_start")])
        ordered: NDArray[np.int32] = order.to_numpy().astype(np.int32)
        if pa.types.is_floating(column.type):  # Arrow sorts NaN as it does nulls
            is_nan = pc.fill_null(pc.is_nan(column), False).to_numpy(zero_copy_only=False)[ordered]
            ordered = np.concatenate((ordered[~is_nan], ordered[is_nan]))
        return ordered


PARTITIONS_MAX = 1_000


class PartitionedTableSink(TableSink):
    """Buffers the rows of a partitioned table, and returns one file for each partition."""

    def __init__(
        self,
        mode: TableMode,
        keys: tuple[str, ...],
        partition_by: Sequence[str],
        file_bytes_max: int = FILE_BYTES_MAX,
        first_version: int = 0,
        deletes: bool = False,
        order_by: str | None = None,
    ) -> None:
        super().__init__(mode, keys, file_bytes_max, first_version, deletes, order_by)
        assert partition_by, "a table without partition columns has a sink without partitions"
        self._partition_by = tuple(partition_by)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Buffers a batch.

        Raises OperatorError for a batch that `TableSink` refuses, and for a partition value that is too long for a
        folder name.
        """
        with blame(self.context, batch):
            check_texts(batch, self._partition_by)
        super().process(batch, emit)

    def take_files(self, force: bool) -> list[StagedRows]:
        """Removes and returns the rows to stage now, one entry for each partition, in the order in which partitions
        first appear.
        """
        pending = self.take_pending(force)
        if not pending:
            return []
        rows = pa.concat_batches(pending)
        with blame(self.context, rows):
            return self._split(rows)

    def _split(self, rows: pa.RecordBatch) -> list[StagedRows]:
        index = KeyIndex(self._partition_by)
        slots = index.upsert(rows).slots
        if index.size > PARTITIONS_MAX:
            raise TableError(
                f"{rows.num_rows} rows have {index.size} different partitions by {list(self._partition_by)}, but a "
                f"task can write at most {PARTITIONS_MAX} at once. Give partition_by= columns with fewer different "
                "values"
            )
        if index.size == 1:
            return [StagedRows(partition_folders(rows.slice(0, 1), self._partition_by)[0], (rows,))]
        order = np.argsort(slots, kind="stable").astype(np.int32)
        bounds = [0, *np.cumsum(np.bincount(slots, minlength=index.size)).tolist()]
        sorted_rows = gather(rows, order)
        first_rows = gather(sorted_rows.select(list(self._partition_by)), np.array(bounds[:-1], dtype=np.int32))
        folders = partition_folders(first_rows, self._partition_by)
        return [
            StagedRows(folder, (sorted_rows.slice(start, end - start),))
            for folder, start, end in zip(folders, bounds, bounds[1:], strict=False)
        ]


def table_sink(info: TableInfo, first_version: int = 0, file_bytes_max: int = FILE_BYTES_MAX) -> TableSink:
    """Returns the sink operator of a table: `PartitionedTableSink` if the table has partition columns, else
    `TableSink`.
    """
    which = file_bytes_max, first_version, info.deletes, info.order_by
    if info.partition_by:
        return PartitionedTableSink(info.mode, info.keys, info.partition_by, *which)
    return TableSink(info.mode, info.keys, *which)
