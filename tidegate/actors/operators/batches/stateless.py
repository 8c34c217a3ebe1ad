"""Operators without state around functions of the user: over batches, and over rows.

Rules:

- A function sees each batch or row once, and again if that is processed again after a restart. What the function
  remembers itself is in no checkpoint, so it must depend on its argument alone.
- What it raises comes out as OperatorError.
- Empty results are dropped. `output_schema.py` fixes the output schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from tidegate.actors.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.actors.operators.operator import Emit, Operator
from tidegate.actors.operators.operator_errors import blame, blame_row
from tidegate.actors.operators.output_schema import FromPolars, PinnedSchema
from tidegate.storage.schemas.polars_frames import is_polars_frame

if TYPE_CHECKING:
    import polars as pl

BatchResult: TypeAlias = "pa.RecordBatch | pa.Table | pl.DataFrame | None"
Row = Mapping[str, Any]


class MapBatches(Operator):
    """Calls `fn` with each batch. It returns a RecordBatch, a Table, a polars DataFrame, or None for nothing.

    With `schema` the result is cast to it; otherwise the first result fixes the schema.
    """

    def __init__(self, fn: Callable[[pa.RecordBatch], BatchResult], schema: pa.Schema | None = None) -> None:
        self._fn = fn
        self._pinned = PinnedSchema(schema)
        self._from_polars = FromPolars()

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit what the function makes of the batch. OperatorError if it raises or returns something else."""
        with blame(self.context, batch):
            results = [
                self._pinned.conform(part) for part in self._batches(self._fn(batch), batch.schema) if part.num_rows
            ]
        for result in results:
            emit(result)

    def _batches(self, result: BatchResult, source: pa.Schema) -> list[pa.RecordBatch]:
        if result is None:
            return []
        if isinstance(result, pa.RecordBatch):
            return [result]
        if isinstance(result, pa.Table):
            batches: list[pa.RecordBatch] = result.combine_chunks().to_batches()
            return batches
        if is_polars_frame(result):
            return [self._from_polars.convert(result, source)] if result.height else []
        raise TypeError(
            f"the function returned {type(result).__name__}; it must return a pyarrow RecordBatch or Table, "
            f"a polars DataFrame, or None"
        )


class FlatMap(Operator):
    """Calls `fn` with each row, a dict; it returns an iterable of dicts, each of which becomes a row."""

    def __init__(self, fn: Callable[[dict[str, Any]], Iterable[Row]], schema: pa.Schema | None = None) -> None:
        self._fn = fn
        self._pinned = PinnedSchema(schema)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows in order, in batches of bounded size. OperatorError if the function raises."""
        rows: list[Row] = []
        for row in self._rows(batch):
            rows.append(row)
            if len(rows) == OUTPUT_ROWS_MAX:
                emit(self._convert(rows, batch))
                rows = []
        if rows:
            emit(self._convert(rows, batch))

    def _rows(self, batch: pa.RecordBatch) -> Iterator[Row]:
        for number, row in enumerate(batch.to_pylist()):
            with blame_row(self.context, row, number):
                for result in self._fn(row):
                    if not isinstance(result, Mapping):
                        raise TypeError(f"a row must be a dict, not {type(result).__name__}: {result!r}")
                    try:
                        yield result
                    except GeneratorExit:
                        return  # Nobody reads on: no failure of the function.

    def _convert(self, rows: list[Row], batch: pa.RecordBatch) -> pa.RecordBatch:
        with blame(self.context, batch):
            return self._pinned.from_rows(rows)


class Map(FlatMap):
    """Calls `fn` with each row, a dict; it returns a dict, which becomes a row."""

    def __init__(self, fn: Callable[[dict[str, Any]], Row], schema: pa.Schema | None = None) -> None:
        super().__init__(lambda row: (fn(row),), schema)


class FilterRows(Operator):
    """Keeps the rows, each a dict, for which `fn` is true."""

    def __init__(self, fn: Callable[[dict[str, Any]], object]) -> None:
        self._fn = fn

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows that stay. OperatorError if the function raises."""
        mask = []
        for number, row in enumerate(batch.to_pylist()):
            with blame_row(self.context, row, number):
                mask.append(bool(self._fn(row)))
        kept = batch.filter(pa.array(mask, pa.bool_()))
        if kept.num_rows:
            emit(kept)
