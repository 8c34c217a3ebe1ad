"""`BatchResults`: what functions of the user return for a batch, as batches of one schema.

`MapBatches` uses it, and process functions over batches.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from tidegate.operators.output_schema import FromPolars, PinnedSchema
from tidegate.storage.schemas.owned_arrays import owned_batch
from tidegate.storage.schemas.polars_frames import is_polars_frame

if TYPE_CHECKING:
    import polars as pl

BatchResult: TypeAlias = "pa.RecordBatch | pa.Table | pl.DataFrame | None"


class BatchResults:
    """Batches out of results, with the columns of a schema."""

    def __init__(self, pinned: PinnedSchema) -> None:
        self._pinned = pinned
        self._from_polars = FromPolars()

    def conformed(self, result: BatchResult, source: pa.Schema, known: Set[int] = frozenset()) -> list[pa.RecordBatch]:
        """Returns the rows of a result, which a function made of a batch with the schema `source`.

        The function may use its arrays again: the rows are copied, except for columns that lie in memory of `known`
        (see `memory_of`), that of the batch which the function got.
        TypeError for something else, SchemaMismatchError for other columns.
        """
        parts = self._batches(result, source)
        return [self._pinned.conform(owned_batch(part, known)) for part in parts if part.num_rows]

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
