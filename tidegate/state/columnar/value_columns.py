"""`ValueColumns`: values of a function in memory, in fixed-width columns that are read and written by the batch.

The backend makes one for a value state that a program uses by the batch (`CellSpec.by_batch`), if its type allows: a
number, boolean, date or time, or a struct of such. With a time to live the value and the moment of its update are
columns too. Rules:

- A slot has a value or none, as a slot of a `ColumnarTable` has a row or none: snapshots, increments and the undo log
  are those of such a table.
- In a checkpoint it is what any value state is: one column, a struct if the type is one. So programs may change between
  rows and batches, and between backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.frozen_slots import FrozenValues
from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.vector_table import ColumnarTable
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.cells import CellSpec
from tidegate.state.kernels.columns import array_of, storage_dtype
from tidegate.state.kernels.paged import scatter
from tidegate.state.kernels.partition import Places


def flat_specs(spec: CellSpec) -> tuple[ValueSpec, ...]:
    """The columns that hold a value; none if its type does not allow that."""
    fields = _leaves(spec.column_type, 1 if spec.has_expired is None else 2)
    kept = [_kept_type(each) for each in fields]
    if not all(storage_dtype(each) is not None for each in kept):
        return ()
    return tuple(ValueSpec(f"{spec.name}\0{number}", each, 0) for number, each in enumerate(kept))


class ValueColumns(ColumnarTable):
    """A `ValueCells` over the slots of a `KeySpace`. A ref is a slot."""

    def __init__(self, space: KeySpace, spec: CellSpec, incremental: bool) -> None:
        super().__init__(space, spec.name, flat_specs(spec), incremental)
        self._value_names = (spec.name,)
        self.spec = spec

    def get(self, ref: int) -> Any:
        """The value; None if there is none."""
        return self.get_many(np.array([ref], dtype=np.int32))[0].as_py()

    def put(self, ref: int, value: Any) -> None:
        """Set the value, which is not None."""
        self.put_many(np.array([ref], dtype=np.int32), pa.array([value], self.spec.column_type))

    def remove(self, ref: int) -> None:  # type: ignore[override]  # a slot, not those of a batch
        """Remove the value of a key."""
        self.remove_many(np.array([ref], dtype=np.int32))

    def get_many(self, refs: NDArray[np.int32]) -> pa.Array:
        """The values of these keys."""
        live = self.live(refs)
        columns = [column.take(refs) for column in self._columns.values()]
        return _assembled(self.spec.column_type, columns, None if live.all() else live)

    def put_many(self, refs: NDArray[np.int32], values: pa.Array) -> None:
        """Set the values of these keys."""
        if values.null_count:
            refs, values = _last_of_each(refs, values)
            kept = values.is_valid()
            given = kept.to_numpy(zero_copy_only=False)
            self.remove_many(refs[~given])
            refs, values = refs[given], values.filter(kept)
        self._own(refs)
        if self._notes is not None:
            self._note(self._notes, refs)
        if self.dirty is not None:
            self.dirty.mark(refs)
        new = refs[~self.live(refs)]
        if len(new):
            self._rows += len(np.unique(new))
            scatter(self._live.pages, new, np.ones(len(new), dtype=np.uint8))
        for column, part in zip(self._columns.values(), self._flattened(values), strict=True):
            column.paged.put(refs, part)

    def remove_many(self, refs: NDArray[np.int32]) -> None:
        """Remove the values of these keys."""
        slots = np.unique(refs[self.live(refs)])
        if len(slots):
            self.set_live(slots, np.zeros(len(slots), dtype=np.bool_))

    def expire_many(self, slots: NDArray[np.int32]) -> None:
        """Remove the values of these slots that have expired."""
        assert self.spec.expired_ms is not None, "values without a time to live do not expire"
        slots = slots[self.live(slots)]
        updated_ms = next(reversed(self._columns.values())).raw(slots)
        self.remove_many(slots[updated_ms <= self.spec.expired_ms()])

    def flush(self) -> None:
        """Nothing to do: what changes is marked at once."""

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Put stored rows. In layer 0 raises CorruptionError for a key that has a value already."""
        keys = rows.columns[: rows.num_columns - 1]
        columns = self._flattened(rows.column(rows.num_columns - 1))
        names = [*rows.schema.names[: len(keys)], *self._columns]
        super().load(pa.RecordBatch.from_arrays([*keys, *columns], names=names), layer)

    def _flattened(self, values: pa.Array) -> list[pa.Array]:
        """The columns of values, none of which is null."""
        parts = [values]
        for _ in range(1 if self.spec.has_expired is None else 2):
            parts = [leaf for part in parts for leaf in (part.flatten() if _is_struct(part.type) else [part])]
        return [part.cast(pa.uint8()) if pa.types.is_boolean(part.type) else part for part in parts]

    def _frozen_values(self, removed: bool) -> FrozenValues:  # type: ignore[override]  # one column of several
        return _FrozenColumns(super()._frozen_values(removed), self.spec.column_type)


class _FrozenColumns:
    """The `FrozenValues` of values in columns."""

    __slots__ = ("_table", "_type")

    def __init__(self, table: FrozenValues, column_type: pa.DataType) -> None:
        self._table = table
        self._type = column_type

    @property
    def row_bytes(self) -> int | None:
        return self._table.row_bytes

    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self._table.live(slots)

    def columns(self, slots: NDArray[np.int32], places: Places | None = None) -> list[pa.Array]:
        return [_assembled(self._type, list(self._table.columns(slots, places)), None)]

    def let_go(self, start: int, stop: int) -> None:
        self._table.let_go(start, stop)


def _is_struct(data_type: pa.DataType) -> bool:
    return pa.types.is_struct(data_type) and not isinstance(data_type, pa.BaseExtensionType)


def _leaves(data_type: pa.DataType, depth: int) -> list[pa.DataType]:
    """Types of the values in a type, whose structs are taken apart so far down. Deeper ones may be null."""
    if not (depth and _is_struct(data_type)):
        return [data_type]
    return [leaf for field in data_type for leaf in _leaves(field.type, depth - 1)] or [data_type]


def _kept_type(data_type: pa.DataType) -> pa.DataType:
    """The type of a column in memory: Arrow has the bits of booleans side by side."""
    return pa.uint8() if pa.types.is_boolean(data_type) else data_type


def _assembled(data_type: pa.DataType, columns: list[pa.Array], live: NDArray[np.bool_] | None) -> pa.Array:
    """The values of columns; `live` says which there are, None: all."""
    return _next(data_type, iter(columns), live)


def _next(data_type: pa.DataType, columns: Iterator[pa.Array], live: NDArray[np.bool_] | None) -> pa.Array:
    if _is_struct(data_type):
        parts = [_next(field.type, columns, None) for field in data_type]
        mask = None if live is None else pa.array(~live)
        return pa.StructArray.from_arrays(parts, fields=list(data_type), mask=mask)
    column = next(columns)
    if live is not None:
        valid = live if not column.null_count else live & column.is_valid().to_numpy(zero_copy_only=False)
        raw = np.frombuffer(column.buffers()[1], dtype=storage_dtype(column.type))
        column = array_of(raw, valid.view(np.uint8), column.type)
    return column.cast(pa.bool_()) if pa.types.is_boolean(data_type) else column


def _last_of_each(refs: NDArray[np.int32], values: pa.Array) -> tuple[NDArray[np.int32], pa.Array]:
    """The last value of each key."""
    distinct, from_end = np.unique(refs[::-1], return_index=True)
    return distinct, values.take(pa.array(len(refs) - 1 - from_end))
