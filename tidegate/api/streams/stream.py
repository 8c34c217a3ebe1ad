"""`Stream` and `KeyedStream`: a driver script describes its job with them.

Nothing runs before `StreamEnvironment.execute`. What is known to be wrong raises ConfigurationError in the call that
says it. The two classes make each other, so they share a module; `steps/stream_steps.py` has the steps from a stream to
another one of its kind, `stream_tables.py` those that write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

import pyarrow as pa

from tidegate.api.streams.connected_streams import ConnectedStreams
from tidegate.api.streams.steps.columns import check_keys
from tidegate.api.streams.steps.event_time_use import uses_event_time
from tidegate.api.streams.steps.given import check_function, check_stream
from tidegate.api.streams.steps.known_columns import known_schema
from tidegate.api.streams.steps.meanings import column_of, meaning, time_text, ttl_text, with_rows
from tidegate.api.streams.steps.method_checks import check_methods
from tidegate.api.streams.steps.named_columns import aggregates_and_options
from tidegate.api.streams.steps.other_names import KEYED_STREAMS, OtherNames
from tidegate.api.streams.steps.same_columns import with_same_columns
from tidegate.api.streams.steps.slot_options import SlotOptions
from tidegate.api.streams.steps.stream_verbs import StreamVerbs
from tidegate.api.streams.steps.updating import Updating, united
from tidegate.api.streams.stream_aggregates import Life, aggregated, aggregated_all, checked_inputs
from tidegate.api.streams.stream_ranking import RankEmit, ranked_stream, ranked_windows, ranking_of
from tidegate.api.streams.stream_tables import StreamTables
from tidegate.api.streams.windowed_stream import WindowedStream, WindowsTaken, WindowTime
from tidegate.api.tables.shown_rows import html_columns
from tidegate.connectors.bad_rows import BAD_ROWS
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.functions.batch_functions import Row
from tidegate.operators.functions.event_time_order import EventTimeOrder
from tidegate.operators.functions.failing_rows import error_tag
from tidegate.operators.functions.process_batches import process_operator
from tidegate.operators.functions.process_functions import MapGroups, ProcessFunction, Reduce, StatefulMap
from tidegate.operators.ranking.deduplicate import Deduplicate
from tidegate.operators.state.ttl import StateTtl
from tidegate.operators.watermarks.late_rows import LATE
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WindowEnd, same_time
from tidegate.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.protocol.side_outputs import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import polars as pl


class Stream(StreamTables, StreamVerbs):
    """Batches of rows with the same columns. `schema` is None where it is known only when the job runs.

    Every method that adds an operator takes `name` (shown to people), `uid` (names its state in checkpoints; set it on
    operators whose state must survive a changed program) and `parallelism` (default: the environment's). Those that
    call a function with rows take `batch_rows`: the least and the most rows of a call (see `docs/batches.md`). They
    also take `num_cpus`, `num_gpus` and `resources`: what each subtask reserves on Ray, or `slot_sharing_group`: the
    name of the slots that the step shares with others (see `docs/placement.md`). Steps without one are in the group of
    their inputs.
    """

    def union(self, *others: Stream, by_name: bool = False, allow_missing: bool = False) -> Stream:
        """All rows of several streams with the same columns, in no particular order.

        With `by_name` columns may stand in any order, and a type may be wider in one stream: int64 where others have
        int32. With `allow_missing` as well, a column that a stream lacks is null in its rows. ConfigurationError if a
        column has types of which none has the values of all.
        """
        for other in others:
            check_stream(other, Stream, "union")
        if allow_missing and not by_name:
            raise ConfigurationError("union: allow_missing=True needs by_name=True, because names tell what is missing")
        updating = united([(stream._updating, stream._input_parallelism) for stream in (self, *others)])
        for other in others:
            if other._program is not self._program:
                raise ConfigurationError("union: the streams belong to different environments")
        if by_name:
            first, *rest = with_same_columns((self, *others), allow_missing)
            return first.union(*rest)
        for other in others:
            if self.schema is not None and other.schema is not None and not self.schema.equals(other.schema):
                mine, theirs = columns_text(self.schema), columns_text(other.schema)
                raise ConfigurationError(f"union: the streams have different columns: {mine} and {theirs}")
        timestamp = self.timestamp if all(same_time(other.timestamp, self.timestamp) for other in others) else None
        inputs = tuple(i for stream in (self, *others) for i in stream._inputs)
        return Stream(self._program, inputs, (), timestamp, updating)

    def connect(self, other: Stream | KeyedStream) -> ConnectedStreams[Stream]:
        """This stream and another one, for one operator to process: `a.connect(b).key_by("k", "k2").process(...)`."""
        return _connected(self, other)

    def key_by(self, *keys: str | pl.Expr) -> KeyedStream:
        """Send rows of the same key to the same subtask. Keys are columns: ints, floats, strings, dates, nulls.

        A key may be a polars expression, which adds a column: `key_by((pl.col("n") % 2).alias("odd"))`. As in
        `with_columns`, one that is called as a column takes its place.
        """
        if not keys:
            raise ConfigurationError("key_by needs at least one column")
        stream, names, replaced = self, tuple(map(str, keys)), frozenset[str]()
        if not all(isinstance(key, str) for key in keys):
            from tidegate.api.streams.steps.aggregate_inputs import key_expressions

            names, expressions, replaced = key_expressions(keys, self.schema)
            if expressions:
                stream = self._with_columns(expressions, "key_by", None, self._input_parallelism, are_keys=True)
        check_keys(names, stream.schema)
        if self._updating is not None:
            self._updating.check_kind_is_no_key("key_by", names)
        return KeyedStream(stream, names, replaced)

    def distinct(
        self,
        *columns: str,
        ttl: str | timedelta | int | None = None,
        name: str = "distinct",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """The first row of each combination of values in `columns`, or in all columns: `distinct("user", "day")`.

        It is `key_by(columns).deduplicate()`. `ttl` bounds the state, as there. ConfigurationError for columns that
        cannot be keys.
        """
        keys = columns or tuple(known_schema(self, name).names)
        return self.key_by(*keys).deduplicate(ttl=ttl, name=name, uid=uid, parallelism=parallelism)

    def aggregate(
        self,
        mapping: Mapping[str, Aggregate] | None = None,
        /,
        *,
        emit: Literal["update", "changes", "final"] | Aggregate = "update",
        name: str | Aggregate = "aggregate",
        uid: str | Aggregate | None = None,
        errors_to: OutputTag | str | Aggregate | None = None,
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregate all rows: `aggregate(n=tg.count(), worst=tg.max("delay"), emit="final")`.

        `emit`, `name` and `uid` are those of the step. An aggregate under such a word is one of that name, and a
        mapping has aggregates only: `aggregate({"name": tg.first("full_name")})`.

        Each subtask makes one row of a batch, and a single one merges these. With emit="final" there is one row at the
        end of a bounded input; with emit="update" one after each batch, which takes the place of the one before it.
        With emit="changes" that one is taken back, and the stream may have changes itself (`docs/changes.md`).
        `errors_to`: see `KeyedStream.aggregate`.
        """
        found, step = aggregates_and_options(
            "aggregate",
            mapping,
            aggregates,
            {"emit": emit, "name": name, "uid": uid, "errors_to": errors_to},
            {"emit": "update", "name": "aggregate", "uid": None, "errors_to": None},
        )
        rows, errors = checked_inputs(self, found, step["errors_to"], step["name"], step["uid"])
        made = aggregated_all(rows, found, step["emit"], step["name"], step["uid"])
        made = made._keyed((), updates=step["emit"] == "update", changes=step["emit"] == "changes")
        return made._with_errors_of(errors)

    def side_output(self, tag: OutputTag | str) -> Stream:
        """The rows that the step before has emitted under one of its tags: `checked.side_output("bad")`.

        Call it on the stream that this step returned. Exactly once, as the other rows. Without a reader they are
        dropped. ConfigurationError if the step has no such side output.
        """
        if len(self._inputs) > 1:
            raise ConfigurationError("side_output: several streams are united here; call it on the one of the step")
        (made, _), name = self._inputs[0], tag.name if isinstance(tag, OutputTag) else tag
        if self._errors_of is not None and name in [known.name for known in self._errors_of.side_outputs]:
            made = self._errors_of
        aside = made.side_output(name)
        kept = aside.schema is not None and self.timestamp in aside.schema.names
        # Rows beside the results of a window are none: a column of theirs may be called `window_end`, too.
        kept = kept and not isinstance(self.timestamp, WindowEnd)
        return Stream(self._program, ((aside, None),), (), self.timestamp if kept else None)

    def window(
        self, spec: WindowsTaken, *, time: WindowTime = "event", fire_at_end: bool = False
    ) -> WindowedStream[Stream]:
        """All rows by window, in one subtask: `window(tg.Tumbling("1h")).aggregate(n=tg.count())`. As with keys."""
        return WindowedStream(self, (), spec, Stream, time, fire_at_end)

    def late_rows(self) -> Stream:
        """The rows that came too late for the windows of the step before: call it on what `aggregate` returned."""
        return self.side_output("late")

    def bad_rows(self) -> Stream:
        """The dead letters of the source that this stream begins with, which was given `bad_rows="side"`.

        Each has the columns that say where it was (`docs/sources.md`), `raw`, its bytes, and `error`, the reason.
        Exactly once, as the other rows: `orders.bad_rows().to_table("dead")`. Raises ConfigurationError.
        """
        node = self._inputs[0][0].maker
        while node.source is None and len(node.inputs) == 1:
            node = node.inputs[0][0].maker
        if len(self._inputs) > 1 or node.source is None:
            raise ConfigurationError("bad_rows: this stream has several sources; call it on what one of them returned")
        if not node.side_outputs:
            raise ConfigurationError(
                f'bad_rows: source {node.name!r} (uid {node.uid!r}) keeps no dead letters; give it bad_rows="side"'
            )
        return Stream(self._program, ((node.side_output(BAD_ROWS), None),))

    def _keyed(self, keys: tuple[str, ...], updates: bool, changes: bool = False) -> Stream:
        """The output of an aggregate: one subtask has all rows of a key. With `updates` they replace each other."""
        node = self._inputs[0][0]
        updating = Updating(keys, f"{node.name!r} (uid {node.uid!r})", changes) if updates or changes else None
        return Stream(self._program, self._inputs, keys, self.timestamp, updating)


class KeyedStream(OtherNames):
    """A stream partitioned by key."""

    _other_names = KEYED_STREAMS

    def __init__(self, stream: Stream, keys: tuple[str, ...], replaced: frozenset[str] = frozenset()) -> None:
        self._replaced = replaced
        self.stream = stream
        """The rows, not partitioned yet."""
        self.keys = keys
        """The key columns."""

    def __repr__(self) -> str:
        return f"KeyedStream(by {', '.join(self.keys)}; {self.stream!r})"

    def _repr_html_(self) -> str:
        """The keys, and the columns and their types, for notebooks."""
        return html_columns(f"KeyedStream by {', '.join(self.keys)}", self.stream.schema)

    def _by_key(self) -> Stream:
        """The rows, partitioned by key on their way into the next operator."""
        return self.stream._partitioned(Partitioning(PartitioningKind.HASH, self.keys))

    def window(
        self, spec: WindowsTaken, *, time: WindowTime = "event", fire_at_end: bool = False
    ) -> WindowedStream[Stream]:
        """The rows of each key by window of event time: `tg.Tumbling("1h")`, `tg.Session("5min")`, and others.

        With time="processing" a row belongs to the moment at which it is processed. Windows that are open when the
        input ends come out with `fire_at_end=True` alone.
        """
        return WindowedStream(self.stream, self.keys, spec, Stream, time, fire_at_end, replaced=self._replaced)

    def connect(self, other: KeyedStream | Stream) -> ConnectedStreams[Stream]:
        """This stream and another keyed one, for one operator to process: rows of one key meet, and share its state.

        The other one may also be broadcast, `connect(rules.broadcast())`: then each of its rows meets all keys.
        """
        return _connected(self, other)

    def process(
        self,
        function: ProcessFunction,
        *,
        schema: SchemaLike | None = None,
        name: str = "process",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
        side_outputs: Sequence[OutputTag] = (),
        fire_at_end: bool = False,
        errors_to: OutputTag | str | None = None,
        in_order: bool = False,
        **slot: Unpack[SlotOptions],
    ) -> Stream:
        """Call a `tg.ProcessFunction` with each row or batch, with state and timers of the row's key.

        `schema` is that of the rows that it returns; give it if a table, an aggregate or a key follows. With
        `side_outputs` it may emit rows under these tags as well (see `Stream.side_output`). Processing-time timers that
        are left when the input ends fire with `fire_at_end=True` alone.

        With `errors_to`, which needs `schema`, a row for which the function raises goes to the side output of that
        name, as in `map`, and so does a timer: a row that has the key columns alone. All that it has emitted, put into
        state and registered is taken back.

        With `in_order` rows come in order of event time: each waits until the watermark has passed it, and the timers
        of earlier moments fire before it. Rows that come too late are dropped, counted as `numLateRecordsDropped`, and
        in `late_rows()` of the result. A function with `process_batch` gets sorted batches, and its timers fire after
        the rows of their watermark.
        """
        check_methods(function)
        schema = as_schema(schema, f"{name}(schema=)") or returned_schema(function, many=True, method="process")
        errors = () if errors_to is None else (error_tag(errors_to, self.stream.schema, name, self.keys),)
        of_stream = (self.keys,), (self.stream.timestamp,), schema, side_outputs, fire_at_end, errors, in_order
        (factory := partial(process_operator, function, *of_stream))()
        if not in_order:
            rows, order = self._by_key(), None
        else:
            if any(tag.name == LATE for tag in (*side_outputs, *errors)):
                raise ConfigurationError(
                    f"{name}: with in_order=True late rows go to the side output {LATE!r}; give the function's own "
                    "another name"
                )
            rows = self._in_event_time_order(name, uid, parallelism)
            order = rows._inputs[0][0]
        made = rows._then(
            factory,
            schema,
            name,
            uid,
            parallelism,
            batch_rows,
            slot,
            side_outputs=(*side_outputs, *errors),
            meaning=meaning("process", {"keys": self.keys}, rows={"": (self.stream.schema, self.keys)}),
        )
        return made._with_errors_of(order)

    def _in_event_time_order(self, name: str, uid: str | None, parallelism: int | None) -> Stream:
        """The rows by key, sorted by event time. ConfigurationError if they have none, or columns are not known."""
        if self.stream.timestamp is None:
            raise ConfigurationError(
                f"{name}: in_order=True is the order of event time, and the stream has none: call assign_timestamps "
                "before key_by"
            )
        uses_event_time(f"{name}(in_order=True)", self.stream._inputs)
        schema, time = known_schema(self.stream, name), self.stream.timestamp
        (factory := partial(EventTimeOrder, self.keys, time, schema))()
        means = meaning("rows in order", {"keys": self.keys, "time": time_text(time)}, rows={"": (schema, self.keys)})
        return self._by_key()._then(
            factory,
            factory().output,
            f"{name} in order",
            None if uid is None else f"{uid}-order",
            parallelism,
            side_outputs=(OutputTag(LATE, schema),),
            meaning=with_rows(means, rows=schema),
        )

    def stateful_map(
        self,
        fn: Callable[[Any, Row], tuple[Any, Any]],
        *,
        state: Any,
        schema: SchemaLike | None = None,
        ttl: StateTtl | str | timedelta | int | None = None,
        name: str = "stateful_map",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Stream:
        """Map each row with one state of its key: `fn(state, row)` returns the new state and the new row.

            def running(total: int | None, row: dict) -> tuple[int, dict]:
                total = (total or 0) + row["n"]
                return total, {"k": row["k"], "total": total}

            totals = rows.key_by("k").stateful_map(running, state=int, schema={"k": str, "total": int})

        `state` is the type of the state, as `tg.ValueState` takes it: `int`, `list[float]`, a dataclass, a type of
        Arrow, or `tg.Pickled`. It is None for a key that has none yet, and to return None clears it. With `ttl` (a
        duration of processing time) it expires. `schema` is that of the rows; an annotation
        `-> tuple[int, Total]`, where `Total` is a dataclass or a TypedDict, tells it as well. `errors_to` is that of
        `process`.
        """
        check_function(fn, name, "the state and a row")
        given = as_schema(schema, f"{name}(schema=)") or returned_schema(fn, part=1)
        lifetime = ttl if ttl is None or isinstance(ttl, StateTtl) else StateTtl(ttl)
        return self.process(
            StatefulMap(fn, state, lifetime),
            schema=given,
            name=name,
            uid=uid,
            parallelism=parallelism,
            errors_to=errors_to,
        )

    def reduce(
        self,
        fn: Callable[[Row, Row], Row],
        *,
        name: str = "reduce",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Stream:
        """Combine the rows of each key: `fn(before, row)` returns the row so far, which has the columns of the stream.

        Each row gives a result, as with Flink's `reduce`; the first one of a key is its own. Results stand for
        themselves. The newest of each key is `reduce(fn).key_by(...).deduplicate(keep="last")`, or an upsert table.
        """
        check_function(fn, name, "two rows")
        schema = known_schema(self.stream, name)
        return self.process(
            Reduce(fn, schema), schema=schema, name=name, uid=uid, parallelism=parallelism, errors_to=errors_to
        )

    def map_groups(
        self,
        fn: Callable[[pa.Table], Any],
        *,
        schema: SchemaLike | None = None,
        name: str = "map_groups",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Stream:
        """Call `fn` once for each key, with all of its rows as an Arrow table, when a bounded input has ended.

        It returns a table, a row, an iterable of rows, or None. All rows are state until then. An input without an end
        never gets there; use `window(...).apply(fn)` for that.
        """
        check_function(fn, name, "an Arrow table")
        rows = known_schema(self.stream, name)
        given = as_schema(schema, f"{name}(schema=)") or returned_schema(fn) or returned_schema(fn, many=True)
        return self.process(
            MapGroups(fn, rows), schema=given, name=name, uid=uid, parallelism=parallelism, errors_to=errors_to
        )

    def aggregate(
        self,
        mapping: Mapping[str, Aggregate] | None = None,
        /,
        *,
        emit: Literal["update", "each", "changes", "final"] | Aggregate = "update",
        name: str | Aggregate = "aggregate",
        uid: str | Aggregate | None = None,
        parallelism: int | Aggregate | None = None,
        ttl: str | timedelta | int | Aggregate | None = None,
        ttl_time: Literal["event", "processing"] | Aggregate = "event",
        errors_to: OutputTag | str | Aggregate | None = None,
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregate each key: `aggregate(n=tg.count(), worst=tg.max("delay"))`.

        An aggregate under the word of an option is one of that name, and a mapping has aggregates only:
        `aggregate({"name": tg.first("full_name")})`.

        emit="update" emits, after each batch, a row for every key in it, with the values so far: it replaces the one
        before it, in a table with mode="upsert". emit="each" emits a row for each row: its key, and the values of all
        rows of the key up to it, such as a running total. These rows stand for themselves, in the order of the rows of
        a key; `tg.last("x")` is the column "x" of the row itself. emit="changes" says in the column `row_kind` what
        comes and what is taken back (`docs/changes.md`). emit="final" emits a row for each key when a bounded input has
        ended.

        `ttl` bounds the state, with emit="update" and "each": a key that has had no row for so long is forgotten, and
        begins anew with the next one. `ttl_time`: in event time, or in processing time (Flink's
        `table.exec.state.ttl`).

        `errors_to` is for functions of the program, `tg.udaf`: a row for which one of them cannot `accumulate` goes to
        the side output of that name, as in `map`, and counts for no aggregate. Each row is tried before it is sent, in
        a new group of its own. What a function raises later, in `merge`, `result` or because of other rows, fails the
        job.
        """
        found, step = aggregates_and_options(
            "aggregate",
            mapping,
            aggregates,
            {
                "emit": emit,
                "name": name,
                "uid": uid,
                "parallelism": parallelism,
                "ttl": ttl,
                "ttl_time": ttl_time,
                "errors_to": errors_to,
            },
            {
                "emit": "update",
                "name": "aggregate",
                "uid": None,
                "parallelism": None,
                "ttl": None,
                "ttl_time": "event",
                "errors_to": None,
            },
        )
        mode = step["emit"]
        life = Life.of(step["ttl"], step["ttl_time"], self.stream.timestamp)
        if life is not None and life.time is not None:
            uses_event_time("aggregate(ttl=...)", self.stream._inputs)
        rows, errors = checked_inputs(self.stream, found, step["errors_to"], step["name"], step["uid"])
        made = aggregated(
            rows, self.keys, found, mode, step["name"], step["uid"], step["parallelism"], self._replaced, life
        )
        return made._keyed(self.keys, updates=mode == "update", changes=mode == "changes")._with_errors_of(errors)

    def deduplicate(
        self,
        by: str | None = None,
        *,
        keep: Literal["first", "last"] = "first",
        ttl: str | timedelta | int | None = None,
        name: str = "deduplicate",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """One row of each key: the first or the last in the order of the column `by`, or of arrival.

        Without `by`, keep="first" emits each key's first row and nothing else; these rows stand for themselves. In all
        other cases the stream has updates: a row replaces the one before it with its key, as behind an aggregate with
        emit="update".

        `ttl` (a duration of event time) bounds the state: a row that is at least so much later than the last one that
        was emitted for its key counts as a new key. Rows that are `ttl` or more behind the watermark are dropped, and
        counted in the metric `numLateRecordsDropped`. Raises ConfigurationError.
        """
        ttl_ms = None if ttl is None else parse_duration_ms(ttl, setting="deduplicate(ttl=...)")
        (by,) = (None,) if by is None else column_names(by, "deduplicate(by=...)")
        if ttl_ms is not None and self.stream.timestamp is not None:
            uses_event_time("deduplicate(ttl=...)", self.stream._inputs)
        factory = partial(Deduplicate, self.keys, by, keep, self.stream.timestamp, ttl_ms)
        operator, schema = factory(), self.stream.schema
        if schema is not None:
            operator.validate(schema)
        means = meaning(
            "deduplicate",
            {
                "keys": self.keys,
                "keep": keep,
                "by": "arrival" if by is None else column_of(by),
                "ttl": ttl_text(ttl_ms, self.stream.timestamp),
            },
            rows={"": (schema, self.keys)},
        )
        if by is not None and schema is not None:
            means = with_rows(means, by=pa.schema([schema.field(by)]))
        rows = self._by_key()._then(factory, schema, name, uid, parallelism, meaning=means)
        return rows._keyed(self.keys, updates=by is not None or keep == "last")

    def top_n(
        self,
        n: int,
        by: str | Sequence[str],
        *,
        descending: bool | Sequence[bool] = True,
        nulls_last: bool | Sequence[bool] | None = None,
        rank: str | None = None,
        emit: RankEmit = "changes",
        ties: bool = False,
        ttl: str | timedelta | int | None = None,
        name: str = "top_n",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """The first `n` rows of each key in the order of columns: `key_by("auction").top_n(10, by="price")`.

        Of rows that are equal in all of `by` the first to arrive is before the others. Nulls come last where the order
        descends and first where it ascends, as in Spark, or as `nulls_last` says. `rank` names a column for the rank,
        from 1. The stream has changes: a row that drops out, or changes its rank, is taken back. With
        emit="update", which needs `rank`, a row takes the place of the one with its key and rank.

        Results of windows that are keyed by `window_end`, among others, may be ranked with emit="final": then the first
        rows come out once, when the window ends, and stand for themselves. With `ties` rows that are equal in the order
        share a rank there, so there may be more than `n`. For plain rows see `WindowedStream.top_n`.

        `ttl` (event time): a key is forgotten when its newest row among the first `n` is so far behind the watermark.
        See `docs/top-n.md`. Raises ConfigurationError.
        """
        ranking = ranking_of(self.keys, n, by, descending, rank, emit, ties, nulls_last)
        if emit == "final":
            if ttl is not None:
                raise ConfigurationError(f"{name}: rows go when their window ends; leave ttl= out")
            return ranked_windows(self.stream, ranking, None, name, uid, parallelism)
        rows = ranked_stream(self.stream, ranking, ttl, name, uid, parallelism)
        if emit == "changes":
            return rows._keyed(self.keys, updates=False, changes=True)
        return rows._keyed((*self.keys, str(rank)), updates=True)


def _connected(first: Stream | KeyedStream, second: Stream | KeyedStream) -> ConnectedStreams[Stream]:
    """Two streams side by side, with the keys that they have."""
    if not isinstance(second, KeyedStream):
        check_stream(second, Stream, "connect")
    (one, keys1), (two, keys2) = (
        (stream.stream, stream.keys) if isinstance(stream, KeyedStream) else (stream, ()) for stream in (first, second)
    )
    return ConnectedStreams(one, two, (keys1, keys2))


def timed(
    stream: Stream,
    timestamp: str | pl.Expr | None,
    max_out_of_orderness: str | timedelta | int,
    uid: str | None,
    idleness: str | timedelta | int | None = None,
    alignment: WatermarkAlignment | None = None,
) -> Stream:
    """The stream, with event time from the column `timestamp` if that is named."""
    if timestamp is None:
        if alignment is not None:
            raise ConfigurationError(
                "alignment= is for event time, and the source has none: name its column, timestamp="
            )
        return stream
    uid = None if uid is None else f"{uid}-timestamps"
    return stream.assign_timestamps(timestamp, max_out_of_orderness, idleness=idleness, alignment=alignment, uid=uid)
