"""`KeyedAggregate`: running aggregates for each key, exact through checkpoints and rescaling.

Rules:

- All rows of a key come to the subtask that owns its key group. The operator checks this for each new key.
- In mode `update` a batch emits one row for each distinct key in it, with the current values, in the order in which the
  keys first appear. In mode `final` each key emits one row, at the end of the input.
- In mode `each` every input row emits one row, in the order of the input: its key, and the aggregates over this row and
  all earlier rows of the key. Results therefore do not depend on how rows are cut into batches. The state is the same
  in all modes.
- State is one table: the key columns, then the accumulators.
- A batch may have combined rows, which are partial aggregates made by the sender (`aggregate_state.py`). They are
  merged. Mode `each` raises an error for them.

`StoredLayout` describes the columns of stored aggregates, and `converted` converts rows of an older program. A restored
program may have more or fewer aggregates than the program that wrote the state, or wider types. Rules:

- The stored columns of an aggregate are found by their names, at any position.
- An aggregate without stored columns begins as if it had no rows. Columns of removed aggregates are dropped: the user
  has agreed to that when the job was submitted (`tidegate/actors/restore/meaning_checks.py`).
- A type may widen as far as `tidegate/storage/schemas/evolution.py` allows. A sum of integers may become a sum of
  floats as long as its value stays exact, and a decimal may have more digits before the point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.accumulators import Accumulator, make_accumulator, value_specs
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_state import (
    CHOICES,
    NULL_WITHOUT_VALUES,
    AggregateKind,
    Fields,
    add_rows,
    combined_fields,
    decimal_of,
    found_groups,
    state_columns,
)
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.combined_rows import is_combined
from tidegate.operators.operator import Columns, Emit, Operator, OperatorContext
from tidegate.operators.operator_errors import blame, failure
from tidegate.operators.state.keys import check_owner, key_columns, key_schema
from tidegate.operators.state.operator_backend import frozen_backend, make_backend
from tidegate.protocol.failures import ChangedTypeError
from tidegate.state.common.backend import KeyedBackend, ValueSpec, VectorTable
from tidegate.state.common.table_columns import BatchColumns
from tidegate.state.kernels.partition import gather, subtask_table
from tidegate.state.key_index.hash_table import Upserted
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, CorruptionError, IncompatibleStateError
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.schemas.evolution import widens
from tidegate.storage.state.handover import keys_at_most, merge_small_tables, taken
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

STATE_NAME = "aggregate"

_RESTORED_ROWS = 131_072
"""Greatest number of stored rows that a restore loads at a time."""
_SUMS = (AggregateKind.SUM, AggregateKind.MEAN)
_NULL_WITHOUT_ROWS = NULL_WITHOUT_VALUES | CHOICES
"""Kinds of aggregates whose first state column is null until the first row that counts."""
_ADVICE = "give the aggregate its former type, or give the operator a new uid to start without what was stored"


class KeyedAggregate(Operator):
    """Running aggregates of each key. `keys` names the key columns, `aggregates` maps output columns to aggregates.

    `input_schema` is the schema of the input, or None if it becomes known only when the job runs. Raises
    ConfigurationError for no keys, no aggregates, or names that clash.
    """

    has_keyed_state = True

    def __init__(
        self,
        keys: tuple[str, ...],
        aggregates: Mapping[str, Aggregate],
        emit: Literal["update", "each", "final"] = "update",
        input_schema: pa.Schema | None = None,
    ) -> None:
        self._input_schema = input_schema
        self._keys = tuple(keys)
        self._aggregates = dict(aggregates)
        self._emit_mode = emit
        self._check_arguments()
        self._backend: KeyedBackend | None = None
        self._table: VectorTable | None = None
        self._key_schema: pa.Schema | None = None
        self._fields: Fields = {}
        self._accumulators: list[Accumulator] = []
        self._changed_rows = 0
        self._seen_schema: pa.Schema | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns the names of the key columns."""
        return self._keys

    @property
    def known_fields(self) -> Fields | None:
        """Returns the state columns of each aggregate. None if the input schema is not known before the job runs."""
        return None if self._input_schema is None else self._fields_for(self._input_schema)

    def validate(self, input_schema: pa.Schema) -> None:
        """Raises ConfigurationError if batches of this schema cannot be aggregated."""
        self.output_schema(input_schema)

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the input columns that the operator reads: the key columns and the columns that are aggregated."""
        columns = (column for aggregate in self._aggregates.values() for column in aggregate.columns)
        return frozenset((*self._keys, *(column for column in columns if isinstance(column, str))))

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Returns the output schema: the key columns (dictionaries decoded), then the aggregates.

        Raises ConfigurationError if a column is missing, or if its type is not supported.
        """
        results = [pa.field(name, aggregate.output_type(input_schema)) for name, aggregate in self._aggregates.items()]
        return pa.schema([*key_schema(input_schema, self._keys), *results])

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the state from the tables of any number of earlier subtasks.

        Raises IncompatibleStateError for a table with other keys or aggregates, and CorruptionError if a key occurs
        twice.
        """
        super().open(context, restored)
        self._owners = subtask_table(context.max_parallelism, context.parallelism)
        self._backend = make_backend(context, self._keys)
        stored = self._backend.stored_schema(STATE_NAME)
        if stored is not None:
            self._take_over(stored)
        self._restore_all(restored)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Adds a batch to the aggregates, and emits their results unless the mode is `final`.

        Raises OperatorError if the columns of the batch do not fit, or if a sum overflows.
        """
        with blame(self.context, batch):
            updates = self._advance(batch)
        if updates is not None:
            emit(updates)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the state. The snapshot has no table before the first key arrives."""
        if cut.keyed:
            self._changed_rows = 0
        return frozen_backend(self.context, self._opened(), cut)

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the keyed state between two checkpoints. This operator has no other state."""
        return self.snapshot(cut)

    @property
    def changed_bytes(self) -> int:
        """Returns an estimate of the size, in bytes, of the changed rows in the next snapshot.

        A row that several batches changed is counted once for each batch.
        """
        names = [field.name for fields in self._fields.values() for field in fields]
        values = 0 if self._table is None else sum(self._table.column(name).value_bytes for name in names)
        return self._changed_rows * (8 * len(self._keys) + values)

    @property
    def keyed_backend(self) -> KeyedBackend | None:
        """Returns the backend that stores the accumulators."""
        return self._backend

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError and ConfigurationError as `open` does."""
        self._restore_all(tables)

    def hand_over(self) -> None:
        """Drops the references to the backend without closing it, because the next attempt of the task continues with
        it.
        """
        self._backend = self._table = None
        self._accumulators = []

    def finish(self, emit: Emit) -> Iterator[None]:
        """Emits the results of all keys in mode `final`, in batches of at most `OUTPUT_ROWS_MAX` rows.

        Yields after each batch.
        """
        if self._emit_mode == "final" and self._table is not None:
            for keys, slots in self._table.scan(OUTPUT_ROWS_MAX):
                try:
                    results = [accumulator.results(slots) for accumulator in self._accumulators]
                except OverflowError as error:
                    raise failure(self.context, error, "in the result of a key") from error
                emit(self._output(keys, results))
                yield

    def close(self) -> None:
        """Releases the resources of the backend."""
        if self._backend is not None:
            self._backend.close()

    def _opened(self) -> KeyedBackend:
        assert self._backend is not None, "an aggregate that is not open"
        return self._backend

    def _check_arguments(self) -> None:
        if not self._keys:
            raise ConfigurationError("aggregate needs at least one key column: key_by(...)")
        if not self._aggregates:
            raise ConfigurationError("aggregate needs at least one aggregate: aggregate(n=count())")
        if self._emit_mode not in ("update", "each", "final"):
            raise ConfigurationError(
                f'aggregate: emit must be "update", "each", "changes" or "final", not {self._emit_mode!r}'
            )
        names = [*self._keys, *self._aggregates]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ConfigurationError(
                "keys and aggregates must have different names, because all are columns of the result; rename "
                f"{doubles}, used twice"
            )

    def _admit(self, schema: pa.Schema) -> None:
        """Checks the columns of a batch against the state. The first batch creates the state, or converts restored
        state to wider types.

        Raises ChangedTypeError if keys or aggregates have other types than the state.
        """
        if self._seen_schema is not None and schema.equals(self._seen_schema):
            return
        found = key_schema(schema, self._keys)
        fields = self._fields_for(schema)
        if self._key_schema is None:
            self._create(found, fields)
        elif self._seen_schema is None and found.equals(self._key_schema) and fields != self._fields:
            self._evolve(fields)
        elif not found.equals(self._key_schema) or fields != self._fields:
            raise ChangedTypeError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}) keeps "
                f"{columns_text(state_columns(self._key_schema, self._fields))}, but the batch needs "
                f"{columns_text(state_columns(found, fields))}: a column has changed its type; cast it with "
                "with_columns before key_by, or pass schema= to the function that makes it"
            )
        self._seen_schema = schema

    def _advance(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        self._admit(batch.schema)
        assert self._table is not None
        keys = key_columns(batch, self._keys)
        upserted = self._table.upsert(keys)
        if len(upserted.new_rows):
            check_owner(self.context, gather(keys, upserted.new_rows), self._owners)
        self._changed_rows += len(upserted.first_rows)
        results = self._accumulate(batch, keys, upserted)
        self._table.done()
        return results

    def _accumulate(self, batch: pa.RecordBatch, keys: pa.RecordBatch, upserted: Upserted) -> pa.RecordBatch | None:
        if self._emit_mode == "final":
            for name, accumulator in zip(self._aggregates, self._accumulators, strict=True):
                self._add_rows(accumulator, name, batch, upserted)
            return None
        if self._emit_mode == "each":
            if not batch.num_rows:
                return None
            return self._output(keys, self._running(batch, upserted.slots, self._accumulators))
        rows = upserted.first_rows
        all_distinct = len(rows) == batch.num_rows
        slots = upserted.slots if all_distinct else upserted.slots.take(rows)
        results = []
        for name, accumulator in zip(self._aggregates, self._accumulators, strict=True):
            self._add_rows(accumulator, name, batch, upserted)
            results.append(accumulator.results(slots))  # at once, while the written values are in the CPU cache
        return self._output(keys if all_distinct else gather(keys, rows), results)

    def _running(
        self, batch: pa.RecordBatch, slots: NDArray[np.int32], accumulators: Sequence[Accumulator]
    ) -> list[pa.Array]:
        """Adds a batch to accumulators. Returns, for each accumulator, its result after each row.

        Raises IncompatibleStateError for combined rows.
        """
        if is_combined(batch.schema):
            raise IncompatibleStateError(
                f'operator {self.context.uid!r} has emit="each" and restored rows in flight that were combined for '
                f"another emit=, so that results after each of them are not known; restore from a savepoint, which has "
                f"none in flight, or give them up with CheckpointConfig(ignore_in_flight_of=...)"
            )
        return [accumulator.running(batch, slots) for accumulator in accumulators]

    def _fields_for(self, schema: pa.Schema) -> Fields:
        """Returns the state columns of each aggregate for batches of `schema`.

        Raises ConfigurationError for columns that do not fit.
        """
        if is_combined(schema):
            return combined_fields(self._aggregates, schema)
        return {name: a.state_fields(name, schema) for name, a in self._aggregates.items()}

    def _add_rows(self, accumulator: Accumulator, name: str, batch: pa.RecordBatch, upserted: Upserted) -> None:
        """Adds a batch to the accumulator of the aggregate called `name`."""
        add_rows(accumulator, self._fields[name], batch, upserted.slots)

    def _create(self, schema: pa.Schema, fields: Fields) -> None:
        backend = self._opened()
        table = backend.table(STATE_NAME, self._specs(fields))
        backend.fix_keys(schema)
        self._key_schema = schema
        self._use(table, fields)

    def _evolve(self, fields: Fields) -> None:
        """Converts the stored state to the state columns `fields`, because the first batch after a restore has wider
        types, or the program has other aggregates.
        """
        table = self._opened().retype(STATE_NAME, self._specs(fields), lambda rows: self._converted(rows, fields))
        self._use(table, fields)

    def _use(self, table: VectorTable, fields: Fields) -> None:
        self._table, self._fields = table, fields
        self._accumulators = [make_accumulator(a, fields[name], table) for name, a in self._aggregates.items()]

    def _specs(self, fields: Fields) -> list[ValueSpec]:
        return [spec for name, a in self._aggregates.items() for spec in value_specs(a, fields[name])]

    def _take_over(self, stored: pa.Schema) -> None:
        """Takes over the rows that the backend already has, and converts them if a program with other aggregates wrote
        them.

        `stored` is the schema of these rows.
        """
        layout = self._layout_of(STATE_NAME, stored)
        if layout.whole:
            self._create(layout.head, layout.fields)
            return
        backend = self._opened()
        backend.table(STATE_NAME, raw_specs(pa.schema(list(stored)[len(self._keys) :])))
        backend.fix_keys(layout.head)
        self._key_schema = layout.head
        self._evolve(self._wanted(layout))

    def _restore_all(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables.

        If column types became wider between two increments of a checkpoint, all rows are converted to the wider types.
        """
        layouts = (
            (table.state, table.rows.schema) for table in tables if table.kind is StateKind.KEYED and not table.removed
        )
        stored = list(dict.fromkeys(layouts))
        if stored and self._table is None:
            self._create(*self._newest_layout(stored))
        if self._table is None:
            return  # nothing but removed keys, which are in no layer below
        self._opened().expect(keys_at_most(tables))
        try:
            keys = (table for table in taken(tables) if table.kind is StateKind.KEYED)
            for table in merge_small_tables(keys, _RESTORED_ROWS):
                if table.rows.schema.names[: len(self._keys)] == list(self._keys):
                    check_owner(self.context, table.rows.select(list(self._keys)), self._owners)
                rows = table.rows if table.removed else self._converted(table.rows, self._fields)
                self._opened().load(replace(table, rows=rows))
            self._opened().loaded()
        except CorruptionError as error:
            raise CorruptionError(
                f"operator {self.context.uid!r}: {error}; restore another checkpoint or a savepoint"
            ) from error

    def _newest_layout(self, stored: Sequence[tuple[str, pa.Schema]]) -> tuple[pa.Schema, Fields]:
        """Returns the key schema and the state columns to which all stored layouts can be converted.

        Such a layout exists because types only become wider. Raises IncompatibleStateError if there is none.
        """
        layouts = [(self._layout_of(state, schema), schema) for state, schema in stored]
        refused = None
        for layout, _ in reversed(layouts):
            fields = self._wanted(layout)
            try:
                for _, before in layouts:
                    empty = pa.RecordBatch.from_pylist([], before.remove_metadata())
                    converted(empty, layout.head, self._aggregates, fields, self._where)
            except IncompatibleStateError as error:
                refused = refused or error
                continue
            return layout.head, fields
        assert refused is not None, "no layout was tried"
        raise refused

    def _wanted(self, layout: StoredLayout) -> Fields:
        """Returns the state columns of all aggregates of the program: the stored columns, or the columns that follow
        from the input schema for a new aggregate.

        Raises IncompatibleStateError if an aggregate is new and the input schema is not known.
        """
        if layout.whole:
            return layout.fields
        known = self.known_fields
        if known is None:
            raise IncompatibleStateError(
                f"{self._where}: the state has the aggregates {list(layout.fields)} of {list(self._aggregates)}, and "
                "the columns of the input are known only when the job runs; pass schema= to the step before, so that "
                "the new ones can start empty"
            )
        return {name: layout.fields.get(name, known[name]) for name in self._aggregates}

    def _converted(self, rows: pa.RecordBatch, fields: Fields) -> pa.RecordBatch:
        """Returns stored rows, converted to the program's state columns `fields`."""
        assert self._key_schema is not None
        return converted(rows.replace_schema_metadata(None), self._key_schema, self._aggregates, fields, self._where)

    @property
    def _where(self) -> str:
        return f"state {STATE_NAME!r} of operator {self.context.uid!r}"

    def _layout_of(self, state: str, schema: pa.Schema) -> StoredLayout:
        layout = StoredLayout.of(schema, self._keys, self._aggregates)
        if state != STATE_NAME or layout is None:
            raise IncompatibleStateError(
                f"operator {self.context.uid!r} expects aggregates of the keys {list(self._keys)}, but state {state!r} "
                f"has the columns {schema.names}; restore with the keys that wrote it, or give the operator a new uid"
            )
        return layout

    def _output(self, keys: pa.RecordBatch, results: Sequence[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([*keys.columns, *results], names=[*self._keys, *self._aggregates])


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """The columns of one stored table: `head` (for example the keys), then the columns of the aggregates.

    `fields` has, for each aggregate of the program that is in the table, its stored columns. `whole` is True if the
    table has exactly the aggregates of the program, in the same order.
    """

    head: pa.Schema
    fields: Fields
    whole: bool

    @staticmethod
    def of(schema: pa.Schema, head: Sequence[str], aggregates: Mapping[str, Aggregate]) -> StoredLayout | None:
        """Returns the layout of a stored schema. None if the schema does not begin with the columns `head`."""
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
    """Returns the reason why the stored columns of an aggregate (`before`) cannot be converted to the program's columns
    (`now`).

    None if they can.
    """
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
    """Returns the state columns of an aggregate for `rows` keys that have no input rows yet."""
    made = BatchColumns(value_specs(aggregate, fields))
    made.begin(1)
    values = made.values()
    found = [values[field.name].take(pa.array(np.zeros(rows, dtype=np.int64))) for field in fields]
    if aggregate.kind in _NULL_WITHOUT_ROWS and not aggregate.retractable and aggregate.function is None:
        found[0] = pa.nulls(rows, fields[0].type)
    return found


def raw_specs(schema: pa.Schema) -> list[ValueSpec]:
    """Returns specs of value columns for stored rows, which are read only to be converted."""
    return [ValueSpec(field.name, field.type) for field in schema]


def converted(
    rows: pa.RecordBatch,
    head: pa.Schema,
    aggregates: Mapping[str, Aggregate],
    wanted: Fields,
    where: str,
) -> pa.RecordBatch:
    """Returns stored rows converted to the columns `head` and the `wanted` state columns of each aggregate.

    `where` is the beginning of error messages. Raises IncompatibleStateError for columns that cannot be converted.
    """
    fields = [field for name in aggregates for field in wanted[name]]
    expected = pa.schema([*head, *fields])
    if rows.schema.equals(expected):
        return rows
    layout = StoredLayout.of(rows.schema, head.names, aggregates)
    if layout is None:
        raise IncompatibleStateError(
            f"{where}: the stored columns {rows.schema.names} do not begin with {head.names}; restore with the keys "
            "that wrote them, or give the operator a new uid"
        )
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
