"""Builds the joins of a stream (the left side) with another stream or a table. Each builder raises ConfigurationError
for arguments that are not valid.

Both sides are partitioned by their keys, so that rows with the same key are processed in one subtask. Only the join
without a window accepts streams of changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from tidegate.api.streams.changelog_mode import ChangelogMode
from tidegate.api.streams.event_time import uses_event_time
from tidegate.api.streams.expression_columns import known_schema
from tidegate.api.streams.state_meanings import join_facts, meaning, window_text, with_rows
from tidegate.api.streams.step import Step, StepOptions
from tidegate.api.tables.lookup_tables import LookedUp, reader_of, with_keys_of
from tidegate.connectors.sql.lookup import DatabaseTable, lookup_limits, open_table
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.functions.batch_functions import batch_operator
from tidegate.operators.joins.asof_join import AsOfJoin
from tidegate.operators.joins.database_lookup import DatabaseLookup
from tidegate.operators.joins.interval_join import IntervalJoin
from tidegate.operators.joins.join_operator import JoinHow, JoinSides
from tidegate.operators.joins.latest_join import LatestEmit, LatestJoin
from tidegate.operators.joins.lookup_join import Lookup, LookupJoin, LookupTable
from tidegate.operators.joins.regular_join import RegularJoin
from tidegate.operators.operator import Operator
from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.operators.windows.window_columns import WINDOW_END
from tidegate.operators.windows.window_join import WindowJoin
from tidegate.operators.windows.window_specs import Sliding, Tumbling
from tidegate.storage.checkpoints.metadata import StateMeaning
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    from tidegate.api.streams.stream import Stream

On = str | Sequence[str | tuple[str, str]]
"""Columns that must be equal: for each key a name that both streams have, or a pair of names."""


def window_join(
    left: Stream,
    right: Stream,
    on: On,
    window: Tumbling | Sliding,
    how: JoinHow,
    suffix: str,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.join` with a window."""
    sides, schemas = _sides("join", left, right, on, suffix)
    operator = partial(WindowJoin, sides, schemas, window, how)
    means = _meaning("window join", {**join_facts(sides, how), "window": window_text(window)}, sides, schemas)
    joined = _joined(left, right, sides, operator, operator().output, means, options)
    return joined._derived(timestamp=WindowEnd(WINDOW_END))


def regular_join(
    left: Stream,
    right: Stream,
    on: On,
    how: JoinHow,
    ttl: str | timedelta | int | None,
    suffix: str,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.join` without a window, which stores every row, without limit or for a time to
    live.
    """
    ttl_ms = None if ttl is None else parse_duration_ms(ttl, setting="join(ttl=...)")
    sides, schemas = _kept_sides("join", left, right, on, suffix, ttl_ms)
    for stream, keys in zip((left, right), sides.keys, strict=True):
        if stream._changelog is not None:
            stream._changelog.check_kind_is_no_key(repr(options.name), keys)
    changing = _has_changes(left), _has_changes(right)
    operator = partial(RegularJoin, sides, schemas, how, changing, ttl_ms)
    facts: dict[str, object] = {
        **join_facts(sides, how),
        "left input": "changes" if changing[0] else "rows",
        "right input": "changes" if changing[1] else "rows",
        "ttl": None if ttl_ms is None else f"{ttl_ms} ms of event time",
    }
    made = operator()
    means = _meaning("join", facts, sides, schemas)
    joined = _joined(left, right, sides, operator, made.output, means, options, takes_changes=True)
    if not made.retracts:
        return joined
    return joined._derived(changelog=ChangelogMode.of(joined._inputs[0][0], sides.keys[0], changes=True))


def interval_join(
    left: Stream,
    right: Stream,
    on: On,
    between: tuple[str | timedelta | int, str | timedelta | int],
    how: JoinHow,
    suffix: str,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.interval_join`."""
    sides, schemas = _sides("interval_join", left, right, on, suffix)
    if not isinstance(between, Sequence) or isinstance(between, str) or len(between) != 2:
        raise ConfigurationError(
            f"interval_join: between={between!r}: give the first and the last moment, seen from the left row, such "
            'as between=("-5min", "10min")'
        )
    lower, upper = (_signed_ms(bound, "interval_join: between") for bound in between)
    operator = partial(IntervalJoin, sides, schemas, lower, upper, how)
    facts: dict[str, object] = {**join_facts(sides, how), "between": f"{lower} ms and {upper} ms"}
    means = _meaning("interval join", facts, sides, schemas)
    return _joined(left, right, sides, operator, operator().schema, means, options)


def asof_join(
    left: Stream,
    right: Stream,
    on: On,
    by: str | tuple[str, str] | None,
    how: Literal["left", "inner"],
    suffix: str,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.join_asof`."""
    sides, schemas = _sides("join_asof", left, right, on, suffix)
    named = None if by is None else column_names(by, "join_asof: by=")
    if named is not None and (named if len(named) > 1 else named * 2) != sides.times:
        raise ConfigurationError(
            f"join_asof: by={by!r} must name the event time of both streams, which is in {list(sides.times)}; remove "
            "by=, or name it with assign_timestamps"
        )
    operator = partial(AsOfJoin, sides, schemas, how)
    means = _meaning("as-of join", join_facts(sides, how), sides, schemas)
    joined = _joined(left, right, sides, operator, operator().schema, means, options)
    return joined._derived(timestamp=sides.times[0])


def latest_join(
    left: Stream,
    right: Stream,
    on: On,
    emit: LatestEmit,
    ttl: str | timedelta | int | None,
    suffix: str,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.join_latest`."""
    ttl_ms = None if ttl is None else parse_duration_ms(ttl, setting="join_latest(ttl=...)")
    sides, schemas = _kept_sides("join_latest", left, right, on, suffix, ttl_ms)
    operator = partial(LatestJoin, sides, schemas, emit, ttl_ms)
    facts: dict[str, object] = {
        **join_facts(sides, "full"),
        "emit": emit,
        "ttl": None if ttl_ms is None else f"{ttl_ms} ms of event time",
    }
    means = _meaning("join of newest rows", facts, sides, schemas)
    return _joined(left, right, sides, operator, operator().schema, means, options)


def lookup_join(
    stream: Stream,
    table: LookedUp,
    on: On,
    how: Literal["left", "inner"],
    refresh: str | timedelta | int | None,
    max_stale: str | timedelta | int | None,
    max_rows: int,
    suffix: str,
    options: StepOptions,
) -> Stream:
    """Builds the step of `Stream.lookup_join`."""
    if stream._changelog is not None:
        reason = "a later version of the table would retract another row than was inserted"
        raise stream._changelog.refuse(options.name, reason)
    if max_rows < 1:
        raise ConfigurationError(f"lookup_join: max_rows={max_rows!r}: it must be at least 1")
    if how not in ("left", "inner"):
        raise ConfigurationError(f'lookup_join: how={how!r}: it must be "left" or "inner"')
    if isinstance(table, DatabaseTable):
        if refresh is not None or max_stale is not None:
            raise ConfigurationError(
                "lookup_join: refresh= and max_stale= are for tables that are read as a whole. Give "
                "DatabaseTable(cache_ttl=...) instead"
            )
        function: LookupJoin = _database_lookup(stream, table, on, how == "inner", max_rows, suffix)
        return _looked_up(stream, function, options)
    read, found, changes = reader_of(table)
    schemas = known_schema(stream, "lookup_join"), found
    keys = _keys("lookup_join", on, schemas)
    schemas = schemas[0], with_keys_of(*schemas, keys)
    refresh_ms = None if refresh is None else parse_duration_ms(refresh, setting="lookup_join(refresh=...)")
    if refresh_ms is not None and refresh_ms <= 0:
        raise ConfigurationError(
            f'lookup_join: refresh={refresh!r}: it must be greater than 0, such as refresh="10min"'
        )
    if refresh_ms is not None and not changes:
        raise ConfigurationError(
            f"lookup_join: refresh={refresh!r} is for tables that may change, and these rows are fixed. Give a "
            "function or a URL instead of the rows, or remove refresh="
        )
    stale_ms = 3 * (refresh_ms or 0)
    if max_stale is not None:
        stale_ms = parse_duration_ms(max_stale, setting="lookup_join(max_stale=...)")
    lookup = Lookup(JoinSides(keys, (None, None), suffix), *schemas, how == "inner", max_rows)
    return _looked_up(stream, LookupTable(lookup, read, refresh_ms, stale_ms), options)


def _database_lookup(
    stream: Stream, given: DatabaseTable, on: On, inner: bool, max_rows: int, suffix: str
) -> DatabaseLookup:
    """Returns the function that joins with a table of a database, after reading the columns of the table."""
    limits = lookup_limits(given)
    table = open_table(given)
    schemas = known_schema(stream, "lookup_join"), table.schema
    keys = _keys("lookup_join", on, schemas)
    if len(set(keys[1])) < len(keys[1]):
        raise ConfigurationError(f"lookup_join: on={on!r} names a column of {given.table} twice; remove one of them")
    table.check_keys(keys[1])
    sides = JoinSides(keys, (None, None), suffix)
    lookup = Lookup(sides, schemas[0], with_keys_of(*schemas, keys), inner, max_rows)
    return DatabaseLookup(lookup, table, limits)


def _looked_up(stream: Stream, function: LookupJoin, options: StepOptions) -> Stream:
    return stream._then(
        Step(
            operator=batch_operator(function, function.output, options.name),
            schema=function.output,
            options=options
            if options.parallelism is not None
            else StepOptions(options.name, options.uid, stream._input_parallelism),
        )
    )


def _joined(
    left: Stream,
    right: Stream,
    sides: JoinSides,
    operator: Callable[[], Operator],
    schema: pa.Schema,
    means: StateMeaning,
    options: StepOptions,
    *,
    takes_changes: bool = False,
) -> Stream:
    """Adds the join operator of two streams, each partitioned by its keys. The result has no event time."""
    if left._program is not right._program:
        raise ConfigurationError(
            f"{options.name}: the streams belong to different environments; make both from one StreamEnvironment"
        )
    joined = left._by_keys(sides.keys[0])._then(
        Step(operator=operator, schema=schema, options=options, takes_changes=takes_changes, meaning=means),
        second=right._by_keys(sides.keys[1]),
    )
    return joined._derived()


def _meaning(
    kind: str, facts: Mapping[str, object], sides: JoinSides, schemas: tuple[pa.Schema, pa.Schema]
) -> StateMeaning:
    left, right = schemas
    means = meaning(kind, facts, rows={"left": (left, sides.keys[0]), "right": (right, sides.keys[1])})
    return with_rows(means, left=left, right=right)


def _sides(
    what: str, left: Stream, right: Stream, on: On, suffix: str
) -> tuple[JoinSides, tuple[pa.Schema, pa.Schema]]:
    """Returns the keys and event-time columns of both streams, and their schemas.

    Raises ConfigurationError if a stream has no event time.
    """
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


def _kept_sides(
    what: str, left: Stream, right: Stream, on: On, suffix: str, ttl_ms: int | None
) -> tuple[JoinSides, tuple[pa.Schema, pa.Schema]]:
    """Returns the keys of both streams, their event-time columns if the join has a time to live, and their schemas."""
    if ttl_ms is not None:
        return _sides(what, left, right, on, suffix)
    schemas = _schemas(what, left, right)
    return JoinSides(_keys(what, on, schemas), (None, None), suffix), schemas


def _schemas(what: str, left: Stream, right: Stream) -> tuple[pa.Schema, pa.Schema]:
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
                    f"{what}: on={on!r}: the {which} stream has no column {name!r}; name one of {columns_text(schema)}"
                    f"{_pair_advice(on, schemas)}"
                )
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def _pair_advice(on: On, schemas: tuple[pa.Schema, pa.Schema]) -> str:
    """Returns advice for `on` of two names, if the first is a column of the left and the second of the right stream."""
    if not isinstance(on, Sequence) or isinstance(on, str) or len(on) != 2:
        return ""
    left, right = on
    if left not in schemas[0].names or right not in schemas[1].names:
        return ""
    return (
        f". on={on!r} is two columns that both streams have; a column of the left stream and its column of the right "
        f"stream are a pair in a list: on=[({left!r}, {right!r})]"
    )


def _has_changes(stream: Stream) -> bool:
    """Returns whether a stream has changes. (`Stream._then` raises an error for a stream of updates.)"""
    return stream._changelog is not None and stream._changelog.changes


def _signed_ms(bound: str | timedelta | int, setting: str) -> int:
    """Returns a duration in ms. The duration may be negative."""
    if isinstance(bound, str) and bound.lstrip().startswith("-"):
        return -parse_duration_ms(bound.lstrip()[1:], setting=setting)
    if isinstance(bound, timedelta) and bound < timedelta():
        return -parse_duration_ms(-bound, setting=setting)
    if isinstance(bound, int) and bound < 0:
        return bound
    return parse_duration_ms(bound, setting=setting)
