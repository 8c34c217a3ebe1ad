"""Builds the steps of an aggregate: the columns that it reads, its distinct values, and the aggregate itself.

`KeyedStream.aggregate` and `Stream.aggregate` call it. Most aggregates are one operator. Expressions add a `select`
before the exchange, each column whose distinct values are counted adds an exchange by keys and values, and an
aggregate over everything makes one row of each batch before the exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal, TypeVar

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.streams.distinct_counts import Counted, by_keys, is_distinct, kept_columns, marked
from tidegate.api.streams.steps.meanings import meaning, ttl_text
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_state import AggregateKind
from tidegate.operators.aggregates.changing_aggregate import (
    KEY,
    ChangesOfAll,
    ChangingAggregate,
    MergedAggregate,
    PartialAggregate,
)
from tidegate.operators.aggregates.column_expressions import ColumnExpression
from tidegate.operators.aggregates.expiring_aggregate import ExpiringAggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.aggregates.multisets import kept_values, with_value_sets
from tidegate.operators.changes import CHANGE
from tidegate.operators.functions.failing_rows import InputCheck, error_tag
from tidegate.operators.local_aggregation.local_aggregation import LocalAggregation
from tidegate.protocol.side_outputs import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import exact_column
from tidegate.storage.schemas.reserved_names import check_not_reserved
from tidegate.storage.units import parse_duration_ms

S = TypeVar("S", bound=StreamSteps)
EmitMode = Literal["update", "each", "changes", "final"]


_LISTED_MAX = 1 << 22
"""Values in the lists that an aggregate emits at once, where each row has a list."""


@dataclass(frozen=True, slots=True)
class Life:
    """How long a key is kept without rows. `time` is the column of event time; None: processing time."""

    ttl_ms: int
    time: str | None

    @staticmethod
    def of(ttl: str | timedelta | int | None, domain: str, time: str | None) -> Life | None:
        """Of what a program says. ConfigurationError."""
        if ttl is None:
            return None
        ttl_ms = parse_duration_ms(ttl, setting="aggregate(ttl=...)")
        if domain == "processing":
            return Life(ttl_ms, None)
        if domain != "event":
            raise ConfigurationError(f'aggregate: ttl_time is "event" or "processing", not {domain!r}')
        if time is None:
            raise ConfigurationError(
                "aggregate: ttl is event time, and the stream has none: call assign_timestamps before key_by, or say "
                'ttl_time="processing"'
            )
        return Life(ttl_ms, time)


def aggregated(
    stream: S,
    keys: tuple[str, ...],
    aggregates: Mapping[str, Aggregate],
    emit: EmitMode,
    name: str,
    uid: str | None,
    parallelism: int | None,
    replaced: frozenset[str] = frozenset(),
    life: Life | None = None,
) -> S:
    """The aggregates of each key. `replaced` are columns whose place a key has taken. Raises ConfigurationError."""
    if life is not None:
        _check_life(stream, aggregates, emit, name)
    # Values that are counted by another step come here in another order than their rows.
    whole = life is not None or emit == "each"
    given = dict(aggregates)
    stream, plain = _prepared(stream, keys, aggregates, name, uid, parallelism, replaced, emit, whole)
    taken_back = stream._updating is not None
    # The factory travels to the tasks: it takes the columns along, and not the stream with its whole program.
    rows_schema = stream.schema

    def made() -> KeyedAggregate:
        if life is not None:
            return ExpiringAggregate(
                keys, plain, life.ttl_ms, life.time, rows_schema, "each" if emit == "each" else "update"
            )
        if emit == "changes" or (emit == "final" and taken_back):
            return ChangingAggregate(keys, plain, emit, taken_back, rows_schema)
        return KeyedAggregate(keys, plain, emit, rows_schema)

    operator = made()
    output = None if stream.schema is None else operator.output_schema(stream.schema)
    combines = None if taken_back or life is not None or emit == "each" else LocalAggregation(keys, plain)
    means = meaning(
        "aggregate",
        {
            "keys": keys,
            # The state is the same: results of the rows to come are right whichever of the two went before.
            "emit": "update or each" if emit in ("update", "each") else emit,
            "input": "changes" if taken_back else "rows",
            "ttl": None if life is None else ttl_text(life.ttl_ms, life.time),
        },
        aggregates=given,
        fields=operator.known_fields,
        rows={"": (stream.schema, keys)},
        evolves=emit != "changes" and not taken_back,
    )
    return by_keys(stream, keys)._then(
        made,
        output,
        name,
        uid,
        parallelism,
        batch_rows=_rows_at_once(plain) if emit == "each" else None,
        takes_changes=True,
        combines=combines,
        meaning=means,
        retimes=stream.timestamp if emit == "each" and _gives_other_times(given, stream.timestamp) else None,
    )


def _gives_other_times(aggregates: Mapping[str, Aggregate], time: str | None) -> bool:
    """Whether the column of event time of each row's result is not that of the row."""
    aggregate = None if time is None else aggregates.get(time)
    return aggregate is not None and aggregate != Aggregate(AggregateKind.LAST, str(time))


def _rows_at_once(aggregates: Mapping[str, Aggregate]) -> tuple[int, int] | None:
    """The rows of a call where each row has a list of its own: those of a call have `_LISTED_MAX` values at most."""
    limits = [aggregate.limit for aggregate in aggregates.values() if aggregate.limit is not None]
    return (1, max(1, _LISTED_MAX // max(limits))) if limits else None


def aggregated_all(stream: S, aggregates: Mapping[str, Aggregate], emit: EmitMode, name: str, uid: str | None) -> S:
    """The aggregates of all rows. Raises ConfigurationError."""
    if emit == "each":
        raise ConfigurationError(
            f'{name}: emit="each" needs keys, because without them several subtasks add up rows before the results are '
            'put together. Give all rows one key: key_by(pl.lit(0).alias("all"))'
        )
    if emit not in ("update", "changes", "final"):
        raise ConfigurationError(f'{name}: emit must be "update", "changes" or "final", not {emit!r}')
    if stream._updating is not None and stream._updating.changes and emit == "changes":
        return _aggregated_changes(stream, aggregates, name, uid)
    given = dict(aggregates)
    stream, plain = _prepared(stream, (), aggregates, name, uid, None, frozenset(), emit)

    def made() -> MergedAggregate:
        return ChangesOfAll(plain, parts) if emit == "changes" else MergedAggregate(plain, emit, output, parts)

    parts = output = None
    if stream.schema is not None:
        parts = PartialAggregate(plain).output_schema(stream.schema)
        output = made().output_schema(parts)
    rows = stream._then(
        lambda: PartialAggregate(plain),
        parts,
        f"{name} batches",
        None if uid is None else f"{uid}-batches",
        stream._input_parallelism,
        own=(() if parts is None else parts.names),
    )
    operator = made()
    means = meaning(
        "aggregate of all rows",
        {"emit": emit},
        aggregates=given,
        fields=operator.known_fields,
        evolves=emit != "changes",
    )
    return by_keys(rows, operator.keys)._then(made, output, name, uid, 1, meaning=means)


def _aggregated_changes(stream: S, aggregates: Mapping[str, Aggregate], name: str, uid: str | None) -> S:
    """The aggregates of all rows of a stream of changes: those of one key, which every row has."""
    import polars as pl

    _check_aggregates(aggregates, name)
    keyed = stream._with_columns(
        (pl.lit(0, pl.Int8).alias(KEY),),
        f"{name} key",
        None if uid is None else f"{uid}-key",
        stream._input_parallelism,
        own=(KEY,),
    )
    rows = aggregated(keyed, (KEY,), aggregates, "changes", name, uid, 1)
    columns = [exact_column(column) for column in (*aggregates, CHANGE)]
    return rows._select(columns, f"{name} columns", None if uid is None else f"{uid}-columns", 1)


def checked_inputs(
    stream: S,
    aggregates: Mapping[str, Aggregate],
    errors_to: OutputTag | str | None,
    name: str,
    uid: str | None,
    taken: Collection[str] = (),
) -> tuple[S, StreamNode | None]:
    """The stream without the rows for which functions of `aggregates` fail, and the step that sets these aside.

    The step runs beside the step before, so rows are checked before they cross an exchange. Without `errors_to` there
    is no such step. `taken`: the side outputs that the aggregate has itself. Raises ConfigurationError.
    """
    if errors_to is None:
        return stream, None
    _check_aggregates(aggregates, name)
    functions = {label: each for label, each in aggregates.items() if each.kind is AggregateKind.USER}
    if not functions:
        raise ConfigurationError(
            f"{name}(errors_to=...): none of the aggregates calls a function of the program, such as "
            "tg.udaf(MyFunction(), 'x'); remove errors_to"
        )
    tag = error_tag(errors_to, stream.schema, name)
    if tag.name in taken:
        raise ConfigurationError(f"{name}: two side outputs are called {tag.name!r}; give errors_to= another name")
    factory = partial(InputCheck, functions, tag)
    checked = stream._then(
        factory,
        stream.schema,
        f"{name} errors",
        None if uid is None else f"{uid}-errors",
        stream._input_parallelism,
        side_outputs=(tag,),
    )
    return checked, checked._inputs[0][0]


def windowed_inputs(
    stream: S,
    keys: tuple[str, ...],
    aggregates: Mapping[str, Aggregate],
    name: str,
    uid: str | None,
    replaced: frozenset[str],
) -> tuple[S, dict[str, Aggregate], tuple[str, ...]]:
    """For windows: the stream with all columns that the aggregates read, aggregates that only read columns, and the
    columns that only they read. Raises ConfigurationError.
    """
    _check_aggregates(aggregates, name)
    computed: tuple[str, ...] = ()
    plain = dict(aggregates)
    if replaced or not _reads_columns(aggregates):
        from tidegate.api.streams.steps.aggregate_inputs import added_inputs, check_not_replaced, plain_inputs

        check_not_replaced(aggregates, replaced)
        if not _reads_columns(aggregates) and stream.schema is not None:
            stream, plain, computed = added_inputs(stream, aggregates, name, uid)
        else:
            stream, plain = plain_inputs(stream, kept_columns(stream, keys), aggregates, name, uid)
    return stream, with_value_sets(plain, stream.schema), computed


def _check_aggregates(aggregates: Mapping[str, Aggregate], name: str) -> None:
    check_not_reserved(aggregates, name)
    for label, aggregate in aggregates.items():
        if not isinstance(aggregate, Aggregate):
            raise ConfigurationError(
                f"{name}: {label}= is {type(aggregate).__name__}; it takes what tg.count(), tg.sum(...) and others make"
            )


def _prepared(
    stream: S,
    keys: tuple[str, ...],
    aggregates: Mapping[str, Aggregate],
    name: str,
    uid: str | None,
    parallelism: int | None,
    replaced: frozenset[str],
    emit: EmitMode,
    whole: bool = False,
) -> tuple[S, dict[str, Aggregate]]:
    """The stream with all columns that the aggregates read, and aggregates that only read columns.

    `whole`: the state of a key is in one place, because it goes in one piece.
    """
    if stream._updating is not None:
        if not stream._updating.changes:
            raise stream._updating.refuse(repr(name))
        if emit == "update" or not keys:
            reason = "what becomes of a row that is taken back cannot be said so: give the aggregate"
            raise stream._updating.refuse(repr(name), f'{reason} emit="changes"')
        if emit == "each":
            reason = "results that are out already would change with a row that is taken back: give the aggregate"
            raise stream._updating.refuse(repr(name), f'{reason} emit="changes"')
    _check_aggregates(aggregates, name)
    changing = stream._updating is not None
    if stream._updating is not None:
        for aggregate in aggregates.values():
            stream._updating.check_kind_is_no_key(repr(name), aggregate.columns)
            read = [column.expression for column in aggregate.columns if isinstance(column, ColumnExpression)]
            stream._updating.check_kind_is_not_read(repr(name), read, stream.schema)
    if _is_plain(aggregates) and not replaced:  # polars is not loaded for them
        return stream, kept_values(aggregates, stream.schema) if changing else dict(aggregates)
    from tidegate.api.streams.steps.aggregate_inputs import check_not_replaced, plain_inputs

    check_not_replaced(aggregates, replaced)
    if not changing and not whole:
        return marked(stream, aggregates, Counted(keys, name, uid, parallelism))
    stream, plain = plain_inputs(stream, kept_columns(stream, keys), aggregates, name, uid)
    return stream, kept_values(plain, stream.schema) if changing else with_value_sets(plain, stream.schema)


def _check_life(stream: StreamSteps, aggregates: Mapping[str, Aggregate], emit: EmitMode, name: str) -> None:
    """Raise ConfigurationError where a key that is forgotten would be missed."""
    if emit not in ("update", "each"):
        reason = "a row that is out could not be taken back" if emit == "changes" else "what is forgotten has no result"
        raise ConfigurationError(f'{name}: ttl= goes with emit="update" and emit="each", not {emit!r}: {reason}')
    if stream._updating is not None:
        raise ConfigurationError(
            f"{name}: ttl= cannot follow changes: rows of a key that is forgotten could not be taken back. Bound the "
            "state of the operators before it"
        )


def _is_plain(aggregates: Mapping[str, Aggregate]) -> bool:
    return _reads_columns(aggregates) and not any(map(is_distinct, aggregates.values()))


def _reads_columns(aggregates: Mapping[str, Aggregate]) -> bool:
    return all(isinstance(column, str) for a in aggregates.values() for column in a.columns)
