"""`RowGroups`: where the row groups of a Parquet file begin, and which of them have no row that counts."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.connectors.pushed_filters import Rows


class RowGroups:
    """The row groups of an open file, of which only those in `rows` count. `schema` is as which it is read."""

    def __init__(self, parquet: pq.ParquetFile, schema: pa.Schema, rows: Rows = None) -> None:
        metadata = parquet.metadata
        starts = [0]
        for index in range(metadata.num_row_groups):
            starts.append(starts[-1] + metadata.row_group(index).num_rows)
        self.starts: Sequence[int] = starts
        """The first row of each row group, and behind the last one the number of rows."""
        self._counts = [True] * metadata.num_row_groups
        if rows is not None and metadata.num_row_groups:
            # A job without filters need not load polars.
            from tidegate.connectors.files.row_statistics import counting

            self._counts = counting(parquet, schema, rows)

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return self.starts[-1]

    def rows_of(self, group: int) -> int:
        """Rows of a row group."""
        return self.starts[group + 1] - self.starts[group]

    def group_of(self, row: int) -> int:
        """The row group that has a row of the file."""
        return bisect.bisect_right(self.starts, row) - 1

    def next_row(self, row: int) -> int:
        """The first row from `row` on that may count; behind the last one if none does."""
        while row < self.rows:
            group = self.group_of(row)
            if self._counts[group]:
                break
            row = self.starts[group + 1]
        return row
