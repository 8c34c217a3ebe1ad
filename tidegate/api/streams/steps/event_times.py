"""`EventTimes`: the step that says which column is event time, and how far behind it watermarks are.

`Stream` inherits it. Watermarks are made where the rows still have the order of their source.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Self

from tidegate.api.streams.steps.columns import idleness_of
from tidegate.api.streams.steps.meanings import column_of, meaning
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.api.streams.steps.updating import nulls_tag
from tidegate.operators.aggregates.column_expressions import column_like
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WatermarkGenerator, check_event_time
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import polars as pl


class EventTimes(StreamSteps):
    """A stream that may take event time from one of its columns."""

    def assign_timestamps(
        self,
        column: str | pl.Expr,
        max_out_of_orderness: str | timedelta | int = 0,
        *,
        idleness: str | timedelta | int | None = None,
        nulls_to: str | None = None,
        punctuated_by: str | pl.Expr | None = None,
        alignment: WatermarkAlignment | None = None,
        name: str = "assign_timestamps",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Take event time from a column: a timestamp, a date, or int64 milliseconds since 1970.

        It may be a polars expression, which adds a column: `assign_timestamps((pl.col("s") * 1000).alias("at"))`. As in
        `with_columns`, one that is called as a column takes its place.

        A watermark follows the greatest timestamp so far, behind it by `max_out_of_orderness` (a duration): rows older
        than that are not expected any more. It replaces earlier event time. Rows that have a null there pass and do
        not count; with `nulls_to="undated"` they go to that side output (see `side_output`). With `punctuated_by`, a
        column of booleans, only rows for which it is true move event time on.

        Right behind an unbounded source each split has a watermark of its own, and the slowest split counts. With
        `idleness` (a duration) a split without rows for so long does not hold it back. With `alignment` splits are not
        read while they are far ahead of others. Raises ConfigurationError.
        """
        if alignment is not None and not isinstance(alignment, WatermarkAlignment):
            raise ConfigurationError(f"assign_timestamps: alignment= is a tg.WatermarkAlignment, not {alignment!r}")
        updating, delay_ms = self._updating, parse_duration_ms(max_out_of_orderness, setting="max_out_of_orderness")
        # As parallel as the stream before it, so chained to it: there the rows still have the source's order.
        parallelism = parallelism if parallelism is not None else self._input_parallelism
        idleness_ms = idleness_of(idleness, str(column), [node for node, _ in self._inputs], parallelism)
        time = column_like(column, "assign_timestamps")
        rows, (column, *flags) = self._with_computed(column, punctuated_by, uid)
        punctuation = flags[0] if flags else None
        if rows.schema is not None:
            check_event_time(rows.schema, column, punctuation)
        timed = rows._then(
            partial(WatermarkGenerator, column, delay_ms, idleness_ms, nulls_to, punctuation, alignment),
            rows.schema,
            name,
            uid,
            parallelism,
            updating=updating,
            side_outputs=nulls_tag(nulls_to, rows, updating),
            meaning=meaning(
                "event time",
                {
                    "column": column_of(time),
                    "punctuated by": None if punctuated_by is None else column_of(column_like(punctuated_by, name)),
                },
            ),
        )
        return type(self)(self._program, timed._inputs, (), column, updating)

    def _with_computed(
        self, time: str | pl.Expr, flag: str | pl.Expr | None, uid: str | None
    ) -> tuple[Self, tuple[str, ...]]:
        """This stream with the columns that expressions make, and the names of both."""
        given = {"assign_timestamps": time} | ({} if flag is None else {"assign_timestamps: punctuated_by=": flag})
        if all(isinstance(each, str) for each in given.values()):
            return self, tuple(map(str, given.values()))
        from tidegate.api.streams.steps.aggregate_inputs import column_of

        found = [column_of(each, where, self.schema) for where, each in given.items()]
        expressions = [expression for _, expression in found if expression is not None]
        names = tuple(name for name, _ in found)
        if not expressions:
            return self, names
        uid = None if uid is None else f"{uid}-inputs"
        name = "assign_timestamps inputs"
        return self.with_columns(*expressions, name=name, uid=uid, parallelism=self._input_parallelism), names
