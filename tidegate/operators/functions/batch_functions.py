"""Operators without keyed state that call functions of users with batches or rows, or that flatten lists in a column.

Rules:

- A function gets each batch or row once, and again if the input is replayed after a restart. Checkpoints do not include
  data that the function itself keeps, so its result must depend on its argument alone.
- An exception of the function becomes an OperatorError.
- Empty results are dropped. `output_schema.py` fixes the output schema.
- A `BatchFunction` has `open` and `close`, so it loads a model once and not for each batch. Each subtask of each
  attempt has its own copy of the object. `close` is also called after a failure.
- A function of a row may be computed as polars expressions instead, if `trace.py` can prove that the results are equal
  (`Traced`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.functions.traceable_code import UntraceableError
from tidegate.operators.operator import Emit, FunctionContext, Operator, OperatorContext, OperatorFactory
from tidegate.operators.operator_errors import Blame, blame, blame_call, blame_results, own_copy
from tidegate.operators.output_schema import FromPolars, PinnedSchema
from tidegate.operators.row_values import python_rows, returned_rows
from tidegate.operators.watermarks.watermark_generator import EventTimeCheck
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.batches import memory_of, owned_batch, places_of
from tidegate.storage.schemas.polars_frames import is_polars_frame
from tidegate.storage.state.snapshot import StateTable

if TYPE_CHECKING:
    import polars as pl

    from tidegate.operators.functions.trace import Trace


BatchResult: TypeAlias = "pa.RecordBatch | pa.Table | pl.DataFrame | None"


class BatchResults:
    """Converts the return values of a function to Arrow batches with the columns of the output schema."""

    def __init__(self, pinned: PinnedSchema) -> None:
        self._pinned = pinned
        self._from_polars = FromPolars()

    def conformed(self, result: BatchResult, source: pa.Schema, known: Set[int] = frozenset()) -> list[pa.RecordBatch]:
        """Returns the rows of a function's result as batches of the output schema. `source` is the schema of the batch
        that was passed to the function.

        The function may reuse its arrays, so the rows are copied, except for columns whose memory (`known`, see
        `memory_of`) belongs to the batch that was passed to the function. Raises TypeError for a result that is not a
        batch, a table or a data frame, ValueError for Arrow data that is not valid, and SchemaMismatchError for other
        columns.
        """
        if isinstance(result, pa.RecordBatch | pa.Table):
            _check_valid(result, source, known)
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


def _check_valid(result: pa.RecordBatch | pa.Table, source: pa.Schema, known: Set[int]) -> None:
    """Raises ValueError for a column that does not hold values of its type, such as a string that is not UTF-8.

    Other steps would crash or write tables that other readers cannot open. Columns in the memory `known` are not read
    again, unless `source` has bytes that could be taken for strings.
    """
    trusts = not any(pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type) for field in source)
    for name, column in zip(result.schema.names, result.columns, strict=True):
        for array in column.chunks if isinstance(column, pa.ChunkedArray) else (column,):
            if trusts and places_of(array) <= known:
                continue
            try:
                array.validate(full=True)
            except ValueError as error:
                raise ValueError(
                    f"column {name!r} of the result is not valid {array.type}: {error}. Build it from its values, such "
                    "as by pa.array or by cast"
                ) from error


Row = Mapping[str, Any]
T = TypeVar("T")


class MapBatches(Operator):
    """Calls `fn` with each batch. `fn` returns a RecordBatch, a Table, a polars DataFrame, or None for no rows.

    With `schema` the result is cast to this schema. Otherwise the first result determines the schema.
    """

    def __init__(self, fn: Callable[[pa.RecordBatch], BatchResult], schema: pa.Schema | None = None) -> None:
        self._fn = fn
        self._results = BatchResults(PinnedSchema(schema))

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Calls the function with the batch and emits its result.

        Raises OperatorError if the function raises, or returns another kind of object.
        """
        with blame(self.context, batch):
            results = self.results_of(batch)
        for result in results:
            emit(result)

    def results_of(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Calls the function with a batch and returns its result as batches.

        Raises the function's exceptions, and TypeError for another kind of result.
        """
        return self._results.conformed(self._fn(batch), batch.schema, memory_of(batch))


class FlatMap(Operator):
    """Calls `fn` with each row as a dict. `fn` returns an iterable of dicts, and each of them becomes a row."""

    def __init__(
        self,
        fn: Callable[[dict[str, Any]], Iterable[Row]],
        schema: pa.Schema | None = None,
        event_time_check: EventTimeCheck | None = None,
    ) -> None:
        self._fn = fn if event_time_check is None else event_time_check.results(fn)
        self._pinned = PinnedSchema(schema, fn)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the rows that the function returns for each row, in order and in batches of bounded size.

        Raises OperatorError if the function raises.
        """
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
        """Yields the result of the function for each row. Stores the index of the current row in `at`, for errors."""
        fn, own_row = self._fn, self._pinned.own_row
        for at[0], row in enumerate(rows):
            for result in returned_rows(fn(row)):
                yield own_row(result)


class Map(Operator):
    """Calls `fn` with each row as a dict. `fn` returns a dict, which becomes a row.

    With `traced` the operator computes the result by polars expressions instead, if `trace.py` can prove that they give
    the same result. `event_time_check` checks that the function keeps the event time.
    """

    def __init__(
        self,
        fn: Callable[[dict[str, Any]], Row],
        schema: pa.Schema | None = None,
        traced: bool = True,
        event_time_check: EventTimeCheck | None = None,
    ) -> None:
        self._event_time_check = event_time_check
        self._fn = fn
        self._schema = schema
        self._pinned = PinnedSchema(schema, fn)
        self._traces = traced
        self._traced: Traced | None = None

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Opens the operator.

        The first batch, which determines the columns, decides whether the function is traced to expressions.
        """
        super().open(context, restored)
        if self._traces:
            from tidegate.operators.functions.trace import trace_map

            self._traced = Traced(lambda seen: trace_map(self._fn, seen, self._schema), context)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits one row for each row of the batch, in order and in batches of bounded size.

        Raises OperatorError if the function raises.
        """
        computed = None if self._traced is None else self._traced.computed(batch)
        if computed is not None and self._fits(computed.schema):
            with blame_results(self.context, batch):
                result = self._pinned.conform(computed)
                self._check_time(batch, result)
            emit(result)
            return
        for start in range(0, batch.num_rows, OUTPUT_ROWS_MAX):
            part = batch.slice(start, OUTPUT_ROWS_MAX)
            rows = _called(self.context, lambda rows: map(self._pinned.own_row, map(self._fn, rows)), part, start)
            with blame_results(self.context, part, start):
                result = self._pinned.from_rows(rows)
                self._check_time(part, result)
            emit(result)

    def _check_time(self, before: pa.RecordBatch, after: pa.RecordBatch) -> None:
        if self._event_time_check is not None:
            self._event_time_check.check(before, after)

    def _fits(self, computed: pa.Schema) -> bool:
        """Returns whether the traced results `computed` have the columns and types of the earlier output.

        If not, the values have to be checked row by row.
        """
        pinned = self._pinned.schema
        if pinned is None or self._schema is not None:
            return True
        return pinned.names == computed.names and all(
            before.type == now.type or pa.types.is_null(before.type)
            for before, now in zip(pinned, computed, strict=True)
        )


class Peek(Operator):
    """Calls `fn` with each row as a dict, and emits the batch unchanged."""

    def __init__(self, fn: Callable[[dict[str, Any]], object]) -> None:
        self._fn = fn

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Calls the function with each row, then emits the batch. Raises OperatorError if the function raises."""
        _called(self.context, lambda rows: map(self._fn, rows), batch, 0)
        emit(batch)


class FilterRows(Operator):
    """Keeps the rows for which `fn`, called with a dict, returns true.

    With `traced` polars expressions compute the condition, as in `Map`.
    """

    def __init__(self, fn: Callable[[dict[str, Any]], object], traced: bool = True) -> None:
        self._fn = fn
        self._traces = traced
        self._traced: Traced | None = None

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Opens the operator.

        The first batch, which determines the columns, decides whether the function is traced to expressions.
        """
        super().open(context, restored)
        if self._traces:
            from tidegate.operators.functions.trace import trace_filter

            self._traced = Traced(lambda seen: trace_filter(self._fn, seen), context)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the rows for which the function returns true. Raises OperatorError if the function raises."""
        computed = None if self._traced is None else self._traced.computed(batch)
        if computed is not None:
            mask = computed.column(0)
        else:
            results = _called(self.context, lambda rows: map(self._fn, rows), batch, 0)
            flags: list[bool] = []
            with Blame(
                self.context,
                lambda: (f"row {len(flags)} of the batch", python_rows(batch.slice(len(flags), 1))[0]),
            ):
                flags.extend(map(bool, results))  # has the flags before an error
            mask = pa.array(flags, pa.bool_())
        kept = batch.filter(mask)
        if kept.num_rows:
            emit(kept)


def _called(
    context: OperatorContext, calls: Callable[[list[dict[str, Any]]], Iterable[T]], batch: pa.RecordBatch, start: int
) -> list[T]:
    """Returns the result of the function for each row of a batch. `calls` maps rows as dicts to results.

    `start` is the index of the first row, for errors. Raises OperatorError if a call raises.
    """
    with blame(context, batch):
        rows = python_rows(batch)
    results: list[T] = []
    with Blame(context, lambda: (f"row {start + len(results)} of the batch", rows[len(results)])):
        results.extend(calls(rows))  # has the results before an error
        if len(results) < len(rows):  # `map` would treat it as the end
            raise RuntimeError("the function raised StopIteration; let it return, or raise another error")
    if not _UNFINISHED.isdisjoint(map(type, results)):
        number = next(number for number, result in enumerate(results) if type(result) in _UNFINISHED)
        for result in results:
            if isinstance(result, CoroutineType):
                result.close()  # or Python warns of each one
        with Blame(context, lambda: (f"row {start + number} of the batch", rows[number])):
            raise TypeError(
                f"the function returned a {type(results[number]).__name__}, which nothing would run; return its "
                "result, or use map_async"
            )
    return results


_UNFINISHED = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})
"""Types of the objects that async and generator functions return. They count as true, and no code has run yet."""


class BatchContext(FunctionContext):
    """Information about the subtask in which a `BatchFunction` runs."""


class BatchFunction:
    """Processes a stream batch by batch, with objects that `open` creates once, such as a model, a connection or a
    table.

    Derive a class from it, and pass an object of the class to `map_batches`. Its attributes are sent to the tasks with
    the program, so load large data in `open`.

    Example:

        >>> class Converted(tg.BatchFunction):
        ...     def open(self, context):
        ...         self.rates = pl.DataFrame({"user": ["ann", "bob"], "rate": [0.5, 2.0]})
        ...
        ...     def process(self, batch):
        ...         joined = pl.DataFrame(batch).join(self.rates, on="user", how="left", maintain_order="left")
        ...         return joined.select("user", amount=pl.col("amount") * pl.col("rate"))
        >>> orders.map_batches(Converted(), schema={"user": str, "amount": float}).show()
        +------+--------+
        | user | amount |
        +------+--------+
        | ann  |   15.0 |
        | bob  |   10.0 |
        | ann  |    6.0 |
        +------+--------+
    """

    context: BatchContext
    """The context of the subtask, set before `open` is called."""

    def open(self, context: BatchContext) -> None:
        """Prepares the function.

        Called once, before any batch. It may be slow, because the task starts only when all functions are open.
        """

    def process(self, batch: pa.RecordBatch) -> BatchResult:
        """Returns the result for a batch that is not empty: a batch, a table, a polars DataFrame, or None for
        no rows.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method process(self, batch); define it")

    def close(self) -> None:
        """Releases resources. Called once, also after a failure, and even if `open` has failed."""


class BatchFunctionOperator(MapBatches):
    """Operator that calls a `BatchFunction`. Raises ConfigurationError for a function that cannot be copied."""

    def __init__(self, function: BatchFunction, schema: pa.Schema | None = None) -> None:
        self.function = own_copy(function)
        super().__init__(self.function.process, schema)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Calls `open` of the function with its context. Raises OperatorError if the function's `open` raises."""
        super().open(context, restored)
        self.function.context = BatchContext(context)
        with blame_call(context, "open"):
            self.function.open(self.function.context)

    def close(self) -> None:
        """Calls `close` of the user's function."""
        self.function.close()


def batch_operator(
    fn: Callable[[pa.RecordBatch], BatchResult] | BatchFunction, schema: pa.Schema | None, name: str
) -> OperatorFactory:
    """Returns the factory of the operator that calls a `BatchFunction`, or a function of a batch.

    `name` is the step in errors. Raises ConfigurationError for a class instead of an object, or if the object cannot be
    copied.
    """
    if isinstance(fn, BatchFunction):
        factory = partial(BatchFunctionOperator, fn, schema)
        factory()
        return factory
    if isinstance(fn, type) and issubclass(fn, BatchFunction):
        raise ConfigurationError(f"{name}: {fn.__name__} is a class; pass an object of it, {fn.__name__}(...)")
    return partial(MapBatches, fn, schema)


_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


class Explode(Operator):
    """Emits a row for each element of the list in `column`, and repeats the other columns.

    A row with a null or empty list is dropped. With `outer` it stays, with null in the column.
    """

    def __init__(self, column: str, outer: bool) -> None:
        self._column = column
        self._outer = outer

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the rows in order, in batches of bounded size.

        Raises OperatorError if the column does not contain lists.
        """
        with blame(self.context, batch):
            lists = batch.column(self._column)
            if not isinstance(lists.type, _LISTS):
                raise TypeError(
                    f"explode needs a list; column {self._column!r} is {lists.type}; name a column of lists"
                )
            # A null list may have elements. `list_flatten` skips them, and `list_parent_indices` does not.
            lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
            parents = np.repeat(np.arange(len(lists)), lengths)
            values = pc.list_flatten(lists)
            if self._outer:
                parents, values = _with_empty_ones(lengths, parents, values)
            place = batch.schema.get_field_index(self._column)
            schema = batch.schema.set(place, pa.field(self._column, values.type))
        for start in range(0, max(len(parents), 1), OUTPUT_ROWS_MAX):
            rows = batch.take(pa.array(parents[start : start + OUTPUT_ROWS_MAX]))
            columns = list(rows.columns)
            columns[place] = values.slice(start, OUTPUT_ROWS_MAX)
            if rows.num_rows or not batch.num_rows:
                emit(pa.RecordBatch.from_arrays(columns, schema=schema))


def _with_empty_ones(lengths: np.ndarray, parents: np.ndarray, values: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Adds one null value for each null or empty list, so that its row is kept.

    `lengths` has the length of each list, 0 for null. `parents` has, for each value, the index of its row. Returns the
    new parents and values.
    """
    empty = np.flatnonzero(lengths == 0)
    together = np.concatenate([parents, empty])
    order = np.argsort(together, kind="stable")
    places = np.concatenate([np.arange(len(parents)), np.full(len(empty), -1)])[order]
    return together[order], values.take(pa.array(places, mask=places < 0))


log = logging.getLogger(__name__)

MakeTrace: TypeAlias = Callable[[pa.Schema], "Trace"]


class Traced:
    """Computes a function of rows by polars expressions, if it can be traced for the schema of the batches.

    Logs once whether it is traced.
    """

    def __init__(self, make: MakeTrace, context: OperatorContext) -> None:
        self._make = make
        self._context = context
        self._schema: pa.Schema | None = None
        self._trace: Trace | None = None
        self._logged = context.subtask != 0

    def computed(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Returns the result for a batch, computed by expressions.

        None if the function has to be called with each row.
        """
        if self._schema is None or not self._schema.equals(batch.schema):
            self._schema = batch.schema
            self._trace = self._made(batch.schema)
        return None if self._trace is None else self._trace.computed(batch)

    def _made(self, schema: pa.Schema) -> Trace | None:
        where = self._context
        logged, self._logged = self._logged, True
        try:
            trace = self._make(schema)
        except UntraceableError as reason:
            if not logged:
                said = "%r (uid %r) calls its function with each row, because %s"
                log.info(said, where.name, where.uid, reason)
            return None
        if not logged:
            log.info("%r (uid %r) computes its function as expressions: %s", where.name, where.uid, str(trace)[:500])
        return trace
