"""The contract of state backends: the interface that operators use, for whole batches or key by key.

Every backend passes the same contract tests. Rules:
- A backend stores the keyed state of one operator in one subtask, and is used by one thread.
- A state is a table with a row for each key that has the state. It is stored, read and moved between backends
  in this form.
- A batch begins with `enter` (or `VectorTable.upsert`) and ends with `leave` (or `VectorTable.done`). In between the
  backend may keep changes in a working set. Snapshots are taken only after `leave`.
- Values that are put have the declared type. Null means absent.
- A backend may be able to return to a checkpoint (`kept`, `go_back`). The task of the next attempt, in the same
  process, then continues with it and reads nothing. Operators see the same state as after a restore.
- `freeze` is the synchronous part of a snapshot, and its cost must not grow with the state. Its result does not change
  afterwards. Another thread encodes it while processing continues.

There are four kinds of state: vectorised tables (`VectorTable`), row tables (`RowTable`), object state
(`InternalValueState`, `InternalListState`, `InternalMapState`), and timers (`KeyedTimers`).

Row tables: joins buffer their inputs in them, and so do operators that keep whole rows.
- A row never changes. It is appended, found by its key or by a scan, and removed.
- A row is stored under its key and a sequence number (`ROW_SEQUENCE`), which only grows. Rows of a key are therefore
  found in the order in which they arrived, also after a restore, and two rows may be equal.
- A ref identifies a row until `done`, even if other rows are appended, found or removed before.

Timers: there is one for each key, clock and moment, however often it was registered.
- Registering a timer costs O(log n). A snapshot costs what has changed.
- Due timers are ordered by moment, then by key. Values of a key column ascend, followed by NaN and null.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.key_index.hash_table import Upserted
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.schemas.column_names import columns_text, is_reserved
from tidegate.storage.state.snapshot import Cut, FrozenNative, FrozenState, StateTable

KeyRef: TypeAlias = Any
"""The identifier of a key within one batch: a slot, or encoded bytes. Valid until `leave`."""
KeyRefs: TypeAlias = NDArray[Any]
"""The refs of several keys, in an array."""
Migrate: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
"""A function that converts stored rows of one schema into rows of another."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueSpec:
    """A value column of a vectorised table. A new row contains `identity` in this column, also where it is marked as
    null. If the type has no `storage_dtype` (strings, lists, …), the value of a new row is null.
    """

    name: str
    data_type: pa.DataType
    identity: int | float = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueSpec):
            return NotImplemented
        # The identity of a minimum of floats is NaN, which is not equal to itself.
        both_nan = self.identity != self.identity and other.identity != other.identity
        same = both_nan or self.identity == other.identity
        return same and (self.name, self.data_type) == (other.name, other.data_type)

    def __hash__(self) -> int:
        return hash((self.name, self.data_type))

    @property
    def field(self) -> pa.Field:
        """Returns the field of the column in the stored table."""
        return pa.field(self.name, self.data_type)


class ValueColumn(Protocol):
    """A column of a vectorised table. Kernels change its memory in place between `upsert` and `done`.

    `pages` are addresses of pages of `PAGE_ROWS` values, for `kernels/paged.py`. Columns without a `storage_dtype` do
    not use them.
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """Returns the type of the values in the pages: the `storage_dtype` of the spec's type."""
        ...

    @property
    def pages(self) -> NDArray[np.uintp]:
        """Returns the addresses of the memory pages with the column's values. Valid until `done` of the table."""
        ...

    @property
    def valid_pages(self) -> NDArray[np.uintp]:
        """Returns the addresses of the pages of validity (uint8, 1 for a value).

        Empty if there has never been a null.
        """
        ...

    def track_nulls(self) -> NDArray[np.uintp]:
        """Starts to track validity, unless it is tracked already. Returns `valid_pages`.

        Existing rows are marked as valid. Rows that are new in this batch are null until a kernel marks them as valid.
        """
        ...

    def take(self, slots: NDArray[Any]) -> pa.Array:
        """Returns the values of these slots, as an Arrow array of the column's type (a copy)."""
        ...

    def raw(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Returns the values of these slots in `dtype`, as a copy. The value of a null is undefined."""
        ...

    def put(self, slots: NDArray[Any], values: pa.Array) -> None:
        """Stores values in these distinct slots of the batch, from an Arrow array of the column's type."""
        ...

    @property
    def value_bytes(self) -> int:
        """Returns the estimated size of a value in bytes."""
        ...


class VectorTable(Protocol):
    """A table with a row of values for each key, which operators change batch by batch."""

    @property
    def rows(self) -> int:
        """Returns the number of keys that have a row. It is an estimate if the backend does not count."""
        ...

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begins a batch of keys: returns the slot of the key of each row.

        A key without a row gets a new one, with the identity value of each column (null in a column that tracks
        validity). `new_rows` of the result are the rows of these keys. Their slots need not be the highest ones. The
        values of the slots may change until `done`. In another batch the same slot may belong to another key. With
        `new_only`, the caller changes only the slots of new keys, and the other slots are not marked as changed.
        """
        ...

    def column(self, name: str) -> ValueColumn:
        """Returns the value column called `name`. Each call returns the same object."""
        ...

    def remove(self, slots: NDArray[Any]) -> None:
        """Removes the rows of these slots of the batch, as the last call before `done`. A slot may be listed twice. If
        a removed key occurs in a later batch, it is new again.
        """
        ...

    def done(self) -> None:
        """Ends the batch of keys that `upsert` began."""
        ...

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all keys that have a row, in batches, each with the slots of its keys.

        `column(...).take` returns the values of these slots, until the next batch is requested.
        """
        ...


class NamespacedTable(VectorTable, Protocol):
    """A table of a backend with namespaces: an int64 in the first key column that does not influence the key group."""

    def namespaces(self) -> NDArray[np.int64]:
        """Returns the namespaces that have a row, ascending."""
        ...

    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of a namespace, like `scan`. If `groups` is given, yields only keys of these key groups.

        The cost depends only on the number of keys in the namespace.
        """
        ...

    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of a namespace like `scan_namespace`, and removes the rows of each batch when it is yielded.

        No key may be added before the last batch was requested.
        """
        ...

    def scan_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of several distinct namespaces like `scan`, one namespace after the other.

        A batch may contain keys of two namespaces.
        """
        ...

    def drain_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields the keys of several namespaces like `scan_namespaces`, and removes the rows of each batch when it is
        yielded.

        No key may be added before the last batch was requested.
        """
        ...


class KeyedBackend(Protocol):
    """The keyed state of one operator in one subtask."""

    def fix_keys(self, schema: pa.Schema) -> None:
        """Sets the stored key columns. Called once, after all states are bound and before the first key."""
        ...

    def table(self, name: str, columns: Sequence[ValueSpec]) -> VectorTable:
        """Returns a vectorised state: a table with the value columns `columns` and a row for each key."""
        ...

    def rows(self, name: str, values: pa.Schema) -> RowTable:
        """Returns a state with many rows for each key.

        `values` are its value columns: at least one, with other names than the keys. The columns of the stored table
        are the keys, `ROW_SEQUENCE` and `values`.
        """
        ...

    def retype(self, name: str, columns: Sequence[ValueSpec], migrate: Migrate) -> VectorTable:
        """Replaces a vectorised state by a state with the same name and other column types, and converts its rows.

        `migrate` converts the rows. Only allowed before the first batch after a restore. Raises the errors of
        `migrate`.
        """
        ...

    def values(self, spec: StateDescriptor) -> InternalValueState:
        """Returns a state with one value for each key."""
        ...

    def lists(self, spec: StateDescriptor) -> InternalListState:
        """Returns a state with a list of values for each key."""
        ...

    def maps(self, spec: StateDescriptor) -> InternalMapState:
        """Returns a state with a map of values for each key."""
        ...

    @property
    def timers(self) -> KeyedTimers:
        """Returns the timers of this operator. They are stored as a state named `TIMERS_STATE`."""
        ...

    def enter(self, keys: pa.RecordBatch) -> Sequence[KeyRef]:
        """Begins a batch of keys, given as stored key columns. Returns a reference (ref) to the key of each row."""
        ...

    def enter_batch(self, keys: pa.RecordBatch) -> KeyRefs:
        """Begins a batch of keys, like `enter`, for functions that read and write values as whole batches."""
        ...

    def leave(self) -> None:
        """Ends the batch of keys that `enter` began. The references to its keys are invalid afterwards."""
        ...

    def sweep(self, keys_max: int) -> None:
        """Removes expired state among the next `keys_max` keys (Flink's incremental cleanup).

        The next call continues where this one ended.
        """
        ...

    def keys(self, state: str, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Yields the keys that have a value in `state`, in batches. For functions that visit all keys."""
        ...

    @property
    def size(self) -> StateSize:
        """Returns the estimated size of all states. Metrics call it once a second. The size is zero after `close`."""
        ...

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Returns two estimated numbers of rows: in a snapshot with the changes since the checkpoint `base`, and in a
        full snapshot.

        Both are 0 if checkpoints share files.
        """
        ...

    def freeze(self, cut: Cut) -> Sequence[FrozenState]:
        """Returns snapshots of all states. With `cut.base`, they have only the changes since that checkpoint."""
        ...

    def freeze_native(self, cut: Cut) -> FrozenNative | None:
        """Returns a snapshot of all states as the backend's own files.

        Returns None if the backend has no files, before the first key, and for a canonical savepoint. The caller then
        uses `freeze`.
        """
        ...

    def keep(self, checkpoint_id: CheckpointId) -> None:
        """Records that the current state equals this checkpoint of this job, so that the backend can be rewound to it.
        Called after a restore.
        """
        ...

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """Drops the data for rewinding to checkpoints before this one, because this checkpoint has completed."""
        ...

    @property
    def goes_back(self) -> bool:
        """Returns whether there is a checkpoint to which the backend can be rewound."""
        ...

    def kept(self, checkpoint_id: CheckpointId) -> Sequence[StateTable] | None:
        """Returns a table without rows for each state of this checkpoint, or None if the backend cannot be rewound to
        it.
        """
        ...

    def go_back(self, checkpoint_id: CheckpointId) -> None:
        """Rewinds the backend to this checkpoint: restores the state as it was at the freeze. `kept` of the checkpoint
        must not be None.

        Afterwards the caller fixes the keys and binds the states again, as for a backend that was opened from files.
        """
        ...

    @property
    def stored_keys(self) -> pa.Schema | None:
        """Returns the key columns of the files on which the backend was opened, or of the checkpoint to which it was
        rewound.

        None if the backend began empty. Otherwise `fix_keys` must be called with these columns.
        """
        ...

    def stored_schema(self, state: str) -> pa.Schema | None:
        """Returns the key and value columns of a state in the files on which the backend was opened, or after
        `go_back`.

        Tables that `load` adds are not included. Returns None if there is no such state.
        """
        ...

    def expect(self, keys: int) -> None:
        """Announces that up to `keys` keys will be loaded in layer 0 (the base of a snapshot), so that memory can be
        reserved at once.
        """
        ...

    def load(self, table: StateTable) -> None:
        """Loads a stored table: adds its rows, or removes its keys.

        Raises CorruptionError, here or in `loaded`, if a key occurs twice in layer 0 (the base of a snapshot).
        """
        ...

    def loaded(self) -> None:
        """Finishes a restore, after all stored tables are loaded and before the first batch.

        Raises CorruptionError if a key occurred twice in layer 0.
        """
        ...

    def close(self) -> None:
        """Releases the files and memory of the backend."""
        ...


@dataclass(frozen=True, slots=True)
class StateDescriptor:
    """One state of a row-wise function: its name, and the Arrow type of its column in the stored table.

    A list state has a list type, a map state a map type.

    - `has_expired`: returns whether the time to live of a stored value is over. For a list or map it gets the value of
      one element. None if state does not expire.
    - `metadata`: metadata of the column's field.
    - `migrate`: converts rows that a backend finds in its own files to the current type.
    - `by_batch`: the program reads and writes values by the batch, so the backend should store them as columns.
    - `expired_ms`: returns a moment. With `by_batch`, a value has expired if its last field, `updated_ms`, is at or
      before that moment.
    """

    name: str
    column_type: pa.DataType
    has_expired: Callable[[Any], bool] | None = None
    metadata: Mapping[bytes, bytes] | None = None
    migrate: Migrate | None = None
    by_batch: bool = False
    expired_ms: Callable[[], int] | None = None

    @property
    def field(self) -> pa.Field:
        """Returns the field of the column in the stored table."""
        return pa.field(self.name, self.column_type, metadata=self.metadata)


class InternalValueState(Protocol):
    """The interface of a state with one Python value for each key. The methods for many keys take references from
    `enter_batch`.
    """

    def get(self, ref: KeyRef) -> Any:
        """Returns the value of a key, or None if it has none."""
        ...

    def put(self, ref: KeyRef, value: Any) -> None:
        """Stores a value, which must not be None, for a key."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Removes the value of a key, if it has one."""
        ...

    def get_many(self, refs: KeyRefs) -> pa.Array:
        """Returns the value of each key as an Arrow array, null where there is none.

        A key may be listed twice. This applies to all methods for many keys.
        """
        ...

    def put_many(self, refs: KeyRefs, values: pa.Array) -> None:
        """Stores a value for each key. Null removes the value.

        If a key is listed several times, its last value is stored. `values` have the type of the column.
        """
        ...

    def remove_many(self, refs: KeyRefs) -> None:
        """Removes the values of these keys, if they have any."""
        ...


class InternalListState(Protocol):
    """The interface of a state with a list of Python values for each key. An empty list is the same as no list."""

    def get(self, ref: KeyRef) -> Collection[Any]:
        """Returns the elements of a key's list, in order. Empty if there is no list.

        The returned object may change with the next call.
        """
        ...

    def extend(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Appends elements to the list of a key. If possible, a backend neither reads nor rewrites the existing
        elements.
        """
        ...

    def put(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Replaces the list of a key."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Removes the list of a key."""
        ...


class InternalMapState(Protocol):
    """The interface of a state with a map of Python values for each key. An empty map is the same as no map."""

    def get(self, ref: KeyRef, map_key: Any) -> Any:
        """Returns the value at a map key in the map of a key, or None if there is none."""
        ...

    def put(self, ref: KeyRef, map_key: Any, value: Any) -> None:
        """Stores one entry in the map of a key."""
        ...

    def discard(self, ref: KeyRef, map_key: Any) -> None:
        """Removes one entry from the map of a key, if it exists."""
        ...

    def items(self, ref: KeyRef) -> Mapping[Any, Any] | Iterable[tuple[Any, Any]]:
        """Returns the entries of the map of a key.

        Their order depends on the backend, and is the same in every run.
        """
        ...

    def remove(self, ref: KeyRef) -> None:
        """Removes the map of a key."""
        ...


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows that `RowTable.find` has found: `refs[i]` refers to a row of the key with the index `keys[i]`. `keys`
    ascends.
    """

    keys: NDArray[np.int64]
    refs: NDArray[Any]


class RowTable(Protocol):
    """The interface of a table with any number of rows for each key."""

    @property
    def rows(self) -> int:
        """Returns the number of rows, or an estimate if the backend does not count them."""
        ...

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Appends a row for each row of `keys` (stored key columns), with the value columns of the table."""
        ...

    def find(self, keys: pa.RecordBatch) -> FoundRows:
        """Returns references to all rows of these keys. The rows of each key are in arrival order.

        A key may be listed several times.
        """
        ...

    def take(self, refs: NDArray[Any], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Returns the rows with these references, in the order of `refs`: all key and value columns, or the columns
        `columns`.
        """
        ...

    def scan(self, columns: Sequence[str], rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """Yields all rows in batches, each with the references to its rows. `columns` names key or value columns.

        The rows of one key are in arrival order. Until the last batch was requested, only `take` and `remove` may be
        called. After another call a row may appear twice.
        """
        ...

    def remove(self, refs: NDArray[Any]) -> None:
        """Removes the rows with these references. Rows that were already removed are ignored."""
        ...

    def done(self) -> None:
        """Ends the batch. References to rows are invalid from now on."""
        ...


@dataclass(frozen=True, slots=True)
class DueTimers:
    """The first timers that are due, in order. Row i of `keys` (stored key columns) is the key of timer i."""

    moments: Sequence[int]
    keys: pa.RecordBatch
    more: bool
    """True if more timers may be due after these."""


class KeyedTimers(Protocol):
    """The timers of one operator in one subtask."""

    def count(self, limit: int) -> int:
        """Returns the number of timers, but at most `limit`, because a backend on disk must read each timer."""
        ...

    def change(
        self, keys: pa.RecordBatch, domains: Sequence[int], moments: Sequence[int], registered: Sequence[bool]
    ) -> None:
        """Registers or deletes timers. If a timer is changed several times, the last change is applied.

        Change i is for the key of row i, in the time domain `domains[i]`, at the time `moments[i]` in ms.
        """
        ...

    def first_ms(self, domain: int) -> int | None:
        """Returns the time, in ms, of the first timer in a time domain, or None if the domain has no timers."""
        ...

    def due(self, domain: int, time_ms: int, timers_max: int) -> DueTimers:
        """Returns the first timers of a time domain up to `time_ms`. If timers are due, at least one is returned. The
        timers stay registered.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateSize:
    """The size of the state in a backend. A field is None if the backend would have to read every row to find it.

    `rows` counts a key with two states twice. With RocksDB, it includes timers and overwritten entries.
    """

    rows: int
    timers: int | None = None
    size_bytes: int | None = None


def duplicate_key(state: str) -> CorruptionError:
    """Returns the CorruptionError for a key that occurs twice in layer 0, the base of a snapshot."""
    return CorruptionError(
        f"state {state!r} holds a key twice: the key groups of the checkpoint's tables overlap; restore another "
        "checkpoint"
    )


def not_bound(state: str, bound: Iterable[str]) -> ConfigurationError:
    """Returns the ConfigurationError for a state in a checkpoint that the program does not bind."""
    return ConfigurationError(
        f"there is no state {state!r}; bound are {sorted(bound)}: bind it, or give the operator a new uid"
    )


def unexpected_columns(state: str, found: pa.Schema, expected: pa.Schema) -> CorruptionError:
    """Returns the CorruptionError for stored rows whose columns differ from the declared columns of the state."""
    return CorruptionError(
        f"stored rows of state {state!r} have columns {columns_text(found)}, but the program expects "
        f"{columns_text(expected)}; restore with the program that wrote them, or give the operator a new uid"
    )


def unexpected_row_columns(state: str, uid: str, found: pa.Schema, expected: pa.Schema) -> ConfigurationError:
    """Returns the ConfigurationError for a row table whose value columns in the checkpoint differ from those in the
    program.
    """
    found_columns, expected_columns = (
        columns_text(field for field in schema if not is_reserved(field.name)) for schema in (found, expected)
    )
    return ConfigurationError(
        f"state {state!r} of operator {uid!r} has rows with columns {found_columns} in the checkpoint, and "
        f"{expected_columns} in the program; give the operator its input columns back, or a new uid"
    )
