"""Keys of rows: key columns in their stored form, Python values of keys, and the current key of a function.

Rules:

- Two rows have the same key if and only if the key hash treats their key columns as equal. Null is a key like any
  other. All NaN are one key, and 0.0 and -0.0 are one key.
- A Python key is a tuple with one value for each column. Equal keys give equal tuples with equal hashes.
- Dates and times in a Python key are the integers that Arrow stores, so that nanoseconds are kept. `KeyCodec` converts
  a key back exactly.
- `KeyScope` holds the current key of a function: the key of the row or timer that is being processed. `ProcessOperator`
  chooses it, and states and timers read it. `enter` makes the keys of a batch of rows, or of a step of timers,
  available, and `leave` ends this. State uses the backend's reference of a key. Python values of a key are created only
  when a timer or the function needs them. A function over batches uses the keys of all rows, and may choose the key of
  a single row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.operator import OperatorContext
from tidegate.operators.operator_errors import first_row
from tidegate.operators.row_values import python_rows
from tidegate.protocol.failures import OperatorError
from tidegate.state.common.backend import KeyRef, KeyRefs
from tidegate.state.kernels.columns import key_column, key_form, storage_dtype
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.user_values import value_text

Key: TypeAlias = tuple[Any, ...]


def key_columns(batch: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    """Returns the key columns of a batch in stored form: dictionaries are decoded, -0.0 becomes 0.0, and all NaN become
    one NaN.

    Raises ConfigurationError for a column that is missing.
    """
    return pa.RecordBatch.from_arrays([_one_zero(key_column(batch, name)) for name in keys], names=list(keys))


def key_schema(schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
    """Returns the names and types of the stored key columns for an input schema.

    Raises ConfigurationError for a column that is missing, or whose type cannot be a key.
    """
    columns = key_columns(pa.RecordBatch.from_pylist([], schema), keys)
    for name in keys:
        key_form(columns.column(name), name)
    return columns.schema


def check_owner(context: OperatorContext, keys: pa.RecordBatch, owners: NDArray[np.uint16]) -> None:
    """Raises OperatorError if a row of the key columns `keys` belongs to another subtask.

    `owners` has the subtask of each key group.
    """
    groups = key_groups_of(hash_columns(keys, keys.schema.names), context.max_parallelism)
    strangers = owners[groups] != context.subtask
    if np.any(strangers):
        row = int(np.argmax(strangers))
        raise OperatorError(
            f"operator {context.name!r} (uid {context.uid!r}) on subtask {context.subtask + 1} of "
            f"{context.parallelism} got the key {value_text(first_row(keys.slice(row, 1)))}, which belongs to subtask "
            f"{int(owners[groups[row]]) + 1}: its input must be partitioned by {keys.schema.names}"
        )


class KeyCodec:
    """Converts keys of one schema between stored key columns and Python tuples."""

    __slots__ = ("_stored", "schema")

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._stored = tuple(_stored_type(field.type) for field in schema)

    def encode(self, columns: pa.RecordBatch) -> list[Key]:
        """Returns the rows of stored key columns as Python keys. The columns are in the order of the schema."""
        lists = [_python_values(c, stored) for c, stored in zip(columns.columns, self._stored, strict=True)]
        return list(zip(*lists, strict=True))

    def decode(self, keys: Sequence[Key]) -> pa.RecordBatch:
        """Returns Python keys as stored key columns, with one row for each key."""
        arrays = []
        for position, (field, stored) in enumerate(zip(self.schema, self._stored, strict=True)):
            column = pa.array([key[position] for key in keys], type=stored or field.type)
            arrays.append(column if stored is None else column.view(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def sort_key(key: Key) -> tuple[tuple[int, Any], ...]:
    """Returns a sort key for a Python key. It sorts values ascending, then NaN, then null."""
    return tuple((2, 0) if v is None else (1, 0) if v != v else (0, v) for v in key)


def _python_values(column: pa.Array, stored: pa.DataType | None) -> list[Any]:
    values: list[Any] = (column if stored is None else column.view(stored)).to_pylist()
    if pa.types.is_floating(column.type):
        return [math.nan if value != value else value for value in values]  # one object: a tuple finds it again
    return values


def _stored_type(data_type: pa.DataType) -> pa.DataType | None:
    """Returns the integer type that stores values of a date or time type.

    None for types whose Python values are exact.
    """
    if not pa.types.is_temporal(data_type):
        return None
    dtype = storage_dtype(data_type)
    return None if dtype is None else pa.from_numpy_dtype(dtype)


def _one_zero(column: pa.Array) -> pa.Array:
    """Returns floats with -0.0 replaced by 0.0 and every NaN by one NaN, as keys are hashed.

    Returns other columns unchanged.
    """
    if not pa.types.is_floating(column.type):
        return column
    if pa.types.is_float16(column.type):  # Arrow does not calculate with it
        return _one_zero(column.cast(pa.float32())).cast(pa.float16())
    nan = pa.scalar(float("nan"), column.type)
    positive = pc.add(column, pa.scalar(0.0, column.type))
    return pc.if_else(pc.is_nan(positive), nan, positive)


_NO_BATCH = (
    "works on a whole batch: it can be used in process_batch and on_timer_batch on a keyed stream, and nowhere else"
)


class KeyGroups:
    """The rows of a batch, grouped by key. Returned by `context.groups()`."""

    def __init__(self, columns: pa.RecordBatch) -> None:
        upserted = KeyIndex(tuple(columns.schema.names)).upsert(columns)
        self._columns = columns
        self.index: NDArray[np.int32] = upserted.slots
        """For each row, the index of its key in `keys`."""
        self.first_rows: NDArray[np.int32] = upserted.first_rows
        """The row index of the first row of each group, in ascending order."""

    def __len__(self) -> int:
        return len(self.first_rows)

    @cached_property
    def keys(self) -> pa.RecordBatch:
        """Returns the key columns with one row for each group, in the order in which keys first appear."""
        return self._columns.take(pa.array(self.first_rows))

    @cached_property
    def last_rows(self) -> NDArray[np.int32]:
        """Returns the index of the last row of each group."""
        last = np.empty(len(self), dtype=np.int32)
        last[self.index] = np.arange(len(self.index), dtype=np.int32)
        return last


Places: TypeAlias = "KeyGroups | pa.Array | NDArray[Any] | Sequence[int] | None"
"""A selection of rows of a batch: a `KeyGroups` for the first row of each group, row numbers, a boolean mask, or None
for all rows.
"""


class EnteredKeys:
    """The keys of the rows or timers that are being processed, numbered from 0.

    They are available as stored key columns, as Python keys, or both.
    """

    __slots__ = ("_codec", "_columns", "_keys", "_rows")

    def __init__(self, codec: KeyCodec, columns: pa.RecordBatch | None, keys: Sequence[Key] | None = None) -> None:
        self._codec = codec
        self._columns = columns
        self._keys = keys
        self._rows: list[dict[str, Any]] | None = None

    @property
    def columns(self) -> pa.RecordBatch:
        """Returns the entered keys as stored key columns."""
        if self._columns is None:
            self._columns = self._codec.decode(self._keys or ())
        return self._columns

    def key(self, number: int) -> Key:
        """Returns the key with this number as a Python key (a tuple)."""
        if self._keys is None:
            self._keys = self._codec.encode(self.columns)
        return self._keys[number]

    def row(self, number: int) -> dict[str, Any]:
        """Returns the key with this number as a dict: the value of each key column by name."""
        if self._rows is None:
            self._rows = python_rows(self.columns)
        return dict(self._rows[number])


class KeyScope:
    """Holds the current key of a function. There is no current key unless a row or a timer is being processed."""

    __slots__ = ("_batch", "_entered", "number", "ref")

    def __init__(self) -> None:
        self._entered: EnteredKeys | None = None
        self._batch: tuple[EnteredKeys, KeyRefs | None] | None = None
        self.number = 0
        """Number of the current key among the entered keys. `choose` sets it together with `ref`."""
        self.ref: KeyRef = None
        """The backend's reference to the current key. None if there is no current key, or no state."""

    def enter(self, entered: EnteredKeys) -> None:
        """Makes keys available to the function. `choose` then makes one of these keys the current key."""
        self._entered = entered

    def enter_batch(self, entered: EnteredKeys, refs: KeyRefs | None) -> None:
        """Makes the keys of a batch available for a function that processes whole batches. There is no current key.

        `refs` are the backend's references to the keys, or None without state.
        """
        self._batch = entered, refs

    def choose_row(self, row: int) -> None:
        """Makes the key of the row with the index `row` of the batch the current key.

        Raises ConfigurationError if no batch is being processed, and IndexError for a row that does not exist.
        """
        entered, refs = self._batch_for("choosing a key")
        (number,) = self.rows([row], "choosing a key").tolist()
        self._entered, self.number, self.ref = entered, number, None if refs is None else refs[number]

    @property
    def batch_columns(self) -> pa.RecordBatch:
        """The stored key columns of the rows of the batch. Raises ConfigurationError if no batch is being processed."""
        return self._batch_for("a group of keys")[0].columns

    def rows(self, at: Places, what: str) -> NDArray[np.int64]:
        """Returns the row numbers of the rows that `at` selects.

        Raises ConfigurationError, which names the called method `what`, if no batch is being processed.
        """
        count = self._batch_for(what)[0].columns.num_rows
        if at is None:
            return np.arange(count)
        if isinstance(at, KeyGroups):
            return at.first_rows.astype(np.int64)
        places = np.asarray(at.to_numpy(zero_copy_only=False) if isinstance(at, pa.Array | pa.ChunkedArray) else at)
        if places.dtype == np.bool_:
            if len(places) != count:
                raise IndexError(
                    f"{what}: a mask of {len(places)} rows for a batch of {count}"
                    "; give a mask with one value for each row"
                )
            return np.flatnonzero(places)
        if not len(places):
            return np.zeros(0, dtype=np.int64)
        if places.dtype.kind not in "iu" or places.ndim != 1:
            raise TypeError(
                f"{what}: rows are chosen by their numbers or a mask, not by an array of {places.dtype}; convert it "
                "to integers or booleans"
            )
        if places.min() < 0 or places.max() >= count:
            raise IndexError(
                f"{what}: there is no row {places.max() if places.min() >= 0 else places.min()} in a batch of "
                f"{count} rows; give row indices from 0 on"
            )
        return places.astype(np.int64)

    def refs(self, at: Places, what: str) -> KeyRefs:
        """Returns the backend's references to the keys of the rows that `at` selects.

        Raises ConfigurationError, which names the called method `what`, if no batch is being processed.
        """
        refs = self._batch_for(what)[1]
        assert refs is not None, "a state without references"
        return refs if at is None else refs[self.rows(at, what)]

    def choose(self, number: int, ref: KeyRef) -> None:
        """Makes a key the current key. `number` is its number among the entered keys, and `ref` the backend's
        reference to it.
        """
        self.number = number
        self.ref = ref

    def leave(self) -> None:
        """Removes the entered keys, so that there is no current key."""
        self._entered = self._batch = self.ref = None

    def current(self, what: str) -> Key:
        """Returns the current key as a Python key.

        Raises ConfigurationError, which names the called method `what`, if there is none.
        """
        return self._entered_for(what).key(self.number)

    def current_number(self, what: str) -> int:
        """Returns the number of the current key among the entered keys.

        Raises ConfigurationError if there is no current key.
        """
        self._entered_for(what)
        return self.number

    def entered_columns(self, numbers: Sequence[int]) -> pa.RecordBatch:
        """Returns the stored key columns of the entered keys with these numbers."""
        entered = self._entered if self._batch is None else self._batch[0]
        assert entered is not None, "no keys were entered"
        return entered.columns.take(pa.array(numbers, pa.int64()))

    def current_row(self, what: str) -> dict[str, Any]:
        """Returns the values of the key columns of the current key, by name.

        Raises ConfigurationError if there is no current key.
        """
        return self._entered_for(what).row(self.number)

    def _batch_for(self, what: str) -> tuple[EnteredKeys, KeyRefs | None]:
        if self._batch is None:
            raise ConfigurationError(f"{what} {_NO_BATCH}")
        return self._batch

    def _entered_for(self, what: str) -> EnteredKeys:
        if self._entered is None and self._batch is not None:
            raise ConfigurationError(
                f"{what} belongs to one key, and process_batch works on many keys. Use get_many, put_many, clear_many "
                "and register_many, or choose the key of a row first with context.choose_key(row)"
            )
        if self._entered is None:
            raise ConfigurationError(
                f"{what} is kept per key: it can be used in process and on_timer on a keyed stream, but not in open or "
                "finish, nor in process_broadcast"
            )
        return self._entered
