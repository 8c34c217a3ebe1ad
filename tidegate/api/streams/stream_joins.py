"""`StreamJoins`: the methods of a stream that join it with another one, by key and event time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, Self

import pyarrow as pa

from tidegate.api.streams.steps.event_time_use import uses_event_time
from tidegate.api.streams.steps.given import check_stream
from tidegate.api.streams.steps.known_columns import known_schema
from tidegate.api.streams.steps.meanings import join_facts, meaning, window_text, with_rows
from tidegate.api.streams.steps.stream_changes import StreamChanges
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.api.streams.steps.updating import Updating
from tidegate.api.tables.lookup_tables import LookedUp, reader_of, with_keys_of
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.functions.batch_functions import batch_operator
from tidegate.operators.joins.asof_join import AsOfJoin
from tidegate.operators.joins.interval_join import IntervalJoin
from tidegate.operators.joins.join_operator import JoinHow, JoinSides
from tidegate.operators.joins.latest_join import LatestEmit, LatestJoin
from tidegate.operators.joins.lookup_join import Lookup, LookupTable
from tidegate.operators.joins.regular_join import RegularJoin
from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.operators.windows.window_join import WindowJoin
from tidegate.operators.windows.window_rows import WINDOW_END
from tidegate.operators.windows.window_specs import Sliding, Tumbling
from tidegate.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.storage.checkpoints.state_meaning import StateMeaning
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.units import parse_duration_ms

On = str | Sequence[str | tuple[str, str]]
"""Columns that must be equal: a name in both streams, or a pair of names."""


class StreamJoins(StreamChanges):
    """Joins of this stream, the left one, with another."""

    def join(
        self,
        other: StreamSteps,
        *,
        on: On,
        window: Tumbling | Sliding | None = None,
        how: JoinHow = "inner",
        ttl: str | timedelta | int | None = None,
        suffix: str = "_right",
        name: str = "join",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Join rows with the same key in the same window: `a.join(b, on="auction", window=tg.Tumbling("10s"))`.

        `on` is a column of both streams, or several, each a name or a pair of names, left and right. `how` is `inner`,
        `left`, `right`, `full`, `semi` or `anti`. The result has the columns of the left stream, those of the right one
        without its keys (with `suffix` where the left has the name as well), and `window_start` and `window_end`. A
        window is joined when the watermarks of both streams have passed its end; rows that come later are dropped.

        Without a window every row is kept, for ever or for a time to live (`ttl`, event time), and meets every row of
        its key: `inner`, `left`, `right` or `full`. Both streams may have changes. So has the result, unless it is an
        inner join of streams without: what was wrong is taken back, such as a row without a partner. See
        `docs/joins.md`.
        """
        check_stream(other, StreamSteps, "join")
        if window is None:
            return self._joined_for_ever(other, on, how, ttl, suffix, name, uid, parallelism)
        if ttl is not None:
            raise ConfigurationError("join: a window says how long rows are kept; leave ttl= out")
        sides, schemas = _sides("join", self, other, on, suffix)
        make = partial(WindowJoin, sides, schemas, window, how)
        facts: dict[str, object] = {**join_facts(sides, how), "window": window_text(window)}
        means = _join_meaning("window join", facts, sides, schemas)
        return self._joined(other, sides, make().output, make, name, uid, parallelism, WindowEnd(WINDOW_END), means)

    def interval_join(
        self,
        other: StreamSteps,
        *,
        on: On,
        between: tuple[str | timedelta | int, str | timedelta | int],
        how: JoinHow = "inner",
        suffix: str = "_right",
        name: str = "interval_join",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Join rows with the same key whose times are near: `a.interval_join(b, on="id", between=("-5min", "10min"))`.

        A pair is one whose right row is between 5 minutes before and 10 minutes after the left one, bounds included. It
        is emitted when the later row comes; whether a row has a partner, for any `how` but `inner`, when the watermark
        of both streams has passed its interval. Columns are as of `join`, without windows. Rows that the watermark has
        passed are dropped.
        """
        check_stream(other, StreamSteps, "interval_join")
        sides, schemas = _sides("interval_join", self, other, on, suffix)
        if not isinstance(between, Sequence) or isinstance(between, str) or len(between) != 2:
            raise ConfigurationError(
                f"interval_join: between={between!r}: give the first and the last moment, seen from the left row, such "
                'as between=("-5min", "10min")'
            )
        lower, upper = (_signed_ms(bound, "interval_join: between") for bound in between)
        make = partial(IntervalJoin, sides, schemas, lower, upper, how)
        facts: dict[str, object] = {**join_facts(sides, how), "between": f"{lower} ms and {upper} ms"}
        means = _join_meaning("interval join", facts, sides, schemas)
        return self._joined(other, sides, make().schema, make, name, uid, parallelism, None, means)

    def join_asof(
        self,
        other: StreamSteps,
        *,
        on: On,
        by: str | tuple[str, str] | None = None,
        how: Literal["left", "inner"] = "left",
        suffix: str = "_right",
        name: str = "join_asof",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Join each row with the version of its key that held at its event time: `a.join_asof(rates, on="currency")`.

        A row of `other` holds from its event time until that of the next one with its key. A row waits until the
        watermark of both streams has passed its time; rows that the watermark has passed already are dropped. `by`
        names the columns of event time, and is there to be read: they are those of the streams. Columns are as of
        `join`, without windows, and event time is that of the left stream.
        """
        check_stream(other, StreamSteps, "join_asof")
        sides, schemas = _sides("join_asof", self, other, on, suffix)
        named = None if by is None else column_names(by, "join_asof: by=")
        if named is not None and (named if len(named) > 1 else named * 2) != sides.times:
            raise ConfigurationError(
                f"join_asof: by={by!r}, and the event time of the streams is in {list(sides.times)}; name it with "
                "assign_timestamps"
            )
        make = partial(AsOfJoin, sides, schemas, how)
        means = _join_meaning("as-of join", join_facts(sides, how), sides, schemas)
        return self._joined(other, sides, make().schema, make, name, uid, parallelism, sides.times[0], means)

    def join_latest(
        self,
        other: StreamSteps,
        *,
        on: On,
        emit: LatestEmit = "complete",
        ttl: str | timedelta | int | None = None,
        suffix: str = "_right",
        name: str = "join_latest",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Join the newest rows of each key: `orders.join_latest(payments, on="order")`, one result for each pair.

        With `emit="complete"` a row comes as soon as both streams have one of the key, and both are forgotten; of
        several that wait the last one counts. With `emit="always"` each row comes with the newest one of the other
        stream, nulls before there is any, and stays until the next one of its own stream. Newest is what came last,
        whatever its event time (`join_asof` goes by that). Columns are as of `join`, without windows. State is one row
        of each key and stream, for ever or until the key is older than `ttl` (event time). Streams of updates and
        changes are refused.
        """
        check_stream(other, StreamSteps, "join_latest")
        ttl_ms = None if ttl is None else parse_duration_ms(ttl, setting="join_latest(ttl=...)")
        if ttl_ms is None:
            schemas = _schemas("join_latest", self, other)
            sides = JoinSides(_keys("join_latest", on, schemas), (None, None), suffix)
        else:
            sides, schemas = _sides("join_latest", self, other, on, suffix)
        make = partial(LatestJoin, sides, schemas, emit, ttl_ms)
        facts: dict[str, object] = {
            **join_facts(sides, "full"),
            "emit": emit,
            "ttl": None if ttl_ms is None else f"{ttl_ms} ms of event time",
        }
        means = _join_meaning("join of newest rows", facts, sides, schemas)
        return self._joined(other, sides, make().schema, make, name, uid, parallelism, None, means)

    def lookup_join(
        self,
        table: LookedUp,
        *,
        on: On,
        how: Literal["left", "inner"] = "left",
        refresh: str | timedelta | int | None = None,
        max_stale: str | timedelta | int | None = None,
        max_rows: int = 10_000_000,
        suffix: str = "_right",
        name: str = "lookup_join",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Join each row with a table as it was last read: `flights.lookup_join("planes.parquet", on="tailnum")`.

        `table` is an Arrow table, a polars DataFrame, a table of tidegate or its URL, that of a Delta Lake table or of
        Parquet files, or a function that returns an Arrow table or a polars DataFrame, as of a database. Each subtask
        has all of it in memory, at most `max_rows` rows, and reads it again every `refresh`, beside processing. If that
        fails the old one goes on, for at most `max_stale` (three times `refresh`); then the task fails. Which version a
        row meets depends on when it is processed: see `docs/joins.md`.
        """
        if self._updating is not None:
            raise self._updating.refuse(name, "a later version of the table would take back another row than came")
        read, found, changes = reader_of(table)
        schemas = known_schema(self, "lookup_join"), found
        keys = _keys("lookup_join", on, schemas)
        schemas = schemas[0], with_keys_of(*schemas, keys)
        if max_rows < 1:
            raise ConfigurationError(f"lookup_join: max_rows={max_rows!r}: give 1 or more")
        refresh_ms = None if refresh is None else parse_duration_ms(refresh, setting="lookup_join(refresh=...)")
        if refresh_ms is not None and (not changes or refresh_ms <= 0):
            raise ConfigurationError(
                f"lookup_join: refresh={refresh!r}: it is greater than 0, and for tables that may change: give a "
                "function, or a place, instead of the rows"
            )
        stale_ms = 3 * (refresh_ms or 0)
        if max_stale is not None:
            stale_ms = parse_duration_ms(max_stale, setting="lookup_join(max_stale=...)")
        lookup = Lookup(JoinSides(keys, (None, None), suffix), *schemas, how == "inner", max_rows)
        if how not in ("left", "inner"):
            raise ConfigurationError(f"lookup_join: how={how!r}: it is left or inner")
        function = LookupTable(lookup, read, refresh_ms, stale_ms)
        width = self._input_parallelism if parallelism is None else parallelism
        return self._then(batch_operator(function, lookup.output, name), lookup.output, name, uid, width)

    def _joined_for_ever(
        self,
        other: StreamSteps,
        on: On,
        how: JoinHow,
        ttl: str | timedelta | int | None,
        suffix: str,
        name: str,
        uid: str | None,
        parallelism: int | None,
    ) -> Self:
        ttl_ms = None if ttl is None else parse_duration_ms(ttl, setting="join(ttl=...)")
        if ttl_ms is None:
            schemas = _schemas("join", self, other)
            sides = JoinSides(_keys("join", on, schemas), (None, None), suffix)
        else:
            sides, schemas = _sides("join", self, other, on, suffix)
        streams: tuple[StreamSteps, StreamSteps] = (self, other)
        for stream, keys in zip(streams, sides.keys, strict=True):
            if stream._updating is not None:
                stream._updating.check_kind_is_no_key(repr(name), keys)
        changing = _has_changes(self), _has_changes(other)
        make = partial(RegularJoin, sides, schemas, how, changing, ttl_ms)
        facts: dict[str, object] = {
            **join_facts(sides, how),
            "left input": "changes" if changing[0] else "rows",
            "right input": "changes" if changing[1] else "rows",
            "ttl": None if ttl_ms is None else f"{ttl_ms} ms of event time",
        }
        means = _join_meaning("join", facts, sides, schemas)
        joined = self._joined(other, sides, make().output, make, name, uid, parallelism, None, means)
        if make().takes_back:
            node = joined._inputs[0][0]
            joined._updating = Updating(sides.keys[0], f"{node.name!r} (uid {node.uid!r})", changes=True)
        return joined

    def _joined(
        self,
        other: StreamSteps,
        sides: JoinSides,
        schema: pa.Schema,
        make: partial[WindowJoin]
        | partial[IntervalJoin]
        | partial[AsOfJoin]
        | partial[LatestJoin]
        | partial[RegularJoin],
        name: str,
        uid: str | None,
        parallelism: int | None,
        timestamp: str | None,
        means: StateMeaning,
    ) -> Self:
        if self._program is not other._program:
            raise ConfigurationError(f"{name}: the streams belong to different environments")
        left = self._partitioned(Partitioning(PartitioningKind.HASH, sides.keys[0]))
        right = other._partitioned(Partitioning(PartitioningKind.HASH, sides.keys[1]))
        takes = make.func is RegularJoin
        joined = left._then(make, schema, name, uid, parallelism, second=right, takes_changes=takes, meaning=means)
        joined.timestamp = timestamp
        return joined


def _join_meaning(
    kind: str, facts: Mapping[str, object], sides: JoinSides, schemas: tuple[pa.Schema, pa.Schema]
) -> StateMeaning:
    left, right = schemas
    means = meaning(kind, facts, rows={"left": (left, sides.keys[0]), "right": (right, sides.keys[1])})
    return with_rows(means, left=left, right=right)


def _sides(
    what: str, left: StreamSteps, right: StreamSteps, on: On, suffix: str
) -> tuple[JoinSides, tuple[pa.Schema, pa.Schema]]:
    """Keys, times and columns of both streams. ConfigurationError if something is not known, or does not fit."""
    schemas = _schemas(what, left, right)
    if left.timestamp is None or right.timestamp is None:
        which = "left" if left.timestamp is None else "right"
        raise ConfigurationError(
            f"{what}: the {which} stream has no event time; name its column with timestamp= at the source, or with "
            "assign_timestamps"
        )
    uses_event_time(what, left._inputs, right._inputs)
    keys = _keys(what, on, schemas)
    return JoinSides(keys, (left.timestamp, right.timestamp), suffix), schemas


def _schemas(what: str, left: StreamSteps, right: StreamSteps) -> tuple[pa.Schema, pa.Schema]:
    return known_schema(left, what, "the left stream"), known_schema(right, what, "the right stream")


def _keys(what: str, on: On, schemas: tuple[pa.Schema, pa.Schema]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    several = on if isinstance(on, Sequence) and not isinstance(on, str) else [on]
    pairs = [
        column_names(each, f"{what}: on=") * (1 if isinstance(each, Sequence) and not isinstance(each, str) else 2)
        for each in several
    ]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigurationError(f"{what}: on={on!r}: give names of columns, or pairs of a left and a right name")
    for side, schema in enumerate(schemas):
        for name in (pair[side] for pair in pairs):
            if name not in schema.names:
                which = ("left", "right")[side]
                raise ConfigurationError(
                    f"{what}: on={on!r}: the {which} stream has no column {name!r}; it has {columns_text(schema)}"
                )
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def _has_changes(stream: StreamSteps) -> bool:
    """Whether a stream has changes; `_then` refuses one that has updates."""
    return stream._updating is not None and stream._updating.changes


def _signed_ms(bound: str | timedelta | int, setting: str) -> int:
    """A duration, which may be negative."""
    if isinstance(bound, str) and bound.lstrip().startswith("-"):
        return -parse_duration_ms(bound.lstrip()[1:], setting=setting)
    if isinstance(bound, timedelta) and bound < timedelta():
        return -parse_duration_ms(-bound, setting=setting)
    if isinstance(bound, int) and bound < 0:
        return bound
    return parse_duration_ms(bound, setting=setting)
