"""`NewestRows` turns a stream of row versions (upserts and deletions by key) into a stream of changes with retractions.
It stores the newest row of each key, like Flink's ChangelogNormalize.

Rules:

- The input has `row_kind`: UPSERT for a new version of a row, DELETE for a deleted row (only its key columns are read),
  and TRUNCATE, which deletes all rows of this subtask.
- The output is a stream of changes: a new version of a row retracts the previous version. A version that equals the
  previous one emits nothing, and neither does the deletion of a row that is not stored. Input that is repeated
  therefore changes nothing.
- A batch emits the net change of each key, so a version that is replaced within the same batch is not emitted.
- The column `UNCHANGED` lists the columns whose value the input does not contain, because it equals the value of the
  previous version. The value is taken from the stored row. If no row of the key is stored, it is an error.
- State is one row of each key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.row_versions import DELETE_ROW, TRUNCATE, UNCHANGED, UPSERT
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.changes import CHANGE, DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE, changes, with_kind
from tidegate.operators.operator import Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.operators.state.keys import key_columns, key_schema
from tidegate.operators.state.operator_backend import RowsOperator
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.user_values import value_text

STATE_NAME = "newest rows"
_NO_VALUES = own_name("no_values")
"""Name of the value column that is stored for rows that have only key columns, because a row table needs a value
column.
"""
_NONE = -1

Positions = NDArray[np.int64]


class NewestRows(RowsOperator):
    """Emits the changes between the versions of rows with the key columns `keys`. `schema` is the input schema.

    `advice` is the end of the error for a row with an unchanged value whose earlier version is not stored. It describes
    what the user can do.
    """

    def __init__(self, keys: Sequence[str], schema: pa.Schema, advice: str) -> None:
        self._names = [name for name in schema.names if name not in (CHANGE, UNCHANGED)]
        missing = [name for name in (*keys, CHANGE) if name not in schema.names]
        if missing or not keys:
            raise ConfigurationError(
                f"keys={list(keys)}: the stream has no column {missing[:1] or 'for a key'}; name columns of the stream"
            )
        keyed = key_schema(schema, tuple(keys))
        fields = [
            keyed.field(name) if name in keyed.names else pa.field(name, decoded_type(schema.field(name).type))
            for name in self._names
        ]
        self._rows = pa.schema([field.remove_metadata() for field in fields])
        self.output = with_kind(self._rows)
        """The columns of the emitted changes."""
        self._advice = advice
        values = [field for field in self._rows if field.name not in keys]
        super().__init__(keyed, {STATE_NAME: pa.schema(values or [pa.field(_NO_VALUES, pa.int8())])})

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the changes that the row versions of a batch make.

        Raises OperatorError for an unchanged value whose row is not stored.
        """
        kinds = pc.index_in(batch.column(CHANGE), pa.array([UPSERT, DELETE_ROW, TRUNCATE])).to_numpy()
        truncates = np.flatnonzero(kinds == 2)
        start = 0
        for end in [*truncates.tolist(), batch.num_rows]:
            if end > start:
                part = batch.slice(start, end - start)
                with blame(self.context, part):
                    self._apply(part, kinds[start:end] == 1, emit)
            if end < batch.num_rows:
                self._truncate(emit)
            start = end + 1

    def _apply(self, batch: pa.RecordBatch, deleted: NDArray[np.bool_], emit: Emit) -> None:
        rows = self._columns_of(batch)
        keys = rows.select(self.keys.names)
        index = KeyIndex(tuple(self.keys.names))
        upserted = index.upsert(keys)
        first = keys.take(pa.array(upserted.first_rows))
        self.check_owner(first)
        slots = upserted.slots.astype(np.int64)
        table = self.tables[0]
        found = table.find(first)  # key number i is slot i: first rows ascend
        stored = table.take(found.refs, self._names)
        of_key = np.full(index.size, _NONE, dtype=np.int64)
        of_key[found.keys] = np.arange(len(found.keys))
        if UNCHANGED in batch.schema.names and batch.column(UNCHANGED).null_count < batch.num_rows:
            rows = self._filled(batch, rows, deleted, slots, stored, of_key)
        last = _last_of_each(slots, index.size)
        gone = deleted[last]
        there = of_key != _NONE
        replaced = np.flatnonzero(there & ~gone)
        old, new = stored.take(pa.array(of_key[replaced])), rows.take(pa.array(last[replaced]))
        differs = ~equal_rows(old, new)
        removed, added = np.flatnonzero(there & gone), np.flatnonzero(~there & ~gone)
        replaced = replaced[differs]
        picked = pa.array(differs)
        old, new = old.filter(picked), new.filter(picked)
        out = stored.take(pa.array(of_key[removed]))
        came = rows.take(pa.array(last[added]))
        table.remove(found.refs[of_key[np.concatenate((replaced, removed))]])
        self._keep(pa.concat_batches([new, came]))
        table.done()
        parts = [(UPDATE_BEFORE, old), (DELETE, out), (UPDATE_AFTER, new), (INSERT, came)]
        emitted = changes([(kind, part.columns) for kind, part in parts], self.output)
        if emitted is not None:
            emit(emitted)

    def _truncate(self, emit: Emit) -> None:
        """Removes all stored rows of this subtask and emits their deletions."""
        table = self.tables[0]
        for rows, refs in table.scan(self._names, OUTPUT_ROWS_MAX):
            table.remove(refs)
            emitted = changes([(DELETE, rows.select(self._names).columns)], self.output)
            if emitted is not None:
                emit(emitted)
        table.done()

    def _columns_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the columns of a batch in stored form.

        Raises TypeError for a column of another type than declared.
        """
        keys = key_columns(batch, tuple(self.keys.names))
        columns = []
        for field in self._rows:
            column = keys.column(field.name) if field.name in self.keys.names else batch.column(field.name)
            column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            if column.type != field.type:
                raise TypeError(
                    f"column {field.name!r} is {column.type}; the stream was declared with {field.type}"
                    "; cast it with with_columns before this step"
                )
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._rows)

    def _keep(self, rows: pa.RecordBatch) -> None:
        if rows.num_rows:
            values = [rows.column(name) for name in self._names if name not in self.keys.names]
            self.append(0, rows.select(self.keys.names), values or [pa.nulls(rows.num_rows, pa.int8())])

    def _filled(
        self,
        batch: pa.RecordBatch,
        rows: pa.RecordBatch,
        deleted: NDArray[np.bool_],
        slots: Positions,
        stored: pa.RecordBatch,
        of_key: Positions,
    ) -> pa.RecordBatch:
        """Fills in the values of unchanged columns, from the previous version of the row in the batch or in `stored`,
        and returns the rows.

        `slots` has the key number of each row, and `of_key` the index in `stored` of each key's row. Raises ValueError
        if there is no previous version.
        """
        listed = batch.column(UNCHANGED)
        numbers = np.repeat(np.arange(len(slots)), pc.fill_null(pc.list_value_length(listed), 0).to_numpy())
        names = listed.flatten().to_numpy(zero_copy_only=False)
        order = np.argsort(slots, kind="stable")
        begins = np.ones(len(order), dtype=np.bool_)
        begins[1:] = slots[order][1:] != slots[order][:-1]
        places = np.arange(len(order))
        starts = np.maximum.accumulate(np.where(begins, places, 0))
        columns = list(rows.columns)
        for name in sorted(set(names)):
            unchanged = np.zeros(len(slots), dtype=np.bool_)
            unchanged[numbers[names == name]] = True
            missing = unchanged[order]
            known = np.maximum.accumulate(np.where(missing, _NONE, places))
            in_batch = known >= starts
            source = np.where(in_batch, order[known], np.where(of_key[slots[order]] < 0, _NONE, len(slots)))
            source = np.where(~in_batch & (source >= 0), len(slots) + of_key[slots[order]], source)
            unknown = missing & ((source < 0) | (in_batch & deleted[order[known]]))
            if unknown.any():
                row = rows.slice(int(order[np.flatnonzero(unknown)[0]]), 1).select(self.keys.names).to_pylist()[0]
                raise ValueError(
                    f"an update of the row {value_text(row)} has no value in column {name!r}: the database did not "
                    f"write it, because it is large and did not change, and no earlier version of the row has come. "
                    f"{self._advice}"
                )
            takes = np.empty(len(order), dtype=np.int64)
            takes[order] = source
            number = self._names.index(name)
            both = pa.concat_arrays([columns[number], stored.column(number)])
            columns[number] = both.take(pa.array(takes))
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


class TableRows(Operator):
    """Emits the rows of one table from a source that reads several tables.

    The struct column `rows` has the rows, and the column `table` the number of the table of each row. `number` selects
    the table. `schema` is the output schema (`version_schema`).
    """

    def __init__(self, number: int, table: str, rows: str, schema: pa.Schema) -> None:
        self._number = number
        self._table = table
        self._struct = rows
        self._schema = schema

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the rows of the selected table, in their order."""
        mine = pc.equal(batch.column(self._table), self._number)
        if mine.true_count < batch.num_rows:
            batch = batch.filter(mine)
        if batch.num_rows:
            columns = [*batch.column(self._struct).flatten(), batch.column(CHANGE), batch.column(UNCHANGED)]
            emit(pa.RecordBatch.from_arrays(columns, schema=self._schema))


def equal_rows(left: pa.RecordBatch, right: pa.RecordBatch) -> NDArray[np.bool_]:
    """Returns, for each row of `left`, whether it equals the row of `right` with the same index.

    Nulls are equal, NaN is not.
    """
    same = np.ones(left.num_rows, dtype=np.bool_)
    for first, second in zip(left.columns, right.columns, strict=True):
        if not same.any():
            break
        if pa.types.is_nested(first.type):
            values = zip(first.to_pylist(), second.to_pylist(), strict=True)
            same &= np.fromiter((one == other for one, other in values), dtype=np.bool_, count=len(same))
            continue
        equal = pc.fill_null(pc.equal(first, second), False)
        nulls = pc.and_(first.is_null(), second.is_null())
        same &= pc.or_(equal, nulls).to_numpy(zero_copy_only=False)
    return same


def _last_of_each(slots: Positions, number: int) -> Positions:
    """Returns the index of the last row of each slot.

    `slots` has the slot of each row, and `number` is the number of slots.
    """
    last = np.zeros(number, dtype=np.int64)
    np.maximum.at(last, slots, np.arange(len(slots), dtype=np.int64))
    return last
