"""`PartitionedTableSink`: the sink of a table with partitions, one file for each. `table_sink` makes that of any table.

Rules:

- Rows wait together, as in any sink. They are split when they are taken: one file for each partition that has rows
  among them. So what waits is bounded in bytes, however many partitions there are.
- Rows of a partition keep their order.
- More than `PARTITIONS_MAX` partitions at once are refused: that many small files at each checkpoint help nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tidegate.operators.operator import Emit
from tidegate.operators.operator_errors import blame
from tidegate.operators.sinks.staging import StagedRows
from tidegate.operators.sinks.table_sink import FILE_BYTES_MAX, TableSink
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import TableError
from tidegate.storage.tables.partitions import check_texts, partition_folders
from tidegate.storage.tables.table_info import TableInfo, TableMode

PARTITIONS_MAX = 1_000


class PartitionedTableSink(TableSink):
    """Buffers batches as `TableSink` does, and gives them out by partition."""

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
        """Buffer a batch. OperatorError also for a value that is too long for the name of a folder."""
        with blame(self.context, batch):
            check_texts(batch, self._partition_by)
        super().process(batch, emit)

    def take_files(self, force: bool) -> list[StagedRows]:
        """As `TableSink` does, one entry for each partition, in the order in which partitions first appear."""
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
                f"{rows.num_rows} rows are of {index.size} partitions by {list(self._partition_by)}; at most "
                f"{PARTITIONS_MAX} can be written at once. Partition by columns with fewer values"
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
    """The sink of a table."""
    which = file_bytes_max, first_version, info.deletes, info.order_by
    if info.partition_by:
        return PartitionedTableSink(info.mode, info.keys, info.partition_by, *which)
    return TableSink(info.mode, info.keys, *which)
