"""Operators without state around functions of the user: over batches, and over rows.

Rules:

- A function sees each batch or row once, and again if that is processed again after a restart. What the function
  remembers itself is in no checkpoint, so it must depend on its argument alone.
- What it raises comes out as OperatorError.
- Empty results are dropped. `output_schema.py` fixes the output schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from tidegate.actors.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.actors.operators.batches.batch_results import BatchResult, BatchResults
from tidegate.actors.operators.batches.python_rows import python_rows
from tidegate.actors.operators.batches.tracing.traced import Traced
from tidegate.actors.operators.operator import Emit, Operator, OperatorContext
from tidegate.actors.operators.operator_errors import Blame, blame, blame_row
from tidegate.actors.operators.output_schema import PinnedSchema
from tidegate.storage.state.snapshot import StateTable

Row = Mapping[str, Any]
T = TypeVar("T")


class MapBatches(Operator):
    """Calls `fn` with each batch. It returns a RecordBatch, a Table, a polars DataFrame, or None for nothing.

    With `schema` the result is cast to it; otherwise the first result fixes the schema.
    """

    def __init__(self, fn: Callable[[pa.RecordBatch], BatchResult], schema: pa.Schema | None = None) -> None:
        self._fn = fn
        self._results = BatchResults(PinnedSchema(schema))

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit what the function makes of the batch. OperatorError if it raises or returns something else."""
        with blame(self.context, batch):
            results = self._results.conformed(self._fn(batch), batch.schema)
        for result in results:
            emit(result)


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
        for number, row in enumerate(python_rows(batch)):
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


class Map(Operator):
    """Calls `fn` with each row, a dict; it returns a dict, which becomes a row.

    With `traced` it computes the same by expressions, where `tracing` can tell that it is the same.
    """

    def __init__(
        self, fn: Callable[[dict[str, Any]], Row], schema: pa.Schema | None = None, traced: bool = True
    ) -> None:
        self._fn = fn
        self._schema = schema
        self._pinned = PinnedSchema(schema)
        self._traces = traced
        self._traced: Traced | None = None

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Begin without a trace: the first batch tells the columns."""
        super().open(context, restored)
        if self._traces:
            from tidegate.actors.operators.batches.tracing.trace import trace_map

            self._traced = Traced(lambda seen: trace_map(self._fn, seen, self._schema), context)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows in order, in batches of bounded size. OperatorError if the function raises."""
        computed = None if self._traced is None else self._traced.computed(batch)
        if computed is not None and self._fits(computed.schema):
            with blame(self.context, batch):
                result = self._pinned.conform(computed)
            emit(result)
            return
        for start in range(0, batch.num_rows, OUTPUT_ROWS_MAX):
            part = batch.slice(start, OUTPUT_ROWS_MAX)
            rows = _called(self.context, self._mapped, part, start)
            with blame(self.context, part):
                result = self._pinned.from_rows(rows)
            emit(result)

    def _fits(self, computed: pa.Schema) -> bool:
        """Whether the columns are those of the output so far. Of others only the values can tell whether they fit."""
        pinned = self._pinned.schema
        if pinned is None or self._schema is not None:
            return True
        return pinned.names == computed.names and all(
            before.type == now.type or pa.types.is_null(before.type)
            for before, now in zip(pinned, computed, strict=True)
        )

    def _mapped(self, row: dict[str, Any]) -> Row:
        result = self._fn(row)
        if type(result) is not dict and not isinstance(result, Mapping):
            raise TypeError(f"a row must be a dict, not {type(result).__name__}: {result!r}")
        return result


class FilterRows(Operator):
    """Keeps the rows, each a dict, for which `fn` is true. With `traced` as `Map`."""

    def __init__(self, fn: Callable[[dict[str, Any]], object], traced: bool = True) -> None:
        self._fn = fn
        self._traces = traced
        self._traced: Traced | None = None

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Begin without a trace: the first batch tells the columns."""
        super().open(context, restored)
        if self._traces:
            from tidegate.actors.operators.batches.tracing.trace import trace_filter

            self._traced = Traced(lambda seen: trace_filter(self._fn, seen), context)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows that stay. OperatorError if the function raises."""
        computed = None if self._traced is None else self._traced.computed(batch)
        if computed is not None:
            mask = computed.column(0)
        else:
            mask = pa.array(_called(self.context, lambda row: bool(self._fn(row)), batch, 0), pa.bool_())
        kept = batch.filter(mask)
        if kept.num_rows:
            emit(kept)


def _called(context: OperatorContext, fn: Callable[[dict[str, Any]], T], batch: pa.RecordBatch, start: int) -> list[T]:
    """What a function returns for each row; `start` is the number of the first row. OperatorError if it raises."""
    rows = python_rows(batch)
    results: list[T] = []
    add = results.append
    with Blame(context, lambda: (f"row {start + len(results)} of the batch", rows[len(results)])):
        for row in rows:
            add(fn(row))
    return results
