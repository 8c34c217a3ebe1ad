"""Operators without state around functions of the user: over batches, and over rows.

Rules:

- A function sees each batch or row once, and again if that is processed again after a restart. What the function
  remembers itself is in no checkpoint, so it must depend on its argument alone.
- What it raises comes out as OperatorError.
- Empty results are dropped. `output_schema.py` fixes the output schema.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.functions.batch_results import BatchResult, BatchResults
from tidegate.operators.operator import Emit, Operator, OperatorContext
from tidegate.operators.operator_errors import Blame, blame
from tidegate.operators.output_schema import PinnedSchema
from tidegate.operators.python_rows import python_rows
from tidegate.operators.tracing.traced import Traced
from tidegate.operators.watermarks.kept_time import KeptTime
from tidegate.storage.schemas.owned_arrays import memory_of
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
            results = self.results_of(batch)
        for result in results:
            emit(result)

    def results_of(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Returns what the function makes of a batch. Raises what it raises, and TypeError for something else."""
        return self._results.conformed(self._fn(batch), batch.schema, memory_of(batch))


class FlatMap(Operator):
    """Calls `fn` with each row, a dict; it returns an iterable of dicts, each of which becomes a row."""

    def __init__(
        self,
        fn: Callable[[dict[str, Any]], Iterable[Row]],
        schema: pa.Schema | None = None,
        kept_time: KeptTime | None = None,
    ) -> None:
        self._fn = fn if kept_time is None else kept_time.results(fn)
        self._pinned = PinnedSchema(schema, fn)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows in order, in batches of bounded size. OperatorError if the function raises."""
        with blame(self.context, batch):
            rows = python_rows(batch)
        at = [0]
        results = self._results(rows, at)
        while True:
            with Blame(self.context, lambda: (f"row {at[0]} of the batch", rows[at[0]])):
                part = list(itertools.islice(results, OUTPUT_ROWS_MAX))
            if not part:
                return
            with blame(self.context, batch):
                converted = self._pinned.from_rows(part)
            emit(converted)

    def _results(self, rows: list[dict[str, Any]], at: list[int]) -> Iterator[Row]:
        """What the function makes of each row; `at` says which it is called with."""
        fn, own_row = self._fn, self._pinned.own_row
        for at[0], row in enumerate(rows):
            for result in fn(row):
                yield own_row(result)


class Map(Operator):
    """Calls `fn` with each row, a dict; it returns a dict, which becomes a row.

    With `traced` it computes the same by expressions, where `tracing` can tell that it is the same. `kept_time`: the
    event time that the function is to hand on.
    """

    def __init__(
        self,
        fn: Callable[[dict[str, Any]], Row],
        schema: pa.Schema | None = None,
        traced: bool = True,
        kept_time: KeptTime | None = None,
    ) -> None:
        self._kept_time = kept_time
        self._fn = fn
        self._schema = schema
        self._pinned = PinnedSchema(schema, fn)
        self._traces = traced
        self._traced: Traced | None = None

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Begin without a trace: the first batch tells the columns."""
        super().open(context, restored)
        if self._traces:
            from tidegate.operators.tracing.trace import trace_map

            self._traced = Traced(lambda seen: trace_map(self._fn, seen, self._schema), context)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows in order, in batches of bounded size. OperatorError if the function raises."""
        computed = None if self._traced is None else self._traced.computed(batch)
        if computed is not None and self._fits(computed.schema):
            with blame(self.context, batch):
                result = self._pinned.conform(computed)
                self._check_time(batch, result)
            emit(result)
            return
        for start in range(0, batch.num_rows, OUTPUT_ROWS_MAX):
            part = batch.slice(start, OUTPUT_ROWS_MAX)
            rows = _called(self.context, lambda rows: map(self._pinned.own_row, map(self._fn, rows)), part, start)
            with blame(self.context, part):
                result = self._pinned.from_rows(rows)
                self._check_time(part, result)
            emit(result)

    def _check_time(self, before: pa.RecordBatch, after: pa.RecordBatch) -> None:
        if self._kept_time is not None:
            self._kept_time.check(before, after)

    def _fits(self, computed: pa.Schema) -> bool:
        """Whether the columns are those of the output so far. Of others only the values can tell whether they fit."""
        pinned = self._pinned.schema
        if pinned is None or self._schema is not None:
            return True
        return pinned.names == computed.names and all(
            before.type == now.type or pa.types.is_null(before.type)
            for before, now in zip(pinned, computed, strict=True)
        )


class Peek(Operator):
    """Calls `fn` with each row, a dict, and emits the batch as it is."""

    def __init__(self, fn: Callable[[dict[str, Any]], object]) -> None:
        self._fn = fn

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the batch once the function has seen its rows. OperatorError if the function raises."""
        _called(self.context, lambda rows: map(self._fn, rows), batch, 0)
        emit(batch)


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
            from tidegate.operators.tracing.trace import trace_filter

            self._traced = Traced(lambda seen: trace_filter(self._fn, seen), context)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows that stay. OperatorError if the function raises."""
        computed = None if self._traced is None else self._traced.computed(batch)
        if computed is not None:
            mask = computed.column(0)
        else:
            flags = _called(self.context, lambda rows: map(bool, map(self._fn, rows)), batch, 0)
            mask = pa.array(flags, pa.bool_())
        kept = batch.filter(mask)
        if kept.num_rows:
            emit(kept)


def _called(
    context: OperatorContext, calls: Callable[[list[dict[str, Any]]], Iterable[T]], batch: pa.RecordBatch, start: int
) -> list[T]:
    """What calls with each row give; `start` is the number of the first row. OperatorError if one raises."""
    with blame(context, batch):
        rows = python_rows(batch)
    results: list[T] = []
    with Blame(context, lambda: (f"row {start + len(results)} of the batch", rows[len(results)])):
        results.extend(calls(rows))  # what has come before an error is in it
        if len(results) < len(rows):  # `map` takes it for the end
            raise RuntimeError("the function raised StopIteration")
    return results
