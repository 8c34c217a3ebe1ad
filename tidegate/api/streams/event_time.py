"""Builds `Stream.assign_timestamps`, and checks that later steps see the same times as the watermarks.

Event time is a column. If a step between `assign_timestamps` and, for example, a window changed the values of this
column, rows that were in time would be late, and would be dropped. Rules:

- Polars expressions that change the values of the column are an error if a later step uses event time. An expression
  that reads only this column is tried with a few example times. Another type or unit of the same time is no change.
- The functions of `map` and `flat_map` are checked as they run (`EventTimeCheck`).
- `process`, `map_batches` and `map_async` create new rows. Their times are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.streams.changelog_mode import nulls_tag
from tidegate.api.streams.expression_columns import idleness_of
from tidegate.api.streams.state_meanings import EVENT_TIME, TIME_COLUMN, column_of, meaning
from tidegate.api.streams.step import Step, StepOptions
from tidegate.operators.aggregates.column_expressions import column_like
from tidegate.operators.watermarks.watermark_generator import (
    WatermarkAlignment,
    WatermarkGenerator,
    check_event_time,
    event_times_ms,
)
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import polars as pl

    from tidegate.api.streams.stream import Stream

_TRIED_MS = (0, 1, 999, 1_000, 59_999, 86_399_999, 1_700_000_000_123)


def assigned_timestamps(
    stream: Stream,
    column: str | pl.Expr,
    max_out_of_orderness: str | timedelta | int,
    idleness: str | timedelta | int | None,
    nulls_to: str | None,
    punctuated_by: str | pl.Expr | None,
    alignment: WatermarkAlignment | None,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.assign_timestamps`. Raises ConfigurationError for arguments that are not valid."""
    if alignment is not None and not isinstance(alignment, WatermarkAlignment):
        raise ConfigurationError(
            f"assign_timestamps: alignment= is a tg.WatermarkAlignment, not {alignment!r}"
            '; give tg.WatermarkAlignment("group")'
        )
    changelog = stream._changelog
    delay_ms = parse_duration_ms(max_out_of_orderness, setting="max_out_of_orderness")
    # As parallel as the stream before it, so chained to it: there the rows still have the source's order.
    parallelism = options.parallelism if options.parallelism is not None else stream._input_parallelism
    idleness_ms = idleness_of(idleness, str(column), [node for node, _ in stream._inputs], parallelism)
    time = column_like(column, "assign_timestamps")
    rows, names = _with_computed(stream, column, punctuated_by, options.uid)
    punctuation = names[1] if len(names) > 1 else None
    if rows.schema is not None:
        check_event_time(rows.schema, names[0], punctuation)
    punctuated = None if punctuated_by is None else column_of(column_like(punctuated_by, options.name))
    timed = rows._then(
        Step(
            operator=partial(WatermarkGenerator, names[0], delay_ms, idleness_ms, nulls_to, punctuation, alignment),
            schema=rows.schema,
            options=StepOptions(options.name, options.uid, parallelism),
            changelog=changelog,
            side_outputs=nulls_tag(nulls_to, rows, changelog),
            meaning=meaning(EVENT_TIME, {TIME_COLUMN: column_of(time), "punctuated by": punctuated}),
        )
    )
    return timed._derived(timestamp=names[0], changelog=changelog)


def _with_computed(
    stream: Stream, time: str | pl.Expr, flag: str | pl.Expr | None, uid: str | None
) -> tuple[Stream, tuple[str, ...]]:
    """Adds columns for expressions of timestamps and punctuations.

    Returns the stream, and the names of the timestamp column and, if given, the punctuation column.
    """
    given = {"assign_timestamps": time} | ({} if flag is None else {"assign_timestamps: punctuated_by=": flag})
    if all(isinstance(each, str) for each in given.values()):
        return stream, tuple(map(str, given.values()))
    from tidegate.api.streams.aggregate_inputs import column_and_expression

    found = [column_and_expression(each, where, stream.schema) for where, each in given.items()]
    expressions = [expression for _, expression in found if expression is not None]
    names = tuple(name for name, _ in found)
    if not expressions:
        return stream, names
    options = StepOptions(
        "assign_timestamps inputs", None if uid is None else f"{uid}-inputs", stream._input_parallelism
    )
    return stream._with_columns(expressions, options), names


def uses_event_time(step: str, *inputs: Sequence[tuple[StreamNode, object]]) -> None:
    """Records that the step named `step` uses the event time of its input streams, whose nodes are in `inputs` (see
    `Stream._inputs`).

    Raises ConfigurationError if an earlier step of expressions changes the event-time column.
    """
    left = [node.maker for stream in inputs for node, _ in stream]
    seen: set[int] = set()
    while left:
        node = left.pop()
        if id(node) in seen or (node.meaning is not None and node.meaning.kind == EVENT_TIME):
            continue
        seen.add(id(node))
        if node.retimes is not None:
            raise _refusal(step, node)
        if node.event_time_check is not None:
            node.event_time_check.used = True
        left += [upstream.maker for upstream, _ in node.inputs]


def _refusal(step: str, node: StreamNode) -> ConfigurationError:
    return ConfigurationError(
        f"{step}: {node.name!r} (uid {node.uid!r}) computes the column of event time, {node.retimes!r}, anew; "
        f"watermarks are of the former times, so {step} would take rows for late and drop them. Give the new times "
        f"another name, or call assign_timestamps({node.retimes!r}) behind {node.name!r}"
    )


def gives_other_times(expressions: Sequence[pl.Expr | str], column: str, schema: pa.Schema | None) -> bool:
    """Returns whether expressions certainly change the values of the event-time column."""
    import polars as pl

    for expression in expressions:
        if isinstance(expression, str) or expression.meta.output_name(raise_if_undetermined=False) != column:
            continue
        if expression.meta.undo_aliases().meta.eq(pl.col(column)):
            return False
        if set(expression.meta.root_names()) != {column}:
            return True
        return _changes(expression, column, pa.int64() if schema is None else schema.field(column).type)
    return False


def _changes(expression: pl.Expr, column: str, data_type: pa.DataType) -> bool:
    """Returns whether an expression of the time column changes one of a few example times.

    False if polars cannot evaluate the expression on these times.
    """
    import polars as pl

    try:
        tried = pa.array(_TRIED_MS, pa.timestamp("ms")).cast(data_type, safe=False)
        before = pa.record_batch({column: tried})
        frame = pl.from_arrow(pa.table(before))
        assert isinstance(frame, pl.DataFrame)
        after = frame.select(expression).to_arrow().combine_chunks().to_batches()[0]
        return not event_times_ms(before, column).equals(event_times_ms(after, column))
    except (pl.exceptions.PolarsError, pa.ArrowException, ConfigurationError, NotImplementedError):
        return False
