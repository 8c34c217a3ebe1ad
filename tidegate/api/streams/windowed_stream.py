"""`WindowedStream` is a stream whose rows are assigned to windows. `KeyedStream.window` creates it, and `Stream.window`
for all rows.

A result row has the keys, `window_start`, `window_end`, and the aggregates. Its event time is the last millisecond of
the window, so results can be assigned to windows again. Results of count windows have neither bounds nor event time.
Results of processing-time windows have bounds in processing time, and no event time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Unpack

import pyarrow as pa

from tidegate.api.program import all_or_nothing
from tidegate.api.streams.aggregate_steps import checked_inputs, windowed_inputs
from tidegate.api.streams.changelog_mode import ChangelogMode
from tidegate.api.streams.event_time import uses_event_time
from tidegate.api.streams.expression_columns import aggregates_and_options, known_schema
from tidegate.api.streams.other_names import WINDOWED_STREAMS, OtherNames
from tidegate.api.streams.ranking_steps import ranked_windows, ranking_of, window_keys
from tidegate.api.streams.state_meanings import meaning, time_text, window_text, with_rows
from tidegate.api.streams.step import SlotOptions, Step, StepOptions
from tidegate.api.streams.step_checks import check_function, check_methods
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.changes import with_kind
from tidegate.operators.functions.failing_rows import error_tag
from tidegate.operators.local_aggregation import LocalAggregation
from tidegate.operators.state.keys import key_schema
from tidegate.operators.watermarks.late_rows import LATE
from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.operators.windows.count_windows import CountWindows, FunctionCounts
from tidegate.operators.windows.function_windows import FunctionSessions, FunctionWindows
from tidegate.operators.windows.process_windows import FunctionCalls, ProcessWindowFunction
from tidegate.operators.windows.row_windows import WindowBuffer, plain_rows
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.sliding_counts import FunctionSlidingCounts, SlidingCountWindows
from tidegate.operators.windows.window_calls import (
    WindowCall,
    WindowCalls,
    check_no_doubles,
    derived_schema,
)
from tidegate.operators.windows.window_columns import GAP, WINDOW_END, WINDOW_START, bounds_type, check_gap_column
from tidegate.operators.windows.window_specs import Clock, Count, Cumulating, Session, Sliding, Tumbling
from tidegate.operators.windows.window_state import AggregateWindows
from tidegate.protocol.edges import OutputTag, check_tags
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    from tidegate.api.streams.stream import Stream

WindowsTaken = Tumbling | Sliding | Cumulating | Session | Count
WindowTime = Literal["event", "processing"]


@all_or_nothing(lambda windows: windows._stream._program)
class WindowedStream(OtherNames):
    """A stream whose rows are assigned to windows, for each key if there are keys.

    The parameters `name`, `uid`, `parallelism`, `errors_to` and the slot options of its methods are described at
    `Stream`.
    """

    _other_names = WINDOWED_STREAMS
    _before = ("_stream", "window")

    def __init__(
        self,
        stream: Stream,
        keys: tuple[str, ...],
        spec: WindowsTaken,
        time: WindowTime = "event",
        fire_at_end: bool = False,
        lateness_ms: int = 0,
        replaced: frozenset[str] = frozenset(),
    ) -> None:
        """Made by `window`. `replaced` names the columns that key expressions of the same name have replaced."""
        if not isinstance(spec, WindowsTaken):
            kinds = "tg.Tumbling, tg.Sliding, tg.Cumulating, tg.Session or tg.Count"
            raise ConfigurationError(f"window takes {kinds}, not {spec!r}")
        if time not in ("event", "processing"):
            raise ConfigurationError(f'window: time must be "event" or "processing", not {time!r}')
        if isinstance(spec, Count):
            if time != "event":
                raise ConfigurationError(f"{spec!r}: count windows have no time; remove time=")
            if fire_at_end:
                spec, fire_at_end = replace(spec, fire_at_end=True), False
        if time == "event" and fire_at_end:
            raise ConfigurationError(
                'window: fire_at_end= is for time="processing" and tg.Count; windows of event time all end with the '
                "input. Remove fire_at_end="
            )
        if time == "event" and not isinstance(spec, Count):
            if stream.timestamp is None:
                raise ConfigurationError(
                    "window: the stream has no event time; name its column in the source (timestamp=...), or call "
                    'assign_timestamps before; or take processing time: window(..., time="processing")'
                )
            uses_event_time("window", stream._inputs)
        self._stream = stream
        self._keys = keys
        self._spec = spec
        self._time = stream.timestamp
        self._clock = Clock(fire_at_end) if time == "processing" else None
        self._lateness_ms = lateness_ms
        self._replaced = replaced

    def allowed_lateness(self, lateness: str | timedelta | int) -> WindowedStream:
        """Keeps windows for this long after their end, so that late rows still update their results.

        Each late row emits a new result immediately, which replaces the previous result.

        - `lateness`: a duration of event time, such as "5min", a timedelta, or milliseconds.

        Raises ConfigurationError for count windows and for windows of processing time, which have no late rows.

        Example:

            >>> hours = orders.key_by("user").window(tg.Tumbling("1h")).allowed_lateness("5min")
            >>> hours.aggregate(n=tg.count()).columns
            ['user', 'window_start', 'window_end', 'n']
        """
        if isinstance(self._spec, Count):
            raise ConfigurationError(f"{self._spec!r}: count windows have no late rows; remove allowed_lateness=")
        if self._clock is not None:
            raise ConfigurationError("window: processing time has no late rows; remove allowed_lateness")
        parsed = parse_duration_ms(lateness, setting="allowed_lateness")
        return WindowedStream(self._stream, self._keys, self._spec, lateness_ms=parsed, replaced=self._replaced)

    def aggregate(
        self,
        mapping: Mapping[str, Aggregate] | None = None,
        /,
        *,
        emit: Literal["final", "update", "changes"] | Aggregate = "final",
        emit_every: str | timedelta | int | Aggregate | None = None,
        emit_every_time: WindowTime | Aggregate = "processing",
        name: str | Aggregate = "window",
        uid: str | Aggregate | None = None,
        parallelism: int | Aggregate | None = None,
        errors_to: OutputTag | str | Aggregate | None = None,
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregates the rows of each key and window.

        - `aggregates`: aggregates such as `tg.count()` and `tg.sum("x")`, by output column.
        - `mapping`: the same as a dict, for columns whose names are parameters of this method:
          `aggregate({"name": tg.first("full_name")})`.
        - `emit`: when results are emitted.
            - "final": once, when the watermark passes the end of the window. With an allowed lateness later results
              replace it.
            - "update": after each batch, the results so far of the keys and windows in it. Each replaces the one
              before. Write them to a table with mode="upsert" and the keys, `window_start` and `window_end` as keys.
            - "changes": for sessions, after each batch. The bounds of a session change while it grows, so the result
              before is retracted; the column `row_kind` marks inserted and retracted rows (`docs/changes.md`).
        - `emit_every`: a duration, such as "10s". Emits results so far this often, for the keys and windows that have
          changed, and the last ones when a window ends. They replace each other.
        - `emit_every_time`: whether `emit_every` is "processing" time, or "event" time, as the watermark measures it.
        - `errors_to`: see `KeyedStream.aggregate`. Rows are checked before it is known whether they are late.

        Count windows emit when they are full, or when their timeout has passed. Rows that are late for all their
        windows are dropped, counted in the metric `numLateRecordsDropped`, and are in `late_rows()` of the result. With
        an allowed lateness, sessions are emitted as changes. Raises ConfigurationError for columns that do not fit.

        Example:

            >>> orders.key_by("user").window(tg.Tumbling("2s")).aggregate(total=tg.sum("amount")).show()
            +------+--------------+------------+-------+
            | user | window_start | window_end | total |
            +------+--------------+------------+-------+
            | ann  |            0 |       2000 |    30 |
            | bob  |            0 |       2000 |     5 |
            | ann  |         2000 |       4000 |    12 |
            +------+--------------+------------+-------+
        """
        found, step = aggregates_and_options(
            "aggregate",
            mapping,
            aggregates,
            {
                "emit": (emit, "final"),
                "emit_every": (emit_every, None),
                "emit_every_time": (emit_every_time, "processing"),
                "name": (name, "window"),
                "uid": (uid, None),
                "parallelism": (parallelism, None),
                "errors_to": (errors_to, None),
            },
        )
        options = StepOptions(step["name"], step["uid"], step["parallelism"])
        emission = self._emission(step["emit"], step["emit_every"], step["emit_every_time"], options.name)
        return self._aggregated(found, emission, step["errors_to"], options)

    def _emission(self, emit: Any, every: Any, every_time: Any, name: str) -> _Emission:
        """Returns when and how often windows emit results, from the options. Raises ConfigurationError for options that
        these windows do not support.
        """
        spec = self._spec
        every_ms = None if every is None else parse_duration_ms(every, setting="emit_every")
        if every_ms == 0:
            raise ConfigurationError(
                f'{name}: emit_every must be greater than 0; emit="update" emits after each batch'
                '. Give a duration such as "10s"'
            )
        if every_time not in ("event", "processing"):
            raise ConfigurationError(f'{name}: emit_every_time must be "event" or "processing", not {every_time!r}')
        if every_time == "event" and every_ms is None:
            raise ConfigurationError(
                f'{name}: emit_every_time="event" needs emit_every=; give one such as emit_every="10s"'
            )
        if every_time == "event" and self._clock is not None:
            raise ConfigurationError(
                f'{name}: windows of processing time have no event time; remove emit_every_time="event"'
            )
        if emit not in ("final", "update", "changes"):
            raise ConfigurationError(f'{name}: emit must be "final", "update" or "changes", not {emit!r}')
        if isinstance(spec, Session) and (emit == "update" or every_ms is not None):
            raise ConfigurationError(
                f"{name}: a session that grows has other bounds, so its new result would not replace the earlier "
                'one; use emit="changes", which retracts the earlier result, and remove emit_every='
            )
        if emit == "changes" and not isinstance(spec, Session):
            raise ConfigurationError(
                f'{name}: emit="changes" is for sessions; results of {type(spec).__name__} keep their bounds, and '
                'replace each other: use emit="update"'
            )
        if every_ms is not None and emit != "final":
            raise ConfigurationError(
                f"{name}: emit={emit!r} emits after each batch, and emit_every= at intervals; remove one of them"
            )
        if isinstance(spec, Count) and (emit != "final" or every_ms is not None):
            raise ConfigurationError(
                f"{name}: count windows have no bounds, so a new result could not replace the earlier one; remove "
                'emit="update" and emit_every='
            )
        return _Emission(emit, every_ms, every_time == "event")

    def _aggregated(
        self,
        aggregates: Mapping[str, Aggregate],
        emission: _Emission,
        errors_to: OutputTag | str | None,
        options: StepOptions,
    ) -> Stream:
        keys, clock, lateness_ms = self._keys, self._clock, self._lateness_ms
        time = self._time if clock is None else clock
        self._check_parallelism(options)
        schema = self._stream.schema
        checked, errors = checked_inputs(self._stream, aggregates, errors_to, options, (LATE,))
        checked, spec, of_gap = self._with_gap(checked, options)
        gap = (spec.column,) if isinstance(spec, Session) and isinstance(spec.column, str) else ()
        rows, plain, computed = windowed_inputs(checked, (*keys, *gap), aggregates, options, self._replaced)
        computed = (*computed, *of_gap)
        # The factory travels to the tasks: it takes the columns along, and not the stream with its whole program.
        rows_schema = rows.schema

        def of_kind() -> AggregateWindows:
            if isinstance(spec, Count):
                kind = CountWindows if spec.slide is None else SlidingCountWindows
                return kind(keys, spec, plain, rows_schema)
            assert time is not None, "windows without a time"
            if isinstance(spec, Session):
                assert emission.emit != "update", "updates of sessions"
                return SessionWindows(keys, spec, plain, time, emission.emit, lateness_ms, rows_schema)
            assert emission.emit != "changes", "changes of windows that keep their bounds"
            return SlicedWindows(
                keys, spec, plain, time, emission.emit, lateness_ms, emission.every_ms, rows_schema, emission.by_event
            )

        def windows() -> AggregateWindows:
            made = of_kind()
            made.computed = computed
            return made

        operator = windows()  # checks the arguments
        has_late_rows = not isinstance(spec, Count) and clock is None
        combines = None
        if isinstance(spec, Tumbling | Sliding | Cumulating) and clock is None:
            combines = LocalAggregation(keys, plain, spec, self._time, LATE)
        elif not isinstance(spec, Session | Count):
            combines = LocalAggregation(keys, plain)
        result = (rows._by_keys(keys) if keys else rows)._then(
            Step(
                operator=windows,
                schema=None if rows_schema is None else operator.output_schema(rows_schema),
                options=options if keys else replace(options, parallelism=1),
                # A side output has known columns, so without a schema late rows cannot be read.
                side_outputs=(OutputTag(LATE, schema),) if has_late_rows and schema is not None else (),
                combines=combines,
                meaning=meaning(
                    "window aggregate",
                    {**self._facts(), "emit": emission.text},
                    aggregates=aggregates,
                    fields=operator.known_fields,
                    rows={"": (rows_schema, keys)},
                    evolves=emission.emit != "changes" and not (isinstance(spec, Session) and lateness_ms > 0),
                ),
            )
        )
        if isinstance(spec, Count):
            return result._derived(keyed_by=keys, errors_of=errors)
        bounds = (*keys, WINDOW_START, WINDOW_END)
        changelog = None
        if emission.is_early or lateness_ms > 0:
            changelog = ChangelogMode.of(result._inputs[0][0], bounds, changes=isinstance(spec, Session))
        # Bounds by the clock are not event time, and watermarks measure something else.
        timestamp = WindowEnd(WINDOW_END) if clock is None else None
        return result._derived(keyed_by=bounds, timestamp=timestamp, changelog=changelog, errors_of=errors)

    def _check_parallelism(self, options: StepOptions) -> None:
        if not self._keys and options.parallelism not in (None, 1):
            raise ConfigurationError(
                f"{options.name}: windows without keys run in one subtask; remove parallelism={options.parallelism}, "
                "or call key_by before window"
            )

    def _with_gap(self, stream: Stream, options: StepOptions) -> tuple[Stream, WindowsTaken, tuple[str, ...]]:
        """For sessions with a gap for each row, adds a column with the gap.

        Returns the stream, the window specification that reads this column, and the names of added columns. Raises
        ConfigurationError for a column that cannot be a gap.
        """
        spec = self._spec
        if not isinstance(spec, Session) or spec.column is None:
            return stream, spec, ()
        if self._replaced:
            from tidegate.operators.functions.projection import columns_read

            column = spec.column
            read = {column} if isinstance(column, str) else columns_read((column.expression,)) or self._replaced
            for each in sorted(read & self._replaced):
                raise ConfigurationError(
                    f"{options.name}: {spec!r} would read the key with which key_by has replaced column {each!r}; "
                    'give the key another name, as in key_by((...).alias("key"))'
                )
        if isinstance(spec.column, str):
            if stream.schema is not None:
                check_gap_column(stream.schema, spec.column)
            return stream, spec, ()
        made = stream._with_columns(
            [spec.column.expression.alias(GAP)], options.part("gap", stream._input_parallelism), own=(GAP,)
        )
        if made.schema is not None:
            check_gap_column(made.schema, GAP)
        return made, spec.of_column(GAP), (GAP,)

    def _facts(self) -> dict[str, object]:
        """Returns the description of the windows for the `StateMeaning` that checkpoints store."""
        return {
            "keys": self._keys,
            "window": window_text(self._spec),
            "time": time_text(self._clock or (None if isinstance(self._spec, Count) else self._time)),
            "allowed lateness": f"{self._lateness_ms} ms",
        }

    def apply(
        self,
        fn: WindowCall,
        *,
        schema: SchemaLike | None = None,
        name: str = "apply",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Stream:
        """Calls `fn` with all rows of each key and window, as an Arrow table, when the window has ended.

        - `fn`: takes a `pa.Table`, and returns new rows: a table, a batch, a polars DataFrame, a dict, an iterable of
          dicts, or None for no rows. The result has the keys, `window_start` and `window_end` before the columns of
          these rows.
        - `schema`: the columns that `fn` returns. Without it `fn` is called once with an empty table, and the columns
          are taken from its result, if that has columns.
        - `errors_to`: needs `schema`. A window for which `fn` raises does not fail the job: a row with the keys,
          `window_start`, `window_end` and `error` goes to the side output of that name.

        With an allowed lateness `fn` is called again, with all rows of the window, for each batch that has late rows
        for it. The result is then a stream of updates, as with `aggregate`, and `fn` may return at most one row. For
        sessions the result is then a stream of changes, and its columns must be known. Raises ConfigurationError for a
        function or columns that do not fit.

        Example:

            >>> def span(rows):
            ...     return {"orders": rows.num_rows, "first": rows["amount"][0].as_py()}
            >>> hours = orders.key_by("user").window(tg.Tumbling("1h"))
            >>> hours.apply(span, schema={"orders": int, "first": int}).show()
            +------+--------------+------------+--------+-------+
            | user | window_start | window_end | orders | first |
            +------+--------------+------------+--------+-------+
            | ann  |            0 |    3600000 |      2 |    30 |
            | bob  |            0 |    3600000 |      1 |     5 |
            +------+--------------+------------+--------+-------+
        """
        check_function(fn, name, "an Arrow table", "rows", may_yield=True)
        columns = as_schema(schema, f"{name}(schema=)") or returned_schema(fn) or returned_schema(fn, many=True)
        if columns is None and self._stream.schema is not None:
            columns = derived_schema(fn, plain_rows(self._stream.schema))
        options = StepOptions(name, uid, parallelism, slot=slot)
        return self._called(lambda *of: WindowCalls(fn, *of), "apply", columns, errors_to, options)

    def process(
        self,
        function: ProcessWindowFunction,
        *,
        schema: SchemaLike | None = None,
        name: str = "process",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Stream:
        """Calls a `tg.ProcessWindowFunction` with all rows of each key and window when the window has ended, like
        `apply`.

        The function gets the window, and has state of the key. For tumbling, sliding and cumulating windows of event
        time it also has state and timers of the window.

        - `function`: an object whose `process(rows, context)` is called with a `pa.Table`.
        - `schema`: the columns of the rows that the function returns. Needed if a table, an aggregate or a key follows.
        - `errors_to`: as in `apply`, and for timers as well. State and timers of a call that fails are rolled back.

        Raises ConfigurationError.

        Example:

            >>> class Total(tg.ProcessWindowFunction):
            ...     def process(self, rows, context):
            ...         return {"total": sum(rows["amount"].to_pylist())}
            >>> totals = orders.key_by("user").window(tg.Tumbling("1h")).process(Total(), schema={"total": int})
            >>> totals.columns
            ['user', 'window_start', 'window_end', 'total']
        """
        check_methods(function)
        columns = as_schema(schema, f"{name}(schema=)") or returned_schema(function, many=True, method="process")
        options = StepOptions(name, uid, parallelism, slot=slot)
        return self._called(lambda *of: FunctionCalls(function, *of), "process", columns, errors_to, options)

    def _called(
        self,
        calls: Callable[[tuple[str, ...], pa.Schema | None, pa.DataType | None, bool, OutputTag | None], WindowCalls],
        calls_of: str,
        returned: pa.Schema | None,
        errors_to: OutputTag | str | None,
        options: StepOptions,
    ) -> Stream:
        """Adds the operator that calls a function with the rows of each window.

        `calls` creates the caller of the function. Its arguments are the keys, the columns that the function returns,
        the type of window bounds, whether results replace each other, and the tag of windows that fail.
        """
        keys, stream, name = self._keys, self._stream, options.name
        rows_schema = known_schema(stream, name)
        with_gap, spec, of_gap = self._with_gap(stream, options)
        self._check_parallelism(options)
        lateness_ms = self._lateness_ms
        time = self._time if self._clock is None else self._clock
        bounds = None if isinstance(spec, Count) else bounds_type(rows_schema, time, spec)
        of_windows = [] if bounds is None else [pa.field(WINDOW_START, bounds), pa.field(WINDOW_END, bounds)]
        heads = [*key_schema(rows_schema, keys), *of_windows]
        errors = None if errors_to is None else error_tag(errors_to, pa.schema(heads), name)
        if errors is not None and returned is None:
            raise ConfigurationError(
                f"{name}: errors_to= needs schema=, because a window whose results do not fit it fails"
            )

        def windows() -> WindowBuffer:
            called = calls(keys, returned, bounds, lateness_ms > 0, errors)
            if isinstance(spec, Count):
                kind = FunctionCounts if spec.slide is None else FunctionSlidingCounts
                return kind(keys, spec, rows_schema, called)
            assert time is not None, "windows without a time"
            if isinstance(spec, Session):
                made = FunctionSessions(keys, spec, time, rows_schema, called, lateness_ms)
                made.computed = of_gap
                return made
            return FunctionWindows(keys, spec, time, rows_schema, called, lateness_ms)

        windows()  # checks the arguments
        check_no_doubles(() if returned is None else returned.names, (*keys, WINDOW_START, WINDOW_END))
        output = None if returned is None else pa.schema([*heads, *returned])
        changes = isinstance(spec, Session) and lateness_ms > 0
        if output is not None and changes:
            output = with_kind(output)
        has_bounds = not isinstance(spec, Count) and self._clock is None
        late = (OutputTag(LATE, rows_schema),) if has_bounds else ()
        side_outputs = late if errors is None else (*late, errors)
        check_tags(name, side_outputs)
        means = meaning("window function", {**self._facts(), "calls": calls_of}, rows={"": (rows_schema, keys)})
        result = (with_gap._by_keys(keys) if keys else with_gap)._then(
            Step(
                operator=windows,
                schema=output,
                options=options if keys else replace(options, parallelism=1),
                side_outputs=side_outputs,
                meaning=with_rows(means, rows=plain_rows(rows_schema)),
            )
        )
        timestamp = WindowEnd(WINDOW_END) if has_bounds else None
        if not lateness_ms:
            return result._derived(keyed_by=keys, timestamp=timestamp)
        replaces = (*keys, WINDOW_START, WINDOW_END)
        changelog = ChangelogMode.of(result._inputs[0][0], replaces, changes=changes)
        return result._derived(keyed_by=replaces, timestamp=timestamp, changelog=changelog)

    def top_n(
        self,
        n: int,
        by: str | Sequence[str],
        *,
        descending: bool | Sequence[bool] = True,
        nulls_last: bool | Sequence[bool] | None = None,
        rank: str | None = None,
        ties: bool = False,
        name: str = "top_n",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Emits the first `n` rows of each key and window, in the order of the columns `by`, when the window ends.

        The result has the columns of the rows, `window_start`, `window_end` and, if it has a name, `rank`. Rows are
        emitted once. Late rows are dropped, counted, and are in `late_rows()` of the result, once for each window that
        they miss. See `docs/top-n.md`.

        - `n`: the number of rows, at least 1.
        - `by`: a column, or several, the most important first.
        - `descending`: whether the greatest value is first; one value for all of `by`, or one for each.
        - `nulls_last`: by default nulls are last if the order descends, and first if it ascends, as in Spark.
        - `rank`: the name of a column for the rank, which counts from 1.
        - `ties`: rows that are equal in all of `by` share a rank, so there may be more than `n`. Without it the row
          that arrived first is first.

        Raises ConfigurationError for session and count windows, and for windows of processing time.

        Example:

            >>> orders.window(tg.Tumbling("1h")).top_n(1, by="amount").show()
            +------+--------+----+--------------+------------+
            | user | amount | at | window_start | window_end |
            +------+--------+----+--------------+------------+
            | ann  |     30 |  0 |            0 |    3600000 |
            +------+--------+----+--------------+------------+
        """
        spec = self._spec
        if isinstance(spec, Session | Count):
            raise ConfigurationError(f"{name}: {spec!r}: top_n takes tg.Tumbling, tg.Sliding or tg.Cumulating")
        if self._clock is not None:
            raise ConfigurationError(f'{name}: top_n is for windows of event time; remove time="processing"')
        if self._lateness_ms:
            raise ConfigurationError(
                f"{name}: the first rows of a window are emitted once, when it ends; remove allowed_lateness, and give "
                "the event time a larger max_out_of_orderness"
            )
        ranking = ranking_of(window_keys(self._keys), n, by, descending, rank, "final", ties, nulls_last)
        return ranked_windows(self._stream, ranking, spec, StepOptions(name, uid, parallelism))


@dataclass(frozen=True, slots=True)
class _Emission:
    """When results of windows are emitted, from the options `emit`, `emit_every` and `emit_every_time`."""

    emit: Literal["final", "update", "changes"]
    every_ms: int | None
    by_event: bool

    @property
    def is_early(self) -> bool:
        """Returns True if results are emitted before the window has ended."""
        return self.emit != "final" or self.every_ms is not None

    @property
    def text(self) -> str:
        """Returns the canonical text of the emission, for the `StateMeaning` that checkpoints store."""
        if self.every_ms is None:
            return self.emit
        return f"every {self.every_ms} ms{' of event time' if self.by_event else ''}"
