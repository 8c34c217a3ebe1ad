"""`StoredLayout`: the columns of stored aggregates, and how rows of an older program become rows of this one.

A restored program may have more aggregates than the one that wrote the state, or fewer, or wider types. Rules:

- The columns of an aggregate are found by the names that its function gives them, wherever they stand.
- An aggregate that nothing was stored for begins as if no row had come. What belongs to no aggregate is dropped: the
  user has agreed to that when the job was submitted (`tidegate/actors/restore/meaning_checks.py`).
- A type may widen as far as `tidegate/storage/schemas/evolution.py` allows. A sum of integers may become a sum of
  floats as long as its value stays exact, and a decimal may have more digits before the point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidegate.operators.aggregates.accumulators import value_specs
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_state import (
    CHOICES,
    NULL_WITHOUT_VALUES,
    AggregateKind,
    Fields,
    decimal_of,
    found_groups,
)
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.table_columns import BatchColumns
from tidegate.storage.errors import IncompatibleStateError
from tidegate.storage.schemas.evolution import widens

_SUMS = (AggregateKind.SUM, AggregateKind.MEAN)
_NULL_WITHOUT_ROWS = NULL_WITHOUT_VALUES | CHOICES
"""Aggregates whose first column is null until a row counts."""


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """The columns of one stored table: `head` (for example the keys), then the columns of the aggregates.

    `fields` holds the columns of each stored aggregate of the program. `whole` is true if these are all aggregates of
    the program and all stored columns, in the program's order.
    """

    head: pa.Schema
    fields: Fields
    whole: bool

    @staticmethod
    def of(schema: pa.Schema, head: Sequence[str], aggregates: Mapping[str, Aggregate]) -> StoredLayout | None:
        """The layout of a stored schema. None if it does not begin with the columns of `head`."""
        schema = pa.schema([field.remove_metadata() for field in schema])
        if schema.names[: len(head)] != list(head):
            return None
        rest = list(schema)[len(head) :]
        fields = found_groups(aggregates, rest)
        whole = [field for name in aggregates for field in fields.get(name, ())] == rest and len(fields) == len(
            aggregates
        )
        return StoredLayout(pa.schema(list(schema)[: len(head)]), fields, whole)


def field_refusal(kind: AggregateKind, before: Sequence[pa.Field], now: Sequence[pa.Field]) -> str | None:
    """Returns why stored columns of an aggregate cannot be converted to the program's columns, or None if they can."""
    if len(before) != len(now):
        return "it is kept in other columns"
    for old, new in zip(before, now, strict=True):
        if old.name != new.name:
            was, becomes = decimal_of(old.name), decimal_of(new.name)
            if was is None or becomes is None or was.scale != becomes.scale or was.precision > becomes.precision:
                return f"{old.name} cannot become {new.name}"
        exact_sum = kind in _SUMS and old.type == pa.int64() and new.type == pa.float64()
        if not exact_sum and not widens(old.type, new.type):
            return f"{old.type} cannot become {new.type} without a loss"
    return None


def fresh_columns(aggregate: Aggregate, fields: Sequence[pa.Field], rows: int) -> list[pa.Array]:
    """The columns of an aggregate for keys of which no row has counted."""
    made = BatchColumns(value_specs(aggregate, fields))
    made.begin(1)
    values = made.values()
    found = [values[field.name].take(pa.array(np.zeros(rows, dtype=np.int64))) for field in fields]
    if aggregate.kind in _NULL_WITHOUT_ROWS and not aggregate.taken_back and aggregate.function is None:
        found[0] = pa.nulls(rows, fields[0].type)
    return found


def raw_specs(schema: pa.Schema) -> list[ValueSpec]:
    """Value columns of stored rows that are only read, to be converted."""
    return [ValueSpec(field.name, field.type) for field in schema]


def converted(
    rows: pa.RecordBatch,
    head: pa.Schema,
    aggregates: Mapping[str, Aggregate],
    wanted: Fields,
    where: str,
) -> pa.RecordBatch:
    """Stored rows in the columns `head` and then those that are `wanted` of each aggregate.

    `where` begins errors. Raises IncompatibleStateError for columns that cannot be converted.
    """
    fields = [field for name in aggregates for field in wanted[name]]
    expected = pa.schema([*head, *fields])
    if rows.schema.equals(expected):
        return rows
    layout = StoredLayout.of(rows.schema, head.names, aggregates)
    if layout is None:
        raise IncompatibleStateError(f"{where}: the stored columns {rows.schema.names} do not begin with {head.names}")
    columns = list(rows.columns[: len(head)])
    for field, column in zip(head, columns, strict=True):
        if column.type != field.type:
            raise IncompatibleStateError(
                f"{where}: {field.name!r} was stored as {column.type}, and the program expects {field.type}; a key "
                "cannot change its type, because that decides which subtask has it. Cast the column back"
            )
    for name, aggregate in aggregates.items():
        before, now = layout.fields.get(name), wanted[name]
        if before is None:
            columns += fresh_columns(aggregate, now, rows.num_rows)
            continue
        refusal = field_refusal(aggregate.kind, before, now)
        if refusal is not None:
            raise IncompatibleStateError(f"{where}: {name}={aggregate}: {refusal}; {_ADVICE}")
        for old, new in zip(before, now, strict=True):
            column = rows.column(old.name)
            try:
                columns.append(column if old.type.equals(new.type) else column.cast(new.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise IncompatibleStateError(f"{where}: {name}={aggregate}: {error}; {_ADVICE}") from error
    return pa.RecordBatch.from_arrays(columns, schema=expected)


_ADVICE = "give the aggregate its former type, or give the operator a new uid to start without what was stored"
