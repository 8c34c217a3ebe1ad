"""Aggregates over everything, in two stages: each subtask makes one row of its batch, and one subtask merges the rows.

Rules:

- `PartialAggregate` keeps nothing: a batch becomes one row with the columns of the accumulators' state. So what crosses
  the exchange, and what the one subtask has to do, does not grow with the rows.
- `MergedAggregate` keeps the accumulators of all rows in a table like that of keyed aggregates, under one key.
- The result is one row; as changes, the one before it is taken back. In mode `final` there is one also where no row has
  come, as in SQL: counts are 0 then, lists
  are empty, a function of the program's own says what it is, and anything else is null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from tidegate.operators.aggregates.accumulators import Accumulator, make_accumulator, value_specs
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_function import of_nothing
from tidegate.operators.aggregates.aggregate_kinds import AggregateKind
from tidegate.operators.aggregates.aggregate_state import Fields, result_type, stored_groups
from tidegate.operators.aggregates.changing_aggregate import ChangingAggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.changes import with_kind
from tidegate.operators.operator import Columns, Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.state.common.batch_column import BatchColumns
from tidegate.state.key_index.hash_table import Upserted
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.reserved_names import own_name

KEY = own_name("everything")
"""The one key."""


class PartialAggregate(Operator):
    """One row for each batch: what `MergedAggregate` merges. Stateless."""

    def __init__(self, aggregates: Mapping[str, Aggregate]) -> None:
        self._aggregates = dict(aggregates)
        self._seen_schema: pa.Schema | None = None
        self._row = BatchColumns(())
        self._accumulators: list[Accumulator] = []

    def needed_columns(self, after: Columns) -> Columns:
        """The columns that are aggregated."""
        columns = (column for aggregate in self._aggregates.values() for column in aggregate.columns)
        return frozenset(column for column in columns if isinstance(column, str))

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """The key, and the columns of the accumulators. Raises ConfigurationError for columns that do not fit."""
        fields = [field for name, a in self._aggregates.items() for field in a.state_fields(name, input_schema)]
        return pa.schema([pa.field(KEY, pa.int8()), *fields])

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the accumulators of a batch. OperatorError if its columns do not fit, or a sum overflows."""
        with blame(self.context, batch):
            if self._seen_schema is None or not batch.schema.equals(self._seen_schema):
                self._begin(batch.schema)
            self._row.begin(1)
            slots = np.zeros(batch.num_rows, dtype=np.int32)
            for accumulator in self._accumulators:
                accumulator.update(batch, slots)
            row = pa.RecordBatch.from_pydict({KEY: pa.array([0], pa.int8()), **self._row.values()})
        emit(row)

    def _begin(self, schema: pa.Schema) -> None:
        fields = {name: a.state_fields(name, schema) for name, a in self._aggregates.items()}
        self._row = BatchColumns(
            [spec for name, a in self._aggregates.items() for spec in value_specs(a, fields[name])]
        )
        self._accumulators = [make_accumulator(a, fields[name], self._row) for name, a in self._aggregates.items()]
        self._seen_schema = schema


class MergedAggregate(KeyedAggregate):
    """Merges rows of `PartialAggregate`, in one subtask.

    `empty` is the schema of the result, for where no row has come; None: then there is no result either.
    """

    def __init__(
        self,
        aggregates: Mapping[str, Aggregate],
        emit: Literal["update", "final"] = "update",
        empty: pa.Schema | None = None,
        input_schema: pa.Schema | None = None,
    ) -> None:
        super().__init__((KEY,), aggregates, emit, input_schema=input_schema)
        self._empty = empty

    def needed_columns(self, after: Columns) -> Columns:
        """All: no more was sent than is merged."""
        return None

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """The aggregates, for rows of `PartialAggregate`."""
        fields = self._fields_for(input_schema)
        return pa.schema([pa.field(name, result_type(a, fields[name])) for name, a in self._aggregates.items()])

    def finish(self, emit: Emit) -> Iterator[None]:
        """In mode `final`, emit the result."""
        yield from super().finish(emit)
        if self._emit_mode == "final" and self._table is None and self._empty is not None:
            aggregates = zip(self._aggregates.values(), self._empty, strict=True)
            columns = [_of_nothing(aggregate, field.type) for aggregate, field in aggregates]
            emit(pa.RecordBatch.from_arrays(columns, schema=self._empty))
            yield

    def _fields_for(self, schema: pa.Schema) -> Fields:
        fields = stored_groups(self._aggregates, list(schema)[1:])
        if fields is None:
            raise ConfigurationError(f"{schema.names} are not the accumulators of {list(self._aggregates)}")
        return fields

    def _take_in(self, accumulator: Accumulator, name: str, batch: pa.RecordBatch, upserted: Upserted) -> None:
        accumulator.merge(upserted.slots, [batch.column(field.name) for field in self._fields[name]])

    def _output(self, keys: pa.RecordBatch, results: Sequence[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(list(results), names=list(self._aggregates))


class ChangesOfAll(MergedAggregate, ChangingAggregate):
    """The same, as changes: each batch takes the row back that it replaces."""

    def __init__(self, aggregates: Mapping[str, Aggregate], input_schema: pa.Schema | None = None) -> None:
        super().__init__(aggregates, input_schema=input_schema)
        self._shown_keys = ()

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """The aggregates, and the kind of the change."""
        return with_kind(MergedAggregate.output_schema(self, input_schema))


def _of_nothing(aggregate: Aggregate, data_type: pa.DataType) -> pa.Array:
    """The result where no row has come."""
    if aggregate.function is not None:
        return of_nothing(aggregate.function)
    nothing = {AggregateKind.COUNT: 0, AggregateKind.COLLECT_LIST: []}
    return pa.array([nothing.get(aggregate.kind)], data_type)
