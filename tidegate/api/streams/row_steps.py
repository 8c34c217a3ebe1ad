"""Builds the steps that call functions with rows: maps, filters, `process` without and with keys, and asynchronous
calls.

`Stream` and `KeyedStream` call these builders. A builder creates the operator, checks the arguments as far as possible
before the job runs, and adds the step. Each raises ConfigurationError for arguments that are not valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.api.streams.changelog_mode import after_function
from tidegate.api.streams.event_time import uses_event_time
from tidegate.api.streams.expression_columns import known_schema, schema_after
from tidegate.api.streams.state_meanings import computed_text, meaning, time_text, with_rows
from tidegate.api.streams.step import Step, StepOptions
from tidegate.api.streams.step_checks import check_callable, check_function, check_methods
from tidegate.operators.functions.async_map import AsyncFunction, AsyncMap, rows_of_a_turn_max
from tidegate.operators.functions.batch_functions import (
    BatchFunction,
    BatchResult,
    Explode,
    FilterRows,
    FlatMap,
    Map,
    Peek,
    Row,
    batch_operator,
)
from tidegate.operators.functions.event_time_order import EventTimeOrder
from tidegate.operators.functions.failing_rows import (
    GuardedFilter,
    GuardedFlatMap,
    GuardedMap,
    GuardedMapBatches,
    error_tag,
)
from tidegate.operators.functions.process_functions import Limit, ProcessFunction
from tidegate.operators.functions.process_operator import process_operator
from tidegate.operators.watermarks.late_rows import LATE
from tidegate.operators.watermarks.watermark_generator import EventTimeCheck
from tidegate.protocol.edges import OutputTag
from tidegate.storage.argument_checks import check_methods_run_at_once
from tidegate.storage.checkpoints.metadata import StateMeaning
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.schemas.polars_frames import is_polars_expression
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import polars as pl

    from tidegate.api.streams.stream import Stream

_ROW = "a row, a dict"
_CONDITION = 'a row, a dict, or a polars expression such as pl.col("x") > 1'


def mapped_batches(
    stream: Stream,
    fn: Callable[[pa.RecordBatch], BatchResult] | BatchFunction,
    schema: SchemaLike | None,
    errors_to: OutputTag | str | None,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.map_batches`."""
    if not isinstance(fn, BatchFunction):
        check_function(fn, options.name, "a batch, or an object of a class derived from tg.BatchFunction", "batch")
    else:
        check_methods_run_at_once(fn, BatchFunction)
    columns = as_schema(schema, f"{options.name}(schema=)")
    changelog = after_function(stream._changelog, columns, repr(options.name))
    operator = batch_operator(fn, columns, options.name)
    if errors_to is None:
        return stream._then(Step(operator=operator, schema=columns, options=options, changelog=changelog))
    tag = error_tag(errors_to, stream.schema, options.name)
    return stream._then(
        Step(operator=partial(GuardedMapBatches, operator, tag), schema=columns, options=options, side_outputs=(tag,))
    )


def mapped_rows(
    stream: Stream,
    fn: Callable[[Row], Mapping[str, Any]],
    schema: SchemaLike | None,
    traced: bool,
    errors_to: OutputTag | str | None,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.map`."""
    check_function(fn, options.name, _ROW)
    columns = as_schema(schema, f"{options.name}(schema=)") or returned_schema(fn)
    if columns is None and traced and stream.schema is not None:
        from tidegate.operators.functions.trace import traced_schema

        columns = traced_schema(fn, stream.schema)
    kept = _kept_time(stream, columns)
    if errors_to is None:
        return stream._then(
            Step(
                operator=partial(Map, fn, columns, traced, kept),
                schema=columns,
                options=options,
                changelog=after_function(stream._changelog, columns, repr(options.name)),
                event_time_check=kept,
            )
        )
    tag = error_tag(errors_to, stream.schema, options.name)
    return stream._then(
        Step(
            operator=partial(GuardedMap, fn, columns, tag, kept),
            schema=columns,
            options=options,
            side_outputs=(tag,),
            event_time_check=kept,
        )
    )


def flat_mapped_rows(
    stream: Stream,
    fn: Callable[[Row], Iterable[Mapping[str, Any]]],
    schema: SchemaLike | None,
    errors_to: OutputTag | str | None,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.flat_map`."""
    check_function(fn, options.name, _ROW, may_yield=True)
    columns = as_schema(schema, f"{options.name}(schema=)") or returned_schema(fn, many=True)
    kept = _kept_time(stream, columns)
    if errors_to is None:
        return stream._then(
            Step(operator=partial(FlatMap, fn, columns, kept), schema=columns, options=options, event_time_check=kept)
        )
    tag = error_tag(errors_to, stream.schema, options.name)
    return stream._then(
        Step(
            operator=partial(GuardedFlatMap, fn, columns, tag, kept),
            schema=columns,
            options=options,
            side_outputs=(tag,),
            event_time_check=kept,
        )
    )


def _kept_time(stream: Stream, schema: pa.Schema | None) -> EventTimeCheck | None:
    """Returns the check that a map function keeps the event time of rows, or None if the stream or the result has no
    event-time column.
    """
    if stream.timestamp is None or (schema is not None and stream.timestamp not in schema.names):
        return None
    return EventTimeCheck(stream.timestamp)


def filtered_rows(
    stream: Stream,
    condition: Callable[[Row], bool] | pl.Expr,
    traced: bool,
    errors_to: OutputTag | str | None,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.filter`."""
    if is_polars_expression(condition):
        if errors_to is not None:
            raise ConfigurationError(
                f"{options.name}: errors_to= is for functions; a polars expression fails for no single row. "
                "Remove errors_to="
            )
        return _filtered_by_expression(stream, condition, options)
    check_function(condition, options.name, _CONDITION)
    if errors_to is None:
        return stream._then(
            Step(operator=partial(FilterRows, condition, traced), schema=stream.schema, options=options)
        )
    tag = error_tag(errors_to, stream.schema, options.name)
    return stream._then(
        Step(
            operator=partial(GuardedFilter, condition, tag), schema=stream.schema, options=options, side_outputs=(tag,)
        )
    )


def _filtered_by_expression(stream: Stream, condition: pl.Expr, options: StepOptions) -> Stream:
    from tidegate.operators.functions.expressions import FilterExpr

    schema_after(FilterExpr(condition), stream.schema, options.name)
    if stream._changelog is not None:
        stream._changelog.check_filter(repr(options.name), condition, stream.schema)
    return stream._then(
        Step(
            operator=partial(FilterExpr, condition),
            schema=stream.schema,
            options=StepOptions(options.name, options.uid, options.parallelism, slot=options.slot),
            changelog=stream._changelog,
            computes=computed_text("filter", [condition]),
        )
    )


def branches(
    stream: Stream, condition: Callable[[Row], bool] | pl.Expr, name: str, uid: str | None
) -> tuple[Stream, Stream]:
    """Builds the two steps of `Stream.branch`. Returns the rows for which the condition is true, and the other rows."""
    if is_polars_expression(condition):
        import polars as pl

        others: Any = ~condition.fill_null(pl.lit(False))
    else:
        check_function(condition, name, _CONDITION)
        others = partial(_is_not, condition)
    matching = stream.filter(condition, name=name, uid=uid)
    return matching, stream.filter(others, name=f"not {name}", uid=None if uid is None else f"{uid}-others")


def _is_not(condition: Callable[[Row], bool], row: Row) -> bool:
    return not condition(row)


def peeked_rows(
    stream: Stream, fn: Callable[[Row], object], errors_to: OutputTag | str | None, options: StepOptions
) -> Stream:
    """Builds the step of `Stream.peek`."""
    check_function(fn, options.name, _ROW)
    if errors_to is not None:
        return filtered_rows(stream, partial(_call_and_keep, fn), False, errors_to, options)
    changelog = after_function(stream._changelog, stream.schema, repr(options.name))
    return stream._then(Step(operator=partial(Peek, fn), schema=stream.schema, options=options, changelog=changelog))


def _call_and_keep(fn: Callable[[Row], object], row: Row) -> bool:
    fn(row)
    return True


def printed_rows(stream: Stream, prefix: str, options: StepOptions) -> Stream:
    """Builds the step of `Stream.print`."""
    if not isinstance(prefix, str):
        raise ConfigurationError(f"print({prefix!r}): the prefix must be a string")
    return peeked_rows(stream, partial(_print_row, prefix), None, options)


def _print_row(prefix: str, row: Row) -> None:
    print(f"{prefix}{row}", flush=True)


def limited_rows(stream: Stream, n: int, name: str, uid: str | None) -> Stream:
    """Builds the step of `Stream.limit`. It has one subtask, which counts the rows."""
    if stream._changelog is not None:
        raise stream._changelog.refuse(name)
    return stream._then(
        Step(
            operator=partial(process_operator, Limit(n), ((),), (stream.timestamp,), stream.schema, ()),
            schema=stream.schema,
            options=StepOptions(name, uid, 1),
            meaning=meaning("limit", {"rows": n}),
        )
    )


def exploded_rows(stream: Stream, column: str, outer: bool, options: StepOptions) -> Stream:
    """Builds the step of `Stream.explode`."""
    schema = known_schema(stream, options.name)
    if column not in schema.names:
        raise ConfigurationError(f"{options.name}: there is no column {column!r}; name one of {columns_text(schema)}")
    after = schema_after(Explode(column, outer), schema, options.name)
    if stream._changelog is not None:
        raise stream._changelog.refuse(options.name)
    return stream._then(Step(operator=partial(Explode, column, outer), schema=after, options=options))


def awaited_calls(
    stream: Stream,
    fn: Callable[[Any], Any],
    schema: SchemaLike | None,
    *,
    capacity: int,
    timeout: str | timedelta | int,
    ordered: bool,
    retries: int,
    batch_size: int | None,
    batch_timeout: str | timedelta | int | None,
    errors_to: OutputTag | str | None,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.map_async`."""
    columns = as_schema(schema, f"{options.name}(schema=)") or returned_schema(fn)
    timeout_ms = parse_duration_ms(timeout, setting="timeout")
    wait_ms = None if batch_timeout is None else parse_duration_ms(batch_timeout, setting="batch_timeout")
    argument = "row" if batch_size is None else "batch"
    check_callable(fn, options.name, f"a {argument}, such as an async def", argument)
    function = AsyncFunction(fn, capacity, timeout_ms, retries, batch_size, wait_ms)
    function.check(options.name)
    tag = None if errors_to is None else error_tag(errors_to, stream.schema, options.name)
    rows = None if stream.schema is None else columns_text(stream.schema)
    return stream._then(
        Step(
            operator=partial(AsyncMap, function, columns, ordered, tag),
            schema=columns,
            options=StepOptions(
                options.name, options.uid, options.parallelism, (1, rows_of_a_turn_max(function)), options.slot
            ),
            side_outputs=() if tag is None else (tag,),
            calls=function,
            meaning=meaning("calls under way", {"rows": rows}),
        )
    )


def processed_rows(
    stream: Stream,
    function: ProcessFunction,
    schema: SchemaLike | None,
    side_outputs: Sequence[OutputTag],
    errors_to: OutputTag | str | None,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.process`, whose function has neither keyed state nor timers."""
    check_methods(function)
    columns = as_schema(schema, f"{options.name}(schema=)") or returned_schema(function, many=True, method="process")
    errors = () if errors_to is None else (error_tag(errors_to, stream.schema, options.name),)
    operator = partial(process_operator, function, ((),), (stream.timestamp,), columns, side_outputs, False, errors)
    operator()  # checks the arguments
    return stream._then(
        Step(
            operator=operator,
            schema=columns,
            options=options,
            side_outputs=(*side_outputs, *errors),
            meaning=StateMeaning("process without keys"),
        )
    )


def processed_by_key(
    stream: Stream,
    keys: tuple[str, ...],
    function: ProcessFunction,
    schema: SchemaLike | None,
    side_outputs: Sequence[OutputTag],
    errors_to: OutputTag | str | None,
    options: StepOptions,
    *,
    fire_at_end: bool = False,
    in_order: bool = False,
) -> Stream:
    """Builds the step of `KeyedStream.process`, whose function may have keyed state and timers.

    With `in_order` a step before sorts the rows by event time.
    """
    check_methods(function)
    columns = as_schema(schema, f"{options.name}(schema=)") or returned_schema(function, many=True, method="process")
    errors = () if errors_to is None else (error_tag(errors_to, stream.schema, options.name, keys),)
    operator = partial(
        process_operator, function, (keys,), (stream.timestamp,), columns, side_outputs, fire_at_end, errors, in_order
    )
    operator()  # checks the arguments
    if in_order and any(tag.name == LATE for tag in (*side_outputs, *errors)):
        raise ConfigurationError(
            f"{options.name}: with in_order=True late rows go to the side output {LATE!r}; give the function's own "
            "side output another name"
        )
    rows = _in_event_time_order(stream, keys, options) if in_order else stream._by_keys(keys)
    made = rows._then(
        Step(
            operator=operator,
            schema=columns,
            options=options,
            side_outputs=(*side_outputs, *errors),
            meaning=meaning("process", {"keys": keys}, rows={"": (stream.schema, keys)}),
        )
    )
    return made._with_errors_of(rows._inputs[0][0] if in_order else None)


def _in_event_time_order(stream: Stream, keys: tuple[str, ...], options: StepOptions) -> Stream:
    """Adds the step for `in_order=True`: it stores rows until the watermark passes them, and emits the rows of a key
    sorted by event time.
    """
    if stream.timestamp is None:
        raise ConfigurationError(
            f"{options.name}: in_order=True is the order of event time, and the stream has none: call "
            "assign_timestamps before key_by"
        )
    uses_event_time(f"{options.name}(in_order=True)", stream._inputs)
    schema, time = known_schema(stream, options.name), stream.timestamp
    operator = partial(EventTimeOrder, keys, time, schema)
    means = meaning("rows in order", {"keys": keys, "time": time_text(time)}, rows={"": (schema, keys)})
    return stream._by_keys(keys)._then(
        Step(
            operator=operator,
            schema=operator().output,
            options=StepOptions(
                f"{options.name} in order",
                None if options.uid is None else f"{options.uid}-order",
                options.parallelism,
            ),
            side_outputs=(OutputTag(LATE, schema),),
            meaning=with_rows(means, rows=schema),
        )
    )
