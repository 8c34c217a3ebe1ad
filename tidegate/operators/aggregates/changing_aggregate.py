"""`ChangingAggregate` computes running aggregates that emit changes, and that support retractions.

Rules:

- For each key whose results differ, a batch emits the old row (`-U`) and the new row (`+U`). A key without a previous
  row emits `+I`, and a key whose last row was retracted emits `-D`. Retractions come before all new rows.
- After a stream of changes (`retracts`) the state counts the rows of each key. When the last row is retracted, the key
  is removed. This does not affect the other keys of the batch.
- Only aggregates that can be inverted support retractions: counts, sums, means, variances, and `tg.udaf` functions with
  `retract`. A minimum cannot, because the next greater value is not stored. Sums of floats keep rounding errors after a
  retraction, and NaN stays.
- Retracting a row that never came is an error, because the stream contradicts itself.

Aggregates over all rows (without a key) work in two stages:

- `PartialAggregate` keeps no state. It turns a batch into one row with the columns of the accumulators' state, so the
  data sent over the exchange, and the work of the single subtask after it, depend on the number of batches and not of
  rows.
- `GlobalAggregate` keeps the accumulators of all rows in a table like a keyed aggregate, under one key.
- The result is one row. `GlobalChangingAggregate` retracts the previous result row. In mode `final` there is a row even
  without input rows, as in SQL: counts are 0, lists are empty, a `tg.udaf` function returns its result for its initial
  state, and all other aggregates are null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.aggregates.accumulators import Accumulator, make_accumulator, value_specs
from tidegate.operators.aggregates.aggregate import Aggregate, count
from tidegate.operators.aggregates.aggregate_function import can_retract, of_nothing
from tidegate.operators.aggregates.aggregate_state import SPREADS, AggregateKind, Fields, result_type, stored_groups
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.changes import (
    CHANGE,
    DELETE,
    INSERT,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    Flags,
    kinds_of,
    rows_that_come,
    with_kind,
)
from tidegate.operators.operator import Columns, Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.state.common.backend import VectorTable
from tidegate.state.common.table_columns import BatchColumns
from tidegate.state.kernels.columns import fixed_values, storage_dtype
from tidegate.state.key_index.hash_table import Upserted
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import own_name

ROWS = own_name("changes_rows")
"""Name of the state column that counts the rows of a key."""

CALCULATED = SPREADS | {AggregateKind.COUNT, AggregateKind.SUM, AggregateKind.MEAN}
"""Built-in kinds of aggregates that support retractions."""


@runtime_checkable
class _Retractable(Protocol):
    def retract(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        """Removes retracted rows of a batch from the state of their slots."""
        ...


class ChangingAggregate(KeyedAggregate):
    """Running aggregates of each key, emitted as a changelog (`+I`, `-U`, `+U`, `-D`), or once at the end with
    `emit="final"`.

    `retracts` is True if the input is a changelog too, which may retract rows.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        aggregates: Mapping[str, Aggregate],
        emit: Literal["changes", "final"] = "changes",
        retracts: bool = False,
        input_schema: pa.Schema | None = None,
    ) -> None:
        self._shown_keys, self._shown = tuple(keys), tuple(aggregates)
        self._takes_back = retracts
        if CHANGE in {*keys, *aggregates}:
            raise ConfigurationError(
                f"aggregate: a key or an aggregate is called {CHANGE!r}, but that column of the result has the kind "
                "of each change; give the key or aggregate another name"
            )
        if retracts:
            _check_calculated(aggregates)
            aggregates = {
                name: replace(a, retractable=True) if a.kind is AggregateKind.SUM else a
                for name, a in aggregates.items()
            } | {ROWS: count()}
        super().__init__(keys, aggregates, "final" if emit == "final" else "update", input_schema)
        self._read = frozenset(name for each in aggregates.values() for name in each.columns if isinstance(name, str))
        """Names of the columns that accumulators read."""
        self._output_schema: pa.Schema | None = None

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the input columns that the operator reads, which include the column with the kind of change if rows
        are retracted.
        """
        needed = super().needed_columns(after)
        return needed if needed is None or not self._takes_back else needed | {CHANGE}

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Returns the keys, the aggregates and, unless results are final, the column with the kind of change."""
        found = super().output_schema(input_schema)
        shown = pa.schema([field for field in found if field.name != ROWS])
        return shown if self._emit_mode == "final" else with_kind(shown)

    def _use(self, table: VectorTable, fields: Fields) -> None:
        super()._use(table, fields)
        self._output_schema = None

    def _accumulate(self, batch: pa.RecordBatch, keys: pa.RecordBatch, upserted: Upserted) -> pa.RecordBatch | None:
        rows = upserted.first_rows
        slots = upserted.slots.take(rows)
        changing = self._emit_mode != "final"
        before = [accumulator.results(slots) for accumulator in self._of_shown()] if changing else []
        self._take_all(batch, upserted)
        there = self._still_there(slots)
        result = self._changes(keys, upserted, slots, before, there) if changing else None
        if there is not None and not there.all():
            assert self._table is not None
            self._table.remove(slots[~there])
        return result

    def _take_all(self, batch: pa.RecordBatch, upserted: Upserted) -> None:
        """Adds the inserted rows of a batch to the accumulators, and subtracts the retracted rows."""
        comes = rows_that_come(batch) if self._takes_back else None
        if comes is None or comes.all():
            for name, accumulator in zip(self._aggregates, self._accumulators, strict=True):
                self._add_rows(accumulator, name, batch, upserted)
            return
        names = [name for name in batch.schema.names if name in self._read]
        read = batch.select(names or batch.schema.names[:1])
        parts = [(read.filter(pa.array(flags)), upserted.slots[flags]) for flags in (comes, ~comes)]
        for accumulator in self._accumulators:
            assert isinstance(accumulator, _Retractable)
            if parts[0][0].num_rows:
                accumulator.update(*parts[0])
            accumulator.retract(*parts[1])

    def _still_there(self, slots: NDArray[np.int32]) -> Flags | None:
        """Returns True for each slot whose key still has rows after retractions, or None if rows are never retracted.

        Raises ValueError if more rows of a key were retracted than were inserted.
        """
        if not self._takes_back:
            return None
        assert self._table is not None
        counts = self._table.column(ROWS).raw(slots)
        if (counts < 0).any():
            raise ValueError(
                "a row was retracted that never came, so the stream of changes contradicts itself. Functions before "
                "this step must return the same result for the same row, and must keep the order of the rows of a key"
            )
        there: Flags = counts > 0
        return there

    def _changes(
        self,
        keys: pa.RecordBatch,
        upserted: Upserted,
        slots: NDArray[np.int32],
        before: Sequence[pa.Array],
        there: Flags | None,
    ) -> pa.RecordBatch | None:
        """Returns the changelog rows for the keys of a batch: one row, or an old and a new row, for each key whose
        results differ.
        """
        rows = upserted.first_rows
        after = [accumulator.results(slots) for accumulator in self._of_shown()]
        is_there = np.ones(len(rows), dtype=np.bool_) if there is None else there
        was_there = np.ones(len(rows), dtype=np.bool_)
        was_there[np.searchsorted(rows, upserted.new_rows)] = False  # both ascend
        changed = was_there & is_there & _differ(before, after)
        kinds = (
            (DELETE, was_there & ~is_there, 0),
            (UPDATE_BEFORE, changed, 0),
            (UPDATE_AFTER, changed, 1),
            (INSERT, ~was_there & is_there, 1),
        )
        parts = [(kind, np.flatnonzero(flags), version) for kind, flags, version in kinds]
        parts = [(kind, positions, version) for kind, positions, version in parts if len(positions)]
        if not parts:
            return None
        of = pa.array(rows[np.concatenate([positions for _, positions, _ in parts])])
        # The old results followed by the new ones, so that each column is read once.
        either = pa.array(np.concatenate([positions + version * len(rows) for _, positions, version in parts]))
        columns = [keys.column(name).take(of) for name in self._shown_keys]
        columns += [pa.concat_arrays([old, new]).take(either) for old, new in zip(before, after, strict=True)]
        if self._output_schema is None:
            names = [*self._shown_keys, *self._shown]
            types = [column.type for column in columns]
            self._output_schema = with_kind(pa.schema(list(zip(names, types, strict=True))))
        kind_column = kinds_of([(kind, len(positions)) for kind, positions, _ in parts])
        return pa.RecordBatch.from_arrays([*columns, kind_column], schema=self._output_schema)

    def _of_shown(self) -> Sequence[Accumulator]:
        return self._accumulators[: len(self._shown)]

    def _output(self, keys: pa.RecordBatch, results: Sequence[pa.Array]) -> pa.RecordBatch:
        shown = results[: len(self._shown)]
        return pa.RecordBatch.from_arrays([*keys.columns, *shown], names=[*self.keys, *self._shown])


def _check_calculated(aggregates: Mapping[str, Aggregate]) -> None:
    for name, aggregate in aggregates.items():
        if aggregate.kind in CALCULATED or (aggregate.function is not None and can_retract(aggregate.function)):
            continue
        advice = {
            AggregateKind.BOOL_OR: "count the rows for which it is true: tg.count().where(...)",
            AggregateKind.BOOL_AND: "count the rows for which it is false: tg.count().where(...)",
            AggregateKind.COUNT_DISTINCT: "group by the column first: key_by(..., column).aggregate(n=tg.count())",
            AggregateKind.USER: "give the function a method retract",
        }.get(aggregate.kind, "rank the rows before they change: key_by(...).top_n(1, by=...)")
        raise ConfigurationError(
            f"{name}={aggregate} cannot follow changes: it cannot be corrected when an input row is retracted. Use "
            f"counts, sums, means, variances or standard deviations; or {advice}"
        )


def _differ(before: Sequence[pa.Array], after: Sequence[pa.Array]) -> Flags:
    """Returns True for each row in which any column differs between `before` and `after`. NaN differs from NaN."""
    found: Flags = np.zeros(len(after[0]), dtype=np.bool_)
    for old, new in zip(before, after, strict=True):
        if old.null_count == new.null_count == 0 and storage_dtype(old.type) is not None and old.type == new.type:
            found |= fixed_values(old) != fixed_values(new)
            continue
        try:
            unequal = pc.not_equal(old, new)
        except pa.ArrowNotImplementedError:  # nested values, float16, intervals: no kernel compares them
            found |= _differ_one_by_one(old, new)
            continue
        if unequal.null_count:
            found |= old.is_valid().to_numpy(False) != new.is_valid().to_numpy(False)
            unequal = pc.fill_null(unequal, False)
        found |= unequal.to_numpy(zero_copy_only=False)
    return found


def _differ_one_by_one(old: pa.Array, new: pa.Array) -> Flags:
    """Returns True for each row whose values differ.

    Compares Arrow scalars, because converting to Python objects would lose nanoseconds.
    """
    if old.equals(new):
        return np.zeros(len(new), dtype=np.bool_)
    return np.fromiter((not was.equals(now) for was, now in zip(old, new, strict=True)), np.bool_, len(new))


KEY = own_name("everything")
"""Name of the constant key column of an aggregate over all rows."""


class PartialAggregate(Operator):
    """Aggregates each batch into one row of accumulator columns, which `GlobalAggregate` merges. Has no state."""

    def __init__(self, aggregates: Mapping[str, Aggregate]) -> None:
        self._aggregates = dict(aggregates)
        self._seen_schema: pa.Schema | None = None
        self._row = BatchColumns(())
        self._accumulators: list[Accumulator] = []

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the input columns that the aggregates read."""
        columns = (column for aggregate in self._aggregates.values() for column in aggregate.columns)
        return frozenset(column for column in columns if isinstance(column, str))

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Returns the constant key column and the accumulator columns.

        Raises ConfigurationError if an input column is missing, or if its type is not supported.
        """
        fields = [field for name, a in self._aggregates.items() for field in a.state_fields(name, input_schema)]
        return pa.schema([pa.field(KEY, pa.int8()), *fields])

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits one row with the accumulator columns of a batch.

        Raises OperatorError if the columns of the batch do not fit, or if a sum overflows.
        """
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


class GlobalAggregate(KeyedAggregate):
    """Merges the rows of all `PartialAggregate` subtasks in one subtask.

    `empty` is the schema of the result row that mode `final` emits when there were no input rows, or None to emit no
    row then.
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
        """Returns all columns, because `PartialAggregate` sends only columns that are merged."""
        return None

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Returns the aggregates as columns. `input_schema` is the output schema of `PartialAggregate`."""
        fields = self._fields_for(input_schema)
        return pa.schema([pa.field(name, result_type(a, fields[name])) for name, a in self._aggregates.items()])

    def finish(self, emit: Emit) -> Iterator[None]:
        """Emits the result row at the end of the input, in mode `final`."""
        yield from super().finish(emit)
        if self._emit_mode == "final" and self._table is None and self._empty is not None:
            aggregates = zip(self._aggregates.values(), self._empty, strict=True)
            columns = [_of_nothing(aggregate, field.type) for aggregate, field in aggregates]
            emit(pa.RecordBatch.from_arrays(columns, schema=self._empty))
            yield

    def _fields_for(self, schema: pa.Schema) -> Fields:
        fields = stored_groups(self._aggregates, list(schema)[1:])
        if fields is None:
            raise ConfigurationError(
                f"restored rows have the columns {schema.names}, which are not the accumulators of "
                f"{list(self._aggregates)}; restore with the aggregates that wrote them"
            )
        return fields

    def _add_rows(self, accumulator: Accumulator, name: str, batch: pa.RecordBatch, upserted: Upserted) -> None:
        accumulator.merge(upserted.slots, [batch.column(field.name) for field in self._fields[name]])

    def _output(self, keys: pa.RecordBatch, results: Sequence[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(list(results), names=list(self._aggregates))


class GlobalChangingAggregate(GlobalAggregate, ChangingAggregate):
    """Merges rows like `GlobalAggregate`.

    For each batch it emits the new result as a change and retracts the previous result.
    """

    def __init__(self, aggregates: Mapping[str, Aggregate], input_schema: pa.Schema | None = None) -> None:
        super().__init__(aggregates, input_schema=input_schema)
        self._shown_keys = ()

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Returns the aggregates and the column with the kind of change."""
        return with_kind(GlobalAggregate.output_schema(self, input_schema))


def _of_nothing(aggregate: Aggregate, data_type: pa.DataType) -> pa.Array:
    """Returns the result of one aggregate over no rows at all, as an array of one value."""
    if aggregate.function is not None:
        return of_nothing(aggregate.function)
    nothing = {AggregateKind.COUNT: 0, AggregateKind.COLLECT_LIST: []}
    return pa.array([nothing.get(aggregate.kind)], data_type)
