"""Builds the steps that mark distinct values, so that to count them is to count marked rows.

`stream_aggregates.py` calls it for running aggregates. Each counted column is marked in an exchange by the keys and its
values. Conditions on one column share that (`DistinctViews`). Where no column has two conditions there is one
`DistinctRows` for each count, of a column that is null where the condition is not true.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from tidegate.api.streams.steps.meanings import column_of, meaning
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.operators.aggregates.aggregate import Aggregate, count
from tidegate.operators.aggregates.aggregate_state import AggregateKind
from tidegate.operators.ranking.distinct_rows import VIEWS_MAX, DistinctRows, DistinctViews
from tidegate.protocol.partitioning import Partitioning, PartitioningKind

S = TypeVar("S", bound=StreamSteps)
_NAME_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class Counted:
    """For which aggregate values are counted: its key columns, its name and uid, and how many subtasks mark them."""

    keys: tuple[str, ...]
    name: str
    uid: str | None
    parallelism: int | None


def is_distinct(aggregate: Aggregate) -> bool:
    """Whether it counts distinct values."""
    return aggregate.kind is AggregateKind.COUNT_DISTINCT


def marked(stream: S, aggregates: Mapping[str, Aggregate], of: Counted) -> tuple[S, dict[str, Aggregate]]:
    """The stream with marks, and aggregates that count these and only read columns. Raises ConfigurationError."""
    return _together(stream, aggregates, of) if _share(aggregates) else _each_apart(stream, aggregates, of)


def _share(aggregates: Mapping[str, Aggregate]) -> bool:
    """Whether distinct values of one column are counted under several conditions."""
    views = {(aggregate.column, aggregate.condition) for aggregate in aggregates.values() if is_distinct(aggregate)}
    return len({column for column, _ in views}) < len(views)


def _given(aggregates: Mapping[str, Aggregate]) -> set[str]:
    """The columns of the stream that they read."""
    return {column for aggregate in aggregates.values() for column in aggregate.columns if isinstance(column, str)}


def _each_apart(stream: S, aggregates: Mapping[str, Aggregate], of: Counted) -> tuple[S, dict[str, Aggregate]]:
    """A table of values for each column, which is null where a condition is not true."""
    from tidegate.api.streams.steps.aggregate_inputs import counted_column, plain_inputs

    of_columns = {
        label: replace(a, column=counted_column(a), condition=None) if is_distinct(a) else a
        for label, a in aggregates.items()
    }
    narrow = any(map(is_distinct, aggregates.values()))
    stream, plain = plain_inputs(stream, kept_columns(stream, of.keys), of_columns, of.name, of.uid, narrow=narrow)
    flags: dict[str, str] = {}
    texts = {str(plain[label].column): column_of(a.column) for label, a in of_columns.items()}
    for column in dict.fromkeys(str(a.column) for a in plain.values() if is_distinct(a)):
        flag = free_name(f"first {column}", {*kept_columns(stream, of.keys), *_given(plain), *flags.values()})
        columns = (*of.keys, column)
        operator = DistinctRows(columns, flag)
        output = None if stream.schema is None else operator.output_schema(stream.schema)
        stream = by_keys(stream, operator.keys)._then(
            partial(DistinctRows, columns, flag),
            output,
            f"{of.name} distinct {column}"[:_NAME_CHARACTERS],
            # A uid is made of no expression: it names files, and lasts when the text of an expression does not.
            stream._program.new_uid(f"{of.name} distinct", None)
            if of.uid is None
            else f"{of.uid}-distinct-{len(flags)}",
            of.parallelism,
            meaning=meaning(
                "distinct values", {"keys": of.keys, "of": texts[column]}, rows={"": (stream.schema, operator.keys)}
            ),
        )
        flags[column] = flag
    return stream, {label: count().where(flags[str(a.column)]) if is_distinct(a) else a for label, a in plain.items()}


def _together(stream: S, aggregates: Mapping[str, Aggregate], of: Counted) -> tuple[S, dict[str, Aggregate]]:
    """A table of values for each column, with a bit for each condition."""
    from tidegate.api.streams.steps.aggregate_inputs import plain_inputs

    program, kept = stream._program, kept_columns(stream, of.keys)
    stream, plain = plain_inputs(stream, kept, aggregates, of.name, of.uid, narrow=True)
    taken = {*kept, *_given(plain)}
    flags: dict[str, str] = {}
    views: dict[str, dict[str, str | None]] = {}
    """Of each counted column its marks, and the condition of each."""
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
        made = partial(DistinctViews, (*of.keys, column), part, dropped)
        operator = made()
        before_marks = stream.schema
        stream = by_keys(stream, operator.keys)._then(
            made,
            None if stream.schema is None else operator.output_schema(stream.schema),
            f"{of.name} values {column}"[:_NAME_CHARACTERS],
            program.new_uid(f"{of.name} values", None) if of.uid is None else f"{of.uid}-values-{number}",
            of.parallelism,
            meaning=meaning(
                "distinct values",
                {
                    "keys": of.keys,
                    "of": texts[column],
                    "under": ["" if condition is None else texts[condition] for condition in part.values()],
                },
                rows={"": (before_marks, tuple(dict.fromkeys((*of.keys, column))))},
            ),
        )
    return stream, {label: count().where(flags[label]) if is_distinct(a) else a for label, a in plain.items()}


def _parts(flags: Mapping[str, str | None]) -> list[dict[str, str | None]]:
    """As many operators as it takes: one has room for `VIEWS_MAX` conditions."""
    pairs = list(flags.items())
    return [dict(pairs[first : first + VIEWS_MAX]) for first in range(0, len(pairs), VIEWS_MAX)]


def kept_columns(stream: StreamSteps, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Columns that pass, whether an aggregate reads them or not."""
    return (*keys, *(() if stream.timestamp is None else (stream.timestamp,)))


def free_name(name: str, taken: Collection[str]) -> str:
    """A name for a column that is not taken."""
    while name in taken:
        name += "_"
    return name


def by_keys(stream: S, keys: tuple[str, ...]) -> S:
    """The stream, with rows of equal keys at one subtask."""
    return stream._partitioned(Partitioning(PartitioningKind.HASH, keys))
