"""A source over Arrow data that the driver holds in memory: replayable, because the data travels with the job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pyarrow as pa

from tidegate.actors.sources import ReadResult, SourceReader, SourceSplit
from tidegate.storage.errors import ConfigurationError


class MemorySource:
    """Splits a table into `splits` parts of contiguous rows."""

    def __init__(self, data: pa.Table, splits: int) -> None:
        if splits < 1:
            raise ConfigurationError(f"from_batches(splits={splits}): at least 1 is needed")
        try:
            self._batch = data.combine_chunks().to_batches()
        except pa.ArrowInvalid as error:
            raise ConfigurationError(
                f"from_batches: the batches cannot be joined: {error}; where a dictionary column has more values in "
                "all batches than its index type can count, cast it to pa.dictionary(pa.int32(), ...) first"
            ) from error
        self._schema = data.schema
        self._rows = data.num_rows
        self._splits = splits

    @staticmethod
    def of(data: pa.Table | pa.RecordBatch | Sequence[pa.RecordBatch], splits: int) -> MemorySource:
        """From a table, a batch, or batches of one schema."""
        if isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        elif not isinstance(data, pa.Table):
            if not data:
                raise ConfigurationError("from_batches needs at least one batch, for its schema; give an empty one")
            data = pa.Table.from_batches(list(data))
        return MemorySource(data, splits)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the data."""
        return self._schema

    def splits(self) -> Sequence[SourceSplit]:
        """Contiguous parts; the payload is the first row. Ids differ also where parts are empty."""
        bounds = [self._rows * i // self._splits for i in range(self._splits + 1)]
        return [
            SourceSplit(f"{number}: rows {start} to {stop}", f"{start}".encode(), stop - start)
            for number, (start, stop) in enumerate(pairwise(bounds))
        ]

    def reader(self) -> SourceReader:
        """A reader over the same memory."""
        return _MemoryReader(pa.Table.from_batches(self._batch, self._schema))


class _MemoryReader:
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Rows of one part."""
        rows = min(rows_max, split.rows - offset)
        if rows <= 0:
            return ReadResult(None, offset, True)
        start = int(split.payload) + offset
        batches = self._table.slice(start, rows).combine_chunks().to_batches()
        return ReadResult(batches[0], offset + rows, offset + rows >= split.rows)

    def close(self) -> None:
        """Nothing to release."""
