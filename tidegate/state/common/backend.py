"""The contract of state backends: what operators use of a backend, by the batch and key by key.

Every backend passes the same contract tests. Rules:
- A backend stores the keyed state of one operator in one subtask, and is used by one thread.
- A state is a table with a row for each key that has the state. It is stored, read and moved between backends as such.
- A batch begins with `enter` (or `VectorTable.upsert`) and ends with `leave` (or `VectorTable.done`). In between the
  backend may keep changes in a working set. Snapshots are taken only after `leave`.
- Values that are put have the declared type. Null means absent.
- A backend may be able to return to a checkpoint (`kept`, `go_back`). Then the task of the next attempt, in the same
  process, continues with it and reads nothing. Operators see what a restore would have given them.
- `freeze` is the synchronous part of a snapshot, and its cost must not grow with the state. Its result does not change
  any more. Another thread encodes it while processing continues.

There are four kinds of state: vectorised tables (`VectorTable`), row tables (`RowTable`), objects (`ValueCells`,
`ListCells`, `MapCells`), and timers (`KeyedTimers`).

Row tables: joins buffer their inputs in them, and so do operators that keep whole rows.
- A row never changes. It is appended, found by its key or by a scan, and removed.
- A row is stored under its key and a number (`ROW_SEQUENCE`), which only grows. Rows of a key are therefore found in
  the order in which they came, also after a restore, and two rows may be equal.
- A ref identifies a row until `done`, whatever is appended, found or removed meanwhile.

Timers: there is one for each key, clock and moment, however often it was registered.
- Registering a timer costs O(log n). A snapshot costs what has changed.
- Due timers come in order of moment, then of key. Values of a key column ascend, then NaN, then null.
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
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.state.snapshot import Cut, FrozenNative, FrozenState, StateTable

KeyRef: TypeAlias = Any
"""How a backend refers to a key within a batch: a slot, or encoded bytes. Valid until `leave`."""
KeyRefs: TypeAlias = NDArray[Any]
"""The refs of many keys, in an array."""
Migrate: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Turns stored rows of one schema into rows of another."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueSpec:
    """A value column of a vectorised table. A new row holds `identity`, also under a null.

    What has no `storage_dtype` (strings, lists, …) begins as null.
    """

    name: str
    data_type: pa.DataType
    identity: int | float = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueSpec):
            return NotImplemented
        # The least of floats begins with NaN, which is not equal to itself.
        both_nan = self.identity != self.identity and other.identity != other.identity
        same = both_nan or self.identity == other.identity
        return same and (self.name, self.data_type) == (other.name, other.data_type)

    def __hash__(self) -> int:
        return hash((self.name, self.data_type))

    @property
    def field(self) -> pa.Field:
        """The field of the column in the stored table."""
        return pa.field(self.name, self.data_type)


class ValueColumn(Protocol):
    """A column of a vectorised table. Kernels change its memory in place between `upsert` and `done`.

    `pages` are addresses of pages of `PAGE_ROWS` values, for `kernels/paged.py`. Without a `storage_dtype`: not used.
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values in the pages: the `storage_dtype` of the spec's type."""
        ...

    @property
    def pages(self) -> NDArray[np.uintp]:
        """Addresses of the pages of values, valid until `done`."""
        ...

    @property
    def valid_pages(self) -> NDArray[np.uintp]:
        """Addresses of the pages of validity (uint8, 1 for a value). Empty if nothing has ever been null."""
        ...

    def track_nulls(self) -> NDArray[np.uintp]:
        """Start to track validity, if that is not done yet. Returns `valid_pages`.

        Existing rows count as valid, rows that are new in this batch as null, until a kernel marks them as valid.
        """
        ...

    def take(self, slots: NDArray[Any]) -> pa.Array:
        """Values of these slots, as an Arrow array of the column's type (a copy)."""
        ...

    def raw(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Values of these slots in `dtype` (a copy). Undefined under a null."""
        ...

    def put(self, slots: NDArray[Any], values: pa.Array) -> None:
        """Set these slots of the batch, each once, from an Arrow array of the column's type."""
        ...

    @property
    def value_bytes(self) -> int:
        """About how many bytes a value takes."""
        ...


class VectorTable(Protocol):
    """A table with a row of values for each key, changed a batch at a time."""

    @property
    def rows(self) -> int:
        """Keys that have a row. An estimate if the backend does not count."""
        ...

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch: returns the slot of each row's key. A key without a row gets one, with the identities.

        `new_rows` are the rows of these new keys; their slots are not always the highest. A column that tracks validity
        has null for them. The values of the slots may change until `done`. In another batch the same slot may mean
        another key. With `new_only` only the slots of new keys may change: no checkpoint has the others as changed.
        """
        ...

    def column(self, name: str) -> ValueColumn:
        """A value column; always the same object."""
        ...

    def remove(self, slots: NDArray[Any]) -> None:
        """Take away the rows of these slots of the batch, the last thing before `done`. A slot may be given twice.

        A key that comes again in a later batch is new.
        """
        ...

    def done(self) -> None:
        """End the batch."""
        ...

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All keys, in batches. `column(...).take` finds the values by the slots, until the next batch is drawn."""
        ...


class NamespacedTable(VectorTable, Protocol):
    """A table of a backend with namespaces: an int64, the first key column, which does not choose the key group."""

    def namespaces(self) -> NDArray[np.int64]:
        """The namespaces that have a row, ascending."""
        ...

    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The keys in a namespace, or those of some key groups, as `scan` gives them. It costs what they are."""
        ...

    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """As `scan_namespace`; the rows of a batch are removed when it is drawn. No key may come in meanwhile."""
        ...

    def scan_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The same for several different namespaces, one after the other. A batch may have keys of several."""
        ...

    def drain_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """As `scan_namespaces`; the rows of a batch are removed when it is drawn. No key may come in meanwhile."""
        ...


class KeyedBackend(Protocol):
    """The keyed state of one operator in one subtask."""

    def fix_keys(self, schema: pa.Schema) -> None:
        """Set the stored key columns. Called once, after all states are bound and before the first key."""
        ...

    def table(self, name: str, columns: Sequence[ValueSpec]) -> VectorTable:
        """A vectorised state. `columns` are its value columns."""
        ...

    def rows(self, name: str, values: pa.Schema) -> RowTable:
        """A state with many rows for each key. `values` are its value columns, at least one, none named as a key.

        The stored table has key columns, `ROW_SEQUENCE`, and these.
        """
        ...

    def retype(self, name: str, columns: Sequence[ValueSpec], migrate: Migrate) -> VectorTable:
        """Replace a vectorised state by one with the same name and other types, and convert its rows.

        Only before the first batch after a restore. Raises what `migrate` raises.
        """
        ...

    def values(self, spec: CellSpec) -> ValueCells:
        """A state with one value for each key."""
        ...

    def lists(self, spec: CellSpec) -> ListCells:
        """A state with a list for each key."""
        ...

    def maps(self, spec: CellSpec) -> MapCells:
        """A state with a map for each key."""
        ...

    @property
    def timers(self) -> KeyedTimers:
        """The timers of this operator: a state like the others, named `TIMERS_STATE`."""
        ...

    def enter(self, keys: pa.RecordBatch) -> Sequence[KeyRef]:
        """Begin a batch of keys (stored key columns): returns the ref of each row's key."""
        ...

    def enter_batch(self, keys: pa.RecordBatch) -> KeyRefs:
        """As `enter`, for values that are read and written by the batch."""
        ...

    def leave(self) -> None:
        """End the batch. Its refs are invalid now."""
        ...

    def sweep(self, keys_max: int) -> None:
        """Remove expired state: look at the next `keys_max` keys (Flink's incremental cleanup).

        The next call goes on where this one ended.
        """
        ...

    def keys(self, state: str, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Keys that have this state, in batches, for functions that visit all keys."""
        ...

    @property
    def size(self) -> StateSize:
        """About how much it holds; asked once a second. Nothing after `close`."""
        ...

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """About how many rows `freeze` would give on that base, and without one. 0 if files are shared."""
        ...

    def freeze(self, cut: Cut) -> Sequence[FrozenState]:
        """All states as they are now. With `cut.base`: only what has changed since that checkpoint."""
        ...

    def freeze_native(self, cut: Cut) -> FrozenNative | None:
        """All states as the backend's own files.

        None if the backend has none, or `cut` is canonical: then `freeze` is called. None also before the first key.
        """
        ...

    def keep(self, checkpoint_id: CheckpointId) -> None:
        """The current state, after a restore, is that of this checkpoint of this job."""
        ...

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """A checkpoint has completed: nobody goes back to an older one."""
        ...

    @property
    def goes_back(self) -> bool:
        """Whether there is a checkpoint that the backend can go back to."""
        ...

    def kept(self, checkpoint_id: CheckpointId) -> Sequence[StateTable] | None:
        """A table without rows for each state, if `go_back` works for this checkpoint; else None. Changes nothing."""
        ...

    def go_back(self, checkpoint_id: CheckpointId) -> None:
        """Restore the state at the freeze for this checkpoint, for which `kept` is not None.

        Afterwards the backend is like one that was opened on files: fix its keys and bind its states again.
        """
        ...

    @property
    def stored_keys(self) -> pa.Schema | None:
        """The key columns that `fix_keys` must give, of the backend's files or of the checkpoint it went back to.

        None for a backend that began empty.
        """
        ...

    def stored_schema(self, state: str) -> pa.Schema | None:
        """Key and value columns of a state that is there without any `load`: from files, or since `go_back`.

        None if there is no such state.
        """
        ...

    def expect(self, keys: int) -> None:
        """A hint: at most so many keys will be loaded in layer 0, so memory can be reserved at once."""
        ...

    def load(self, table: StateTable) -> None:
        """Load a stored table: put its rows, or remove its keys.

        If a key comes twice in layer 0, this or `loaded` raises CorruptionError.
        """
        ...

    def loaded(self) -> None:
        """All stored tables are loaded; no batch has come yet. CorruptionError for a key twice in layer 0."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One state of a row-wise function: its name, and the Arrow type of its column in the stored table.

    A list state has a list type, a map state a map type. `has_expired` tells whether the time to live of a stored value
    is over; for a list or map it gets the value of one element. None: nothing expires. `metadata` is that of the
    column's field. `migrate` converts rows that a backend finds in its own files to the current type. `by_batch`: the
    program reads and writes values by the batch, so they are best kept as columns. `expired_ms` says which values have
    expired then, if any do: those whose `updated_ms`, the last field, is that moment or before.
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
        """The field of the column in the stored table."""
        return pa.field(self.name, self.column_type, metadata=self.metadata)


class ValueCells(Protocol):
    """One Python value for each key. The methods for many keys take what `enter_batch` gave, or some of it."""

    def get(self, ref: KeyRef) -> Any:
        """The value; None where there is none."""
        ...

    def put(self, ref: KeyRef, value: Any) -> None:
        """Set the value, which is not None."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Remove the value, if there is one."""
        ...

    def get_many(self, refs: KeyRefs) -> pa.Array:
        """The value of each key, null where there is none. A key may be given twice, here and below."""
        ...

    def put_many(self, refs: KeyRefs, values: pa.Array) -> None:
        """Set the value of each key, of the column's type; null removes it. The last of several for a key counts."""
        ...

    def remove_many(self, refs: KeyRefs) -> None:
        """Remove the values of these keys."""
        ...


class ListCells(Protocol):
    """A list of Python values for each key. An empty list is the same as none."""

    def get(self, ref: KeyRef) -> Collection[Any]:
        """The values, in order; empty if there are none. They may change with the next call."""
        ...

    def extend(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Append values. Where it can, a backend neither reads nor rewrites the values already there."""
        ...

    def put(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Replace the list."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Remove the list."""
        ...


class MapCells(Protocol):
    """A map of Python values for each key. An empty map is the same as none."""

    def get(self, ref: KeyRef, map_key: Any) -> Any:
        """The value at a map key; None where there is none."""
        ...

    def put(self, ref: KeyRef, map_key: Any, value: Any) -> None:
        """Set one entry."""
        ...

    def discard(self, ref: KeyRef, map_key: Any) -> None:
        """Remove one entry, if it is there."""
        ...

    def items(self, ref: KeyRef) -> Mapping[Any, Any] | Iterable[tuple[Any, Any]]:
        """The current entries, in the backend's own order, which is the same on every run."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Remove the map."""
        ...


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of some keys that were asked for: `refs[i]` is a row of key number `keys[i]`. `keys` ascends."""

    keys: NDArray[np.int64]
    refs: NDArray[Any]


class RowTable(Protocol):
    """Many rows for each key."""

    @property
    def rows(self) -> int:
        """How many rows there are. An estimate if the backend does not count."""
        ...

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Append a row for each row of `keys` (stored key columns), with the value columns of the table."""
        ...

    def find(self, keys: pa.RecordBatch) -> FoundRows:
        """All rows of these keys; of each in the order in which they came. A key may be asked for several times."""
        ...

    def take(self, refs: NDArray[Any], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Rows in the order of `refs`: key and value columns, or those of them that `columns` names."""
        ...

    def scan(self, columns: Sequence[str], rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All rows, in batches with their refs: key or value columns by name. Those of a key in the order they came in.

        Until the last batch is drawn only `take` and `remove` may be called: others may see a row twice.
        """
        ...

    def remove(self, refs: NDArray[Any]) -> None:
        """Remove rows. One that is gone already stays gone."""
        ...

    def done(self) -> None:
        """End the batch: refs are invalid from now on."""
        ...


@dataclass(frozen=True, slots=True)
class DueTimers:
    """The first due timers, in order. Row i of `keys` (stored key columns) is the key of timer i."""

    moments: Sequence[int]
    keys: pa.RecordBatch
    more: bool
    """Whether more timers may be due after these."""


class KeyedTimers(Protocol):
    """The timers of one operator in one subtask."""

    def count(self, limit: int) -> int:
        """The number of timers, but at most `limit`: a backend on disk must look at each."""
        ...

    def change(
        self, keys: pa.RecordBatch, domains: Sequence[int], moments: Sequence[int], registered: Sequence[bool]
    ) -> None:
        """Register or delete timers. If one timer is changed several times, the last change counts.

        Change i is for the key of row i, the clock `domains[i]` and the moment `moments[i]`.
        """
        ...

    def first_ms(self, domain: int) -> int | None:
        """The moment of a clock's first timer; None without one."""
        ...

    def due(self, domain: int, time_ms: int, timers_max: int) -> DueTimers:
        """A clock's first timers up to a moment, at least one if any is due. They stay registered."""
        ...


@dataclass(frozen=True, slots=True)
class StateSize:
    """`rows`: a key that has two states counts twice, and in RocksDB timers and what is overwritten count as well.

    None: the backend would have to look at each row to tell.
    """

    rows: int
    timers: int | None = None
    size_bytes: int | None = None


def held_twice(state: str) -> CorruptionError:
    """A key came twice in layer 0 of a checkpoint."""
    return CorruptionError(f"state {state!r} holds a key twice: the key groups of the checkpoint's tables overlap")


def not_bound(state: str, bound: Iterable[str]) -> ConfigurationError:
    """The program has no such state."""
    return ConfigurationError(
        f"there is no state {state!r}; bound are {sorted(bound)}: bind it, or give the operator a new uid"
    )


def strange_columns(state: str, found: pa.Schema, expected: pa.Schema) -> CorruptionError:
    """Stored rows have other columns than the state."""
    return CorruptionError(
        f"stored rows of state {state!r} have columns {columns_text(found)}, but the program expects "
        f"{columns_text(expected)}; restore with the program that wrote them, or give the operator a new uid"
    )


def strange_rows(state: str, uid: str, found: pa.Schema, expected: pa.Schema) -> ConfigurationError:
    """A row table in a checkpoint has other value columns than in the program."""
    return ConfigurationError(
        f"state {state!r} of operator {uid!r} has rows with columns {columns_text(found)} in the checkpoint, and "
        f"{columns_text(expected)} in the program; give the operator its input columns back, or a new uid"
    )
