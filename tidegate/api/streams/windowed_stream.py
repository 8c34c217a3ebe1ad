"""`WindowedStream`: rows in windows. Made by `KeyedStream.window`, and by `Stream.window` for all rows.

What comes out has the keys, `window_start`, `window_end`, and the aggregates. Its event time is the last millisecond of
the window, so it can be windowed again. Count windows have neither bounds nor event time, those of
processing time have bounds by the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Generic, Literal, TypeVar, Unpack

import pyarrow as pa

from tidegate.api.streams.steps.event_time_use import uses_event_time
from tidegate.api.streams.steps.known_columns import known_schema
from tidegate.api.streams.steps.meanings import meaning, time_text, window_text, with_rows
from tidegate.api.streams.steps.method_checks import check_methods
from tidegate.api.streams.steps.named_columns import aggregates_and_options
from tidegate.api.streams.steps.other_names import WINDOWED_STREAMS, OtherNames
from tidegate.api.streams.steps.slot_options import SlotOptions
from tidegate.api.streams.steps.updating import Updating
from tidegate.api.streams.stream_aggregates import checked_inputs, windowed_inputs
from tidegate.api.streams.stream_ranking import ranked_windows, ranking_of, window_keys
from tidegate.api.streams.stream_tables import StreamTables
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.changes import with_kind
from tidegate.operators.functions.failing_rows import error_tag
from tidegate.operators.local_aggregation.local_aggregation import LocalAggregation
from tidegate.operators.state.keys import key_schema
from tidegate.operators.watermarks.late_rows import LATE
from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.operators.windows.applied_counts import AppliedCounts, AppliedSlidingCounts
from tidegate.operators.windows.applied_sessions import AppliedSessions
from tidegate.operators.windows.applied_windows import AppliedWindows
from tidegate.operators.windows.count_windows import CountWindows
from tidegate.operators.windows.process_windows import FunctionCalls, ProcessWindowFunction
from tidegate.operators.windows.row_gaps import GAP, check_gap_column
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.sliding_counts import SlidingCountWindows
from tidegate.operators.windows.window_buffer import WindowBuffer, plain_rows
from tidegate.operators.windows.window_calls import (
    WindowCall,
    WindowCalls,
    check_no_doubles,
    derived_schema,
)
from tidegate.operators.windows.window_operator import WindowOperator
from tidegate.operators.windows.window_rows import WINDOW_END, WINDOW_START, bounds_type
from tidegate.operators.windows.window_specs import Clock, Count, Cumulating, Session, Sliding, Tumbling
from tidegate.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.protocol.side_outputs import OutputTag, check_tags
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema
from tidegate.storage.units import parse_duration_ms

WindowsTaken = Tumbling | Sliding | Cumulating | Session | Count
WindowTime = Literal["event", "processing"]
S = TypeVar("S", bound=StreamTables)
T = TypeVar("T", bound=StreamTables)


class WindowedStream(OtherNames, Generic[S]):
    """Rows of a stream by window, and by key if there are keys.

    `made` makes the stream of the results. `replaced` are columns whose place a key has taken.
    """

    _other_names = WINDOWED_STREAMS

    def __init__(
        self,
        stream: StreamTables,
        keys: tuple[str, ...],
        spec: WindowsTaken,
        made: Callable[..., S],
        time: WindowTime = "event",
        fire_at_end: bool = False,
        lateness_ms: int = 0,
        replaced: frozenset[str] = frozenset(),
    ) -> None:
        if not isinstance(spec, WindowsTaken):
            kinds = "tg.Tumbling, tg.Sliding, tg.Cumulating, tg.Session or tg.Count"
            raise ConfigurationError(f"window takes {kinds}, not {spec!r}")
        if time not in ("event", "processing"):
            raise ConfigurationError(f'window: time must be "event" or "processing", not {time!r}')
        if isinstance(spec, Count):
            if time != "event":
                raise ConfigurationError(f"{spec!r}: windows of rows have no time; leave time= out")
            if fire_at_end:
                spec, fire_at_end = replace(spec, fire_at_end=True), False
        if time == "event" and fire_at_end:
            raise ConfigurationError(
                'window: fire_at_end= is for time="processing" and tg.Count; windows of event time all end with the '
                "input"
            )
        if stream.timestamp is None and time == "event" and not isinstance(spec, Count):
            raise ConfigurationError(
                "window: the stream has no event time; name its column in the source (timestamp=...), or call "
                'assign_timestamps before; or take processing time: window(..., time="processing")'
            )
        if time == "event" and not isinstance(spec, Count):
            uses_event_time("window", stream._inputs)
        self._stream, self._keys, self._spec, self._time = stream, keys, spec, stream.timestamp
        self._made = made
        self._clock = Clock(fire_at_end) if time == "processing" else None
        self._lateness_ms, self._replaced = lateness_ms, replaced

    def allowed_lateness(self, lateness: str | timedelta | int) -> WindowedStream[S]:
        """Keep windows for so long after their end. A row that comes meanwhile gives a new result at once."""
        if isinstance(self._spec, Count):
            raise ConfigurationError(f"{self._spec!r}: count windows have no late rows; remove allowed_lateness=")
        if self._clock is not None:
            raise ConfigurationError("window: no row is late for processing time; leave allowed_lateness out")
        parsed = parse_duration_ms(lateness, setting="allowed_lateness")
        return WindowedStream(
            self._stream, self._keys, self._spec, self._made, lateness_ms=parsed, replaced=self._replaced
        )

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
    ) -> S:
        """Aggregate each key and window: `aggregate(n=tg.count(), worst=tg.max("delay"))`.

        An aggregate under the word of an option is one of that name, and a mapping has aggregates only:
        `aggregate({"name": tg.first("full_name")})`.

        emit="final" gives one row for each, when the watermark passes the window's end. With an allowed lateness later
        rows replace it. emit="update" gives the result so far after each batch, for the keys and windows in it. Rows
        that replace others go to a table with mode="upsert" and as keys the keys, `window_start` and `window_end`.

        With `emit_every="10s"` results so far come out every ten seconds of processing time, for the keys and windows
        that have changed meanwhile, and what has not come out yet when a window ends. They replace others too. With
        `emit_every_time="event"` they come out each time the watermark has passed another ten seconds.

        A session that grows has other bounds, so its new result would not replace the one before. With an allowed
        lateness, or with emit="changes" (the result so far after each batch), sessions are changes: the column
        `row_kind` says whether a row comes or is taken back.

        Count windows come out when they are full, or when their time-out comes. Rows that come too late for
        all their windows are dropped, counted as `numLateRecordsDropped`, and in `late_rows()` of the result. The event
        time of a result is the last millisecond of its window; of windows of processing time there is none.
        ConfigurationError for columns that do
        not fit.

        `errors_to`: see `KeyedStream.aggregate`. Rows are tried when they come, also those that then come too late.
        """
        found, step = aggregates_and_options(
            "aggregate",
            mapping,
            aggregates,
            {
                "emit": emit,
                "emit_every": emit_every,
                "emit_every_time": emit_every_time,
                "name": name,
                "uid": uid,
                "parallelism": parallelism,
                "errors_to": errors_to,
            },
            {
                "emit": "final",
                "emit_every": None,
                "emit_every_time": "processing",
                "name": "window",
                "uid": None,
                "parallelism": None,
                "errors_to": None,
            },
        )
        return self._aggregated(found, **step)

    def _aggregated(
        self,
        aggregates: Mapping[str, Aggregate],
        emit: Literal["final", "update", "changes"],
        emit_every: str | timedelta | int | None,
        emit_every_time: WindowTime,
        name: str,
        uid: str | None,
        parallelism: int | None,
        errors_to: OutputTag | str | None,
    ) -> S:
        keys, spec, clock, lateness_ms = self._keys, self._spec, self._clock, self._lateness_ms
        time = self._time if clock is None else clock
        every_ms = None if emit_every is None else parse_duration_ms(emit_every, setting="emit_every")
        if every_ms == 0:
            raise ConfigurationError(f'{name}: emit_every must be greater than 0; emit="update" is after each batch')
        by_event = emit_every_time == "event"
        if emit_every_time not in ("event", "processing"):
            raise ConfigurationError(
                f'{name}: emit_every_time must be "event" or "processing", not {emit_every_time!r}'
            )
        if by_event and every_ms is None:
            raise ConfigurationError(f'{name}: emit_every_time="event" needs emit_every="10s" or the like')
        if by_event and clock is not None:
            raise ConfigurationError(
                f'{name}: windows of processing time have no event time; leave emit_every_time="event" out'
            )
        if emit not in ("final", "update", "changes"):
            raise ConfigurationError(f'{name}: emit must be "final", "update" or "changes", not {emit!r}')
        early = emit != "final" or every_ms is not None
        if isinstance(spec, Session) and (emit == "update" or every_ms is not None):
            raise ConfigurationError(
                f"{name}: a session that grows has other bounds, so its new result would not replace the one before; "
                'use emit="changes", which takes that back, and leave emit_every out'
            )
        if emit == "changes" and not isinstance(spec, Session):
            raise ConfigurationError(
                f'{name}: emit="changes" is for sessions; results of {type(spec).__name__} keep their bounds, and '
                'replace each other: use emit="update"'
            )
        if every_ms is not None and emit != "final":
            raise ConfigurationError(
                f"{name}: emit={emit!r} is after each batch, and emit_every= every so often; leave one of them out"
            )
        if isinstance(spec, Count) and early:
            raise ConfigurationError(
                f"{name}: count windows have no bounds by which an update could replace the one before; "
                'leave emit="update" and emit_every out'
            )
        if not keys and parallelism not in (None, 1):
            raise ConfigurationError(f"{name}: windows of all rows are in one subtask; leave parallelism= out")
        schema = self._stream.schema
        checked, errors = checked_inputs(self._stream, aggregates, errors_to, name, uid, (LATE,))
        checked, spec, of_gap = self._with_gap(checked, name, uid)
        gap = (spec.column,) if isinstance(spec, Session) and isinstance(spec.column, str) else ()
        rows, plain, computed = windowed_inputs(checked, (*keys, *gap), aggregates, name, uid, self._replaced)
        computed = (*computed, *of_gap)
        # The factory travels to the tasks: it takes the columns along, and not the stream with its whole program.
        rows_schema = rows.schema

        def of_kind() -> WindowOperator:
            if isinstance(spec, Count):
                kind = CountWindows if spec.slide is None else SlidingCountWindows
                return kind(keys, spec, plain, rows_schema)
            assert time is not None, "windows without a time"
            if isinstance(spec, Session):
                assert emit != "update", "updates of sessions"
                return SessionWindows(keys, spec, plain, time, emit, lateness_ms, rows_schema)
            assert emit != "changes", "changes of windows that keep their bounds"
            return SlicedWindows(keys, spec, plain, time, emit, lateness_ms, every_ms, rows_schema, by_event)

        def windows() -> WindowOperator:
            made = of_kind()
            made.computed = computed
            return made

        output = None if rows.schema is None else windows().output_schema(rows.schema)
        windows()  # so that wrong arguments are refused here
        # Without a schema nobody can read late rows: a side output says which columns it has.
        none_is_late = isinstance(spec, Count) or clock is not None
        late = () if schema is None or none_is_late else (OutputTag(LATE, schema),)
        if keys:
            rows = rows._partitioned(Partitioning(PartitioningKind.HASH, keys))
        combines = None
        if isinstance(spec, Tumbling | Sliding | Cumulating) and clock is None:
            combines = LocalAggregation(keys, plain, spec, self._time, LATE)
        elif not isinstance(spec, Session | Count):
            combines = LocalAggregation(keys, plain)
        result = rows._then(
            windows,
            output,
            name,
            uid,
            parallelism if keys else 1,
            side_outputs=late,
            combines=combines,
            meaning=meaning(
                "window aggregate",
                {
                    **self._facts(),
                    "emit": emit if every_ms is None else f"every {every_ms} ms{' of event time' if by_event else ''}",
                },
                aggregates=aggregates,
                fields=windows().known_fields,
                rows={"": (rows.schema, keys)},
                evolves=emit != "changes" and not (isinstance(spec, Session) and lateness_ms > 0),
            ),
        )
        if isinstance(spec, Count):
            return self._made(self._stream._program, result._inputs, keys, errors_of=errors)
        node = result._inputs[0][0]
        replaced = (*keys, WINDOW_START, WINDOW_END)
        updates = early or lateness_ms > 0
        made_by, changes = f"{node.name!r} (uid {node.uid!r})", isinstance(spec, Session)
        updating = Updating(replaced, made_by, changes) if updates else None
        # The bounds are not event time then, and watermarks are of something else.
        timestamp = WindowEnd(WINDOW_END) if clock is None else None
        return self._made(self._stream._program, result._inputs, replaced, timestamp, updating, errors)

    def _with_gap(self, stream: T, name: str, uid: str | None) -> tuple[T, WindowsTaken, tuple[str, ...]]:
        """The stream with the gap of each row as a column, the windows by this column, and the column if it is new.

        Raises ConfigurationError for a gap that is none.
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
                    f"{name}: {spec!r} would read the key that key_by has put in the place of column {each!r}; give "
                    'the key a name of its own: key_by((...).alias("key"))'
                )
        if isinstance(spec.column, str):
            if stream.schema is not None:
                check_gap_column(stream.schema, spec.column)
            return stream, spec, ()
        made = stream._with_columns(
            [spec.column.expression.alias(GAP)],
            f"{name} gap",
            None if uid is None else f"{uid}-gap",
            stream._input_parallelism,
            own=(GAP,),
        )
        if made.schema is not None:
            check_gap_column(made.schema, GAP)
        return made, spec.of_column(GAP), (GAP,)

    def _facts(self) -> dict[str, object]:
        """What the windows are, for the meaning of the state."""
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
    ) -> S:
        """Call `fn` with all rows of each key and window, as an Arrow table, when the window has ended.

        It returns new rows: a table, a batch, a polars DataFrame, a dict, an iterable of dicts, or None for no rows.
        The result has the keys, `window_start` and `window_end` before these columns. `schema` is that of what `fn`
        returns; without it `fn` is called once with an empty table, and the columns are those of what it returns then,
        if that has some.

        Rows come once; with an allowed lateness all rows of a window come again with each batch that has late ones for
        it. Then the result is updates, as of `aggregate`, and `fn` returns one row at most. Sessions are changes then,
        whose columns must be known. Rows that come too late are dropped, counted, and in `late_rows()`.

        With `errors_to`, which needs `schema`, a window for which `fn` raises does not fail the job: a row with the
        keys, `window_start`, `window_end` and `error` goes to the side output of that name, in place of a result. The
        rows of the window go when they would have gone otherwise. Raises ConfigurationError.
        """
        if not callable(fn):
            raise ConfigurationError(f"{name}: {fn!r} is no function; it takes one of an Arrow table")
        schema = as_schema(schema, f"{name}(schema=)") or returned_schema(fn) or returned_schema(fn, many=True)
        if schema is None and self._stream.schema is not None:
            schema = derived_schema(fn, plain_rows(self._stream.schema))
        return self._called(lambda *of: WindowCalls(fn, *of), "apply", schema, name, uid, parallelism, slot, errors_to)

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
    ) -> S:
        """Call a `tg.ProcessWindowFunction` as `apply` calls a function.

        It knows the window, and has state of the key. Tumbling, sliding and cumulating windows of event time have state
        and timers of their own.

        `schema` is that of the rows that it returns; give it if a table, an aggregate or a key follows. `errors_to` is
        that of `apply`, and for timers as well: what a call that fails has put into state, and registered, is taken
        back.
        """
        check_methods(function)
        schema = as_schema(schema, f"{name}(schema=)") or returned_schema(function, many=True, method="process")
        return self._called(
            lambda *of: FunctionCalls(function, *of), "process", schema, name, uid, parallelism, slot, errors_to
        )

    def _called(
        self,
        calls: Callable[[tuple[str, ...], pa.Schema | None, pa.DataType | None, bool, OutputTag | None], WindowCalls],
        calls_of: str,
        returned: pa.Schema | None,
        name: str,
        uid: str | None,
        parallelism: int | None,
        slot: SlotOptions,
        errors_to: OutputTag | str | None,
    ) -> S:
        """The results of a function.

        `calls` makes its calls, for keys, the columns that it returns, bounds, whether results replace each other, and
        the tag of windows that fail.
        """
        keys, stream = self._keys, self._stream
        rows_schema = known_schema(stream, name)
        with_gap, spec, of_gap = self._with_gap(stream, name, uid)
        if not keys and parallelism not in (None, 1):
            raise ConfigurationError(f"{name}: windows of all rows are in one subtask; leave parallelism= out")
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
                kind = AppliedCounts if spec.slide is None else AppliedSlidingCounts
                return kind(keys, spec, rows_schema, called)
            assert time is not None, "windows without a time"
            if isinstance(spec, Session):
                made = AppliedSessions(keys, spec, time, rows_schema, called, lateness_ms)
                made.computed = of_gap
                return made
            return AppliedWindows(keys, spec, time, rows_schema, called, lateness_ms)

        windows()  # so that wrong arguments are refused here
        check_no_doubles(() if returned is None else returned.names, (*keys, WINDOW_START, WINDOW_END))
        output = None if returned is None else pa.schema([*heads, *returned])
        changes = isinstance(spec, Session) and lateness_ms > 0
        if output is not None and changes:
            output = with_kind(output)
        late = () if isinstance(spec, Count) or self._clock is not None else (OutputTag(LATE, rows_schema),)
        side_outputs = late if errors is None else (*late, errors)
        check_tags(name, side_outputs)
        rows = with_gap._partitioned(Partitioning(PartitioningKind.HASH, keys)) if keys else with_gap
        means = meaning("window function", {**self._facts(), "calls": calls_of}, rows={"": (rows_schema, keys)})
        result = rows._then(
            windows,
            output,
            name,
            uid,
            parallelism if keys else 1,
            slot=slot,
            side_outputs=side_outputs,
            meaning=with_rows(means, rows=plain_rows(rows_schema)),
        )
        timestamp = None if isinstance(spec, Count) or self._clock is not None else WindowEnd(WINDOW_END)
        if not lateness_ms:
            return self._made(stream._program, result._inputs, keys, timestamp)
        node, replaced = result._inputs[0][0], (*keys, WINDOW_START, WINDOW_END)
        updating = Updating(replaced, f"{node.name!r} (uid {node.uid!r})", changes)
        return self._made(stream._program, result._inputs, replaced, timestamp, updating)

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
    ) -> S:
        """The first `n` rows of each key and window, when it ends: `window(tg.Tumbling("10s")).top_n(1, by="price")`.

        The columns are those of the rows, `window_start`, `window_end` and, if it has a name, `rank`, from 1. Of rows
        that are equal in all of `by` the first to arrive is before the others; with `ties` they share a rank, and there
        may be more than `n`. Nulls stand as with `KeyedStream.top_n`. Rows come out once, and stand for themselves;
        their event time is the last millisecond of the window. Rows that come too late are dropped, counted, and in
        `late_rows()` of the result, once for each window that they miss. See `docs/top-n.md`.
        Raises ConfigurationError.
        """
        spec = self._spec
        if isinstance(spec, Session | Count):
            raise ConfigurationError(f"{name}: {spec!r}: top_n takes tg.Tumbling, tg.Sliding or tg.Cumulating")
        if self._clock is not None:
            raise ConfigurationError(f'{name}: top_n is for windows of event time; leave time="processing" out')
        if self._lateness_ms:
            raise ConfigurationError(
                f"{name}: the first rows of a window come out once, when it ends; leave allowed_lateness out, and give "
                "the event time a larger max_out_of_orderness"
            )
        ranking = ranking_of(window_keys(self._keys), n, by, descending, rank, "final", ties, nulls_last)
        made = ranked_windows(self._stream, ranking, spec, name, uid, parallelism)
        return self._made(self._stream._program, made._inputs, ranking.keys, made.timestamp)
