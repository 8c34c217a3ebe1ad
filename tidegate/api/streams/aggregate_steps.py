"""Builds the steps of an aggregate: the columns that it reads, the marking of distinct values, and the aggregate
itself.

`KeyedStream.aggregate` and `Stream.aggregate` call this module. Most aggregates are one operator. Expressions add a
`select` before the exchange. Each column with a distinct count adds an exchange by keys and values. An aggregate over
all rows reduces each batch to one row before the exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.streams.changelog_mode import ChangelogMode
from tidegate.api.streams.event_time import uses_event_time
from tidegate.api.streams.state_meanings import column_of, meaning, ttl_text
from tidegate.api.streams.step import Step, StepOptions
from tidegate.operators.aggregates.aggregate import Aggregate, count
from tidegate.operators.aggregates.aggregate_state import AggregateKind
from tidegate.operators.aggregates.changing_aggregate import (
    KEY,
    ChangingAggregate,
    GlobalAggregate,
    GlobalChangingAggregate,
    PartialAggregate,
)
from tidegate.operators.aggregates.column_expressions import ColumnExpression
from tidegate.operators.aggregates.expiring_aggregate import ExpiringAggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.aggregates.multisets import kept_values, with_value_sets
from tidegate.operators.changes import CHANGE
from tidegate.operators.functions.failing_rows import InputCheck, error_tag
from tidegate.operators.local_aggregation import LocalAggregation
from tidegate.operators.ranking.distinct_rows import VIEWS_MAX, DistinctRows, DistinctViews
from tidegate.protocol.edges import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import check_not_reserved
from tidegate.storage.schemas.polars_frames import exact_column
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    from tidegate.api.streams.stream import Stream

EmitMode = Literal["update", "each", "changes", "final"]


_LISTED_MAX = 1 << 22
"""Greatest number of values in all lists together that an aggregate with `emit="each"` emits in one batch."""
_STEP_NAME_CHARACTERS = 100


def keyed_aggregate(
    stream: Stream,
    keys: tuple[str, ...],
    replaced: frozenset[str],
    aggregates: Mapping[str, Aggregate],
    *,
    emit: EmitMode,
    ttl: str | timedelta | int | None,
    ttl_time: str,
    errors_to: OutputTag | str | None,
    options: StepOptions,
) -> Stream:
    """Builds the steps of `KeyedStream.aggregate`. `replaced` are columns that a key of the same name has replaced.

    Raises ConfigurationError for arguments that are not valid or contradict each other.
    """
    key_ttl = KeyTtl.of(ttl, ttl_time, stream.timestamp)
    if key_ttl is not None and key_ttl.time is not None:
        uses_event_time("aggregate(ttl=...)", stream._inputs)
    rows, errors = checked_inputs(stream, aggregates, errors_to, options)
    made = _aggregated(rows, keys, aggregates, emit, options, replaced, key_ttl)
    changelog = None
    if emit in ("update", "changes"):
        changelog = ChangelogMode.of(made._inputs[0][0], keys, changes=emit == "changes")
    return made._derived(keyed_by=keys, timestamp=made.timestamp, changelog=changelog, errors_of=errors)


def total_aggregate(
    stream: Stream,
    aggregates: Mapping[str, Aggregate],
    *,
    emit: EmitMode,
    errors_to: OutputTag | str | None,
    options: StepOptions,
) -> Stream:
    """Builds the steps of `Stream.aggregate`, which aggregates all rows.

    Raises ConfigurationError for arguments that are not valid.
    """
    rows, errors = checked_inputs(stream, aggregates, errors_to, options)
    made = _aggregated_all(rows, aggregates, emit, options)
    changelog = None
    if emit in ("update", "changes"):
        changelog = ChangelogMode.of(made._inputs[0][0], (), changes=emit == "changes")
    return made._derived(timestamp=made.timestamp, changelog=changelog, errors_of=errors)


@dataclass(frozen=True, slots=True)
class KeyTtl:
    """The time to live of keys, in ms: a key is kept for this time after its last row."""

    ttl_ms: int
    time: str | None
    """Name of the event-time column by which the time to live is measured, or None for processing time."""

    @staticmethod
    def of(ttl: str | timedelta | int | None, domain: str, time: str | None) -> KeyTtl | None:
        """Returns the time to live from the arguments `ttl` and `ttl_time` of an aggregate, or None without `ttl`.

        `time` is the event-time column of the stream, or None. Raises ConfigurationError for a wrong duration, or for
        event time without such a column.
        """
        if ttl is None:
            return None
        ttl_ms = parse_duration_ms(ttl, setting="aggregate(ttl=...)")
        if domain == "processing":
            return KeyTtl(ttl_ms, None)
        if domain != "event":
            raise ConfigurationError(f'aggregate: ttl_time must be "event" or "processing", not {domain!r}')
        if time is None:
            raise ConfigurationError(
                "aggregate: ttl= is event time, and the stream has none: call assign_timestamps before key_by, or give "
                'ttl_time="processing"'
            )
        return KeyTtl(ttl_ms, time)


def _aggregated(
    stream: Stream,
    keys: tuple[str, ...],
    given: Mapping[str, Aggregate],
    emit: EmitMode,
    options: StepOptions,
    replaced: frozenset[str] = frozenset(),
    key_ttl: KeyTtl | None = None,
) -> Stream:
    if key_ttl is not None:
        _check_ttl(stream, emit, options.name)
    # Values that are counted by another step arrive here in another order than their rows.
    whole = key_ttl is not None or emit == "each"
    stream, plain = _prepared(stream, keys, given, options, replaced, emit, whole)
    retracts = stream._changelog is not None
    # The factory travels to the tasks: it takes the columns along, and not the stream with its whole program.
    rows_schema = stream.schema

    def made() -> KeyedAggregate:
        if key_ttl is not None:
            return ExpiringAggregate(
                keys, plain, key_ttl.ttl_ms, key_ttl.time, rows_schema, "each" if emit == "each" else "update"
            )
        if emit == "changes" or (emit == "final" and retracts):
            return ChangingAggregate(keys, plain, emit, retracts, rows_schema)
        return KeyedAggregate(keys, plain, emit, rows_schema)

    operator = made()
    means = meaning(
        "aggregate",
        {
            "keys": keys,
            # The state is the same: results of later rows are right whichever of the two wrote it.
            "emit": "update or each" if emit in ("update", "each") else emit,
            "input": "changes" if retracts else "rows",
            "ttl": None if key_ttl is None else ttl_text(key_ttl.ttl_ms, key_ttl.time),
        },
        aggregates=given,
        fields=operator.known_fields,
        rows={"": (stream.schema, keys)},
        evolves=emit != "changes" and not retracts,
    )
    batch_rows = _rows_at_once(plain) if emit == "each" else None
    return stream._by_keys(keys)._then(
        Step(
            operator=made,
            schema=None if stream.schema is None else operator.output_schema(stream.schema),
            options=replace(options, batch_rows=batch_rows),
            takes_changes=True,
            combines=None if retracts or whole else LocalAggregation(keys, plain),
            meaning=means,
            retimes=stream.timestamp if emit == "each" and _gives_other_times(given, stream.timestamp) else None,
        )
    )


def _gives_other_times(aggregates: Mapping[str, Aggregate], time: str | None) -> bool:
    """Returns whether one of the aggregates has the name of the event-time column, but does not copy the time of the
    row.
    """
    aggregate = None if time is None else aggregates.get(time)
    return aggregate is not None and aggregate != Aggregate(AggregateKind.LAST, str(time))


def _rows_at_once(aggregates: Mapping[str, Aggregate]) -> tuple[int, int] | None:
    """Returns the smallest and the largest number of rows in one call for `emit="each"` with list aggregates, so that
    the emitted lists stay small.

    None without list aggregates.
    """
    limits = [aggregate.limit for aggregate in aggregates.values() if aggregate.limit is not None]
    return (1, max(1, _LISTED_MAX // max(limits))) if limits else None


def _aggregated_all(stream: Stream, given: Mapping[str, Aggregate], emit: EmitMode, options: StepOptions) -> Stream:
    if emit == "each":
        raise ConfigurationError(
            f'{options.name}: emit="each" needs keys, because without them several subtasks add up rows before the '
            'results are merged. Give all rows one key: key_by(pl.lit(0).alias("all"))'
        )
    if emit not in ("update", "changes", "final"):
        raise ConfigurationError(f'{options.name}: emit must be "update", "changes" or "final", not {emit!r}')
    if stream._changelog is not None and stream._changelog.changes and emit == "changes":
        return _aggregated_changes(stream, given, options)
    stream, plain = _prepared(stream, (), given, options, frozenset(), emit)

    def made() -> GlobalAggregate:
        return (
            GlobalChangingAggregate(plain, parts) if emit == "changes" else GlobalAggregate(plain, emit, output, parts)
        )

    parts = output = None
    if stream.schema is not None:
        parts = PartialAggregate(plain).output_schema(stream.schema)
        output = made().output_schema(parts)
    rows = stream._then(
        Step(
            operator=lambda: PartialAggregate(plain),
            schema=parts,
            options=options.part("batches", stream._input_parallelism),
            own=() if parts is None else parts.names,
        )
    )
    operator = made()
    means = meaning(
        "aggregate of all rows",
        {"emit": emit},
        aggregates=given,
        fields=operator.known_fields,
        evolves=emit != "changes",
    )
    return rows._by_keys(operator.keys)._then(
        Step(operator=made, schema=output, options=StepOptions(options.name, options.uid, 1), meaning=means)
    )


def _aggregated_changes(stream: Stream, aggregates: Mapping[str, Aggregate], options: StepOptions) -> Stream:
    """Builds the aggregate of all rows of a stream of changes.

    Adds a constant key, so that one subtask gets all rows.
    """
    import polars as pl

    _check_aggregates(aggregates, options.name)
    keyed = stream._with_columns(
        (pl.lit(0, pl.Int8).alias(KEY),), options.part("key", stream._input_parallelism), own=(KEY,)
    )
    rows = _aggregated(keyed, (KEY,), aggregates, "changes", StepOptions(options.name, options.uid, 1))
    columns = [exact_column(column) for column in (*aggregates, CHANGE)]
    return rows._select(columns, options.part("columns", 1))


def checked_inputs(
    stream: Stream,
    aggregates: Mapping[str, Aggregate],
    errors_to: OutputTag | str | None,
    options: StepOptions,
    taken: Collection[str] = (),
) -> tuple[Stream, StreamNode | None]:
    """Adds a step that sends the rows for which a function in `aggregates` fails to a side output. Returns the stream
    and this step.

    The step is chained to the previous step, so rows are checked before they are sent over an exchange. Without
    `errors_to` no step is added, and None is returned for the step. `taken` names the side outputs of the aggregate,
    which `errors_to` must not use. Raises ConfigurationError if no aggregate has a function.
    """
    if errors_to is None:
        return stream, None
    _check_aggregates(aggregates, options.name)
    functions = {label: each for label, each in aggregates.items() if each.kind is AggregateKind.USER}
    if not functions:
        raise ConfigurationError(
            f"{options.name}(errors_to=...): none of the aggregates calls a function of the program, such as "
            "tg.udaf(MyFunction(), 'x'); remove errors_to="
        )
    tag = error_tag(errors_to, stream.schema, options.name)
    if tag.name in taken:
        raise ConfigurationError(
            f"{options.name}: two side outputs are called {tag.name!r}; give errors_to= another name"
        )
    checked = stream._then(
        Step(
            operator=partial(InputCheck, functions, tag),
            schema=stream.schema,
            options=options.part("errors", stream._input_parallelism),
            side_outputs=(tag,),
        )
    )
    return checked, checked._inputs[0][0]


def windowed_inputs(
    stream: Stream,
    keys: tuple[str, ...],
    aggregates: Mapping[str, Aggregate],
    options: StepOptions,
    replaced: frozenset[str],
) -> tuple[Stream, dict[str, Aggregate], tuple[str, ...]]:
    """Adds the columns that windowed aggregates compute from expressions.

    Returns the stream, the aggregates over plain columns, and the names of added columns. Raises ConfigurationError for
    expressions that cannot be computed.
    """
    _check_aggregates(aggregates, options.name)
    computed: tuple[str, ...] = ()
    plain = dict(aggregates)
    if replaced or not _reads_columns(aggregates):
        from tidegate.api.streams.aggregate_inputs import added_inputs, check_not_replaced, plain_inputs

        check_not_replaced(aggregates, replaced)
        if not _reads_columns(aggregates) and stream.schema is not None:
            stream, plain, computed = added_inputs(stream, aggregates, options)
        else:
            stream, plain = plain_inputs(stream, kept_columns(stream, keys), aggregates, options)
    return stream, with_value_sets(plain, stream.schema), computed


def _check_aggregates(aggregates: Mapping[str, Aggregate], name: str) -> None:
    check_not_reserved(aggregates, name)
    for label, aggregate in aggregates.items():
        if not isinstance(aggregate, Aggregate):
            raise ConfigurationError(
                f"{name}: {label}= is {type(aggregate).__name__}; give an aggregate, such as tg.count() or tg.sum('x')"
            )


def _prepared(
    stream: Stream,
    keys: tuple[str, ...],
    aggregates: Mapping[str, Aggregate],
    options: StepOptions,
    replaced: frozenset[str],
    emit: EmitMode,
    whole: bool = False,
) -> tuple[Stream, dict[str, Aggregate]]:
    """Adds the columns that the aggregates read. Returns the stream, and the aggregates over plain columns.

    `whole` is True if all state of a key must be in one operator, because it expires together. Raises
    ConfigurationError if the stream's changelog does not allow the aggregate.
    """
    name = options.name
    if stream._changelog is not None:
        if not stream._changelog.changes:
            raise stream._changelog.refuse(repr(name))
        if emit == "update" or not keys:
            reason = 'its result could not show that a row was retracted: give the aggregate emit="changes"'
            raise stream._changelog.refuse(repr(name), reason)
        if emit == "each":
            reason = 'a retracted row would change earlier results: give the aggregate emit="changes"'
            raise stream._changelog.refuse(repr(name), reason)
    _check_aggregates(aggregates, name)
    changing = stream._changelog is not None
    if stream._changelog is not None:
        for aggregate in aggregates.values():
            stream._changelog.check_kind_is_no_key(repr(name), aggregate.columns)
            read = [column.expression for column in aggregate.columns if isinstance(column, ColumnExpression)]
            stream._changelog.check_kind_is_not_read(repr(name), read, stream.schema)
    if _is_plain(aggregates) and not replaced:  # polars is not loaded for them
        return stream, kept_values(aggregates, stream.schema) if changing else dict(aggregates)
    from tidegate.api.streams.aggregate_inputs import check_not_replaced, plain_inputs

    check_not_replaced(aggregates, replaced)
    if not changing and not whole:
        return _with_distinct_values(stream, keys, aggregates, options)
    stream, plain = plain_inputs(stream, kept_columns(stream, keys), aggregates, options)
    return stream, kept_values(plain, stream.schema) if changing else with_value_sets(plain, stream.schema)


def _check_ttl(stream: Stream, emit: EmitMode, name: str) -> None:
    """Raises ConfigurationError for a time to live with an aggregate whose results would be wrong after a key has
    expired.
    """
    if emit not in ("update", "each"):
        reason = "a forgotten key cannot be retracted" if emit == "changes" else "a forgotten key has no final result"
        raise ConfigurationError(f'{name}: ttl= needs emit="update" or emit="each", not {emit!r}: {reason}')
    if stream._changelog is not None:
        raise ConfigurationError(
            f"{name}: ttl= is not supported behind changes, because a row of a key that is no longer stored could "
            "not be retracted; remove ttl=, and limit the state of the steps before"
        )


def _is_plain(aggregates: Mapping[str, Aggregate]) -> bool:
    return _reads_columns(aggregates) and not any(map(is_distinct, aggregates.values()))


def _reads_columns(aggregates: Mapping[str, Aggregate]) -> bool:
    return all(isinstance(column, str) for a in aggregates.values() for column in a.columns)


def is_distinct(aggregate: Aggregate) -> bool:
    """Returns whether an aggregate counts distinct values."""
    return aggregate.kind is AggregateKind.COUNT_DISTINCT


def _with_distinct_values(
    stream: Stream, keys: tuple[str, ...], aggregates: Mapping[str, Aggregate], options: StepOptions
) -> tuple[Stream, dict[str, Aggregate]]:
    """Adds a step for each column with a distinct count, which marks the first row of each value.

    Returns the stream with the marks, and aggregates over plain columns that count the marks.
    """
    views = {(aggregate.column, aggregate.condition) for aggregate in aggregates.values() if is_distinct(aggregate)}
    if len({column for column, _ in views}) < len(views):  # one column is counted under several conditions
        return _marked_under_conditions(stream, keys, aggregates, options)
    return _marked_apart(stream, keys, aggregates, options)


def _given(aggregates: Mapping[str, Aggregate]) -> set[str]:
    """Returns the names of the input columns that the aggregates read."""
    return {column for aggregate in aggregates.values() for column in aggregate.columns if isinstance(column, str)}


def _marked_apart(
    stream: Stream, keys: tuple[str, ...], aggregates: Mapping[str, Aggregate], options: StepOptions
) -> tuple[Stream, dict[str, Aggregate]]:
    """Adds, for each counted column, an operator with its own set of distinct values.

    A value is treated as null where the aggregate's condition is not true.
    """
    from tidegate.api.streams.aggregate_inputs import counted_column, plain_inputs

    of_columns = {
        label: replace(a, column=counted_column(a), condition=None) if is_distinct(a) else a
        for label, a in aggregates.items()
    }
    narrow = any(map(is_distinct, aggregates.values()))
    stream, plain = plain_inputs(stream, kept_columns(stream, keys), of_columns, options, narrow=narrow)
    flags: dict[str, str] = {}
    texts = {str(plain[label].column): column_of(a.column) for label, a in of_columns.items()}
    for column in dict.fromkeys(str(a.column) for a in plain.values() if is_distinct(a)):
        flag = free_name(f"first {column}", {*kept_columns(stream, keys), *_given(plain), *flags.values()})
        operator = DistinctRows((*keys, column), flag)
        # A uid contains no expression: it names files, and outlasts a changed text of an expression.
        uid = f"{options.uid}-distinct-{len(flags)}"
        if options.uid is None:
            uid = stream._program.new_uid(f"{options.name} distinct", None)
        stream = stream._by_keys(operator.keys)._then(
            Step(
                operator=partial(DistinctRows, (*keys, column), flag),
                schema=None if stream.schema is None else operator.output_schema(stream.schema),
                options=StepOptions(
                    f"{options.name} distinct {column}"[:_STEP_NAME_CHARACTERS], uid, options.parallelism
                ),
                meaning=meaning(
                    "distinct values", {"keys": keys, "of": texts[column]}, rows={"": (stream.schema, operator.keys)}
                ),
            )
        )
        flags[column] = flag
    return stream, {label: count().where(flags[str(a.column)]) if is_distinct(a) else a for label, a in plain.items()}


def _marked_under_conditions(
    stream: Stream, keys: tuple[str, ...], aggregates: Mapping[str, Aggregate], options: StepOptions
) -> tuple[Stream, dict[str, Aggregate]]:
    """Adds, for each counted column, one operator for all of its conditions: its set of distinct values has a bit for
    each condition.
    """
    from tidegate.api.streams.aggregate_inputs import plain_inputs

    kept = kept_columns(stream, keys)
    stream, plain = plain_inputs(stream, kept, aggregates, options, narrow=True)
    taken = {*kept, *_given(plain)}
    flags: dict[str, str] = {}
    views: dict[str, dict[str, str | None]] = {}
    """For each counted column, the mark columns and the condition of each."""
    for label, aggregate in plain.items():
        if is_distinct(aggregate):
            of_column = views.setdefault(str(aggregate.column), {})
            condition = None if aggregate.condition is None else str(aggregate.condition)
            known = next((flag for flag, has in of_column.items() if has == condition), None)
            flags[label] = free_name(f"first {label}", taken) if known is None else known
            taken.add(flags[label])
            of_column[flags[label]] = condition
    parts = [(column, part) for column, of_column in views.items() for part in _parts(of_column)]
    texts = {str(plain[label].column): column_of(a.column) for label, a in aggregates.items()}
    texts |= {str(plain[label].condition): column_of(a.condition) for label, a in aggregates.items()}
    others = {str(column) for aggregate in plain.values() if not is_distinct(aggregate) for column in aggregate.columns}
    for number, (column, part) in enumerate(parts):
        later = {name for each, its in parts[number + 1 :] for name in (each, *its.values())}
        dropped = frozenset({column, *filter(None, part.values())} - later - others - set(kept))
        made = partial(DistinctViews, (*keys, column), part, dropped)
        operator = made()
        conditions = ["" if condition is None else texts[condition] for condition in part.values()]
        uid = f"{options.uid}-values-{number}"
        if options.uid is None:
            uid = stream._program.new_uid(f"{options.name} values", None)
        stream = stream._by_keys(operator.keys)._then(
            Step(
                operator=made,
                schema=None if stream.schema is None else operator.output_schema(stream.schema),
                options=StepOptions(
                    f"{options.name} values {column}"[:_STEP_NAME_CHARACTERS], uid, options.parallelism
                ),
                meaning=meaning(
                    "distinct values",
                    {"keys": keys, "of": texts[column], "under": conditions},
                    rows={"": (stream.schema, tuple(dict.fromkeys((*keys, column))))},
                ),
            )
        )
    return stream, {label: count().where(flags[label]) if is_distinct(a) else a for label, a in plain.items()}


def _parts(flags: Mapping[str, str | None]) -> list[dict[str, str | None]]:
    """Divides the mark columns of a counted column into groups, one for each operator, because an operator supports up
    to `VIEWS_MAX` conditions.

    `flags` maps each mark column to its condition.
    """
    pairs = list(flags.items())
    return [dict(pairs[first : first + VIEWS_MAX]) for first in range(0, len(pairs), VIEWS_MAX)]


def kept_columns(stream: Stream, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the columns that an aggregate step needs even if no aggregate reads them: keys and event time."""
    return (*keys, *(() if stream.timestamp is None else (stream.timestamp,)))


def free_name(name: str, taken: Collection[str]) -> str:
    """Returns `name` with underscores appended until it differs from the names in `taken`."""
    while name in taken:
        name += "_"
    return name
