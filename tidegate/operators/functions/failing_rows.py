"""Row-wise functions whose failures do not fail the job: failing rows go to a side output, each with its error.

Rules:

- A row for which the function raises, or returns an invalid row, produces only one row of the side output: the columns
  of the input row and a text column `error`. The function must not have side effects before it raises, because only its
  return value is discarded.
- The same holds for a row whose results do not fit the output schema.
- Only failures of the function are caught. Ctrl-C and failures of tidegate itself are not.
- `InputCheck` finds failing rows for aggregate functions of the program (`tg.udaf`), before the aggregate. It lets the
  function accumulate the rows of a batch in one call, each in a new group. Failing rows are halved and tried again,
  down to single rows. A row that a function cannot accumulate is excluded from all aggregates, and goes to the side
  output with the error of the first such function. A row that does not meet the condition of an aggregate is not tried
  for it. The aggregate itself runs after the exchange on the rows that pass, and an exception there fails the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_function import input_column, row_mask, rows_in, try_accumulate
from tidegate.operators.aggregates.column_expressions import ColumnExpression, ColumnLike
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.functions.batch_functions import MapBatches
from tidegate.operators.operator import Emit, Operator, OperatorContext, OperatorFactory
from tidegate.operators.operator_errors import blame, is_failure
from tidegate.operators.output_schema import PinnedSchema, SchemaMismatchError
from tidegate.operators.row_values import python_rows, returned_rows
from tidegate.operators.state.undo import StateUndo
from tidegate.operators.watermarks.watermark_generator import EventTimeCheck
from tidegate.protocol.edges import RECORDS_IN_ERRORS, ErrorTag, OutputTag
from tidegate.protocol.failures import error_text
from tidegate.storage.errors import ConfigurationError, TidegateError
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.user_values import unmarked

ERROR = "error"
"""Name of the column with the error of a row."""

Row: TypeAlias = Mapping[str, Any]


def error_tag(
    errors_to: OutputTag | str, schema: pa.Schema | None, step: str, keys: Sequence[str] | None = None
) -> OutputTag:
    """Returns the tag of the side output for rows that fail in the step `step`, whose input schema is `schema`.

    `keys` names the key columns if timers may fail as well. Rows of failed timers have only these columns, so the other
    columns become nullable. Raises ConfigurationError if the schema is unknown (None), or has a column with the
    reserved name.
    """
    if schema is None:
        raise ConfigurationError(
            f"{step}(errors_to=...): the input columns are known only when the job runs, and the side output needs "
            "them; pass schema= to the step before"
        )
    if ERROR in schema.names:
        raise ConfigurationError(
            f"{step}(errors_to=...): the input already has a column {ERROR!r}; rename it before this step"
        )
    if keys is not None:
        schema = pa.schema([field if field.name in keys else field.with_nullable(True) for field in schema])
    name = errors_to.name if isinstance(errors_to, OutputTag) else errors_to
    tag = ErrorTag(name, schema.append(pa.field(ERROR, pa.string())))
    if isinstance(errors_to, OutputTag) and not errors_to.schema.equals(tag.schema):
        raise ConfigurationError(
            f"{step}(errors_to={errors_to.name!r}): rows that fail have the columns {columns_text(tag.schema)}, and "
            f"the tag has {columns_text(errors_to.schema)}; give its name alone"
        )
    return tag


def is_of_function(error: BaseException, undo: StateUndo | None = None) -> bool:
    """Returns whether an error comes from the user's function, and not from storage or a bug of tidegate.

    `undo` records storage errors of the state backend. `undo` is None if the function has no state.
    """
    if undo is not None and undo.failure is not None:
        return False
    if isinstance(error, TidegateError) and not isinstance(error, ConfigurationError):
        return False
    return is_failure(error)


class FailingRows:
    """Collects the failing rows of one batch. To call the user's function for a row, use `with failing.catch(index):
    ...`.

    `tag` is the side output to which `leave` sends the rows.
    """

    def __init__(self, tag: OutputTag) -> None:
        self.tag = tag
        self._numbers: list[int] = []
        self._errors: list[str] = []

    @property
    def any(self) -> bool:
        """Returns True if a row has failed since the last call of `leave` or `take`."""
        return bool(self._numbers)

    def catch(self, number: int) -> _Catch:
        """Returns a context manager that records an exception as a failure of the row with the index `number`."""
        return _Catch(self, number)

    def add(self, number: int, error: BaseException, place: str = "") -> None:
        """Records the row with the index `number` as failed.

        `place` names the call in the error text, if there are several calls for a row.
        """
        self._numbers.append(number)
        text = unmarked(error_text(error))
        self._errors.append(f"{place}: {text}" if place else text)

    def halves(
        self, start: int, rows: pa.RecordBatch, error: BaseException, place: str = ""
    ) -> list[tuple[int, pa.RecordBatch]]:
        """Divides rows that failed together into two halves, to be tried again. A single row is recorded as failed, and
        the result is empty.

        `start` is the index of the first row. Returns each half with the index of its first row, the second half first.
        """
        half = rows.num_rows // 2
        if half:
            return [(start + half, rows.slice(half)), (start, rows.slice(0, half))]
        self.add(start, error, place)
        return []

    def leave(self, batch: pa.RecordBatch, context: OperatorContext) -> None:
        """Counts the failed rows of a batch, and sends them to the side output."""
        failed = self.take(batch)
        if failed is not None:
            context.metrics.counter(RECORDS_IN_ERRORS).inc(failed.num_rows)
            for start in range(0, failed.num_rows, OUTPUT_ROWS_MAX):
                context.emit_aside(self.tag.name, failed.slice(start, OUTPUT_ROWS_MAX))

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Returns the failed rows of the batch, in order, or None if there are none."""
        if not self._numbers:
            return None
        failed = sorted(zip(self._numbers, self._errors, strict=True))
        rows = batch.take(pa.array([number for number, _ in failed], pa.int64()))
        names = set(batch.schema.names)
        columns = [
            rows.column(field.name) if field.name in names else pa.nulls(len(failed), field.type)
            for field in list(self.tag.schema)[:-1]
        ]
        columns.append(pa.array([text for _, text in failed], pa.string()))
        self._numbers, self._errors = [], []
        return pa.RecordBatch.from_arrays(columns, schema=self.tag.schema)


class _Catch(AbstractContextManager[None]):
    """The context of `FailingRows.catch`: records an Exception as the failure of a row. Does not catch Ctrl-C."""

    __slots__ = ("_failing", "_number")

    def __init__(self, failing: FailingRows, number: int) -> None:
        self._failing = failing
        self._number = number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or not is_failure(error):
            return False
        self._failing.add(self._number, error)
        return True


class GuardedFlatMap(Operator):
    """`flat_map` that sends the rows for which the function fails to a side output."""

    def __init__(
        self,
        fn: Callable[[dict[str, Any]], Iterable[Row]],
        schema: pa.Schema | None,
        tag: OutputTag,
        event_time_check: EventTimeCheck | None = None,
    ) -> None:
        self._fn = fn if event_time_check is None else event_time_check.results(fn)
        self._pinned = PinnedSchema(schema)
        self._failing = FailingRows(tag)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the results of the function, in order and in batches of bounded size, and sends failing rows to the
        side output.
        """
        ready: list[tuple[int, list[Row]]] = []
        waiting = 0
        with blame(self.context, batch):
            rows = python_rows(batch)
        for number, row in enumerate(rows):
            results: list[Row] = []
            with self._failing.catch(number):
                results = self._own_rows(self._fn(row))
            if waiting and waiting + len(results) > OUTPUT_ROWS_MAX:
                self._emit(ready, emit)
                ready, waiting = [], 0
            ready.append((number, results))
            waiting += len(results)
        self._emit(ready, emit)
        self._failing.leave(batch, self.context)

    def _own_rows(self, returned: object) -> list[Row]:
        return list(map(self._pinned.own_row, returned_rows(returned)))

    def _emit(self, ready: list[tuple[int, list[Row]]], emit: Emit) -> None:
        rows = [row for _, results in ready for row in results]
        parts = [rows[start : start + OUTPUT_ROWS_MAX] for start in range(0, len(rows), OUTPUT_ROWS_MAX)]
        try:
            batches = [self._pinned.from_rows(part) for part in parts]
        except SchemaMismatchError:
            batches = self._fitting(ready)
        for batch in batches:
            emit(batch)

    def _fitting(self, ready: list[tuple[int, list[Row]]]) -> list[pa.RecordBatch]:
        """Returns a batch for each row whose results fit the output schema.

        Records rows with other results as failed.
        """
        batches = []
        for number, results in ready:
            try:
                batches += [self._pinned.from_rows(results)] if results else []
            except SchemaMismatchError as error:
                self._failing.add(number, error)
        return batches


class GuardedMap(GuardedFlatMap):
    """`map` that sends the rows for which the function fails to a side output."""

    def __init__(
        self,
        fn: Callable[[dict[str, Any]], Row],
        schema: pa.Schema | None,
        tag: OutputTag,
        event_time_check: EventTimeCheck | None = None,
    ) -> None:
        super().__init__(lambda row: (fn(row),), schema, tag, event_time_check)


class GuardedMapBatches(Operator):
    """`map_batches` that sends the rows for which the function fails to a side output. A batch that fails is halved
    repeatedly, down to single rows.

    The function is therefore called again with rows of a failed batch, and its side effects are repeated. `made`
    creates the operator that calls the function.
    """

    def __init__(self, made: OperatorFactory, tag: OutputTag) -> None:
        inner = made()
        assert isinstance(inner, MapBatches)
        self._inner = inner
        self._failing = FailingRows(tag)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Opens the operator that calls the function."""
        super().open(context, restored)
        self._inner.open(context, restored)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the results of the function in order, and sends the failing rows to the side output."""
        if not batch.num_rows:
            self._inner.process(batch, emit)
            return
        waiting = [(0, batch)]
        while waiting:
            start, part = waiting.pop()
            results: list[pa.RecordBatch] = []
            try:
                results = self._inner.results_of(part)
            except BaseException as error:
                if not is_failure(error):
                    raise
                waiting += self._failing.halves(start, part, error)
            for result in results:
                emit(result)
        self._failing.leave(batch, self.context)

    def close(self) -> None:
        """Closes the operator that calls the function."""
        self._inner.close()


class GuardedFilter(Operator):
    """`filter` by a function that sends the rows for which the function fails to a side output."""

    def __init__(self, fn: Callable[[dict[str, Any]], object], tag: OutputTag) -> None:
        self._fn = fn
        self._failing = FailingRows(tag)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the rows for which the function returns true, and sends the rows for which it raises to the side
        output.
        """
        mask = []
        with blame(self.context, batch):
            rows = python_rows(batch)
        for number, row in enumerate(rows):
            stays = False
            with self._failing.catch(number):
                stays = bool(self._fn(row))
            mask.append(stays)
        kept = batch.filter(pa.array(mask, pa.bool_()))
        if kept.num_rows:
            emit(kept)
        self._failing.leave(batch, self.context)


class InputCheck(Operator):
    """Finds the rows that the `tg.udaf` functions of `aggregates` cannot accumulate, and sends them to the side output
    `tag`.
    """

    def __init__(self, aggregates: Mapping[str, Aggregate], tag: OutputTag) -> None:
        self._failing = FailingRows(tag)
        read = dict.fromkeys(column for each in aggregates.values() for column in each.columns)
        expressions = [column for column in read if isinstance(column, ColumnExpression)]
        names = {column: f"{number}" for number, column in enumerate(read)}
        """Names of the input columns. They are generated numbers, so no two are equal."""
        self._copied = {names[column]: column for column in read if isinstance(column, str)}
        self._computed = None
        if expressions:
            from tidegate.operators.functions.projection import Projection

            self._computed = Projection([column.expression.alias(names[column]) for column in expressions])

        def plain(column: ColumnLike) -> ColumnLike:
            return names[column]

        self._aggregates = {label: each.over(plain) for label, each in aggregates.items()}

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the rows that all functions accept, and sends the other rows to the side output."""
        with blame(self.context, batch):
            inputs = self._inputs_of(batch)
            taken = np.ones(batch.num_rows, dtype=np.bool_)
            for label, aggregate in self._aggregates.items():
                rows = rows_in(row_mask(inputs, aggregate.condition), batch.num_rows)
                columns = [input_column(inputs, column) for column in aggregate.inputs]
                self._try(label, aggregate, rows[taken[rows]], columns, taken)
        kept = batch if taken.all() else batch.filter(pa.array(taken))
        if kept.num_rows:
            emit(kept)
        self._failing.leave(batch, self.context)

    def _inputs_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the columns of a batch that the aggregates read, with their expressions computed."""
        columns = {name: batch.column(column) for name, column in self._copied.items()}
        if self._computed is not None:
            made = self._computed.of(batch)
            columns.update(zip(made.schema.names, made.columns, strict=True))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _try(
        self,
        label: str,
        aggregate: Aggregate,
        rows: NDArray[np.int64],
        columns: Sequence[pa.Array],
        taken: NDArray[np.bool_],
    ) -> None:
        """Lets one function accumulate the rows with the indices `rows`. Sets `taken[i]` to False for each row i that
        fails.
        """
        assert aggregate.function is not None, "an aggregate without a function"
        place = label if len(self._aggregates) > 1 else ""
        waiting = [rows] if len(rows) else []
        while waiting:
            some = waiting.pop()
            try:
                try_accumulate(aggregate.function, [column.take(pa.array(some)) for column in columns], len(some))
            except BaseException as error:
                if not is_of_function(error):
                    raise
                half = len(some) // 2
                if half:
                    waiting += [some[half:], some[:half]]
                else:
                    taken[some] = False
                    self._failing.add(int(some[0]), error, place)
