"""Columns that window operators read (event times and session gaps) and emit (keys, window bounds and aggregates).

Rules:

- The bounds of a window have the type of the column of event time. Dates have no fitting type, so their bounds are
  timestamps in milliseconds.
- A session gap in a column is a duration, or a whole number of milliseconds. A row with a null gap, or a gap that is
  not greater than 0, belongs to no session and is refused. The error has the values of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.changes import CHANGE, with_kind
from tidegate.operators.operator import Columns, OperatorContext
from tidegate.operators.operator_errors import blame_row, first_row
from tidegate.operators.state.keys import key_schema
from tidegate.operators.watermarks.watermark_generator import check_timestamp_column, event_times_ms
from tidegate.operators.windows.slices import Window
from tidegate.operators.windows.window_specs import (
    SIZE_MS_MAX,
    Cumulating,
    EventTimeWindow,
    Session,
    Sliding,
    TimeOf,
    Times,
    Tumbling,
    WindowSpec,
    check_times,
)
from tidegate.state.kernels.columns import fixed_values, plain, valid_mask
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.user_values import value_text

WINDOW_START, WINDOW_END = "window_start", "window_end"

CLOCK_TYPE = pa.timestamp("ms", "UTC")
"""Type of the bounds of processing-time windows."""

GAP = own_name("session_gap")
"""Name of the column with a session gap that the program gave as an expression."""

_GREATEST = (1 << 63) - 1
_PER_MS = {"ms": 1, "us": 1_000, "ns": 1_000_000}


class WindowColumns:
    """The input and output columns of one window operator. `gap_column` has the session gap of each row, if each row
    has its own gap.

    `time` is the event-time column, a `Clock` for processing time, or None for count windows. Raises ConfigurationError
    without aggregates, for an unknown `emit`, or for names that clash.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        aggregates: Mapping[str, Aggregate],
        time: TimeOf,
        emit: str,
        gap_column: str | None = None,
    ) -> None:
        self.keys, self.aggregates, self._time = keys, dict(aggregates), time
        self.gap_column = gap_column
        if not aggregates:
            raise ConfigurationError("window: aggregate needs at least one aggregate: aggregate(n=count())")
        if emit not in ("update", "changes", "final"):
            raise ConfigurationError(f'emit must be "update", "changes" or "final", not {emit!r}')
        self._changes = emit == "changes"
        own = (WINDOW_START, WINDOW_END, CHANGE) if self._changes else (WINDOW_START, WINDOW_END)
        names = [*keys, *aggregates, *own]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ConfigurationError(
                f"window: keys and aggregates must have different names, and none may be called one of {own}, because "
                f"all are columns of the result; rename {doubles}"
            )

    @property
    def needed_columns(self) -> Columns:
        """Returns the input columns that the operator reads."""
        columns = (column for aggregate in self.aggregates.values() for column in aggregate.columns)
        times = (self._time,) if isinstance(self._time, str) else ()
        times = times if self.gap_column is None else (*times, self.gap_column)
        return frozenset((*self.keys, *times, *(column for column in columns if isinstance(column, str))))

    def output_schema(self, input_schema: pa.Schema, spec: WindowSpec) -> pa.Schema:
        """Returns the output columns: keys, window bounds, aggregates.

        Raises ConfigurationError for an input column that is missing, or has an unsupported type.
        """
        if self.gap_column is not None:
            check_gap_column(input_schema, self.gap_column)
        bounds = []
        if (time_type := self.time_type(input_schema)) is not None:
            bound = bound_type(time_type, spec)
            bounds = [pa.field(WINDOW_START, bound), pa.field(WINDOW_END, bound)]
        results = [pa.field(name, aggregate.output_type(input_schema)) for name, aggregate in self.aggregates.items()]
        rows = pa.schema([*key_schema(input_schema, self.keys), *bounds, *results])
        return with_kind(rows) if self._changes else rows

    def time_type(self, input_schema: pa.Schema) -> pa.DataType | None:
        """Returns the type of the time of rows, or None for count windows.

        Raises ConfigurationError if the column cannot be event time.
        """
        return time_type(input_schema, self._time)

    def output(
        self,
        keys: pa.RecordBatch,
        window: Window,
        results: Sequence[pa.Array],
        time_type: pa.DataType,
        spec: WindowSpec,
    ) -> pa.RecordBatch:
        """Returns the result rows of one window, with key columns and window bounds."""
        rows = len(results[0])
        starts, ends = (np.full(rows, bound, dtype=np.int64) for bound in window)
        return self.output_of(keys, starts, ends, results, time_type, spec)

    def output_of(
        self,
        keys: pa.RecordBatch,
        starts: Times,
        ends: Times,
        results: Sequence[pa.Array],
        time_type: pa.DataType,
        spec: WindowSpec,
    ) -> pa.RecordBatch:
        """Returns result rows that may belong to different windows.

        `starts` and `ends` have the bounds of the window of each row, in ms.
        """
        bound = bound_type(time_type, spec)
        names = [*self.keys, WINDOW_START, WINDOW_END, *self.aggregates]
        bounds = [bounds_of(starts, bound), bounds_of(ends, bound)]
        return pa.RecordBatch.from_arrays([*keys.columns, *bounds, *results], names=names)

    def output_without_bounds(self, keys: pa.RecordBatch, results: Sequence[pa.Array]) -> pa.RecordBatch:
        """Returns result rows of windows without bounds (count windows)."""
        return pa.RecordBatch.from_arrays([*keys.columns, *results], names=[*self.keys, *self.aggregates])


def row_times(batch: pa.RecordBatch, column: str, spec: EventTimeWindow | None) -> Times:
    """Returns the event times of rows, in ms.

    Raises ConfigurationError if a row has no time, if a window of a row ends after the greatest value of the type of
    window bounds, or if the column cannot be event time.
    """
    times = event_times_ms(batch, column)
    if times.null_count:
        raise ConfigurationError(
            f"window: {times.null_count} rows have no event time (null in column {column!r}), so they belong to no "
            f"window; filter them out before it, as in filter(pl.col({column!r}).is_not_null())"
        )
    found: Times = times.to_numpy()
    if spec is not None:
        check_ends(spec, found, batch.schema.field(column).type)
    return found


def check_ends(spec: EventTimeWindow, times: Times, time_type: pa.DataType) -> None:
    """Raises ConfigurationError if a window of a row with these times ends after the greatest value of the type of
    window bounds.
    """
    if isinstance(spec, Session) and spec.gap_ms is None:  # `check_last_ends` is called when the gaps are known
        check_times(times)
        return
    if len(times):
        newest = times.max(keepdims=True)
        check_last_ends(spec.last_end_ms(newest), newest, time_type)


def check_last_ends(ends: Times, times: Times, time_type: pa.DataType) -> None:
    """Raises ConfigurationError if the end of a window is after the greatest value of the type of window bounds.

    `ends[i]` is the end for a row at `times[i]`.
    """
    last_ms = _last_ms(time_type)
    if last_ms is not None and len(ends) and int(ends.max()) > last_ms:
        raise _beyond(time_type, f"{int(times[np.argmax(ends)])} ms since 1970")


def time_type(schema: pa.Schema, time: TimeOf) -> pa.DataType | None:
    """Returns the type of the time of rows, or None for count windows.

    Raises ConfigurationError for a column whose type cannot be event time.
    """
    if not isinstance(time, str):
        return None if time is None else CLOCK_TYPE
    check_timestamp_column(schema, time)
    return schema.field(time).type


def bounds_type(schema: pa.Schema, time: TimeOf, spec: WindowSpec) -> pa.DataType | None:
    """Returns the type of window bounds, or None for count windows.

    Raises ConfigurationError for a column whose type cannot be event time.
    """
    found = time_type(schema, time)
    return None if found is None else bound_type(found, spec)


def bound_type(time_type: pa.DataType, spec: WindowSpec) -> pa.DataType:
    """Returns the type of `window_start` and `window_end`, given the type of the event-time column."""
    if pa.types.is_date(time_type):
        return pa.timestamp("ms")
    if pa.types.is_timestamp(time_type) and time_type.unit == "s" and not _whole_seconds(spec):
        return pa.timestamp("ms", time_type.tz)
    return time_type


def bounds_of(bounds: Times, data_type: pa.DataType) -> pa.Array:
    """Returns window bounds, given in ms, as a column of the type that `bound_type` returned.

    Raises ConfigurationError for a time that the type cannot represent.
    """
    if pa.types.is_timestamp(data_type):
        last_ms = _last_ms(data_type)
        if last_ms is not None and len(bounds) and max(int(bounds.max()), -int(bounds.min())) > last_ms:
            raise _beyond(data_type, f"{int(bounds.min())} to {int(bounds.max())} ms since 1970")
        bounds = bounds // 1_000 if data_type.unit == "s" else bounds * _PER_MS[data_type.unit]
    return pa.array(bounds).view(data_type)


def _last_ms(time_type: pa.DataType) -> int | None:
    """Returns the last millisecond that the type of window bounds can represent, or None if it can represent all event
    times.

    For nanoseconds it is in the year 2262.
    """
    if not pa.types.is_timestamp(time_type) or time_type.unit not in ("us", "ns"):
        return None
    return _GREATEST // _PER_MS[time_type.unit]


def _beyond(time_type: pa.DataType, when: str) -> ConfigurationError:
    return ConfigurationError(
        f"window: {when}: bounds of windows have the type of event time, {time_type}, which ends before; filter such "
        'rows out before the window, or cast event time to pa.timestamp("ms")'
    )


def _whole_seconds(spec: WindowSpec) -> bool:
    match spec:
        case Tumbling():
            return spec.size_ms % 1_000 == spec.offset_ms % 1_000 == 0
        case Sliding():
            return spec.size_ms % 1_000 == spec.slide_ms % 1_000 == spec.offset_ms % 1_000 == 0
        case Cumulating():
            return spec.step_ms % 1_000 == 0
        case Session():
            return spec.gap_ms is not None and spec.gap_ms % 1_000 == 0
    return True


def check_gap_column(schema: pa.Schema, column: str) -> None:
    """Raises ConfigurationError unless a schema has this column exactly once, with a type that can be a session gap."""
    shown = "the expression" if column == GAP else f"column {column!r}"
    if schema.get_field_index(column) < 0:
        raise ConfigurationError(
            f'tg.Session(gap={column!r}): this is neither a duration, such as "30min", nor one of the columns '
            f"{schema.names}"
            "; give one of them"
        )
    data_type = schema.field(column).type
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    if not (pa.types.is_duration(data_type) or pa.types.is_integer(data_type)):
        raise ConfigurationError(
            f"tg.Session(gap=...): {shown} is {data_type}; a gap is a duration, or a whole number of milliseconds: "
            "pl.duration(seconds=...) makes one, or cast it to int64"
        )


def row_ends(context: OperatorContext, batch: pa.RecordBatch, times: Times, spec: Session) -> Times:
    """Returns the end of the session that each row would form alone, in ms: its time plus the gap.

    Raises OperatorError for a gap that is not greater than 0.
    """
    if spec.gap_ms is not None:
        return times + spec.gap_ms
    assert isinstance(spec.column, str), "an expression that was not computed"
    check_gap_column(batch.schema, spec.column)
    column = batch.column(spec.column)
    values = plain(column)
    gaps = fixed_values(values).astype(np.int64)
    if pa.types.is_duration(values.type) and values.type.unit != "ms":
        # Gaps that milliseconds cannot express are refused below.
        per_ms = _PER_MS.get(values.type.unit)
        gaps = np.clip(gaps, -SIZE_MS_MAX, SIZE_MS_MAX) * 1_000 if per_ms is None else gaps // per_ms
    fits = (gaps > 0) & (gaps <= SIZE_MS_MAX)
    mask = valid_mask(values)
    if len(mask):
        fits &= mask != 0
    if not fits.all():
        _refuse(context, batch, column, int(np.flatnonzero(~fits)[0]), spec)
    return times + gaps


def _refuse(context: OperatorContext, batch: pa.RecordBatch, column: pa.Array, number: int, spec: Session) -> None:
    shown = "computed" if spec.column == GAP else f"in column {spec.column!r}"
    gap = "null"
    if column[number].is_valid:
        in_units = pa.types.is_duration(column.type)  # dates of Python have no room for all of them
        value = column.slice(number, 1).view(pa.int64())[0] if in_units else column[number]
        gap = value_text(value.as_py()) + (f" {column.type.unit}" if in_units else "")
    row = batch.slice(number, 1)
    if spec.column == GAP:
        row = row.drop_columns([GAP])
    with blame_row(context, first_row(row) or {}, number):
        raise ConfigurationError(
            f"tg.Session: the gap of a row is {gap} ({shown}); it must be 1 ms or more, and at most 35,000 years. "
            "Filter such rows out before the window, or give them a gap with fill_null or pl.when(...)"
        )
